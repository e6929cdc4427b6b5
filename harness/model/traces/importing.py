"""Imports recorded files of any known format as one trace: finds the reader, reads, and writes the trace file.

Files of two formats in one call are refused by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from harness.errors import PlanError, SpecError
from harness.model.traces import claude
from harness.model.traces.account import PLACEHOLDER_TOKENS, ReadNotes, ReadOptions
from harness.model.traces.base import Progress, TraceFormat, json_records, sha256_of
from harness.model.traces.recording import (
    Recording,
    TraceHead,
    check_recording,
    trace_sha256,
    write_trace,
)
from harness.plugins import Registry

LINES_LOOKED_AT = 50
# In production traces about one answer in a hundred has 1 or 2 tokens.
SHARE_OF_SHORT_ANSWERS = 0.1
TRACE_FORMATS: Mapping[str, TraceFormat] = Registry("trace_formats", {"claude": claude.FORMAT})
"""By name; those of plug-ins come last."""


def import_trace(  # noqa: PLR0913  # keywords with defaults, of one call
    sources: Iterable[Path],
    output: Path,
    *,
    name: str,
    kind: str = "auto",
    progress: Progress | None = None,
    options: ReadOptions | None = None,
    may_replace: bool = True,
) -> tuple[TraceHead, ReadNotes]:
    """Read ``sources`` and write one trace file; errors as ``read_recordings``.

    may_replace: whether another trace of the same name is replaced; SpecError where there is one and it may not be.
    """
    chosen, recordings, notes = read_recordings(sources, kind=kind, progress=progress, options=options)
    chosen_format = TRACE_FORMATS[chosen]
    has_blocks = any(request.blocks for recording in recordings for request in recording.requests)
    block_tokens = chosen_format.block_tokens if notes.block_tokens is None else notes.block_tokens
    head = TraceHead(
        name=name,
        source_format=chosen,
        arrivals=notes.arrivals or chosen_format.arrivals,
        block_tokens=block_tokens if has_blocks else 0,
        dropped=dict(notes.dropped + notes.left),
        broken=dict(notes.broken),
        labels=notes.labels,
        rows=notes.rows,
        passed=dict(notes.passed),
    )
    if may_replace or not output.exists() or sha256_of(output) != trace_sha256(head, recordings):
        check_new(output, may_replace=may_replace)
        write_trace(output, head, recordings)
    return head, notes


def check_new(output: Path, *, may_replace: bool) -> None:
    """SpecError where ``output`` is there and may not be replaced."""
    if output.exists() and not may_replace:
        raise SpecError(
            "is there already, with other content",
            where=str(output),
            hint="Replace it with --force, or name another file",
        )


def read_recordings(
    sources: Iterable[Path],
    *,
    kind: str = "auto",
    progress: Progress | None = None,
    options: ReadOptions | None = None,
) -> tuple[str, list[Recording], ReadNotes]:
    """(format, recordings, what was left out) of files, or of folders that are searched.

    Raises SpecError for an unknown or mixed format, for nothing to read, and when every line is broken.
    """
    notes = ReadNotes(options or ReadOptions())
    found = list(_files(sources, kind))
    if not found:
        raise SpecError("no trace file is there", where=", ".join(map(str, sources)), hint="Name files or a folder")
    chosen, files = _one_format(_distinct(found, notes), kind, notes)
    recordings = list(_sound(TRACE_FORMATS[chosen].read(files, notes, progress), notes))
    notes.check(sum(len(recording.requests) for recording in recordings))
    if not recordings:
        raise _nothing_read(files, chosen, notes, is_given=kind != "auto")
    answers = [request.generate_tokens for recording in recordings for request in recording.requests]
    num_short = sum(tokens <= PLACEHOLDER_TOKENS for tokens in answers)
    if num_short > SHARE_OF_SHORT_ANSWERS * len(answers):
        notes.assume(f"answers of 1 or 2 tokens, of {len(answers)}: they may be placeholders", num_short)
    return chosen, recordings, notes


def _one_format(files: list[tuple[Path, bool]], kind: str, notes: ReadNotes) -> tuple[str, list[Path]]:
    """(format, files of it); a file that a folder held and that is in no known format is counted and left out."""
    if kind != "auto":
        return kind, [path for path, _ in files]
    kinds: dict[Path, str] = {}
    for path, is_searched in files:
        found = detect(path)
        if found is not None:
            kinds[path] = found
        elif is_searched or (path.stat().st_size == 0 and len(files) > 1):
            notes.leave("files in no known format", str(path))
        else:
            raise _unknown_format(path)
    if not kinds:
        raise _unknown_format(files[0][0])
    if len(set(kinds.values())) > 1:
        first, other = next((a, b) for a in kinds for b in kinds if kinds[a] != kinds[b])
        raise SpecError(
            f"two formats: {first.name} is {kinds[first]}, {other.name} is {kinds[other]}",
            where=str(other.parent),
            hint="Import each format by itself, or say which: --format",
        )
    return next(iter(kinds.values())), list(kinds)


def _sound(recordings: Iterable[Recording], notes: ReadNotes) -> Iterator[Recording]:
    """Recordings that a trace file may hold; a reader checks numbers one by one, and their sums can be absurd."""
    for place, recording in enumerate(recordings):
        try:
            check_recording(recording)
        except PlanError:
            notes.drop("requests of a recording whose numbers make none", f"recording {place}", len(recording.requests))
        else:
            yield recording


def _files(sources: Iterable[Path], kind: str) -> Iterator[tuple[Path, bool]]:
    """Each file, and whether it was found in a folder rather than named."""
    forms = TRACE_FORMATS.values() if kind == "auto" else (TRACE_FORMATS[kind],)
    suffixes = tuple({suffix for form in forms for suffix in form.suffixes})
    for source in sources:
        if source.is_dir():
            for path in sorted(path for path in source.rglob("*") if path.name.endswith(suffixes) and path.is_file()):
                yield path, True
        elif source.exists():
            yield source, False
        else:
            raise SpecError("is not there", where=str(source), hint="Check the path")


def _distinct(files: list[tuple[Path, bool]], notes: ReadNotes) -> list[tuple[Path, bool]]:
    """The files without those that are given twice, by path or by content."""
    sizes = Counter(path.stat().st_size for path, _ in files)
    kept: list[tuple[Path, bool]] = []
    seen: set[Path | str] = set()
    for path, is_searched in files:
        # Only files of the same size can be the same.
        content = sha256_of(path) if sizes[path.stat().st_size] > 1 and path.stat().st_size else path.resolve()
        if content in seen or path.resolve() in seen:
            notes.leave("files that were given twice", str(path))
        else:
            kept.append((path, is_searched))
        seen |= {content, path.resolve()}
    return kept


def detect(path: Path) -> str | None:
    """The format of a file: the first, special ones before all others, whose keys one of its first records has.

    A format without keys is known by the ends of its files' names. None where no known format fits.
    """
    if of_name := [name for name, form in TRACE_FORMATS.items() if not form.keys and path.name.endswith(form.suffixes)]:
        return of_name[0]
    found: set[str] = set()
    for place, (_, record) in enumerate(json_records(path, ReadNotes())):
        found |= {name for name, form in TRACE_FORMATS.items() if any(keys <= record.keys() for keys in form.keys)}
        if place >= LINES_LOOKED_AT:
            break
    in_order = sorted(TRACE_FORMATS, key=lambda name: not TRACE_FORMATS[name].is_special)
    return next((name for name in in_order if name in found), None)


def _nothing_read(files: Sequence[Path], chosen: str, notes: ReadNotes, *, is_given: bool) -> SpecError:
    """What the rows were, since none is a request; no option is proposed that was given."""
    counts = notes.broken + notes.dropped + notes.left + notes.unknown + notes.passed
    reasons = "; ".join(f"{count} x {reason}" for reason, count in counts.most_common(4))
    nothing = "it is empty" if all(path.stat().st_size == 0 for path in files) else f"{notes.num_rows} rows"
    hint = f"Say which format it is: --format {'|'.join(TRACE_FORMATS)}"
    if is_given:
        found = next((name for path in files if (name := detect(path)) is not None), None)
        looks = f"has the keys of {found}" if found not in (None, chosen) else "has none of another format's keys"
        hint = f"The file {looks}; what {chosen} is made of: harness trace formats {chosen}"
    return SpecError(f"no request could be read as {chosen} ({reasons or nothing})", where=str(files[0]), hint=hint)


def _unknown_format(path: Path) -> SpecError:
    if path.stat().st_size == 0:
        return SpecError("is empty", where=str(path), hint="Give a recording with requests")
    hint = f"Say which with --format: {', '.join(TRACE_FORMATS)}"
    return SpecError("is in no known format", where=str(path), hint=hint)
