"""Prefill interference: long response intervals of background sessions while an injected request is in flight.

From the client's chunk stamps and send and completion stamps; the elapsed time of the prefill from the server's metric.
Cumulative waiting is session-time, never added to device time.
Definitions: docs/reference/method.md, "Waiting".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from harness.analysis import stats
from harness.analysis.cost.reconstruct import received_ns, with_tokens
from harness.analysis.run_tables import join_request_id
from harness.analysis.stats import IntArray
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import SpecError
from harness.extras.paper.rules import InterferenceRule
from harness.judge.decisions.decide import Decision, Number, Outcome
from harness.measure.records.run import SealedRun, by_condition
from harness.measure.records.schema import rows_where, values_of

PREFILL_SUM, PREFILL_COUNT = "vllm:request_prefill_time_seconds_sum", "vllm:request_prefill_time_seconds_count"


class Spike(NamedTuple):
    """One background session in one run. Instants ns of the run's clock, durations ms.

    spike_ms: the longest interval that overlaps the injection, [start_ns, end_ns]; baseline_ms: the median of the rest.
    """

    session: int
    baseline_ms: float
    spike_ms: float
    start_ns: int
    end_ns: int

    @property
    def ratio(self) -> float:
        return self.spike_ms / self.baseline_ms


class Injection(NamedTuple):
    """One run with an injected request, or (length 0) without one.

    prefill_ms: server-side elapsed time of the injected prefill; None when the metric did not move by exactly one
    request around it. crossings_s: ends of intervals above the threshold that do not overlap the injection, after the
    run's common start.
    """

    condition: str
    replicate: int
    prompt_tokens: int
    cached_tokens: int | None
    spikes: tuple[Spike, ...]
    crossings_s: tuple[float, ...]
    prefill_ms: float | None

    @property
    def spike_ms(self) -> float:
        """Median over the background sessions."""
        return stats.median(spike.spike_ms for spike in self.spikes)

    @property
    def baseline_ms(self) -> float:
        return stats.median(spike.baseline_ms for spike in self.spikes)

    @property
    def is_simultaneous(self) -> bool:
        """Whether a moment exists at which all spikes overlap."""
        return max(spike.start_ns for spike in self.spikes) < min(spike.end_ns for spike in self.spikes)

    @property
    def start_spread_ms(self) -> float:
        starts = [spike.start_ns for spike in self.spikes]
        return (max(starts) - min(starts)) / NS_PER_MS

    @property
    def end_spread_ms(self) -> float:
        ends = [spike.end_ns for spike in self.spikes]
        return (max(ends) - min(ends)) / NS_PER_MS

    @property
    def waiting_session_s(self) -> float:
        """Measured: what every background session waited beyond its usual interval, summed."""
        return sum(spike.spike_ms - spike.baseline_ms for spike in self.spikes) / 1000


def chunk_instants(chunks: pa.Table) -> dict[tuple[int, int], IntArray]:
    """Reception instants by (session, request), ns, in order: the kernel's stamp where there is one."""
    columns = (chunks.column(name).to_pylist() for name in ("session", "request"))
    by_request: dict[tuple[int, int], list[int]] = {}
    for key, at_ns in zip(zip(*columns, strict=True), received_ns(chunks).tolist(), strict=True):
        by_request.setdefault(key, []).append(at_ns)
    return {key: np.sort(np.array(at_ns)) for key, at_ns in sorted(by_request.items())}


def injection_of(run: SealedRun, rule: InterferenceRule) -> Injection:
    """Baseline intervals and spikes of one run."""
    groups = run.group_sessions()
    if rule.background_group not in groups:
        raise SpecError(
            f"has no group {rule.background_group!r}, whose sessions the injected prompt would interrupt",
            where=run.label,
            hint="Declare it under workload.groups, or choose another analysis",
        )
    instants = chunk_instants(run.table("chunks"))
    requests = run.table("requests").to_pylist()
    start_ns = min(row["sent_ns"] for row in requests if row["sent_ns"] is not None)
    injected = next((row for row in requests if row["session"] in groups.get(rule.injected_group, range(0))), None)
    window = (0, -1) if injected is None else (injected["sent_ns"], injected["done_ns"])
    spikes: list[Spike] = []
    crossings_s: list[float] = []
    for session in groups[rule.background_group]:
        at_ns = instants[session, 0]
        lengths, begins, ends = np.diff(at_ns), at_ns[:-1], at_ns[1:]
        overlaps = (begins < window[1]) & (ends > window[0])
        baseline_ns = float(np.median(lengths[~overlaps]))
        if injected is not None and overlaps.any():
            place = int(np.flatnonzero(overlaps)[np.argmax(lengths[overlaps])])
            length_ms = float(lengths[place]) / NS_PER_MS
            spikes.append(Spike(session, baseline_ns / NS_PER_MS, length_ms, int(begins[place]), int(ends[place])))
        beyond = ends[~overlaps & (lengths > rule.threshold * baseline_ns)]
        crossings_s += [(end_ns - start_ns) / NS_PER_S for end_ns in beyond.tolist()]
    return Injection(
        condition=run.condition,
        replicate=run.replicate,
        prompt_tokens=0 if injected is None else int(injected["prompt_tokens"]),
        cached_tokens=0 if injected is None else injected["cached_tokens"],
        spikes=tuple(spikes),
        crossings_s=tuple(crossings_s),
        prefill_ms=None if injected is None else prefill_elapsed_ms(run.table("metrics"), *window),
    )


def prefill_elapsed_ms(metrics: pa.Table, sent_ns: int, done_ns: int) -> float | None:
    """Increment of the server's prefill time around one request, ms; None unless exactly one request was counted.

    From the last scrape before it was sent to the first one after it was done.
    """
    sums, counts = _by_instant(metrics, PREFILL_SUM), _by_instant(metrics, PREFILL_COUNT)
    before = max((at_ns for at_ns in sums if at_ns <= sent_ns), default=None)
    after = min((at_ns for at_ns in sums if at_ns >= done_ns), default=None)
    if before is None or after is None or round(counts[after] - counts[before]) != 1:
        return None
    return (sums[after] - sums[before]) * 1000


def _by_instant(metrics: pa.Table, name: str) -> Mapping[int, float]:
    sums: defaultdict[int, float] = defaultdict(float)
    for at_ns, value in values_of(rows_where(metrics, "name", name), "at_ns", "value"):
        sums[at_ns] += value
    return sums


def injections(runs: Sequence[SealedRun], rule: InterferenceRule) -> dict[str, list[Injection]]:
    """Every valid run's injection, by condition."""
    return {name: [injection_of(run, rule) for run in group] for name, group in by_condition(runs).items()}


def decide_interference(rule: InterferenceRule, conditions: Mapping[str, Sequence[Injection]]) -> list[Decision]:
    """Existence, simultaneity and growth. Crossings in the control leave existence PARTIALLY CONFIRMED: withheld."""
    injected = {name: group for name, group in conditions.items() if name != rule.control and group and group[0].spikes}
    runs = [injection for group in injected.values() for injection in group]
    if not runs or rule.control not in conditions:
        reason = "needs runs with an injection and a control"
        return [Decision(rule.name, "existence", Outcome.WITHHELD, reason)]
    return [_existence(rule, runs, conditions[rule.control]), _simultaneity(rule, runs), _growth(rule, injected)]


def _existence(rule: InterferenceRule, runs: Sequence[Injection], control: Sequence[Injection]) -> Decision:
    ratios = [spike.ratio for injection in runs for spike in injection.spikes]
    above = sum(ratio > rule.threshold for ratio in ratios)
    crossed_s = [end_s for injection in control for end_s in injection.crossings_s]
    numbers: dict[str, Number] = {
        "num_cases": len(ratios),
        "num_above": above,
        "threshold": rule.threshold,
        "smallest_ratio": min(ratios),
        "num_control_crossings": len(crossed_s),
        "last_control_crossing_s": max(crossed_s, default=None),
    }
    reason = f"{above} of {len(ratios)} background sessions spike above {rule.threshold:g} times their baseline"
    if above < len(ratios):
        return Decision(rule.name, "existence", Outcome.FAIL, reason, "NOT CONFIRMED", numbers)
    if crossed_s:
        last = f"the last one {max(crossed_s):.3f} s after the start"
        reason += f"; but {len(crossed_s)} intervals of the control do too, {last}"
        return Decision(rule.name, "existence", Outcome.WITHHELD, reason, "PARTIALLY CONFIRMED", numbers)
    return Decision(rule.name, "existence", Outcome.PASS, reason, "CONFIRMED", numbers)


def _simultaneity(rule: InterferenceRule, runs: Sequence[Injection]) -> Decision:
    together = sum(injection.is_simultaneous for injection in runs)
    numbers: dict[str, Number] = {
        "num_runs": len(runs),
        "num_simultaneous": together,
        "largest_start_spread_ms": max(injection.start_spread_ms for injection in runs),
        "largest_end_spread_ms": max(injection.end_spread_ms for injection in runs),
    }
    outcome = Outcome.of(together == len(runs))
    reason = f"all spikes of a run overlap in {together} of {len(runs)} runs"
    return Decision(rule.name, "simultaneity", outcome, reason, "", numbers)


def _growth(rule: InterferenceRule, injected: Mapping[str, Sequence[Injection]]) -> Decision:
    spikes = {
        group[0].prompt_tokens: stats.median(injection.spike_ms for injection in group) for group in injected.values()
    }
    ordered = [spikes[length] for length in sorted(spikes)]
    is_growing = all(later > earlier for earlier, later in pairwise(ordered))
    numbers: dict[str, Number] = {f"spike_ms_{length}": spikes[length] for length in sorted(spikes)}
    reason = ", ".join(f"{length} tokens {spikes[length]:.1f} ms" for length in sorted(spikes))
    return Decision(rule.name, "growth", Outcome.of(is_growing), reason, "", numbers)


def measured_waiting_session_ns(run: SealedRun) -> int | None:
    """W of a run from stamps alone: over each prefill, the time other sessions spent between first and last token.

    A prefill lasts from its allocation in the log to its first token at the client. None without stamps or streaming.
    """
    events, requests = run.table("kv_events"), run.table("requests").to_pylist()
    instants = chunk_instants(with_tokens(run.table("chunks")))
    token_ns = {key: (int(at_ns[0]), int(at_ns[-1])) for key, at_ns in instants.items()}
    by_id = {row["response_id"]: row for row in requests if row["response_id"]}
    if not token_ns or events.num_rows == 0 or not run.client.stream:
        return None
    spans = np.array(list(token_ns.values()))
    total_ns = 0
    seen: set[str] = set()
    for log_id, start_ns in values_of(rows_where(events, "kind", "alloc"), "request_id", "log_ns"):
        if log_id in seen:
            continue
        seen.add(log_id)
        row = by_id.get(join_request_id(log_id, by_id) or "")
        if row is None or start_ns is None or (row["session"], row["request"]) not in token_ns:
            return None
        end_ns = token_ns[row["session"], row["request"]][0]
        overlap = np.minimum(spans[:, 1], end_ns) - np.maximum(spans[:, 0], start_ns)
        total_ns += int(overlap[overlap > 0].sum())
    return total_ns
