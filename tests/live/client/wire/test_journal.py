"""What was received is read in turns: a few entries at least, unless a send is near, and every entry once."""

from __future__ import annotations

import numpy as np
import pytest

from harness.clock import ScaledClock
from harness.live.client.answer import Answer
from harness.live.client.script import Script
from harness.live.client.wire.journal import FEW_ENTRIES, JournalReader
from harness.live.client.wire.layout import END_AS_PLANNED, MODE_COUNTED
from harness.live.client.wire.tables import SharedTables
from tests.support.replays import plan_of, session

NUM_ANSWERS = 3 * FEW_ENTRIES
PAST_NS, FAR_NS = 0, 1 << 62
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"


@pytest.fixture
def read_rows() -> list[int]:
    """Rows whose answers were read, in that order."""
    return []


@pytest.fixture
def journal(read_rows: list[int]) -> JournalReader:
    """One whole answer received for each of some requests."""
    plan = plan_of(session(0, num_requests=NUM_ANSWERS))
    script = Script(plan, model="null", stream=False, clock=ScaledClock(1.0))
    tables = SharedTables(1, NUM_ANSWERS)
    received = np.frombuffer(HEAD + b"{}", dtype=np.uint8)
    tables.ring[: len(received)] = received
    for row in range(NUM_ANSWERS):
        entry = tables.receives[row]
        entry.row, entry.mode, entry.num_bytes, entry.end = row, MODE_COUNTED, len(received), END_AS_PLANNED
    tables.reg.journal_written = NUM_ANSWERS

    def on_end(row: int, _answer: Answer, _end: int, _ids: bytes) -> None:
        read_rows.append(row)

    return JournalReader(script, tables, on_begin=lambda _row: None, on_end=on_end)


def test_a_turn_whose_time_is_over_still_reads_what_makes_it_worth_while(
    journal: JournalReader, read_rows: list[int]
) -> None:
    assert journal.read_until(PAST_NS, FAR_NS)
    assert read_rows == [*range(FEW_ENTRIES)]


def test_a_turn_ends_behind_one_answer_when_a_send_is_near(journal: JournalReader, read_rows: list[int]) -> None:
    assert journal.read_until(PAST_NS, PAST_NS)
    assert journal.read_until(PAST_NS, PAST_NS)
    assert read_rows == [0, 1]


def test_every_answer_is_read_once_and_then_there_are_none(journal: JournalReader, read_rows: list[int]) -> None:
    journal.read_until(PAST_NS, PAST_NS)
    assert journal.read_until(FAR_NS, FAR_NS)
    assert read_rows == [*range(NUM_ANSWERS)]
    assert journal.backlog == 0
    assert not journal.read_until(FAR_NS, FAR_NS)
