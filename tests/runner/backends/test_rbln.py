"""The doctor's line of the NPU backend says what of the vendor's stack is here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.runner.backends import readiness, what_you_can_do
from harness.runner.backends.rbln import VLLM_RBLN, RblnBackend, libc_in_words
from tests.support.command_line import harness
from tests.support.stacks import write_driver, write_environment


def test_the_version_that_the_engine_follows_is_named() -> None:
    assert f"vllm-rbln=={VLLM_RBLN}" in RblnBackend().readiness().how


def test_a_device_tool_on_the_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "rbln-smi"
    tool.write_text("#!/bin/sh\necho rbln-smi 3.0.0\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "rbln-smi present" in RblnBackend().readiness().found


def test_a_stack_on_the_path_is_named_with_what_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = write_environment(tmp_path / "stack")
    monkeypatch.setenv("PATH", f"{environment / 'bin'}:{os.environ['PATH']}")
    found = RblnBackend().readiness().found
    assert "vllm-rbln 0.11.1" in found
    # The little stack holds no sources to be read.
    assert "holds no vllm_rbln" in found


def test_a_stack_in_an_environment_is_asked_for_by_its_folder(tmp_path: Path) -> None:
    environment = write_environment(tmp_path / "stack")
    done = harness("doctor", "--environment", str(environment))
    assert "rebel-compiler 0.11.1" in " ".join(done.stdout.split())


def test_only_what_is_missing_is_asked_for_and_what_works_without_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = write_environment(tmp_path / "stack", versions={"vllm-rbln": "0.12.0", "rebel-compiler": "0.12.0"})
    monkeypatch.setenv("PATH", f"{write_driver(tmp_path / 'driver')}:{os.environ['PATH']}")
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    line = RblnBackend().readiness_of(str(environment))
    assert (line.ok, line.need) == (None, "/dev/rbln*")
    assert line.how == "Load the driver on a server with RBLN cards; in a container, pass the devices in"
    assert "no device group in its report, which a model over several devices needs" in line.found
    assert "{" not in line.found
    assert (
        "Not yet: rbln needs /dev/rbln*; compiling needs no device: harness server compile qwen3-4b -o FOLDER "
        f"--environment {environment}"
    ) in what_you_can_do([line, *(check for check in readiness() if check.name != line.name)])


def test_an_environment_that_is_not_there_is_refused_in_one_line() -> None:
    done = harness("doctor", "--environment", "/nowhere")
    assert done.returncode == 2
    assert done.stderr == (
        "harness: --environment /nowhere: there is no such folder. Make it, and install the stack there: "
        "docs/guides/npu.md, section 2\n"
    )


def test_an_older_c_library_is_told_with_what_serves_on_it() -> None:
    told = libc_in_words("glibc", "2.35")
    assert "below the 2.39 of vLLM's CPU wheel" in told
    assert "add --find-links https://github.com/RBLN-SW/vllm-rbln/releases/" in told
    assert libc_in_words("glibc", "2.35", has_vllm=True) == "glibc 2.35"
    assert libc_in_words("glibc", "2.41") == "glibc 2.41"
    assert "need it" in libc_in_words("musl", "1.2")


def test_the_doctor_names_a_vllm_that_is_not_the_pinned_one_and_the_libraries_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = write_environment(tmp_path / "stack", versions={"vllm-rbln": "0.12.0", "vllm": "0.33.0+cpu"})
    monkeypatch.setenv("PATH", f"{environment / 'bin'}:{os.environ['PATH']}")
    found = RblnBackend().readiness().found
    assert "vLLM 0.33.0 beside it, where vLLM 0.30.0 is pinned" in found
    assert "glibc 2." in found


def test_everything_that_is_missing_is_named_at_once_by_a_dry_run_and_by_a_check_of_the_patch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    experiment = tmp_path / "npu.toml"
    experiment.write_text(
        f'name = "npu"\nbackend = "rbln"\nreplicates = 1\nbase_seed = 1\ntime_scale = 2.0\n[server]\n'
        f'environment = "{tmp_path}/stack"\nartifact = "{tmp_path}/eight"\n[[condition]]\nname = "base"\n'
        f'[[condition]]\nname = "other"\nserver.artifact = "{tmp_path}/other"\n'
    )
    runs = ("--runs", str(tmp_path / "runs"))
    done = harness("run", str(experiment), "--dry-run", *runs)
    first, *faults = done.stderr.splitlines()
    assert (done.returncode, first) == (2, "harness: experiment 'npu': 5 faults. Mend each")
    for fault, named in zip(
        faults, ("time_scale", "eight: no such", "other: no such", "no vllm command in", "no rbln-smi"), strict=True
    ):
        assert named in fault
    # By the conditions of the file, and not by those of the check.
    refused = harness("server", "patch", "check", str(experiment), *runs)
    assert (refused.returncode, refused.stderr) == (2, done.stderr)
