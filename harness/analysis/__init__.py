"""Figures from sealed runs: log parsing, derived tables, reconstruction, invariants and summaries.

Pure functions of records: no server, no socket, no clock.
"""

from harness.analysis.method.figures import RunFigures, run_figures
from harness.analysis.method.invariants import check_experiment, check_run
from harness.analysis.method.reuse import extra_prefill_ns, rearrivals
from harness.analysis.method.summary import ConditionFigures, ExperimentSummary, summarise
