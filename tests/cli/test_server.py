"""The stack's commands say in one line what is there, and exit with the code that scripts rely on."""

from __future__ import annotations

import json
import pwd
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness.cli.server import patch_apply
from harness.errors import SpecError
from tests.support.command_line import harness

TARGET = "vllm_rbln/model_executor/models/optimum/model_base.py"


def _harness(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return harness(*words, environment=environment)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment whose vllm-rbln has a file that no release has."""
    site = tmp_path / "stack" / "site"
    for name, version in (("vllm", "0.22.0"), ("vllm_rbln", "0.11.1")):
        described = site / f"{name}-{version}.dist-info"
        described.mkdir(parents=True)
        (described / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        )
    (site / TARGET).parent.mkdir(parents=True)
    (site / TARGET).write_text("# changed by somebody\n")
    (tmp_path / "stack" / "bin").mkdir()
    python = tmp_path / "stack" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" -S "$@"\n')
    (tmp_path / "stack" / "bin" / "vllm").write_text("#!/bin/sh\n")
    for path in (python, python.with_name("vllm")):
        path.chmod(0o755)
    return tmp_path / "stack"


def test_status_lists_the_patches_and_says_what_is_installed(environment: Path) -> None:
    done = _harness("server", "patch", "status", "--environment", str(environment))
    assert done.returncode == 0, done.stderr
    assert (
        "patch vllm_rbln-0.11.1/bucket_log: for 0.11.1, 0.11.1.post1, 0.11.2, 0.11.2.post1; one debug line"
        in done.stdout
    )
    assert "unknown (vllm-rbln 0.11.1)" in done.stdout
    assert "pip install --force-reinstall --no-deps vllm-rbln==0.11.1" in done.stdout


@pytest.mark.parametrize("words", [("verify",), ("apply",)])
def test_an_unknown_file_is_refused_by_every_command_in_one_line(environment: Path, words: tuple[str, ...]) -> None:
    done = _harness("server", "patch", *words, "--environment", str(environment))
    assert done.returncode == 2
    assert done.stderr.startswith("harness: ")
    assert "is unknown, not p" in done.stderr
    assert done.stderr.count("\n") == 1
    assert (environment / "site" / TARGET).read_text() == "# changed by somebody\n"


def test_an_unknown_file_is_refused_before_a_missing_cache_folder(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nameless(_user: int) -> None:
        raise KeyError("the user has a number only")

    monkeypatch.setattr(pwd, "getpwuid", nameless)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(SpecError, match="is unknown, not p"):
        patch_apply(environment)


def test_a_wheel_that_no_patch_fits_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_rbln-9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(TARGET, "# another release\n")
        archive.writestr("vllm_rbln-9.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm-rbln\nVersion: 9.9\n")
        archive.writestr("vllm_rbln/__init__.py", "")
    done = _harness("server", "patch", "verify", str(wheel))
    assert done.returncode == 2
    assert f"no patch fits {TARGET}" in done.stderr


def test_an_environment_that_is_none_is_refused() -> None:
    done = _harness("server", "patch", "status", "--environment", "/nowhere")
    assert done.returncode == 1
    assert done.stderr == (
        "harness: server.environment: no vllm command in /nowhere. Install vllm and vllm-rbln, and name their virtual "
        "environment (docs/guides/npu.md)\n"
    )


def test_devices_are_listed_from_the_drivers_report(tmp_path: Path) -> None:
    report = {
        "KMD_version": "3.2.2",
        "devices": [{"npu": 0, "name": "RBLN-CA25", "status": "normal", "temperature": "41C", "card_power": "57.3W"}],
        "contexts": [{"npu": 0, "pid": 9, "process": "vllm"}],
    }
    command = tmp_path / "rbln-smi"
    command.write_text(f"#!/bin/sh\necho '{json.dumps(report)}'\n")
    command.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    assert _harness("server", "devices", PATH=path).stdout == (
        "driver 3.2.2, 1 devices\n  0: RBLN-CA25 normal 41 C 57.3 W card; pid 9 (vllm)\n"
    )
    assert json.loads(_harness("server", "devices", "--format", "json", PATH=path).stdout) == report
    assert _harness("server", "devices", PATH="/usr/bin:/bin").returncode == 1


def test_a_specification_that_cannot_be_served_is_refused_before_the_stack_is_looked_for(tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text('model = "m"\ndecoder_batch_sizes = [4]\n')
    done = _harness("server", "compile", str(spec), "--environment", "/nowhere")
    assert done.returncode == 2
    assert "the single bucket 4 is not batch_size 8" in done.stderr


def test_a_registry_of_nothing_says_so(tmp_path: Path) -> None:
    done = _harness("server", "compile", "-o", str(tmp_path))
    assert (done.returncode, "no artifacts there" in done.stderr) == (2, True)


def test_what_is_compiled_is_listed_with_its_buckets(tmp_path: Path) -> None:
    versions = {"optimum-rbln": "0.12.0", "rebel-compiler": "0.12.0"}
    spec = {"decoder_batch_sizes": [8, 6, 4, 2, 1]}
    record = {"spec": spec, "versions": versions, "seconds": 61.5, "size_bytes": 3 << 20, "files": {}}
    (tmp_path / "model-0123").mkdir()
    (tmp_path / "model-0123" / "harness-artifact.json").write_text(json.dumps(record))
    (line,) = _harness("server", "compile", "-o", str(tmp_path), COLUMNS="400").stdout.splitlines()
    assert line == (
        f"{tmp_path}/model-0123: buckets {{1,2,4,6,8}}, 3.0 MiB, compiled in 61.5 s by optimum-rbln 0.12.0, "
        "rebel-compiler 0.12.0"
    )
