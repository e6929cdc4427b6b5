"""Passes of one of Claude Code's answers, as its usage lists them: each of the session's model is a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from harness.model.traces.account import ReadNotes
from harness.model.traces.base import Record, counts_of, list_of, record_of, text_of
from harness.model.traces.rounds import Log, Round

USAGE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
# By the session's own model; of others by an advisor, or by the model it fell back to.
OWN_PASSES = ("message", "compaction")
OTHER_MODEL = "passes of another model within an answer: an advisor's, or one that took over"


class Answer(NamedTuple):
    """Counts of ``USAGE`` of an answer, and of each pass by its type; no passes where they are not told."""

    usage: list[int]
    passes: list[tuple[str, list[int]]]


def answer_of(usage: Record) -> Answer | None:
    """The counts of an answer; None where one is no number of tokens."""
    counts, passes = counts_of(usage, USAGE), list[tuple[str, list[int]]]()
    for each in map(record_of, list_of(usage.get("iterations"))):
        found = counts_of(each, USAGE)
        if found is None:
            return None
        passes.append((text_of(each, "type"), found))
    return None if counts is None else Answer(counts, passes)


def count(turn: Round, usage: Sequence[int]) -> None:
    """Set the lengths of a round from counts of ``USAGE``."""
    fresh, created, cached, output = usage
    turn.input_tokens, turn.prefix_tokens = fresh + created + cached, cached
    turn.output_tokens = turn.visible_tokens = output


def rounds_of(turn: Round, answer: Answer, notes: ReadNotes) -> Log:
    """A round for each pass of the session's model; the last one has the answer's tools."""
    own = [counts for kind, counts in answer.passes if kind in OWN_PASSES]
    if not own or len(answer.passes) < 2:
        return [turn]
    sums = [list(map(sum, zip(*rows, strict=True))) for rows in (own, [counts for _, counts in answer.passes])]
    if answer.usage not in sums:
        notes.hold("answers whose usage is not the sum of its passes", sum(answer.usage), sums[1])
    notes.num_more += len(answer.passes) - 1
    notes.drop(OTHER_MODEL, turn.at, len(answer.passes) - len(own))
    notes.assume("answers of several passes of the model: each pass is a call", len(own) > 1)
    rounds = [*(replace(turn, tool_spans=[], children=[], answer_characters=0) for _ in own[1:]), turn]
    for number, (each, counts) in enumerate(zip(rounds, own, strict=True)):
        count(each, counts)
        each.identity = turn.identity if each is turn else (turn.identity, number)
        if number:
            each.submitted_ns, each.is_human, each.follows, each.is_reset = each.end_ns, False, None, False
            each.unknown_wait = "an answer of several passes has one time for all of them"
    return rounds
