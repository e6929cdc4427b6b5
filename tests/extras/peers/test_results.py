"""Results of other benchmarks as a side of a comparison: the same figures as those of the run that was exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.compare.across import PeerSide, Side, compare_with_peer
from harness.errors import SpecError
from harness.extras.peers.results import peer_side
from harness.measure.records.run import SealedRun
from harness.present.export import FORMATS, write_runs
from harness.runner import run_experiment
from tests.support.command_line import harness
from tests.support.experiments import small_experiment

TOOLS = ("vllm-bench", "aiperf", "guidellm")
FELT = ["ttft_p50_ms", "itl_p50_ms", "e2e_p50_ms", "tokens_per_s"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[SealedRun, ...]:
    spec = small_experiment(backend="sim", replicates=3, condition=[{"name": "base"}])
    root = tmp_path_factory.mktemp("peers") / "runs"
    return tuple(run_experiment(spec, runs_root=root).require_valid().runs)


def results_of(runs: tuple[SealedRun, ...], tool: str, folder: Path) -> PeerSide:
    write_runs(runs, FORMATS[tool], folder, may_replace=False)
    side = peer_side([folder])
    assert side is not None
    return side


@pytest.mark.parametrize("tool", TOOLS)
def test_a_run_and_its_own_export_do_not_differ(runs: tuple[SealedRun, ...], tool: str, tmp_path: Path) -> None:
    peer = results_of(runs, tool, tmp_path)
    assert (peer.tool, len(peer.runs)) == (tool, 3)
    rows = compare_with_peer([Side("runs/small/base", runs)], peer, is_baseline=True).records()
    assert [row["measure"] for row in rows] == [name for name in FELT if tool != "guidellm" or name != "itl_p50_ms"]
    for row in rows:
        assert row["ratio"] == pytest.approx(1.0, abs=1e-5)
        assert (row["paired"], row["runs"]) == (False, "3:3")
        # Three runs of either side whose inputs differ give some measures no interval.
        assert row["verdict"] in {"no difference shown", "too few runs for an interval"}


def test_the_other_benchmark_may_be_the_condition(runs: tuple[SealedRun, ...], tmp_path: Path) -> None:
    peer = results_of(runs, "vllm-bench", tmp_path)
    table = compare_with_peer([Side("runs/small/base", runs)], peer, is_baseline=False)
    assert {row["condition"] for row in table.records()} == {str(tmp_path)}
    assert "Not paired" in table.caption
    assert "no accelerator was measured" in table.origin


def test_failed_requests_of_a_vllm_result_enter_no_figure(tmp_path: Path) -> None:
    result = {"ttfts": [0.1, 0.0, 0.3], "itls": [[0.01], [], [0.03]], "output_lens": [2, 0, 2], "duration": 4.0}
    (tmp_path / "result.json").write_text(json.dumps({**result, "errors": ["", "refused", ""]}))
    side = peer_side([tmp_path / "result.json"])
    (figures,) = side.runs
    assert {name: value.amount for name, value in figures.items()} == pytest.approx(
        {"ttft_p50_ms": 200.0, "itl_p50_ms": 20.0, "e2e_p50_ms": 220.0, "tokens_per_s": 1.0}
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "no result of vLLM bench, AIPerf or GuideLLM with per-request records.*--save-detailed"),
        ("not JSON", "no result of vLLM bench"),
        ({"ttfts": [1], "itls": [[1]]}, "no vllm-bench result that this version reads .KeyError"),
        ({"ttfts": [1], "itls": [[1]], "errors": [""], "output_lens": [2], "duration": 0}, "ZeroDivisionError"),
        ({"benchmarks": [{}, {}]}, "2 benchmarks in one report"),
        ({"metadata": {}, "metrics": {}}, "no aiperf result"),
    ],
)
def test_a_file_that_is_no_result_is_one_line(tmp_path: Path, content: Any, words: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(SpecError, match=words):
        peer_side([path])


def test_results_of_two_benchmarks_are_not_one_side(runs: tuple[SealedRun, ...], tmp_path: Path) -> None:
    for tool in ("vllm-bench", "guidellm"):
        results_of(runs, tool, tmp_path / tool)
    with pytest.raises(SpecError, match="results of guidellm and vllm-bench"):
        peer_side([tmp_path / "vllm-bench", tmp_path / "guidellm"])


def test_folders_of_sealed_runs_are_no_results(runs: tuple[SealedRun, ...]) -> None:
    assert peer_side([runs[0].path.parents[2]]) is None


def test_compare_takes_results_as_its_baseline(runs: tuple[SealedRun, ...], tmp_path: Path) -> None:
    results_of(runs, "aiperf", tmp_path / "aiperf")
    place = str(runs[0].path.parent)
    table = harness("compare", place, "--baseline", str(tmp_path / "aiperf"), "--format", "json")
    assert table.returncode == 0
    assert "not paired" in harness("compare", place, "--baseline", str(tmp_path / "aiperf")).stdout
    alone = harness("compare", str(tmp_path / "aiperf"))
    assert alone.returncode == 2
    assert "only other benchmarks' results to compare" in alone.stderr
