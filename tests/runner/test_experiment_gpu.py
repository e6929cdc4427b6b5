"""The experiments for a GPU server, simulated: every run is valid, and the figures move as vLLM's rules have it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from harness.analysis import run_figures
from harness.analysis.figures import RunFigures
from harness.judge.prereg.predict import predict_experiment
from harness.measure.records.run import SealedRun
from harness.model.experiment import resolve
from harness.model.spec import load_toml, parse_experiment
from harness.runner import run_experiment
from harness.shipped import find_shipped

pytestmark = pytest.mark.same_everywhere

Runs = Callable[[str], tuple[SealedRun, ...]]
Figures = Callable[[str], dict[str, RunFigures]]


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The first replicate of a shipped experiment; made once."""

    @cache
    def runs(name: str) -> tuple[SealedRun, ...]:
        table = load_toml(find_shipped("experiments", name, what="experiment"))
        spec = parse_experiment({**table, "backend": "sim", "replicates": 1}, where=name)
        sealed = run_experiment(spec, runs_root=tmp_path_factory.mktemp(name)).runs
        assert [run.invalid_reasons for run in sealed if run.invalid_reasons] == []
        return tuple(sealed)

    return runs


@pytest.fixture
def figures_of(runs_of: Runs) -> Figures:
    """Their figures, by condition."""
    return lambda name: {run.condition: run_figures(run) for run in runs_of(name)}


def test_a_captured_size_of_six_lowers_the_padding_of_six_agents(figures_of: Figures) -> None:
    padding = {name: figures.padding.ratio for name, figures in figures_of("gpu-capture-sizes").items()}
    for kind in ("waits", "nowaits"):
        assert padding[f"{kind}-6"] < padding[f"{kind}-8"]
    assert padding["nowaits-8"] > padding["waits-8"]


def test_without_prefix_caching_no_return_finds_its_prefix(figures_of: Figures) -> None:
    figures = figures_of("gpu-prefix-caching")
    assert figures["no-caching"].reuse.num_reused == 0
    assert figures["caching"].reuse.num_reused == 36


def test_returns_find_less_with_fewer_blocks_and_preempted_runs_stay_valid(figures_of: Figures) -> None:
    figures = figures_of("gpu-kv-memory")
    reused = [figures[f"blocks-{blocks}"].cached_tokens or 0 for blocks in (5120, 2560, 1280, 640)]
    assert reused == sorted(reused, reverse=True)
    assert reused[0] > 2 * reused[-1]


def test_a_captured_size_that_fits_the_limit_lowers_its_padding(figures_of: Figures) -> None:
    figures = figures_of("gpu-max-num-seqs")
    assert figures["limit-12-captured"].padding.ratio < figures["limit-12"].padding.ratio


def test_covering_the_largest_batch_pays_more_than_any_number_of_drafts(figures_of: Figures) -> None:
    figures = figures_of("gpu-drafts")
    cost_ns = {name: each.a_ns or 0 for name, each in figures.items()}
    assert cost_ns["three"] < cost_ns["six-covered"] < cost_ns["none"] < cost_ns["six"]
    # One plan draws the same for both: they differ in the graph of full batches alone.
    assert figures["six"].histogram == figures["six-covered"].histogram
    assert figures["six"].counts == figures["six-covered"].counts


def test_runs_with_paged_kv_memory_are_predicted_by_draws_around_the_nominal_simulation() -> None:
    def predictions(draws: int) -> dict[str, int]:
        table = load_toml(find_shipped("experiments", "gpu-kv-memory", what="experiment"))
        table |= {"replicates": 1, "prediction": {"draws": draws}}
        planned = resolve(parse_experiment(table, where="gpu-kv-memory"))
        return {name: of_runs[0].device_ns for name, of_runs in predict_experiment(planned).items()}

    nominal, drawn = predictions(1), predictions(3)
    assert nominal["blocks-640"] > nominal["blocks-5120"]
    for name, device_ns in drawn.items():
        assert device_ns != nominal[name]
        assert device_ns == pytest.approx(nominal[name], rel=0.1)
