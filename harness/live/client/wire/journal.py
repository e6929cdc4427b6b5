"""The journal of receives, read by the interpreter in slack: pieces go to their answer's reading, ends to the replay.

Entries are read in the order in which they were written, never out of turn and never twice; what a row that has its
final status still received is passed over. Next: ``replay`` judges the answers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from harness.clock import monotonic_ns
from harness.compiled.records import record_fields
from harness.live.client.wire.heads import HEAD_END
from harness.live.client.wire.layout import JOURNAL_ENTRIES, MODE_COUNTED, RING_BYTES, Receive
from harness.live.client.wire.reading import Reading

if TYPE_CHECKING:
    from harness.live.client.answer import Answer
    from harness.live.client.script import Script
    from harness.live.client.wire.tables import SharedTables

# What each entry is asked for.
READ_FIELDS = (
    *("row", "mode", "place", "num_bytes", "received_ns", "kernel_ns", "num_events", "end"),
    *("ids_place", "ids_bytes"),
)
# A turn for fewer is not worth its switch while nothing is due.
FEW_ENTRIES = 8


def fields_reader(receives: Sequence[Receive], fields: Sequence[str]) -> Callable[[int], tuple[int, ...]]:
    """A function: place -> these fields of the entry there, in the record's order, read in one go.

    Reading each of them by its name takes several times as long, which shows where there is one entry a token.
    """
    form = struct.Struct("".join("q" if name in fields else "8x" for name in record_fields(Receive)))
    table: Any = memoryview(cast("Any", receives)).cast("B")
    return lambda place: form.unpack_from(table, place * form.size)


class JournalReader:
    """The interpreter's place in the journal, and the answers under way by row."""

    def __init__(
        self,
        script: Script,
        tables: SharedTables,
        *,
        on_begin: Callable[[int], None],
        on_end: Callable[[int, Answer, int, bytes], None],
    ) -> None:
        """on_begin(row): its answer begins to come. on_end(row, answer, end, ids): the loop saw its end (END_...), and
        went on with these ids, as text.
        """
        self._script = script
        self._status, self._http_status = script.rows.status, script.rows.http_status
        self._receives = tables.receives
        self._fields_of = fields_reader(tables.receives, READ_FIELDS)
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
            self._read(place % JOURNAL_ENTRIES)
            self._num_read = place + 1
            if not goes_on():
                break
        last = self._receives[(self._num_read - 1) % JOURNAL_ENTRIES]
        self._reg.journal_read, self._reg.ring_read = self._num_read, last.ring_end
        self.is_reading = False
        return True

    def _read(self, entry: int) -> None:
        fields = self._fields_of(entry)
        row, mode, place, num_bytes, received_ns, kernel_ns, num_events, end, ids_place, ids_bytes = fields
        if self._status[row]:
            return
        data = self.from_ring(place, num_bytes)
        reading = self._readings.get(row)
        if end and mode == MODE_COUNTED and reading is None:
            answer = self._script.new_answer(row, keeps_id_text=False)
            answer.take_whole((received_ns, kernel_ns, data[data.find(HEAD_END) + len(HEAD_END) :]))
            self._on_end(row, answer, end, self.from_ring(ids_place, ids_bytes))
            return
        if reading is None:
            reading = self._readings[row] = Reading(self._script.new_answer(row, keeps_id_text=False))
            self._on_begin(row)
        is_time = reading.take(received_ns, kernel_ns, data, mode, num_events)
        if end:
            self._on_end(row, self.whole_answer(row), end, self.from_ring(ids_place, ids_bytes))
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
