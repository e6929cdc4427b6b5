"""Trajectories of agents: model calls in order, with the times and counts that a file happens to have, as rounds.

A call without a time gets the tool time that the file has, else a drawn wait. What had to be assumed is labelled.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from harness.model.traces.base import Record, record_of, tokens_of
from harness.model.traces.drawn import DrawnWaits
from harness.model.traces.recording import ReadNotes
from harness.model.traces.rounds import NO_PROMPT, Log, Round

# Of tokens that a server read from its cache, by the names of OpenAI, Anthropic and OpenHands.
CACHED = ("cached_tokens", "cache_read_input_tokens", "cache_read_tokens")


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


def log_of(session: str, calls: Sequence[Call], notes: ReadNotes) -> Log:
    """The calls of a session as rounds: at their instants where every call has its end, else one after another."""
    counted = [call for call in calls if call.prompt]
    for call in calls:
        if not call.prompt:
            notes.drop(NO_PROMPT, call.at)
    has_times = all(call.end_ns is not None for call in counted)
    drawn = DrawnWaits(notes)
    log: Log = []
    ended_ns = stream = 0
    for place, call in enumerate(counted):
        if has_times and call.end_ns is not None:
            end_ns = call.end_ns
            start_ns = end_ns if call.start_ns is None else min(call.start_ns, end_ns)
            what = "waits that are gaps between answers: they hold the time of the next answer too"
            notes.assume(what, bool(place and call.start_ns is None))
        else:
            wait_ns = 0 if not place else call.wait_ns
            start_ns = end_ns = ended_ns + (drawn.wait_ns(session, str(place)) if wait_ns is None else wait_ns)
        prefix = call.cached
        if prefix is None:
            prefix = stream if call.prompt >= stream else 0
            notes.assume(
                "prompts taken to begin with the whole conversation before: no cached tokens are given", place > 0
            )
        turn = Round(session, start_ns, end_ns, call.prompt, prefix, call.generate, call.generate, call.is_human)
        turn.index, turn.at, turn.identity, turn.children = place, call.at, call.identity, call.children
        turn.answer_characters = call.characters
        if log:
            log[-1].tool_spans.append((ended_ns, max(start_ns, ended_ns)))
        log.append(turn)
        ended_ns, stream = end_ns, call.prompt + call.generate
    return log


def usage_of(usage: Record) -> tuple[int, int, int | None] | None:
    """(prompt, answer, cached) of a usage object in OpenAI's form; None where it counts no call.

    cached: None where the object does not say.
    """
    prompt, generate = tokens_of(usage.get("prompt_tokens")), tokens_of(usage.get("completion_tokens"))
    if not prompt or generate is None:
        return None
    tables = (usage, record_of(usage.get("prompt_tokens_details")))
    cached = [count for table in tables for name in CACHED if (count := tokens_of(table.get(name))) is not None]
    return prompt, generate, max(cached) if cached else None
