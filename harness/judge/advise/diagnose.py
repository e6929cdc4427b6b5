"""What a baseline loses: reuse, the prefill that this costs, padded decode slots, and who waits for it.

Sums over the valid sealed runs of one condition; figures that the records do not show are None. The simulator runs only
to check that it reproduces this server.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.analysis import extra_prefill_ns, run_figures
from harness.analysis.serving import latencies
from harness.analysis.summary import summarise
from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.measure.records.run import SealedRun
from harness.model.sim import simulate
from harness.model.spec import ServerSpec


@dataclass(frozen=True)
class Diagnosis:
    """Losses of a baseline, summed over its valid runs. Times in ns.

    lost_prefill_ns: prefill of tokens that could have been reused by formula C. padding_ns: decode time of empty
    places, at f(b) - f(n). queue_ns: per session, from sending to the first token, the longest first. device_ns:
    modelled device time (A); simulated_ns: device time of the same plans in the simulator. start_ms, lag_ms: mean
    lateness of the client in model ms, assuming exponential delays. backend: the kind of server of the runs. origin:
    the note on simulated or emulated figures.
    """

    condition: str
    backend: str
    server: ServerSpec
    num_runs: int
    num_rearrivals: int
    num_reused: int
    lost_tokens: int
    lost_prefill_ns: int
    padding_ns: int
    padding_ratio: float
    steps_by_n_b: tuple[tuple[int, int, int], ...]
    evictions: tuple[tuple[str, int], ...]
    waiting_session_ns: int | None
    queue_ns: tuple[tuple[int, int], ...]
    device_ns: int | None
    simulated_ns: int
    origin: str
    start_ms: float
    lag_ms: float

    @property
    def is_reuse_first(self) -> bool:
        """Whether lost reuse costs more than padding: then slots come before buckets (docs/method.md, "Search")."""
        return self.lost_prefill_ns >= self.padding_ns

    def lines(self) -> Iterator[str]:
        """The diagnosis as lines of text."""
        total = self.device_ns or self.simulated_ns
        lost = self.num_rearrivals - self.num_reused
        if self.origin:
            yield self.origin
        yield f"baseline {self.condition!r}: {self.num_runs} valid runs, {total / NS_PER_S:.2f} s of device time"
        yield (
            f"  reuse: {lost} of {self.num_rearrivals} re-arrivals lost it; {self.lost_tokens:,} tokens computed twice:"
            f" {self.lost_prefill_ns / NS_PER_S:.2f} s of prefill, {100 * self.lost_prefill_ns / total:.1f} % of "
            "device time"
        )
        yield (
            f"  padding: {100 * self.padding_ratio:.1f} % of the decode places were empty: "
            f"{self.padding_ns / NS_PER_S:.2f} s, {100 * self.padding_ns / total:.1f} % of the device time"
        )
        yield "  decode steps, n in b: " + ", ".join(f"{n} in {b}: {count}" for n, b, count in self.steps_by_n_b)
        if self.evictions:
            yield "  evictions: " + ", ".join(f"{count} by {caller}" for caller, count in self.evictions)
        if self.waiting_session_ns is not None:
            yield f"  waiting: {self.waiting_session_ns / NS_PER_S:.2f} session seconds behind other sessions' prefills"
        if not self.queue_ns:
            yield "  until the first token: not known, the answers were not streamed"
        else:
            longest = ", ".join(f"session {session} {spent / NS_PER_S:.2f} s" for session, spent in self.queue_ns[:3])
            yield f"  longest until the first token, all runs together: {longest}"
        if self.device_ns:
            yield f"  the simulator gives {self.simulated_ns / self.device_ns:.3f} of this device time"


def diagnose(runs: Sequence[SealedRun], condition: str = "") -> Diagnosis:
    """Diagnose one condition (default: the experiment's baseline).

    Raises SpecError when there is no valid run of it, or its plan is not with the records.
    """
    summary = summarise(runs)
    name = condition or next(
        (shown.baseline for shown in summary.conditions if shown.baseline), summary.conditions[0].name
    )
    names = [shown.name for shown in summary.conditions]
    if name not in names:
        raise SpecError(f"there is no condition {name!r}", where="advise", hint=f"Choose one of {', '.join(names)}")
    figures = summary.condition(name)
    valid = [run for run in runs if run.condition == name and run.is_valid]
    if not valid:
        raise SpecError(f"condition {name!r} has no valid run", where="advise", hint="Run the baseline first")
    lost_tokens, num_reused = figures.reuse.lost_tokens, figures.reuse.num_reused
    if lost_tokens is None or num_reused is None:
        raise SpecError(
            f"what condition {name!r} reused is unknown: the server did not state cached tokens",
            where="advise",
            hint="Start the server with --enable-prompt-tokens-details and run the baseline again",
        )
    server, model = valid[0].server, valid[0].cost_model
    lost_ns = simulated_ns = 0
    queues: dict[int, int] = {}
    for run in valid:
        simulated_ns += simulate(run.plan, server, model).device_ns
        for again in run_figures(run).reuse.rearrivals:
            cached = again.cached_tokens or 0
            lost_ns += extra_prefill_ns(model, again.prompt_tokens - cached, again.reusable_tokens - cached)
        for session, ttft_ns in zip(
            *(getattr(latencies(run), name).tolist() for name in ("session", "ttft_ns")), strict=True
        ):
            if not math.isnan(ttft_ns):
                queues[session] = queues.get(session, 0) + round(ttft_ns)
    padding_ns = sum(
        count * (model.decode_step_ns(b, n) - model.decode_step_ns(n, n))
        for (n, b), count in figures.steps_by_n_b.items()
    )
    return Diagnosis(
        condition=name,
        backend=summary.backend,
        origin=summary.origin,
        server=server,
        num_runs=len(valid),
        num_rearrivals=figures.reuse.num_rearrivals,
        num_reused=num_reused,
        lost_tokens=lost_tokens,
        lost_prefill_ns=lost_ns,
        padding_ns=padding_ns,
        padding_ratio=figures.padding.ratio or 0.0,
        steps_by_n_b=tuple((n, b, count) for (n, b), count in figures.steps_by_n_b.items()),
        evictions=tuple(sorted((figures.evictions or {}).items())),
        waiting_session_ns=figures.waiting_session_ns,
        queue_ns=tuple(sorted(queues.items(), key=lambda item: -item[1])),
        device_ns=figures.a_ns,
        simulated_ns=simulated_ns,
        # The mean of N evenly spread starts is half the spread. The median of an exponential is ln 2 times its mean.
        start_ms=(figures.start_spread_ms or 0.0) / 2 * summary.time_scale,
        lag_ms=(figures.rearrival_p50_ms or 0.0) / math.log(2) * summary.time_scale,
    )
