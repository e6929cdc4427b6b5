"""Sweeps of constant batches and prompt lengths as an experiment, whose runs ``harness.analysis.calibration`` fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np

from harness.analysis.calibration.fit import check_points
from harness.analysis.calibration.fit_points import StepPoint
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import SpecError
from harness.model.engine import CostModel, load_cost_model
from harness.model.engine.config import PAGED_STEP_TOKENS, Drafts
from harness.model.engine.cost import attended_tokens
from harness.model.spec import ExperimentSpec, ServerSpec, parse_experiment

Layout = Literal["separate", "joined"]
CONTEXT_TOKENS = (512, 1500, 3000)
PREFILL_TOKENS = (128, 256, 384, 500, 512, 1000, 2000, 3000, 4000, 6000)
# Beside them on a vLLM, where a return computes the end of its last block only.
SHORT_PREFILL_TOKENS = (8, 16, 32, 64)
QUICK_SWEEPS: dict[str, Any] = {
    "layout": "joined",
    "context_tokens": (512, 1500),
    "generate_tokens": 70,
    "prefill_tokens": (128, 500, 2000, 4000),
    "prefill_repeats": 3,
}
"""Fields of a CalibrationSpec for fewer lengths and one server start: rough and soon done."""
# A group must end before the next begins: predicted duration times this, and a pause.
MARGIN, PAUSE_S = 1.6, 0.3
# On a vLLM prompts arrive while another request decodes. It begins so much earlier, and lasts so much longer than
# predicted.
LEAD_S, RESERVE = 0.05, 2
# Up to this limit every n is measured; above it each bucket, the n that first needs it, and one between.
EVERY_N_UP_TO = 8
SECTIONS = ("workload.", "limits.", "client.")
"""How keys of the experiment begin that a calibration may set beside those of the server."""
# There are no re-arrivals, and late sends do not change the stamps of steps. The cost model here is a guess that paces
# the sweeps, so it does not say how long a step may take.
LOOSE_LIMITS = {"rearrival_lag_p99_ms": 2000.0, "start_spread_ms": 2000.0, "server_stall_ms": 60_000.0}
READ_LATE = dict.fromkeys(("read_together_ms", "first_token_held_ms", "stall_ms", "stamp_lag_ms"), 60_000.0)
"""More of them for a vLLM, whose engine stamps its steps: when the client read its tokens plays no part."""


@dataclass(frozen=True, slots=True)
class CalibrationSpec:
    """The sweeps. num_seqs: constant numbers of decoding requests; default: every bucket and values between.

    context_tokens: prompt lengths of the constant-n runs; prefill_tokens: of the sweep. layout "separate": a server
    start for each n and context, which the server's own report needs; "joined": all in one run, one after another, as
    on every vLLM, whose step log tells them apart. With acceptance rates each number of drafts is a start of its own,
    from none to as many as there are rates. sections: keys of the experiment's other tables, by table.
    """

    name: str
    backend: str
    server: ServerSpec
    base_seed: int
    time_scale: float = 1.0
    layout: Layout = "separate"
    replicates: int = 1
    num_seqs: tuple[int, ...] = ()
    context_tokens: tuple[int, ...] = CONTEXT_TOKENS
    generate_tokens: int = 160
    prefill_tokens: tuple[int, ...] = PREFILL_TOKENS
    prefill_repeats: int = 5
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    @property
    def swept_drafts(self) -> range:
        return range(1 + len(self.server.synthetic_acceptance_rates or ()))

    def swept_num_seqs(self, drafts: int = 0) -> tuple[int, ...]:
        """Numbers of requests that run at once with so many drafts each."""
        held = [max(1, size // (1 + drafts)) for size in self.server.decode_buckets]
        return self.num_seqs or default_num_seqs(held, self.server.max_num_seqs)

    @property
    def swept_prefill_tokens(self) -> tuple[int, ...]:
        return (*SHORT_PREFILL_TOKENS, *self.prefill_tokens) if self.server.is_paged else self.prefill_tokens

    def point(self, num_seqs: int, context_tokens: int = 0, drafts: int = 0) -> StepPoint:
        """Decode steps of its compiled size, or of its tokens above the largest captured size; nothing measured."""
        tokens, sizes = num_seqs * (1 + drafts), self.server.decode_buckets
        size = next((size for size in sizes if size >= tokens), tokens)
        passes = Drafts(drafts, self.server.speculative_method or "").num_passes
        is_eager = tokens > max(sizes, default=tokens)
        return StepPoint(num_seqs, size, context_tokens, np.empty(0), is_eager=is_eager, passes=passes)

    def step_ns(self, model: CostModel, num_seqs: int, context_tokens: int = 0, drafts: int = 0) -> int:
        """Duration of a decode step."""
        point = self.point(num_seqs, context_tokens, drafts)
        extra_ns = point.passes * (model.draft_pass_ns or 0) + model.eager_ns * point.is_eager
        return model.decode_step_ns(point.bucket, num_seqs, context_tokens) + extra_ns

    def check_drafts(self) -> None:
        """Raise SpecError where no run of these sweeps could tell what a pass of the drafter costs."""
        if len(self.swept_drafts) > 1:
            points = [self.point(n, 0, drafts) for drafts in self.swept_drafts for n in self.swept_num_seqs(drafts)]
            check_points(points, with_context=False)


def default_num_seqs(buckets: Sequence[int], limit: int) -> tuple[int, ...]:
    """Every n up to 8; above, for each bucket: the n that first needs it, one in the middle, and itself full.

    Captured sizes may end below the limit, or above it.
    """
    wanted = set(range(1, min(limit, EVERY_N_UP_TO) + 1))
    ends = sorted({limit, *(min(bucket, limit) for bucket in buckets)})
    for below, end in zip((0, *ends[:-1]), ends, strict=True):
        wanted |= {below + 1, (below + 1 + end) // 2, end}
    return tuple(sorted(wanted))


def calibration_experiment(spec: CalibrationSpec) -> ExperimentSpec:
    """The sweeps as an experiment, which is planned, run, resumed and sealed like any other.

    Raises SpecError when a length does not fit a slot or an n lies above the limit.
    """
    limit = spec.server.max_num_seqs
    if wrong := [n for n in spec.num_seqs if not 1 <= n <= limit]:
        raise SpecError(f"n = {wrong} cannot run at once", where="num_seqs", hint=f"The limit is {limit}")
    spec.check_drafts()
    points = {f"n{n}-c{context}": (n, context) for context in spec.context_tokens for n in spec.swept_num_seqs()}
    server = spec.server.model_dump(mode="json", exclude_unset=True)
    if spec.layout == "joined" or spec.server.is_paged:
        decode, end_s = _decode_groups(spec)
        prefill = _beside_decodes(spec, end_s) if spec.server.is_paged else _prefill_groups(spec, end_s)
        conditions = [{"name": "all", "workload": {"group": [*decode, *prefill]}}]
        for drafts in spec.swept_drafts[1:]:
            # No draft is accepted: then all requests of a batch go on alike, and end together.
            server |= {"num_speculative_tokens": 0, "synthetic_acceptance_rates": [0.0] * drafts}
            only, groups = {"num_speculative_tokens": drafts}, _decode_groups(spec, drafts)[0]
            conditions.append({"name": f"drafts-{drafts}", "server": only, "workload": {"group": groups}})
    else:
        conditions: list[dict[str, Any]] = [
            {"name": name, "workload": {"num_sessions": n, "prompt_tokens": _fixed(context)}}
            for name, (n, context) in points.items()
        ]
        conditions.append({"name": "prefill", "workload": {"group": _prefill_groups(spec, 0.0)}})
    sweeps: dict[str, Any] = {
        "num_sessions": 1,
        "requests_per_session": 1,
        "waits": "none",
        "generate_tokens": _fixed(spec.generate_tokens),
    }
    given = {name: dict(table) for name, table in spec.sections.items()}
    if taken := sorted(given.get("workload", {}).keys() & {*sweeps, "prompt_tokens", "group", "source"}):
        raise SpecError(
            "is set by the sweeps", where=", ".join(f"workload.{key}" for key in taken), hint="Leave the key out"
        )
    return parse_experiment(
        {
            "name": spec.name,
            "title": f"Calibration of {{{','.join(map(str, spec.server.decode_buckets)) or 'its own sizes'}}}/{limit}",
            "question": "What does a decode step cost by bucket, requests and context, and a prefill by its tokens?",
            "backend": spec.backend,
            "time_scale": spec.time_scale,
            "replicates": spec.replicates,
            "base_seed": spec.base_seed,
            "workload": {**given.get("workload", {}), **sweeps},
            "client": given.get("client", {}),
            "server": server,
            "limits": {**LOOSE_LIMITS, **(READ_LATE if spec.server.is_vllm else {}), **given.get("limits", {})},
            "condition": conditions,
        },
        where="calibration",
    )


def _decode_groups(spec: CalibrationSpec, drafts: int = 0) -> tuple[list[dict[str, Any]], float]:
    """Groups one after another, each after the predicted end of the one before and a margin; the last one's end, s."""
    model = load_cost_model(spec.server.cost_model)
    groups: list[dict[str, Any]] = []
    start_s = 0.0
    for context, n in product(spec.context_tokens, spec.swept_num_seqs(drafts)):
        generate = spec.generate_tokens
        if spec.server.is_paged:
            # The first request decodes while parts of the last prompt are computed.
            generate += n * context // (spec.server.max_num_batched_tokens or PAGED_STEP_TOKENS)
        groups.append(_group(f"n{n}-c{context}", n, context, generate, start_s=start_s))
        step_ns = spec.step_ns(model, n, n * (context + generate), drafts)
        start_s += _paused_s(n * model.prefill_ns(context) + generate * step_ns)
    return groups, start_s


def _beside_decodes(spec: CalibrationSpec, start_s: float) -> list[dict[str, Any]]:
    """For each length its prompts one after another, while another request decodes: the engine is never idle."""
    model = load_cost_model(spec.server.cost_model)
    step_ns = spec.step_ns(model, 1)
    groups: list[dict[str, Any]] = []
    # Prompts that arrive in the same step count for another length.
    repeats = 2 * spec.prefill_repeats
    for length in spec.swept_prefill_tokens:
        apart_s = round(MARGIN * (model.prefill_ns(length) + 2 * step_ns) / NS_PER_S, 3)
        sweep_s = LEAD_S + repeats * apart_s
        num_steps = round(RESERVE * sweep_s * NS_PER_S / step_ns)
        groups += [
            _group(f"d{length}", 1, PREFILL_TOKENS[0], num_steps, start_s=start_s),
            _group(f"q{length}", repeats, length, 2, start_s=start_s + LEAD_S, start_offset_s=apart_s),
        ]
        start_s += _paused_s(round(RESERVE * sweep_s * NS_PER_S))
    return groups


def _prefill_groups(spec: CalibrationSpec, start_s: float) -> list[dict[str, Any]]:
    """A group for each length, one prompt at a time; of two tokens, so that a decode step marks the prefill end."""
    model = load_cost_model(spec.server.cost_model)
    groups: list[dict[str, Any]] = []
    for length in spec.prefill_tokens:
        apart_s = _paused_s(model.prefill_ns(length) + model.decode_step_ns(1, 1, length))
        groups.append(_group(f"q{length}", spec.prefill_repeats, length, 2, start_s=start_s, start_offset_s=apart_s))
        start_s += spec.prefill_repeats * apart_s
    return groups


def _group(name: str, num_sessions: int, prompt_tokens: int, generate_tokens: int, **starts_s: float) -> dict[str, Any]:
    lengths = {"prompt_tokens": _fixed(prompt_tokens), "generate_tokens": _fixed(generate_tokens)}
    return {"name": name, "num_sessions": num_sessions, **lengths, **starts_s}


def _paused_s(predicted_ns: int) -> float:
    return round(MARGIN * predicted_ns / NS_PER_S + PAUSE_S, 3)


def _fixed(value: int) -> dict[str, Any]:
    return {"distribution": "fixed", "value": value}


class Recovery(NamedTuple):
    """Largest differences between two cost models over a grid, as shares of the second one's times."""

    step_share: float
    prefill_share: float
    step_ms: float
    prefill_ms: float


def compare_models(model: CostModel, known: CostModel, spec: CalibrationSpec) -> Recovery:
    """Differences of a model from a known one, over every n, drafts, context and prefill length of the sweeps."""
    numbers, is_paged = range(1, spec.server.max_num_seqs + 1), spec.server.is_paged
    steps = [
        [spec.step_ns(each, n, n * context, drafts) for each in (model, known)]
        for n, context, drafts in product(numbers, spec.context_tokens, spec.swept_drafts)
    ]
    prefills = [
        [
            each.chunked_step_ns(0, 0, 0, q, attended_tokens(0, q)) if is_paged else each.prefill_ns(q)
            for each in (model, known)
        ]
        for q in spec.swept_prefill_tokens
    ]
    return Recovery(
        *(max(abs(fitted / true - 1) for fitted, true in times) for times in (steps, prefills)),
        *(max(abs(fitted - true) for fitted, true in times) / NS_PER_MS for times in (steps, prefills)),
    )
