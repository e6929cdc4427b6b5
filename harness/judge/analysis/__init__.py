"""Figures from sealed runs: log parsing, derived tables, reconstruction and invariants.

Pure functions of records: no server, no socket, no clock.
"""

from harness.judge.analysis.figures import RunFigures, run_figures
from harness.judge.analysis.reuse import extra_prefill_ns, rearrivals
from harness.judge.analysis.validity.invariants import check_experiment, check_run
