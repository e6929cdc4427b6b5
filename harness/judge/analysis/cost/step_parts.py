"""Time in the steps of a vLLM, measured inside its engine core, beside the cost model: where A and B part.

B is time with a request in flight. It is the time in steps then, and the time between steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from harness.clock import ScaledClock
from harness.judge.analysis.cost.reconstruct import ChunkedStepCost, StepCost, union_ns
from harness.judge.analysis.logs.engine_steps import attended_by_step, decode_contexts, step_spans
from harness.measure.records.schema import values_of
from harness.stacks.vllm.step_log import StepLog

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StepGroup:
    """Steps of one kind, decode steps by padded size.

    measured_ns: from the end of the step before to their own, as calibration takes it. modelled_ns: None where the cost
    model states no such price.
    """

    name: str
    num_steps: int
    measured_ns: int
    modelled_ns: int | None


@dataclass(frozen=True, slots=True)
class StepParts:
    """Times of a run's clock. in_steps_ns: while requests were in flight; between_ns: the rest of B."""

    in_steps_ns: int
    between_ns: int
    groups: tuple[StepGroup, ...]

    @property
    def b_ns(self) -> int:
        """Channel B."""
        return self.in_steps_ns + self.between_ns


def step_parts(
    log: StepLog, requests: pa.Table, clock: ScaledClock, cost_model: StepCost | None = None
) -> StepParts | None:
    """The parts of a run; None for several engines, and where no engine core stamped its steps."""
    if not log.cores or len(log.engines) > 1:
        return None
    spans = [_on_clock(span, clock) for span in step_spans(log)]
    flights = [(sent, done) for sent, done in values_of(requests, "sent_ns", "done_ns") if None not in (sent, done)]
    work = [
        (clock.from_monotonic_ns(began_ns), clock.from_monotonic_ns(at_ns))
        for kind, began_ns, at_ns in values_of(log.steps, "kind", "began_ns", "at_ns")
        if kind not in ("idle", "dummy")
    ]
    b_ns = union_ns(flights)
    # What both cover is what they cover together less what either covers alone.
    in_steps_ns = b_ns + union_ns(work) - union_ns([*flights, *work])
    return StepParts(in_steps_ns, b_ns - in_steps_ns, tuple(_groups(log, spans, cost_model)))


def _on_clock(span: Span | None, clock: ScaledClock) -> Span | None:
    return None if span is None else (clock.from_monotonic_ns(span[0]), clock.from_monotonic_ns(span[1]))


def _groups(log: StepLog, spans: Iterable[Span | None], cost_model: StepCost | None) -> Iterator[StepGroup]:
    has_prices = isinstance(cost_model, ChunkedStepCost) and cost_model.chunk_step_fs is not None
    contexts = decode_contexts(log) or [0.0] * log.steps.num_rows
    rows = values_of(log.steps, "kind", "n", "b", "runtime_mode", "generation_requests", "context_tokens")
    measured: dict[str, list[int]] = {}
    modelled: dict[str, int] = {}
    for span, context, attended, (kind, n, b, mode, decodes, tokens) in zip(
        spans, contexts, attended_by_step(log), rows, strict=True
    ):
        if span is None or kind not in ("decode", "prefill", "mixed"):
            continue
        is_eager = log.has_graphs and mode == "NONE"
        name = f"decode of {n if b is None else b}{' without a graph' if is_eager else ''}" if n else kind
        measured.setdefault(name, []).append(span[1] - span[0])
        if has_prices and isinstance(cost_model, ChunkedStepCost):
            price_ns = (
                cost_model.decode_step_ns(b or n, n, round(context)) + cost_model.eager_ns * is_eager
                if n
                else cost_model.chunked_step_ns(decodes, decodes, round(context), tokens, attended)
            )
            modelled[name] = modelled.get(name, 0) + price_ns
    for name in sorted(measured, key=lambda one: (not one.startswith("decode"), len(one), one)):
        times_ns = measured[name]
        yield StepGroup(name, len(times_ns), sum(times_ns), modelled.get(name))
