"""Running experiments: conditions x replicates, each on a freshly started server, sealed one by one.

This floor joins ``client``, ``server``, ``sim`` (forecasts) and ``analysis`` (invariants). It interprets no results.
"""

from harness.runner.experiment import ExperimentOutcome, run_experiment
from harness.runner.progress import ProgressSink, StopFlag
