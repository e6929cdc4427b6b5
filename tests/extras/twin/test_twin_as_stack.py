"""Backend ``rbln`` serves the real stack on the stand-in device: slots without a recompile, and what it compiles."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness.extras.twin.backend import cached_artifact, step_costs, twin_exporter, twin_spec
from harness.extras.twin.environment import INSIDE, SETTINGS_VARIABLE, TwinEnvironment, twin_variables
from harness.measure.records.run import SealedRun
from harness.model.engine import load_cost_model
from harness.model.spec import ExperimentSpec
from harness.runner import run_experiment
from harness.stacks.rbln.launch.compile import CompileSpec, compile_artifact
from tests.support.experiments import UNHURRIED
from tests.support.stacks import linked_environment, write_driver
from tests.support.twin_runs import observed_steps

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
BUCKETS = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def environment(twin: TwinEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the twin's environment whose vllm_rbln may be edited."""
    return linked_environment(twin, tmp_path_factory.mktemp("environment"))


def _run(
    twin: TwinEnvironment, environment: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **server: Any
) -> tuple[SealedRun, list[dict[str, Any]]]:
    """One run through backend ``rbln``, and what the device did in it."""
    folder.mkdir()
    trace = folder / "trace.jsonl"
    settings = folder / "settings.json"
    # A device that took no time would be done with a session before a busy machine sends the next.
    costs = step_costs(load_cost_model("paper"), BUCKETS)
    settings.write_text(json.dumps({"trace_path": str(trace), "timing": "period", "costs": costs}))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("PATH", f"{write_driver(folder / 'driver')}:{os.environ['PATH']}")
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    variables = {**twin_variables(twin), SETTINGS_VARIABLE: str(settings), "PYTHONPATH": str(INSIDE)}
    spec = ExperimentSpec.model_validate(
        {
            "name": "on-twin",
            "backend": "rbln",
            "replicates": 1,
            "base_seed": 11,
            "workload": {
                "num_sessions": 10,
                "waits": "none",
                "generate_tokens": {"distribution": "uniform", "low": 5, "high": 40},
            },
            "server": {
                "artifact": str(cached_artifact(twin, twin_spec())),
                "environment": str(environment),
                "env": variables,
                "start_timeout_s": 300.0,
                "stop_grace_s": 30.0,
                **server,
            },
            "limits": UNHURRIED,
            "condition": [{"name": "only"}],
        }
    )
    (run,) = run_experiment(spec, runs_root=folder / "runs").runs
    assert run.is_valid, run.invalid_reasons
    return run, [json.loads(line) for line in trace.read_text().splitlines()]


def test_slots_can_be_taken_away_without_another_artifact(
    twin: TwinEnvironment, environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = _run(twin, environment, tmp_path / "slots", monkeypatch, kv_slots=6)
    steps = observed_steps(run)
    # Below the limit one slot is set aside, and every padded step is padded with it.
    assert run.manifest.effective["server"]["usable_kv_slots"] == 5
    assert max(row["n"] for row in steps) == 5
    assert {row["dummy_slot"] for row in steps if row["kind"] == "decode"} == {5}
    assert all(row["slots_held"] + row["slots_free"] == 5 for row in steps)


def test_a_specification_becomes_an_artifact_that_the_stack_itself_wrote(twin: TwinEnvironment, tmp_path: Path) -> None:
    exporter = twin_exporter(twin)
    spec = CompileSpec(model="Qwen/Qwen3-4B", batch_size=4, decoder_batch_sizes=(1, 4), kvcache_num_blocks=6)
    made = compile_artifact(spec, tmp_path, exporter)
    assert (made.config.batch_size, made.config.decoder_batch_sizes) == (4, (1, 4))
    assert (made.config.kvcache_num_blocks, made.config.num_devices) == (6, 4)
    assert made.record["versions"]["optimum-rbln"] == made.config.optimum_rbln == twin.stamp["versions"]["optimum-rbln"]
    assert compile_artifact(spec, tmp_path, exporter).was_reused
