"""The plan of a replicate for every source of a workload: drawn by ``harness.plan``, or made from a recorded trace."""

from __future__ import annotations

import random
from collections.abc import Mapping

from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.plan.build import derive_seed, draw_plan, requested_keys
from harness.plan.model import Plan
from harness.spec import WorkloadSpec
from harness.spec.workload import MOST_SESSIONS
from harness.traces.lower import Lowering, sessions_of
from harness.traces.recording import load_trace


def build_plan(workload: WorkloadSpec, base_seed: int, replicate: int) -> Plan:
    """The input of one replicate (for the source "paper": of one block).

    Raises SpecError when the wait distribution or the trace is unknown, or its file is wrong.
    """
    if base_seed < 0 or replicate < 0:
        raise SpecError(
            f"base seed {base_seed} and replicate {replicate} must not be negative", where="plan", hint="Give 0 or more"
        )
    build = traced_plan if workload.source == "trace" else draw_plan
    return build(workload, base_seed, replicate)


def traced_plan(workload: WorkloadSpec, base_seed: int, replicate: int) -> Plan:
    """A recorded trace, or a sample of its sessions. The provenance counts what was left out."""
    trace = load_trace(workload.trace)
    if len(trace.recordings) < workload.num_sessions != MOST_SESSIONS:
        raise SpecError(
            f"is {workload.num_sessions}, and the trace {workload.trace!r} has {len(trace.recordings)} recordings",
            where="workload.num_sessions",
            hint=f"Give at most {len(trace.recordings)}, or leave it out to take them all",
        )
    is_whole = workload.num_sessions >= len(trace.recordings)
    is_steady = workload.start == "steady"
    how = Lowering(
        shrink=workload.length_divisor,
        max_context_tokens=workload.max_context_tokens,
        num_recordings=0 if is_whole else workload.num_sessions,
        concurrency=workload.concurrency,
        arrivals=workload.arrivals or ("together" if is_steady else trace.head.arrivals),
        human_waits=workload.human_waits,
        wait_cap_ns=round(workload.wait_cap_s * NS_PER_S),
        human_wait_cap_ns=round(workload.human_wait_cap_s * NS_PER_S),
        is_steady=is_steady,
    )
    rng = random.Random(derive_seed(base_seed, f"trace/r{replicate}/sample"))
    sessions, block_tokens, left = sessions_of(trace.recordings, trace.head.block_tokens, how, rng)
    if not sessions:
        raise SpecError(
            f"no request of the trace fits ({_counted(left.counts)})",
            where=workload.trace,
            hint="Raise max_context_tokens, or shrink the lengths: scale = '1/4'",
        )
    provenance: dict[str, str | int | float] = {
        "workload": requested_keys(workload),
        "trace": trace.head.name,
        "trace_sha256": trace.sha256,
        "trace_format": trace.head.source_format,
        "trace_arrivals": how.arrivals,
        "left_out": _counted(left.counts),
        "dropped_at_import": _counted(trace.head.dropped),
        "assumed_at_import": "; ".join(trace.head.labels),
    }
    if is_steady:
        provenance["warm_up_requests"] = left.num_warm_ups
    return Plan(
        source="trace",
        seed=base_seed,
        replicate=replicate,
        treatment="as-drawn",
        shared_prefix_tokens=0,
        token_id_range=workload.token_id_range,
        sessions=sessions,
        provenance=provenance,
        prompt_form=workload.prompt_form,
        block_tokens=block_tokens,
    )


def _counted(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{count} {what}" for what, count in sorted(counts.items()))
