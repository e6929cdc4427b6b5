"""Imports recorded files of any known format as one trace: finds the reader, reads, and writes the trace file.

Files of two formats in one call are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from harness.errors import PlanError, SpecError
from harness.plugins import Registry
from harness.traces import columns, mooncake, otel, rounds
from harness.traces.base import Progress, TraceFormat, json_lines, record_of, whole_json
from harness.traces.recording import ReadNotes, Recording, TraceHead, check_recording, write_trace

LINES_LOOKED_AT = 50
TRACE_FORMATS: Mapping[str, TraceFormat] = Registry(
    "trace_formats",
    {
        "weka": mooncake.WEKA,
        "tracelab": rounds.TRACELAB,
        "claude": rounds.CLAUDE,
        "codex": rounds.CODEX,
        "agentic-mooncake": mooncake.AGENTIC,
        "bailian": mooncake.BAILIAN,
        "mooncake": mooncake.MOONCAKE,
        "otel": otel.FORMAT,
        "csv": columns.FORMAT,
    },
)
"""By name; those of plug-ins come last. The format of a record is the first whose keys it has."""


def import_trace(
    sources: Iterable[Path], output: Path, *, name: str, kind: str = "auto", progress: Progress | None = None
) -> tuple[TraceHead, ReadNotes]:
    """Read ``sources`` and write one trace file; errors as ``read_recordings``."""
    chosen, recordings, notes = read_recordings(sources, kind=kind, progress=progress)
    chosen_format = TRACE_FORMATS[chosen]
    has_blocks = any(request.blocks for recording in recordings for request in recording.requests)
    head = TraceHead(
        name=name,
        source_format=chosen,
        arrivals=chosen_format.arrivals,
        block_tokens=chosen_format.block_tokens if has_blocks else 0,
        dropped=dict(notes.dropped),
        broken=dict(notes.broken),
        labels=tuple(sorted(notes.labels)),
    )
    write_trace(output, head, recordings)
    return head, notes


def read_recordings(
    sources: Iterable[Path], *, kind: str = "auto", progress: Progress | None = None
) -> tuple[str, list[Recording], ReadNotes]:
    """(format, recordings, what was left out) of files, or of folders that are searched.

    Raises SpecError for an unknown or mixed format, for nothing to read, and when every line is broken.
    """
    files = list(_files(sources, kind))
    if not files:
        raise SpecError("no trace file is there", where=", ".join(map(str, sources)), hint="Name files or a folder")
    kinds = {path: detect(path) if kind == "auto" else kind for path in files}
    if len(set(kinds.values())) > 1:
        first, other = next((a, b) for a in files for b in files if kinds[a] != kinds[b])
        raise SpecError(
            f"two formats: {first.name} is {kinds[first]}, {other.name} is {kinds[other]}",
            where=str(other.parent),
            hint="Import each format by itself, or say which: --format",
        )
    chosen = next(iter(kinds.values()))
    notes = ReadNotes()
    recordings = list(_sound(TRACE_FORMATS[chosen].read(files, notes, progress), notes))
    if not recordings:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in (notes.broken + notes.dropped).most_common(3))
        is_empty = all(path.stat().st_size == 0 for path in files)
        nothing = "it is empty" if is_empty else "no record in it has the keys of this format"
        raise SpecError(
            f"no request could be read as {chosen} ({reasons or nothing})",
            where=str(files[0]),
            hint=f"Say which format it is: --format {'|'.join(TRACE_FORMATS)}",
        )
    return chosen, recordings, notes


def _sound(recordings: Iterable[Recording], notes: ReadNotes) -> Iterator[Recording]:
    """Recordings that a trace file may hold; a reader checks numbers one by one, and their sums can be absurd."""
    for place, recording in enumerate(recordings):
        try:
            check_recording(recording)
        except PlanError:
            notes.drop("a recording whose numbers make no request", f"recording {place}")
        else:
            yield recording


def _files(sources: Iterable[Path], kind: str) -> Iterator[Path]:
    forms = TRACE_FORMATS.values() if kind == "auto" else (TRACE_FORMATS[kind],)
    suffixes = tuple({suffix for form in forms for suffix in form.suffixes})
    for source in sources:
        if source.is_dir():
            yield from sorted(path for path in source.rglob("*") if path.name.endswith(suffixes) and path.is_file())
        elif source.exists():
            yield source
        else:
            raise SpecError("is not there", where=str(source), hint="Check the path")


def detect(path: Path) -> str:
    """The format of a file, by the keys of its first records; raises SpecError when it has none that is known."""
    if path.suffix == ".csv":
        return "csv"
    if path.suffix == ".json" and "spans" in record_of(whole_json(path)):
        return "otel"
    notes = ReadNotes()
    for place, (_, record) in enumerate(json_lines(path, notes)):
        for name, form in TRACE_FORMATS.items():
            if any(keys <= record.keys() for keys in form.keys):
                return name
        if place >= LINES_LOOKED_AT:
            break
    known = ", ".join(TRACE_FORMATS)
    raise SpecError("is in no known format", where=str(path), hint=f"Say which with --format: {known}")
