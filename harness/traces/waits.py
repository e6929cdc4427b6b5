"""Wait distributions counted from recordings: tool by tool of a TraceLab release, or all tools together of any format.

Every call or wait that is left out is counted with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import tomli_w

from harness.clock import NS_PER_MS
from harness.errors import SpecError
from harness.plan import files
from harness.plan.files import write_atomic
from harness.plan.waits import parse_waits
from harness.spec.base import tomllib
from harness.traces.importing import read_recordings
from harness.traces.release import (
    MAX_PENDING,
    LatencyCounts,
    RoundLine,
    is_duckdb,
    read_duckdb_calls,
    round_lines,
    sha256_of,
)

HUMAN_TOOLS = ("AskUserQuestion", "ExitPlanMode", "request_user_input", "TaskOutput")
CREDIT = "TraceLab, SyFI Lab, University of Washington (CC BY 4.0)"
QUANTILE_RULE = "linear between the two nearest calls, as numpy.percentile; latencies rounded to 1 us"
NUM_NAMED_LINES = 20
ROWS_BEFORE_FOREIGN = 10_000


@dataclass(frozen=True)
class ToolQuantiles:
    """One tool of a release: its calls with a latency, and their quantiles in ms."""

    name: str
    calls: int
    p50_ms: float
    p90_ms: float
    p99_ms: float


@dataclass
class ImportSummary:
    """What was read and what was left out. Every call is in exactly one of ``tools``, ``excluded``,
    ``non_positive`` and ``missing``.

    from_internal, from_wall, from_none: all calls by where their latency comes from (the executor's own report, else
    the wall difference, else nowhere). non_positive, missing: calls, by tool, of zero or less, and without one.
    """

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
        excluded, zero, missing = (sum(c.values()) for c in (self.excluded, self.non_positive, self.missing))
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
            at_lines = f" (lines {named}{more})" if named else ""
            report.append(f"  not readable, skipped: {self.malformed} rows{at_lines}")
        report.append(f"  credit: {CREDIT}")
        return report


def import_tracelab(
    source: Path,
    output: Path,
    *,
    name: str,
    tables: tuple[str, ...] = (),
    max_malformed: int = 100,
) -> ImportSummary:
    """Write ``output``, a wait distribution called ``name``, from a release's JSONL, JSONL.gz or DuckDB file.

    tables: which tables of a DuckDB file to read; needed only when several could be meant.
    Raises SpecError when the file is unreadable, foreign, holds no usable call, or has more than ``max_malformed``
    unreadable lines; RecordsError when ``output`` cannot be written. Nothing is written then.
    """
    summary = summarise_tracelab(source, tables=tables, max_malformed=max_malformed)
    text = wait_file_text(summary, name)
    parse_waits(tomllib.loads(text), where=str(output))  # Never hand out a file that would be refused.
    files.write_atomic(output, iter([text.encode()]), what="the wait distribution")
    return summary


def summarise_tracelab(
    source: Path,
    *,
    tables: tuple[str, ...] = (),
    max_malformed: int = 100,
    max_pending: int = MAX_PENDING,
) -> ImportSummary:
    """Read a release and compute the quantiles of every tool, the most called first. Errors: ``import_tracelab``.

    max_pending: how many distinct latencies to collect before they are stored.
    """
    is_database = is_duckdb(source)
    summary = ImportSummary(source.name, sha256_of(source))
    with LatencyCounts(max_pending) as counts:
        calls = _Calls(summary, counts)
        if is_database:
            _count_duckdb(source, tables, calls)
        else:
            _count_lines(source, calls, max_malformed)
        quantiles_us = counts.quantiles_us((0.5, 0.9, 0.99))
    if not quantiles_us:
        raise _nothing_found(source, summary)
    summary.tools = [
        ToolQuantiles(tool, total, *(quantile / 1000 for quantile in of_tool))
        for tool, (total, of_tool) in sorted(quantiles_us.items(), key=lambda item: (-item[1][0], item[0]))
    ]
    return summary


@dataclass
class _Calls:
    """Sorts calls into used, excluded, non-positive and missing."""

    summary: ImportSummary
    counts: LatencyCounts

    def add(self, tool: str, internal_ms: float | None, wall_ms: float | None, count: int = 1) -> None:
        """Count one tool call: the executor's latency where there is one, else the wall difference."""
        summary = self.summary
        summary.calls += count
        latency_ms = wall_ms if internal_ms is None else internal_ms
        if internal_ms is not None:
            summary.from_internal += count
        elif wall_ms is not None:
            summary.from_wall += count
        else:
            summary.from_none += count
        if tool in HUMAN_TOOLS:
            summary.excluded[tool] += count
        elif latency_ms is None:
            summary.missing[tool] += count
        elif latency_ms <= 0:
            summary.non_positive[tool] += count
        else:
            self.counts.add(tool, max(round(latency_ms * 1000), 1), count)


def _count_duckdb(source: Path, tables: tuple[str, ...], calls: _Calls) -> None:
    with read_duckdb_calls(source, tables) as release:
        calls.summary.rows = release.num_rows
        calls.summary.malformed = release.num_malformed
        for call in release.calls():
            calls.add(*call)


def _count_lines(source: Path, calls: _Calls, max_malformed: int) -> None:
    summary = calls.summary
    has_tools = False
    for line in round_lines(source):
        tools = _tools_of(line)
        if tools is None:
            summary.malformed += 1
            summary.malformed_lines = [*summary.malformed_lines, line.number][:NUM_NAMED_LINES]
            if summary.malformed > max_malformed:
                raise _too_many_malformed(source, summary, line)
            continue
        summary.rows += 1
        has_tools = has_tools or "tools" in cast("dict[str, Any]", line.record)
        if not has_tools and summary.rows >= ROWS_BEFORE_FOREIGN:
            raise _nothing_found(source, summary)
        for call in tools:
            calls.add(*call)


_Call = tuple[str, "float | None", "float | None"]


def _tools_of(line: RoundLine) -> list[_Call] | None:
    """The tool calls of one line, or None when it is not a round: every tool is read before any is counted."""
    if not isinstance(line.record, dict):
        return None
    tools = cast("dict[str, Any]", line.record).get("tools")
    if tools is None:
        return []
    if not isinstance(tools, list):
        return None
    calls: list[_Call] = []
    for tool in cast("list[Any]", tools):
        if not isinstance(tool, dict):
            return None
        record = cast("dict[str, Any]", tool)
        name = record.get("tool_name")
        latencies = [record.get("tool_internal_latency_ms"), record.get("tool_wall_latency_ms")]
        if not isinstance(name, str) or not name or not all(_is_latency(latency) for latency in latencies):
            return None
        internal_ms, wall_ms = (None if latency is None else float(latency) for latency in latencies)
        calls.append((name, internal_ms, wall_ms))
    return calls


def _is_latency(latency: object) -> bool:
    if latency is None:
        return True
    # Past 10^15 ms (30,000 years) it is a stamp or a slip, and no longer exact as a float.
    return isinstance(latency, int | float) and not isinstance(latency, bool) and abs(latency) < 1e15  # a NaN fails too


def _too_many_malformed(source: Path, summary: ImportSummary, line: RoundLine) -> SpecError:
    return SpecError(
        f"is not a TraceLab release: {summary.malformed} of the first {line.number} lines are no JSON objects with a "
        f"`tools` list (lines {', '.join(map(str, summary.malformed_lines[:5]))} ...)",
        where=str(source),
        hint="Give the release's round_trace JSONL (gzipped or not) or its DuckDB file",
    )


def _nothing_found(source: Path, summary: ImportSummary) -> SpecError:
    if summary.calls:
        what = (
            f"holds {summary.calls} tool calls, none of which can be used: "
            f"{sum(summary.excluded.values())} wait for a person, {sum(summary.missing.values())} have no latency, "
            f"{sum(summary.non_positive.values())} one of zero or less"
        )
    else:
        what = (
            f"holds no tool call in {summary.rows} rows; looked for "
            "tools[].tool_name, tool_internal_latency_ms, tool_wall_latency_ms"
        )
    return SpecError(what, where=str(source), hint="Give a TraceLab round trace (JSONL, JSONL.gz or DuckDB)")


def wait_file_text(summary: ImportSummary, name: str) -> str:
    """The distribution as TOML, with where it comes from; no time stamp, so that the same input gives the same file."""
    provenance: dict[str, str | int] = {
        "source": CREDIT,
        "licence": "CC BY 4.0",
        "file": summary.source,
        "sha256": summary.sha256,
        "rows": summary.rows,
        "tool_calls": summary.calls,
        "calls_in_this_table": summary.used_calls,
        "latency_from_executor": summary.from_internal,
        "latency_from_wall_clock": summary.from_wall,
        "latency_missing": summary.from_none,
        "left_out_zero_or_less": sum(summary.non_positive.values()),
        "left_out_missing": sum(summary.missing.values()),
        "left_out_human_waiting": sum(summary.excluded.values()),
        "malformed_rows": summary.malformed,
        "quantiles": QUANTILE_RULE,
    }
    apart = {"zero_or_less_by_tool": summary.non_positive, "missing_by_tool": summary.missing}
    table: dict[str, Any] = {
        "name": name,
        "description": f"tool calls of {summary.source}",
        "provenance": {**provenance, **{key: dict(sorted(tools.items())) for key, tools in apart.items() if tools}},
        "waits": {"law": "mixture", "tool": [asdict(tool) for tool in summary.tools]},
        "excluded": [{"name": tool, "calls": calls} for tool, calls in sorted(summary.excluded.items())],
    }
    return (
        f"# Tool waits counted from {_comment(summary.source)}. Credit: {CREDIT}.\n"
        "# Latency: as the executor reported it where it did, else the wall difference.\n"
        "# Between p50, p90 and p99 the inverse CDF is log-linear; above flat; below p50 log-normal.\n\n"
        f"{tomli_w.dumps(_encodable(table))}"
    )


def _encodable(value: Any) -> Any:
    """The same value with what UTF-8 cannot hold (lone surrogates of a trace's JSON) replaced."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        members: dict[Any, Any] = value
        return {_encodable(key): _encodable(member) for key, member in members.items()}
    return [_encodable(member) for member in value] if isinstance(value, list) else value


def _comment(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text.encode("utf-8", "replace").decode())


@dataclass(frozen=True, slots=True)
class RecordedWaits:
    """What was counted: waits for tools of more than nothing, those of nothing, and requests without such a wait."""

    source_format: str
    num_waits: int
    num_zero: int
    num_other: int


def import_recorded_waits(sources: Iterable[Path], output: Path, *, name: str, kind: str = "auto") -> RecordedWaits:
    """Write ``output``, the waits for tools of recorded agents as a distribution.

    Raises SpecError as ``read_recordings`` does, and when no tool was waited for.
    """
    chosen, recordings, notes = read_recordings(sources, kind=kind)
    requests = [one for recording in recordings for one in recording.requests]
    waits_ns = [one.wait_ns for one in requests if one.wait_kind == "tool"]
    waited_ms = np.array([wait_ns / NS_PER_MS for wait_ns in waits_ns if wait_ns > 0])
    if not len(waited_ms):
        raise SpecError(
            f"no tool was waited for in {len(requests)} requests of {chosen}",
            where=name,
            hint="Production traces hold arrivals only; take agent logs, spans or a TraceLab release",
        )
    counted = RecordedWaits(chosen, len(waited_ms), len(waits_ns) - len(waited_ms), len(requests) - len(waits_ns))
    p50, p90, p99 = (float(quantile) for quantile in np.percentile(waited_ms, (50, 90, 99)))
    table = {
        "name": name,
        "description": f"waits for tools of recorded agents ({chosen})",
        "provenance": {
            "format": chosen,
            "files": notes.num_files,
            "waits": counted.num_waits,
            "left_out_zero": counted.num_zero,
            "requests_without_a_tool_wait": counted.num_other,
            "quantiles": "numpy.percentile, linear",
        },
        "waits": {
            "law": "mixture",
            "tool": [{"name": "tools", "calls": counted.num_waits, "p50_ms": p50, "p90_ms": p90, "p99_ms": p99}],
        },
    }
    text = tomli_w.dumps(table)
    parse_waits(tomllib.loads(text), where=str(output))  # Never hand out a file that would be refused.
    write_atomic(output, iter([text.encode()]), what="the wait distribution")
    return counted
