"""Where the paper's tables find their runs: one experiment of the catalogue each, computed once.

Nothing is laid out here. A missing experiment is a NotRunError that names the command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from harness.analysis.catalogue import analyse
from harness.analysis.catalogue.__init__ import AnalysisResult
from harness.analysis.method.decide import Decision
from harness.analysis.method.verdicts import ExperimentRuns
from harness.prereg import check_sealed_runs, judge, predictions_for
from harness.records import RunStore, SealedRun
from harness.spec.factors import value_text
from harness.spec.rules import load_rule
from harness.table import ABSENT, Cell


class NotRunError(Exception):
    """A table's runs are not there. command: what makes them."""

    def __init__(self, command: str) -> None:
        super().__init__(command)
        self.command = command


@dataclass(frozen=True)
class Source:
    """Where tables find their runs: one experiment of the catalogue each, computed once.

    search: folder of the configuration search; artifacts: folder of compiled artifacts (``harness compile``).
    """

    runs_root: Path
    search: Path | None = None
    artifacts: Path | None = None
    _experiments: dict[str, ExperimentRuns] = field(default_factory=dict[str, ExperimentRuns], repr=False)
    _analyses: dict[str, AnalysisResult] = field(default_factory=dict[str, AnalysisResult], repr=False)
    _decisions: dict[tuple[str, str], list[Decision]] = field(
        default_factory=dict[tuple[str, str], list[Decision]], repr=False
    )

    @cached_property
    def _sealed(self) -> Mapping[str, list[SealedRun]]:
        found: dict[str, list[SealedRun]] = {}
        for run in RunStore(self.runs_root).sealed():
            found.setdefault(run.experiment, []).append(run)
        return found

    @cached_property
    def _by_experiment(self) -> Mapping[str, list[SealedRun]]:
        valid = {name: [run for run in runs if run.is_valid] for name, runs in self._sealed.items()}
        return {name: runs for name, runs in valid.items() if runs}

    def runs(self, experiment: str) -> list[SealedRun]:
        """Valid runs; NotRunError when there is none."""
        found = self._by_experiment.get(experiment)
        if not found:
            raise NotRunError(f"harness run plans/experiments/{experiment}.toml --runs {self.runs_root}")
        return found

    def factor(self, experiment: str, condition: str, name: str) -> str:
        """A factor of a condition as a cell; a dash where it has none."""
        value = self.experiment(experiment).factors.get(condition, {}).get(name)
        return ABSENT if value is None else value_text(value)

    def has(self, experiment: str) -> bool:
        return experiment in self._by_experiment

    def experiment(self, experiment: str) -> ExperimentRuns:
        """Runs with what was predicted for them: frozen before, or else predicted now from the plan in each run."""
        if experiment not in self._experiments:
            runs = self.runs(experiment)
            frozen = check_sealed_runs(runs)
            self._experiments[experiment] = ExperimentRuns(runs, predictions_for(runs, frozen))
        return self._experiments[experiment]

    def is_confirmatory(self, experiment: str) -> bool:
        return all(run.manifest.label == "confirmatory" for run in self.runs(experiment))

    def decisions(self, experiment: str, rule: str) -> list[Decision]:
        """What `harness decide` says by one rule: the frozen one where the runs are confirmatory."""
        if (experiment, rule) not in self._decisions:
            names = () if self.is_confirmatory(experiment) else (rule,)
            judged = judge(self._sealed[experiment], names).decisions
            self._decisions[experiment, rule] = [decision for decision in judged if decision.rule == rule]
        return self._decisions[experiment, rule]

    def rows(self, experiment: str, table: str) -> list[dict[str, Cell]]:
        """Rows of one table of the experiment's own analysis; none when it had nothing to show."""
        if experiment not in self._analyses:
            predicted = self.experiment(experiment)
            self._analyses[experiment] = analyse(self.runs(experiment), predicted.predictions)
        found = {one.name: one for one in self._analyses[experiment].tables}
        return found[table].records() if table in found else []


def cost_rules(source: Source, experiment: str) -> list[str]:
    """Names of the cost rules that judge an experiment: the first one it names."""
    names = source.runs(experiment)[0].spec.rules
    return [name for name in names if load_rule(name).kind == "cost-validation"][:1]
