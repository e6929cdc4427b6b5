"""A second twin links what both have, keeps apart what only one has, and names its own interpreter."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import pytest

from harness.errors import ServerError
from harness.stack.rbln.launch.twin.environment import STAMP_FILE, TwinEnvironment, TwinStack, stack_named
from harness.stack.rbln.launch.twin.install import check_released_files, link_shared, twin_to_share

SITE = Path("lib/python3.11/site-packages")
LOCK = "vllm-rbln==1.0 \\\n    --hash=sha256:0\n"


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def donor(tmp_path: Path) -> TwinEnvironment:
    """An environment with a package that every release has, and one of its own release."""
    folder = tmp_path / "donor"
    site = folder / SITE
    for name in ("torch/core.py", "torch/__pycache__/core.cpython-311.pyc", "vllm_rbln/__init__.py"):
        write(site / name, name)
    write(site / "vllm_rbln/__pycache__/__init__.cpython-311.pyc")
    write(site / "rebel_compiler-1.0.dist-info/METADATA")
    write(site / "vllm_rbln-1.0.dist-info/RECORD", "vllm_rbln/__init__.py,,\n../../../bin/rbln,,\n")
    for script in ("torchrun", "rbln"):
        write(folder / "bin" / script, f"#!{folder}/bin/python\nprint()\n").chmod(0o755)
    return TwinEnvironment(folder, {})


@pytest.fixture
def other(donor: TwinEnvironment, tmp_path: Path) -> Path:
    """A fresh environment beside it, linked."""
    where = tmp_path / "other"
    (where / SITE).mkdir(parents=True)
    (where / "bin").mkdir()
    link_shared(donor, TwinStack("1.0", write(tmp_path / "own.lock", LOCK)), where)
    return where


def test_packages_that_both_have_are_the_same_files_with_their_compiled_caches(
    donor: TwinEnvironment, other: Path
) -> None:
    for name in ("torch/core.py", "torch/__pycache__/core.cpython-311.pyc"):
        assert (other / SITE / name).samefile(donor.site_packages / name)


def test_nothing_of_a_releases_own_packages_nor_the_stand_in_is_taken_over(other: Path) -> None:
    names = {str(path.relative_to(other)) for path in other.rglob("*") if path.is_file()}
    assert names == {f"{SITE}/torch/core.py", f"{SITE}/torch/__pycache__/core.cpython-311.pyc", "bin/torchrun"}


def test_a_script_starts_the_interpreter_of_its_own_environment(other: Path) -> None:
    script = other / "bin" / "torchrun"
    assert script.read_text() == f"#!{other}/bin/python\nprint()\n"
    assert script.stat().st_mode & 0o111


def test_a_twin_of_older_locks_or_of_another_interpreter_shares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.stack.rbln.launch.twin.environment.twin_root", lambda: tmp_path)
    stack = stack_named("0.12.0")
    stamp = {"complete": True, "versions": {"vllm-rbln": stack.version}, "python": "/usr/bin/python3.11"}
    path = tmp_path / ".venv-twin-0.12.0" / STAMP_FILE
    write(path, json.dumps({**stamp, "locks_sha256": "of an older lock"}))
    assert twin_to_share(None) is None
    write(path, json.dumps({**stamp, "locks_sha256": stack.locks_sha256}))
    assert twin_to_share("/usr/bin/python3.12") is None
    found = twin_to_share(None)
    assert found is not None
    assert found.folder == path.parent


def test_a_file_of_the_stack_that_is_not_the_released_one_is_named(donor: TwinEnvironment) -> None:
    module = donor.site_packages / "vllm_rbln/__init__.py"
    digest = base64.urlsafe_b64encode(hashlib.sha256(module.read_bytes()).digest()).decode().rstrip("=")
    write(module.parents[1] / "vllm_rbln-1.0.dist-info/RECORD", f"vllm_rbln/__init__.py,sha256={digest},18\nRECORD,,\n")
    assert check_released_files(donor) == 1
    module.write_text("changed")
    with pytest.raises(ServerError, match=r"__init__\.py is not the released file"):
        check_released_files(donor)
    module.unlink()
    with pytest.raises(ServerError, match="cannot be read"):
        check_released_files(donor)
