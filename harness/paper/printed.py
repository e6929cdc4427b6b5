"""The paper's predicted figures beside the same figures computed under any rules, and the page that compares them.

Printed values are compared with to their last digit, never used. Nothing is measured. The page's words about causes are
held by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from harness.clock import NS_PER_S
from harness.engine.config import EngineConfig
from harness.engine.cost import load_cost_model
from harness.processes import parallel_map
from harness.sim.ablations import ABLATIONS, LABEL, run_ablated, with_arrivals_of
from harness.sim.inputs import Input, input_arrays
from harness.sim.kernel.arrays import Outcome, PlanArrays
from harness.sim.search.rank import TOP, sensitivity
from harness.sim.search.run import SearchResult, search
from harness.sim.search.space import load_space
from harness.sim.simulate import run_batch, run_totals
from harness.spec import ServerShape, Treatment, WorkloadSpec
from harness.table import markdown_rows

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


def _figure(rules: str, where: str, what: str, computed: str, *printed: str) -> Figure:
    """printed: as the paper prints it under its base rules and, where it does, under its rules with the dummy slot."""
    in_order = ("paper", "paper+dummy")[: len(printed)]
    return Figure(where, what, rules, printed[in_order.index(rules)] if rules in in_order else "", computed)


def prediction_figures(rules: str) -> Iterator[Figure]:
    """The table of predictions, Table S12 and the parts named in section 4-5, computed under ``rules``."""
    for row in COMPARISONS:
        where, label, turns = f"Table S12, {row.measurement}, N={row.users}", row.candidate.label, 3 * row.users
        predicted = ratio(row.candidate, row.users, row.seed, rules)
        yield _figure(rules, where, f"ratio of {label}", f"{predicted:.4f}", row.ratio, row.ratio_dummy)
        if row.error:
            error = abs(row.measured_s[0] / row.measured_s[1] - predicted)
            yield _figure(rules, where, f"error e of {label}", f"{error:.4f}", row.error, row.error_dummy)
        reused = sums(row.candidate, row.users, row.seed, rules).reused
        printed, dummy = f"{row.reuse}/{turns}", f"{row.reuse_dummy}/{turns}"
        yield _figure(rules, where, f"reuse of {label}", f"{reused}/{turns}", printed, dummy)
    for what, candidate, printed in PARTS:
        changed, base = (sums(each, 6, 20261100, rules) for each in (candidate, BASELINE))
        is_prefill = what.startswith("prefill")
        part = changed.prefill_ns / base.prefill_ns if is_prefill else changed.decode_ns / base.decode_ns
        where = "section 4-5, new inputs, N=6"
        yield _figure(rules, where, f"{what} of {candidate.label}", f"{part:.4f}", printed)


@lru_cache(maxsize=4)
def run_search(rules: str, tell: Callable[[float], None] = lambda _share: None) -> SearchResult:
    """The paper's search under ``rules``, in a folder that is gone afterwards. tell: takes the share done."""
    space = load_space("paper").model_copy(update={"rules": rules})
    with TemporaryDirectory() as folder:
        return search(space, Path(folder) / "search", on_progress=lambda now: tell(now.done / now.total))


def search_figures(result: SearchResult) -> Iterator[Figure]:
    """The figures of section 5-1 and of Tables S10 and S11."""
    evaluation, best, top = result.evaluation, result.ranked[0], result.ranked[:TOP]
    assert evaluation is not None
    order = {candidate: index for index, candidate in enumerate(result.space.candidates())}
    evaluated = {shape: f"{evaluation.sum_seconds[order[shape]]:.4f}" for shape in (SELECTED, MORE_SLOTS, GRID_ONLY)}
    figure = partial(_figure, result.space.rules)
    section, released = "section 5-1", "released with the paper"
    selected = result.candidate(best).label
    on_search, on_evaluation = (f"{scores.sum_seconds[best]:.6f}" for scores in (result.scores, evaluation))
    yield figure(section, "candidates", str(result.ledger.num_rows), "2077")
    yield figure(f"{section}, S9", "selected", selected, SELECTED.label, SELECTED.label)
    yield figure(section, "its ratio on the search inputs", on_search, "0.920931")
    yield figure(section, "its ratio on the evaluation inputs", on_evaluation, "0.906644")
    yield figure("S9", f"evaluation ratio of {SELECTED.label}", evaluated[SELECTED], "0.9066", "0.8798")
    yield figure(released, f"evaluation ratio of {MORE_SLOTS.label}", evaluated[MORE_SLOTS], "0.9279")
    yield figure(released, f"evaluation ratio of {GRID_ONLY.label}", evaluated[GRID_ONLY], "0.9929")
    limits = sorted({result.candidate(index).max_num_seqs for index in top})
    yield figure(section, "batch_size of the top 20", ", ".join(map(str, limits)), "16")
    spread = max(result.scores.sum_seconds[top]) - min(result.scores.sum_seconds[top])
    yield figure(section, "top 20 within 0.5 percentage points", "yes" if spread <= 0.005 else "no", "yes")
    for row, printed in zip(sensitivity(result.judged, result.baseline, result.space), SENSITIVITY, strict=True):
        where = f"Table S10, {row.score}, N={','.join(map(str, row.users))}"
        assert (row.score, row.users) == printed[:2]
        yield figure(where, "selected", result.candidate(row.selected).label, printed[2].label)
        scores = (row.search_sum, row.search_per_n, row.evaluation_sum, row.evaluation_per_n)
        names = ("search sum ratio", "search per-N mean", "evaluation sum ratio", "evaluation per-N mean")
        for name, text, value in zip(names, printed[3:7], scores, strict=True):
            yield figure(where, name, f"{value:.4f}", text)
        yield figure(where, "rank of the recorded one", str(row.reference_rank), str(printed[7]))
        yield figure(where.replace("S10", "S11"), "top 20 in common", str(row.common_top), str(printed[8]))


def disagreements(figures: Sequence[Figure]) -> list[Figure]:
    return [figure for figure in figures if not figure.agrees]


RULES = ("paper", "paper+dummy", "vendor-0.11.1")

HEAD = """\
# The paper's figures, under its own rules and under the vendor's

Written by `harness paper rules -o docs/paper-rules.md`; do not edit. All ratios are simulated with the paper's seeded
inputs and its cost coefficients (`plans/costs/paper.toml`). *Printed* is what the paper prints (S12, S10, S11,
sections 4-5 and 5-1). *paper* and *paper+dummy* are its simulator's rules, *vendor-0.11.1* is what vllm-rbln 0.11.1
does.
"""

WHY = """\
## Where the two differ, and why

The rules differ in two moments of a KV slot's life; queueing, buckets, costs and arrivals are the same.

1. **Immediate release.** In the vendor's scheduler a request that completes gives its slot back in the very step that
   completes it, so the next `schedule()` may already evict it. In the paper's simulator it stays protected until the
   next admission has chosen its victim: an admission right behind a completion takes an older slot instead.
2. **The pre-paid eviction.** On each decode step with 0 < n < limit the vendor needs a free slot to point padding
   rows at. When none is free it evicts the oldest inactive slot there and then, for good; the next admission gets
   that slot, so it is an eviction made early (against the slots inactive *then*), not a slot taken away. The paper's
   base rules have no such step. Its `paper+dummy` switch (S9) counts one slot as taken while 0 < n < limit: an
   admission evicts before its own look-up even when a slot is free, so one slot fewer holds reusable KV, and more
   reuse is lost than under the source's rules (column *reused* below).

Both matter only where slots run out. With 16 slots and up to 10 sessions almost nothing is evicted under any rules: the
device seconds of the changed configurations agree (table below), and every difference between the ratios comes from
their denominator, the baseline with 8 slots.
"""


ABLATED = f"""\
Each changes one rule and keeps the rest; {LABEL}. Ratios to the baseline under the same change; the paper's own
inputs, N in {{6, 8, 10}}, seed 20261000, rules vendor-0.11.1 unless the change says otherwise. Table XI of the paper
(fixed arrivals) cannot be reproduced to the digit: it pins arrivals at *observed* times, which are not printed; here
they are pinned at those simulated under the baseline.
"""


def page(tell: Callable[[float], None] = lambda _share: None) -> str:
    """The whole page as Markdown. tell: takes the share of the searches done, which take most of the time."""
    return "\n".join(_parts(tell)) + "\n"


def _parts(tell: Callable[[float], None]) -> Iterator[str]:
    predictions = {rules: list(prediction_figures(rules)) for rules in RULES}
    shares: dict[str, float] = {}

    def tell_all(share: tuple[str, float]) -> None:
        shares.update([share])
        tell(sum(shares.values()) / len(RULES))

    found = dict(parallel_map(_searched, RULES, tell_all))
    searched = {rules: found[place][0] for place, rules in enumerate(RULES)}
    everything = [figure for rules in RULES for figure in (*predictions[rules], *searched[rules])]
    wrong = disagreements(everything)
    printed = sum(figure.printed != "" for figure in everything)
    yield HEAD
    yield f"{printed} printed figures were compared; {len(wrong)} differ in a printed digit" + (":" if wrong else ".")
    for figure in wrong:
        yield f"- {figure.where}: {figure.what} ({figure.rules}): printed {figure.printed}, computed {figure.computed}"
    same = "the same 20" if found[0][1] == found[1][1] else "other"
    yield f"S9 says that the dummy rule leaves the top 20 unchanged: here they are {same} candidates."
    yield ""
    yield WHY
    columns = ("baseline and changed configurations", "N", "rules", "device s", "evictions", "reused")
    yield markdown_rows(columns, _device_rows())
    yield "\n## Predictions (section 4-4, Table S12)\n"
    yield _compared(predictions)
    yield "\n## Search (section 5-1, Tables S10 and S11)\n"
    yield _compared(searched)
    yield "\n## Ablations\n"
    yield ABLATED
    columns = ("change", "meaning", "N", "baseline, device s", "more slots", "slots and grid")
    yield markdown_rows(columns, _ablation_rows())


def _searched(rules: str, tell: Callable[[tuple[str, float]], None]) -> tuple[list[Figure], set[int]]:
    """The figures of the paper's search under one set of rules, and its 20 best candidates."""

    def tell_share(share: float) -> None:
        tell((rules, share))

    result = run_search(rules, tell_share)
    return list(search_figures(result)), set(result.ranked[:TOP])


def _paper_inputs(users: int, treatment: Treatment = "as-drawn") -> PlanArrays:
    workload = WorkloadSpec(source="paper", num_sessions=users)
    return input_arrays([Input(workload, 20261000, block) for block in range(3)], treatment)


def _device_rows() -> Iterator[tuple[object, ...]]:
    cost = load_cost_model("paper")
    for candidate in (BASELINE, MORE_SLOTS, SELECTED):
        for users in (6, 8, 10):
            arrays = _paper_inputs(users)
            for rules in RULES:
                found = sums(candidate, users, 20261000, rules)
                evictions = int(run_totals(arrays, EngineConfig.of_shape(candidate, rules), cost)["evictions"].sum())
                reused = f"{found.reused}/{3 * users}"
                yield candidate.label, users, rules, f"{found.device_ns / NS_PER_S:.3f}", evictions, reused


def _compared(figures: dict[str, list[Figure]]) -> str:
    """Printed values of the base and dummy rules, then what each set of rules gives; bold: unlike ``paper``."""
    rows: list[tuple[str, ...]] = []
    for base, dummy, vendor in zip(*(figures[rules] for rules in RULES), strict=True):
        shown = vendor.computed if vendor.computed == base.computed else f"**{vendor.computed}**"
        marks = [figure.computed + ("" if figure.agrees else " (!)") for figure in (base, dummy)]
        rows.append((base.where, base.what, base.printed, marks[0], dummy.printed, marks[1], shown))
    columns = ("where", "figure", "printed", "paper", "printed, dummy", "paper+dummy", "vendor-0.11.1")
    return markdown_rows(columns, rows)


def _ablation_rows() -> Iterator[tuple[object, ...]]:
    cost = load_cost_model("paper")
    for changed in ABLATIONS.values():
        for users in (6, 8, 10):
            arrays = _paper_inputs(users, changed.treatment)
            rules = changed.rules or "vendor-0.11.1"
            if changed.is_fixed_arrivals:
                arrays = with_arrivals_of(arrays, EngineConfig.of_shape(BASELINE, rules), cost)
            baseline_s, *others_s = (
                _device_s(run_ablated(arrays, EngineConfig.of_shape(candidate, rules), cost, changed))
                for candidate in (BASELINE, MORE_SLOTS, SELECTED)
            )
            ratios = [f"{each / baseline_s:.4f}" for each in others_s]
            yield changed.name, changed.meaning, users, f"{baseline_s:.3f}", *ratios


def _device_s(outcome: Outcome) -> float:
    return float(outcome.totals["decode_ns"].sum() + outcome.totals["prefill_ns"].sum()) / NS_PER_S
