"""Figures from sealed runs: log parsing, derived tables, reconstruction, invariants and summaries.

Pure functions of records: no server, no socket, no clock. Next: ``harness.report`` shows what these compute.
"""

from harness.analysis.logs.derive import Derived, derive_tables, derived_of, rebuild
from harness.analysis.logs.parse import LogParser, ParseCounts, parse_log
from harness.analysis.method.compare import Comparison, Verdict
from harness.analysis.method.figures import ReuseFigures, RunFigures, run_figures
from harness.analysis.method.invariants import check_experiment, check_run, counter_increment
from harness.analysis.method.lateness import Lateness
from harness.analysis.method.padding import (
    Padding,
    occupancy_ratio,
    padding_ratio,
    removed_slots,
    shapley_split,
    step_histogram,
    steps_by_n_b,
)
from harness.analysis.method.reconstruct import (
    ChannelA,
    agreement_tolerance,
    channel_a,
    channel_agreement,
    channel_b,
    cost_ratio,
    join_request_id,
    residual_ns,
    waiting_session_ns,
)
from harness.analysis.method.reuse import (
    Rearrival,
    computed_prefill_tokens,
    critical_request_count,
    extra_prefill_ns,
    rearrivals,
    reusable_tokens,
)
from harness.analysis.method.summary import BucketChange, ConditionFigures, ExperimentSummary, summarise
from harness.records import Finding

__all__ = [
    "BucketChange",
    "ChannelA",
    "Comparison",
    "ConditionFigures",
    "Derived",
    "ExperimentSummary",
    "Finding",
    "Lateness",
    "LogParser",
    "Padding",
    "ParseCounts",
    "Rearrival",
    "ReuseFigures",
    "RunFigures",
    "Verdict",
    "agreement_tolerance",
    "channel_a",
    "channel_agreement",
    "channel_b",
    "check_experiment",
    "check_run",
    "computed_prefill_tokens",
    "cost_ratio",
    "counter_increment",
    "critical_request_count",
    "derive_tables",
    "derived_of",
    "extra_prefill_ns",
    "join_request_id",
    "occupancy_ratio",
    "padding_ratio",
    "parse_log",
    "rearrivals",
    "rebuild",
    "removed_slots",
    "residual_ns",
    "reusable_tokens",
    "run_figures",
    "shapley_split",
    "step_histogram",
    "steps_by_n_b",
    "summarise",
    "waiting_session_ns",
]
