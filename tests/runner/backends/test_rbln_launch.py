"""The command of a real stack is exact, refusals come before any start, and an attached server is only looked at."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ServerError, SpecError
from harness.measure.server.life import LaunchPlan
from harness.model.spec import ServerSpec
from harness.runner.backends.attached import AttachedBackend
from harness.runner.backends.rbln import RblnBackend
from harness.runner.run import LaunchOptions
from harness.stacks.rbln.launch.patches import patched_text
from harness.stacks.rbln.launch.serving import step_report_variables, visible_devices
from harness.stacks.vllm.step_log import INSIDE
from tests.support.command_line import harness
from tests.support.processes import HOST, NO_PORT
from tests.support.stacks import (
    DIFF,
    TARGET,
    write_artifact,
    write_driver,
    write_environment,
    write_patched_stack,
)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stack whose vllm-rbln is one little file, with a release whose patch fits it, and a model; no driver."""
    root = write_patched_stack(tmp_path, monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    write_artifact(tmp_path / "artifact")
    return root


def _launch(tmp_path: Path, stack: Path, /, **server: Any) -> LaunchPlan:
    table = {"artifact": str(tmp_path / "artifact"), "environment": str(stack), **server}
    (tmp_path / "run").mkdir(exist_ok=True)
    return RblnBackend().launch(
        ServerSpec.model_validate(table),
        LaunchOptions(0, tmp_path / "run", log_format="precise"),
    )


def test_the_command_says_everything_that_counts(tmp_path: Path, environment: Path) -> None:
    plan = _launch(tmp_path, environment, stop_grace_s=30.0)
    assert plan.argv == (
        str(environment / "bin" / "vllm"),
        "serve",
        str(tmp_path / "artifact"),
        "--host",
        HOST,
        "--port",
        str(plan.port),
        "--served-model-name",
        "artifact",
        "--enable-prompt-tokens-details",
        "--enable-logging-iteration-details",
        "--enable-log-requests",
        "--enable-prefix-caching",
        "--generation-config",
        "vllm",
        "--shutdown-timeout",
        "30",
    )
    assert plan.env["RBLN_DEVICES"] == "0,1,2,3"
    assert plan.env["VLLM_RBLN_METRICS"] == "1"
    assert plan.env["VLLM_CORE_STEPS_FILE"] == str(tmp_path / "run" / "observer.jsonl")
    overlay, plugin = plan.env["PYTHONPATH"].split(os.pathsep)
    assert "[BUCKET]" in (Path(overlay) / TARGET).read_text()
    assert plugin == str(INSIDE)
    assert plan.observation.steps == "bucket-log"
    assert plan.observation.patch["mode"] == "overlay"
    assert plan.effective["decode_buckets"] == [1, 2, 4, 8]
    # Its sources decide, and this stack has none that do: its version alone makes no rules.
    assert "rules" not in plan.effective
    assert json.loads(json.dumps(plan.to_json()))["requested"]["versions"]["vllm-rbln"] == "0.11.1"


def test_the_log_has_microseconds_and_debug_only_where_it_is_read(tmp_path: Path, environment: Path) -> None:
    plan = _launch(tmp_path, environment)
    config = json.loads(Path(plan.env["VLLM_LOGGING_CONFIG_PATH"]).read_text())
    assert config["formatters"]["precise"]["format"].startswith("%(created).6f")
    assert {name for name, one in config["loggers"].items() if one["level"] == "DEBUG"} == {
        "vllm_rbln.v1.core.prefix_cache_manager",
        "vllm_rbln.model_executor.models.optimum.model_base",
        "vllm_rbln.v1.worker.optimum_model_runner",
    }
    assert config["loggers"].keys() >= {"vllm", "vllm_rbln"}


def test_the_experiment_file_has_the_last_word(tmp_path: Path, environment: Path) -> None:
    write_artifact(tmp_path / "artifact", kvcache_num_blocks=16)
    plan = _launch(
        tmp_path,
        environment,
        kv_slots=12,
        prefix_caching=False,
        observer=False,
        patch="none",
        devices=[4, 5, 6, 7],
        extra_args=["--shutdown-timeout", "60"],
        env={"VLLM_RBLN_METRICS": "0", "PYTHONPATH": "/mine"},
    )
    assert plan.argv[-4:] == ("--num-gpu-blocks-override", "12", "--shutdown-timeout", "60")
    assert "--no-enable-prefix-caching" in plan.argv
    assert (plan.env["VLLM_RBLN_METRICS"], plan.env["PYTHONPATH"]) == ("0", "/mine")
    assert plan.env["RBLN_DEVICES"] == "4,5,6,7"
    assert "VLLM_CORE_STEPS_FILE" not in plan.env
    assert (plan.observation.steps, plan.observation.has_kv_log) == ("iteration-log", False)
    assert plan.observation.patch["mode"] == "none"


def test_a_package_that_somebody_patched_is_refused_in_every_mode(tmp_path: Path, environment: Path) -> None:
    target = environment / "site" / TARGET
    target.write_text(patched_text(DIFF, TARGET, target.read_text()))
    for mode in ("overlay", "none"):
        with pytest.raises(SpecError, match="is patched, not pristine"):
            _launch(tmp_path, environment, patch=mode)


def test_plugins_that_are_allowed_by_name_get_the_observer_added(tmp_path: Path, environment: Path) -> None:
    plan = _launch(tmp_path, environment, env={"VLLM_PLUGINS": "rbln"})
    assert plan.env["VLLM_PLUGINS"] == "rbln,vllm_step_log"


@pytest.mark.parametrize(
    ("server", "kind", "message"),
    [
        ({"artifact": ""}, SpecError, r"server\.artifact: is missing\. Name the folder"),
        ({"artifact": "/nowhere"}, SpecError, "/nowhere: no such artifact"),
        ({"max_num_seqs": 4, "decode_buckets": [4]}, SpecError, "does not fit the experiment: max_num_seqs is 4"),
        ({"environment": "/nowhere"}, ServerError, r"server\.environment: no vllm command in /nowhere"),
        ({"environment": ""}, ServerError, "no vllm command on PATH"),
    ],
)
def test_what_is_missing_is_refused_before_anything_starts(
    tmp_path: Path, environment: Path, server: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        _launch(tmp_path, environment, **server)
    assert list((tmp_path / "run").iterdir()) == []


def test_an_environment_without_vllm_rbln_is_refused(tmp_path: Path, environment: Path) -> None:
    del environment
    other = write_environment(tmp_path / "other", versions={"vllm": "0.22.0"})
    with pytest.raises(
        ServerError, match=r"vllm is installed, vllm-rbln is not\. pip install vllm-rbln, of the release"
    ):
        _launch(tmp_path, other)


def test_busy_devices_are_refused(tmp_path: Path, environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = write_driver(tmp_path / "driver", contexts=[{"npu": 1, "pid": 7, "process": "vllm"}])
    monkeypatch.setenv("PATH", f"{driver}:/usr/bin:/bin")
    with pytest.raises(ServerError, match=r"the chosen devices are busy: device 1 by pid 7 \(vllm\)"):
        _launch(tmp_path, environment)


def _checked(tmp_path: Path, stack: Path) -> None:
    """As ``run --dry-run`` asks before anything starts."""
    RblnBackend().check_host(ServerSpec(artifact=str(tmp_path / "artifact"), environment=str(stack)))


def test_a_dry_run_says_what_it_checked_and_what_its_time_assumes(
    tmp_path: Path, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{write_driver(tmp_path / 'driver')}:/usr/bin:/bin")
    (tmp_path / "npu.toml").write_text(
        f'name = "npu"\nbackend = "rbln"\nreplicates = 3\nbase_seed = 1\n[server]\nenvironment = "{environment}"\n'
        f'artifact = "{tmp_path}/artifact"\n[[condition]]\nname = "base"\n'
    )
    done = harness("run", "npu.toml", "--dry-run", cwd=tmp_path)
    told = " ".join(done.stdout.split())
    assert "checked on this host: the compiled models (not hashed: harness server compile -o " in told, done.stderr
    assert "No server was started" in told
    assert "in all, if each server starts and stops in 20 s (a guess) and keeps the pace of its cost model" in told


def test_a_host_without_driver_and_compiler_is_refused_before_anything_starts(
    tmp_path: Path, environment: Path
) -> None:
    shutil.rmtree(next((environment / "site").glob("rebel_compiler-*")))
    with pytest.raises(ServerError, match="2 faults") as refused:
        _checked(tmp_path, environment)
    compiler, driver = refused.value.faults
    assert str(compiler).startswith(f"{environment}: no rebel-compiler beside vllm-rbln")
    assert driver.what.startswith("no rbln-smi on PATH")
    assert {compiler.hint, driver.hint} == {f"harness doctor --environment {environment}"}


def test_a_compile_names_every_package_that_its_environment_lacks(environment: Path) -> None:
    with pytest.raises(ServerError, match="lacks torch, transformers, which compile a model"):
        RblnBackend().exporter(ServerSpec(environment=str(environment)))
    shutil.rmtree(next((environment / "site").glob("rebel_compiler-*")))
    with pytest.raises(ServerError, match="lacks rebel-compiler, torch, transformers, which"):
        RblnBackend().exporter(ServerSpec(environment=str(environment)))


def test_a_host_with_fewer_devices_than_the_model_takes_is_refused_before_anything_starts(
    tmp_path: Path, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{write_driver(tmp_path / 'driver', num_devices=2)}:/usr/bin:/bin")
    with pytest.raises(ServerError, match=r"device 2, 3 does not exist; there are 0, 1"):
        _checked(tmp_path, environment)


def test_an_attached_server_that_is_not_there_is_refused(tmp_path: Path) -> None:
    url = f"http://{HOST}:{NO_PORT}"
    with pytest.raises(ServerError, match=r"no server answers there \(.*\)\. Start it, or change server\.url"):
        AttachedBackend().launch(ServerSpec(url=url), LaunchOptions(0, tmp_path))


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://host:1", "http://", "http://host:x", "http://h:1/v1?a=b", "http://me:key@h:1"]
)
def test_an_address_that_is_none_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(SpecError, match=r"server\.url: is .*, not http://HOST:PORT"):
        AttachedBackend().launch(ServerSpec(url=url), LaunchOptions(0, tmp_path))


@pytest.mark.parametrize(
    ("version", "variable"),
    [("0.11.2.post1", "RBLN_DEVICES"), ("0.12.0", "RBLN_VISIBLE_DEVICES"), ("0.12.1a8", "RBLN_VISIBLE_DEVICES")],
)
def test_devices_are_named_to_a_server_as_its_version_reads_them(version: str, variable: str) -> None:
    assert visible_devices(version, (2, 3)) == {variable: "2,3"}


@pytest.mark.parametrize(
    ("version", "is_asked"), [("0.11.1", False), ("0.12.0", False), ("0.12.1a8", True), ("", False)]
)
def test_step_statistics_are_asked_for_as_json_where_a_release_writes_it(
    tmp_path: Path, version: str, is_asked: bool
) -> None:
    expected = {"VLLM_RBLN_METRICS_DIR": str(tmp_path)} if is_asked else {}
    assert step_report_variables(version, tmp_path) == expected
