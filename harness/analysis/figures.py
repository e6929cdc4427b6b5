"""The figures of a run, computed from its sealed records, and their sums over several runs.

Every figure comes from the records alone; what cannot be computed is None, never zero.
"""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.analysis.cost.padding import Padding, padding_of, steps_by_n_b
from harness.analysis.cost.reconstruct import ChannelA, channel_b, modelled, residual_ns, together, waiting_session_ns
from harness.analysis.cost.step_parts import StepParts, step_parts
from harness.analysis.energy import Energy, run_energy
from harness.analysis.logs.engine_steps import step_log_of
from harness.analysis.logs.replicas import ServerTables, engines_of, servers_in, split_requests
from harness.analysis.reuse import Ceilings, Rearrival, cached_tokens, ceilings, prompt_tokens, rearrivals, reuse_rule
from harness.analysis.run_tables import (
    ASKED_COUNTER,
    EXTERNAL_COUNTER,
    LOADED_BYTES,
    ROUNDING_NS,
    STORED_BYTES,
    Counts,
    RequestKey,
    counter_increment,
    counts_of,
    counts_over,
    with_logged_prefills,
)
from harness.analysis.stats import sum_or_none, when_known
from harness.clock import NS_PER_MS, NS_PER_US, ScaledClock
from harness.measure.records import layout, schema
from harness.measure.records.manifest import Manifest
from harness.measure.records.run import SealedRun, once_per_run
from harness.measure.records.schema import values_of
from harness.model.engine import CostModel
from harness.model.spec import DeviceSlot
from harness.model.spec.sections import Basis
from harness.run_key import RunKey


@dataclass(frozen=True, slots=True)
class Lateness:
    """Real send minus intended send, wall ms.

    rearrival_ms: ascending, one per sent request that followed another one. start_ms: one per session of the common
    start. num_early: requests that left before they were due.
    """

    rearrival_ms: NDArray[np.float64]
    start_ms: NDArray[np.float64]
    num_early: int

    @property
    def start_spread_ms(self) -> float | None:
        """Latest minus earliest start of the sessions that start together; None when none started."""
        return float(self.start_ms.max() - self.start_ms.min()) if len(self.start_ms) else None

    @property
    def rearrival_p50_ms(self) -> float | None:
        return self.rearrival_quantile_ms(0.5)

    @property
    def rearrival_p99_ms(self) -> float | None:
        return self.rearrival_quantile_ms(0.99)

    def rearrival_quantile_ms(self, quantile: float) -> float | None:
        """The quantile as a value that occurred, the next one up: with few re-arrivals p99 is the largest."""
        if not len(self.rearrival_ms):
            return None
        return float(np.quantile(self.rearrival_ms, quantile, method="higher"))


def lateness(requests: pa.Table, scale: float) -> Lateness:
    """The harness's lateness in one run.

    requests: columns session, request, trigger_ns, due_ns, sent_ns. scale: model ns per wall ns.
    """
    trigger_ns = requests.column("trigger_ns").to_numpy()
    sent = requests.column("sent_ns")
    is_sent = sent.is_valid().to_numpy()
    # int64 throughout: a float64 cannot hold nanoseconds of uptime.
    late_ns = sent.fill_null(0).to_numpy() - requests.column("due_ns").to_numpy()
    first = requests.column("request").to_numpy() == 0
    # A request that was never sent may have no true trigger: it must not move the common start.
    is_start = first & (trigger_ns == trigger_ns[is_sent].min()) if is_sent.any() else first
    wall_ms = late_ns / (scale * NS_PER_MS)
    return Lateness(
        rearrival_ms=np.sort(wall_ms[is_sent & ~is_start]),
        start_ms=wall_ms[is_sent & is_start],
        num_early=int(np.count_nonzero(is_sent & (late_ns < -ROUNDING_NS * max(1.0, scale)))),
    )


@dataclass(frozen=True, slots=True)
class ReuseFigures:
    """Re-arrivals of a run and what they reused. Tokens; reusable is what formula C allows.

    What was reused is None where the server did not report it for every re-arrival.
    """

    rearrivals: tuple[Rearrival, ...] = field(default=(), repr=False)

    @property
    def num_rearrivals(self) -> int:
        return len(self.rearrivals)

    @property
    def num_reused(self) -> int | None:
        return sum_or_none(again.is_reused for again in self.rearrivals)

    @property
    def num_partial(self) -> int | None:
        return sum_or_none(again.is_partial for again in self.rearrivals)

    @property
    def reused_tokens(self) -> int | None:
        return sum_or_none(again.cached_tokens for again in self.rearrivals)

    @property
    def num_full(self) -> int | None:
        """Re-arrivals that reused all that formula C allows, or more."""
        return when_known(operator.sub, self.num_reused, self.num_partial)

    @property
    def num_lost(self) -> int | None:
        """Re-arrivals that reused nothing."""
        return when_known(operator.sub, self.num_rearrivals, self.num_reused)

    @property
    def lost_tokens(self) -> int | None:
        """What formula C allows less what was reused."""
        return when_known(operator.sub, self.reusable_tokens, self.reused_tokens)

    @property
    def share_text(self) -> str:
        """ "3/4": three of four re-arrivals reused something; "?" where it is unknown."""
        return f"{'?' if self.num_reused is None else self.num_reused}/{self.num_rearrivals}"

    @property
    def reusable_tokens(self) -> int:
        return sum(again.reusable_tokens for again in self.rearrivals)


@dataclass(frozen=True, slots=True)
class SecondMemory:
    """What a server with a second KV memory counted of it.

    asked_tokens, loaded_tokens: of prompts. loaded_bytes, stored_bytes: None where the server does not count them.
    """

    asked_tokens: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int | None = 0
    stored_bytes: int | None = 0

    def __add__(self, other: SecondMemory) -> SecondMemory:
        return SecondMemory(
            self.asked_tokens + other.asked_tokens,
            self.loaded_tokens + other.loaded_tokens,
            when_known(operator.add, self.loaded_bytes, other.loaded_bytes),
            when_known(operator.add, self.stored_bytes, other.stored_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one run, or their sums over several; times in model ns. What is unknown in one of them is None.

    a: channel A and its parts, None without a step log or where reuse is unknown. b_ns: channel B. waiting_session_ns:
    W (session-ns), modelled, None when the log has no KV lines. evictions: by who caused them, None without KV lines.
    has_steps: whether the decode steps are known, from a step log or because nothing was decoded.
    computed_prefill_tokens: None where reuse is unknown. ceilings: None without the plan or where reuse is unknown.
    parts: what lies between A and B; None where no engine core stamped its steps. second_memory: None where none was
    asked. counts: what the server counts of itself, by column of ``run_tables.COUNT_COLUMNS``. energy: None
    where power was not sampled once a second.
    """

    a: ChannelA | None
    b_ns: int | None
    has_steps: bool
    steps_by_n_b: Mapping[tuple[int, int], int]
    computed_prefill_tokens: int | None
    reuse: ReuseFigures
    evictions: Counter[str] | None
    waiting_session_ns: int | None
    ceilings: Ceilings | None = None
    parts: StepParts | None = None
    second_memory: SecondMemory | None = None
    counts: Counts = field(default_factory=dict[str, int])
    energy: Energy | None = None

    def cost_ns(self, basis: Basis) -> int | None:
        """Modelled device time (a), the time in steps (s) or the time in flight (b)."""
        return {"a": self.a_ns, "s": self.steps_ns, "b": self.b_ns}[basis]

    @property
    def steps_ns(self) -> int | None:
        """Time in steps (S); None where it was not measured."""
        return None if self.parts is None else self.parts.in_steps_ns

    @property
    def a_ns(self) -> int | None:
        """Channel A; None without a step log or where reuse is unknown."""
        return None if self.a is None else self.a.total_ns

    @property
    def decode_ns(self) -> int | None:
        return None if self.a is None else self.a.decode_ns

    @property
    def prefill_ns(self) -> int | None:
        return None if self.a is None else self.a.prefill_ns

    @property
    def r_ns(self) -> int | None:
        """r = B - A; None without channel A."""
        return when_known(residual_ns, self.b_ns, self.a_ns)

    @property
    def num_steps(self) -> int | None:
        """Decode steps; None without a step log."""
        return sum(self.steps_by_n_b.values()) if self.has_steps else None

    @property
    def num_evictions(self) -> int | None:
        """Slot evictions; None without KV lines in the log."""
        return None if self.evictions is None else sum(self.evictions.values())

    @property
    def padding(self) -> Padding:
        return padding_of(self.steps_by_n_b)

    @property
    def histogram(self) -> dict[int, int]:
        """h(n), by ascending n."""
        total: Counter[int] = Counter()
        for (n, _b), count in self.steps_by_n_b.items():
            total[n] += count
        return dict(sorted(total.items()))

    @property
    def mean_n(self) -> float | None:
        """Requests per decode step."""
        slots = self.padding
        return (slots.bucket_slots - slots.padded_slots) / self.num_steps if self.num_steps else None

    @property
    def mean_b(self) -> float | None:
        """Bucket positions per decode step."""
        return self.padding.bucket_slots / self.num_steps if self.num_steps else None

    @property
    def mean_step_ns(self) -> float | None:
        """Mean duration of a decode step in channel A."""
        return None if self.decode_ns is None or not self.num_steps else self.decode_ns / self.num_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures(Figures):
    """Figures of one run.

    prompt_tokens, cached_tokens: sums over all responses; cached is None where reuse is unknown.
    device: of its fleet, "" outside a fleet. unit: replicates that ran at once by plan share one, else the replicate.
    neighbours: devices of its host that were busy beside it. is_emulated: by a fleet's emulated device. plan: hash of
    the plan as drawn, before its treatment. sessions: hash of the sessions that were sent, which plans may have in
    common; "" where the plan cannot be read. drafts: of speculative decoding, under which n and b count tokens:
    "synthetic" acceptance, or "real"; else "".
    """

    experiment: str
    condition: str
    replicate: int
    is_valid: bool
    treatment: str
    baseline: str
    b_ns: int
    prompt_tokens: int
    cached_tokens: int | None
    lateness: Lateness
    num_requests: int
    num_failed: int
    num_aborted: int
    generated_tokens: int = 0
    invalid_reasons: tuple[str, ...] = field(default=())
    device: str = ""
    unit: int = 0
    neighbours: int = 0
    is_emulated: bool = False
    plan: str = ""
    sessions: str = ""
    drafts: str = ""

    @property
    def key(self) -> RunKey:
        return RunKey(self.experiment, self.condition, self.replicate)

    @property
    def label(self) -> str:
        return f"{self.condition}/{self.replicate}"


def sums_over(runs: Sequence[RunFigures]) -> dict[str, Any]:
    """The sums that make the ``Figures`` of several runs, by name. Without a run none is known."""

    def total(name: str, start: Any = 0) -> Any:
        return sum_or_none((getattr(run, name) for run in runs), start) if runs else None

    steps = sum((Counter(run.steps_by_n_b) for run in runs), Counter[tuple[int, int]]())
    return {
        "a": total("a", ChannelA(0, 0)),
        "b_ns": total("b_ns"),
        "has_steps": bool(runs) and all(run.has_steps for run in runs),
        "steps_by_n_b": dict(sorted(steps.items())),
        "computed_prefill_tokens": total("computed_prefill_tokens"),
        "reuse": ReuseFigures(tuple(rearrival for run in runs for rearrival in run.reuse.rearrivals)),
        "evictions": total("evictions", Counter[str]()),
        "waiting_session_ns": total("waiting_session_ns"),
        "ceilings": total("ceilings", Ceilings()),
        "parts": total("parts", StepParts()),
        "second_memory": total("second_memory", SecondMemory()),
        "counts": counts_over([run.counts for run in runs]),
        "energy": total("energy", Energy()),
    }


def total_of(runs: Sequence[RunFigures]) -> Figures:
    """The sums over several runs."""
    return Figures(**sums_over(runs))


def totals(pairs: Sequence[tuple[RunFigures, RunFigures]]) -> tuple[Figures, Figures]:
    """The sums over the runs of either side."""
    return total_of([run for run, _ in pairs]), total_of([base for _, base in pairs])


@once_per_run
def run_figures(run: SealedRun) -> RunFigures:
    """Every figure of one sealed run, channel A at the prices that lie in it; see ``figures_at``."""
    return figures_at(run, run.cost_model)


def figures_at(run: SealedRun, cost_model: CostModel) -> RunFigures:
    """Every figure of one sealed run, channel A at the prices of ``cost_model``.

    Channel A is None when the run has no step log although it decoded, or when its reuse is unknown.
    """
    requests, steps, kv_events = run.table("requests"), run.table("steps"), run.table("kv_events")
    statuses = Counter(requests.column("status").to_pylist())
    generated = requests.column("completion_tokens").to_pylist()
    has_decoded = any((tokens or 0) > 1 for tokens in generated)
    plan, rule, log, engine_of = run.plan_if_readable, reuse_rule(run), step_log_of(run), engines_of(run)
    is_observed = steps.num_rows > 0 or not has_decoded
    known = with_logged_prefills(requests, kv_events)
    prompt, cached = prompt_tokens(known), cached_tokens(known)
    is_reuse_known = cached is not None
    servers = servers_in(run)
    evicted_for = schema.rows_where(kv_events, "kind", "eviction").column("caller").to_pylist()
    a = modelled_of(servers, known, engine_of, cost_model) if is_observed and is_reuse_known else None
    if a is not None:
        a = replace(a, prefill_ns=a.prefill_ns + loading_ns(run.manifest, run.table("metrics"), rule.block_tokens))
    return RunFigures(
        experiment=run.experiment,
        condition=run.condition,
        replicate=run.replicate,
        is_valid=run.is_valid,
        treatment=run.manifest.treatment,
        baseline=run.manifest.baseline,
        a=a,
        b_ns=channel_b(requests, engine_of),
        has_steps=is_observed,
        drafts="" if log is None else log.acceptance,
        steps_by_n_b=steps_by_n_b(steps),
        prompt_tokens=prompt,
        computed_prefill_tokens=when_known(operator.sub, prompt, cached),
        cached_tokens=cached_tokens(requests),
        reuse=ReuseFigures(tuple(rearrivals(known, plan, rule, engine_of))),
        evictions=Counter(caller or "unknown" for caller in evicted_for) if kv_events.num_rows else None,
        waiting_session_ns=sum_or_none(
            waiting_session_ns(server.kv_events, own, cost_model)
            for server, own in zip(servers, split_requests(known, engine_of, len(servers)), strict=True)
        )
        if is_reuse_known
        else None,
        lateness=lateness(requests, run.manifest.time_scale),
        num_requests=requests.num_rows,
        num_failed=requests.num_rows - statuses["ok"] - statuses[schema.ABORTED],
        num_aborted=statuses[schema.ABORTED],
        generated_tokens=sum(tokens or 0 for tokens in generated),
        ceilings=None
        if plan is None or cached_tokens(requests) is None
        else ceilings(requests, kv_events, plan, rule, engine_of),
        parts=None
        if log is None
        else step_parts(log, requests, ScaledClock(run.manifest.clock.scale), None if a is None else cost_model),
        second_memory=second_memory_of(run.table("metrics")),
        counts=counts_of(run.table("metrics")),
        energy=run_energy(run),
        invalid_reasons=run.invalid_reasons,
        plan=run.manifest.drawn_hash,
        sessions="" if plan is None else _sessions_of(run),
        **place_of(run),
    )


def _sessions_of(run: SealedRun) -> str:
    """The hash of its plan's lines behind the header, which are its sessions."""
    return hashlib.sha256(run.file(layout.PLAN).read_bytes().partition(b"\n")[2]).hexdigest()


def modelled_of(
    servers: Sequence[ServerTables], requests: pa.Table, served: Mapping[RequestKey, int], cost_model: CostModel
) -> ChannelA | None:
    """Channel A of every server of a run, and its sum; None where it is unknown of one, or of whose work a request is.

    requests: with the prefills that the log shows. served: see ``served_by``.
    """
    if len(servers) > 1 and len(served) < sum(prompt is not None for (prompt,) in values_of(requests, "prompt_tokens")):
        return None
    known = costs_of_servers(servers, requests, served, cost_model)
    return None if known is None else together(known)


def costs_of_servers(
    servers: Sequence[ServerTables], requests: pa.Table, served: Mapping[RequestKey, int], cost_model: CostModel
) -> list[ChannelA] | None:
    """Channel A of each server, as ``modelled_of`` has it; None where it is unknown of one."""
    parts = [
        modelled(server.steps, own, cost_model, server.kv_events, server.log)
        for server, own in zip(servers, split_requests(requests, served, len(servers)), strict=True)
    ]
    known = [part for part in parts if part is not None]
    return known if len(known) == len(parts) else None


def second_memory_of(metrics: pa.Table) -> SecondMemory | None:
    """What the server counted of its second memory; None where it has none, or never asked it."""
    asked, loaded = (counter_increment(metrics, name) for name in (ASKED_COUNTER, EXTERNAL_COUNTER))
    moved = [counter_increment(metrics, name) for name in (LOADED_BYTES, STORED_BYTES)]
    if not (asked or loaded or any(moved)):
        return None
    return SecondMemory(
        round(asked or 0), round(loaded or 0), *(None if each is None else round(each) for each in moved)
    )


def loading_ns(manifest: Manifest, metrics: pa.Table, block_tokens: int) -> int:
    """Time in which steps waited for KV from a second memory, by the price of a block; 0 where there is none."""
    block_us = manifest.server_spec.get("offload_block_us")
    loaded = counter_increment(metrics, EXTERNAL_COUNTER) if block_us else None
    return round((loaded or 0) / block_tokens * float(block_us or 0) * NS_PER_US)


def cells(of: object, columns: Mapping[str, str]) -> dict[str, Any]:
    """Cells of a row of a table; columns: by name, where in ``of`` each cell is, see ``figure_at``."""
    return {name: figure_at(of, path) for name, path in columns.items()}


def same(*names: str) -> dict[str, str]:
    """Columns with the names of their figures."""
    return dict(zip(names, names, strict=True))


def figure_at(of: Any, path: str) -> Any:
    """What lies at a path like "interval.low"; None where a part of it is None."""
    for name in path.split("."):
        of = None if of is None else getattr(of, name)
    return of


class RunPlace(TypedDict):
    """Where in a fleet a run was made; see ``RunFigures``."""

    device: str
    unit: int
    neighbours: int
    is_emulated: bool


def place_of(run: SealedRun) -> RunPlace:
    """Where in a fleet a run was made."""
    fleet = run.manifest.fleet
    if fleet is None or run.spec.fleet is None:
        return RunPlace(device="", unit=run.replicate, neighbours=0, is_emulated=False)
    place = DeviceSlot(fleet.host if run.spec.fleet.hosts else "", fleet.device)
    return RunPlace(
        device=str(place),
        unit=run.spec.unit_of(run.replicate),
        neighbours=len(fleet.neighbours),
        is_emulated=run.manifest.kind.has_device is False,
    )
