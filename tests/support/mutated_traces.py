"""Recordings of every format with damaged lines: values of the wrong kind, keys gone, bytes flipped, lines torn.

``python -m tests.support.mutated_traces 1000000`` reads so many lines and prints what came of them; it ends at the
first traceback, hang or half-written trace.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from harness.errors import HarnessError
from harness.model.plan.model import Plan
from harness.model.traces.importing import TRACE_FORMATS, import_trace
from harness.model.traces.lower import Lowering, sessions_of
from harness.model.traces.recording import read_trace
from tests.support.mutated_accounts import rows_of

LINES_A_FILE = 100
HANGS_AFTER_S = 30
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**40,
    -(10**40),
    0.5,
    1e300,
    -0.0,
    "",
    "x" * 3000,
    "NaN",
    "\ud800",
    "\x1b[31m",
    [],
    {},
    [[]] * 5,
    {"id": {}},
    "2026-03-01T10:00:00Z",
    "9999-12-31T23:59:59Z",
    "0001-01-01T00:00:00+14:00",
)


def damaged_file(kind: str, rng: random.Random, num_lines: int = LINES_A_FILE) -> bytes:
    """A recording of which about a third of the lines is damaged."""
    rows, is_table = rows_of(kind), kind == "csv"
    head = [rows[0].encode()] if is_table else []
    sound = [rows[len(head) + at % (len(rows) - len(head))] for at in range(num_lines)]
    lines = [_damaged_line(row, rng, whole=kind == "otel", is_table=is_table) for row in sound]
    if kind == "otel":
        document = b'{"spans": [' + b",".join(lines) + b"]}"
        return document if rng.random() < 0.9 else _damaged_bytes(bytearray(document), rng)
    return b"\n".join([*head, *lines]) + b"\n" * rng.randrange(2)


def _damaged_line(row: str, rng: random.Random, *, whole: bool, is_table: bool) -> bytes:
    """whole: it stays JSON, because one damaged byte would end the whole document."""
    luck = rng.random()
    line = (json.dumps(damaged_value(json.loads(row), rng)) if luck < 0.2 and not is_table else row).encode()
    return _damaged_bytes(bytearray(line), rng) if 0.2 <= luck < 0.35 and not whole else line


def damaged_value(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        table = dict(cast("dict[str, Any]", value))
        key = rng.choice(list(table))
        if rng.random() < 0.15:
            del table[key]
        else:
            table[key] = damaged_value(table[key], rng)
        return table
    if isinstance(value, list) and value and rng.random() < 0.8:
        members = list(cast("list[Any]", value))
        place = rng.randrange(len(members))
        members[place] = damaged_value(members[place], rng)
        return members * rng.choice((1, 1, 1, 40))
    return rng.choice(ODD)


def _damaged_bytes(line: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(line) + 1)
        line[place : place + rng.randrange(6)] = rng.randbytes(rng.randrange(6))
    return bytes(line[: rng.randrange(len(line) + 1)] if rng.random() < 0.3 else line)


def read_damaged(kind: str, content: bytes, folder: Path) -> str:
    """What came of it: "a plan", or the start of the one line that says why there is none.

    Raises AssertionError where the reader broke its promise, and whatever a reader did not catch.
    """
    source, output = folder / f"in.{'csv' if kind == 'csv' else 'json'}", folder / "out.jsonl"
    source.write_bytes(content)
    output.unlink(missing_ok=True)
    try:
        import_trace([source], output, name="t", kind=kind)
    except HarnessError as error:
        refusal = error
    else:
        refusal = None
    if refusal is not None:
        assert "\n" not in str(refusal)
        assert not output.exists()
        return type(refusal).__name__
    trace = read_trace(output)
    sessions, block_tokens, _ = sessions_of(trace.recordings, trace.head.block_tokens, Lowering(), random.Random(1))
    Plan("trace", 1, 0, "as-drawn", 0, (1000, 150_000), sessions, block_tokens=block_tokens)
    return "a plan"


def _contents(num_lines: int, seed: int) -> Iterator[tuple[str, bytes]]:
    rng = random.Random(seed)
    for number in range(num_lines // LINES_A_FILE):
        kind = sorted(TRACE_FORMATS)[number % len(TRACE_FORMATS)]
        yield kind, damaged_file(kind, rng)


def read_many(num_lines: int, seed: int) -> Counter[str]:
    """What came of so many lines in files of a hundred, all formats in turn."""
    came: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for kind, content in _contents(num_lines, seed):
            # Of processor time: a busy machine makes nothing hang.
            signal.setitimer(signal.ITIMER_VIRTUAL, HANGS_AFTER_S)
            came[f"{kind}: {read_damaged(kind, content, Path(folder))}"] += 1
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return came


if __name__ == "__main__":
    for what, count in sorted(read_many(int(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 1).items()):
        print(f"{count:8d} files  {what}")
