"""The middle form of recorded sessions: who sent how many tokens after whom, and how long each wait was.

Every reader makes it, every plan from a trace starts from it, and it is what ``harness trace import`` writes. Lengths
in tokens, times in ns since the recording's own start. No text, path or command can be held by it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.errors import PlanError
from harness.plan.model import WaitKind

MOST_TOKENS = 1 << 31  # more is a miscount: no model has such a context


class RecordedRequest(NamedTuple):
    """One request of a recording.

    base: place of the earlier request whose prompt and answer its own prompt begins with; None for a fresh context.
    after: places of earlier requests of the same recording that had to end first; () for one that came by itself.
    wait_ns: from the end of the last of ``after`` to its sending; for one without, from the recording's start.
    keep_tokens: how much of ``base``'s prompt and answer that is.
    blocks: names of the whole blocks its prompt begins with; equal names are equal tokens, in every recording.
    abort_after_ns, abort_after_tokens: when its client left, since its sending or by tokens received; 0: it stayed.
    """

    base: int | None
    after: tuple[int, ...]
    wait_ns: int
    wait_kind: WaitKind
    prompt_tokens: int
    keep_tokens: int
    generate_tokens: int
    blocks: tuple[int, ...] = ()
    abort_after_ns: int = 0
    abort_after_tokens: int = 0

    @property
    def stream_tokens(self) -> int:
        """How much of its prompt and answer a later request can begin with; see ``RequestPlan.stream_tokens``."""
        is_left = self.abort_after_ns or self.abort_after_tokens
        return self.prompt_tokens + (self.abort_after_tokens if is_left else self.generate_tokens)


@dataclass(frozen=True, slots=True)
class Recording:
    """One tree of requests that belong together. name: a hash of the recording's own id; start_ns: since the first."""

    name: str
    start_ns: int
    requests: tuple[RecordedRequest, ...]


@dataclass
class ReadNotes:
    """What a reader could not use, by reason, with the first place of each. Never a word of the recording's text."""

    num_files: int = 0
    num_lines: int = 0
    broken: Counter[str] = field(default_factory=Counter[str])
    dropped: Counter[str] = field(default_factory=Counter[str])
    first_at: dict[str, str] = field(default_factory=dict[str, str])
    labels: set[str] = field(default_factory=set[str])

    def line_broken(self, reason: str, at: str) -> None:
        self.broken[reason] += 1
        self.first_at.setdefault(reason, at)

    def drop(self, reason: str, at: str, count: int = 1) -> None:
        self.dropped[reason] += count
        self.first_at.setdefault(reason, at)


def hidden_name(identity: str) -> str:
    """What a recording's own id becomes: 12 hex digits of its SHA-256."""
    return hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:12]


def check_recording(recording: Recording) -> None:
    """Refuse a recording whose parts contradict each other; raises PlanError naming the request."""
    afters = [one.after for one in recording.requests]
    for place in range(len(afters)):
        if wrong := _what_is_wrong(recording, afters, place):
            raise PlanError(wrong, where=f"recording {recording.name}, request {place}", hint="Import the trace again")


def has_ended(afters: Sequence[tuple[int, ...]], earlier: int, place: int) -> bool:
    """Whether request ``earlier`` must have ended when request ``place`` starts. afters: ``after`` of each request."""
    open_places = list(afters[place])
    seen: set[int] = set()
    while open_places:
        one = open_places.pop()
        if one == earlier:
            return True
        if one > earlier and one not in seen:
            seen.add(one)
            open_places.extend(afters[one])
    return False


def _what_is_wrong(recording: Recording, afters: Sequence[tuple[int, ...]], place: int) -> str:  # noqa: PLR0911  # one return per problem
    one = recording.requests[place]
    if any(not 0 <= before < place for before in one.after):
        return f"it comes after {list(one.after)}, which are not all earlier requests"
    if one.base is not None and not has_ended(afters, one.base, place):
        return f"it begins with request {one.base}, which need not have ended"
    if one.wait_ns < 0:
        return f"its wait is negative ({one.wait_ns} ns)"
    if not 1 <= one.prompt_tokens <= MOST_TOKENS or not 1 <= one.generate_tokens <= MOST_TOKENS:
        return f"{one.prompt_tokens} prompt and {one.generate_tokens} generated tokens make no request"
    if min(one.abort_after_ns, one.abort_after_tokens) < 0 or 0 < one.generate_tokens <= one.abort_after_tokens:
        return f"its client leaves after {one.abort_after_ns} ns or {one.abort_after_tokens} tokens"
    if one.abort_after_ns and one.abort_after_tokens:
        return "its client leaves after a time and after a number of tokens"
    streamed = 0 if one.base is None else recording.requests[one.base].stream_tokens
    if not 0 <= one.keep_tokens <= min(streamed, one.prompt_tokens):
        return f"it keeps {one.keep_tokens} of {streamed} tokens"
    return ""
