"""The journal of receives, read by the interpreter in slack: pieces go to their answer's reading, ends to the replay.

Entries are read in the order in which they were written, never out of turn and never twice; what a row that has its
final status still received is passed over. Next: ``replay`` judges the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.clock import monotonic_ns
from harness.live.client.wire.heads import HEAD_END
from harness.live.client.wire.layout import JOURNAL_ENTRIES, MODE_COUNTED, RING_BYTES
from harness.live.client.wire.reading import Reading

if TYPE_CHECKING:
    from harness.live.client.answer import Answer
    from harness.live.client.script import Script
    from harness.live.client.wire.layout import Receive
    from harness.live.client.wire.tables import SharedTables
# A turn for fewer is not worth its switch while nothing is due.
FEW_ENTRIES = 8


class JournalReader:
    """The interpreter's place in the journal, and the answers under way by row."""

    def __init__(
        self,
        script: Script,
        tables: SharedTables,
        *,
        on_begin: Callable[[int], None],
        on_end: Callable[[int, Answer, Receive], None],
    ) -> None:
        """on_begin(row): its answer begins to come. on_end(row, answer, entry): the loop saw its end in this entry."""
        self._script = script
        self._status, self._http_status = script.rows.status, script.rows.http_status
        self._receives = tables.receives
        self._reg = tables.reg
        self._ring = tables.ring.data
        self._on_begin, self._on_end = on_begin, on_end
        self._readings: dict[int, Reading] = {}
        self._num_read = 0
        self.is_reading = False

    @property
    def backlog(self) -> int:
        """Entries that wait."""
        return self._reg.journal_written - self._num_read

    def read_until(self, until_ns: int, latest_ns: int) -> bool:
        """Read until an instant, a few entries at least unless ``latest_ns`` comes first; False if there are none."""
        enough = self._num_read + FEW_ENTRIES

        def goes_on() -> bool:
            now_ns = monotonic_ns()
            return now_ns < until_ns or (self._num_read < enough and now_ns < latest_ns)

        return self._read_while(goes_on)

    def read_all(self) -> None:
        """Read everything that has come."""
        self._read_while(lambda: True)

    def read_to(self, row: int) -> None:
        """Read on until a complete answer has been judged."""
        if not self._status[row]:
            self._read_while(lambda: not self._status[row])

    def _read_while(self, goes_on: Callable[[], bool]) -> bool:
        """Read entry after entry, for as long as that holds behind each; False when there are none."""
        assert not self.is_reading
        first, end = self._num_read, self._reg.journal_written
        if first == end:
            return False
        self.is_reading = True
        for place in range(first, end):
            entry = self._receives[place % JOURNAL_ENTRIES]
            if not self._status[entry.row]:
                self._read(entry)
            self._num_read = place + 1
            if not goes_on():
                break
        last = self._receives[(self._num_read - 1) % JOURNAL_ENTRIES]
        self._reg.journal_read, self._reg.ring_read = self._num_read, last.ring_end
        self.is_reading = False
        return True

    def _read(self, entry: Receive) -> None:
        row, mode = entry.row, entry.mode
        data = self.from_ring(entry.place, entry.num_bytes)
        reading = self._readings.get(row)
        if entry.end and mode == MODE_COUNTED and reading is None:
            answer = self._script.new_answer(row, keeps_id_text=False)
            answer.take_whole((entry.received_ns, entry.kernel_ns, data[data.find(HEAD_END) + len(HEAD_END) :]))
            self._on_end(row, answer, entry)
            return
        if reading is None:
            reading = self._readings[row] = Reading(self._script.new_answer(row, keeps_id_text=False))
            self._on_begin(row)
        is_time = reading.take(entry.received_ns, entry.kernel_ns, data, mode, entry.num_events)
        if entry.end:
            self._on_end(row, self.whole_answer(row), entry)
        elif is_time:
            reading.interpret(self._http_status[row])

    def from_ring(self, place: int, count: int) -> bytes:
        """Bytes that the loop put into the ring."""
        start = place % RING_BYTES
        return bytes(self._ring[start : start + count])

    def reading_of(self, row: int) -> Reading | None:
        """The answer under way, with all of it that was read interpreted."""
        reading = self._readings.get(row)
        if reading is not None:
            reading.interpret(self._http_status[row])
        return reading

    def whole_answer(self, row: int) -> Answer:
        """A complete answer; it is no longer under way."""
        return self._readings.pop(row).close(self._script.rows.first_byte_ns[row], self._http_status[row])

    def forget(self, row: int) -> None:
        """The answer will never be complete."""
        reading = self._readings.pop(row, None)
        if reading is not None:
            reading.abandon()
