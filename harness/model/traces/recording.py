"""Recorded sessions, and the trace file that holds them: a header line, then one a recording; in tokens and ns."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from harness.clock import NS_PER_S
from harness.errors import PlanError, SpecError
from harness.model.plan.model import WAIT_KINDS, WaitKind, has_ended
from harness.outputs import write_atomic
from harness.shipped import find_shipped

Arrivals = Literal["together", "recorded"]
DEFAULT_WAITS = "tracelab-v0.0.2"
NO_CACHE = "prompts taken to begin with the whole conversation before: no cached tokens are given"
CACHE_GONE = "prompts that grew, with less cached than the one before left behind: that had gone, or they begin anew"
ANEW = "prompts taken to begin anew, not with the conversation before: no cached tokens are given"
MOST_TOKENS = 1 << 31  # more is a miscount: no model has such a context


class RecordedRequest(NamedTuple):
    """One request of a recording.

    base: place of the earlier request whose prompt and answer this prompt begins with; None for a fresh context.
    after: places of the earlier requests of the same recording that had to end first; () if it waited for none.
    wait_ns: from the end of the last of ``after`` to its sending; without ``after``, from the recording's start.
    keep_tokens: how many tokens of ``base``'s prompt and answer the prompt keeps.
    blocks: names of the whole blocks its prompt begins with; equal names are equal tokens, in every recording.
    is_drawn: the recording does not say how long it waited: ``wait_ns`` is drawn, and no measurement of anything.
    abort_after_ns, abort_after_tokens: when its client left, since its sending or by tokens received; 0: it stayed.
    """

    base: int | None
    after: tuple[int, ...]
    wait_ns: int
    wait_kind: WaitKind
    prompt_tokens: int
    keep_tokens: int
    generate_tokens: int
    blocks: tuple[int, ...] = ()
    abort_after_ns: int = 0
    abort_after_tokens: int = 0
    is_drawn: bool = False

    @property
    def stream_tokens(self) -> int:
        """Tokens of its prompt and answer that a later request can keep; see ``RequestPlan.stream_tokens``."""
        is_left = self.abort_after_ns or self.abort_after_tokens
        return self.prompt_tokens + (self.abort_after_tokens if is_left else self.generate_tokens)


@dataclass(frozen=True, slots=True)
class Recording:
    """One tree of requests that belong together. name: a hash of the recording's own id; start_ns: since the first."""

    name: str
    start_ns: int
    requests: tuple[RecordedRequest, ...]


def hidden_name(identity: str) -> str:
    """The first 12 hex digits of the SHA-256 of a recording's id."""
    return hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:12]


def check_recording(recording: Recording) -> None:
    """Raise PlanError, naming the request, when the parts of a recording contradict each other."""
    afters = [request.after for request in recording.requests]
    for place in range(len(afters)):
        if wrong := _what_is_wrong(recording, afters, place):
            raise PlanError(wrong, where=f"recording {recording.name}, request {place}", hint="Import the trace again")


def _what_is_wrong(recording: Recording, afters: Sequence[tuple[int, ...]], place: int) -> str:  # noqa: PLR0911  # one return per problem
    request = recording.requests[place]
    if any(not 0 <= before < place for before in request.after):
        return f"it comes after {list(request.after)}, which are not all earlier requests"
    if request.base is not None and not has_ended(afters, request.base, place):
        return f"it begins with request {request.base}, which need not have ended"
    if request.wait_ns < 0:
        return f"its wait is negative ({request.wait_ns} ns)"
    if not 1 <= request.prompt_tokens <= MOST_TOKENS or not 1 <= request.generate_tokens <= MOST_TOKENS:
        return f"{request.prompt_tokens} prompt and {request.generate_tokens} generated tokens make no request"
    left_ns, left_tokens = request.abort_after_ns, request.abort_after_tokens
    if min(left_ns, left_tokens) < 0 or 0 < request.generate_tokens <= left_tokens:
        return f"its client leaves after {left_ns} ns or {left_tokens} tokens"
    if left_ns and left_tokens:
        return "its client leaves after a time and after a number of tokens"
    streamed = 0 if request.base is None else recording.requests[request.base].stream_tokens
    if not 0 <= request.keep_tokens <= min(streamed, request.prompt_tokens):
        return f"it keeps {request.keep_tokens} of {streamed} tokens"
    return ""


FORMAT = "harness-trace/1"
MAX_RECORDING_BYTES = 1 << 30
DAMAGE = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)
COLUMNS = ("base", "after", "wait_ns", "wait_kind", "prompt_tokens", "keep_tokens", "generate_tokens")


@dataclass(frozen=True, slots=True)
class TraceHead:
    """The header of a trace file. block_tokens: size of the named blocks, 0 where there are none.

    dropped, broken, passed: what the readers left out, counted by reason; labels: what a reader had to assume.
    rows: how many rows of the files were each kind of ``base.ROWS``; empty in a trace that was made, or is older.
    """

    name: str
    source_format: str
    arrivals: Arrivals
    block_tokens: int
    dropped: dict[str, int]
    broken: dict[str, int]
    labels: tuple[str, ...]
    rows: dict[str, int] = field(default_factory=dict[str, int])
    passed: dict[str, int] = field(default_factory=dict[str, int])


_HEAD = TypeAdapter(TraceHead)


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A whole trace in memory. sha256: of the file's bytes."""

    head: TraceHead
    recordings: tuple[Recording, ...]
    sha256: str

    @property
    def num_requests(self) -> int:
        return sum(len(recording.requests) for recording in self.recordings)


class TraceReader:
    """The recordings of a trace file, one in memory at a time. ``sha256``: of the bytes read so far.

    Raises SpecError for a file that is no trace, and PlanError while reading a file that was edited or cut off.
    """

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self._path, self._stream, self._digest = path, stream, hashlib.sha256()
        self.head = _head(self._line(), path)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[Recording]:
        num_recordings = 0
        while line := self._line():
            num_recordings += 1
            try:
                yield _recording(line)
            except DAMAGE as error:
                raise PlanError(f"is damaged: {error}", where=str(self._path), hint="Import the trace again") from error
        if not num_recordings:
            raise PlanError("holds no recording", where=str(self._path), hint="Import the trace again")

    def _line(self) -> bytes:
        with SpecError.on_os_error("cannot be read", where=self._path, hint="Check it"):
            line = self._stream.readline(MAX_RECORDING_BYTES)
        self._digest.update(line)
        return line


def is_trace(path: Path) -> bool:
    """Whether ``path`` is a trace file already, and no recording that has to be imported."""
    try:
        with path.open("rb") as stream:
            head: Any = json.loads(stream.readline(MAX_RECORDING_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(head, dict) and head.get("format") == FORMAT  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def write_trace(path: Path, head: TraceHead, recordings: Iterable[Recording]) -> Path:
    """Write the file whole or not at all; raises RecordsError when the disk refuses."""
    return write_atomic(path, _lines(head, recordings), what="the trace")


def trace_sha256(head: TraceHead, recordings: Iterable[Recording]) -> str:
    """Hex digest of the file that ``write_trace`` would write."""
    digest = hashlib.sha256()
    for line in _lines(head, recordings):
        digest.update(line)
    return digest.hexdigest()


def _lines(head: TraceHead, recordings: Iterable[Recording]) -> Iterator[bytes]:
    counted = {name: dict(sorted(getattr(head, name).items())) for name in ("dropped", "broken", "passed")}
    facts = {**asdict(head), **counted, "labels": sorted(head.labels)}
    yield _line({"format": FORMAT, **facts, "requests": list(COLUMNS)})
    for recording in recordings:
        bases = ((-1 if one.base is None else one.base, one) for one in recording.requests)
        rows = [[base, one.after, one.wait_ns, WAIT_KINDS.index(one.wait_kind), *one[4:7]] for base, one in bases]
        record: dict[str, Any] = {"recording": recording.name, "start_ns": recording.start_ns, "requests": rows}
        if any(request.blocks for request in recording.requests):
            record["blocks"] = [request.blocks for request in recording.requests]
        aborts = [(place, one.abort_after_ns, one.abort_after_tokens) for place, one in enumerate(recording.requests)]
        if left := [abort for abort in aborts if abort[1] or abort[2]]:
            record["aborts"] = left
        if drawn := [place for place, request in enumerate(recording.requests) if request.is_drawn]:
            record["drawn"] = drawn
        yield _line(record)


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


@contextmanager
def open_trace(path: Path) -> Generator[TraceReader]:
    """A reader of a trace file; SpecError when it cannot be opened, other errors as ``TraceReader``."""
    with SpecError.on_os_error("cannot be read", where=path, hint="Check the path"):
        stream = path.open("rb")
    with stream:
        yield TraceReader(path, stream)


def load_trace(name_or_path: str) -> TraceFile:
    """The whole of a shipped trace by its name, or of a file by its path, kept for the next replicate."""
    path = find_shipped("traces", name_or_path, what="trace")
    with SpecError.on_os_error("cannot be read", where=path, hint="Check the path"):
        facts = path.stat()
    return _kept(path, (facts.st_ino, facts.st_size, facts.st_mtime_ns))


@lru_cache(maxsize=1)
def _kept(path: Path, _version: tuple[int, int, int]) -> TraceFile:
    return read_trace(path)


def read_trace(path: Path) -> TraceFile:
    """The whole of a trace file; errors as ``TraceReader``."""
    with open_trace(path) as reader:
        recordings = tuple(reader)
        return TraceFile(reader.head, recordings, reader.sha256)


def _head(line: bytes, path: Path) -> TraceHead:
    try:
        record: Any = json.loads(line)
        if record["format"] != FORMAT:
            raise ValueError(record["format"])
        newer = {name: record.get(name, {}) for name in ("rows", "passed")}
        names = [each.name for each in fields(TraceHead) if each.name not in newer]
        return _HEAD.validate_python({name: record[name] for name in names} | newer)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        hint = "Make a trace from a recording: harness trace import FILE -o TRACE.jsonl"
        raise SpecError(f"is no {FORMAT} file", where=str(path), hint=hint) from error


def _recording(line: bytes) -> Recording:
    """The recording in a line; raises PlanError, or an error of DAMAGE, when the line holds no sound recording."""
    if not line.endswith(b"\n"):
        raise ValueError("its last line is cut off")
    record: dict[str, Any] = json.loads(line)
    blocks: list[list[int]] = record.get("blocks") or [[]] * len(record["requests"])
    rows = zip(record["requests"], blocks, strict=True)
    aborts = {int(place): (int(ns), int(num)) for place, ns, num in record.get("aborts", ())}
    drawn: set[int] = set(record.get("drawn", ()))
    requests = tuple(_request(row, names, *aborts.get(at, (0, 0)), at in drawn) for at, (row, names) in enumerate(rows))
    if not requests:
        raise ValueError("a recording without a request")
    recording = Recording(str(record["recording"]), int(record["start_ns"]), requests)
    check_recording(recording)
    return recording


def _request(row: list[Any], blocks: list[int], abort_ns: int, abort_tokens: int, is_drawn: bool) -> RecordedRequest:
    base, after, wait_ns, kind, prompt, keep, generate = row
    if not all(type(number) is int for number in (base, *after, wait_ns, kind, prompt, keep, generate, *blocks)):
        raise ValueError(f"{row} is not [{', '.join(COLUMNS)}]")
    lengths, left = (prompt, keep, generate, tuple(blocks)), (abort_ns, abort_tokens, is_drawn)
    return RecordedRequest(None if base < 0 else base, tuple(after), wait_ns, WAIT_KINDS[kind], *lengths, *left)


class _Counts:
    """All that is counted of a trace. endless_tokens, kept_tokens: what an endless cache, or the turn before, holds."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._in_cache: dict[tuple[int, int], int] = {}  # (place of the block before, name): place
        self.blocks: set[int] = set()
        self.prompts, self.answers = array("q"), array("q")
        self.waits_ns = {kind: array("q") for kind in WAIT_KINDS}
        self.num_recordings = self.num_joins = self.num_forks = self.num_left = self.num_drawn = 0
        self.endless_tokens = self.kept_tokens = 0

    def add(self, recording: Recording) -> None:
        self.num_recordings += 1
        for request in recording.requests:
            self.prompts.append(request.prompt_tokens)
            self.answers.append(request.generate_tokens)
            self.num_drawn += request.is_drawn
            if not request.is_drawn and (request.after or request.wait_kind != "none"):
                self.waits_ns[request.wait_kind].append(request.wait_ns)
            self.num_joins += len(request.after) > 1
            self.num_left += bool(request.abort_after_ns or request.abort_after_tokens)
            self.blocks.update(request.blocks)
            self.kept_tokens += request.keep_tokens
            named_tokens = 0 if request.keep_tokens else self._hits(request.blocks) * self._block_tokens
            self.endless_tokens += max(request.keep_tokens, named_tokens)
        followers = Counter(before for request in recording.requests for before in request.after)
        self.num_forks += sum(count > 1 for count in followers.values())

    def _hits(self, blocks: Sequence[int]) -> int:
        """How many leading blocks an endless cache already holds; afterwards it holds all of them."""
        num_hits, before = 0, -1
        for place, name in enumerate(blocks):
            num_known = len(self._in_cache)
            before = self._in_cache.setdefault((before, name), num_known)
            num_hits += before < num_known and num_hits == place
        return num_hits


def describe_trace(reader: TraceReader) -> dict[str, str]:
    """Facts in reading order; errors as ``TraceReader``."""
    counts = _Counts(reader.head.block_tokens)
    for recording in reader:
        counts.add(recording)
    facts = {
        "trace": reader.head.name,
        "format": f"{reader.head.source_format}, arrivals {reader.head.arrivals}",
        "sha256": reader.sha256,
        "recordings": str(counts.num_recordings),
        "requests": str(len(counts.prompts)),
        "prompt tokens": _spread(np.array(counts.prompts)),
        "output tokens": _spread(np.array(counts.answers)),
    }
    for kind, name in (*zip(WAIT_KINDS[1:], WAIT_KINDS[1:], strict=True), ("none", "other")):
        if waits_ns := counts.waits_ns[kind]:
            facts[f"{name} waits, s"] = f"{len(waits_ns)}: {_spread(np.array(waits_ns) / NS_PER_S)}"
    if counts.num_drawn:
        facts["unknown waits"] = f"{counts.num_drawn}: the recording does not say them; they are drawn"
    if reader.head.rows:
        facts["rows"] = ", ".join(f"{count} {kind}" for kind, count in reader.head.rows.items())
    ceilings = {"endless cache": counts.endless_tokens, "turn before": counts.kept_tokens}
    shares = {name: f"{100 * tokens / sum(counts.prompts):.1f} %" for name, tokens in ceilings.items()}
    num_uncounted = sum(int(one.partition(" ")[0]) for one in reader.head.labels if one.endswith((NO_CACHE, ANEW)))
    num_later = len(counts.prompts) - counts.num_recordings
    said, is_alone = "ceiling {} of prompt tokens", bool(reader.head.rows) and not num_later
    if is_alone and not counts.blocks:
        said = "ceiling not known: no call follows another, no block is named"
    elif 2 * num_uncounted >= max(num_later, 1):
        said = "ceiling not known; {} if prompts repeat what came before"
    elif num_uncounted:
        said += f" ({num_uncounted} of {num_later} prompts assumed)"
    if any(label.endswith(CACHE_GONE) for label in reader.head.labels):
        said += ", by the provider's cache"
    return facts | {
        "forks, joins": f"{counts.num_forks} and {counts.num_joins} requests"
        + f"; {counts.num_left} answers are left" * bool(counts.num_left),
        "named blocks": f"{len(counts.blocks)} of {reader.head.block_tokens} tokens",
        **{name: said.format(share) for name, share in shares.items()},
        **({"turn before": "ceiling not known: no call follows another"} if is_alone and counts.blocks else {}),
    }


# Words of the labels whose numbers are no counts or times of the recording.
_ESTIMATES = re.compile(r"estimated|characters|drawn (from|as if)|made up")


def changes_at_import(head: TraceHead) -> dict[str, list[str]]:
    """What the import assumed, estimated and dropped, and which lines were broken; most of a kind first."""
    estimated = [label for label in head.labels if _ESTIMATES.search(label)]
    return {
        "assumed": [label for label in head.labels if label not in estimated],
        "estimated": estimated,
        "dropped": _by_count(head.dropped),
        "broken": _by_count(head.broken),
    }


def _by_count(reasons: Mapping[str, int]) -> list[str]:
    return [f"{count} x {reason}" for reason, count in sorted(reasons.items(), key=lambda each: -each[1])]


def _spread(values: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> str:
    values.sort()
    low, middle, high = values[0], values[(len(values) - 1) // 2], values[-1]
    return f"min {low:g}, median {middle:g}, max {high:g}, sum {values.sum():g}"
