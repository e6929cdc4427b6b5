"""What became of every frozen run: valid, INVALID or missing, and how often it was repeated.

Nothing is judged here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.judge.prereg.frozen import FrozenPlan, Preregistration
from harness.judge.prereg.ledger import Entry
from harness.measure.records.run import SealedRun


@dataclass(frozen=True, slots=True)
class FrozenRun:
    """What became of one frozen run. reasons: why it is INVALID; repeated: the same of each run that it repeats.

    num_repeated: repetitions so far, by the ledger where there is one. retries: as many as its freeze allows.
    """

    label: str
    replicate: int
    state: Literal["valid", "INVALID", "missing"]
    reasons: tuple[str, ...] = ()
    repeated: tuple[tuple[str, ...], ...] = ()
    num_repeated: int = 0
    retries: int = 0

    @property
    def retries_left(self) -> int:
        """Repetitions that can still be made: a valid run is never repeated."""
        return max(0, self.retries - self.num_repeated) if self.state == "INVALID" else 0

    @property
    def retries_in_words(self) -> str:
        """ "1 of 2 repetitions used"; "no repetitions allowed"."""
        return f"{self.num_repeated} of {self.retries} repetitions used" if self.retries else "no repetitions allowed"


@dataclass(frozen=True, slots=True)
class Account:
    """Every frozen run of an experiment, in the order of the freeze.

    is_decided: a frozen stopping rule needs no more runs. file: the frozen file, from its repository's root.
    """

    runs: tuple[FrozenRun, ...]
    is_decided: bool = False
    file: str = ""

    @property
    def num_blocks(self) -> int:
        """Frozen blocks: replicates of all conditions."""
        return len({run.replicate for run in self.runs})

    @property
    def num_valid_blocks(self) -> int:
        """Blocks in which every run is valid."""
        return self.num_blocks - len({run.replicate for run in self.runs if run.state != "valid"})

    def of_state(self, state: str) -> list[FrozenRun]:
        return [run for run in self.runs if run.state == state]

    @property
    def repetitions(self) -> dict[str, int]:
        """Repetitions of INVALID runs: allowed of each, used and unused of all."""
        return {
            "allowed_per_run": max((run.retries for run in self.runs), default=0),
            "used": sum(run.num_repeated for run in self.runs),
            "unused": sum(run.retries_left for run in self.runs),
        }

    @property
    def num_sealed(self) -> int:
        return len(self.runs) - len(self.of_state("missing"))

    def open_ends(self) -> Iterator[str]:
        """Why what is decided now could still be changed, each a clause; none once every frozen run has its end."""
        # A free choice of when to stop would favour a good moment.
        if self.num_sealed < len(self.runs) and not self.is_decided:
            yield f"{self.num_sealed} of {len(self.runs)} frozen runs are sealed"
        # So would a free choice of which INVALID runs are repeated.
        if repeatable := [run for run in self.runs if run.retries_left]:
            first, more = repeatable[0], len(repeatable) - 1
            others = f"; so may {more} more" if more else ""
            yield (
                f"{first.label} is INVALID ({first.reasons[0] if first.reasons else 'no reason recorded'}) and may "
                f"still be repeated, {first.retries_in_words}{others} (harness run --confirmatory {self.file} "
                "--resume --retry-invalid)"
            )

    def lines(self) -> Iterator[str]:
        """The account for people: counts, and each INVALID or repeated run."""
        yield f"frozen: {self.counts_in_words}"
        for run in self.runs:
            earlier = " | ".join("; ".join(reasons) or "no reason recorded" for reasons in run.repeated)
            before = f"; was INVALID: {earlier}" if earlier else ""
            if run.state == "INVALID":
                reasons = "; ".join(run.reasons) or "no reason recorded"
                yield f"INVALID {run.label}: {reasons}; {run.retries_in_words}{before}"
            elif run.repeated:
                yield f"repeated {run.label}, {run.state} now{before}"

    @property
    def counts_in_words(self) -> str:
        """How many frozen runs and blocks there are, are valid, and were or may be repeated."""
        missing = len(self.of_state("missing"))
        parts = [
            f"{len(self.runs)} runs in {self.num_blocks} block{'s' * (self.num_blocks != 1)}",
            f"{len(self.of_state('valid'))} valid, {len(self.of_state('INVALID'))} INVALID",
            *([f"{missing} not made{', as its stopping rule had decided' * self.is_decided}"] if missing else []),
            f"{self.num_valid_blocks} of {self.num_blocks} blocks valid as a whole",
        ]
        allowed, used, unused = self.repetitions.values()
        if not allowed:
            return "; ".join([*parts, "no repetition of an INVALID run allowed"])
        left = f", {unused} may still be made" * bool(unused)
        return "; ".join([*parts, f"repetitions: at most {allowed} of an INVALID run, {used} used{left}"])


def account_of(
    runs: Sequence[SealedRun], frozen: Preregistration, entries: Collection[Entry] = (), *, is_decided: bool = False
) -> Account:
    """What became of the runs of a freeze. entries: of its ledger; empty where it is not there or cannot be read."""
    sealed = {run.key[1:]: run for run in runs}
    num_seals = Counter(entry.label for entry in entries if entry.event == "sealed")
    return Account(
        tuple(
            _frozen_run(plan, sealed.get((plan.condition, plan.replicate)), num_seals, frozen.experiment.limits.retries)
            for plan in frozen.plans
        ),
        is_decided,
        next((run.manifest.preregistration.path for run in runs if run.manifest.preregistration), "FILE"),
    )


def _frozen_run(plan: FrozenPlan, run: SealedRun | None, num_seals: Mapping[str, int], retries: int) -> FrozenRun:
    label = f"{plan.condition}/{plan.replicate}"
    if run is None:
        return FrozenRun(label, plan.replicate, "missing", retries=retries)
    repeated = tuple(earlier.invalid_reasons for earlier in run.manifest.earlier_tries)
    return FrozenRun(
        label,
        plan.replicate,
        "valid" if run.is_valid else "INVALID",
        run.invalid_reasons,
        repeated,
        max(len(repeated), num_seals.get(label, 0) - 1),
        retries,
    )
