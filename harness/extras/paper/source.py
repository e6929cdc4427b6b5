"""The runs behind the paper's tables: one experiment of the catalogue each, and predictions of them by other rules.

Other rules are other KV rules, or re-arrivals at the observed times; they are computed from the plans in the runs. A
missing experiment is a NotRunError that names the command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.analysis import stats
from harness.analysis.compare.answer import ExperimentRuns
from harness.analysis.figures import totals
from harness.errors import SpecError
from harness.judge.catalogue import AnalysisResult, analyse
from harness.judge.decisions.decide import Decision
from harness.judge.prereg import check_sealed_runs, decide, predict_runs, predictions_for
from harness.kinds import KINDS
from harness.measure.records.run import SealedRun
from harness.measure.records.store import RunStore
from harness.model.engine import EngineConfig
from harness.model.sim.kernel.arrays import with_column
from harness.model.sim.plans import plan_arrays
from harness.model.sim.simulate import run_batch
from harness.model.spec import RulesName
from harness.model.spec.rules import value_text
from harness.table import ABSENT, Cell

Row = Mapping[str, Cell]
Rows = Sequence[Row]


class NotRunError(Exception):
    """A table's runs are not there. Its text is the command that makes them."""


@dataclass(frozen=True)
class PaperRuns:
    """Where tables find their runs: one experiment of the catalogue each, computed once.

    search: folder of the configuration search; artifacts: folder of compiled artifacts (``harness server compile``).
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
        return stats.grouped(RunStore(self._folder).sealed(), lambda run: run.experiment)

    @cached_property
    def _folder(self) -> Path:
        """The folder of runs: the given one, or the one of a backend that `harness paper catalogue` made in it."""
        of_backends = [self.runs_root / name for name in KINDS if (self.runs_root / name).is_dir()]
        if not of_backends or RunStore(self.runs_root).sealed():
            return self.runs_root
        if len(of_backends) > 1:
            what = f"holds runs of {len(of_backends)} backends"
            hint = f"Give one: {' or '.join(f'--runs {folder}' for folder in of_backends)}"
            raise SpecError(what, where=str(self.runs_root), hint=hint)
        return of_backends[0]

    @cached_property
    def _by_experiment(self) -> Mapping[str, list[SealedRun]]:
        valid = (run for runs in self._sealed.values() for run in runs if run.is_valid)
        return stats.grouped(valid, lambda run: run.experiment)

    def runs(self, experiment: str) -> list[SealedRun]:
        """Valid runs; NotRunError when there is none."""
        runs = self._by_experiment.get(experiment)
        if not runs:
            raise NotRunError(f"harness run plans/experiments/{experiment}.toml --runs {self.runs_root}")
        return runs

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
            judged = decide(self._sealed[experiment], names).decisions
            self._decisions[experiment, rule] = [decision for decision in judged if decision.rule == rule]
        return self._decisions[experiment, rule]

    def rows(self, experiment: str, table: str) -> list[dict[str, Cell]]:
        """Rows of one table of the experiment's own analysis; none when it had nothing to show."""
        if experiment not in self._analyses:
            self._analyses[experiment] = analyse(self.runs(experiment), self.experiment(experiment).predictions)
        tables = self._analyses[experiment].tables
        return next((each.records() for each in tables if each.name == table), [])


class VariantRatio(NamedTuple):
    """One comparison under one variant. error: its distance from the ratio observed on channel A; None: unobserved."""

    ratio: float
    num_reused: int
    num_rearrivals: int
    observed_ratio: float | None

    @property
    def error(self) -> float | None:
        return None if self.observed_ratio is None else abs(self.ratio - self.observed_ratio)


def predicted_ratio(
    experiment: ExperimentRuns, condition: str, baseline: str, rules: RulesName | None = None
) -> VariantRatio | None:
    """The full simulator under ``rules`` (default: what was predicted); None without runs of both."""
    pairs = experiment.sealed_pairs(condition, baseline)
    if not pairs:
        return None
    if rules is None and experiment.predictions:
        predictions = experiment.predictions
    else:
        predictions = predict_runs([run for pair in pairs for run in pair], rules)
    changed = [predictions[condition][run.replicate] for run, _base in pairs]
    base = [predictions[baseline][run.replicate] for _changed, run in pairs]
    observed, observed_base = totals(experiment.pairs(condition, baseline))
    return VariantRatio(
        ratio=sum(run.device_ns for run in changed) / sum(run.device_ns for run in base),
        num_reused=sum(run.num_reused for run in changed),
        num_rearrivals=sum(run.num_rearrivals for run in changed),
        observed_ratio=stats.ratio(observed.a_ns, observed_base.a_ns),
    )


def fixed_arrival_ratio(experiment: ExperimentRuns, condition: str, baseline: str) -> float:
    """Every re-arrival comes when it came in the baseline's run of the same replicate; there are runs of both."""
    pairs = experiment.sealed_pairs(condition, baseline)
    changed_ns = sum(_device_ns(own, _arrivals(base)) for own, base in pairs)
    return changed_ns / sum(_device_ns(base, None) for _own, base in pairs)


def _arrivals(run: SealedRun) -> Sequence[int]:
    """When each request of a run was sent, ns after its common start, in plan order; -1 for first requests."""
    requests = run.table("requests").sort_by([("session", "ascending"), ("request", "ascending")])
    rows: list[dict[str, Any]] = requests.to_pylist()
    start_ns = min(row["trigger_ns"] for row in rows)
    return [row["sent_ns"] - start_ns if row["request"] else -1 for row in rows]


def _device_ns(run: SealedRun, pinned_ns: Sequence[int] | None) -> int:
    """D of a run's plan on its own configuration."""
    arrays = plan_arrays([run.plan])
    if pinned_ns is not None:
        arrays = with_column(arrays, "pinned_ns", np.array(pinned_ns, dtype=np.int64))
    return int(run_batch(arrays, EngineConfig.from_server(run.server), run.cost_model).device_ns[0])
