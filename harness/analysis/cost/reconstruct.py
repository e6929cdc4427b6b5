"""Device time of a run, on two channels: A from the step log and the cost models, B from the client's stamps alone.

Pure functions over Arrow tables; times in integer ns of the run's clock. Nothing here decides anything.
Definitions: docs/reference/method.md, "Channel A and channel B".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from harness.analysis.logs.engine_steps import attended_by_step, decode_contexts
from harness.analysis.run_tables import join_request_id
from harness.analysis.stats import IntArray
from harness.clock import NS_PER_MS
from harness.measure.records.schema import values_of
from harness.model.engine import CostModel
from harness.model.engine.config import Drafts
from harness.model.engine.cost import US_PER_MS, size_name

if TYPE_CHECKING:
    from harness.stacks.vllm.step_log import StepLog

Span = tuple[int, int]
ToleranceRule = Literal["revised", "initial"]
DEFAULT_TAU = 0.02
# Decimal inputs are held as doubles: a difference equal to its limit must count as equal.
ROUNDING = 1e-9


class StepContexts(NamedTuple):
    """Summed sequence lengths of every decode step's batch. is_exact: the log accounts for every request of every step.

    context_tokens: shape (steps,); meaningless when not is_exact.
    """

    context_tokens: IntArray
    is_exact: bool
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class ChannelA:
    """Reconstructed device time. decode_ns = sum of t_step(b, n); prefill_ns = sum of T(prompt - cached).

    num_unpriced_requests: sent requests without a token count (they failed). num_extrapolated_*: steps and prefills
    priced outside the range that the cost model was fitted on. context_problem: why a context-dependent cost model
    had to be applied without contexts ("" when it was not). usage: ms of it for each unit of a coefficient of the cost
    file, by its name; the time is linear in them. cost_model: by which it was priced.
    """

    decode_ns: int
    prefill_ns: int
    num_unpriced_requests: int = 0
    num_extrapolated_steps: int = 0
    num_extrapolated_prefills: int = 0
    context_problem: str = ""
    usage: Mapping[str, float] = field(default_factory=dict[str, float], repr=False)
    cost_model: CostModel | None = field(default=None, compare=False, repr=False)

    @property
    def total_ns(self) -> int:
        return self.decode_ns + self.prefill_ns

    @property
    def steps_by_size(self) -> dict[int, float]:
        """Decode steps by the size that they are priced as."""
        return {int(name[2:-1]): count for name, count in self.usage.items() if name.startswith("f(")}

    def __add__(self, other: ChannelA) -> ChannelA:
        """The device time of both; nothing else of them is summed."""
        return ChannelA(self.decode_ns + other.decode_ns, self.prefill_ns + other.prefill_ns)


def together(parts: Sequence[ChannelA]) -> ChannelA:
    """Channel A of a run whose servers have one cost model."""
    first = parts[0]
    for part in parts[1:]:
        names = ("num_unpriced_requests", "num_extrapolated_steps", "num_extrapolated_prefills")
        first = replace(
            first + part,
            **{name: getattr(first, name) + getattr(part, name) for name in names},
            context_problem=first.context_problem or part.context_problem,
            usage=_summed(first.usage, part.usage),
            cost_model=first.cost_model,
        )
    return first


def channel_a(
    steps: pa.Table, requests: pa.Table, cost_model: CostModel, kv_events: pa.Table | None = None
) -> ChannelA:
    """Channel A of one run.

    steps: columns n, b. requests: prompt_tokens, cached_tokens. kv_events: needed only by a cost model whose steps
    depend on context; the contexts are then rebuilt from the log's own order (see ``step_contexts``).
    """
    contexts: IntArray = np.zeros(steps.num_rows, dtype=np.int64)
    problem = ""
    if cost_model.context_fs:
        rebuilt = step_contexts(steps, kv_events, requests)
        problem = rebuilt.why_not
        contexts = rebuilt.context_tokens if rebuilt.is_exact else contexts
    decode_ns, extrapolated_steps = _decode(steps, contexts, cost_model)
    columns = values_of(requests, "prompt_tokens", "cached_tokens")
    prompts = [(prompt, cached) for prompt, cached in columns if prompt is not None]
    return ChannelA(
        decode_ns=decode_ns,
        prefill_ns=sum(cost_model.prefill_ns(prompt - cached, cached) for prompt, cached in prompts),
        num_unpriced_requests=sum(
            prompt is None and sent is not None for prompt, sent in values_of(requests, "prompt_tokens", "sent_ns")
        ),
        num_extrapolated_steps=extrapolated_steps,
        num_extrapolated_prefills=sum(
            cost_model.is_prefill_extrapolated(prompt - cached) for prompt, cached in prompts
        ),
        context_problem=problem,
        usage=_summed(_decode_usage(*_sizes(steps), contexts), _prefill_usage(prompts, cost_model.chunk_tokens)),
        cost_model=cost_model,
    )


def modelled(
    steps: pa.Table,
    requests: pa.Table,
    cost_model: CostModel,
    kv_events: pa.Table | None = None,
    log: StepLog | None = None,
) -> ChannelA | None:
    """Channel A of a run; log: of a vLLM, else None. None where the cost model states no price of its steps."""
    if log is None:
        return channel_a(steps, requests, cost_model, kv_events)
    return chunked_channel_a(log, steps, cost_model)


def chunked_channel_a(log: StepLog, steps: pa.Table, cost_model: CostModel) -> ChannelA | None:
    """Channel A of a vLLM: its pure decode steps, and each other step by its decodes and tokens of prompts.

    None where the cost model does not state what parts of prompts cost, or the log does not show each step's work.
    """
    prices, works = step_prices(log, cost_model), step_works(log, cost_model)
    if prices is None or steps.num_rows != log.num_by_kind.get("decode", 0):
        return None
    decodes = [(work.b or 0, work.n, work.context) for work in works if work.kind == "decode"]
    others = [work for work in works if work.kind not in ("decode", *WITHOUT_WORK)]
    sizes, requests, of_decodes = np.array(decodes, dtype=np.int64).reshape(-1, 3).T
    of_drafter = {"per_pass_ms": float(drafter_passes(log) * (len(decodes) + len(others)))} if log.num_drafts else {}
    decode_ns = sum(price for price, work in zip(prices, works, strict=True) if work.kind == "decode")
    chunks = [(work.tokens, work.n, work.size, work.context, work.attended) for work in others]
    eager = {
        "eager_ms": float(sum(log.eager_by_n.values())),
        "per_step_eager_ms": float(sum(work.is_eager and work.tokens > 0 for work in others)),
    }
    return ChannelA(
        decode_ns=decode_ns,
        prefill_ns=sum(prices) - decode_ns,
        num_extrapolated_steps=_decode(steps, of_decodes, cost_model)[1],
        num_extrapolated_prefills=sum(cost_model.is_prefill_extrapolated(work.tokens) for work in others),
        context_problem="the step log shows no KV memory"
        if cost_model.context_fs and decode_contexts(log) is None
        else "",
        usage=_summed(_decode_usage(sizes, requests, of_decodes), _chunk_usage(chunks) | eager | of_drafter),
        cost_model=cost_model,
    )


WITHOUT_WORK = ("idle", "dummy")


class _Work(NamedTuple):
    """A step of a vLLM. tokens: of prompts. n: decodes; size: their tokens, with drafts; context: their summed sequence
    lengths. b: of a decode step. is_counted: whether the log shows its tokens and decodes.
    """

    kind: str
    is_counted: bool
    tokens: int
    n: int
    size: int
    b: int | None
    is_eager: bool
    context: int
    attended: int


def step_works(log: StepLog, cost_model: CostModel) -> list[_Work]:
    """Every step, without contexts where no price depends on them."""
    contexts = decode_contexts(log) if cost_model.context_fs else None
    rounded = np.zeros(log.steps.num_rows, dtype=np.int64) if contexts is None else np.rint(contexts).astype(np.int64)
    of_size = ("generation_requests", "generation_tokens", "n", "b")
    rows = values_of(log.steps, "kind", "context_tokens", *of_size, "runtime_mode")
    works: list[_Work] = []
    for (kind, tokens, decodes, of_decodes, n, b, mode), *of_prices in zip(
        rows, rounded.tolist(), attended_by_step(log), strict=True
    ):
        # Without the scheduler's own counts a decode has one token.
        num = n if kind == "decode" and decodes is None else decodes
        size = (of_decodes if log.num_drafts else num) or 0
        is_eager = log.has_graphs and mode == "NONE"
        works.append(_Work(kind, None not in (tokens, num), tokens or 0, num or 0, size, b, is_eager, *of_prices))
    return works


def drafter_passes(log: StepLog) -> int:
    """Passes of the drafter after each step."""
    return Drafts(log.num_drafts, str(log.effective.get("speculative_method"))).num_passes


def step_prices(log: StepLog, cost_model: CostModel) -> list[int] | None:
    """What each step of a vLLM costs by the model, ns; their sum is channel A.

    None where the cost model does not state what parts of prompts and drafts cost, or the log does not show each step's
    work.
    """
    works = step_works(log, cost_model)
    if cost_model.chunk_step_fs is None or not all(map(_is_shown, works)):
        return None
    if log.num_drafts and cost_model.draft_pass_ns is None:
        return None
    drafter_ns = (cost_model.draft_pass_ns or 0) * drafter_passes(log)
    price = {work: _price_ns(work, cost_model, drafter_ns) for work in set(works)}
    return [price[work] for work in works]


def _is_shown(work: _Work) -> bool:
    if work.kind == "decode":
        return work.b is not None
    return work.kind in WITHOUT_WORK or (work.kind in ("prefill", "mixed") and work.is_counted)


def _price_ns(work: _Work, cost_model: CostModel, drafter_ns: int) -> int:
    if work.kind in WITHOUT_WORK:
        return 0
    if work.b is not None and work.kind == "decode":
        step_ns = cost_model.decode_step_ns(work.b, work.n, work.context)
        return step_ns + cost_model.eager_ns * work.is_eager + drafter_ns
    extra_ns = drafter_ns + cost_model.chunk_eager_ns * (work.is_eager and work.tokens > 0)
    return cost_model.chunked_step_ns(work.size, work.n, work.context, work.tokens, work.attended) + extra_ns


def channel_b(requests: pa.Table, served: Mapping[tuple[int, int], int] | None = None) -> int:
    """Channel B of one run, ns: length of the union of the in-flight intervals [sent, done] of all requests.

    served: of several servers, which one served each (session, request); B is then the sum of one union each. Requests
    that nobody served, or nobody knows by whom, make a union of their own.
    """
    if not served:
        return union_ns(span for span in values_of(requests, "sent_ns", "done_ns") if None not in span)
    spans: dict[int | None, list[Span]] = {}
    for session, request, sent_ns, done_ns in values_of(requests, "session", "request", "sent_ns", "done_ns"):
        if None not in (sent_ns, done_ns):
            spans.setdefault(served.get((session, request)), []).append((sent_ns, done_ns))
    return sum(map(union_ns, spans.values()))


def with_tokens(chunks: pa.Table) -> pa.Table:
    """The chunks that brought tokens."""
    return chunks.filter(pa.array(chunks["num_tokens"].to_numpy() > 0))


def received_ns(chunks: pa.Table) -> IntArray:
    """When each chunk came: the kernel's stamp where there is one, as the client's own lag is not the server's."""
    kernel = chunks.column("kernel_ns")
    return np.where(
        kernel.is_valid().to_numpy(), kernel.fill_null(0).to_numpy(), chunks.column("received_ns").to_numpy()
    )


def first_tokens_ns(chunks: pa.Table) -> dict[tuple[int, int], int]:
    """When the first token of each request came; the first byte of a response may come long before."""
    known = with_tokens(chunks)
    table = known.select(["session", "request"]).append_column("at_ns", pa.array(received_ns(known)))
    # Threads would be waited for for ever where none can be started (a limit of memory).
    firsts = table.group_by(["session", "request"], use_threads=False).aggregate([("at_ns", "min")])
    rows = values_of(firsts, "session", "request", "at_ns_min")
    return {(session, request): at_ns for session, request, at_ns in rows}


def union_of(intervals: Iterable[Span]) -> list[Span]:
    """The union of closed intervals: those that it consists of, in order."""
    union: list[Span] = []
    for start_ns, end_ns in sorted(intervals):
        if union and start_ns <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end_ns))
        else:
            union.append((start_ns, end_ns))
    return union


def union_ns(intervals: Iterable[Span]) -> int:
    """Length of a union of closed intervals."""
    return sum(end_ns - start_ns for start_ns, end_ns in union_of(intervals))


def residual_ns(channel_b_ns: int, channel_a_ns: int) -> int:
    """r = B - A: queueing, HTTP and scheduler time that channel A does not see."""
    return channel_b_ns - channel_a_ns


def agreement_tolerance(
    baseline_a_ns: int, baseline_b_ns: int, *, tau0: float = DEFAULT_TAU, rule: ToleranceRule = "revised"
) -> float:
    """tau = max(tau0, r_BASE / B_BASE), both summed over the baseline's replicates; rule "initial": tau0 alone."""
    if rule == "initial" or baseline_b_ns == 0:
        return tau0
    return max(tau0, residual_ns(baseline_b_ns, baseline_a_ns) / baseline_b_ns)


class ChannelAgreement(NamedTuple):
    """Whether the channels agree: difference = |ratio_A - ratio_B| against the tolerance tau."""

    difference: float
    tau: float

    @property
    def is_agreed(self) -> bool:
        return self.difference <= self.tau + ROUNDING


def waiting_session_ns(kv_events: pa.Table, requests: pa.Table, cost_model: CostModel) -> int | None:
    """W, modelled: sum over prefills of T(prompt - cached) times the other requests that were ready to decode.

    Every other running request has its first token and is held back by an exclusive prefill, so the running set is
    all the log needs to give. Kept apart from device time. None when a prefill in the log joins no request.
    """
    prompts, running, total_ns = _by_response_id(requests), set[str](), 0
    for kind, log_id, _step in _kv_walk(kv_events):
        if kind == "free_request":
            running.discard(log_id)
        elif log_id not in running:
            # A further ALLOC of a running request is a decode step that needed one more slot.
            request = join_request_id(log_id, prompts)
            if request is None:
                return None
            prompt, cached = prompts[request]
            total_ns += cost_model.prefill_ns(prompt - cached, cached) * len(running)
            running.add(log_id)
    return total_ns if kv_events.num_rows else None


def step_contexts(steps: pa.Table, kv_events: pa.Table | None, requests: pa.Table) -> StepContexts:
    """Summed context of every decode step, rebuilt from the log's order.

    A request decodes in every step logged between its ALLOC (its prefill, which yields its first token) and its
    FREE-REQUEST; its k-th decode step since then finds prompt + tokens generated so far. The rebuilt n of every step
    is compared with the logged one: any difference makes the result inexact, and it is then not used.
    """
    num_steps = steps.num_rows
    contexts, count = np.zeros(num_steps, dtype=np.int64), np.zeros(num_steps, dtype=np.int64)
    if kv_events is None or kv_events.num_rows == 0:
        return StepContexts(contexts, num_steps == 0, "the log has no KV lines" if num_steps else "")
    prompts = _by_response_id(requests)
    for stay in _stays(kv_events, num_steps):
        request = join_request_id(stay.request_id, prompts)
        if request is None:
            return StepContexts(contexts, False, f"log id {stay.request_id!r} joins no answered request")
        length = stay.last_step - stay.first_step
        first = prompts[request][0] + stay.generated_before + 1
        contexts[stay.first_step : stay.last_step] += np.arange(first, first + length)
        count[stay.first_step : stay.last_step] += 1
    wrong = int(np.count_nonzero(count != steps.column("n").to_numpy()))
    return StepContexts(contexts, wrong == 0, f"{wrong} steps have another n than the KV lines imply" if wrong else "")


def decoding_spans(steps: pa.Table, kv_events: pa.Table, requests: pa.Table) -> list[tuple[tuple[int, int], range]]:
    """((session, request), the places of the decode steps that it was in), in no order.

    Empty where the log does not account for every request of every step: then nobody knows who was in one.
    """
    columns = values_of(requests, "response_id", "session", "request")
    of_id = {name: (session, request) for name, session, request in columns if name}
    count = np.zeros(steps.num_rows, dtype=np.int64)
    spans: list[tuple[tuple[int, int], range]] = []
    for stay in _stays(kv_events, steps.num_rows):
        request = join_request_id(stay.request_id, of_id)
        if request is None:
            return []
        spans.append((of_id[request], range(stay.first_step, stay.last_step)))
        count[stay.first_step : stay.last_step] += 1
    return spans if np.array_equal(count, steps.column("n").to_numpy()) else []


class _Stay(NamedTuple):
    """A request in the running set: it decodes in steps [first_step, last_step)."""

    request_id: str
    first_step: int
    last_step: int
    generated_before: int


def _kv_walk(kv_events: pa.Table) -> Iterator[tuple[str, str, int]]:
    for kind, request_id, step in values_of(kv_events, "kind", "request_id", "step"):
        if kind in ("alloc", "free_request"):
            yield kind, request_id, step


def _stays(kv_events: pa.Table, num_steps: int) -> Iterator[_Stay]:
    running: dict[str, int] = {}
    generated: dict[str, int] = {}
    for kind, request_id, step in _kv_walk(kv_events):
        if kind == "alloc":
            running.setdefault(request_id, step)
        elif request_id in running:
            first_step = running.pop(request_id)
            before = generated.get(request_id, 0)
            yield _Stay(request_id, first_step, step, before)
            # After a preemption the request is prefilled again and keeps what it had generated.
            generated[request_id] = before + 1 + step - first_step
    for request_id, first_step in running.items():
        yield _Stay(request_id, first_step, num_steps, generated.get(request_id, 0))


def decode_step_ns(steps: pa.Table, contexts: IntArray, cost_model: CostModel) -> IntArray:
    """What the cost model says of each decode step, ns, shape (steps,). contexts: see ``step_contexts``."""
    distinct, back = _distinct(steps, contexts)
    return np.array([cost_model.decode_step_ns(*row) for row in distinct], dtype=np.int64)[back]


def _distinct(steps: pa.Table, contexts: IntArray) -> tuple[list[tuple[int, int, int]], IntArray]:
    """The different (b, n, context) of the steps, and which of them each step is."""
    rows = list(zip(steps.column("b").to_pylist(), steps.column("n").to_pylist(), contexts.tolist(), strict=True))
    places = {row: place for place, row in enumerate(dict.fromkeys(rows))}
    return list(places), np.fromiter((places[row] for row in rows), np.int64, len(rows))


def _decode(steps: pa.Table, contexts: IntArray, cost_model: CostModel) -> tuple[int, int]:
    """(sum of step times, steps outside the fitted contexts or in a bucket that was never measured)."""
    distinct, back = _distinct(steps, contexts)
    has_contexts = bool(np.any(contexts))
    total_ns = extrapolated = 0
    for (b, n, context), count in zip(distinct, np.bincount(back).tolist(), strict=True):
        total_ns += count * cost_model.decode_step_ns(b, n, context)
        is_outside = has_contexts and cost_model.is_context_extrapolated(n, context)
        if is_outside or b not in cost_model.f_fs:
            extrapolated += count
    return total_ns, extrapolated


def _sizes(steps: pa.Table) -> tuple[IntArray, IntArray]:
    """Sizes and requests of decode steps, each of shape (steps,)."""
    return steps.column("b").to_numpy().astype(np.int64), steps.column("n").to_numpy().astype(np.int64)


def _decode_usage(sizes: IntArray, n: IntArray, contexts: IntArray) -> dict[str, float]:
    """The ``usage`` of decode steps; all of shape (steps,)."""
    seen, counts = np.unique(sizes, return_counts=True)
    return {
        **{size_name(size): float(count) for size, count in zip(seen.tolist(), counts.tolist(), strict=True)},
        "alpha_ms": float(len(sizes)),
        "beta_ms_per_request": float(n.sum()),
        "context_us_per_token": float(contexts.sum()) / US_PER_MS,
    }


def _prefill_usage(prompts: Sequence[tuple[int, int]], chunk_tokens: int) -> dict[str, float]:
    """The ``usage`` of whole prefills, as (prompt tokens, cached tokens)."""
    prompt, cached = np.array(prompts, dtype=np.int64).reshape(-1, 2).T
    computed = prompt - cached
    calls = -(-computed // chunk_tokens)
    positions = calls * cached + chunk_tokens * (calls * (calls - 1) // 2)
    return {
        "per_call_ms": float(calls.sum()),
        "per_call_us_per_token": float((calls * computed).sum()) / US_PER_MS,
        "per_call_us_per_position": float(positions.sum()) / US_PER_MS,
    }


def _chunk_usage(steps: Sequence[Sequence[int]]) -> dict[str, float]:
    """The ``usage`` of steps with parts of prompts, and of others.

    steps: (tokens of prompts, decodes, their tokens, summed context, attended tokens of the parts) of each.
    """
    tokens, n, sizes, contexts, attended = np.array(steps, dtype=np.int64).reshape(-1, 5).T
    return {
        **_decode_usage(sizes[n > 0], n, contexts[n > 0]),
        "per_step_ms": float(np.count_nonzero(tokens)),
        "per_token_us": float(tokens.sum()) / US_PER_MS,
        "per_attended_token_ns": float(attended.sum()) / NS_PER_MS,
    }


def _summed(usage: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    return {name: usage.get(name, 0.0) + more.get(name, 0.0) for name in {**usage, **more}}


def _by_response_id(requests: pa.Table) -> dict[str, tuple[int, int]]:
    columns = values_of(requests, "response_id", "prompt_tokens", "cached_tokens")
    return {name: (prompt, cached) for name, prompt, cached in columns if name and prompt is not None}
