"""Captured sizes are proposed from steps without a graph, and refused where sizes do not count requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.logs.engine_steps import step_log_of
from harness.errors import SpecError
from harness.judge.advise import captured
from harness.measure.records.run import SealedRun
from harness.runner import run_experiment
from harness.stacks.vllm.step_log import StepLog
from harness.tune import diagnose
from harness.tune.hint import hint
from tests.support.experiments import small_experiment


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> list[SealedRun]:
    """Four sessions on a server that captured sizes of one and two alone."""
    spec = small_experiment(
        backend="sim",
        replicates=1,
        workload={
            "num_sessions": 4,
            "requests_per_session": 2,
            "prompt_tokens": {"distribution": "fixed", "value": 200},
            "generate_tokens": {"distribution": "fixed", "value": 30},
            "waits": "none",
        },
        server={"rules": "vllm-paged", "cost_model": "emulated-gpu", "max_num_seqs": 4, "decode_buckets": [1, 2]},
        condition=[{"name": "base"}],
    )
    return list(run_experiment(spec, runs_root=tmp_path_factory.mktemp("eager")).require_valid().runs)


def served_with(monkeypatch: pytest.MonkeyPatch, **effective: Any) -> None:
    """The step log of every run as that of a server with these settings."""

    def changed(run: SealedRun) -> StepLog | None:
        log = step_log_of(run)
        return None if log is None else replace(log, effective={**log.effective, **effective})

    monkeypatch.setattr(captured, "step_log_of", changed)
    monkeypatch.setattr(diagnose, "step_log_of", changed)
    monkeypatch.setattr("harness.tune.hint.step_log_of", changed)


def test_sizes_are_proposed_for_steps_without_a_graph(eager: list[SealedRun], tmp_path: Path) -> None:
    lines = list(captured.capture_advice(eager, tmp_path))
    assert any(line.startswith("proposal: server.decode_buckets = [1, 2, ") for line in lines)
    assert not any("devices" in line for line in lines)
    suggested = hint(eager)
    assert suggested is not None
    assert "server.decode_buckets = [1, 2, " in suggested.line


def test_under_speculative_decoding_no_size_is_proposed(
    eager: list[SealedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_with(monkeypatch, num_speculative_tokens=3)
    with pytest.raises(SpecError, match=r"'base' drafts 3 tokens a step: .* multiple of 4.*harness compare"):
        list(captured.capture_advice(eager, tmp_path))
    assert hint(eager) is None
    assert list(tmp_path.iterdir()) == []


def test_under_tensor_parallelism_the_costs_have_to_be_of_as_many_devices(
    eager: list[SealedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_with(monkeypatch, tensor_parallel_size=2)
    lines = list(captured.capture_advice(eager, tmp_path))
    assert any("spread over 2 devices" in line for line in lines)
    assert any(line.startswith("proposal: server.decode_buckets") for line in lines)
