"""Set-up on a bare machine: which Python, which index, and when nothing is to be done."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pip
import pytest

from tests.support.checkout import ROOT
from tests.support.raw_server import Asked, RawServer, Reply, whole

BOOTSTRAP = ROOT / "tools" / "bootstrap.py"


@pytest.fixture
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", BOOTSTRAP)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def locked_names(lock: Path) -> set[str]:
    return {line.partition("==")[0] for line in lock.read_text().splitlines() if "==" in line.partition(";")[0]}


def wanted_names(requirements: Path) -> set[str]:
    lines = [line.partition("#")[0].strip() for line in requirements.read_text().splitlines()]
    return {re.split(r"[<>=~! ;\[]", line)[0] for line in lines if line and not line.startswith("-r")}


def test_an_old_python_can_read_the_script_that_refuses_it() -> None:
    ast.parse(BOOTSTRAP.read_text(), feature_version=(3, 6))


def test_an_unsupported_python_named_by_hand_is_one_line(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 18))
    with pytest.raises(
        SystemExit, match=r"^set-up: Python 3\.9 .* is not supported: 3\.10 to 3\.13 are\. Name another"
    ):
        bootstrap.use_a_supported_python(False)


def test_the_locks_hold_every_requirement_with_hashes() -> None:
    runtime, dev = ROOT / "requirements.lock", ROOT / "requirements-dev.lock"
    assert wanted_names(ROOT / "requirements.in") <= locked_names(runtime)
    assert locked_names(runtime) | wanted_names(ROOT / "requirements-dev.in") <= locked_names(dev)
    for lock in (runtime, dev):
        blocks = re.split(r"\n(?=\S)", lock.read_text().strip())
        assert all("--hash=sha256:" in block for block in blocks)


def test_every_dependency_of_the_package_is_locked() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = text.partition("dependencies = [")[2].partition("]")[0]
    assert {re.split(r"[<>=; ]", name)[0] for name in re.findall(r'"([^"]+)"', block)} <= locked_names(
        ROOT / "requirements.lock"
    )


def test_the_index_is_the_one_pip_is_configured_for(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_CONFIG_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "pip.conf").write_text("[global]\nindex-url = https://example.org/a%20b/simple\n")
    assert bootstrap.pip_index() == "https://example.org/a%20b/simple"
    named = tmp_path / "named.conf"
    named.write_text("[global]\nindex-url = https://example.org/named\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(named))
    assert bootstrap.pip_index() == "https://example.org/named"
    monkeypatch.setenv("PIP_INDEX_URL", "https://example.org/variable")
    assert bootstrap.pip_index() == "https://example.org/variable"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the project ``pip`` on a package index of our own."""
    folder = tmp_path / "simple" / "pip"
    folder.mkdir(parents=True)

    def answer(asked: Asked) -> Reply:
        path = tmp_path / asked.path.removeprefix("/")
        return Reply([whole((path / "index.html" if path.is_dir() else path).read_bytes())])

    with RawServer(answer) as server:
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple/")
        monkeypatch.setenv("no_proxy", server.host)
        yield folder


def test_a_wheel_is_taken_only_when_it_is_the_pinned_one(
    bootstrap: ModuleType, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"not pip"
    (index / bootstrap.PIP_WHEEL).write_bytes(content)
    (index / "index.html").write_text(f'<a href="./{bootstrap.PIP_WHEEL}#sha256=0">pip</a>')
    with pytest.raises(SystemExit, match="has an unexpected SHA-256"):
        bootstrap.fetch_pip_wheel()
    monkeypatch.setattr(bootstrap, "PIP_SHA256", hashlib.sha256(content).hexdigest())
    assert bootstrap.fetch_pip_wheel() == content


def test_an_index_without_the_pinned_wheel_is_one_line(bootstrap: ModuleType, index: Path) -> None:
    (index / "index.html").write_text('<a href="./pip-1.0-py3-none-any.whl">pip</a>')
    with pytest.raises(SystemExit, match=r"does not offer pip-.*sudo apt install python3 python3-venv$"):
        bootstrap.fetch_pip_wheel()


def test_an_environment_that_already_holds_the_lock_is_left_alone(bootstrap: ModuleType, tmp_path: Path) -> None:
    held = {
        "python": os.path.realpath(sys.executable),
        "version": list(sys.version_info[:2]),
        "root": str(ROOT),
        "runtime": bootstrap.digest(bootstrap.LOCKS["runtime"]),
    }
    marker = tmp_path / bootstrap.MARKER
    marker.write_text(json.dumps(held))
    before = marker.stat().st_mtime_ns
    done = subprocess.run(
        [sys.executable, str(BOOTSTRAP), "runtime", "--venv", str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert done.stdout + done.stderr == ""
    assert marker.stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == [bootstrap.MARKER]


def test_no_index_is_known_where_pip_is_set_to_none(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "absent.conf"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.setattr(bootstrap, "MACHINE_SETTINGS", str(tmp_path / "absent.conf"))
    with pytest.raises(SystemExit, match=r"^set-up: this Python has neither ensurepip nor pip, .*sudo apt install"):
        bootstrap.fetch_pip_wheel()


def test_pip_installs_where_uv_cannot_be_had(tmp_path: Path) -> None:
    """No index at all, so not even uv: what pip finds in a folder is installed, and one line says so.

    The pip is the one of this environment, which takes most of the time to install: each set-up of a checkout does it.
    """
    wheel = tmp_path / "wheels" / "small-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with ZipFile(wheel, "w") as archive:
        archive.writestr("small.py", "SIZE = 1\n")
        archive.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
        archive.writestr("small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("small-1.0.dist-info/RECORD", "")
    lock = tmp_path / "small.lock"
    lock.write_text(f"small==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    script = f"""
import sys
sys.path.insert(0, {str(BOOTSTRAP.parent)!r})
import bootstrap
from pathlib import Path
venv = Path({str(tmp_path / "venv")!r})
bootstrap.make_environment(venv)
next(venv.glob("lib/*/site-packages")).joinpath("pip").symlink_to({str(Path(pip.__file__).parent)!r})
bootstrap.provide_pip(venv)
bootstrap.install(venv, ["--require-hashes", "-r", {str(lock)!r}])
"""
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent), "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | settings, check=True, capture_output=True, text=True
    )
    assert "uv failed; pip installs the packages" in done.stdout
    found = [str(tmp_path / "venv" / "bin" / "python"), "-c", "import small; print(small.SIZE)"]
    assert subprocess.run(found, check=True, capture_output=True, text=True).stdout == "1\n"
