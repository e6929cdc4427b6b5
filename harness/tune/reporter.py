"""The words of a tune while it works; nothing is decided here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from harness.analysis.compare.stopping import SequentialStatus
from harness.kinds import kind_named
from harness.measure.records.run import SealedRun
from harness.model.spec import ExperimentSpec
from harness.tune.confirm import is_repeated, power
from harness.tune.explore import Explored

SAME_PLANS = (
    "every plan replays the same requests, so that an interval holds for these alone; "
    "workload.num_sessions draws fewer sessions of a recording, others each time"
)
AGENTS_AHEAD = "confirm: the predicted most agents at a time and one step beyond, then further out, then between"


class ServerLife(NamedTuple):
    """Wall seconds of a run besides its replay, and how many runs took them; of none they are assumed."""

    seconds: float
    num_runs: int

    def __str__(self) -> str:
        source = f"as {self.num_runs} runs here took" if self.num_runs else "assumed"
        return f"{self.seconds:.0f} s for its server, {source}"


def first_look(quick: Explored, blocks: int, spec: ExperimentSpec) -> str:
    """What a quick search proposes, and the chance that so many plans show it."""
    if quick.is_missed and quick.smallest is None:
        return "no configuration is predicted to meet the targets, so it ends after explore"
    if (proposal := quick.smallest) is None:
        most = 100 * quick.most_saved
        return f"no change is predicted to save 1 % (at most {most:.1f} %), so it ends after explore"
    predicted = f"{proposal.words}, predicted {100 * proposal.saving:.1f} % less"
    if is_repeated(spec):
        return f"{predicted}; whether repeats tell it from today's, the spread of the server's own runs decides"
    chance = power(proposal, blocks, 2, needs_flight=kind_named(spec.backend).has_device is not False)
    return (
        f"{predicted}; {blocks} plans tell it from today's with probability {chance:.2f}, if that is right and plans "
        "alone make runs differ"
    )


def budget_ended(budget: str, status: SequentialStatus | None) -> str:
    """That the budget ended a measurement, and what it left undecided."""
    undecided = [each.condition for each in (status.comparisons if status else ()) if not each.verdict.is_final]
    on = f" on {', '.join(undecided)}" if undecided else ""
    return f"the budget of {budget} ended before the rule had decided{on}"


def commonest_reason(runs: Sequence[SealedRun]) -> str:
    """The commonest reason why runs are INVALID."""
    reasons = Counter(reason.partition(":")[0] for run in runs for reason in run.invalid_reasons)
    return reasons.most_common(1)[0][0]
