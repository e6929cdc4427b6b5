"""What stood still or was held back during a run: the client's machine, the client, the server, first tokens.

Each beyond its limit makes the run INVALID.

Definitions: docs/reference/method.md, "A run and its invariants".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from harness.analysis.cost.reconstruct import union_ns
from harness.analysis.logs.engine_steps import attended_by_step
from harness.analysis.stats import IntArray
from harness.clock import NS_PER_MS, ScaledClock
from harness.measure.records.findings import finding
from harness.measure.records.manifest import Finding, Manifest
from harness.measure.records.schema import rows_where, values_of
from harness.model.spec import LimitsSpec

if TYPE_CHECKING:
    from harness.model.engine import CostModel
    from harness.stacks.vllm.step_log import StepLog

# Shorter stalls are no finding: garbage collection and neighbours cause them everywhere.
NOTICED_MS = 200.0
# Shorter times are those of a client that was on time.
LATE_NOTICED_MS = 1.0
# Of the answers: fewer are what a busy server does now and then.
HELD_SHARE = 0.5


def limits_of(manifest: Manifest) -> LimitsSpec:
    """The limits of a run's experiment."""
    return LimitsSpec.model_validate(manifest.requested.get("limits", {}))


def check_freezes(manifest: Manifest) -> Iterator[Finding]:
    """What the machine did to the client: stalls that touched a request, receives that waited for it, a lost meter.

    Runs without a client on this machine (simulated ones, and those recorded before it was noted) say nothing of it.
    """
    limits = limits_of(manifest)
    audit = manifest.client_audit
    stall_ms, lag_ms = audit.get("touching_stall_max_ms"), audit.get("stamp_lag_max_ms")
    pause_ms = audit.get("client_pause_max_ms")
    if audit.get("is_stall_meter_complete") is False:
        yield finding(
            "stall-meter-lost",
            "the stall meter ended before the run did: whether the host stalled is not known",
            severity="invalid" if limits.needs_stall_meter else "warning",
        )
    if stall_ms is not None and stall_ms > limits.stall_ms:
        yield finding(
            "host-stalled",
            f"the host stood still for {stall_ms:.0f} ms (wall) while requests were due or under way, "
            f"limits.stall_ms is {limits.stall_ms:g}",
        )
    waits = {
        f"what had arrived waited up to {lag_ms or 0:.0f} ms (wall) for the client": lag_ms,
        f"the client did nothing for {pause_ms or 0:.0f} ms (wall) while requests were due or under way": pause_ms,
    }
    for evidence in [evidence for evidence, ms in waits.items() if ms is not None and ms > limits.stamp_lag_ms][:1]:
        limit = f", limits.stamp_lag_ms is {limits.stamp_lag_ms:g}"
        yield finding("client-stalled", evidence + limit)


def check_read_together(manifest: Manifest) -> Iterator[Finding]:
    """How much earlier than their stamps chunks can have come, because the client read them late.

    A socket's stamp is that of the last segment, so a client that wakes late gives the first chunk the time of the
    last one. The aiohttp client has no such stamps: each chunk gets the time of its read.
    """
    facts, limit_ms = manifest.client_audit.get("read_together"), limits_of(manifest).read_together_ms
    if facts is None:
        return
    means_ms = {name: part["sum_ms"] / max(1, part["num"]) for name, part in facts.items()}
    if max(means_ms.values()) <= LATE_NOTICED_MS:
        return
    words = [
        f"{facts[name]['num_together']:.0f} of {facts[name]['num']:.0f} {what} (up to {means_ms[name]:.1f} ms early in "
        f"the mean over all of them, {facts[name]['max_ms']:.1f} ms at most)"
        for name, what in (("first", "first tokens"), ("all", "chunks"))
    ]
    has_kernel_stamps = manifest.client_audit.get("client") != "aiohttp"
    why = "together with later ones, so that they have the stamp of the last" if has_kernel_stamps else "late"
    yield finding(
        "read-together",
        f"the client read {' and '.join(words)} {why}: "
        f"TTFT, TPOT and ITL are known to within that; limits.read_together_ms is {limit_ms:g} (wall)",
        severity="invalid" if max(means_ms.values()) > limit_ms else "warning",
    )


def check_held_tokens(manifest: Manifest) -> Iterator[Finding]:
    """Whether first tokens came together with later ones, so that TTFT is not the server's."""
    held, limit_ms = manifest.client_audit.get("held_first"), limits_of(manifest).first_token_held_ms
    if held is None or not held["num_held"] or held["mean_ms"] <= limit_ms:
        return
    yield finding(
        "first-token-held",
        f"in {held['num_held']} of {held['num_answers']} answers the first token came together with later ones: a "
        f"proxy, or the server itself, collects tokens before it passes them on. "
        f"First tokens are about {held['mean_ms']:.0f} ms late for that (mean over the answers, wall), "
        f"limits.first_token_held_ms is {limit_ms:g}",
        severity="invalid" if held["num_held"] >= HELD_SHARE * held["num_answers"] else "warning",
    )


def check_server_stalls(
    manifest: Manifest, requests: pa.Table, steps: pa.Table, kv_events: pa.Table, cost_model: CostModel | None
) -> Iterator[Finding]:
    """Whether the engine stood still while requests were in flight, longer than its work explains.

    What the log shows of the engine are its decode steps and admissions. Between two of them lie one decode step and
    the prefills of what was admitted. Their time is the cost model's, or more where the median step takes longer.
    A run without stamped steps says nothing of it, nor does one without a cost model, as its prefills may take long;
    a simulated engine cannot stand still, and is judged without one.
    """
    stamped = steps.filter(steps["log_ns"].is_valid())
    admitted = rows_where(kv_events, "kind", "alloc")
    admitted = admitted.filter(admitted["log_ns"].is_valid())
    if cost_model is None or stamped.num_rows < 2:
        return
    work = _Work(requests, stamped, np.sort(admitted["log_ns"].to_numpy()), cost_model)
    signs_ns = np.concatenate([stamped["log_ns"].to_numpy(), work.admitted_ns])
    least_ns = NOTICED_MS * manifest.clock.scale * NS_PER_MS + work.median_step_ns
    gaps = _gaps(requests, signs_ns, least_ns)
    yield from _longest(manifest, ((start, end, work.most_ns(start, end)) for start, end in gaps))


def check_step_log_stalls(
    manifest: Manifest, requests: pa.Table, log: StepLog, cost_model: CostModel | None
) -> Iterator[Finding]:
    """As ``check_server_stalls``, of a vLLM: each step of its log is a sign, and the next step is the work between two.

    A step that computes parts of prompts is judged where the cost model has their price, another step also by the
    median step.
    """
    clock = ScaledClock(manifest.clock.scale)
    rows = values_of(log.steps, "at_ns", "kind", "generation_requests", "context_tokens", "n", "b")
    work = {
        clock.from_monotonic_ns(at_ns): (*step, attended)
        for (at_ns, *step), attended in zip(rows, attended_by_step(log), strict=True)
    }
    if cost_model is None or len(work) < 2:
        return
    signs_ns = np.array(list(work), dtype=np.int64)
    median_ns = float(np.median(np.diff(signs_ns)))
    costs = None if cost_model.chunk_step_fs is None else cost_model

    def most_ns(end_ns: int) -> float:
        kind, decodes, tokens, n, b, attended = work.get(end_ns, ("idle", 0, 0, 0, 0, 0))
        if kind in ("idle", "dummy"):
            return median_ns
        if kind == "decode":
            return max(median_ns, 0 if costs is None else costs.decode_step_ns(b or n, n) + costs.eager_ns)
        if costs is None or kind not in ("prefill", "mixed") or decodes is None or tokens is None:
            return math.inf
        return max(median_ns, costs.chunked_step_ns(decodes, decodes, 0, tokens, attended))

    gaps = _gaps(requests, signs_ns, NOTICED_MS * manifest.clock.scale * NS_PER_MS + median_ns)
    yield from _longest(manifest, ((start, end, most_ns(end)) for start, end in gaps))


def _longest(manifest: Manifest, gaps: Iterable[tuple[int, int, float]]) -> Iterator[Finding]:
    """A finding about the longest stall. gaps: beginning and end of each, and the ns that the work explains.

    While the client stood still, answers that had ended seem to be in flight: that time is the client's.
    """
    limits = limits_of(manifest)
    ms = manifest.clock.scale * NS_PER_MS
    pauses = [(start, start + ns) for start, ns in manifest.client_audit.get("client_pauses_ns", ())]

    def paused_ns(start: int, end: int) -> int:
        return union_ns((max(start, begin), min(end, past)) for begin, past in pauses if begin < end and past > start)

    stalls = ((end - start - work_ns - paused_ns(start, end), start) for start, end, work_ns in gaps)
    longest_ns, at_ns = max(stalls, default=(0, 0))
    if longest_ns <= NOTICED_MS * ms:
        return
    yield finding(
        "server-stalled",
        f"the engine made no step for {longest_ns / ms:.0f} ms (wall) beyond what its work explains, while "
        f"requests were in flight (at {at_ns} clock ns); limits.server_stall_ms is {limits.server_stall_ms:g}",
        severity="invalid" if longest_ns > limits.server_stall_ms * ms else "warning",
    )


def _gaps(requests: pa.Table, instants_ns: IntArray, least_ns: float) -> list[tuple[int, int]]:
    """Stretches of at least that length without a sign of the engine, each with a request in flight throughout."""
    flights = requests.filter(requests["sent_ns"].is_valid()).select(["sent_ns", "done_ns"]).drop_null()
    sent, done = (flights[name].to_numpy() for name in ("sent_ns", "done_ns"))
    order = np.argsort(sent)
    sent, reached = sent[order], np.maximum.accumulate(done[order])
    # Nothing was in flight between what was reached by then and the next send.
    is_first = np.ones(len(sent), dtype=np.bool_)
    is_first[1:] = sent[1:] > reached[:-1]
    begins = sent[is_first]
    ends = reached[np.append(np.flatnonzero(is_first)[1:] - 1, len(sent) - 1)] if len(sent) else reached
    marks = np.sort(np.concatenate([instants_ns, begins, ends]))
    long = np.flatnonzero(np.diff(marks) >= least_ns)
    middle = marks[long] + (marks[long + 1] - marks[long]) // 2
    place = np.searchsorted(begins, middle, side="right") - 1
    is_busy = (place >= 0) & (middle < ends[place]) if len(begins) else np.zeros(len(middle), dtype=np.bool_)
    return [(int(marks[at]), int(marks[at + 1])) for at in long[is_busy]]


class _Work:
    """What the engine may have been busy with between two signs of it in the log."""

    def __init__(self, requests: pa.Table, steps: pa.Table, admitted_ns: IntArray, cost_model: CostModel) -> None:
        """steps: with their stamps. admitted_ns: instants of the admissions in the log, ascending."""
        self.admitted_ns = admitted_ns
        self.median_step_ns = float(np.median(np.diff(np.sort(steps["log_ns"].to_numpy()))))
        step_ns = [cost_model.decode_step_ns(b, n) for b, n in set(values_of(steps, "b", "n"))]
        self._step_ns = max(step_ns)
        # A device may be slower than its cost model states.
        self._slower = max(1.0, self.median_step_ns / max(1, min(step_ns)))
        columns = ("sent_ns", "done_ns", "prompt_tokens", "planned_prompt_tokens", "cached_tokens")
        flights = sorted(
            (sent, done, cost_model.prefill_ns((prompt or planned) - (cached or 0), cached or 0))
            for sent, done, prompt, planned, cached in values_of(requests, *columns)
            if sent is not None and done is not None
        )
        self._sent_ns, self._done_ns, self._prefill_ns = np.array(flights, dtype=np.int64).reshape(-1, 3).T
        self._longest_flight_ns = int((self._done_ns - self._sent_ns).max(initial=0))

    def most_ns(self, start_ns: int, end_ns: int) -> float:
        """The most time that one decode step and the prefills between two instants explain."""
        near = slice(*np.searchsorted(self._sent_ns, [start_ns - self._longest_flight_ns, end_ns]))
        prefills_ns = np.sort(self._prefill_ns[near][self._done_ns[near] > start_ns])
        if len(self.admitted_ns):
            first, past = np.searchsorted(self.admitted_ns, [start_ns, end_ns])
            # The admission before may still be computing. Of those in flight, the dearest prefills count.
            num_admitted = past - max(0, first - 1)
            prefills_ns = prefills_ns[max(0, len(prefills_ns) - num_admitted) :]
        return max(self.median_step_ns, self._slower * (self._step_ns + float(prefills_ns.sum())))
