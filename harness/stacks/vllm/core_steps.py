"""Step records of vLLM's engine cores: the batch of every step, and what became of every request.

A damaged line is counted and quoted, never repaired and never an error. A value that the server did not show is null.
Source of the columns: harness/stacks/vllm/inside/vllm_step_log, core.py and device.py, format 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import pyarrow as pa
import pydantic_core

from harness.errors import RecordsError

MARK = b'"vllm_core_steps"'
"""In the first line of such a file, and of no other."""
FORMAT = 1
COLUMNS = (
    *("step", "schedule_ns", "scheduled_ns", "update_ns", "end_ns", "requests", "tokens", "admitted"),
    *("preempted", "finished", "running", "waiting", "skipped_waiting", "free_blocks", "generated_tokens"),
    *("unpadded_tokens", "padded_tokens", "runtime_mode", "observer_ns"),
)
DRAFT_COLUMNS = ("drafts", "accepted")
"""Of a server that decodes speculatively, before the last column."""
DEVICE_COLUMNS = (
    *("device_start_ns", "device_end_ns", "device_ns", "device_calls", "copy_ns", "executed_ns", "dummy_slot"),
    *("evictions", "slots_held", "slots_free"),
)
"""Of vllm-rbln, before the last column. evictions: a list of [slot, caller]; the others are numbers, or null."""
COLUMNS_WITH_DRAFTS = (*COLUMNS[:-1], *DRAFT_COLUMNS, *COLUMNS[-1:])
MAX_COUNT = 1 << 62
MAX_ID_CHARS = 512
MAX_MODE_CHARS = 64
MAX_ENGINES = 4096
_COUNTS = ("running", "waiting", "skipped_waiting", "free_blocks", "generated_tokens", "unpadded_tokens")
REQUESTS = pa.schema(
    [
        ("engine", pa.int64()),
        ("request_id", pa.string()),
        ("queued_ns", pa.int64()),
        ("admitted_ns", pa.int64()),
        ("first_token_ns", pa.int64()),
        ("last_ns", pa.int64()),
        ("prompt_tokens", pa.int64()),
        ("cached_tokens", pa.int64()),
        ("computed_tokens", pa.int64()),
        ("recomputed_tokens", pa.int64()),
        ("prefill_steps", pa.int64()),
        ("decode_steps", pa.int64()),
        ("preemptions", pa.int64()),
    ]
)
"""A row per request, in the order of their admission. Instants in CLOCK_MONOTONIC ns.

queued_ns: put into the scheduler's queue. admitted_ns: schedule() of its first step began. first_token_ns: the step
that completed its prompt ended. last_ns: its last step ended. cached_tokens: found in the prefix cache at admission;
null where the scheduler does not show them. computed_tokens: of the prompt. recomputed_tokens: prompt and generated
tokens computed again after preemptions.
"""


class CoreStep(NamedTuple):
    """A step that ended. request_ids, tokens: of the batch, in its order. values: its record, by column.

    details: prompts and generation, None where an admission is not in the file. drafts, accepted: tokens drafted for
    each request, and how many were accepted, None of a request that had ended; () of a server without drafts, and
    accepted also of a line that lacks it.
    """

    values: Mapping[str, Any]
    request_ids: tuple[str, ...]
    tokens: tuple[int, ...]
    details: StepDetails | None
    drafts: tuple[int, ...] = ()
    accepted: tuple[int | None, ...] = ()

    @property
    def padded_ids(self) -> frozenset[str]:
        """Requests that were admitted with this step and padded with drafts that the model rejects."""
        admitted = {entry[1] for entry in self.values["admitted"]}
        names = zip(self.request_ids, self.drafts, strict=True) if self.drafts else ()
        return frozenset(name for name, drafts in names if drafts and name in admitted)


class StepDetails(NamedTuple):
    """What a step computed. decode_context: summed sequence lengths of its decodes, the new tokens included.

    A prompt's last token that is padded with drafts is of the generation. prompt_tokens: of the prompts that it
    completed. queries, hits: tokens of the requests that it admitted for the first time, and how many of them were
    cached; hits is None where that is not shown. parts: of prompts, the tokens before each and its own.
    num_later_parts: of those, how many continue a prompt of an earlier step.
    """

    context_requests: int
    context_tokens: int
    generation_requests: int
    generation_tokens: int
    decode_context: int
    prompt_tokens: int
    queries: int
    hits: int | None
    parts: tuple[tuple[int, int], ...]
    num_later_parts: int


@dataclass(frozen=True, slots=True)
class CoreSteps:
    """The file of an engine core. header: its first line. absent: columns that this vLLM cannot fill.

    requests: see ``REQUESTS``. num_unended: steps that were scheduled and never ended. num_missing: steps whose lines
    are not in the file.
    """

    header: Mapping[str, Any]
    absent: tuple[str, ...]
    steps: tuple[CoreStep, ...]
    requests: pa.Table
    num_damaged: int
    first_damaged: str
    num_unended: int
    num_missing: int


@dataclass(slots=True)
class _Request:
    """A request as far as the lines have shown it, in the columns of ``REQUESTS``.

    computed, wanted: tokens of its sequence; wanted ends a prefill. found: cached tokens of its latest admission.
    """

    request_id: str
    queued_ns: int | None
    admitted_ns: int
    cached_tokens: int | None
    prompt_tokens: int
    computed: int
    wanted: int
    found: int
    computed_tokens: int | None
    first_token_ns: int | None = None
    last_ns: int | None = None
    recomputed_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    preemptions: int = 0

    @property
    def is_prefill(self) -> bool:
        return self.computed < self.wanted


@dataclass(slots=True)
class _Walk:
    """The lines of a file in order. batch: handles of the last line; None where that line is damaged or missing."""

    requests: dict[int, _Request] = field(default_factory=dict[int, _Request])
    names: dict[int, str] = field(default_factory=dict[int, str])
    steps: list[CoreStep] = field(default_factory=list[CoreStep])
    batch: list[int] | None = None
    last_step: int | None = None
    num_unended: int = 0
    num_missing: int = 0

    def take(self, values: Mapping[str, Any]) -> bool:
        """Whether the record fits those before it."""
        step, requests = values["step"], values["requests"]
        if self.last_step is not None:
            if step <= self.last_step:
                return False
            missing = step - self.last_step - 1
            self.num_missing += missing
            if missing:
                self.batch = None
        self.last_step = step
        batch = self.batch if requests is None else cast("list[int]", requests)
        tokens = values["tokens"]
        each = [values.get(column) for column in ("tokens", *DRAFT_COLUMNS)]
        if batch is None or any(
            isinstance(column, list) and len(cast("list[Any]", column)) != len(batch) for column in each
        ):
            self.batch = None
            return False
        self.batch = batch
        counts = tuple(cast("list[int]", tokens)) if isinstance(tokens, list) else (cast("int", tokens),) * len(batch)
        queries, hits = self._admit(values)
        for handle in values["preempted"]:
            if handle in self.requests:
                self.requests[handle].preemptions += 1
        if values["end_ns"] is None:
            self.num_unended += 1
        names = tuple(self.names.get(handle, "") for handle in batch)
        drafts, accepted = (_each(values.get(column), len(batch)) for column in DRAFT_COLUMNS)
        details = self._compute(batch, counts, values, queries, hits)
        if values["end_ns"] is not None:
            self.steps.append(CoreStep(values, names, counts, details, drafts, accepted))
        return True

    def _admit(self, values: Mapping[str, Any]) -> tuple[int, int | None]:
        queries, hits = 0, 0
        for handle, name, queued_ns, wanted, cached, prompt in values["admitted"]:
            self.names[handle] = name
            if wanted is None:
                continue
            known = self.requests.get(handle)
            if known is not None:
                known.computed, known.wanted, known.found = cached or 0, wanted, cached or 0
                continue
            prompt = wanted if prompt is None else prompt
            # Where nobody knows what was cached, nobody knows what was computed.
            counts = (cached, prompt, cached or 0, wanted, cached or 0, None if cached is None else 0)
            self.requests[handle] = _Request(name, queued_ns, values["schedule_ns"], *counts)
            queries += wanted
            hits = None if hits is None or cached is None else hits + cached
        return queries, hits

    def _compute(
        self, batch: Sequence[int], counts: Sequence[int], values: Mapping[str, Any], queries: int, hits: int | None
    ) -> StepDetails | None:
        drafts, accepted = (_each(values.get(column), len(batch)) for column in DRAFT_COLUMNS)
        of_prompts = of_decodes = decodes = context = completed = later = 0
        parts: list[tuple[int, int]] = []
        end_ns, is_known = values["end_ns"], True
        for place, (handle, tokens) in enumerate(zip(batch, counts, strict=True)):
            request = self.requests.get(handle)
            if request is None:
                is_known = False
                continue
            # Rejected drafts are computed and leave the sequence.
            drafted = drafts[place] if drafts else 0
            rejected = drafted - ((accepted[place] or 0) if accepted else drafted)
            if request.is_prefill and drafted:
                # Its last token, padded with drafts so that the batch keeps its graph.
                decodes, of_decodes = decodes + 1, of_decodes + tokens
                context += request.computed + tokens
                tokens, rejected = tokens - drafted, rejected - drafted
                completed += _prefilled(request, tokens, end_ns)
            elif request.is_prefill:
                of_prompts += tokens
                parts.append((request.computed, tokens))
                later += request.computed > request.found
                completed += _prefilled(request, tokens, end_ns)
            else:
                decodes, of_decodes = decodes + 1, of_decodes + tokens
                context += request.computed + tokens
                request.decode_steps += 1
            request.computed += tokens - rejected
            request.last_ns = end_ns
        if not is_known:
            return None
        work = (len(parts), of_prompts, decodes, of_decodes)
        return StepDetails(*work, context, completed, queries, hits, tuple(parts), later)


def _prefilled(request: _Request, tokens: int, end_ns: int | None) -> int:
    """Count a part of a prefill; the prompt's tokens where it is complete with it for the first time."""
    request.prefill_steps += 1
    if request.preemptions:
        request.recomputed_tokens += tokens
    elif request.computed_tokens is not None:
        request.computed_tokens += tokens
    if request.computed + tokens < request.wanted or request.first_token_ns is not None:
        return 0
    request.first_token_ns = end_ns
    return request.prompt_tokens


def read_core_steps(content: bytes, *, where: str = "core steps") -> CoreSteps:
    """The records in the file of an engine core; RecordsError when it does not start with its header."""
    header = _header(content[: content.find(b"\n") + 1], where)
    walk, damaged, absent = _Walk(), list[bytes](), list[str](map(str, header["absent"]))
    for value, line in record_lines(content, "vllm_core_steps", absent, where, "Use a file per server"):
        values = _record(value, header["columns"])
        if values is None:
            walk.batch = None
        if values is None or not walk.take(values):
            damaged.append(line)
    return CoreSteps(
        header=header,
        absent=tuple(dict.fromkeys(absent)),
        steps=tuple(walk.steps),
        requests=_requests_table(walk, int(header["engine"])),
        num_damaged=len(damaged),
        first_damaged=damaged[0][:120].decode("utf-8", "replace") if damaged else "",
        num_unended=walk.num_unended,
        # A damaged line is counted as such.
        num_missing=max(0, walk.num_missing - len(damaged)),
    )


def record_lines(content: bytes, mark: str, absent: list[str], where: str, hint: str) -> Iterator[tuple[object, bytes]]:
    """The value of each record behind a header, None of a damaged one, and its line.

    absent: takes the names in lines that tell columns which this vLLM lacks. RecordsError with ``hint`` at a second
    header, which has the key ``mark``.
    """
    _, *lines, last = content.split(b"\n")
    for line in lines:
        value = parsed(line)
        table = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        if mark in table:
            raise RecordsError("holds the steps of several servers", where=where, hint=hint)
        if set(table) == {"absent"} and isinstance(table["absent"], list):
            absent += map(str, cast("list[Any]", table["absent"]))
        else:
            yield value, line
    if last:
        # It was cut off.
        yield None, last


def _each(column: Any, num_requests: int) -> tuple[Any, ...]:
    """A value for each request of a batch: a list, or a number that holds for all; () where there is none."""
    if column is None:
        return ()
    return tuple(cast("list[Any]", column)) if isinstance(column, list) else (column,) * num_requests


def _header(line: bytes, where: str) -> dict[str, Any]:
    header = header_of(line, "vllm_core_steps", FORMAT)
    is_sound = isinstance(header.get("effective"), dict) and isinstance(header.get("absent"), list)
    engine = header.get("engine", -1)
    if not is_sound or not _is_count(engine) or engine >= MAX_ENGINES:
        raise RecordsError("does not start with the header of an engine core's steps", where=where)
    shown = header.get("columns")
    shown = cast("list[Any]", shown) if isinstance(shown, list) else []
    more = [column for each in (DRAFT_COLUMNS, DEVICE_COLUMNS) if each[0] in shown for column in each]
    check_columns(header, (*COLUMNS[:-1], *more, *COLUMNS[-1:]), where)
    return header


def header_of(line: bytes, mark: str, version: int) -> dict[str, Any]:
    """The first line of a file of steps; empty where it is not the header of this format."""
    value = parsed(line)
    header = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    return header if header.get(mark) == version else {}


def check_columns(header: Mapping[str, Any], columns: Sequence[str], where: str) -> None:
    """Refuses, as RecordsError, a file whose lines have other columns."""
    if header.get("columns") != list(columns):
        raise RecordsError(
            "has other columns than this version reads", where=where, hint="Use the release that wrote it"
        )


def parsed(line: bytes) -> object:
    """The JSON value of a line; None for a damaged line."""
    try:
        return pydantic_core.from_json(line)
    except ValueError:
        return None


def _record(value: object, columns: Sequence[str]) -> dict[str, Any] | None:
    """A record by column; None when it is damaged."""
    row = cast("list[Any]", value) if isinstance(value, list) else []
    if len(row) != len(columns):
        return None
    values = dict(zip(columns, row, strict=True))
    instants = [values[name] for name in ("schedule_ns", "scheduled_ns", "update_ns", "end_ns")]
    if (values["update_ns"] is None) != (values["end_ns"] is None):
        return None
    shown = [instant for instant in instants if instant is not None]
    mode, tokens = values["runtime_mode"], values["tokens"]
    is_sound = (
        all(_is_count(number) for number in (values["step"], values["observer_ns"], *instants[:2], *shown))
        and shown == sorted(shown)
        and (values["requests"] is None or _are_counts(values["requests"]))
        and (_is_count(tokens) or _are_counts(tokens))
        and _are_drafts(values)
        and _are_of_device(values)
        and all(_are_counts(values[name]) for name in ("preempted", "finished"))
        and all(values[name] is None or _is_count(values[name]) for name in (*_COUNTS, "padded_tokens"))
        and (mode is None or (isinstance(mode, str) and len(mode) <= MAX_MODE_CHARS and mode.isprintable()))
        and isinstance(values["admitted"], list)
        and all(map(_is_admission, cast("list[Any]", values["admitted"])))
    )
    return values if is_sound else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_count, cast("list[Any]", value)))


def _are_drafts(values: Mapping[str, Any]) -> bool:
    """Whether drafts are counts, and what was accepted of them counts or nothing; absent of other servers."""
    drafts, accepted = (values.get(column) for column in DRAFT_COLUMNS)
    known = [each for each in cast("list[Any]", accepted) if each is not None] if isinstance(accepted, list) else []
    is_known = accepted is None or _is_count(accepted) or (isinstance(accepted, list) and _are_counts(known))
    return (drafts is None or _is_count(drafts) or _are_counts(drafts)) and is_known


def _are_of_device(values: Mapping[str, Any]) -> bool:
    """Whether the columns of vllm-rbln are counts, and its evictions pairs of slot and caller; absent of others."""
    evictions, counts = values.get("evictions"), [values.get(name) for name in DEVICE_COLUMNS if name != "evictions"]
    return all(count is None or _is_count(count) for count in counts) and (
        evictions is None or (isinstance(evictions, list) and all(map(_is_eviction, cast("list[Any]", evictions))))
    )


def _is_eviction(value: object) -> bool:
    entry = cast("list[Any]", value) if isinstance(value, list) else []
    return len(entry) == 2 and _is_count(entry[0]) and isinstance(entry[1], str) and len(entry[1]) <= MAX_MODE_CHARS


def _is_admission(value: object) -> bool:
    entry = cast("list[Any]", value) if isinstance(value, list) else []
    if len(entry) != 6 or not _is_count(entry[0]):
        return False
    name = entry[1]
    is_name = isinstance(name, str) and len(name) <= MAX_ID_CHARS and name.isprintable()
    return is_name and all(number is None or _is_count(number) for number in entry[2:])


def _requests_table(walk: _Walk, engine: int) -> pa.Table:
    names = [name for name in REQUESTS.names if name != "engine"]
    rows = [
        {"engine": engine, **{name: getattr(request, name) for name in names}} for request in walk.requests.values()
    ]
    return pa.Table.from_pylist(rows, schema=REQUESTS)
