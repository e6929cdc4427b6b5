"""Trajectories of agents: model calls in order, with the times and counts that a file happens to have, as rounds.

A call without a time gets the tool time that the file has, else an unknown wait. What had to be assumed is labelled.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.model.traces.account import ReadNotes, Unread
from harness.model.traces.base import Record, record_of, tokens_of
from harness.model.traces.rounds import Log, Round

# Tokens that a server read from its cache, and wrote to it, by the names of OpenAI, Anthropic and OpenHands.
CACHE = (
    ("cached_tokens", "cache_read_input_tokens", "cache_read_tokens"),
    ("cache_creation_tokens", "cache_creation_input_tokens", "cache_write_tokens"),
)
UNSTATED = "that the file states and its calls do not have"
NO_CACHE = "prompts taken to begin with the whole conversation before: no cached tokens are given"


@dataclass
class Call:
    """One model call. Instants in ns since 1970, None where the file has none; lengths in tokens.

    wait_ns: the tool time before it, where the file has that instead of instants. cached: None where the file does not
    say. identity: equal for the same call in another file, None where nothing tells.
    """

    at: str
    prompt: int
    generate: int
    cached: int | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    wait_ns: int | None = None
    is_human: bool = False
    characters: int = 0
    identity: Hashable = None
    children: list[str] = field(default_factory=list[str])
    created: int = 0
    unknown_wait: str = ""


def log_of(session: str, calls: Sequence[Call], unread: Unread, notes: ReadNotes) -> Log:
    """The calls of a session as rounds: at their instants where every call has its end, else one after another."""
    has_times = all(call.end_ns is not None for call in calls)
    log: Log = []
    ended_ns = stream = 0
    for place, call in enumerate(calls):
        if has_times and call.end_ns is not None:
            end_ns = call.end_ns
            start_ns = end_ns if call.start_ns is None else min(call.start_ns, end_ns)
            what = "waits that are gaps between answers: they hold the time of the next answer too"
            notes.assume(what, bool(place and call.start_ns is None))
        else:
            start_ns = end_ns = ended_ns + (call.wait_ns or 0)
            call.unknown_wait = call.unknown_wait or ("the recording has no times" if call.wait_ns is None else "")
        prefix = call.cached
        if prefix is None:
            prefix = stream if call.prompt >= stream else 0
            notes.assume(NO_CACHE, place > 0)
        turn = Round(session, start_ns, end_ns, call.prompt, prefix, call.generate, call.generate, call.is_human)
        turn.index, turn.at, turn.identity, turn.children = place, call.at, call.identity, call.children
        turn.answer_characters, turn.created_tokens = call.characters, call.created
        turn.unknown_wait = unread.why or call.unknown_wait
        if log:
            log[-1].tool_spans.append((ended_ns, max(start_ns, ended_ns)))
        log.append(turn)
        ended_ns, stream = end_ns, call.prompt + call.generate
    return log


class Usage(NamedTuple):
    """The counts of one call. cached: None where they do not say; created: written to the cache."""

    prompt: int
    generate: int
    cached: int | None
    created: int


def usage_of(usage: Record) -> Usage | None:
    """The counts of a usage object in OpenAI's form; None where it has a value that is none, or lacks one.

    A prompt of no token is no call; ``log_of`` counts it.
    """
    details = record_of(usage.get("prompt_tokens_details"))
    prompt, generate = tokens_of(usage.get("prompt_tokens")), tokens_of(usage.get("completion_tokens"))
    cached, created = (_most(names, usage, details) for names in CACHE)
    if prompt is None or generate is None or -1 in (cached, created):
        return None
    return Usage(prompt, generate, cached, created or 0)


def _most(names: Iterable[str], *tables: Record) -> int | None:
    """The largest count by any of these names; None where there is none, -1 where one is no number of tokens."""
    given = [tokens_of(table[name]) for table in tables for name in names if table.get(name) is not None]
    counts = [count for count in given if count is not None]
    return max(counts, default=None) if len(counts) == len(given) else -1
