"""What a run's raw files say, in tables: see ``derive_tables``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from harness.analysis.logs.parse import CounterWatch, ParseCounts, SlotWalk
from harness.stacks.vllm.step_log import StepLog


@dataclass(slots=True)
class Derived:
    """What a run's raw files say. tables: by name, in their schemas; the rest is what the tables cannot hold.

    log_ns_source: "created" (microsecond stamps of the logging call), "received" (when the harness read the line) or
    "none". steps_source: "bucket-log", "iteration-log" (then b is the smallest configured bucket >= n), "step-log" (the
    pure decode steps of ``step_log``) or "none". step_log_problem: why a step log cannot be read. slots: what
    contradicts itself in the lines about slots. counters: of the scrapes, that fell. parts: of several replicas, what
    the files of each say. in_headers: see ``replicas_in_headers``. other_models: left out
    of the same metrics.
    """

    tables: dict[str, pa.Table]
    counts: ParseCounts
    log_ns_source: str = "none"
    steps_source: str = "none"
    num_bucket_lines: int = 0
    num_iteration_lines: int = 0
    num_kv_lines: int = 0
    num_preemptions: int = 0
    num_scrapes: int = 0
    num_failed_scrapes: int = 0
    faults: tuple[str, ...] = ()
    failed_copies: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict[str, str])
    step_log: StepLog | None = None
    step_log_problem: str = ""
    slots: SlotWalk = field(default_factory=SlotWalk)
    counters: CounterWatch = field(default_factory=CounterWatch)
    parts: tuple[Derived, ...] = ()
    in_headers: Mapping[str, int] = field(default_factory=dict[str, int])
    other_models: tuple[str, ...] = ()
