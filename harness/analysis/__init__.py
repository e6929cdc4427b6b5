"""What sealed runs show: logs, device time, validity, calibration, the one comparison, summaries.

Pure functions of records: no server, no socket, no clock.
"""

from harness.analysis.figures import RunFigures, run_figures
from harness.analysis.reuse import extra_prefill_ns, rearrivals
from harness.analysis.validity.evidence import Evidence
from harness.analysis.validity.invariants import check_experiment, check_run
