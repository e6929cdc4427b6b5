"""``--until decided``: the stopping rule that the experiment declared, applied whenever a block is whole.

A rule counts only when every run was sealed under it; one that came later, or was changed, is refused. Nothing is
computed here.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.analysis.method.sequential import check_can_decide
from harness.analysis.method.stopping import Standing, standing, whole_blocks
from harness.errors import SpecError
from harness.records import RunKey, SealedRun
from harness.spec import ExperimentSpec, StopSpec


def declared_rule(spec: ExperimentSpec, sealed: Iterable[SealedRun], source: str = "") -> StopSpec:
    """The experiment's stopping rule; SpecError where it has none, or where sealed runs did not declare this one.

    source: where the experiment was written, for what is refused; default: its name.
    """
    stop = spec.until_decided().stop
    assert stop is not None, "an experiment that runs until decided has a rule"
    for run in sealed:
        if run.spec.stop != stop:
            told = "no stopping rule" if run.spec.stop is None else f"another one ({run.spec.stop})"
            raise SpecError(
                f"was sealed under {told}, and a rule is declared before the first run",
                where=str(run.path),
                hint="Give the experiment with the new rule a new name, or write to another --runs folder",
            )
    return check_can_decide(stop, source or spec.name)


class Watch:
    """Where an experiment stands under its rule while its runs are sealed one by one."""

    def __init__(self, spec: ExperimentSpec, stop: StopSpec, sealed: Iterable[SealedRun]) -> None:
        self._spec, self._stop = spec, stop
        self._runs: dict[RunKey, SealedRun] = {run.key: run for run in sealed}
        self.standing: Standing = standing(spec, list(self._runs.values()), stop)

    @property
    def is_decided(self) -> bool:
        return self.standing.is_decided

    def add(self, run: SealedRun) -> bool:
        """Count one more run; whether that made its block whole, so that the rule was applied again."""
        self._runs[run.key] = run
        runs = list(self._runs.values())
        if run.replicate not in whole_blocks(self._spec, runs):
            return False
        self.standing = standing(self._spec, runs, self._stop)
        return True
