"""rbln-harness: what the command line does, from Python.

>>> import harness
>>> spec = harness.load_experiment("plans/experiments/demo.toml")
>>> outcome = harness.run_experiment(spec, runs_root="runs/notebook")
>>> store = harness.RunStore("runs/notebook")
>>> outcome.require_valid()
>>> store.query("select condition, avg(cached_tokens) from valid_requests group by all").to_pylist()
>>> harness.write_report(outcome.runs, "report.html")

Names load on first use, so ``import harness`` is instant. Nothing is defined here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.analysis.summary import ExperimentSummary, summarise
    from harness.api import compare, open_runs, power, sweep
    from harness.cli.progress import TerminalProgress
    from harness.errors import HarnessError, RuleFailedError, RunInvalidError, SpecError
    from harness.judge.catalogue import analyse
    from harness.judge.prereg import Judgement, decide
    from harness.measure.records.run import SealedRun
    from harness.measure.records.store import RunStore
    from harness.model.engine import CostModel, load_cost_model
    from harness.model.experiment import build_plan
    from harness.model.plan.model import Plan
    from harness.model.plan.waits import WaitDistribution, load_waits
    from harness.model.sim import SimResult, simulate
    from harness.model.spec import ExperimentSpec, ServerSpec, WorkloadSpec, load_experiment
    from harness.present.report import write_report
    from harness.runner import ExperimentOutcome, run_experiment

__version__ = "0.1.0"

_NAMES = {
    "harness.api": ("compare", "open_runs", "power", "sweep"),
    "harness.cli.progress": ("TerminalProgress",),
    "harness.model.engine": ("CostModel", "load_cost_model"),
    "harness.errors": ("HarnessError", "RuleFailedError", "RunInvalidError", "SpecError"),
    "harness.model.experiment": ("build_plan",),
    "harness.analysis.summary": ("ExperimentSummary", "summarise"),
    "harness.judge.catalogue": ("analyse",),
    "harness.model.plan.model": ("Plan",),
    "harness.model.plan.waits": ("WaitDistribution", "load_waits"),
    "harness.judge.prereg": ("Judgement", "decide"),
    "harness.measure.records.run": ("SealedRun",),
    "harness.measure.records.store": ("RunStore",),
    "harness.present.report": ("write_report",),
    "harness.runner": ("ExperimentOutcome", "run_experiment"),
    "harness.model.sim": ("SimResult", "simulate"),
    "harness.model.spec": ("ExperimentSpec", "ServerSpec", "WorkloadSpec", "load_experiment"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "CostModel",
    "ExperimentOutcome",
    "ExperimentSpec",
    "ExperimentSummary",
    "HarnessError",
    "Judgement",
    "Plan",
    "RuleFailedError",
    "RunInvalidError",
    "RunStore",
    "SealedRun",
    "ServerSpec",
    "SimResult",
    "SpecError",
    "TerminalProgress",
    "WaitDistribution",
    "WorkloadSpec",
    "analyse",
    "build_plan",
    "compare",
    "decide",
    "load_cost_model",
    "load_experiment",
    "load_waits",
    "open_runs",
    "power",
    "run_experiment",
    "simulate",
    "summarise",
    "sweep",
    "write_report",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'harness' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
