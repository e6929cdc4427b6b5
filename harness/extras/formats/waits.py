"""Wait distributions counted from recordings: tool by tool of a TraceLab release, or all tools of any format."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.clock import NS_PER_MS
from harness.errors import SpecError
from harness.inputs import open_regular
from harness.model.plan.waits import parse_waits
from harness.model.spec.base import tomllib
from harness.model.traces.base import bounded_lines, opened, read_tables, sha256_of
from harness.model.traces.calls import ASK_A_PERSON
from harness.model.traces.importing import check_new, read_recordings
from harness.model.traces.values import parsed_json
from harness.outputs import write_atomic
from harness.processes import optional

if TYPE_CHECKING:
    import duckdb

_FOREIGN_STARTS = read_tables(Path(__file__).with_name("labels.toml"))["foreign-starts"]
_LATENCIES = ("tool_internal_latency_ms", "tool_wall_latency_ms")


def rounds_of(source: Path, tables: tuple[str, ...] = ()) -> Iterator[tuple[int, object]]:
    """(number from 1, round, None where it is not JSON) of every line or row; errors as ``import_tracelab``."""
    if is_duckdb(source):
        yield from enumerate(_rows(source, tables), 1)
        return
    with opened(source) as stream:
        for number, line in enumerate(bounded_lines(stream), 1):
            if line.strip():
                yield number, parsed_json(line)


def is_duckdb(source: Path) -> bool:
    """Whether a release is a DuckDB file, by its first bytes; SpecError for a foreign or unreadable file."""
    with opened(source, open_regular) as stream:
        start = stream.read(16)
    for magic, meaning in _FOREIGN_STARTS.items():
        if start.startswith(magic.encode("latin-1")):
            hint = "Give the release's JSONL, JSONL.gz or DuckDB file"
            raise SpecError(f"is {meaning}", where=str(source), hint=hint)
    return start[8:12] == b"DUCK"


def _rows(source: Path, wanted: tuple[str, ...]) -> Iterator[object]:
    """Every row as a round: an object with "tools"."""
    duckdb = optional("duckdb", "sql", str(source))
    try:
        with duckdb.connect(str(source), read_only=True, config={"memory_limit": "1GB"}) as connection:
            for query in _queries(connection, source, wanted):
                cursor = connection.execute(query)
                while batch := cursor.fetchmany(2_000):
                    yield from (_as_round(tools) for (tools,) in batch)
    except duckdb.Error as error:
        hint = "Close other programs that have it open, or use the release's JSONL"
        what = f"cannot be read as DuckDB ({str(error).splitlines()[0]})"
        raise SpecError(what, where=str(source), hint=hint) from error


def _as_round(tools: object) -> object:
    if not isinstance(tools, str):
        return {"tools": tools}
    parsed = parsed_json(tools.encode())
    # JSON's own null has no tools; a text that is not JSON is no round.
    return None if parsed is None and tools.strip() != "null" else {"tools": parsed}


def _queries(connection: duckdb.DuckDBPyConnection, source: Path, wanted: tuple[str, ...]) -> list[str]:
    """A query of the calls of each table that is read."""
    columns: dict[tuple[str, ...], dict[str, str]] = {}
    for *place, column, data_type in connection.execute(
        "SELECT database_name, schema_name, table_name, column_name, data_type FROM duckdb_columns() WHERE NOT internal"
        " AND database_name = current_database() ORDER BY ALL"
    ).fetchall():
        columns.setdefault(tuple(place), {})[column] = data_type
    names = sorted({place[-1] for place in columns})
    readable = {place: selected for place, types in columns.items() if (selected := _selected(types))}
    absent = ", ".join(sorted(set(wanted) - {place[-1] for place in readable}))
    if absent or not readable:
        looked_for = f"a `tools` column (a list of structs, or JSON) or the columns tool_name, {', '.join(_LATENCIES)}"
        what = f"has no table {absent}{' ' * bool(absent)}with tool calls; looked for {looked_for}; "
        what += f"it has {', '.join(names) or 'no table'}"
        raise SpecError(what, where=str(source), hint="Give the DuckDB file of a TraceLab release")
    best = min(preference for preference, _ in readable.values())
    chosen = [place for place in readable if (place[-1] in wanted if wanted else readable[place][0] == best)]
    if len(chosen) > 1 and not wanted:
        what = f"has several tables with tool calls: {', '.join(place[-1] for place in chosen)}"
        hint = "Name the tables to count (a view beside its table would be counted twice)"
        raise SpecError(what, where=str(source), hint=hint)
    quoted = {place: ".".join('"' + name.replace('"', '""') + '"' for name in place) for place in chosen}
    return [f"SELECT {readable[place][1]} AS tools FROM {quoted[place]}" for place in chosen]


def _selected(types: Mapping[str, str]) -> tuple[int, str] | None:
    """(preference, expression for a list of calls) of a table with these columns; None where it holds no calls."""
    tools = types.get("tools", "")
    if tools.startswith("STRUCT(") and tools.endswith("[]") and "tool_name" in tools:
        return 0, "tools"
    if tools in {"JSON", "VARCHAR", "JSON[]"}:
        return 1, "tools::VARCHAR"
    known = [f"'{name}': TRY_CAST({name} AS DOUBLE)" for name in _LATENCIES if name in types]
    return (2, f"[{{'tool_name': tool_name::VARCHAR, {', '.join(known)}}}]") if known and "tool_name" in types else None


HUMAN_TOOLS = (*ASK_A_PERSON, "TaskOutput")
CREDIT = "TraceLab, SyFI Lab, University of Washington (CC BY 4.0)"
QUANTILE_RULE = "linear between the two nearest calls, as numpy.percentile; latencies rounded to 1 us"
# Above 10^15 ms (30,000 years) a latency is a stamp or a slip, and not exact as a float.
MOST_MS = 1e15


class _Call(BaseModel):
    """A tool call of a release, as the executor and the wall clock timed it. A NaN is refused."""

    model_config = ConfigDict(strict=True)
    tool_name: str = Field(min_length=1)
    tool_internal_latency_ms: float | None = Field(default=None, gt=-MOST_MS, lt=MOST_MS)
    tool_wall_latency_ms: float | None = Field(default=None, gt=-MOST_MS, lt=MOST_MS)

    @property
    def latency_ms(self) -> float | None:
        """The executor's latency where there is one, else the wall difference."""
        return self.tool_wall_latency_ms if self.tool_internal_latency_ms is None else self.tool_internal_latency_ms


class _Round(BaseModel):
    """A row of a release; its other columns are passed over."""

    model_config = ConfigDict(strict=True)
    tools: list[_Call] | None = None


@dataclass(frozen=True)
class ToolQuantiles:
    """One tool: its calls with a latency, and their quantiles in ms."""

    name: str
    calls: int
    p50_ms: float
    p90_ms: float
    p99_ms: float


def _quantiles(name: str, latencies_ms: Sequence[float] | npt.NDArray[np.float64]) -> ToolQuantiles:
    p50, p90, p99 = (float(quantile) for quantile in np.percentile(latencies_ms, (50, 90, 99)))
    return ToolQuantiles(name, len(latencies_ms), p50, p90, p99)


@dataclass
class ImportSummary:
    """What was read, and left out: each call is in one of ``tools``, ``excluded``, ``non_positive`` and ``missing``."""

    source: str
    sha256: str = ""
    rows: int = 0
    calls: int = 0
    from_internal: int = 0
    from_wall: int = 0
    from_none: int = 0
    non_positive: Counter[str] = field(default_factory=Counter[str])
    missing: Counter[str] = field(default_factory=Counter[str])
    excluded: Counter[str] = field(default_factory=Counter[str])
    malformed: int = 0
    malformed_lines: list[int] = field(default_factory=list[int])
    tools: list[ToolQuantiles] = field(default_factory=list[ToolQuantiles])

    @property
    def used_calls(self) -> int:
        return sum(tool.calls for tool in self.tools)

    def lines(self) -> list[str]:
        """The summary for a person."""
        excluded, zero, missing = (each.total() for each in (self.excluded, self.non_positive, self.missing))
        report = [
            f"{self.source}: {self.rows} rows, {self.calls} tool calls (sha256 {self.sha256[:16]})",
            f"  used: {self.used_calls} calls of {len(self.tools)} tools",
            f"  latency from the executor: {self.from_internal}, from the wall clock: {self.from_wall}, "
            f"none: {self.from_none}",
            f"  left out: {excluded} calls of tools that wait for a person, {zero} with a latency of zero or less, "
            f"{missing} without one",
        ]
        if self.malformed:
            named = ", ".join(map(str, self.malformed_lines))
            more = " ..." if self.malformed > len(self.malformed_lines) else ""
            report.append(f"  not readable, skipped: {self.malformed} rows (lines {named}{more})")
        report.append(f"  credit: {CREDIT}")
        return report


def import_tracelab(  # noqa: PLR0913  # keywords with defaults, of one call
    source: Path,
    output: Path,
    *,
    name: str,
    tables: tuple[str, ...] = (),
    max_malformed: int = 100,
    may_replace: bool = True,
) -> ImportSummary:
    """Write ``output``, a wait distribution called ``name``, from a release's JSONL, JSONL.gz or DuckDB file.

    tables: of a DuckDB file, where several could be meant. Raises SpecError for a file that is unreadable, foreign,
    without a usable call, or with more than ``max_malformed`` unreadable rounds; RecordsError as ``write_atomic``.
    """
    summary = summarise_tracelab(source, tables=tables, max_malformed=max_malformed)
    note = (
        f"# Tool waits counted from {summary.source}. Credit: {CREDIT}.\n"
        "# Latency: as the executor reported it where it did, else the wall difference.\n"
        "# Between p50, p90 and p99 the inverse CDF is log-linear; above flat; below p50 log-normal.\n\n"
    )
    excluded = [{"name": tool, "calls": calls} for tool, calls in sorted(summary.excluded.items())]
    head = {"name": name, "description": f"tool calls of {summary.source}", "provenance": _provenance(summary)}
    waits = {"distribution": "mixture", "tool": [asdict(tool) for tool in summary.tools]}
    _write_waits(output, head | {"waits": waits, "excluded": excluded}, note, may_replace=may_replace)
    return summary


def summarise_tracelab(source: Path, *, tables: tuple[str, ...] = (), max_malformed: int = 100) -> ImportSummary:
    """Read a release and compute the quantiles of every tool, the most called first. Errors: ``import_tracelab``."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in source.name)
    summary, latencies_us = ImportSummary(printable), dict[str, "array[int]"]()
    has_tools = False
    for number, record in rounds_of(source, tables):
        try:
            row = _Round.model_validate(record)
        except ValidationError as error:
            summary.malformed += 1
            summary.malformed_lines = [*summary.malformed_lines, number][:20]
            if summary.malformed > max_malformed:
                lines = ", ".join(map(str, summary.malformed_lines[:5]))
                what = f"is not a TraceLab release: {summary.malformed} of the first {number} lines are no JSON "
                what += f"objects with a `tools` list (lines {lines} ...)"
                hint = "Give the release's round_trace JSONL (gzipped or not) or its DuckDB file"
                raise SpecError(what, where=str(source), hint=hint) from error
            continue
        summary.rows += 1
        has_tools = has_tools or "tools" in row.model_fields_set
        if not has_tools and summary.rows >= 10_000:
            break
        for call in row.tools or ():
            _count(summary, latencies_us, call)
    if not latencies_us:
        excluded, missing, zero = (each.total() for each in (summary.excluded, summary.missing, summary.non_positive))
        what = f"holds {summary.calls} tool calls, none of which can be used: {excluded} wait for a person, "
        what += f"{missing} have no latency, {zero} one of zero or less"
        looked_for = f"looked for tools[].tool_name, {', '.join(_LATENCIES)}"
        what = what if summary.calls else f"holds no tool call in {summary.rows} rows; {looked_for}"
        raise SpecError(what, where=str(source), hint="Give a TraceLab round trace (JSONL, JSONL.gz or DuckDB)")
    tools = [_quantiles(tool, np.frombuffer(us, np.int64) / 1000) for tool, us in latencies_us.items()]
    summary.tools = sorted(tools, key=lambda tool: (-tool.calls, tool.name))
    summary.sha256 = sha256_of(source)
    return summary


def _count(summary: ImportSummary, latencies_us: dict[str, array[int]], call: _Call) -> None:
    tool, latency_ms, is_internal = call.tool_name, call.latency_ms, call.tool_internal_latency_ms is not None
    summary.calls += 1
    summary.from_internal += is_internal
    summary.from_wall += latency_ms is not None and not is_internal
    summary.from_none += latency_ms is None
    if tool in HUMAN_TOOLS:
        summary.excluded[tool] += 1
    elif latency_ms is None:
        summary.missing[tool] += 1
    elif latency_ms <= 0:
        summary.non_positive[tool] += 1
    else:
        latencies_us.setdefault(tool, array("q")).append(max(round(latency_ms * 1000), 1))


def _provenance(summary: ImportSummary) -> dict[str, Any]:
    read = {"file": summary.source, "sha256": summary.sha256, "rows": summary.rows, "tool_calls": summary.calls}
    used = {"calls_in_this_table": summary.used_calls, "latency_from_executor": summary.from_internal}
    used |= {"latency_from_wall_clock": summary.from_wall, "latency_missing": summary.from_none}
    left = {"zero_or_less": summary.non_positive, "missing": summary.missing, "human_waiting": summary.excluded}
    left_out = {f"left_out_{why}": tools.total() for why, tools in left.items()}
    by_tool = {f"{why}_by_tool": dict(sorted(left[why].items())) for why in ("zero_or_less", "missing") if left[why]}
    head = {"source": CREDIT, "licence": "CC BY 4.0"}
    return head | read | used | left_out | {"malformed_rows": summary.malformed, "quantiles": QUANTILE_RULE} | by_tool


def import_recorded_waits(
    sources: Iterable[Path], output: Path, *, name: str, kind: str = "auto", may_replace: bool = True
) -> dict[str, Any]:
    """Write ``output``, the waits for tools of recorded agents as a distribution; returns what was counted.

    Raises SpecError as ``read_recordings`` does, when no tool was waited for, and where another file is in the way.
    """
    chosen, recordings, notes = read_recordings(sources, kind=kind)
    requests = [request for recording in recordings for request in recording.requests]
    waits_ns = [request.wait_ns for request in requests if request.wait_kind == "tool" and not request.is_drawn]
    waited_ms = [wait_ns / NS_PER_MS for wait_ns in waits_ns if wait_ns > 0]
    if not waited_ms:
        hint = "Production traces hold arrivals only; take agent logs, spans or a TraceLab release"
        raise SpecError(f"no tool was waited for in {len(requests)} requests of {chosen}", where=name, hint=hint)
    counted = {"waits": len(waited_ms), "left_out_zero": len(waits_ns) - len(waited_ms)}
    counted["requests_without_a_tool_wait"] = len(requests) - len(waits_ns)
    rule = {"quantiles": "numpy.percentile, linear"}
    provenance = {"format": chosen, "files": notes.num_files} | counted | rule
    described = f"waits for tools of recorded agents ({chosen})"
    head = {"name": name, "description": described, "provenance": provenance}
    waits = {"distribution": "mixture", "tool": [asdict(_quantiles("tools", waited_ms))]}
    _write_waits(output, head | {"waits": waits}, may_replace=may_replace)
    return provenance


def _write_waits(output: Path, waits: dict[str, Any], note: str = "", *, may_replace: bool) -> None:
    """A distribution with where it comes from; without a time stamp, so that the same input gives the same file."""
    text = note + tomli_w.dumps(waits)
    parse_waits(tomllib.loads(text), where=str(output))  # Never hand out a file that would be refused.
    if output.is_file() and output.read_bytes() == text.encode():
        return
    check_new(output, may_replace=may_replace)
    write_atomic(output, [text.encode()], what="the wait distribution")
