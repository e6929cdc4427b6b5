"""Plans as files: a header line, then one JSON line per session, so that two plans can be compared with ``diff``.

The bytes are canonical: one plan has one file content, its hash is in the header, and a file whose bytes do not
follow from what it says is refused. Nothing here draws or changes a plan.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from harness.errors import PlanError
from harness.model.plan.model import (
    FORMAT,
    HEADER,
    REQUEST_COLUMNS,
    WAIT_KINDS,
    Plan,
    RequestPlan,
    SessionPlan,
    WaitKind,
    canonical_lines,
)
from harness.outputs import write_atomic


def save_plan(plan: Plan, folder: Path) -> Path:
    """Write ``<folder>/<hash>.jsonl`` whole or not at all; RecordsError when the disk refuses."""
    return write_plan(plan, folder / f"{plan.hash}.jsonl")


def write_plan(plan: Plan, path: Path) -> Path:
    """Write the plan to ``path`` whole or not at all, and return ``path``.

    Raises RecordsError when the disk is full, read-only or the folder cannot be made; nothing is left behind then.
    """
    return write_atomic(path, canonical_lines(plan, plan.hash), what="the plan")


def read_plan(path: Path) -> Plan:
    """The plan in a file; raises PlanError when it cannot be read, is no plan, was cut off or was edited."""
    where = str(path)
    with PlanError.on_os_error("cannot be read", where=where, hint="Check the path"):
        content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    header = _header(lines[0] if lines else b"", where)
    if len(lines) - 1 < header["num_sessions"] or not content.endswith(b"\n"):
        raise PlanError(
            f"is cut off: {len(lines) - 1} of {header['num_sessions']} sessions",
            where=where,
            hint="Copy it again, or build it again from its workload and seed",
        )
    try:
        plan = _plan_from(header, lines[1:])
        is_as_written = plan.hash == header["hash"] and content == b"".join(canonical_lines(plan, plan.hash))
    except PlanError as error:
        raise PlanError(f"was edited: {error}", where=where, hint=_REBUILD) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise PlanError(f"was edited: {error}", where=where, hint=_REBUILD) from error
    if not is_as_written:
        raise PlanError(f"was edited: its content is not the one of hash {header['hash']}", where=where, hint=_REBUILD)
    if len(path.stem) == len(plan.hash) and path.stem != plan.hash and not path.stem.strip("0123456789abcdef"):
        raise PlanError(f"is named after another plan; its hash is {plan.hash}", where=where, hint="Rename it back")
    return plan


_REBUILD = "Build the plan you want from a workload instead; plan files are never edited"


def _header(line: bytes, where: str) -> dict[str, Any]:
    try:
        header: Any = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if isinstance(header, dict):
        fields = cast("dict[str, Any]", header)
        if (
            fields.get("format") == FORMAT
            and isinstance(fields.get("num_sessions"), int)
            and isinstance(fields.get("hash"), str)
        ):
            return fields
    raise PlanError(
        f"is not a plan file: its first line is no {FORMAT} header",
        where=where,
        hint="Give a file that `save_plan` wrote",
    )


def _plan_from(header: dict[str, Any], lines: list[bytes]) -> Plan:
    low, high = header["token_id_range"]
    derived = ("token_id_range", "num_sessions", "num_requests")
    return Plan(
        **{name: header[name] for name in HEADER if name not in derived},
        token_id_range=(low, high),
        sessions=tuple(_session_from(json.loads(line)) for line in lines),
        provenance=header["provenance"],
        block_tokens=header.get("block_tokens", 0),
    )


_KINDS: dict[str, WaitKind] = {kind[0]: kind for kind in WAIT_KINDS}


def _session_from(record: dict[str, Any]) -> SessionPlan:
    letters: str = record.get("kinds", "n" * (len(record["requests"]) + 1))
    kinds: list[WaitKind] = [_KINDS[letter] for letter in letters]
    aborts: dict[int, tuple[int, int]] = {place: (ns, tokens) for place, ns, tokens in record.get("aborts", ())}
    rows = zip(record["requests"], kinds[1:], strict=True)
    return SessionPlan(
        index=record["session"],
        start_offset_ns=record["start_offset_ns"],
        after=record.get("after"),
        continues=record.get("continues"),
        requests=tuple(_request_from(row, kind, *aborts.get(place, (0, 0))) for place, (row, kind) in enumerate(rows)),
        also_after=tuple(record.get("also_after", ())),
        start_kind=kinds[0],
        blocks=tuple(record.get("blocks", ())),
    )


def _request_from(columns: list[int], kind: WaitKind, abort_ns: int, abort_tokens: int) -> RequestPlan:
    if len(columns) != len(REQUEST_COLUMNS) or not all(
        type(number) is int for number in (*columns, abort_ns, abort_tokens)
    ):
        raise ValueError(f"{columns} is not [{', '.join(REQUEST_COLUMNS)}]")
    return RequestPlan(*columns, wait_kind=kind, abort_after_ns=abort_ns, abort_after_tokens=abort_tokens)
