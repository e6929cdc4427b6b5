"""What a trace holds, in numbers for people: sizes, waits by kind, forks and joins, sharing, and ceilings of reuse.

Two ceilings: what an endless cache would hit, and what the turn before made eligible. Nothing here is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from harness.clock import NS_PER_S
from harness.plan.model import WAIT_KINDS
from harness.traces.file import TraceFile
from harness.traces.form import Recording


class Ceilings(NamedTuple):
    """Shares of all prompt tokens, in [0, 1]. endless: an endless cache's hits; by_turn: what the turn before left."""

    endless: float
    by_turn: float


def ceilings(trace: TraceFile) -> Ceilings:
    """The most that any cache could reuse of a trace's prompts, without a cache's own block size."""
    prompt = endless = by_turn = 0
    seen: set[tuple[int, ...] | int] = set()
    for recording in trace.recordings:
        for one in recording.requests:
            prompt += one.prompt_tokens
            by_turn += one.keep_tokens
            named = 0 if one.keep_tokens else _known(one.blocks, seen) * trace.head.block_tokens
            endless += max(one.keep_tokens, named)
    return Ceilings(endless / prompt, by_turn / prompt)


def _known(blocks: Sequence[int], seen: set[tuple[int, ...] | int]) -> int:
    """How many of these blocks an endless cache holds already; afterwards it holds all. Names are chained."""
    known = 0
    for name in blocks:
        if name not in seen:
            break
        known += 1
    seen.update(blocks[known:])
    return known


def describe_trace(trace: TraceFile) -> dict[str, str]:
    """Facts in reading order."""
    requests = [one for recording in trace.recordings for one in recording.requests]
    prompts = [one.prompt_tokens for one in requests]
    answers = [one.generate_tokens for one in requests]
    ceiling = ceilings(trace)
    facts = {
        "trace": trace.head.name,
        "format": trace.head.source_format,
        "sha256": trace.sha256,
        "recordings": str(len(trace.recordings)),
        "requests": str(len(requests)),
        "arrivals": trace.head.arrivals,
        "prompt tokens": _spread(prompts),
        "generated tokens": _spread(answers),
        "requests that wait for several": str(sum(len(one.after) > 1 for one in requests)),
        "requests that several wait for": str(sum(_forks(recording) for recording in trace.recordings)),
        "answers that the client leaves": str(
            sum(bool(one.abort_after_ns or one.abort_after_tokens) for one in requests)
        ),
        "named blocks": f"{len({name for one in requests for name in one.blocks})} of {trace.head.block_tokens} tokens",
        "ceiling, endless cache": f"{ceiling.endless:.1%} of prompt tokens",
        "ceiling, turn before": f"{ceiling.by_turn:.1%} of prompt tokens",
    }
    for kind in WAIT_KINDS[1:]:
        waits_s = [one.wait_ns / NS_PER_S for one in requests if one.wait_kind == kind]
        if waits_s:
            facts[f"waits for a {kind}, s"] = f"{len(waits_s)}: {_spread(waits_s)}"
    for what, counts in (("dropped at import", trace.head.dropped), ("broken at import", trace.head.broken)):
        facts |= {f"{what}": "; ".join(f"{count} {reason}" for reason, count in counts.items())} if counts else {}
    return facts | ({"assumed at import": "; ".join(trace.head.labels)} if trace.head.labels else {})


def _forks(recording: Recording) -> int:
    followers = Counter(before for one in recording.requests for before in one.after)
    return sum(count > 1 for count in followers.values())


def _spread(values: Sequence[float]) -> str:
    ordered = sorted(values)
    low, middle, high = ordered[0], ordered[(len(ordered) - 1) // 2], ordered[-1]
    return f"min {low:g}, median {middle:g}, max {high:g}, sum {sum(ordered):g}"
