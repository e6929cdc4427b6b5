"""Imports recorded files of one known format as a trace: finds the reader, reads, and writes the trace file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from harness.errors import PlanError, SpecError
from harness.model.traces import base, claude
from harness.model.traces.account import NO_TOKEN, PLACEHOLDER_TOKENS, SHORT, TYPE_NAME, ReadNotes, ReadOptions
from harness.model.traces.base import Progress, TraceFormat, by_type, json_records, opened, read_tables, sha256_of
from harness.model.traces.recording import Arrivals, Recording, TraceHead, check_recording, trace_sha256, write_trace
from harness.model.traces.values import list_of, parsed_json, record_of
from harness.plugins import Registry

LINES_LOOKED_AT = 50
# What the ends of files' names say of files that no reader takes.
OTHER_ENDS = by_type(read_tables(Path(__file__).with_name("others.toml"))["ends"])
# A file of another format in a folder with so many times its calls is a stray.
STRAY_SHARE = 10
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
        hint = "Replace it with --force, or name another file"
        raise SpecError("is there already, with other content", where=str(output), hint=hint)


def read_recordings(
    sources: Iterable[Path], *, kind: str = "auto", progress: Progress | None = None, options: ReadOptions | None = None
) -> tuple[str, list[Recording], ReadNotes]:
    """(format, recordings, what was left out) of files, or of folders that are searched.

    Raises SpecError for an unknown or mixed format, for nothing to read, and when every line is broken.
    """
    notes = ReadNotes(options or ReadOptions(), progress=progress or (lambda _: None))
    found = list(_files(sources, kind, notes))
    if not found:
        left = "; ".join(f"{count} {reason}" for reason, count in notes.left.most_common(4))
        what = f"no trace file is there ({left})" if left else "no trace file is there"
        hint = "Name a file by itself to read what it is" if left else "Name files or a folder"
        raise SpecError(what, where=", ".join(map(str, sources)), hint=hint)
    chosen, files = _one_format(_distinct(found, notes), kind, notes)
    notes.known = TRACE_FORMATS[chosen].known
    recordings = list(_sound(TRACE_FORMATS[chosen].read(files, notes, progress), notes))
    if notes.options.time_unit_ns and not notes.has_bare_times:
        raise SpecError("has no bare numbers of time", where=str(files[0]), hint="Leave --time-unit out")
    answers = [request.generate_tokens for recording in recordings for request in recording.requests]
    num_short = sum(tokens <= PLACEHOLDER_TOKENS for tokens in answers) - notes.assumed[NO_TOKEN] - notes.assumed[SHORT]
    if num_short > SHARE_OF_SHORT_ANSWERS * len(answers):
        notes.assume(f"answers of 1 or 2 tokens, of {len(answers)}: they may be placeholders", num_short)
    if notes.options.since_ns or notes.options.until_ns:
        recordings = _part(recordings, notes, notes.arrivals or TRACE_FORMATS[chosen].arrivals, files[0])
    notes.check(sum(len(recording.requests) for recording in recordings))
    if not recordings:
        raise _nothing_read(files, chosen, notes, is_given=kind != "auto")
    return chosen, recordings, notes


def _part(recordings: list[Recording], notes: ReadNotes, arrivals: Arrivals, file: Path) -> list[Recording]:
    """The sessions that begin within the time that was asked for, which then begins at 0; the others are counted."""
    since_ns, until_ns = notes.options.since_ns, notes.options.until_ns
    if arrivals != "recorded":
        hint = "Leave --since and --until out"
        raise SpecError("has no times at which its sessions began", where=str(file), hint=hint)
    kept = [one for one in recordings if since_ns <= one.start_ns and (not until_ns or one.start_ns < until_ns)]
    if num_left := sum(len(one.requests) for one in recordings) - sum(len(one.requests) for one in kept):
        notes.drop("requests of sessions that began before --since or after --until", str(file), num_left)
    return [replace(one, start_ns=one.start_ns - since_ns) for one in kept]


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
            end = "".join(path.suffixes[-2:])
            what = f"files ending in {end}: {OTHER_ENDS[end]}" if end in OTHER_ENDS else "files in no known format"
            notes.leave(what, str(path))
        else:
            raise _unknown_format(path)
    if not kinds:
        raise _unknown_format(files[0][0])
    if len(set(kinds.values())) > 1:
        kinds = _of_main_format(kinds, {path for path, is_searched in files if is_searched}, notes)
    first = next(iter(kinds))
    if other := next((path for path in kinds if kinds[path] != kinds[first]), None):
        what = f"two formats: {first.name} is {kinds[first]}, {other.name} is {kinds[other]}"
        raise SpecError(what, where=str(other.parent), hint="Import each format by itself, or say which: --format")
    return kinds[first], list(kinds)


def _of_main_format(kinds: dict[Path, str], searched: set[Path], notes: ReadNotes) -> dict[Path, str]:
    """The files without strays of another format, that a folder held beside many more calls; they are counted."""
    num_requests: Counter[str] = Counter()
    for kind in set(kinds.values()):
        aside = ReadNotes(notes.options)
        files = [path for path in kinds if kinds[path] == kind]
        sound = _sound(TRACE_FORMATS[kind].read(files, aside, None), aside)
        num_requests[kind] = sum(len(one.requests) for one in sound)
    main, of_kind = max(num_requests, key=lambda kind: num_requests[kind]), Counter(kinds.values())
    strays = {kind for kind in of_kind if of_kind[kind] * num_requests[kind] * STRAY_SHARE <= num_requests[main]}
    for path in [path for path, kind in kinds.items() if path in searched and kind in strays - {main}]:
        notes.leave(f"files with the keys of {kinds.pop(path)} beside those of {main}", str(path))
    return kinds


def _sound(recordings: Iterable[Recording], notes: ReadNotes) -> Iterator[Recording]:
    """Recordings that a trace file may hold; a reader checks numbers one by one, and their sums can be absurd."""
    for place, recording in enumerate(recordings):
        try:
            check_recording(recording)
        except PlanError:
            notes.drop("requests of a recording whose numbers make none", f"recording {place}", len(recording.requests))
        else:
            yield recording


def _files(sources: Iterable[Path], kind: str, notes: ReadNotes) -> Iterator[tuple[Path, bool]]:
    """Each file, and whether it was found in a folder rather than named; other files of a folder are counted."""
    forms = TRACE_FORMATS.values() if kind == "auto" else (TRACE_FORMATS[kind],)
    suffixes = tuple({suffix for form in forms for suffix in form.suffixes})
    for source in sources:
        if source.is_dir():
            for path in sorted(path for path in source.rglob("*") if path.is_file()):
                if path.name.endswith(suffixes) or _unpacked(path).endswith(suffixes):
                    yield path, True
                elif not path.name.startswith(".") and path.stat().st_size:
                    end = "".join(path.suffixes[-2:])
                    end = end if end in OTHER_ENDS else path.suffix if TYPE_NAME.fullmatch(path.suffix[1:]) else ""
                    what = f"ending in {end}" if end else "without an end of their name"
                    notes.leave(f"files {what}: {OTHER_ENDS.get(end.lower(), 'not of these formats')}", str(path))
        elif source.exists():
            yield source, False
        else:
            raise SpecError("is not there", where=str(source), hint="Check the path")


def _distinct(files: list[tuple[Path, bool]], notes: ReadNotes) -> list[tuple[Path, bool]]:
    """The files without those that are given twice, by path or by content."""
    sizes = Counter(path.stat().st_size for path, _ in files if "".join(path.suffixes[-2:]) not in OTHER_ENDS)
    kept: list[tuple[Path, bool]] = []
    seen: set[Path | str] = set()
    for path, is_searched in files:
        # Only recordings of the same size can be the same; what is kept beside them may well be.
        content = sha256_of(path) if sizes[path.stat().st_size] > 1 and path.stat().st_size else path.resolve()
        if content in seen or path.resolve() in seen:
            notes.leave("files that were given twice", str(path))
        else:
            kept.append((path, is_searched))
        seen |= {content, path.resolve()}
    return kept


def _unpacked(path: Path) -> str:
    """A file's name without the end of a packed one."""
    return path.stem if path.suffix in (".gz", ".zst") else path.name


def detect(path: Path) -> str | None:
    """The format of a file: the first, special ones before all others, whose keys one of its first records has.

    A format without keys is known by the ends of its files' names. None where no known format fits.
    """
    forms = TRACE_FORMATS.items()
    if of_name := [name for name, form in forms if not form.keys and _unpacked(path).endswith(form.suffixes)]:
        return of_name[0]
    found: set[str] = set()
    for *_, record in islice(json_records(path, ReadNotes()), LINES_LOOKED_AT):
        within = record_of(next(iter(list_of(record, "data")), None))  # a page of an answer: what it holds tells
        names = record.keys() | within.keys()
        found |= {name for name, form in TRACE_FORMATS.items() if any(keys <= names for keys in form.keys)}
    in_order = sorted(TRACE_FORMATS, key=lambda name: not TRACE_FORMATS[name].is_special)
    return next((name for name in in_order if name in found), None)


def _nothing_read(files: Sequence[Path], chosen: str, notes: ReadNotes, *, is_given: bool) -> SpecError:
    """What the rows were, since none is a request; no option is proposed that was given."""
    others = (notes.broken + notes.left + notes.unknown + notes.passed).most_common()
    reasons = "; ".join(f"{count} x {reason}" for reason, count in [*notes.dropped.most_common(), *others][:4])
    nothing = "it is empty" if all(path.stat().st_size == 0 for path in files) else f"{notes.num_rows} rows"
    found = next((name for path in files if (name := detect(path)) is not None), None)
    looks = f"has the keys of {found}" if found not in (None, chosen) else "has none of another format's keys"
    looks = f"The file {looks}; what" if is_given else "What"
    hint = f"{looks} {chosen} is made of: harness trace formats {chosen}"
    return SpecError(f"no request could be read as {chosen} ({reasons or nothing})", where=str(files[0]), hint=hint)


def _unknown_format(path: Path) -> SpecError:
    """What the file is, by its keys, and the nearest way that works."""
    if path.stat().st_size == 0:
        return SpecError("is empty", where=str(path), hint="Give a recording with requests")
    try:
        records = [record for *_, record in islice(json_records(path, ReadNotes()), LINES_LOOKED_AT)]
    except SpecError as error:
        return error
    if not records:  # a document may be a list of lists
        with opened(path) as stream:
            document = parsed_json(stream.read(base.MAX_LINE_BYTES))
        records = [record_of(each) for inner in list_of(document)[:LINES_LOOKED_AT] for each in list_of(inner)[:1]]
    for kind in read_tables(Path(__file__).with_name("others.toml"))["kind"]:
        starts: dict[str, list[str]] = kind.get("value", {})
        of = [each for each in records if any(each.keys() >= set(keys) for keys in kind["keys"])]
        if any(all(str(each.get(key)).startswith(tuple(begins)) for key, begins in starts.items()) for each in of):
            return SpecError(f"is {kind['what']}, which no reader exists for", where=str(path), hint=kind["way"])
    keys = [key for key in (records[0] if records else ()) if TYPE_NAME.fullmatch(key)][:6]
    what = f"its records have the keys {', '.join(keys)}" if keys else "it holds no JSON objects"
    hint = "Readers: harness trace formats; any agent's calls can be recorded in the server: harness server observe"
    return SpecError(f"is in no known format: {what}", where=str(path), hint=hint)
