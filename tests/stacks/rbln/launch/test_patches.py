"""An overlay holds the whole patch, installed files stay as they are, and what is not as recorded is refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import SpecError
from harness.extras.twin.environment import TwinEnvironment
from harness.stacks.rbln.launch.patches import (
    Patch,
    make_overlay,
    patch_status,
    patched_text,
    require_pristine,
    shipped_patches,
    tree_sha256,
)

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
AFTER = patched_text(DIFF, TARGET, BEFORE)


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
    monkeypatch.setattr("harness.stacks.rbln.launch.patches.PATCH_ROOTS", (tmp_path / "patches",))
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
    with pytest.raises(
        SpecError, match=r"the overlay was changed since it was made. Delete it; the next run makes it again"
    ):
        make_overlay(site_packages, tmp_path / "overlays")


def test_an_overlay_can_be_made_of_read_only_files(site_packages: Path, tmp_path: Path) -> None:
    (site_packages / TARGET).chmod(0o444)
    assert (make_overlay(site_packages, tmp_path / "overlays").path / TARGET).read_text() == AFTER


def test_an_overlay_of_a_package_that_somebody_patched_is_refused(site_packages: Path, tmp_path: Path) -> None:
    (site_packages / TARGET).write_text(AFTER)
    assert patch_status(site_packages).state == "patched"
    with pytest.raises(SpecError, match=r"is patched, not pristine.* It was patched by hand; reinstall: pip install"):
        make_overlay(site_packages, tmp_path / "overlays")


def test_a_changed_file_is_refused_with_what_was_found_and_what_to_do(site_packages: Path, tmp_path: Path) -> None:
    (site_packages / TARGET).write_text(BEFORE + "\n")
    assert patch_status(site_packages).state == "unknown"
    with pytest.raises(SpecError) as refusal:
        make_overlay(site_packages, tmp_path / "overlays")
    assert f"SHA-256 {_sha256(BEFORE + chr(10))[:16]}" in str(refusal.value)
    assert "pip install --force-reinstall --no-deps vllm-rbln==0.11.1" in str(refusal.value)
    assert not (tmp_path / "overlays").exists()
    assert (site_packages / TARGET).read_text() == BEFORE + "\n"


def test_a_version_without_a_patch_is_refused_naming_those_that_have_one(site_packages: Path) -> None:
    (site_packages / "vllm_rbln-0.11.1.dist-info").rename(site_packages / "vllm_rbln-0.99.0.dist-info")
    (site_packages / TARGET).write_text("# another file\n")
    with pytest.raises(SpecError, match=r"vllm-rbln 0\.99\.0.*Patches exist for vllm-rbln 0\.11\.1; install one"):
        require_pristine(patch_status(site_packages))


def test_a_package_that_is_not_there_is_said_to_be_absent(tmp_path: Path, site_packages: Path) -> None:
    assert patch_status(tmp_path / "nowhere").state == "absent"
    del site_packages


def test_a_tampered_patch_is_refused(site_packages: Path, tmp_path: Path) -> None:
    path = tmp_path / "patches" / "vllm_rbln-0.11.1" / "bucket_log.patch"
    path.write_text(DIFF.replace("n, b)", "b, n)"))
    with pytest.raises(SpecError, match=r"bucket_log.patch: SHA-256 is .*Restore the patch from the release"):
        make_overlay(site_packages, tmp_path / "overlays")
    assert not (tmp_path / "overlays").exists()


def test_a_patch_that_acts_is_refused_although_all_its_hashes_agree(
    tmp_path: Path, site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diff = DIFF.replace(
        '    logger.debug("[BUCKET] request_nums=%d padded_batch_size=%d", n, b)', "    b = buckets[-1]"
    )
    _release(tmp_path / "evil" / "vllm_rbln-0.11.1", diff, patched_text(diff, TARGET, BEFORE))
    monkeypatch.setattr("harness.stacks.rbln.launch.patches.PATCH_ROOTS", (tmp_path / "evil",))
    with pytest.raises(SpecError, match=r"bucket_log.patch line 8: adds or changes 'b = buckets\[-1\]'"):
        make_overlay(site_packages, tmp_path / "overlays")
    assert not (tmp_path / "overlays").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("@@ -7,2 +7,3 @@", "@@ -6,2 +6,3 @@", "line 6 is 'def choose"),
        ("@@ -7,2 +7,3 @@", "@@ -8,2 +8,3 @@", "line 8 is '    return b', the patch expects '    b = min"),
        ("@@ -7,2 +7,3 @@", "@@ -9,2 +9,3 @@", "line 9 is 'the end of the file'"),
        ("@@ -7,2 +7,3 @@", "@@ -7,3 +7,4 @@", "not a unified diff .Hunk is shorter"),
        ("     return b\n", "     return c\n", "the patch expects '    return c'"),
        (f"--- a/{TARGET}", "--- a/../../etc/passwd", "changes "),
        (f"+++ b/{TARGET}", "+++ b/vllm_rbln/other.py", "changes vllm_rbln/other.py"),
        ("--- a/", "*** a/", "not a unified diff .Target without source"),
    ],
)
def test_a_diff_that_does_not_fit_exactly_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        patched_text(DIFF.replace(old, new), TARGET, BEFORE)


def test_form_feeds_and_carriage_returns_are_not_line_ends() -> None:
    text = "a\x0cb\r\nc\n"
    diff = "--- a/x.py\n+++ b/x.py\n@@ -2 +2,2 @@\n c\n+d\n"
    assert patched_text(diff, "x.py", text) == "a\x0cb\r\nc\nd\n"


def test_every_shipped_patch_is_the_file_its_manifest_names() -> None:
    patches = shipped_patches()
    assert {version for patch in patches for version in patch.versions} >= {"0.11.0", "0.11.1", "0.11.2", "0.12.0"}
    for patch in patches:
        assert patch.text().startswith(f"--- a/{patch.target}\n+++ b/{patch.target}\n@@ ")
        assert not [line for line in patch.text().splitlines()[2:] if line.startswith("-")]


def test_a_broken_manifest_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "vllm_rbln-1").mkdir()
    (tmp_path / "vllm_rbln-1" / "manifest.toml").write_text('package = "vllm_rbln"\n')
    with pytest.raises(SpecError, match=r"manifest.toml: is not a patch manifest"):
        shipped_patches(tmp_path)


def test_the_real_package_is_pristine_and_its_overlay_differs_in_one_file(
    twin: TwinEnvironment, tmp_path: Path
) -> None:
    patch: Patch = require_pristine(patch_status(twin.site_packages))
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
