"""A trace in numbers: sizes, waits by kind, forks and joins, sharing, and ceilings of reuse. Nothing here is measured.

A trace of any length is read once: lengths, waits and block names stay in memory, recordings do not.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from harness.clock import NS_PER_S
from harness.plan.model import WAIT_KINDS
from harness.traces.recording import RecordedRequest, Recording, TraceHead, TraceReader


class _Counts:
    """Everything that is counted of a trace, recording by recording.

    endless_tokens, kept_tokens: prompt tokens that an endless cache would hit, and that the turn before left.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._in_cache: set[int] = set()
        self.blocks: set[int] = set()
        self.prompts, self.answers = array("q"), array("q")
        self.waits_ns = {kind: array("q") for kind in WAIT_KINDS}
        self.num_recordings = self.num_joins = self.num_forks = self.num_left = 0
        self.endless_tokens = self.kept_tokens = 0

    def add(self, recording: Recording) -> None:
        self.num_recordings += 1
        for request in recording.requests:
            self._add_request(request)
        followers = Counter(before for request in recording.requests for before in request.after)
        self.num_forks += sum(count > 1 for count in followers.values())

    def _add_request(self, request: RecordedRequest) -> None:
        self.prompts.append(request.prompt_tokens)
        self.answers.append(request.generate_tokens)
        self.waits_ns[request.wait_kind].append(request.wait_ns)
        self.num_joins += len(request.after) > 1
        self.num_left += bool(request.abort_after_ns or request.abort_after_tokens)
        self.blocks.update(request.blocks)
        self.kept_tokens += request.keep_tokens
        named_tokens = 0 if request.keep_tokens else self._hits(request.blocks) * self._block_tokens
        self.endless_tokens += max(request.keep_tokens, named_tokens)

    def _hits(self, blocks: Sequence[int]) -> int:
        """How many leading blocks an endless cache already holds; afterwards it holds all of them."""
        num_hits = next((place for place, name in enumerate(blocks) if name not in self._in_cache), len(blocks))
        self._in_cache.update(blocks[num_hits:])
        return num_hits


def describe_trace(reader: TraceReader) -> dict[str, str]:
    """Facts in reading order; errors as ``TraceReader``."""
    counts = _counted(reader.head, reader)
    prompt_tokens = sum(counts.prompts)
    facts = {
        "trace": reader.head.name,
        "format": reader.head.source_format,
        "sha256": reader.sha256,
        "recordings": str(counts.num_recordings),
        "requests": str(len(counts.prompts)),
        "arrivals": reader.head.arrivals,
        "prompt tokens": _spread(np.array(counts.prompts)),
        "generated tokens": _spread(np.array(counts.answers)),
        "requests that wait for several": str(counts.num_joins),
        "requests that several wait for": str(counts.num_forks),
        "answers that the client leaves": str(counts.num_left),
        "named blocks": f"{len(counts.blocks)} of {reader.head.block_tokens} tokens",
        "ceiling, endless cache": f"{counts.endless_tokens / prompt_tokens:.1%} of prompt tokens",
        "ceiling, turn before": f"{counts.kept_tokens / prompt_tokens:.1%} of prompt tokens",
    }
    for kind in WAIT_KINDS[1:]:
        if waits_ns := counts.waits_ns[kind]:
            facts[f"waits for a {kind}, s"] = f"{len(waits_ns)}: {_spread(np.array(waits_ns) / NS_PER_S)}"
    for what, reasons in (("dropped at import", reader.head.dropped), ("broken at import", reader.head.broken)):
        if reasons:
            facts[what] = "; ".join(f"{count} {reason}" for reason, count in reasons.items())
    return facts | ({"assumed at import": "; ".join(reader.head.labels)} if reader.head.labels else {})


def _counted(head: TraceHead, recordings: Iterable[Recording]) -> _Counts:
    counts = _Counts(head.block_tokens)
    for recording in recordings:
        counts.add(recording)
    return counts


def _spread(values: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> str:
    values.sort()
    low, middle, high = values[0], values[(len(values) - 1) // 2], values[-1]
    return f"min {low:g}, median {middle:g}, max {high:g}, sum {values.sum():g}"
