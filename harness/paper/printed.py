"""Every predicted figure that the paper prints, and the same figure computed here under any rules.

The printed values are the paper's, with the table they stand in; they are held against, never used. Differences are
shown to the last printed digit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from harness.engine.config import EngineConfig
from harness.engine.cost import load_cost_model
from harness.sim.inputs import Input, input_arrays
from harness.sim.search.rank import TOP, sensitivity
from harness.sim.search.run import SearchResult, search
from harness.sim.search.space import load_space
from harness.sim.simulate import run_batch
from harness.spec import ServerShape, WorkloadSpec

BASELINE = ServerShape(8, (1, 2, 4, 8), 8, 8192)
MORE_SLOTS = ServerShape(16, (1, 2, 4, 8, 16), 16, 8192)
SELECTED = ServerShape(16, (1, 4, 6, 8, 10, 16), 16, 8192)
GRID_ONLY = ServerShape(8, (1, 4, 6, 8), 8, 8192)
WITHOUT_TEN = ServerShape(16, (1, 4, 5, 6, 8, 16), 16, 8192)


class Figure(NamedTuple):
    """One printed number. ``printed``: as the paper prints it, under ``rules``; "" where it prints none."""

    where: str
    what: str
    rules: str
    printed: str
    computed: str

    @property
    def agrees(self) -> bool:
        return self.printed in ("", self.computed)


class Comparison(NamedTuple):
    """One row of Table S12; its predictions are also those of the table of predictions (section 4-4).

    ratio, ratio_dummy: without and with the dummy rule. error, error_dummy: their distance from the observed ratio.
    measured_s: channel A of this configuration and of the baseline (Table S8): the observed ratio with more digits.
    """

    measurement: str
    users: int
    seed: int
    candidate: ServerShape
    measured_s: tuple[float, float]
    ratio: str
    error: str
    ratio_dummy: str
    error_dummy: str
    reuse: int
    reuse_dummy: int


COMPARISONS = (
    Comparison("initial", 6, 20261000, BASELINE, (1.0, 1.0), "1.0000", "", "1.0000", "", 14, 13),
    Comparison("initial", 6, 20261000, MORE_SLOTS, (22.508, 22.984), "0.9610", "0.0183", "0.9576", "0.0217", 18, 18),
    Comparison("initial", 6, 20261000, SELECTED, (22.201, 22.984), "0.9466", "0.0194", "0.9432", "0.0228", 18, 18),
    Comparison("initial", 8, 20261000, BASELINE, (1.0, 1.0), "1.0000", "", "1.0000", "", 9, 6),
    Comparison("initial", 8, 20261000, MORE_SLOTS, (29.541, 32.197), "0.9101", "0.0074", "0.8845", "0.0330", 24, 24),
    Comparison("initial", 8, 20261000, SELECTED, (29.069, 32.197), "0.8971", "0.0058", "0.8718", "0.0310", 24, 24),
    Comparison("initial, exploratory", 10, 20261000, BASELINE, (1.0, 1.0), "1.0000", "", "1.0000", "", 7, 6),
    Comparison(
        "initial, exploratory",
        10,
        20261000,
        MORE_SLOTS,
        (38.245, 40.040),
        "0.9213",
        "0.0339",
        "0.9037",
        "0.0515",
        29,
        29,
    ),
    Comparison(
        "initial, exploratory", 10, 20261000, SELECTED, (37.091, 40.040), "0.8899", "0.0364", "0.8729", "0.0534", 29, 29
    ),
    Comparison("new inputs", 6, 20261100, BASELINE, (1.0, 1.0), "1.0000", "", "1.0000", "", 16, 16),
    Comparison("new inputs", 6, 20261100, MORE_SLOTS, (25.954, 26.110), "0.9874", "0.0066", "0.9874", "0.0066", 18, 18),
    Comparison("new inputs", 6, 20261100, SELECTED, (25.558, 26.110), "0.9713", "0.0076", "0.9713", "0.0076", 18, 18),
)
"""Source: the paper, Table S12 (columns: not included, included, simulated reuse); measured_s: Table S8, rows "Sum"."""

SENSITIVITY = (
    # score, N, selected, search sum, search per-N, evaluation sum, evaluation per-N, rank of the recorded one, top-20
    # in common
    ("sum-seconds", (6, 8), WITHOUT_TEN, "0.9362", "0.9383", "0.9237", "0.9247", 11, 4),
    ("sum-seconds", (6, 8, 10), SELECTED, "0.9209", "0.9254", "0.9066", "0.9109", 1, 20),
    ("sum-seconds", (8, 10), SELECTED, "0.9089", "0.9099", "0.8870", "0.8884", 1, 15),
    ("per-n", (6, 8), WITHOUT_TEN, "0.9362", "0.9383", "0.9237", "0.9247", 12, 4),
    ("per-n", (6, 8, 10), SELECTED, "0.9209", "0.9254", "0.9066", "0.9109", 1, 20),
    ("per-n", (8, 10), SELECTED, "0.9089", "0.9099", "0.8870", "0.8884", 1, 14),
)
"""Source: the paper, Tables S10 and S11."""

PARTS = (
    # what, candidate, printed: the re-measurement at N=6
    ("prefill cost ratio", MORE_SLOTS, "0.9308"),
    ("decode cost ratio", MORE_SLOTS, "1.0000"),
    ("decode cost ratio", SELECTED, "0.9802"),
)
"""Source: the paper, section 4-5."""


class Sums(NamedTuple):
    """Three blocks together."""

    device_ns: int
    decode_ns: int
    prefill_ns: int
    reused: int


@lru_cache(maxsize=512)
def sums(candidate: ServerShape, users: int, seed: int, rules: str) -> Sums:
    """Device time and reused re-arrivals of a configuration over the blocks 0, 1, 2 of one seed."""
    workload = WorkloadSpec(source="paper", num_sessions=users)
    arrays = input_arrays([Input(workload, seed, block) for block in range(3)])
    config = EngineConfig(*candidate[:2], candidate.kv_slots, candidate.slot_tokens, rules=rules)
    outcome = run_batch(arrays, config, load_cost_model("paper"))
    decode, prefill = (int(outcome.totals[name].sum()) for name in ("decode_ns", "prefill_ns"))
    return Sums(decode + prefill, decode, prefill, int((outcome.requests["cached_tokens"] > 0).sum()))


def ratio(candidate: ServerShape, users: int, seed: int, rules: str) -> float:
    """Predicted cost ratio to the baseline, sums before division."""
    return sums(candidate, users, seed, rules).device_ns / sums(BASELINE, users, seed, rules).device_ns


def prediction_figures(rules: str) -> Iterator[Figure]:
    """The table of predictions, Table S12 and the parts named in section 4-5, computed under ``rules``."""
    is_dummy = rules == "paper+dummy"
    is_printed = rules in ("paper", "paper+dummy")
    for row in COMPARISONS:
        where = f"Table S12, {row.measurement}, N={row.users}"
        found = ratio(row.candidate, row.users, row.seed, rules)
        printed = row.ratio_dummy if is_dummy else row.ratio
        yield Figure(where, f"ratio of {row.candidate.label}", rules, printed if is_printed else "", f"{found:.4f}")
        printed = row.error_dummy if is_dummy else row.error
        if row.error:
            error = abs(row.measured_s[0] / row.measured_s[1] - found)
            yield Figure(
                where, f"error e of {row.candidate.label}", rules, printed if is_printed else "", f"{error:.4f}"
            )
        reuse = sums(row.candidate, row.users, row.seed, rules).reused
        printed = f"{row.reuse_dummy if is_dummy else row.reuse}/{3 * row.users}"
        yield Figure(
            where, f"reuse of {row.candidate.label}", rules, printed if is_printed else "", f"{reuse}/{3 * row.users}"
        )
    for what, candidate, printed in PARTS:
        one, base = (sums(each, 6, 20261100, rules) for each in (candidate, BASELINE))
        found = one.prefill_ns / base.prefill_ns if what.startswith("prefill") else one.decode_ns / base.decode_ns
        shown = printed if rules == "paper" else ""
        yield Figure("section 4-5, new inputs, N=6", f"{what} of {candidate.label}", rules, shown, f"{found:.4f}")


@lru_cache(maxsize=4)
def run_search(rules: str, tell: Callable[[float], None] = lambda _share: None) -> SearchResult:
    """The paper's search under ``rules``, in a folder that is gone afterwards. tell: takes the share done."""
    space = load_space("paper").model_copy(update={"rules": rules})
    with TemporaryDirectory() as folder:
        return search(space, Path(folder) / "search", on_progress=lambda now: tell(now.done / now.total))


def search_figures(result: SearchResult) -> Iterator[Figure]:
    """The figures of section 5-1 and of Tables S10 and S11."""
    rules = result.space.rules
    is_paper = rules == "paper"

    def figure(where: str, what: str, printed: str, computed: str) -> Figure:
        return Figure(where, what, rules, printed if is_paper else "", computed)

    evaluation = result.evaluation
    assert evaluation is not None
    order = {candidate: index for index, candidate in enumerate(result.space.candidates())}
    best = result.ranked[0]
    yield figure("section 5-1", "candidates", "2077", str(result.ledger.num_rows))
    yield Figure(
        "section 5-1, S9",
        "selected",
        rules,
        SELECTED.label if rules != "vendor-0.11.1" else "",
        result.candidate(best).label,
    )
    yield figure("section 5-1", "its ratio on the search inputs", "0.920931", f"{result.scores.sum_seconds[best]:.6f}")
    yield figure("section 5-1", "its ratio on the evaluation inputs", "0.906644", f"{evaluation.sum_seconds[best]:.6f}")
    dummy = "0.8798" if rules == "paper+dummy" else ""
    found = f"{evaluation.sum_seconds[order[SELECTED]]:.4f}"
    yield Figure("S9", f"evaluation ratio of {SELECTED.label}", rules, "0.9066" if is_paper else dummy, found)
    yield figure(
        "released with the paper",
        f"evaluation ratio of {MORE_SLOTS.label}",
        "0.9279",
        f"{evaluation.sum_seconds[order[MORE_SLOTS]]:.4f}",
    )
    yield figure(
        "released with the paper",
        f"evaluation ratio of {GRID_ONLY.label}",
        "0.9929",
        f"{evaluation.sum_seconds[order[GRID_ONLY]]:.4f}",
    )
    top = result.ranked[:TOP]
    limits = sorted({result.candidate(index).max_num_seqs for index in top})
    yield figure("section 5-1", "batch_size of the top 20", "16", ", ".join(map(str, limits)))
    spread = max(result.scores.sum_seconds[top]) - min(result.scores.sum_seconds[top])
    yield figure("section 5-1", "top 20 within 0.5 percentage points", "yes", "yes" if spread <= 0.005 else "no")
    for row, printed in zip(sensitivity(result.judged, result.baseline, result.space), SENSITIVITY, strict=True):
        where = f"Table S10, {row.score}, N={','.join(map(str, row.users))}"
        assert (row.score, row.users) == printed[:2]
        yield figure(where, "selected", printed[2].label, result.candidate(row.selected).label)
        scores = (row.search_sum, row.search_per_n, row.evaluation_sum, row.evaluation_per_n)
        names = ("search sum ratio", "search per-N mean", "evaluation sum ratio", "evaluation per-N mean")
        for name, text, value in zip(names, printed[3:7], scores, strict=True):
            yield figure(where, name, text, f"{value:.4f}")
        yield figure(where, "rank of the recorded one", str(printed[7]), str(row.reference_rank))
        yield figure(where.replace("S10", "S11"), "top 20 in common", str(printed[8]), str(row.common_top))


def disagreements(figures: Sequence[Figure]) -> list[Figure]:
    return [figure for figure in figures if not figure.agrees]
