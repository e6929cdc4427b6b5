"""The observer's file as a table: one row per engine step, exactly as the server's own process saw it.

Pure: bytes in, Arrow out; nothing is repaired, and a last line that a kill cut short is left out and reported.
Source of the columns: harness/stacks/rbln/launch/inside/observer/rbln_observer/observe.py, format 1.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from harness.errors import RecordsError
from harness.measure.records import layout

FORMAT = 1
_EVICTION = pa.struct([("slot", pa.int32()), ("caller", pa.string())])
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("schedule_ns", pa.int64()),
        ("scheduled_ns", pa.int64()),
        ("device_start_ns", pa.int64()),
        ("device_end_ns", pa.int64()),
        ("device_ns", pa.int64()),
        ("device_calls", pa.int32()),
        ("copy_ns", pa.int64()),
        ("executed_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("kind", pa.string()),
        ("n", pa.int32()),
        ("b", pa.int32()),
        ("requests", pa.list_(pa.string())),
        ("prompt_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("computed_tokens", pa.int32()),
        ("dummy_slot", pa.int32()),
        ("evictions", pa.list_(_EVICTION)),
        ("preempted", pa.list_(pa.string())),
        ("slots_held", pa.int32()),
        ("slots_free", pa.int32()),
        ("running", pa.int32()),
        ("waiting", pa.int32()),
        ("observer_ns", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class ObserverRecords:
    """steps: one row per engine step, instants in CLOCK_MONOTONIC ns. header: what the observer said of its server.

    is_last_line_torn: the server was killed while it wrote.
    """

    header: dict[str, Any]
    steps: pa.Table
    is_last_line_torn: bool

    @property
    def cost_us(self) -> dict[str, float]:
        """What observing took, microseconds a step; a step's own cost is written with the step after it."""
        costs = np.asarray(self.steps["observer_ns"])[1:] / 1000.0
        if not len(costs):
            return {}
        return {"mean": float(costs.mean()), "p50": float(np.median(costs)), "max": float(costs.max())}


def read_observer(content: bytes, *, where: str = layout.OBSERVER) -> ObserverRecords:
    """The records in an observer's file; RecordsError for what no observer of this format wrote."""
    lines = content.split(b"\n")
    is_torn = bool(lines.pop())
    if not lines:
        raise RecordsError("is empty: the server never made its scheduler", where=where)
    header = _parsed(lines[0], where, 1)
    if not isinstance(header, dict) or header.get("observer_format") != FORMAT:
        raise RecordsError("does not start with an observer's header", where=where)
    facts = cast("dict[str, Any]", header)
    if facts.get("columns") != SCHEMA.names:
        raise RecordsError(
            "has other columns than this version reads", where=where, hint="Use the release that wrote it"
        )
    rows = [_parsed(line, where, number) for number, line in enumerate(lines[1:], 2)]
    if not all(isinstance(row, list) and len(row) == len(SCHEMA) for row in rows):
        raise RecordsError("has a record of another length than its header says", where=where)
    table = _table(rows, where)
    _check_order(table, where)
    return ObserverRecords({key: value for key, value in facts.items() if key != "columns"}, table, is_torn)


def _table(rows: list[Any], where: str) -> pa.Table:
    columns: list[Any] = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in SCHEMA]
    at = SCHEMA.names.index("evictions")
    try:
        columns[at] = [[{"slot": slot, "caller": caller} for slot, caller in evicted] for evicted in columns[at]]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
        return pa.table(arrays, schema=SCHEMA)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        what = str(error).partition("\n")[0]
        raise RecordsError(f"has a record that no observer writes ({what})", where=where) from error


def load_observer(path: Path) -> ObserverRecords:
    """``read_observer`` of a file."""
    with RecordsError.on_os_error("cannot be read", where=path):
        return read_observer(path.read_bytes(), where=str(path))


def held_back(steps: pa.Table) -> pa.Table:
    """Every prefill that made running sessions wait: step, start_ns, duration_ns, others (sessions held back).

    The stack never mixes a prefill with decode, so each session already running waits the whole step. This is what log
    lines of one second's resolution cannot show.
    """
    kind = np.asarray(steps["kind"].to_pylist())
    start, end = np.asarray(steps["schedule_ns"]), np.asarray(steps["end_ns"])
    # The prefilled request itself is among the running ones once schedule() has returned.
    others = np.asarray(steps["running"]) - 1
    chosen = (kind == "prefill") & (others > 0)
    return pa.table(
        {
            "step": np.asarray(steps["step"])[chosen],
            "start_ns": start[chosen],
            "duration_ns": (end - start)[chosen],
            "others": others[chosen].astype(np.int32),
        }
    )


def _parsed(line: bytes, where: str, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordsError(f"line {number} is not a record", where=where) from error


def _check_order(table: pa.Table, where: str) -> None:
    steps = np.asarray(table["step"])
    if not np.array_equal(steps, np.arange(len(steps))):
        raise RecordsError(
            "its steps are not 0, 1, 2, ...: two servers wrote to it, or lines are missing",
            where=where,
            hint="Give every server a file of its own",
        )
