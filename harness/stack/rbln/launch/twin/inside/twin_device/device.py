"""One device: prefill chunks, decode steps and KV copies, each timed and traced, with faults on request.

It holds the KV memory that all compiled models of an artifact share. It knows slots and positions, not requests.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from io import TextIOWrapper

from .memory import KvMemory, draw
from .pacing import Pacer, now_ns, sum_of_lengths, wait_until
from .settings import Fault, Settings

CRASH_STATUS = 139
NS_PER_S = 1_000_000_000


class DeviceError(RuntimeError):
    """A requested fault, in the form of the runtime's errors."""


@dataclass(frozen=True)
class DeviceShape:
    """KV memory of ``num_slots`` x ``slot_tokens`` positions, tokens of a prefill chunk, generated ids [low, high)."""

    num_slots: int
    slot_tokens: int
    chunk_tokens: int
    low: int
    high: int


class Device:
    """The device of an artifact."""

    def __init__(self, settings: Settings, shape: DeviceShape) -> None:
        self.memory = KvMemory(shape.num_slots, shape.slot_tokens)
        self._chunk_tokens = shape.chunk_tokens
        self._low, self._high = shape.low, shape.high
        self._costs = settings.costs
        self._pacer = Pacer(settings.timing)
        self._faults = settings.faults
        self._calls = {"start": 0, "prefill": 0, "decode": 0, "copy": 0}
        self._notes: Counter[str] = Counter()
        self._trace: TextIOWrapper | None = None
        if settings.trace_path:
            # Line buffered, so that records survive a crash.
            self._trace = open(settings.trace_path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._prefill_first = 0
        self._prefill_computed = 0
        self._break_if_due("start")

    def prefill_chunk(self, table: Sequence[int], first: int, tokens: Sequence[int]) -> int:
        """Compute a chunk of a sequence, at positions from ``first`` on; returns the next token.

        A chunk that continues the previous chunk without a gap belongs to the same prefill.
        """
        start = now_ns()
        continues = self._prefill_computed > 0 and first == self._prefill_first + self._prefill_computed
        if not continues:
            self._pacer.begin()
            self._prefill_first, self._prefill_computed = first, 0
        self._break_if_due("prefill")
        self.memory.write(table, first, tokens)
        total = self.memory.attend(table, first + len(tokens) - 1)
        self._prefill_computed += len(tokens)
        end = self._pacer.end(self._prefill_ns())
        self._write(
            "prefill",
            start,
            end,
            chunk=-(-self._prefill_computed // self._chunk_tokens) - 1,
            slots=list(table),
            first_position=first,
            num_tokens=len(tokens),
            cached_tokens=self._prefill_first,
        )
        if len(tokens) < self._chunk_tokens:
            self._prefill_computed = 0
        return draw(total, self._low, self._high)

    def decode(self, tables: Sequence[Sequence[int]], positions: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """One step of a compiled batch; returns the next token of every row. A padding row has position 0."""
        start = self._pacer.begin()
        self._prefill_computed = 0
        self._break_if_due("decode")
        real = [row for row, position in enumerate(positions) if position > 0]
        following = [self._low] * len(positions)
        for row, position in enumerate(positions):
            self.memory.write(tables[row], position, (tokens[row],))
            following[row] = draw(self.memory.attend(tables[row], position), self._low, self._high)
        bucket = len(positions)
        lengths = [positions[row] for row in real]
        end = self._pacer.end(self._decode_ns(bucket, len(real), sum_of_lengths(lengths)))
        padding = next((list(tables[row])[:1] for row in range(bucket) if positions[row] == 0), [])
        self._write(
            "decode",
            start,
            end,
            n=len(real),
            b=bucket,
            slots=[tables[row][positions[row] // self.memory.slot_tokens] for row in real],
            positions=lengths,
            padding_slot=padding[0] if padding else -1,
        )
        return following

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the head of a slot to another slot; takes no modelled time."""
        start = now_ns()
        self._break_if_due("copy")
        self._prefill_computed = 0
        self.memory.copy(source, target, num_tokens)
        self._write("copy", start, now_ns(), source=source, target=target, num_tokens=num_tokens)

    @property
    def is_traced(self) -> bool:
        return self._trace is not None

    def note(self, kind: str, start_ns: int, **fields: object) -> None:
        """Write a record of ``kind`` between those of device calls, in the order of events."""
        if self._trace is not None:
            record = {"kind": kind, "call": self._notes[kind], "start_ns": start_ns, "end_ns": now_ns()} | fields
            self._notes[kind] += 1
            self._trace.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Close the trace; the device stays usable without it."""
        if self._trace is not None:
            self._trace.close()
            self._trace = None

    def _prefill_ns(self) -> int:
        return 0 if self._costs is None else self._costs.prefill_ns(self._prefill_computed, self._prefill_first)

    def _decode_ns(self, bucket: int, num_seqs: int, context_tokens: int) -> int:
        return 0 if self._costs is None else self._costs.decode_ns(bucket, num_seqs, context_tokens)

    def _write(self, kind: str, start_ns: int, end_ns: int, **fields: object) -> None:
        if self._trace is None:
            return
        record = {"kind": kind, "call": self._calls[kind] - 1, "start_ns": start_ns, "end_ns": end_ns} | fields
        record["unwritten_reads"] = self.memory.unwritten_reads
        self._trace.write(json.dumps(record) + "\n")

    def _break_if_due(self, call: str) -> None:
        at = self._calls[call]
        self._calls[call] = at + 1
        for fault in self._faults:
            if fault.call == call and fault.at == at:
                break_down(fault)


def break_down(fault: Fault) -> None:
    """Carry out a fault: hang for ever, end the process, raise, or take longer."""
    if fault.do == "crash":
        os._exit(CRASH_STATUS)
    if fault.do == "error":
        raise DeviceError(f"[RBLN runtime] device error at {fault.call} call {fault.at}")
    if fault.do == "slow":
        wait_until(now_ns() + int(fault.seconds * NS_PER_S))
    while fault.do == "hang":
        wait_until(now_ns() + 3600 * NS_PER_S)
