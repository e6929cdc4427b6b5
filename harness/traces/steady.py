"""Recordings that begin in the middle, so that a population needs no ramp: each at an instant drawn from its own time.

A recording holds no service times, so its time is that of its waits: an instant in a long wait is drawn more often, as
someone who looks in would find it. What the rest goes on from is sent first, whole: the warm-up.
"""

from __future__ import annotations

import random

from harness.traces.form import RecordedRequest, Recording


def begun_at_a_drawn_instant(recording: Recording, rng: random.Random) -> tuple[Recording, int]:
    """(what is still to come with its warm-up requests, number of warm-up requests).

    A wait that had begun keeps what was left of it; requests that nothing to come needs are left out. A recording
    without waits begins at a request drawn evenly.
    """
    starts_ns = _starts_ns(recording)
    last_ns = max(starts_ns)
    instant_ns = rng.randrange(last_ns) if last_ns else 0
    first = 0 if last_ns else rng.randrange(len(starts_ns))
    is_to_come = [start > instant_ns if last_ns else place >= first for place, start in enumerate(starts_ns)]
    is_warm_up = [False] * len(starts_ns)
    for place, one in enumerate(recording.requests):
        if is_to_come[place]:
            for before in (*one.after, *(() if one.base is None else (one.base,))):
                is_warm_up[before] = not is_to_come[before]
    places: dict[int, int] = {}
    kept: list[RecordedRequest] = []
    for place, one in enumerate(recording.requests):
        if not is_to_come[place] and not is_warm_up[place]:
            continue
        places[place] = len(kept)
        if is_warm_up[place]:
            kept.append(one._replace(base=None, after=(), wait_ns=0, wait_kind="none", keep_tokens=0))
            continue
        waited_ns = 0
        if last_ns and not any(is_to_come[before] for before in one.after):
            waited_ns = instant_ns - (starts_ns[place] - one.wait_ns)
        # What a warm-up waited for is gone: who goes on from it waits for it by name.
        after = {*one.after, one.base} if one.base is not None and is_warm_up[one.base] else one.after
        kept.append(
            one._replace(
                base=None if one.base is None else places[one.base],
                after=tuple(places[before] for before in sorted(after)),
                wait_ns=one.wait_ns - waited_ns,
            )
        )
    return Recording(recording.name, 0, tuple(kept)), sum(is_warm_up)


def _starts_ns(recording: Recording) -> list[int]:
    """When each request was sent if every request had taken no time."""
    starts_ns: list[int] = []
    for one in recording.requests:
        starts_ns.append(max((starts_ns[before] for before in one.after), default=0) + one.wait_ns)
    return starts_ns
