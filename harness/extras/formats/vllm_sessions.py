"""Sessions of a vLLM server, as its observer records them: the KV blocks that they share tell who continues whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from harness.model.traces.account import ReadNotes
from harness.model.traces.base import json_records, read_tables, trace_format
from harness.model.traces.recording import RecordedRequest, Recording, hidden_name
from harness.model.traces.values import Record, record_of, text_of, tokens_of
from harness.stacks.vllm.inside.vllm_step_log.sessions import UNUSUAL

MOST_NS = 1 << 62
LABELS = read_tables(Path(__file__).with_name("labels.toml"))
NOT_ENDED, BEFORE, OWN, NO_NAMES, NO_LIMIT = LABELS["vllm-requests"].values()
UNKNOWN_WAITS, PROMPTS_ALONE, EARLY, LOST, HIDDEN, CUT, AFTER_ROTATION, RESTARTS = LABELS["vllm-sessions"].values()
Continued = tuple["ObservedRequest | None", int]  # the request that another one continues, and the tokens kept of it
Block = tuple[int, int]  # a KV block: the request that had it first, and its place there


class Recorder(NamedTuple):
    """The recorder that wrote a file, and the file's number. offset_ns: what is added to its instants, by ``clock``."""

    recorder: str
    engine: int
    part: int
    clock: str
    offset_ns: int
    block_tokens: int
    header: Record


class End(NamedTuple):
    """How a request ended. like, known, blocks: as of ``ObservedRequest``, of its prompt and answer."""

    number: int
    end_ns: int
    admitted_ns: int | None
    first_token_ns: int | None
    cached: int | None
    generated: int
    preemptions: int
    reason: str
    like: int
    known: int
    blocks: int


@dataclass(eq=False)
class ObservedRequest:
    """One request of a file. like, known: whose first so many blocks it begins with, -1: nobody's.

    blocks: whole blocks of its prompt. end: None while it has not ended. parent, keep: the request that it continues,
    and how many tokens of that prompt and answer it keeps. at: for notes. is_own: the harness sent it. unusual: what
    the rules of a scheduler do not know of it.
    """

    at: str
    number: int
    server: Recorder
    arrival_ns: int
    queued_ns: int
    prompt: int
    most: int | None
    like: int
    known: int
    blocks: int
    is_own: bool = False
    unusual: tuple[str, ...] = ()
    end: End | None = None
    parent: ObservedRequest | None = None
    keep: int = 0

    @property
    def stream_tokens(self) -> int:
        return self.prompt + (0 if self.end is None else self.end.generated)


@dataclass
class Chains:
    """The requests of one file by number, and the blocks of each."""

    requests: dict[int, ObservedRequest] = field(default_factory=dict[int, ObservedRequest])

    def blocks_of(self, request: ObservedRequest, *, with_answer: bool = False) -> list[Block]:
        """The whole blocks of its prompt, or of its answer too; those of a request that is not there are left out."""
        pieces: list[list[Block]] = []
        walk, size = request, request.end.blocks if with_answer and request.end is not None else request.blocks
        while size:
            like, known = _source(walk, size)
            pieces.append([(walk.number, place) for place in range(known, size)])
            size = known
            if like not in self.requests:
                break
            walk = self.requests[like]
        return [block for piece in reversed(pieces) for block in piece]

    def block(self, request: ObservedRequest, place: int) -> Block:
        """The block at a place of its prompt and answer, by the request that had it first."""
        like, known = _source(request, place + 1)
        while known > place and like in self.requests:
            request = self.requests[like]
            like, known = _source(request, place + 1)
        return request.number, place


def _source(request: ObservedRequest, size: int) -> tuple[int, int]:
    """(whose its first blocks are, how many of ``size`` those are)."""
    end = request.end
    if end is not None and size > request.blocks and end.known > request.blocks and end.like >= 0:
        return end.like, min(end.known, size)
    return request.like, min(request.known, size)


def read_requests(files: Iterable[Path], notes: ReadNotes, *, is_moved: bool = True) -> list[ObservedRequest]:
    """Every request of the files, in the order in which they were queued, those that have not ended too.

    is_moved: instants become ns of the clock of the day when the first file of their machine's start was opened; else
    they stay those of that machine's monotonic clock.
    """
    servers: list[Recorder] = []
    requests: dict[tuple[str, int], ObservedRequest] = {}
    ends: list[tuple[End, Recorder, str]] = []
    lines = (line for path in files for line in _lines(path, servers, notes, is_moved=is_moved))
    for record, server, at in lines:
        if "end" in record:
            if (end := _end(record, server)) is None:
                notes.row_broken("an end without its numbers", at)
            else:
                ends.append((end, server, at))
        elif (request := _came(record, server, at)) is None:
            notes.row_broken("a request without its numbers", at)
        else:
            notes.num_calls += 1
            if requests.setdefault((server.recorder, request.number), request) is not request:
                notes.drop("requests that came before", at)
    for end, server, at in ends:
        _take_end(requests.get((server.recorder, end.number)), end, server, at, notes)
    num_clocks = len({server.clock for server in servers})
    notes.assume(RESTARTS, num_clocks * (is_moved and num_clocks > 1))
    return sorted(requests.values(), key=lambda request: (request.queued_ns, request.number))


def _lines(
    path: Path, servers: list[Recorder], notes: ReadNotes, *, is_moved: bool
) -> Iterator[tuple[Record, Recorder, str]]:
    """The requests and ends of a file, each with its server; lines before the first header are of that one."""
    early: list[tuple[Record, str]] = []
    num_before = len(servers)
    for _, at, record in json_records(path, notes):
        if "vllm_sessions" in record:
            if (server := _server(record)) is None:
                notes.row_broken("a header of another version, or without its numbers", at)
            else:
                # One clock for each start of a machine: that of the day when its first file was opened.
                offset_ns = next((one.offset_ns for one in servers if one.clock == server.clock), server.offset_ns)
                servers.append(server._replace(offset_ns=offset_ns * is_moved))
                notes.pass_over("the settings of a server")
        elif "stopped" in record:
            notes.pass_over("the recorder stopped")
        elif not {"request", "end"} & record.keys():
            notes.row_unknown("another key", at)
        elif len(servers) == num_before:
            early.append((record, at))
        else:
            yield record, servers[-1], at
    for record, at in early:
        if len(servers) == num_before:
            notes.row_broken("a line of a file without a header", at)
        else:
            notes.assume("lines before the header of their file")
            yield record, servers[num_before], at


def _take_end(request: ObservedRequest | None, end: End, server: Recorder, at: str, notes: ReadNotes) -> None:
    if request is None:
        notes.pass_over(BEFORE)
        notes.first_at.setdefault(BEFORE, at)
        notes.assume(BEFORE)
    elif request.end is not None:
        notes.leave("ends that came before", at, 1)
    elif end.end_ns < request.queued_ns:
        notes.row_broken("an end before its request came", at)
    else:
        notes.part()
        # Of another file, where its blocks are named anew.
        is_here = server.part == request.server.part
        request.end = end if is_here else end._replace(like=-1, known=0, blocks=request.blocks)


def _server(record: Record) -> Recorder | None:
    numbers = _numbers(record, "engine", "part", "opened_ns", "opened_unix_ns")
    recorder = text_of(record, "recorder")
    if record.get("vllm_sessions") != 1 or not recorder or numbers is None:
        return None
    engine, part, opened_ns, unix_ns = numbers
    is_caching = record_of(record, "effective").get("enable_prefix_caching") is not False
    size = (tokens_of(record.get("block_tokens")) or 0) if is_caching else 0
    return Recorder(recorder, engine, part, text_of(record, "boot") or recorder, unix_ns - opened_ns, size, record)


def _came(record: Record, server: Recorder, at: str) -> ObservedRequest | None:
    numbers = _numbers(record, "request", "arrival_ns", "queued_ns", "known", "blocks")
    prompt, like = tokens_of(record.get("prompt_tokens")), _ns(record.get("like"), -1)
    if numbers is None or like is None or not prompt:
        return None
    number, arrival_ns, queued_ns, known, blocks = numbers
    has_too_many = server.block_tokens and blocks > prompt // server.block_tokens
    if known > blocks or like >= number or (known == 0) != (like < 0) or has_too_many:
        return None
    most = tokens_of(record.get("max_tokens"))
    instants_ns = (min(arrival_ns, queued_ns) + server.offset_ns, queued_ns + server.offset_ns)
    chain = (like, known, blocks)
    is_own, unusual = record.get("harness") == 1, tuple(name for name in UNUSUAL if record.get(name) == 1)
    return ObservedRequest(at, number, server, *instants_ns, prompt, most, *chain, is_own, unusual)


def _end(record: Record, server: Recorder) -> End | None:
    numbers = _numbers(record, "end", "end_ns", "preemptions", "known", "blocks")
    generated, like = tokens_of(record.get("generated_tokens")), _ns(record.get("like"), -1)
    is_sound = numbers is not None and numbers[3] <= numbers[4] and text_of(record, "reason")
    if numbers is None or generated is None or like is None or not is_sound:
        return None
    number, end_ns, preemptions, known, blocks = numbers
    given = (_ns(record.get(name)) for name in ("admitted_ns", "first_token_ns"))
    admitted_ns, first_ns = (None if at_ns is None else at_ns + server.offset_ns for at_ns in given)
    counts = tokens_of(record.get("cached_tokens")), generated, preemptions
    chain = (like, known, blocks) if server.block_tokens else (-1, 0, 0)
    return End(number, end_ns + server.offset_ns, admitted_ns, first_ns, *counts, text_of(record, "reason"), *chain)


def _numbers(record: Record, *names: str) -> list[int] | None:
    """Whole numbers by their names; None where one is missing."""
    numbers = [number for name in names if (number := _ns(record.get(name))) is not None]
    return numbers if len(numbers) == len(names) else None


def _ns(value: object, least: int = 0) -> int | None:
    """A whole number from ``least`` on; None for any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST_NS else None


def _recordings(files: Iterable[Path], notes: ReadNotes) -> Iterator[Recording]:
    """A recording for every request that continues none, with all that continue it."""
    seen = read_requests(files, notes)
    sizes = {request.server.block_tokens for request in seen} - {0}
    notes.block_tokens = min(sizes, default=0)
    ended = [request for request in seen if request.end is not None and not request.is_own]
    chains: dict[tuple[str, int], Chains] = {}
    for request in seen:
        if request.is_own or request.end is None:
            notes.drop(OWN if request.is_own else NOT_ENDED, request.at)
        chains.setdefault((request.server.recorder, request.server.part), Chains()).requests[request.number] = request
    trees: dict[int, list[ObservedRequest]] = {}
    roots: dict[int, ObservedRequest] = {}
    links = {key: Links(each, notes) for key, each in chains.items()}
    for request in ended:
        links[request.server.recorder, request.server.part].take(request)
        if request.parent is not None and request.parent.is_own:
            request.parent, request.keep = None, 0
        root = request if request.parent is None else roots[id(request.parent)]
        roots[id(request)] = root
        trees.setdefault(id(root), []).append(request)
    names: dict[tuple[str, int, Block], int] = {}
    notes.assume(NO_NAMES, sum(not request.server.block_tokens for request in ended))
    notes.assume(AFTER_ROTATION, sum(tree[0].server.part > 0 for tree in trees.values()))
    by_start = sorted(trees.values(), key=lambda tree: tree[0].arrival_ns)
    for place, tree in enumerate(by_start):
        root = tree[0]
        where = (root.server.recorder, root.server.part)
        blocks = chains[where].blocks_of(root) if root.server.block_tokens == notes.block_tokens else []
        numbers = tuple(names.setdefault((*where, block), len(names)) for block in blocks)
        requests = tuple(_requests(tree, numbers, notes))
        yield Recording(hidden_name(f"session {place}"), root.arrival_ns - by_start[0][0].arrival_ns, requests)


class Links:
    """Finds the request that each one continues, in one file. Requests come in the order in which they were queued.

    The engine alone tells which came first: the clock of the day may be set, or be that of another machine.

    A block is somebody's own when it was first had with an answer, or with a prompt that continues one.
    """

    def __init__(self, chains: Chains, notes: ReadNotes) -> None:
        self._chains, self._notes = chains, notes
        # The requests whose answer ends with a block, in that order; and those blocks, by who had them first.
        self._tips: dict[Block, list[ObservedRequest]] = {}
        self._places: dict[int, list[int]] = {}
        # How many requests go on from a block with blocks of their own.
        self._branches: Counter[Block] = Counter()
        for request in chains.requests.values():
            if request.known and request.like in chains.requests:
                self._branches[chains.block(chains.requests[request.like], request.known - 1)] += 1
            if request.end is not None and request.end.blocks:
                tip = chains.block(request, request.end.blocks - 1)
                self._tips.setdefault(tip, []).append(request)
                self._places.setdefault(tip[0], []).append(tip[1])

    def take(self, request: ObservedRequest) -> None:
        """Set the parent of a request, and how many of its tokens it keeps."""
        if request.server.block_tokens:
            request.parent, request.keep = self._taken_early(request) or self._parent(request)
            parent = request.parent
            self._notes.assume(EARLY, parent is not None and not _has_answered(parent, request))

    def _taken_early(self, request: ObservedRequest) -> tuple[ObservedRequest, int] | None:
        """What it continues, where that was not over when it was queued: its client had left, or needed no end."""
        for place in sorted(self._places.get(request.number, ()), reverse=True):
            near = (each for each in self._tips[request.number, place] if each.stream_tokens <= request.prompt)
            fits = [each for each in near if each.number < request.number and each.blocks <= place < request.blocks]
            if fits:
                return fits[-1], fits[-1].stream_tokens
        return None

    def _parent(self, request: ObservedRequest) -> Continued:
        size, known = request.server.block_tokens, request.known
        holder = self._chains.requests.get(request.like)
        if holder is None:
            self._notes.assume(LOST, known > 0)
            return None, 0
        tip = self._chains.block(holder, known - 1)
        holder = self._chains.requests[tip[0]]
        if known <= holder.blocks and holder.parent is None:
            return self._after_hidden_answer(request, holder, tip)
        # The latest request whose prompt and answer it begins with.
        near = (each for each in self._tips.get(tip, ()) if each.stream_tokens <= request.prompt)
        fits = [each for each in near if _has_ended(each, request)]
        if fits:
            whole = max(fits, key=lambda each: (each.stream_tokens, _has_answered(each, request), each.number))
            return whole, whole.stream_tokens
        walk: ObservedRequest | None = holder
        while walk is not None and not _has_ended(walk, request):
            walk = walk.parent
        if walk is None:
            return None, 0
        self._notes.assume(CUT)
        return walk, min(known * size, walk.stream_tokens, request.prompt)

    def _after_hidden_answer(self, request: ObservedRequest, holder: ObservedRequest, tip: Block) -> Continued:
        """What it continues, where it begins with a first prompt: others may do so that are no part of that session.

        It is taken to continue that request where the answer fills no block and nobody else goes on from there.
        """
        if request.known < holder.blocks or not _has_ended(holder, request):
            return None, 0
        is_hidden = holder.end is not None and holder.end.blocks == holder.blocks
        if is_hidden and self._branches[tip] == 1 and holder.stream_tokens <= request.prompt:
            self._notes.assume(HIDDEN)
            return holder, holder.stream_tokens
        self._notes.assume(PROMPTS_ALONE)
        return None, 0


def _has_ended(earlier: ObservedRequest, request: ObservedRequest) -> bool:
    return earlier.end is not None and earlier.end.end_ns <= request.queued_ns


def _has_answered(earlier: ObservedRequest, request: ObservedRequest) -> bool:
    """Whether one was over before its client sent the other, by the clock of the day."""
    return earlier.end is not None and earlier.end.end_ns <= request.arrival_ns


def _requests(tree: list[ObservedRequest], blocks: tuple[int, ...], notes: ReadNotes) -> Iterator[RecordedRequest]:
    """The requests of one session and its forks, as they were queued. blocks: names of the first prompt's."""
    places = {id(request): place for place, request in enumerate(tree)}
    for request in tree:
        wait_ns, base, after = 0, None, ()
        if (parent := request.parent) is not None and parent.end is not None:
            base, wait_ns = places[id(parent)], max(request.arrival_ns - parent.end.end_ns, 0)
            after = (base,)
            notes.assume(UNKNOWN_WAITS)
        end = request.end
        assert end is not None
        is_left = end.reason == "abort"
        left_tokens = end.generated * is_left
        left_ns = max(end.end_ns - request.arrival_ns, 1) * (is_left and not left_tokens)
        notes.assume(NO_LIMIT, is_left and request.most is None)
        generate = max(request.most or 0, end.generated + 1) if is_left else notes.answered(end.generated)
        lengths = (request.prompt, request.keep if base is not None else 0, generate)
        yield RecordedRequest(base, after, wait_ns, "none", *lengths, () if after else blocks, left_ns, left_tokens)


FORMAT = trace_format(__file__, "vllm-sessions", _recordings, passed=LABELS["vllm-passed"])
