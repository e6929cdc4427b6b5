"""LMCache's agentic traces (sammshen/lmcache-agentic-traces on Hugging Face), and AIPerf's: one call a row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from harness.clock import NS_PER_MS
from harness.extras.formats.blocks import MOONCAKE_BLOCK_TOKENS, BlockNames
from harness.model.traces.account import CHARACTERS_PER_TOKEN, ReadNotes, tokens_in
from harness.model.traces.base import Lines, read_tables, trace_format
from harness.model.traces.calls import Call, Log
from harness.model.traces.links import CONTRADICTED, ROUNDED_NS, num_common, of_lines
from harness.model.traces.values import Record, list_of, seconds_ns, text_of, tokens_of

DELTA, UNHELD, STARTS, FIRST, ESTIMATED = read_tables(Path(__file__).with_name("labels.toml"))["lmcache"].values()


class _Message(NamedTuple):
    """What is kept of a message. is_answer: the model wrote it."""

    digest: bytes
    tokens: int
    is_answer: bool


@dataclass
class _Turn:
    """One call. blocks: names of the whole blocks of its text."""

    at: str
    messages: list[_Message]
    blocks: list[str]
    generate: int
    gap_ns: int | None
    since_ns: int | None
    is_asked_by_tools: bool

    @property
    def prompt(self) -> int:
        return max(sum(each.tokens for each in self.messages), 1)


def lmcache_logs(lines: Lines, notes: ReadNotes) -> Iterator[Log]:
    """The calls of each session by the length of their prompts' histories."""
    sessions: dict[str, list[_Turn]] = {}
    seen: set[bytes] = set()
    for _, at, record in lines:
        turn = _turn(record, at, notes)
        name = text_of(record, "session_id")
        if turn is None or not name:
            notes.row_broken("a call without its session, messages or output length", at)
            continue
        notes.num_calls += 1
        turns = sessions.setdefault(name, [])
        notes.assume(DELTA, is_delta := text_of(record, "message_mode") == "delta")
        if is_delta and turns:
            answer = _Message(b"", turns[-1].generate, is_answer=True)
            turn.messages = [*turns[-1].messages, answer, *turn.messages]
        said = (name, turn.messages, turn.generate, turn.gap_ns, turn.since_ns)
        value = hashlib.sha256(repr(said).encode("utf-8", "replace")).digest()
        if value in seen:
            notes.drop("rows that came before", at)
        else:
            seen.add(value)
            turns.append(turn)
    names = BlockNames()
    notes.block_tokens = MOONCAKE_BLOCK_TOKENS
    starts_ns = [min(turn.since_ns or 0 for turn in turns) for turns in sessions.values()]
    notes.assume(STARTS, len(starts_ns) - starts_ns.count(min(starts_ns, default=0)))
    for name, turns in sessions.items():
        has_times = all(turn.since_ns is not None for turn in turns)
        in_order = sorted(turns, key=lambda turn: (has_times and turn.since_ns, len(turn.messages)))
        pairs = [(before.messages, turn.messages) for before, turn in pairwise(turns)]
        if not has_times and not any(len(one) > num_common(one, two) == len(two) for one, two in pairs):
            in_order = turns  # a conversation that was summarised has fewer messages than before
        what = "time" if has_times else "how much came before"
        notes.assume(f"calls of a session out of order: sorted by {what}", in_order != turns)
        notes.assume(ESTIMATED, len(turns))
        notes.assume(FIRST, bool(in_order[0].gap_ns))
        yield _calls(name, in_order, names, notes)


def _turn(record: Record, at: str, notes: ReadNotes) -> _Turn | None:
    messages = list_of(record, "input") or list_of(record, "messages")
    generate = tokens_of(record.get("output_length"))
    if not messages or generate is None or not all(isinstance(message, dict) for message in messages):
        return None
    texts = [notes.without_files(json.dumps(message, sort_keys=True)) for message in messages]
    hashes = (hashlib.sha256(text.encode()).digest()[:16] for text in texts)
    answers = (text_of(message, "role") == "assistant" for message in messages)
    digests = list(map(_Message, hashes, map(tokens_in, map(len, texts)), answers))
    gap_ns = seconds_ns(record.get("pre_gap"))
    gap_ns = seconds_ns(record.get("delay"), NS_PER_MS) if gap_ns is None else gap_ns  # as AIPerf writes it
    since_ns = seconds_ns(record.get("session_timestamp"))
    since_ns = seconds_ns(record.get("timestamp"), NS_PER_MS) if since_ns is None else since_ns
    is_asked_by_tools = text_of(messages[-1], "role") in ("tool", "function")
    return _Turn(at, digests, _blocks("".join(texts)), generate, gap_ns, since_ns, is_asked_by_tools)


def _blocks(text: str) -> list[str]:
    """A name for every whole block of a text, each chained to those before it."""
    size, chain = MOONCAKE_BLOCK_TOKENS * CHARACTERS_PER_TOKEN, hashlib.sha256()
    names: list[str] = []
    for start in range(0, len(text) - size + 1, size):
        chain.update(text[start : start + size].encode())
        names.append(chain.hexdigest()[:24])
    return names


def _calls(session: str, turns: list[_Turn], names: BlockNames, notes: ReadNotes) -> Log:
    """The calls of a session; what a prompt keeps are the messages that come again."""
    log, num_answers = list[Call](), -1
    for place, turn in enumerate(turns):
        prompt, keep, wait_ns, at_ns = turn.prompt, 0, 0, 0
        num_before, num_answers = num_answers, sum(each.is_answer for each in turn.messages)
        notes.assume("calls whose messages hold answers of calls that are missing", num_answers - num_before > 1)
        if place:
            before, call = turns[place - 1], log[-1]
            prompt, keep = _lengths(before, call.input_tokens, turn, notes)
            wait_ns = _wait_ns(before, turn, notes)
            at_ns = call.end_ns + (wait_ns or 0)
        log.append(Call(session, at_ns, at_ns, prompt, keep, turn.generate, index=place, at=turn.at))
        log[-1].wait_ns, log[-1].is_prefix_given = wait_ns, True
        log[-1].kind = "tool" if turn.is_asked_by_tools else "none"  # a user's message may be a person's or a program's
        log[-1].unknown_wait = "no row says how long it was" if wait_ns is None else ""
        log[-1].names = (names.numbers(() if keep else turn.blocks) or ())[: prompt // MOONCAKE_BLOCK_TOKENS]
    return log


def _wait_ns(before: _Turn, turn: _Turn, notes: ReadNotes) -> int | None:
    """The gap before a call; None where the row says none."""
    if turn.since_ns is None or before.since_ns is None:
        return turn.gap_ns
    told_ns = max(turn.since_ns - before.since_ns, 0)
    notes.assume(CONTRADICTED, turn.gap_ns is not None and turn.gap_ns - told_ns > ROUNDED_NS)
    notes.assume("waits that are gaps between calls: they hold the time of the answer before too", turn.gap_ns is None)
    return told_ns if turn.gap_ns is None else turn.gap_ns


def _lengths(before: _Turn, before_prompt: int, turn: _Turn, notes: ReadNotes) -> tuple[int, int]:
    """(tokens of a prompt, tokens of them that are the call before: its messages, and its answer if all come again)."""
    common = num_common(turn.messages, before.messages)
    if common < len(before.messages):
        return turn.prompt, min(sum(each.tokens for each in turn.messages[:common]), turn.prompt, before_prompt)
    is_held = any(each.is_answer for each in turn.messages[common : common + 1])
    notes.assume(UNHELD, not is_held)
    kept = before_prompt + is_held * max(before.generate, 1)
    return kept + sum(each.tokens for each in turn.messages[common + is_held :]), kept


FORMAT = trace_format(__file__, "lmcache", of_lines(lmcache_logs))
