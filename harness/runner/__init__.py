"""Running experiments: conditions x replicates, each on a freshly started server, sealed one by one.

This floor joins ``live`` (processes, sockets), ``sim`` (time estimates) and ``analysis`` (invariants), which never
meet below it. It never interprets results.
"""

from harness.runner.experiment import ExperimentOutcome, run_experiment
from harness.runner.progress import ProgressSink, StopFlag

__all__ = ["ExperimentOutcome", "ProgressSink", "StopFlag", "run_experiment"]
