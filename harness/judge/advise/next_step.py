"""What to try next: the one change of slots or sizes that a quick simulation of the plans at hand predicts to pay most.

A hint and no proposal: it is of these plans alone. ``advise`` judges changes on new ones. Nothing is run here.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from harness.clock import NS_PER_S
from harness.errors import HarnessError
from harness.judge.advise.diagnose import Diagnosis, diagnose
from harness.judge.analysis.logs.engine_steps import step_log_of
from harness.judge.analysis.stats import FloatArray
from harness.judge.planning.monte_carlo import DrawnRatio, ratio_of_means
from harness.measure.records.run import SealedRun
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import CostModel
from harness.model.plan.model import Plan
from harness.model.sim.plans import plan_arrays
from harness.model.sim.predict.deciding import (
    NO_CHANGE,
    BreakEven,
    CostChange,
    break_even,
    deciding_sizes,
    unmeasured_in_words,
)
from harness.model.sim.predict.draws import Perturbation, draw, perturbation_of, run_draws
from harness.model.spec import ServerShape, ServerSpec

DRAWS, DRAWS_OF_BEST = 20, 60
MOST_REQUESTS = 200_000
"""Requests that the comparison of all candidates simulates at most."""
LEAST_SAVING = 0.01
ENOUGH = 0.8
"""Fewer slots are named where they keep this share of the largest saving by slots."""
SLOT_STEPS = (1.25, 1.5, 2.0)
MOST_SIZES = 12
"""Sizes that are tried, one added at a time."""


@dataclass(frozen=True)
class Change:
    """A change of slots or sizes with its predicted ratio to the server as it is, on the plans at hand.

    break_even: how far the deciding costs may be off. unmeasured: which of its sizes have no measured cost, in words.
    """

    shape: ServerShape
    baseline: ServerShape
    ratio: DrawnRatio
    break_even: BreakEven
    unmeasured: str

    @property
    def is_slots(self) -> bool:
        return self.shape.kv_slots != self.baseline.kv_slots

    @property
    def name(self) -> str:
        """12 KV slots in place of 8; the compiled batch size 6 added."""
        if self.is_slots:
            return f"{self.shape.kv_slots} KV slots in place of {self.baseline.kv_slots}"
        (size,) = set(self.shape.decode_buckets) - set(self.baseline.decode_buckets)
        return f"the compiled batch size {size} added to {list(self.baseline.decode_buckets)}"

    @property
    def sentence(self) -> str:
        """What it is predicted to save, how sure that is, and given which costs."""
        given = f"; {self.unmeasured}" if self.unmeasured else ""
        turns = "" if self.break_even.change is None else f"; {self.break_even}"
        saving, error = 100 * (1 - self.ratio.ratio), 100 * self.ratio.error
        return f"{self.name}: predicted to save {saving:.1f} +- {error:.1f} % on these plans{given}{turns}"


@dataclass(frozen=True)
class NextStep:
    """What sealed runs suggest.

    baseline: the condition it is about. diagnosis: None where its records do not show what was lost. change: None: none
    pays, or none was simulated. eager: (decode steps without a graph, all decode steps) of a vLLM. command: the one
    that goes on from here. is_tested: conditions changed slots or sizes alone.
    """

    baseline: str
    diagnosis: Diagnosis | None
    change: Change | None
    command: str
    eager: tuple[int, int] = (0, 0)
    is_tested: bool = False

    @property
    def suggestion(self) -> str:
        """What to try, before the command."""
        num_eager, num_steps = self.eager
        if num_eager:
            return f"{num_eager:,} of {num_steps:,} decode steps ran without a graph; sizes that capture them"
        if self.change is None:
            least = "more than what was tested" if self.is_tested else "1 %"
            return f"no change of slots or sizes is predicted to save {least}. How many runs a closer answer takes"
        return f"{self.change.sentence}. Test it on new plans"

    @property
    def line(self) -> str:
        """One line with one command."""
        return f"next: {self.suggestion}: {self.command}"

    @property
    def losses(self) -> list[tuple[str, str]]:
        """(kind, words) of what the baseline lost, as far as its records show it; times in seconds of its clock."""
        rows: list[tuple[str, str]] = []
        if (found := self.diagnosis) is not None:
            total = found.device_ns or found.simulated_ns
            lost, padding = found.lost_prefill_ns, found.padding_ns
            num_lost = found.num_rearrivals - found.num_reused
            rows = [
                (
                    "Lost reuse",
                    f"{num_lost} of {found.num_rearrivals} returning requests; to compute "
                    f"their tokens again took {lost / NS_PER_S:.2f} s, {100 * lost / total:.1f} % of device time",
                ),
                (
                    "Padding",
                    f"{100 * found.padding_ratio:.1f} % of the decode places were empty: {padding / NS_PER_S:.2f} s, "
                    f"{100 * padding / total:.1f} % of device time",
                ),
            ]
            if found.waiting_session_ns is not None:
                waited = found.waiting_session_ns / NS_PER_S
                rows.append(("Prefill blocking", f"{waited:.2f} session seconds behind the prompts of other sessions"))
        if self.eager[0]:
            share = self.eager[0] / self.eager[1]
            rows.append(("Steps without a graph", f"{self.eager[0]:,}, {100 * share:.1f} % of the decode steps"))
        return rows


def next_step(sealed: Sequence[SealedRun], runs: Path, source: str | Path = "") -> NextStep | None:
    """What the sealed runs of an experiment suggest; None where no valid baseline run can be simulated.

    runs: their folder. source: the file of the experiment; default: its name.
    """
    try:
        first = sealed[0].spec
    except HarnessError:
        # Sealed by another version: its figures can be shown, not simulated.
        return None
    baseline = first.baseline_name
    valid = [run for run in sealed if run.condition == baseline and run.is_valid]
    if not valid or valid[0].server.is_routed:
        return None
    where = [] if runs == Path("runs") else ["--runs", str(runs)]
    advise = shlex.join(["harness", "predict", "advise", first.name, *where])
    if valid[0].server.is_paged:
        logs = [log for run in valid if (log := step_log_of(run)) is not None]
        # Under speculative decoding a captured size counts tokens: requests without a graph propose none.
        logs = [log for log in logs if not log.num_drafts]
        num_eager = sum(sum(log.eager_by_n.values()) for log in logs)
        eager = (num_eager, sum(log.decode_steps.num_rows for log in logs))
        return NextStep(baseline, None, None, advise, eager) if num_eager else None
    try:
        diagnosis = diagnose(sealed, baseline)
    except HarnessError:
        # No step log, or reuse that the server does not state.
        diagnosis = None
    server, tested = valid[0].simulated_server, {run.server.shape for run in sealed}
    try:
        model, perturbation = valid[0].cost_model, perturbation_of(first.prediction, valid[0].cost_file)
        change = best_change([run.plan for run in valid], server, model, perturbation, tested)
    except HarnessError:
        return None
    power = shlex.join(["harness", "power", str(source or first.name), *where])
    is_tested = any(_differs_alone(shape, server.shape) for shape in tested)
    return NextStep(baseline, diagnosis, change, power if change is None else advise, is_tested=is_tested)


def best_change(
    plans: Sequence[Plan],
    server: ServerSpec,
    model: CostModel,
    perturbation: Perturbation,
    tested: set[ServerShape] | frozenset[ServerShape] = frozenset(),
) -> Change | None:
    """The change that saves most on these plans; None where none saves LEAST_SAVING, beyond the error of the draws.

    tested: configurations that need no test any more; a change that saves less than they do is none.
    """
    base = server.shape
    shapes = [shape for shape in candidates(base, plans) if shape not in tested]
    num_requests = sum(plan.num_requests for plan in plans)
    num_draws = min(DRAWS, MOST_REQUESTS // (num_requests * (len(shapes) + 1)))
    if not shapes or num_draws < 2:
        return None
    compared = _Compared(plans, server, model, perturbation, range(num_draws))
    savings = {shape: 1 - compared.ratio(shape).ratio for shape in shapes}
    best = max(shapes, key=lambda shape: savings[shape])
    of_tested = (1 - compared.ratio(shape).ratio for shape in tested if _differs_alone(shape, base))
    if savings[best] < max(LEAST_SAVING, *of_tested, 0.0):
        return None
    like_it = [shape for shape in shapes if (shape.kv_slots == base.kv_slots) == (best.kv_slots == base.kv_slots)]
    best = next(shape for shape in like_it if savings[shape] >= ENOUGH * savings[best])
    # Draws that did not choose it: the largest of many ratios is too good by chance.
    again = min(DRAWS_OF_BEST, MOST_REQUESTS // (2 * num_requests))
    compared = _Compared(plans, server, model, perturbation, range(num_draws, num_draws + again))
    ratio = compared.ratio(best)
    if ratio.ratio > 1 - LEAST_SAVING or not ratio.shows_effect:
        return None
    sizes = deciding_sizes(best.decode_buckets, base.decode_buckets)
    return Change(
        best,
        base,
        ratio,
        BreakEven(sizes, break_even(lambda change: compared.ratio(best, CostChange(sizes, change)).ratio)),
        unmeasured_in_words(model, (*best.decode_buckets, *base.decode_buckets)),
    )


def _differs_alone(shape: ServerShape, base: ServerShape) -> bool:
    """Whether the configuration differs from the base in slots or sizes alone."""
    return shape != base == shape._replace(kv_slots=base.kv_slots, decode_buckets=base.decode_buckets)


def is_quick(plans: Sequence[Plan]) -> bool:
    """Whether all candidates can be compared within MOST_REQUESTS."""
    most = len(SLOT_STEPS) + MOST_SIZES + 1
    return 2 * most * sum(plan.num_requests for plan in plans) <= MOST_REQUESTS


def candidates(base: ServerShape, plans: Sequence[Plan]) -> Iterator[ServerShape]:
    """More KV slots in steps, and each size added that the plans can fill, evenly thinned where there are many."""
    for factor in SLOT_STEPS:
        yield base._replace(kv_slots=math.ceil(base.kv_slots * factor))
    most = min(base.max_num_seqs, max(len(plan.sessions) for plan in plans))
    missing = [size for size in range(1, most + 1) if size not in base.decode_buckets]
    for place in sorted({round(place) for place in np.linspace(0, len(missing) - 1, MOST_SIZES)}) if missing else ():
        yield base._replace(decode_buckets=tuple(sorted({*base.decode_buckets, missing[place]})))


class _Compared:
    """Draws of a server on the plans, with which those of changed servers are compared."""

    def __init__(
        self, plans: Sequence[Plan], server: ServerSpec, model: CostModel, perturbation: Perturbation, numbers: range
    ) -> None:
        self._arrays, self._server, self._model = plan_arrays(plans), server, model
        self._perturbation, self._numbers = perturbation, numbers
        self._base_ns: dict[CostChange, FloatArray] = {}

    def ratio(self, shape: ServerShape, costs: CostChange = NO_CHANGE) -> DrawnRatio:
        base, of_base = self._server.shape, costs.seen_by(self._server.shape.decode_buckets)
        if of_base not in self._base_ns:
            self._base_ns[of_base] = self._device_ns(base, of_base, "base")
        return ratio_of_means(self._device_ns(shape, costs, "changed"), self._base_ns[of_base])

    def _device_ns(self, shape: ServerShape, costs: CostChange, role: str) -> FloatArray:
        """Device time of all plans in each draw."""
        changes = {"decode_buckets": shape.decode_buckets, "kv_slots": shape.kv_slots}
        config = EngineConfig.from_server(self._server.model_copy(update=changes))
        perturbation = replace(self._perturbation, role=role)
        drawn = draw(self._arrays, config, costs.of(self._model), perturbation, self._numbers)
        totals = run_draws(drawn, config).totals
        device_ns = np.asarray(totals["decode_ns"] + totals["prefill_ns"], dtype=np.float64)
        return device_ns.reshape(len(self._numbers), -1).sum(axis=1)
