"""Step periods and prefill times that sealed runs show: the observations that cost models are fitted to.

A step counts only in the middle of a stretch in which the same n requests decode and nobody is prefilled or finishes;
what is left out is left out by rule, never by value. Nothing is fitted here.
Times are stamps of the server's own lines, or of a vLLM's step log.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

import numpy as np

from harness.analysis.cost.reconstruct import drafter_passes, step_contexts, step_works
from harness.analysis.logs.engine_steps import decode_contexts, step_log_of, step_spans
from harness.analysis.run_tables import join_request_id
from harness.analysis.stats import FloatArray, IntArray
from harness.clock import NS_PER_MS, ScaledClock
from harness.errors import SpecError
from harness.measure.records.run import SealedRun
from harness.measure.records.schema import values_of
from harness.model.engine import CostModel
from harness.stacks.vllm.step_log import StepLog

# Median over blocks of 4 steps: lateness of a stamp cancels inside a block, and a stall of the host spoils few blocks.
BLOCK_STEPS = 4
# Steps left out at each end of a stretch: after a prefill the engine rebuilds its batch, and a stamp beside a prefill
# or a finish may belong to it.
EDGE_STEPS = 2
MIN_STEPS_OF_A_LENGTH = 3
# Of a vLLM's stretch: with fewer blocks a stall of the host would be in its median.
MIN_BLOCKS = 5


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive decode steps of the same ``num_seqs`` requests.

    instants_ns, steps: shape (k,): when something was seen, and how many steps had passed since the first instant.
    first_context_tokens: summed sequence lengths of the step that begins at the first instant; each step adds
    num_seqs. None: unknown. passes: of the drafter, after each step.
    """

    num_seqs: int
    bucket: int
    instants_ns: IntArray
    steps: IntArray
    first_context_tokens: float | None
    is_eager: bool = False
    passes: int = 0


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One stretch as a point to fit: the median of its block periods, at the median of its blocks' contexts.

    block_periods_ms: shape (blocks,), ms a step. context_tokens: summed over the batch; None: unknown.
    block_context_offsets: shape (blocks,), each block's own context less that, tokens; None: unknown.
    is_eager: the steps ran without a graph although graphs are on. passes: of the drafter, after each step.
    """

    num_seqs: int
    bucket: int
    context_tokens: float | None
    block_periods_ms: FloatArray = field(repr=False)
    block_context_offsets: FloatArray | None = field(default=None, repr=False)
    is_eager: bool = False
    passes: int = 0

    def periods_at_one_context_ms(self, context_us_per_token: float) -> FloatArray:
        """The block periods without what the growth of context inside the stretch adds to them."""
        if self.block_context_offsets is None:
            return self.block_periods_ms
        return self.block_periods_ms - context_us_per_token / 1000 * self.block_context_offsets

    @property
    def period_ms(self) -> float:
        return float(np.median(self.block_periods_ms))

    @property
    def group(self) -> str:
        """What is left out together when an error is held out, in words; lengths to the nearest 128 tokens."""
        blocks = None if self.context_tokens is None else round(self.context_tokens / self.num_seqs / 128)
        of_length = "" if blocks is None else f" of about {128 * blocks} tokens"
        return f"{self.num_seqs} request{'' if self.num_seqs == 1 else 's'}{of_length}, size {self.bucket}"


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """One prefill: tokens computed, tokens reused before them, and how long it kept the engine.

    attended_tokens: of the parts of prompts in a step (``harness.model.engine.cost``); 0 for whole prefills.
    decodes_ms: what the decodes of the same step cost, which is not in elapsed_ms. is_eager: the step ran without a
    graph although graphs are on.
    """

    computed_tokens: int
    cached_tokens: int
    elapsed_ms: float
    attended_tokens: int = 0
    decodes_ms: float = 0.0
    is_eager: bool = False

    @property
    def work(self) -> tuple[int, int, bool]:
        """What points have in common that are measurements of the same."""
        return self.computed_tokens, self.attended_tokens, self.is_eager


def step_points(runs: Iterable[SealedRun]) -> tuple[StepPoint, ...]:
    """Every stretch of at least BLOCK_STEPS steps in valid runs. Times in model ms.

    Raises SpecError when there is none.
    """
    valid = [run for run in runs if run.is_valid]
    stretches = (stretch for run in valid for stretch in log_stretches(run))
    points = tuple(point for stretch in stretches if (point := _point(stretch)) is not None)
    if not points:
        unseen = {note for run in valid if (log := step_log_of(run)) is not None for note in log.unseen}
        raise SpecError(
            f"no {BLOCK_STEPS} decode steps in a row with the same requests",
            where="calibration",
            hint="; ".join(sorted(unseen)) or "Run constant-n workloads: `harness server calibrate`",
        )
    return points


def _point(stretch: Stretch) -> StepPoint | None:
    """Blocks of BLOCK_STEPS steps from the first instant on; the rest at the end is not used."""
    num_blocks = int(stretch.steps[-1] // BLOCK_STEPS)
    # A block ends where a stamp marks a step exactly; a missing or merged stamp makes one block longer.
    ends = np.unique(np.searchsorted(stretch.steps, np.arange(num_blocks + 1) * BLOCK_STEPS))
    if len(ends) < 2:
        return None
    steps, instants_ns = stretch.steps[ends], stretch.instants_ns[ends]
    middles = (steps[1:] + steps[:-1] - 1) / 2
    middle = float(np.median(middles))
    first = stretch.first_context_tokens
    return StepPoint(
        num_seqs=stretch.num_seqs,
        bucket=stretch.bucket,
        context_tokens=None if first is None else first + stretch.num_seqs * middle,
        block_periods_ms=np.diff(instants_ns) / np.diff(steps) / NS_PER_MS,
        block_context_offsets=None if first is None else stretch.num_seqs * (middles - middle),
        is_eager=stretch.is_eager,
        passes=stretch.passes,
    )


def log_stretches(run: SealedRun) -> Iterator[Stretch]:
    """Stretches between the server's own lines: a step lasts from its [BUCKET] line to that of the next step.

    Nothing comes of a log without stamps or without KV lines, which tell prefills and finishes. In a vLLM's step log a
    step lasts from the record before it to its own.
    """
    log = step_log_of(run)
    if log is not None:
        yield from _step_log_stretches(run, log)
        return
    steps, kv_events = run.table("steps"), run.table("kv_events")
    if steps.num_rows < 2 or kv_events.num_rows == 0 or steps.column("log_ns").null_count:
        return
    log_ns, n, b = (steps.column(name).to_numpy().astype(np.int64) for name in ("log_ns", "n", "b"))
    contexts = step_contexts(steps, kv_events, run.table("requests"))
    borders = np.zeros(steps.num_rows + 1, dtype=np.bool_)
    borders[[0, -1]] = True
    borders[1:-1] = n[1:] != n[:-1]
    # Somebody was admitted, or ended, before these steps.
    borders[[step for kind, step in values_of(kv_events, "kind", "step") if kind in ("alloc", "free_request")]] = True
    places = np.flatnonzero(borders)
    for first, end in pairwise(places.tolist()):
        first, last = first + EDGE_STEPS, end - EDGE_STEPS
        if last - first < 1:
            continue
        yield Stretch(
            num_seqs=int(n[first]),
            bucket=int(b[first]),
            instants_ns=log_ns[first : last + 1],
            steps=np.arange(last + 1 - first),
            first_context_tokens=float(contexts.context_tokens[first]) if contexts.is_exact else None,
        )


def _step_log_stretches(run: SealedRun, log: StepLog) -> Iterator[Stretch]:
    """Long stretches of pure decode steps. A request that comes or ends makes a mixed step or another n."""
    clock, contexts = ScaledClock(run.manifest.clock.scale), decode_contexts(log)
    # With drafts n counts tokens.
    requests = "generation_requests" if log.num_drafts else "n"
    rows = values_of(log.steps, "kind", requests, "b", "runtime_mode", "at_ns")
    # The steps of several engines lie between each other.
    alone = rows if len(log.engines) == 1 else ()
    for (kind, n, b, mode), group in groupby(enumerate(alone), key=lambda row: row[1][:-1]):
        chosen = [(place, row[-1]) for place, row in group][EDGE_STEPS : -EDGE_STEPS or None]
        if kind != "decode" or b is None or len(chosen) <= MIN_BLOCKS * BLOCK_STEPS:
            continue
        steps = np.arange(len(chosen))
        yield Stretch(
            num_seqs=n,
            bucket=b,
            instants_ns=np.array([clock.from_monotonic_ns(at_ns) for _place, at_ns in chosen], dtype=np.int64),
            steps=steps,
            # A record is the end of its step, the first instant the beginning of the next.
            first_context_tokens=None
            if contexts is None
            else float(np.median([contexts[place] for place, _ in chosen] - n * steps)) + n,
            is_eager=log.has_graphs and mode == "NONE",
            passes=drafter_passes(log),
        )


def chunk_points(runs: Iterable[SealedRun], decode: CostModel) -> tuple[PrefillPoint, ...]:
    """Every step of a vLLM that computed tokens of prompts, less the time of its decodes. Times in model ms.

    decode: the cost model of those decodes. A step after an idle engine is left out where nobody knows when it began.
    So is a work (tokens, and tokens that these attend to) that fewer than three steps had: one stall of the host would
    be its time.
    """
    logs = [(step_log_of(run), ScaledClock(run.manifest.clock.scale)) for run in runs if run.is_valid]
    points = [point for log, clock in logs if log is not None for point in _chunks(log, clock, decode)]
    num_of = Counter(point.work for point in points)
    return tuple(point for point in points if num_of[point.work] >= MIN_STEPS_OF_A_LENGTH)


def recorded_step_points(log: StepLog) -> tuple[StepPoint, ...]:
    """The decode steps of a recorded server, by n, size and mean sequence length to the nearest 128 tokens.

    Requests come and go, so that stretches are short: each step is a sample, from the end of the step before it to its
    own, as the engine core stamped them. What fewer steps had is left out: one stall of the host would be its time.
    """
    steps: dict[tuple[int, int, int, bool], list[tuple[int, float]]] = {}
    rows = values_of(log.steps, "kind", "n", "b", "runtime_mode", "decode_context")
    for span, (kind, n, b, mode, context) in zip(step_spans(log), rows, strict=True):
        if kind == "decode" and span is not None and None not in (b, context):
            stratum = n, b, round(context / n / 128), log.has_graphs and mode == "NONE"
            steps.setdefault(stratum, []).append((context, (span[1] - span[0]) / NS_PER_MS))
    points: list[StepPoint] = []
    for (n, b, _length, is_eager), samples in sorted(steps.items()):
        if len(samples) >= MIN_BLOCKS * BLOCK_STEPS:
            contexts, periods_ms = np.array(samples).T
            middle = float(np.median(contexts))
            points.append(StepPoint(n, b, middle, periods_ms, contexts - middle, is_eager, drafter_passes(log)))
    return tuple(points)


def recorded_chunk_points(log: StepLog, decode: CostModel) -> tuple[PrefillPoint, ...]:
    """The steps of a recorded server that computed tokens of prompts. Few are alike, so those of similar work count as
    measurements of the same: tokens within a quarter of an octave, attended tokens within half of one."""
    similar: dict[tuple[int, int, bool], list[PrefillPoint]] = {}
    for point in _chunks(log, ScaledClock(1.0), decode):
        work = round(2 * math.log2(point.computed_tokens)), round(math.log2(1 + point.attended_tokens))
        similar.setdefault((*work, point.is_eager), []).append(point)
    points: list[PrefillPoint] = []
    for of_work in similar.values():
        if len(of_work) >= MIN_STEPS_OF_A_LENGTH:
            tokens, attended = np.median([(p.computed_tokens, p.attended_tokens) for p in of_work], axis=0).round()
            points += [replace(p, computed_tokens=int(tokens), attended_tokens=int(attended)) for p in of_work]
    return tuple(points)


def _chunks(log: StepLog, clock: ScaledClock, decode: CostModel) -> Iterator[PrefillPoint]:
    drafter_ns = drafter_passes(log) * (decode.draft_pass_ns or 0)
    for work, span in zip(step_works(log, decode), step_spans(log), strict=True):
        if work.kind in ("prefill", "mixed") and span is not None and work.tokens and work.is_counted:
            since_ns, at_ns = map(clock.from_monotonic_ns, span)
            decodes_ns = decode.chunked_step_ns(work.size, work.n, work.context, 0) + drafter_ns
            elapsed_ms = (at_ns - since_ns - decodes_ns) / NS_PER_MS
            yield PrefillPoint(work.tokens, 0, elapsed_ms, work.attended, decodes_ns / NS_PER_MS, work.is_eager)


def prefill_points(run: SealedRun) -> Iterator[PrefillPoint]:
    """Every prefill of a run whose time is known, from the request's ALLOC line to the next line of a step, an
    admission or an end. Times in model ms.
    """
    columns = values_of(run.table("requests"), "status", "response_id", "prompt_tokens", "cached_tokens")
    known = {
        name: (prompt, cached)
        for status, name, prompt, cached in columns
        if status == "ok" and name and cached is not None
    }
    step_ns = run.table("steps").column("log_ns").to_pylist()
    events = values_of(run.table("kv_events"), "kind", "request_id", "step", "log_ns")
    lines = [line for line in events if line[0] in ("alloc", "free_request")]
    running: set[str] = set()
    for (kind, request_id, step, log_ns), after in zip(lines, [*lines[1:], None], strict=True):
        if kind == "free_request":
            running.discard(request_id)
            continue
        if request_id in running:
            continue
        running.add(request_id)
        # The line that follows in the log: the next admission or end, unless a decode step comes before it.
        if after is not None and after[2] == step:
            after_ns = after[3]
        else:
            after_ns = step_ns[step] if step < len(step_ns) else None
        response = join_request_id(request_id, known)
        if after_ns is not None and log_ns is not None and response is not None:
            prompt, cached = known[response]
            yield PrefillPoint(prompt - cached, cached, (after_ns - log_ns) / NS_PER_MS)


def reported_f_ms(runs: Iterable[SealedRun]) -> dict[int, float]:
    """f(b) where the server reported it: median model time + median sampler time of runs with bucket b exactly full.

    Of several context lengths the shortest counts; of several runs of it the median. The report (VLLM_RBLN_METRICS)
    pools all steps of a server's life, so only a run of a single n tells anything.
    """
    by_bucket: dict[int, dict[int, list[float]]] = {}
    for run in runs:
        # From vllm-rbln 0.12.1 on model and sampler are timed together.
        together = "MODEL + SAMPLE" in run.launch.device_metrics
        trackers = ("MODEL + SAMPLE",) if together else ("MODEL", "SAMPLER")
        parts_ms = [run.launch.decode_p50_ms(tracker) for tracker in trackers]
        if None in parts_ms:
            continue
        f_ms = sum(part_ms or 0.0 for part_ms in parts_ms)
        pairs = set(values_of(run.table("steps"), "n", "b"))
        prompts = set(run.table("requests").column("planned_prompt_tokens").to_pylist())
        if run.is_valid and len(prompts) == 1 and len(pairs) == 1 and len(set(*pairs)) == 1:
            [(bucket, _bucket)] = pairs
            by_bucket.setdefault(bucket, {}).setdefault(prompts.pop(), []).append(f_ms)
    return {bucket: float(np.median(by_context[min(by_context)])) for bucket, by_context in sorted(by_bucket.items())}
