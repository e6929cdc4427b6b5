"""The page that sets the paper's printed figures beside those under the vendor's rules, and says why they differ.

Every number on it is computed when the page is written; the words about causes are held by tests. Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from harness.clock import NS_PER_S
from harness.engine.config import EngineConfig
from harness.engine.cost import load_cost_model
from harness.paper.printed import (
    BASELINE,
    COMPARISONS,
    MORE_SLOTS,
    SELECTED,
    Figure,
    disagreements,
    prediction_figures,
    run_search,
    search_figures,
    sums,
)
from harness.processes import side_by_side
from harness.sim.ablations import ABLATIONS, LABEL, run_ablated, with_arrivals_of
from harness.sim.inputs import Input, input_arrays
from harness.sim.kernel.arrays import Outcome, PlanArrays
from harness.sim.search.rank import TOP
from harness.sim.simulate import run_totals
from harness.spec import Treatment, WorkloadSpec

RULES = ("paper", "paper+dummy", "vendor-0.11.1")

HEAD = """\
# The paper's figures, under its own rules and under the vendor's

Written by `harness paper-rules -o docs/paper-rules.md`; do not edit. All ratios are simulated with the paper's seeded
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

    def tell_all(said: tuple[str, float]) -> None:
        shares.update([said])
        tell(sum(shares.values()) / len(RULES))

    found = dict(side_by_side(_searched, RULES, tell_all))
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
    yield "| baseline and changed configurations | N | rules | device s | evictions | reused |"
    yield "|---|---|---|---|---|---|"
    yield from _device_rows()
    yield "\n## Predictions (section 4-4, Table S12)\n"
    yield from _table(predictions)
    yield "\n## Search (section 5-1, Tables S10 and S11)\n"
    yield from _table(searched)
    yield "\n## Ablations\n"
    yield ABLATED
    yield "| change | meaning | N | baseline, device s | more slots | slots and grid |"
    yield "|---|---|---|---|---|---|"
    yield from _ablation_rows()


def _searched(rules: str, tell: Callable[[tuple[str, float]], None]) -> tuple[list[Figure], set[int]]:
    """The figures of the paper's search under one set of rules, and its 20 best candidates."""

    def tell_share(share: float) -> None:
        tell((rules, share))

    result = run_search(rules, tell_share)
    return list(search_figures(result)), set(result.ranked[:TOP])


def _paper_inputs(users: int, treatment: Treatment = "as-drawn") -> PlanArrays:
    workload = WorkloadSpec(source="paper", num_sessions=users)
    return input_arrays([Input(workload, 20261000, block) for block in range(3)], treatment)


def _device_rows() -> Iterator[str]:
    cost = load_cost_model("paper")
    for candidate in (BASELINE, MORE_SLOTS, SELECTED):
        for users in (6, 8, 10):
            arrays = _paper_inputs(users)
            for rules in RULES:
                found = sums(candidate, users, 20261000, rules)
                evictions = int(run_totals(arrays, EngineConfig.of_shape(candidate, rules), cost)["evictions"].sum())
                yield (
                    f"| {candidate.label} | {users} | {rules} | {found.device_ns / NS_PER_S:.3f} | {evictions} | "
                    f"{found.reused}/{3 * users} |"
                )


def _table(figures: dict[str, list[Figure]]) -> Iterator[str]:
    """Printed values of the base and dummy rules, then what each set of rules gives; bold: unlike ``paper``."""
    yield "| where | figure | printed | paper | printed, dummy | paper+dummy | vendor-0.11.1 |"
    yield "|---|---|---|---|---|---|---|"
    for base, dummy, vendor in zip(*(figures[rules] for rules in RULES), strict=True):
        shown = vendor.computed if vendor.computed == base.computed else f"**{vendor.computed}**"
        marks = [figure.computed + ("" if figure.agrees else " (!)") for figure in (base, dummy)]
        yield f"| {base.where} | {base.what} | {base.printed} | {marks[0]} | {dummy.printed} | {marks[1]} | {shown} |"


def _ablation_rows() -> Iterator[str]:
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
            yield f"| {changed.name} | {changed.meaning} | {users} | {baseline_s:.3f} | {ratios[0]} | {ratios[1]} |"


def _device_s(outcome: Outcome) -> float:
    return float(outcome.totals["decode_ns"].sum() + outcome.totals["prefill_ns"].sum()) / NS_PER_S


def summary(figures: Sequence[Figure]) -> str:
    """One line for a terminal."""
    wrong = disagreements(figures)
    return f"{sum(figure.printed != '' for figure in figures)} printed figures compared, {len(wrong)} differ"


__all__ = ["COMPARISONS", "page", "summary"]
