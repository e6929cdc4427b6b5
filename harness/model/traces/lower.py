"""From recordings to the sessions of a plan: what is left out, how lengths shrink, which session waits for which."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from harness.model.plan.model import RequestPlan, SessionPlan
from harness.model.traces.recording import Arrivals, RecordedRequest, Recording

HumanWaits = Literal["keep", "cap", "drop"]


@dataclass(frozen=True, slots=True)
class Lowering:
    """How recordings become sessions. wait_cap_ns: longest wait; human_wait_cap_ns: of waits for a person.

    shrink: every length is divided by it, rounded up. max_context_tokens: prompt and answer after that; 0 for no limit.
    stretch_ns: take recordings that begin within so long, from a drawn instant on; 0: all of them.
    num_recordings: how many are drawn, without replacement, in random order; 0: all, in the file's order.
    agents: so many at once, each with a recording, drawn anew when all are taken; they begin at drawn instants within
    the mean wait. 0: each recording once.
    concurrency: size of a closed population of recordings; None: all at once, or at their recorded starts.
    is_steady: the first recordings begin at a random instant of their own time; recordings that follow, at their start.
    """

    shrink: int = 1
    max_context_tokens: int = 0
    stretch_ns: int = 0
    num_recordings: int = 0
    agents: int = 0
    concurrency: int | None = None
    arrivals: Arrivals = "together"
    human_waits: HumanWaits = "keep"
    wait_cap_ns: int = 1 << 62
    human_wait_cap_ns: int = 1 << 62
    is_steady: bool = False

    @property
    def of_requests(self) -> Lowering:
        """What decides on each request alone, and on no draw."""
        names = ("shrink", "max_context_tokens", "human_waits", "wait_cap_ns", "human_wait_cap_ns")
        return Lowering(**{name: getattr(self, name) for name in names})

    def wait_ns(self, request: RecordedRequest) -> int:
        """How long the plan waits before this request."""
        if request.wait_kind != "human":
            return min(request.wait_ns, self.wait_cap_ns)
        if self.human_waits == "drop":
            return 0
        return min(request.wait_ns, self.human_wait_cap_ns if self.human_waits == "cap" else self.wait_cap_ns)


@dataclass
class Left:
    """What a plan leaves out of its trace, by reason; num_warm_ups: requests that it sends only to go on from them."""

    counts: Counter[str] = field(default_factory=Counter[str])
    num_warm_ups: int = 0


def sessions_of(
    recordings: Sequence[Recording], block_tokens: int, how: Lowering, rng: random.Random
) -> tuple[tuple[SessionPlan, ...], int, Left]:
    """(sessions, tokens of a named block, 0 where shrinking would break them, what was left out)."""
    left = Left()
    named_tokens = block_tokens // how.shrink if block_tokens % how.shrink == 0 else 0
    fitting = _that_fit(tuple(recordings), how.of_requests)
    within = [fitting[place] for place in _within_a_stretch(recordings, how.stretch_ns, rng)]
    left.counts["recordings outside the stretch"] = len(recordings) - len(within)
    left.counts["requests above the context"] = sum(each.num_too_long for each in within)
    left.counts["requests after such a request"] = sum(each.num_after_such for each in within)
    # Before sampling: a sample of all recordings would be smaller than requested, and of shorter recordings.
    kept = [each.recording for each in within if each.recording.requests]
    left.counts["recordings without a request that fits"] = len(within) - len(kept)
    if 0 < how.num_recordings < len(kept):
        left.counts["recordings not drawn"] = len(kept) - how.num_recordings
    if how.num_recordings:
        kept = rng.sample(kept, min(how.num_recordings, len(kept)))
    if how.agents and kept:
        kept = _agents(kept, how.agents, rng)
    if how.is_steady:
        for place, recording in enumerate(kept[: how.concurrency]):
            kept[place], num_warm_ups = begun_at_a_drawn_instant(recording, rng)
            left.num_warm_ups += num_warm_ups
            left.counts["requests before a drawn start"] += len(recording.requests) - len(kept[place].requests)
    if block_tokens and not named_tokens:
        left.counts["named blocks"] = sum(len(request.blocks) for recording in kept for request in recording.requests)
    first_ns = min((recording.start_ns for recording in kept), default=0)
    sessions: list[SessionPlan] = []
    ends: list[tuple[int, ...]] = []  # the sessions that end each recording
    for place, recording in enumerate(kept):
        root_after: tuple[int, ...] = ()
        start_ns = recording.start_ns - first_ns if how.arrivals == "recorded" or how.agents else 0
        if how.concurrency is not None and place >= how.concurrency:
            root_after, start_ns = ends[place - how.concurrency], 0
        cut, last = _cut(recording, len(sessions), named_tokens, root_after, start_ns)
        sessions.extend(cut)
        ends.append(last)
    left.counts = +left.counts
    return tuple(sessions), named_tokens if any(session.blocks for session in sessions) else 0, left


def _within_a_stretch(recordings: Sequence[Recording], stretch_ns: int, rng: random.Random) -> Sequence[int]:
    """Places of recordings within so long of a drawn one that leaves so long; all where that is 0 or too long."""
    last_ns = max((recording.start_ns for recording in recordings), default=0)
    firsts_ns = [each.start_ns for each in recordings if each.start_ns + stretch_ns <= last_ns]
    if not stretch_ns or not firsts_ns:
        return range(len(recordings))
    first_ns = rng.choice(firsts_ns)
    return [place for place, each in enumerate(recordings) if first_ns <= each.start_ns <= first_ns + stretch_ns]


def _agents(recordings: Sequence[Recording], count: int, rng: random.Random) -> list[Recording]:
    """A recording for each of ``count`` agents, from instants within the mean wait; names that only one has are its."""
    holders = Counter(name for each in recordings for name in {n for request in each.requests for n in request.blocks})
    most_names = 1 + max(holders, default=0)
    waits_ns = [request.wait_ns for each in recordings for request in each.requests if request.after]
    mean_ns = sum(waits_ns) // len(waits_ns) if waits_ns else 0
    made: list[Recording] = []
    for number in range(-(-count // len(recordings))):

        def own(request: RecordedRequest, shift: int = number * most_names) -> RecordedRequest:
            return request._replace(blocks=tuple(name + shift * (holders[name] == 1) for name in request.blocks))

        for each in rng.sample(recordings, len(recordings))[: count - len(made)]:
            made.append(Recording(each.name, rng.randrange(mean_ns + 1), tuple(map(own, each.requests))))
    return made


class _Fitting(NamedTuple):
    """What of a recording fits, and how many of its requests are too long or come after such a request."""

    recording: Recording
    num_too_long: int
    num_after_such: int


@lru_cache(maxsize=1)
def _that_fit(recordings: tuple[Recording, ...], how: Lowering) -> tuple[_Fitting, ...]:
    """Kept for the next replicate: no draw decides on it."""
    return tuple(_that_fits(recording, how) for recording in recordings)


def _that_fits(recording: Recording, how: Lowering) -> _Fitting:
    """The recording shrunk, without what exceeds the context and all that waits for such a request."""
    num_too_long = 0
    places: dict[int, int] = {}
    kept: list[RecordedRequest] = []
    for place, request in enumerate(recording.requests):
        small = _shrunk(request, how.shrink)
        is_too_long = 0 < how.max_context_tokens < small.prompt_tokens + small.generate_tokens
        if is_too_long or any(before not in places for before in request.after):
            num_too_long += is_too_long
            continue
        base = None if request.base is None else kept[places[request.base]]
        streamed = 0 if base is None else base.stream_tokens
        keep = min(small.keep_tokens, streamed, small.prompt_tokens)
        places[place] = len(kept)
        kept.append(
            small._replace(
                after=tuple(places[before] for before in request.after),
                base=places[request.base] if request.base is not None and keep else None,
                keep_tokens=keep,
                wait_ns=how.wait_ns(small),
            )
        )
    num_after_such = len(recording.requests) - len(kept) - num_too_long
    return _Fitting(Recording(recording.name, recording.start_ns, tuple(kept)), num_too_long, num_after_such)


def begun_at_a_drawn_instant(recording: Recording, rng: random.Random) -> tuple[Recording, int]:
    """(what is still to come with its warm-up requests, number of warm-up requests).

    Its time is the sum of its waits; one that had begun keeps its rest. Earlier requests are left out unless later ones
    continue their text; those are sent first, whole. A recording without waits begins at a random request.
    """
    starts_ns: list[int] = []  # of requests, if every one had taken no time
    for request in recording.requests:
        starts_ns.append(max((starts_ns[before] for before in request.after), default=0) + request.wait_ns)
    last_ns = max(starts_ns)
    instant_ns = rng.randrange(last_ns) if last_ns else 0
    first = 0 if last_ns else rng.randrange(len(starts_ns))
    is_to_come = [start > instant_ns if last_ns else place >= first for place, start in enumerate(starts_ns)]
    is_warm_up = [False] * len(starts_ns)
    for place, request in enumerate(recording.requests):
        if is_to_come[place]:
            for before in (*request.after, *(() if request.base is None else (request.base,))):
                is_warm_up[before] = not is_to_come[before]
    places: dict[int, int] = {}
    kept: list[RecordedRequest] = []
    for place, request in enumerate(recording.requests):
        if not is_to_come[place] and not is_warm_up[place]:
            continue
        places[place] = len(kept)
        if is_warm_up[place]:
            kept.append(request._replace(base=None, after=(), wait_ns=0, wait_kind="none", keep_tokens=0))
            continue
        waited_ns = 0
        if last_ns and not any(is_to_come[before] for before in request.after):
            waited_ns = instant_ns - (starts_ns[place] - request.wait_ns)
        # A warm-up request waits for nothing, so a request that continues its text must wait for it by name.
        after = {*request.after, *(base for base in [request.base] if base is not None and is_warm_up[base])}
        kept.append(
            request._replace(
                base=None if request.base is None else places[request.base],
                after=tuple(places[before] for before in sorted(after)),
                wait_ns=request.wait_ns - waited_ns,
            )
        )
    return Recording(recording.name, 0, tuple(kept)), sum(is_warm_up)


def _shrunk(request: RecordedRequest, shrink: int) -> RecordedRequest:
    if shrink == 1:
        return request
    names = ("prompt_tokens", "keep_tokens", "generate_tokens")
    lengths = {name: -(-getattr(request, name) // shrink) for name in names}
    # A client that leaves must leave before the last token, also after shrinking.
    left = min(-(-request.abort_after_tokens // shrink), lengths["generate_tokens"] - 1)
    if request.abort_after_tokens and not left:
        lengths["generate_tokens"], left = 2, 1
    return request._replace(**lengths, abort_after_tokens=left)


def _cut(
    recording: Recording, first_index: int, named_tokens: int, root_after: tuple[int, ...], start_ns: int
) -> tuple[list[SessionPlan], tuple[int, ...]]:
    """(sessions of a recording, numbered from ``first_index``; indices of those that nothing waits for).

    A session begins at every request that waits for several, or for a request that several wait for. root_after,
    start_ns: what the requests that wait for nothing wait for, and when they start.
    """
    requests = recording.requests
    followers: list[set[int]] = [set() for _ in requests]
    for place, request in enumerate(requests):
        for before in {*request.after, *(() if request.base is None else (request.base,))}:
            followers[before].add(place)
    segments: list[list[int]] = []
    index_of: list[int] = []  # of each request's session
    for place, request in enumerate(requests):
        begins_with_names = request.blocks and not request.keep_tokens
        is_only = len(request.after) == 1 and followers[request.after[0]] == {place}
        is_next = is_only and request.base in (None, request.after[0])
        if is_next and not begins_with_names:
            index_of.append(index_of[request.after[0]])
            segments[index_of[place] - first_index].append(place)
        else:
            index_of.append(first_index + len(segments))
            segments.append([place])
    sessions: list[SessionPlan] = []
    for index, places in enumerate(segments, first_index):
        first = requests[places[0]]
        before = sorted({index_of[place] for place in first.after}) or root_after
        has_names = first.keep_tokens == 0 and named_tokens
        following = [*(requests[place] for place in places[1:]), None]
        sessions.append(
            SessionPlan(
                index=index,
                start_offset_ns=first.wait_ns + (0 if first.after else start_ns),
                after=before[0] if before else None,
                continues=None if first.base is None else index_of[first.base],
                requests=tuple(map(_planned, (requests[place] for place in places), following)),
                also_after=tuple(before[1:]),
                start_kind=first.wait_kind if first.after else "none",
                blocks=first.blocks[: first.prompt_tokens // named_tokens] if has_names else (),
            )
        )
    ends = (index for index, places in enumerate(segments, first_index) if not followers[places[-1]])
    return sessions, tuple(ends)


def _planned(request: RecordedRequest, following: RecordedRequest | None) -> RequestPlan:
    return RequestPlan(
        keep_tokens=request.keep_tokens,
        new_tokens=request.prompt_tokens - request.keep_tokens,
        generate_tokens=request.generate_tokens,
        wait_after_ns=0 if following is None else following.wait_ns,
        wait_kind="none" if following is None else following.wait_kind,
        abort_after_ns=request.abort_after_ns,
        abort_after_tokens=request.abort_after_tokens,
    )
