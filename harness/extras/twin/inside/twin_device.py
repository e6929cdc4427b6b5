"""The device: prefill chunks, decode steps and copies of KV memory, each timed and traced, with faults on request.

All compiled models of an artifact share its KV memory: physical slots of a fixed number of positions, and per position
a hash of all tokens so far. The next token is drawn from the sum of a sequence's hashes, as attention reads every
position: a wrong, missing or stale position changes every later token. Nothing is random. A read of an unwritten
position is counted, never repaired. The device knows slots and positions, not requests. Its settings, step costs among
them, are a JSON file that an environment variable names; without it the device takes no time and has no faults. This
module imports neither the harness nor torch, so that tests can predict its tokens.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal

import numpy as np

SETTINGS_VARIABLE = "RBLN_TWIN_SETTINGS"
FS_PER_NS = 1_000_000
TimingMode = Literal["period", "device", "none"]
"""period: a step starts at the end of the previous step, which hides the host's work. device: it starts when called."""


@dataclass(frozen=True)
class StepCosts:
    """A cost model's coefficients in whole femtoseconds, computed by the harness for this artifact's buckets.

    Decode: bucket_fs[b] + alpha + beta n + context * (sum of lengths). Prefill of q tokens after C cached ones: over
    its ceil(q / chunk) calls j, call + token q + position (C + chunk j).
    """

    bucket_fs: Mapping[int, int]
    alpha_fs: int = 0
    beta_fs: int = 0
    context_fs: int = 0
    chunk_tokens: int = 128
    call_fs: int = 0
    token_fs: int = 0
    position_fs: int = 0

    def decode_ns(self, bucket: int, num_seqs: int, context_tokens: int) -> int:
        """Duration of one decode step."""
        total = self.bucket_fs[bucket] + self.alpha_fs + self.beta_fs * num_seqs + self.context_fs * context_tokens
        return (total + FS_PER_NS // 2) // FS_PER_NS

    def prefill_ns(self, computed_tokens: int, cached_tokens: int) -> int:
        """Duration of a prefill up to and including ``computed_tokens``."""
        calls = -(-computed_tokens // self.chunk_tokens)
        positions = calls * cached_tokens + self.chunk_tokens * (calls * (calls - 1) // 2)
        total = calls * (self.call_fs + self.token_fs * computed_tokens) + self.position_fs * positions
        return (total + FS_PER_NS // 2) // FS_PER_NS


@dataclass(frozen=True)
class Fault:
    """A fault that occurs once: ``do`` is hang, crash, error or slow; ``at`` counts calls of ``call``.

    call: "decode", "prefill" (chunks), "copy" or "start". seconds: extra time of "slow".
    """

    do: str
    call: str
    at: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Settings:
    """npu_name, num_npus: the devices that the machine claims to have. trace_path: JSON lines, appended."""

    npu_name: str = "RBLN-CA25"
    num_npus: int = 16
    timing: TimingMode = "none"
    costs: StepCosts | None = None
    trace_path: str = ""
    faults: tuple[Fault, ...] = ()


def costs_from(table: Mapping[str, object]) -> StepCosts:
    """StepCosts from the settings file; bucket keys arrive as text."""
    buckets = table["bucket_fs"]
    assert isinstance(buckets, Mapping)
    numbers = {key: int(str(value)) for key, value in table.items() if key != "bucket_fs"}
    return StepCosts(bucket_fs={int(str(key)): int(str(value)) for key, value in buckets.items()}, **numbers)


def settings_from(table: Mapping[str, Any]) -> Settings:
    """Settings from the file's table; an unknown key is a TypeError."""
    values = dict(table)
    if values.get("costs") is not None:
        values["costs"] = costs_from(values["costs"])
    values["faults"] = tuple(Fault(**fault) for fault in values.get("faults", ()))
    settings = Settings(**values)
    if settings.timing != "none" and settings.costs is None:
        raise ValueError("timing needs costs")
    return settings


def read_settings() -> Settings:
    """The settings of this process."""
    path = os.environ.get(SETTINGS_VARIABLE, "")
    return settings_from(json.loads(Path(path).read_text(encoding="utf-8"))) if path else Settings()


CRASH_STATUS = 139
NS_PER_S = 1_000_000_000
HIDDEN_HOST_NS = 25_000_000
"""A shorter gap between two calls means that the host prepared the next step and was not idle."""
MASK = (1 << 64) - 1
EMPTY = 0x9E3779B97F4A7C15
"""The hash before a sequence's first position."""
UNWRITTEN = 0
"""Content of a position that was never written."""


def now_ns() -> int:
    """CLOCK_MONOTONIC, the clock of the harness and of vLLM's own events."""
    return time.monotonic_ns()  # noqa: TID251 - runs inside the server, where the harness's clock is not


def wait_until(deadline_ns: int) -> None:
    """Return at ``deadline_ns``, or at once when it has passed."""
    left_ns = deadline_ns - now_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)  # noqa: TID251 - as above


class Pacer:
    """Start and end of each step in modelled time. Lateness is never caught up."""

    def __init__(self, mode: TimingMode) -> None:
        self.mode: TimingMode = mode
        self._step_start_ns = 0
        self._last_end_ns = 0

    def begin(self) -> int:
        """Begin a step; returns its start, ns."""
        now = now_ns()
        hides_host = self.mode == "period" and now - self._last_end_ns < HIDDEN_HOST_NS
        self._step_start_ns = self._last_end_ns if hides_host else now
        return self._step_start_ns

    def end(self, duration_ns: int) -> int:
        """Wait until the step is ``duration_ns`` old; returns its end, ns. Called for each chunk of a prefill."""
        if self.mode != "none":
            wait_until(self._step_start_ns + duration_ns)
        self._last_end_ns = now_ns()
        if self.mode == "period":
            # A late wake-up is this machine's fault and is taken out; a late call is real and stays.
            late_ns = self._last_end_ns - (self._step_start_ns + duration_ns)
            if late_ns < 1_000_000:
                self._last_end_ns -= late_ns
        return self._last_end_ns


def fold(before: int, token: int, position: int) -> int:
    """The hash at ``position`` for ``token``; before: the hash of the previous position."""
    value = (before ^ ((token + 1) * 0xD6E8FEB86659FD93) ^ ((position + 1) * 0xA0761D6478BD642F)) & MASK
    value = ((value ^ (value >> 32)) * 0xE7037ED1A0B428DB) & MASK
    value = ((value ^ (value >> 29)) * 0x8EBC6AF09C88C6E3) & MASK
    return (value ^ (value >> 32)) or 1


def draw(total: int, low: int, high: int) -> int:
    """The token in [low, high) that follows a sequence whose hashes sum to ``total``, modulo 2**64."""
    return low + fold(total & MASK, 0, 0) % (high - low)


class KvMemory:
    """``num_slots`` physical slots of ``slot_tokens`` positions each, all unwritten at first.

    unwritten_reads: unwritten positions that steps attended to, summed over steps.
    """

    def __init__(self, num_slots: int, slot_tokens: int) -> None:
        self.slot_tokens = slot_tokens
        self.unwritten_reads = 0
        self._slots = np.full((num_slots, slot_tokens), UNWRITTEN, dtype=np.uint64)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def write(self, table: Sequence[int], first: int, tokens: Sequence[int]) -> None:
        """Put ``tokens`` at positions ``first``, first + 1, ... of a sequence.

        table: the sequence's physical slots in order. Raises IndexError for a slot or position out of range.
        """
        number = EMPTY if first == 0 else self.number_at(table, first - 1)
        for position, token in enumerate(tokens, first):
            number = fold(number, token, position)
            self._slots[self._slot(table, position), position % self.slot_tokens] = number

    def attend(self, table: Sequence[int], last: int) -> int:
        """The sum of a sequence's hashes over positions 0 .. last, modulo 2**64, which decides its next token."""
        total = 0
        for start in range(0, last + 1, self.slot_tokens):
            numbers = self._slots[self._slot(table, start), : last + 1 - start]
            total += int(numbers.sum(dtype=np.uint64))
            self.unwritten_reads += int(np.count_nonzero(numbers == UNWRITTEN))
        return total & MASK

    def number_at(self, table: Sequence[int], position: int) -> int:
        """The hash at ``position`` of a sequence."""
        return int(self._slots[self._slot(table, position), position % self.slot_tokens])

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first ``num_tokens`` positions of one slot to another."""
        self._slots[self._checked(target), :num_tokens] = self._slots[self._checked(source), :num_tokens]

    def _slot(self, table: Sequence[int], position: int) -> int:
        return self._checked(table[position // self.slot_tokens])

    def _checked(self, slot: int) -> int:
        # A negative index would silently address the memory's end.
        if not 0 <= slot < len(self._slots):
            raise IndexError(f"physical slot {slot} of {len(self._slots)}")
        return slot


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
        # The token at position p is the (p + 1)th of its sequence.
        lengths = [positions[row] for row in real]
        end = self._pacer.end(self._decode_ns(bucket, len(real), sum(lengths) + len(lengths)))
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
