"""What the scripted server saw as a table of requests, and how it differs from what ``harness trace import`` reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.model.traces.importing import read_recordings
from harness.model.traces.recording import RecordedRequest
from tests.support.agents.scripted_server import Attempt, Script

# A request is stamped before it leaves, and an answer when the agent has read it: both make a wait shorter.
WITHIN_S, WAIT = 0.2, "wait, s"
MOST_LATE_S = 3.0


@dataclass(frozen=True)
class SeenRequest:
    """One answered request. wait_s: from the end of all that it waited for to its first attempt; None: for nothing.

    after: what it waited for. requests_before: of its script and, for a fork or a sub-agent, of the one above it.
    """

    script: str
    after: str
    wait_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    failed_attempts: int = 0
    is_late: bool = False


def requests_seen(attempts: Sequence[Attempt], scripts: dict[str, Script]) -> list[SeenRequest]:
    """The answered requests in the order of their arrival."""
    return [_seen(attempt, attempts, scripts) for attempt in sorted(attempts, key=_received) if not attempt.failed]


def _received(attempt: Attempt) -> int:
    return attempt.received_ns


def _seen(answered: Attempt, attempts: Sequence[Attempt], scripts: dict[str, Script]) -> SeenRequest:
    script = scripts[answered.script]
    answer = script.answers[answered.place]
    same = [attempt for attempt in attempts if (attempt.script, attempt.place) == (answered.script, answered.place)]
    asked_ns = min(map(_received, same))
    above = {answered.script, *answer.joins.split()}
    if not answered.place:
        above = {script.continues, script.started_by}
    ends = [one.ended_ns for one in attempts if one.script in above and not one.failed and one.ended_ns <= asked_ns]
    wait_s = round((asked_ns - max(ends)) / 1e9, 3) if ends else None
    counts = (answered.prompt_tokens, answered.cached_tokens, answered.output_tokens)
    return SeenRequest(answered.script, answered.after, wait_s, *counts, len(same) - 1, answer.is_late)


@dataclass(frozen=True)
class Difference:
    """One difference between a log and the truth."""

    request: str
    what: str
    seen: object
    read: object

    def __str__(self) -> str:
        return f"{self.request}: {self.what}: the server saw {self.seen}, the import reads {self.read}"


def differences(seen: Sequence[SeenRequest], logs: Sequence[Path], kind: str) -> tuple[list[Difference], list[float]]:
    """Every difference, and by how many seconds each wait differs. Requests are paired by their numbers of tokens."""
    _, recordings, _ = read_recordings(logs, kind=kind)
    read = [request for recording in recordings for request in recording.requests]
    found: list[Difference] = []
    off_s: list[float] = []
    for one in seen:
        name = f"{one.script}, {one.prompt_tokens} prompt tokens"
        pair = next((it for it in read if _sizes(it) == (one.prompt_tokens, one.output_tokens)), None)
        if pair is None:
            found.append(Difference(name, "request", f"{one.output_tokens} tokens of answer", "no such request"))
            continue
        read.remove(pair)
        found += [Difference(name, what, *values) for what, *values in _compared(one, pair)]
        if one.wait_s is not None:
            off_s.append(pair.wait_ns / 1e9 - one.wait_s)
    found += [Difference(f"{it.prompt_tokens} prompt tokens", "request", "nothing", _sizes(it)) for it in read]
    return found, off_s


def _sizes(request: RecordedRequest) -> tuple[int, int]:
    return request.prompt_tokens, request.generate_tokens


def _compared(seen: SeenRequest, read: RecordedRequest) -> Iterator[tuple[str, Any, Any]]:
    late_s = MOST_LATE_S if seen.is_late else WITHIN_S
    if seen.cached_tokens != read.keep_tokens:
        yield "cached tokens", seen.cached_tokens, read.keep_tokens
    if seen.after != read.wait_kind:
        yield "what it waited for", seen.after, read.wait_kind
    if bool(read.after) != (seen.wait_s is not None):
        yield "whether it waited", seen.wait_s, read.after
    elif seen.wait_s is not None and not -late_s <= read.wait_ns / 1e9 - seen.wait_s <= WITHIN_S:
        yield WAIT, seen.wait_s, round(read.wait_ns / 1e9, 3)


def truth_of(tool: str, release: str, kind: str, seen: Sequence[SeenRequest]) -> dict[str, Any]:
    """The truth as a document."""
    return {"tool": tool, "release": release, "format": kind, "requests": [asdict(one) for one in seen]}


def seen_in(truth: dict[str, Any]) -> list[SeenRequest]:
    """The requests of such a document."""
    return [SeenRequest(**one) for one in truth["requests"]]
