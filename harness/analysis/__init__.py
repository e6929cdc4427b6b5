"""Figures from sealed runs: log parsing, derived tables, reconstruction, invariants and summaries.

Pure functions of records: no server, no socket, no clock. Next: ``harness.report`` shows what these compute.
"""

from harness.analysis.logs.derive import derive_tables, rebuild
from harness.analysis.logs.parse import ParseCounts, parse_log
from harness.analysis.method.figures import RunFigures, run_figures
from harness.analysis.method.invariants import check_experiment, check_run
from harness.analysis.method.reuse import extra_prefill_ns, rearrivals
from harness.analysis.method.summary import ConditionFigures, ExperimentSummary, summarise

__all__ = [
    "ConditionFigures",
    "ExperimentSummary",
    "ParseCounts",
    "RunFigures",
    "check_experiment",
    "check_run",
    "derive_tables",
    "extra_prefill_ns",
    "parse_log",
    "rearrivals",
    "rebuild",
    "run_figures",
    "summarise",
]
