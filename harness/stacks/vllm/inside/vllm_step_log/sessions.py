# pyright: basic, reportMissingImports=false
"""The sessions of a vLLM server that runs for days: a line when a request comes, and a line when it has ended.

No text, no token and nothing computed from them is written. A request says which earlier request its leading KV blocks
are those of, and how many; the table that knows blocks is in memory only, bounded, and new with each file. The lines of
a step are written when it has ended. The file rotates by size and ends at a limit of disk. Without VLLM_SESSIONS_FILE
nothing happens.
Source: vllm 0.30.0 to 0.33.0 (v1/request.py, v1/core/sched/scheduler.py, v1/core/kv_cache_utils.py); vllm-rbln 0.11.1
to 0.12.1a8 (v1/core/optimum_scheduler.py).
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from . import LOG, OWN_REQUESTS, LineFile, class_of, header_of, kv_of, now_ns, plain, value_at

FILE_VARIABLE = "VLLM_SESSIONS_FILE"
FILE_BYTES_VARIABLE = "VLLM_SESSIONS_FILE_BYTES"
DISK_BYTES_VARIABLE = "VLLM_SESSIONS_DISK_BYTES"
BLOCKS_VARIABLE = "VLLM_SESSIONS_BLOCKS"
FORMAT = 1
FILE_BYTES = 256 << 20
LEAST_FILE_BYTES = 64 << 10
"""Room for a header and some lines: a smaller file would hold its header alone."""
DISK_BYTES = 4 << 30
MAX_BLOCKS = 1 << 20
"""Blocks that the table knows at most, the latest used: some 200 bytes each where vLLM has forgotten them."""
MAX_OPEN = 100_000
"""Requests whose end is awaited."""
MAX_AGE_NS = 10_000_000_000
"""Longest time from the API server to the scheduler that is believed: the clock of the day may have been set."""
MAX_LINE_BYTES = 512
OWN = "harness"
"""The mark of a request that a measurement sent."""
UNUSUAL = {"lora": "lora_request", "structured": "structured_output_request", "priority": "priority"}
"""What the rules of a scheduler do not know of a request: name in its line, and attribute. No value is written."""
_MARK = ',"{}":1'
MAX_LINES = 128
"""Lines that wait to be written."""
REASONS = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_ABORTED": "abort",
    "FINISHED_IGNORED": "ignored",
    "FINISHED_ERROR": "error",
    "FINISHED_REPETITION": "repetition",
}


class Limits(NamedTuple):
    """Bytes of a file, bytes of all files of the path, and blocks in the table."""

    file_bytes: int = FILE_BYTES
    disk_bytes: int = DISK_BYTES
    blocks: int = MAX_BLOCKS


class BlockTable:
    """Which request first had a block, for the blocks that were used lately; two generations, each with all ancestors.

    A block's hash holds all tokens before it, so the blocks of a request that are known are its first ones.
    """

    def __init__(self, most: int) -> None:
        self._most = max(most // 2, 1)
        self._new: dict[Any, int] = {}
        self._old: dict[Any, int] = {}

    def add(self, request: int, hashes: Sequence[Any], before: int = 0) -> tuple[int, int]:
        """(the request that has the last known block, how many are known); the others are now this request's.

        before: how many of them were added before, which saves to search for them unless they were forgotten.
        """
        new, old = self._new, self._old
        if not (before and hashes[before - 1] in new):
            kept = _num_known(new, hashes, 0)
        elif before == len(hashes) or hashes[before] not in new:
            kept = before
        else:
            kept = _num_known(new, hashes, before)
        known = _num_known(old, hashes, kept) if old else kept
        if known > kept:
            new.update((each, old[each]) for each in hashes[kept:known])
        like = new[hashes[known - 1]] if known else -1
        for place in range(known, len(hashes)):
            new[hashes[place]] = request
        if len(new) > self._most:
            self._new, self._old = {}, new
        return (like, known)


def _num_known(table: dict[Any, int], hashes: Sequence[Any], low: int) -> int:
    """How many leading hashes are in the table; ``low`` of them are. Strides go back from the end, since most prompts
    add little to what is known."""
    high, stride = len(hashes), 4
    if low == high or hashes[low] not in table:
        return low
    while (place := high - stride) > low:
        if hashes[place - 1] in table:
            low = place
            break
        high = place - 1
        stride *= 2
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] in table:
            low = middle
        else:
            high = middle - 1
    return low


class Ended(NamedTuple):
    """How a request ended. Instants: schedule() of its first step began; its first token, and its end, were there."""

    admitted_ns: int | None
    first_token_ns: int | None
    end_ns: int
    cached_tokens: int | None
    generated_tokens: int | None
    preemptions: int
    reason: str


class SessionFile:
    """The files of one recorder. header: settings of the server. Raises OSError where the disk refuses.

    A file is made for this recorder alone: where the path is taken, its next free number is used. Lines wait for
    ``flush``, or for MAX_LINES of them.
    """

    def __init__(self, path: str, header: dict[str, Any], limits: Limits | None = None) -> None:
        self._path, self._limits = Path(path), limits or Limits()
        self._lines: list[str] = []
        self._header = {**header, "recorder": secrets.token_hex(8)}
        self._part = self._next = 0
        self._open(0)

    def came(
        self,
        request: int,
        instants_ns: tuple[int, int],
        tokens: tuple[int | None, int | None],
        hashes: Sequence[Any],
        marks: Sequence[str] = (),
    ) -> None:
        """A request was queued. instants_ns: of its arrival, and in the queue. tokens: of its prompt, and at most.

        request: its number; they rise by 1. hashes: of the whole blocks of its prompt, each of all tokens before too.
        marks: ``OWN``, and of ``UNUSUAL``.
        """
        if self._room < MAX_LINE_BYTES:
            self._make_room(request)
        self._next = request + 1
        like, known = self._table.add(request, hashes)
        arrival_ns, queued_ns = instants_ns
        prompt, most = tokens
        self._add(
            f'{{"request":{request},"arrival_ns":{arrival_ns},"queued_ns":{queued_ns},'
            f'"prompt_tokens":{prompt},"max_tokens":{most},"like":{like},"known":{known},"blocks":{len(hashes)}'
            f"{''.join(map(_MARK.format, marks))}}}\n"
        )

    def ended(self, request: int, end: Ended, hashes: Sequence[Any], before: int = 0) -> None:
        """A request is over. hashes: with those of its answer. before: how many of them it came with."""
        if self._room < MAX_LINE_BYTES:
            self._make_room(request + 1)
        # The table of this file does not know a request that came before it.
        like, known = self._table.add(request, hashes, before) if request >= self._first else (-1, 0)
        admitted_ns, first_token_ns, end_ns, cached, generated, preemptions, reason = end
        self._add(
            f'{{"end":{request},"admitted_ns":{admitted_ns},"first_token_ns":{first_token_ns},"end_ns":{end_ns},'
            f'"cached_tokens":{cached},"generated_tokens":{generated},"preemptions":{preemptions},"reason":"{reason}",'
            f'"like":{-1 if like == request else like},"known":{known},"blocks":{len(hashes)}}}\n'
        )

    def _make_room(self, next_request: int) -> None:
        self.flush()
        if not self._is_last:
            return self._open(next_request)
        self._file.write({"stopped": "the limit of disk is reached"})
        raise OSError("the limit of disk is reached")

    def _add(self, line: str) -> None:
        self._room -= len(line)
        self._lines.append(line)
        if len(self._lines) >= MAX_LINES:
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait, behind a new header where the file was emptied or removed meanwhile."""
        if self._lines:
            status = self._file.status()
            is_emptied = status.st_size < self._size
            if is_emptied or not status.st_nlink:
                self._open(self._next, is_emptied=is_emptied and status.st_nlink > 0)
            lines, self._lines = self._lines, []
            # Nothing but absent numbers is written so.
            data = "".join(lines).replace("None", "null").encode()
            self._file.write_bytes(data)
            self._size += len(data)

    def _open(self, first: int, *, is_emptied: bool = False) -> None:
        """Begin the next file, with a table of its own: no later request of it refers to one before ``first``.

        is_emptied: go on in the file, which somebody copied and emptied (``copytruncate`` of logrotate).
        """
        self._table, self._first = BlockTable(self._limits.blocks), first
        taken = _taken(self._path)
        disk_room = self._limits.disk_bytes - sum(taken.values())
        if disk_room < MAX_LINE_BYTES:
            raise OSError("the limit of disk is reached")
        if not is_emptied:
            name = self._new_file(taken)
            if self._part:
                self._file.close()
            self._file = LineFile(os.fspath(name))
        opened = {"vllm_sessions": FORMAT, "part": self._part, **self._header}
        self._file.write({**opened, "boot": boot(), "opened_ns": now_ns(), "opened_unix_ns": unix_ns()})
        # Bytes until the next file begins, or until there is no further one.
        self._size = self._file.status().st_size
        self._room = min(self._limits.file_bytes, disk_room) - self._size
        self._is_last = disk_room <= self._limits.file_bytes
        self._part += 1

    def _new_file(self, taken: Iterable[str]) -> Path:
        """Make the file of the next free number."""
        number = _next_number(self._path, taken)
        while True:
            name = self._path if not number else self._path.with_name(f"{self._path.stem}.{number}{self._path.suffix}")
            try:
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
                return name
            except FileExistsError:
                number += 1


def _taken(path: Path) -> dict[str, int]:
    """Bytes of each file of the path, by name: those of all engines, and those that were packed since."""
    sizes: dict[str, int] = {}
    for each in os.scandir(path.parent):
        if each.name.startswith(path.stem) and path.suffix in each.name[len(path.stem) :]:
            with suppress(FileNotFoundError):  # packed or moved at this moment
                sizes[each.name] = each.stat().st_size
    return sizes


def _next_number(path: Path, names: Iterable[str]) -> int:
    """The number after the largest in the names. A packed file keeps its number: gzip would replace it by another."""
    name = re.compile(rf"{re.escape(path.stem)}(?:\.([0-9]{{1,9}}))?{re.escape(path.suffix)}(?:\..*)?")
    found = [match for match in map(name.fullmatch, names) if match]
    return max((int(match[1] or 0) for match in found), default=-1) + 1


def engine_path(path: str, engine: int) -> str:
    """The path of a data-parallel engine: each writes its own files."""
    whole = Path(path)
    return os.fspath(whole.with_name(f"{whole.stem}.engine{engine}{whole.suffix}") if engine else whole)


def unix_ns() -> int:
    return time.time_ns()  # noqa: TID251 - it only says where the files of several machines stand to one another


def boot() -> str:
    """Names the start of this machine: files of one start have one clock. "" where that is not known."""
    try:
        words = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return ""
    return hashlib.sha256(words).hexdigest()[:16]


def limits_of(variables: Any) -> Limits:
    """The limits that the environment sets; ValueError for one that is no number, or too small for a file."""
    names = (FILE_BYTES_VARIABLE, DISK_BYTES_VARIABLE, BLOCKS_VARIABLE)
    usual = Limits()
    limits = Limits(*(int(variables.get(name) or value) for name, value in zip(names, usual, strict=True)))
    if limits.file_bytes < LEAST_FILE_BYTES:
        raise ValueError(f"{FILE_BYTES_VARIABLE} is {limits.file_bytes}, and the least is {LEAST_FILE_BYTES}")
    return limits


class _Open:
    """A request that has not ended, and the blocks that it came with."""

    admitted_ns: int | None = None
    first_ns: int | None = None
    cached: int | None = None
    preemptions = 0

    def __init__(self, handle: int, request: Any, blocks: int) -> None:
        self.handle, self.request, self.blocks = handle, request, blocks


class SessionObserver:
    """The sessions of one scheduler. Its engine core calls it from one thread."""

    def __init__(self, scheduler: Any) -> None:
        config = value_at(scheduler, "vllm_config")
        engine = value_at(config, "parallel_config.data_parallel_index") or 0
        size = value_at(scheduler, "kv_cache_manager.block_pool.hash_block_size")
        size = value_at(config, "cache_config.block_size") if size is None else size
        header = {"engine": engine, "scheduler": class_of(scheduler), "block_tokens": plain(size)}
        header |= header_of(config)
        header["effective"] |= kv_of(scheduler)
        path = engine_path(os.environ[FILE_VARIABLE], engine)
        self._file = SessionFile(path, header, limits_of(os.environ))
        LOG.info("[SESSIONS] recording to %s: no text, no token; off without %s", path, FILE_VARIABLE)
        self._open: dict[str, _Open] = {}
        self._prefilling: dict[str, _Open] = {}
        self._num_requests = 0

    def stop(self, error: Exception) -> None:
        """Log the first error, and raise none; afterwards only the original functions run."""
        self._open.clear()
        self._prefilling.clear()
        with suppress(Exception):  # the caller is the engine
            self._file.flush()
        LOG.warning("[SESSIONS] stopped after %d requests: %s: %s", self._num_requests, type(error).__name__, error)

    # -- what is noted after a call of the function that a name says ---------------------------------------------

    def added(self, began_ns: int, _scheduler: Any, arguments: Any, _output: Any) -> None:
        """A request was put into the queue."""
        request = arguments[0]
        handle = self._num_requests
        self._num_requests += 1
        hashes = getattr(request, "block_hashes", ())
        if len(self._open) < MAX_OPEN:
            self._open[request.request_id] = _Open(handle, request, len(hashes))
        age_ns = unix_ns() - round((getattr(request, "arrival_time", None) or 0) * 1e9)
        arrival_ns = began_ns - age_ns if 0 <= age_ns <= MAX_AGE_NS else began_ns
        own = (OWN,) if OWN_REQUESTS in request.request_id else ()
        self._file.came(
            handle,
            (arrival_ns, began_ns),
            (getattr(request, "num_prompt_tokens", None), getattr(request, "max_tokens", None)),
            hashes,
            [*own, *(name for name, attribute in UNUSUAL.items() if getattr(request, attribute, None))],
        )

    def scheduled(self, began_ns: int, _scheduler: Any, _arguments: Any, output: Any) -> None:
        """A step was decided."""
        if names := getattr(output, "finished_req_ids", None):
            self._ended(names, began_ns)
        for new in getattr(output, "scheduled_new_reqs", None) or ():
            entry = self._open.get(new.req_id)
            if entry is not None:
                entry.admitted_ns = began_ns
                # vllm-rbln prefills one request a step, whole, and copies what is cached, by outer block.
                copied = getattr(output, "cached_length", None)
                entry.cached = getattr(new, "num_computed_tokens", None) if copied is None else sum(copied)
                self._prefilling[new.req_id] = entry
        for name in getattr(output, "preempted_req_ids", None) or ():
            if name in self._open:
                self._open[name].preemptions += 1

    def updated(self, _began_ns: int, scheduler: Any, _arguments: Any, _outputs: Any) -> None:
        """A step has ended."""
        names = getattr(scheduler, "finished_req_ids", None)
        if self._prefilling or names:
            ended_ns = now_ns()
            for name in [name for name, entry in self._prefilling.items() if _num_generated(entry.request)]:
                self._prefilling.pop(name).first_ns = ended_ns
            self._ended(names or (), ended_ns)
        self._file.flush()

    def dropped(self, _began_ns: int, scheduler: Any, _arguments: Any, _output: Any) -> None:
        """Requests were aborted, or ended from outside."""
        if names := getattr(scheduler, "finished_req_ids", None):
            self._ended(names, now_ns())
            self._file.flush()

    def _ended(self, names: Any, at_ns: int) -> None:
        for name in names:
            entry = self._open.pop(name, None)
            if entry is None:
                continue
            self._prefilling.pop(name, None)
            request = entry.request
            status = getattr(getattr(request, "status", None), "name", "")
            end = Ended(
                entry.admitted_ns,
                entry.first_ns,
                at_ns,
                entry.cached,
                _num_generated(request),
                entry.preemptions,
                REASONS.get(status, "unknown"),
            )
            self._file.ended(entry.handle, end, getattr(request, "block_hashes", ()), entry.blocks)


def _num_generated(request: Any) -> int | None:
    return getattr(request, "num_output_tokens", None)
