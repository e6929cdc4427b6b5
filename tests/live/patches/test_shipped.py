"""Patches are applied whole or not at all, reverted to the byte, and refused wherever anything is not as recorded."""

from __future__ import annotations

import hashlib
import json
import os
import py_compile
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import ServerError, SpecError
from harness.live.patches.diff import parse_diff
from harness.live.patches.install import apply_in_place, in_place_record, revert_in_place
from harness.live.patches.shipped import (
    Patch,
    backup_path,
    make_overlay,
    partial_path,
    patch_status,
    require_state,
    shipped_patches,
    tree_sha256,
)
from harness.twin.environment import TwinEnvironment

TARGET = "vllm_rbln/models/base.py"
BEFORE = """\
import logging

logger = logging.getLogger(__name__)


def choose(n, buckets):
    b = min(x for x in buckets if x >= n)
    return b
"""
DIFF = f"""\
--- a/{TARGET}
+++ b/{TARGET}
@@ -7,2 +7,3 @@
     b = min(x for x in buckets if x >= n)
+    logger.debug("[BUCKET] request_nums=%d padded_batch_size=%d", n, b)
     return b
"""
AFTER = parse_diff(DIFF).apply(BEFORE)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _release(folder: Path, diff: str = DIFF, after: str = AFTER) -> None:
    """A release's patch folder for the little package of these tests."""
    folder.mkdir(parents=True)
    (folder / "bucket_log.patch").write_text(diff)
    (folder / "manifest.toml").write_text(
        f"""package = "vllm_rbln"
versions = ["0.11.1"]
[[patch]]
name = "bucket_log"
file = "bucket_log.patch"
target = "{TARGET}"
observes = "n and b"
sha256_before = "{_sha256(BEFORE)}"
sha256_patch = "{_sha256(diff)}"
sha256_after = "{_sha256(after)}"
"""
    )


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed little vllm_rbln 0.11.1, and a release whose one patch fits it."""
    _release(tmp_path / "patches" / "vllm_rbln-0.11.1")
    monkeypatch.setattr("harness.live.patches.shipped.PATCH_ROOTS", (tmp_path / "patches",))
    site = tmp_path / "site-packages"
    (site / "vllm_rbln-0.11.1.dist-info").mkdir(parents=True)
    target = site / TARGET
    target.parent.mkdir(parents=True)
    (site / "vllm_rbln" / "__init__.py").touch()
    (target.parent / "__init__.py").touch()
    target.write_text(BEFORE)
    return site


def _tree(site: Path) -> dict[str, tuple[bytes, int, int]]:
    """Every file with content, mode and time."""
    return {
        str(path.relative_to(site)): (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns)
        for path in sorted(site.rglob("*"))
        if path.is_file()
    }


def _chosen_with(path: Path) -> str:
    """What a fresh interpreter logs when ``path`` comes first."""
    code = "import logging; logging.basicConfig(level=10); from vllm_rbln.models.base import choose; choose(3, [1, 4])"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=True,
    ).stderr


def test_an_overlay_shadows_the_package_and_leaves_every_installed_file_as_it_was(
    site_packages: Path, tmp_path: Path
) -> None:
    before = _tree(site_packages)
    overlay = make_overlay(site_packages, tmp_path / "overlays")
    paths = Path(f"{overlay.path}{os.pathsep}{site_packages}")
    assert "[BUCKET] request_nums=3 padded_batch_size=4" in _chosen_with(paths)
    assert "[BUCKET]" not in _chosen_with(site_packages)
    assert {name: content for name, content in _tree(site_packages).items() if "__pycache__" not in name} == before
    assert (overlay.path / TARGET).read_text() == AFTER
    assert overlay.to_json()["sha256_after"] == _sha256(AFTER)


def test_an_overlay_is_made_once_and_used_again(site_packages: Path, tmp_path: Path) -> None:
    first = make_overlay(site_packages, tmp_path / "overlays")
    before = _tree(first.path)
    assert make_overlay(site_packages, tmp_path / "overlays") == first
    assert _tree(first.path) == before
    assert [path.name for path in (tmp_path / "overlays").iterdir()] == [first.path.name]


def test_another_file_of_the_package_that_changed_gets_an_overlay_of_its_own(
    site_packages: Path, tmp_path: Path
) -> None:
    first = make_overlay(site_packages, tmp_path / "overlays")
    (site_packages / "vllm_rbln" / "__init__.py").write_text("# reinstalled\n")
    second = make_overlay(site_packages, tmp_path / "overlays")
    assert second.path != first.path
    assert (second.path / "vllm_rbln" / "__init__.py").read_text() == "# reinstalled\n"


def test_an_overlay_that_somebody_edited_is_refused(site_packages: Path, tmp_path: Path) -> None:
    overlay = make_overlay(site_packages, tmp_path / "overlays")
    (overlay.path / "vllm_rbln" / "__init__.py").write_text("import os\n")
    with pytest.raises(SpecError, match=r"the overlay was changed since it was made. Delete it; it is made again"):
        make_overlay(site_packages, tmp_path / "overlays")


def test_an_overlay_can_be_made_of_read_only_files(site_packages: Path, tmp_path: Path) -> None:
    (site_packages / TARGET).chmod(0o444)
    assert (make_overlay(site_packages, tmp_path / "overlays").path / TARGET).read_text() == AFTER


def test_in_place_and_back_leaves_no_difference_at_all(site_packages: Path) -> None:
    target = site_packages / TARGET
    target.chmod(0o640)
    os.utime(target, ns=(1_600_000_000_000_000_000, 1_600_000_000_123_456_789))
    before = _tree(site_packages)
    apply_in_place(site_packages)
    assert target.read_text() == AFTER
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert in_place_record(site_packages)["sha256_before"] == _sha256(BEFORE)
    assert revert_in_place(site_packages) == "the original is restored"
    assert _tree(site_packages) == before


def test_a_lost_backup_is_no_loss(site_packages: Path) -> None:
    apply_in_place(site_packages)
    backup_path(site_packages / TARGET).unlink()
    revert_in_place(site_packages)
    assert (site_packages / TARGET).read_text() == BEFORE


def test_a_damaged_backup_is_not_restored_from(site_packages: Path) -> None:
    apply_in_place(site_packages)
    backup_path(site_packages / TARGET).write_text("half of")
    revert_in_place(site_packages)
    assert (site_packages / TARGET).read_text() == BEFORE
    assert not backup_path(site_packages / TARGET).exists()


def test_a_file_that_others_share_by_a_hard_link_is_not_changed_for_them(site_packages: Path, tmp_path: Path) -> None:
    shared = tmp_path / "cache.py"
    os.link(site_packages / TARGET, shared)
    apply_in_place(site_packages)
    assert shared.read_text() == BEFORE


def test_old_bytecode_does_not_outlive_the_edit(site_packages: Path) -> None:
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(site_packages / TARGET), invalidation_mode=unchecked)
    cache = site_packages / "vllm_rbln" / "models" / "__pycache__"
    assert list(cache.glob("base.*.pyc"))
    apply_in_place(site_packages)
    assert not list(cache.glob("base.*.pyc"))
    assert "[BUCKET]" in _chosen_with(site_packages)


def test_a_second_apply_says_what_is_there(site_packages: Path) -> None:
    apply_in_place(site_packages)
    with pytest.raises(
        SpecError, match=r"is patched, not pristine: vllm-rbln 0.11.1, .* `harness patch revert` restores"
    ):
        apply_in_place(site_packages)


def test_an_overlay_of_a_package_patched_in_place_is_refused(site_packages: Path, tmp_path: Path) -> None:
    apply_in_place(site_packages)
    with pytest.raises(SpecError, match="is patched, not pristine"):
        make_overlay(site_packages, tmp_path / "overlays")


def test_a_changed_file_is_refused_with_what_was_found_and_what_to_do(site_packages: Path, tmp_path: Path) -> None:
    (site_packages / TARGET).write_text(BEFORE + "\n")
    status = patch_status(site_packages)
    assert status.state == "unknown"
    with pytest.raises(SpecError) as refusal:
        make_overlay(site_packages, tmp_path / "overlays")
    assert f"SHA-256 {_sha256(BEFORE + chr(10))[:16]}" in str(refusal.value)
    assert "pip install --force-reinstall --no-deps vllm-rbln==0.11.1" in str(refusal.value)
    assert not (tmp_path / "overlays").exists()
    with pytest.raises(SpecError, match="is unknown, not pristine"):
        apply_in_place(site_packages)
    with pytest.raises(SpecError, match="is unknown, not patched"):
        revert_in_place(site_packages)
    assert (site_packages / TARGET).read_text() == BEFORE + "\n"


def test_a_version_without_a_patch_is_refused_naming_those_that_have_one(site_packages: Path) -> None:
    (site_packages / "vllm_rbln-0.11.1.dist-info").rename(site_packages / "vllm_rbln-0.99.0.dist-info")
    (site_packages / TARGET).write_text("# another file\n")
    with pytest.raises(SpecError, match=r"vllm-rbln 0\.99\.0.*Patches exist for vllm-rbln 0\.11\.1; install one"):
        require_state(patch_status(site_packages), "pristine")


def test_a_package_that_is_not_there_is_said_to_be_absent(tmp_path: Path, site_packages: Path) -> None:
    assert patch_status(tmp_path / "nowhere").state == "absent"
    del site_packages


@pytest.mark.parametrize("leftover", [backup_path, partial_path])
def test_an_interrupted_edit_is_seen_and_cleared(site_packages: Path, leftover: object) -> None:
    assert callable(leftover)
    left: Path = leftover(site_packages / TARGET)
    left.write_text("some")
    status = patch_status(site_packages)
    assert status.state == "half-applied"
    with pytest.raises(SpecError, match=r"is half-applied, not pristine.*harness patch revert"):
        apply_in_place(site_packages)
    assert "interrupted edit was cleared" in revert_in_place(site_packages)
    assert patch_status(site_packages).state == "pristine"
    assert not left.exists()


# Runs one command on an installed package and kills itself, as SIGKILL would, just before its Nth change to the folder.
KILLED = """
import os, signal, sys
from pathlib import Path
import harness.live.patches.shipped
from harness.live.patches.install import apply_in_place, revert_in_place
site, patches, command, kill_at = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
harness.live.patches.shipped.PATCH_ROOTS = (patches,)
seen = 0
def on_event(event, details):
    global seen
    changes = event in ("os.rename", "os.remove", "os.chmod", "shutil.copyfile") or (
        event == "open" and isinstance(details[2], int) and details[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    )
    if changes and str(details[0]).startswith(str(site)):
        if seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1
sys.addaudithook(on_event)
{"apply": apply_in_place, "revert": revert_in_place}[command](site)
"""


def _killed_at(site: Path, command: str, kill_at: int) -> int:
    patches = site.parent / "patches"
    words = [sys.executable, "-c", KILLED, str(site), str(patches), command, str(kill_at)]
    return subprocess.run(words, check=False).returncode


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_a_kill_at_any_moment_leaves_a_whole_file_and_a_state_that_revert_clears(
    site_packages: Path, command: str
) -> None:
    target = site_packages / TARGET
    before = _tree(site_packages)
    states: list[str] = []
    for kill_at in range(100):
        if command == "revert":
            apply_in_place(site_packages)
        returncode = _killed_at(site_packages, command, kill_at)
        status = patch_status(site_packages)
        assert target.read_text() in (BEFORE, AFTER), kill_at
        assert status.state in ("pristine", "half-applied", "patched"), kill_at
        if status.state == "half-applied":
            # Neither a run nor another apply takes it for something it is not.
            with pytest.raises(SpecError, match=r"is half-applied, not pristine: .*`harness patch revert` clears it"):
                apply_in_place(site_packages)
        revert_in_place(site_packages)
        after = _tree(site_packages)
        assert {name: one[:2] for name, one in after.items()} == {name: one[:2] for name, one in before.items()}
        states.append(status.state)
        if returncode == 0:
            break
        assert returncode == -signal.SIGKILL
    # Reverting is one rename of the backup: there is no state in between.
    assert set(states) == {"apply": {"pristine", "half-applied", "patched"}, "revert": {"patched", "pristine"}}[command]


def test_a_file_with_part_of_the_patch_is_half_applied_and_never_touched(site_packages: Path) -> None:
    mixed = AFTER.replace("return b\n", "return b + 0\n")
    (site_packages / TARGET).write_text(mixed)
    assert patch_status(site_packages).state == "half-applied"
    with pytest.raises(SpecError, match="holds part of a patch; reinstall"):
        revert_in_place(site_packages)
    assert (site_packages / TARGET).read_text() == mixed


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused_with_the_overlay_as_the_way_out(site_packages: Path) -> None:
    folder = (site_packages / TARGET).parent
    folder.chmod(0o555)
    try:
        with pytest.raises(ServerError, match=r"cannot be written .*Use the overlay"):
            apply_in_place(site_packages)
    finally:
        folder.chmod(0o755)
    assert patch_status(site_packages).state == "pristine"


def test_a_tampered_patch_is_refused(site_packages: Path, tmp_path: Path) -> None:
    path = tmp_path / "patches" / "vllm_rbln-0.11.1" / "bucket_log.patch"
    path.write_text(DIFF.replace("n, b)", "b, n)"))
    with pytest.raises(SpecError, match=r"bucket_log.patch: SHA-256 is .*Restore the patch from the release"):
        apply_in_place(site_packages)
    assert (site_packages / TARGET).read_text() == BEFORE


def test_a_patch_that_acts_is_refused_although_all_its_hashes_agree(
    tmp_path: Path, site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diff = DIFF.replace(
        '    logger.debug("[BUCKET] request_nums=%d padded_batch_size=%d", n, b)', "    b = buckets[-1]"
    )
    _release(tmp_path / "evil" / "vllm_rbln-0.11.1", diff, parse_diff(diff).apply(BEFORE))
    monkeypatch.setattr("harness.live.patches.shipped.PATCH_ROOTS", (tmp_path / "evil",))
    with pytest.raises(SpecError, match=r"bucket_log.patch line 8: adds or changes 'b = buckets\[-1\]'"):
        make_overlay(site_packages, tmp_path / "overlays")
    assert not (tmp_path / "overlays").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("@@ -7,2 +7,3 @@", "@@ -6,2 +6,3 @@", "line 6 is 'def choose"),
        ("@@ -7,2 +7,3 @@", "@@ -8,2 +8,3 @@", "the end of the file|line 8 is"),
        ("@@ -7,2 +7,3 @@", "@@ -7,3 +7,4 @@", "cut short"),
        ("@@ -7,2 +7,3 @@", "@@ -7 +7,2 @@", "not a hunk header"),
        ("     return b\n", "     return c\n", "the patch expects '    return c'"),
        (f"--- a/{TARGET}", "--- a/../../etc/passwd", "not one file"),
        ("--- a/", "*** a/", "does not start with"),
    ],
)
def test_a_diff_that_does_not_fit_exactly_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_diff(DIFF.replace(old, new)).apply(BEFORE)


def test_a_diff_can_be_taken_back_and_knows_a_missing_last_newline() -> None:
    diff = parse_diff(DIFF.replace("     return b\n", "     return b\n\\ No newline at end of file\n"))
    text = BEFORE.removesuffix("\n")
    assert diff.apply(text) == AFTER.removesuffix("\n")
    assert diff.revert(diff.apply(text)) == text


def test_form_feeds_and_carriage_returns_are_not_line_ends() -> None:
    text = "a\x0cb\r\nc\n"
    diff = parse_diff("--- a/x.py\n+++ b/x.py\n@@ -2 +2,2 @@\n c\n+d\n")
    assert diff.apply(text) == "a\x0cb\r\nc\nd\n"


def test_every_shipped_patch_is_the_file_its_manifest_names() -> None:
    patches = shipped_patches()
    assert {version for patch in patches for version in patch.versions} >= {"0.11.0", "0.11.1", "0.11.2", "0.12.0"}
    for patch in patches:
        diff = parse_diff(patch.text())
        assert diff.target == patch.target
        assert all(mark != "-" for hunk in diff.hunks for mark, _ in hunk.lines)


def test_a_broken_manifest_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "vllm_rbln-1").mkdir()
    (tmp_path / "vllm_rbln-1" / "manifest.toml").write_text('package = "vllm_rbln"\n')
    with pytest.raises(SpecError, match=r"manifest.toml: is not a patch manifest"):
        shipped_patches(tmp_path)


def test_the_real_package_is_pristine_and_its_overlay_differs_in_one_file(
    twin: TwinEnvironment, tmp_path: Path
) -> None:
    patch: Patch = require_state(patch_status(twin.site_packages), "pristine")
    before = tree_sha256(twin.site_packages / "vllm_rbln")
    overlay = make_overlay(twin.site_packages, tmp_path)
    changed = [
        path.relative_to(overlay.path).as_posix()
        for path in (overlay.path / "vllm_rbln").rglob("*")
        if path.is_file() and path.read_bytes() != (twin.site_packages / path.relative_to(overlay.path)).read_bytes()
    ]
    assert changed == [patch.target]
    assert tree_sha256(twin.site_packages / "vllm_rbln") == before
    assert json.loads((overlay.path / "overlay.json").read_text())["tree_sha256"] == before
