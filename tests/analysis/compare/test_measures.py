"""Every measure of a run is what its tables say; over several runs it is a ratio of sums."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.analysis.compare.measures import MEASURES, Bounds, Measure, Value, bound_over, mean_of, value_over
from harness.analysis.cost.reconstruct import received_ns, with_tokens
from harness.analysis.stats import MIN_BEYOND
from harness.measure.records.run import SealedRun
from harness.measure.records.schema import values_of
from harness.runner import run_experiment
from tests.support.experiments import small_experiment

TARGET_S = 0.6


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[SealedRun]:
    """Four simulated runs of two conditions."""
    spec = small_experiment(backend="sim", time_scale=1.0, replicates=2, slo={"session_s": TARGET_S})
    return list(run_experiment(spec, runs_root=tmp_path_factory.mktemp("measures")).runs)


class Tables:
    """What a run's tables say, read plainly. Times in ns, one entry a request."""

    def __init__(self, run: SealedRun) -> None:
        self.rows = run.table("requests").to_pylist()
        self.sent = {(row["session"], row["request"]): row["sent_ns"] for row in self.rows}
        self.tokens = {(row["session"], row["request"]): row["completion_tokens"] for row in self.rows}
        chunks = with_tokens(run.table("chunks"))
        self.at: dict[tuple[int, int], list[int]] = {key: [] for key in self.sent}
        for (session, request), at_ns in zip(
            values_of(chunks, "session", "request"), received_ns(chunks).tolist(), strict=True
        ):
            self.at[session, request].append(at_ns)

    @property
    def ttft_ns(self) -> list[int]:
        return [min(at) - self.sent[key] for key, at in self.at.items()]

    @property
    def e2e_ns(self) -> list[int]:
        return [row["done_ns"] - row["sent_ns"] for row in self.rows]

    @property
    def tpot_ns(self) -> list[float]:
        return [(max(at) - min(at)) / (self.tokens[key] - 1) for key, at in self.at.items()]

    @property
    def itl_ns(self) -> list[int]:
        return [gap for at in self.at.values() for gap in np.diff(sorted(at)).tolist()]

    @property
    def own_ns(self) -> list[int]:
        """First send to last token of each session, less what it waited between an answer and the next request."""
        sessions = sorted({session for session, _request in self.sent})
        waits = {(row["session"], row["request"]): row["due_ns"] - row["trigger_ns"] for row in self.rows}
        return [
            max(max(at) for key, at in self.at.items() if key[0] == session)
            - self.sent[session, 0]
            - sum(wait for key, wait in waits.items() if key[0] == session and key[1])
            for session in sessions
        ]


def shown(name: str, run: SealedRun) -> float:
    value = MEASURES[name].of(run)
    return value.amount / value.units


def test_latencies_are_those_of_the_tables(runs: list[SealedRun]) -> None:
    for run in runs:
        tables = Tables(run)
        for name, values in (("ttft", tables.ttft_ns), ("e2e", tables.e2e_ns), ("itl", tables.itl_ns)):
            assert shown(f"{name}_p50", run) == pytest.approx(np.median(values) / 1e6), name
        assert shown("ttft_p99", run) == pytest.approx(np.quantile(tables.ttft_ns, 0.99) / 1e6, rel=0.02)
        assert shown("tpot", run) == pytest.approx(np.mean(tables.tpot_ns) / 1e6)


def test_costs_and_tokens_are_those_of_the_tables(runs: list[SealedRun]) -> None:
    for run in runs:
        tables, tokens = Tables(run), sum(row["completion_tokens"] for row in run.table("requests").to_pylist())
        span_ns = max(row["done_ns"] for row in tables.rows) - min(row["sent_ns"] for row in tables.rows)
        assert shown("tokens", run) == pytest.approx(tokens * 1e9 / span_ns)
        for name in ("A", "B", "cost"):
            assert MEASURES[name].of(run).units == tokens
        assert shown("B", run) == shown("cost", run)
        computed = sum(row["prompt_tokens"] - row["cached_tokens"] for row in tables.rows)
        assert MEASURES["reuse"].of(run) == Value(computed, len(tables.rows))
        steps = run.table("steps").to_pylist()
        occupied, slots = sum(row["n"] for row in steps), sum(row["b"] for row in steps)
        assert MEASURES["padding"].of(run) == Value(slots, occupied)


def test_session_times_and_goodput_are_those_of_the_tables(runs: list[SealedRun]) -> None:
    for run in runs:
        tables = Tables(run)
        assert shown("session_p50", run) == pytest.approx(np.median(tables.own_ns) / 1e9)
        span_h = (max(map(max, tables.at.values())) - min(tables.sent.values())) / 3.6e12
        within = sum(own <= TARGET_S * 1e9 for own in tables.own_ns)
        assert shown("session_goodput", run) == pytest.approx(within / span_h)
    assert 0 < sum(own <= TARGET_S * 1e9 for run in runs for own in Tables(run).own_ns) < 12


def test_without_a_target_there_is_no_goodput(tmp_path: Path) -> None:
    (run, *_) = run_experiment(small_experiment(backend="sim", time_scale=1.0), runs_root=tmp_path).runs
    assert MEASURES["session_goodput"].of(run) is None


def by_replicate(*amounts: float | None, units: float = 1.0, bounds: tuple[Bounds | None, ...] = ()) -> Measure:
    """A measure with these values in replicates 0, 1, ..."""

    def of(run: SealedRun) -> Value | None:
        amount = amounts[run.manifest.replicate]
        return None if amount is None else Value(amount, units + run.manifest.replicate)

    return Measure("tried", "tried_ms", "", of, bounds=(lambda run: bounds[run.manifest.replicate]) if bounds else None)


def test_over_several_runs_a_measure_is_the_sum_of_amounts_over_the_sum_of_units(runs: list[SealedRun]) -> None:
    pair = [run for run in runs if run.manifest.condition == "base"]
    assert value_over(by_replicate(6.0, 4.0), pair) == mean_of([Value(6.0, 1.0), Value(4.0, 2.0)]) == 10 / 3
    assert value_over(by_replicate(6.0, None), pair) is None
    assert value_over(by_replicate(6.0, 4.0), []) is None
    assert value_over(by_replicate(1.0, -1.0, units=-0.5), pair) is None  # the units sum to 0


def test_over_several_runs_a_bound_and_an_exact_value_weigh_by_their_units(runs: list[SealedRun]) -> None:
    pair = [run for run in runs if run.manifest.condition == "base"]
    of_one = by_replicate(6.0, 4.0, bounds=(Bounds(3.0, 9.0), None))
    assert bound_over(of_one, pair, "at_least") == (3.0 * 1 + 4.0) / (1 + 2)
    assert bound_over(of_one, pair, "at_most") == (9.0 * 1 + 4.0) / (1 + 2)
    assert bound_over(by_replicate(6.0, 4.0), pair, "at_least") is None
    assert bound_over(by_replicate(6.0, 4.0, bounds=(None, None)), pair, "at_least") is None
    assert bound_over(by_replicate(None, 4.0, bounds=(Bounds(3.0, 9.0), None)), pair, "at_least") is None


@pytest.mark.parametrize(
    ("name", "value", "has_ratio"),
    [
        ("cost", None, False),
        ("cost", Value(0.0), False),
        ("cost", Value(-1.0), False),
        ("cost", Value(1.0, 0.0), False),
        ("cost", Value(1.0), True),
        ("session_goodput", Value(0.0, 2.0), True),
        ("session_goodput", Value(-1.0, 2.0), False),
        ("padding", Value(9.0, 10.0), False),
        ("padding", Value(10.0, 10.0), True),
    ],
)
def test_what_can_stand_in_a_ratio(name: str, value: Value | None, has_ratio: bool) -> None:
    assert MEASURES[name].has_ratio(value) is has_ratio


def test_a_quantile_needs_ten_values_beyond_it_on_each_side() -> None:
    assert MEASURES["ttft_p50"].num_needed == 2 * MIN_BEYOND
    assert MEASURES["session_p99"].num_needed == 100 * MIN_BEYOND
    assert MEASURES["cost"].num_needed == 1


def test_more_tokens_and_finished_sessions_are_better_and_less_of_all_else() -> None:
    assert {name for name, each in MEASURES.items() if not each.is_lower_better} == {"tokens", "session_goodput"}
    assert {name for name, each in MEASURES.items() if each.may_be_zero} == {"session_goodput"}
