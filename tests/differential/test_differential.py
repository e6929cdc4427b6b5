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

from harness.extras.twin.backend import cached_artifact, twin_spec
from harness.extras.twin.environment import TwinEnvironment, twin_variables
from harness.stacks.rbln.rules.kv_rules import AUTO, rule_set
from tests.differential.million import PAGED_TWIN, TWIN_RULES

CHECKOUT = Path(__file__).resolve().parents[2]
NUM_HISTORIES = 64
"""Enough for every kind of server to be drawn."""
HISTORY_STEPS = {"0.11.1": 120, "0.11.2": 120, "0.12.0": 480, "0.12.1a8": 240}
"""Longest history per vllm-rbln version, in steps; the long run compares 1,000,000."""


def run_in_twin(twin: TwinEnvironment, *arguments: str, plugins: str | None = None) -> subprocess.CompletedProcess[str]:
    """A module of this checkout, run by the twin's Python with the stand-in runtime and the harness importable.

    plugins: those of vLLM that are loaded, default: all.
    """
    variables = twin_variables(twin)
    if plugins is not None:
        variables["VLLM_PLUGINS"] = plugins
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
@pytest.mark.parametrize("twin", sorted(HISTORY_STEPS), indirect=True)
def test_engine_agrees_with_the_vendors_scheduler_on_every_step(twin: TwinEnvironment) -> None:
    artifact = cached_artifact(twin, twin_spec())
    history_steps = HISTORY_STEPS[twin.version]

    done = run_in_twin(
        twin,
        "tests.differential",
        *("--artifact", str(artifact), "--seeds", f"0:{NUM_HISTORIES}", "--steps", str(history_steps)),
        # Each worker imports the vendor's packages, which takes longer than these histories.
        *("--workers", "1"),
        *("--rules", rule_set(AUTO, twin.version).name),
    )

    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    compared = re.search(r"([\d,]+) steps in [\d,]+ histories, 0 with a difference", done.stdout)
    assert compared, done.stdout
    assert int(compared[1].replace(",", "")) >= NUM_HISTORIES * history_steps // 2
    for dimension in ("above", "equal to", "below"):
        assert f"one partition, slots {dimension} the limit" in done.stdout
        assert f"several partitions, slots {dimension} the limit" in done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rules", TWIN_RULES)
@pytest.mark.parametrize("twin", [PAGED_TWIN], indirect=True)
def test_paged_rules_agree_with_the_released_scheduler_on_every_step(twin: TwinEnvironment, rules: str) -> None:
    artifact = cached_artifact(twin, twin_spec())

    done = run_in_twin(
        twin,
        "tests.differential",
        *("--artifact", str(artifact), "--seeds", f"0:{NUM_HISTORIES}", "--steps", "120"),
        *("--workers", "1", "--rules", rules),
        plugins="",
    )

    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "0 with a difference" in done.stdout
    counts = {
        name: int(number.replace(",", ""))
        for name, number in re.findall(r"([a-z -]+) ([\d,]+)(?:;|$)", done.stdout, re.MULTILINE)
    }
    events = ("preempted", "steps that resume", "admissions with reuse", "steps without a graph", "steps compiled too")
    for happened in events:
        assert counts[f" {happened}"] > 0, done.stdout
    for dimension in ("memory below the longest requests", "prompts in parts", "caching off"):
        assert dimension in done.stdout


@pytest.mark.timeout(300)
def test_a_vendor_that_evicts_in_another_order_is_caught_and_shrunk_to_a_few_operations(twin: TwinEnvironment) -> None:
    artifact = cached_artifact(twin, twin_spec())

    done = run_in_twin(twin, "tests.differential.sabotage", str(artifact), rule_set(AUTO, twin.version).name)

    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    operations = int(re.search(r"(\d+) operations", done.stdout)[1])
    assert 3 <= operations <= 24, done.stdout
