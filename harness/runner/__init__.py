"""Running experiments: conditions x replicates, each on a freshly started server, sealed one by one.

This floor joins ``client``, ``server``, ``sim`` (forecasts) and ``analysis`` (invariants). It interprets no results.
The names below are loaded at first use: a backend alone needs none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.runner.experiment import ExperimentOutcome, run_experiment
    from harness.runner.progress import ProgressSink, StopFlag

_HOME = {
    "ExperimentOutcome": "experiment",
    "run_experiment": "experiment",
    "ProgressSink": "progress",
    "StopFlag": "progress",
}
__all__ = ["ExperimentOutcome", "ProgressSink", "StopFlag", "run_experiment"]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
