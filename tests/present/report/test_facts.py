"""Facts of paged KV memory: how many of the plan's longest requests fit, by the blocks that the server shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.measure.records.run import SealedRun
from harness.model.engine.config import sequences_that_fit
from harness.present.report.facts import gather_facts
from harness.runner import run_experiment
from tests.support.experiments import small_experiment

ROW = "longest requests at a time"


@pytest.mark.parametrize(
    ("blocks", "size", "longest", "fit"),
    # A CPU's blocks hold 128 tokens. The last token of an answer needs no KV, and one block is a placeholder.
    [(65, 128, 1024, 8), (65, 128, 1025, 8), (65, 128, 1026, 7), (17, 16, 257, 1), (16, 16, 257, 0), (10, 16, 1, 9)],
)
def test_as_many_fit_as_their_blocks(blocks: int, size: int, longest: int, fit: int) -> None:
    assert sequences_that_fit(blocks, size, longest) == fit


def simulated(folder: Path, **server: Any) -> SealedRun:
    spec = small_experiment(
        backend="sim",
        replicates=1,
        workload={
            "num_sessions": 2,
            "requests_per_session": 2,
            "prompt_tokens": {"distribution": "fixed", "value": 200},
            "new_tokens": {"distribution": "fixed", "value": 50},
            "generate_tokens": {"distribution": "fixed", "value": 30},
            "waits": "none",
        },
        server=server,
        condition=[{"name": "base"}],
    )
    return run_experiment(spec, runs_root=folder).require_valid().runs[0]


def memory_of(run: SealedRun) -> dict[str, str]:
    return dict(next((pairs for name, pairs in gather_facts([run]) if name == "KV memory"), ()))


def test_the_facts_of_a_run_hold_the_figure_or_say_that_it_is_unknown(tmp_path: Path) -> None:
    paged = {"rules": "vllm-paged", "cost_model": "emulated-gpu", "num_gpu_blocks": 65, "block_size": 128}
    run = simulated(tmp_path, **paged, slot_tokens=4096)
    # The second request of a session holds the first: 200 + 30, 50 more, and its answer.
    assert memory_of(run) == {ROW: "21", "longest request, tokens": "310", "tokens of a block": "128", "blocks": "65"}
    stated = {"cache_config_info": {"kv_cache_size_tokens": "4096"}}
    effective = {**run.manifest.effective, "launch": stated}
    run.__dict__["manifest"] = run.manifest.model_copy(update={"effective": effective})
    assert memory_of(run)[ROW] == "13", "the tokens that the server states, not its blocks"
    shown = {key: value for key, value in run.manifest.effective["server"].items() if key != "num_gpu_blocks"}
    silent = run.manifest.model_copy(update={"effective": {**run.manifest.effective, "server": shown}})
    run.__dict__["manifest"] = silent
    assert memory_of(run)[ROW].startswith("unknown")
    assert memory_of(simulated(tmp_path / "slots", max_num_seqs=2)) == {}
