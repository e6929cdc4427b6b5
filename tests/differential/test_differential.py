"""The engine decides what the vendor's own scheduler decides, step by step, on random histories with fixed seeds.

The long run is ``make differential``; this is its short sweep, with seeds of its own. Skipped where the twin is not
installed.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from harness.kv_rules import AUTO, rule_set
from harness.twin.artifact import ArtifactSpec, cached_artifact
from harness.twin.environment import TwinEnvironment, twin_variables

CHECKOUT = Path(__file__).resolve().parents[2]
SWEEP_STEPS = {"0.11.1": 10_000, "0.11.2": 5_000, "0.12.0": 20_000, "0.12.1a8": 10_000}
"""Steps compared per vllm-rbln version; the long run is 1,000,000."""


def run_in_twin(twin: TwinEnvironment, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A module of this checkout, run by the twin's Python with the stand-in runtime and the harness importable."""
    variables = twin_variables()
    paths = [variables["PYTHONPATH"], str(CHECKOUT)]
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    variables["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    return subprocess.run(
        [str(twin.python), "-m", *arguments],
        cwd=CHECKOUT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("twin", sorted(SWEEP_STEPS), indirect=True)
def test_engine_agrees_with_the_vendors_scheduler_on_every_step(twin: TwinEnvironment) -> None:
    artifact = cached_artifact(twin, ArtifactSpec())
    least_steps = SWEEP_STEPS[twin.version]

    done = run_in_twin(
        twin,
        "tests.differential",
        *("--artifact", str(artifact), "--seeds", "0:2000", "--until-steps", str(least_steps), "--workers", "2"),
        *("--rules", rule_set(AUTO, twin.version).name),
    )

    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    compared = re.search(r"([\d,]+) steps in [\d,]+ histories, 0 with a difference", done.stdout)
    assert compared, done.stdout
    assert int(compared[1].replace(",", "")) >= least_steps
    for dimension in ("above", "equal to", "below"):
        assert f"one partition, slots {dimension} the limit" in done.stdout
        assert f"several partitions, slots {dimension} the limit" in done.stdout


@pytest.mark.timeout(300)
def test_a_vendor_that_evicts_in_another_order_is_caught_and_shrunk_to_a_few_operations(twin: TwinEnvironment) -> None:
    artifact = cached_artifact(twin, ArtifactSpec())

    done = run_in_twin(twin, "tests.differential.sabotage", str(artifact), rule_set(AUTO, twin.version).name)

    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    operations = int(re.search(r"(\d+) operations", done.stdout)[1])
    assert 3 <= operations <= 24, done.stdout
