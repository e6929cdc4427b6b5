"""Step records of a vLLM server: their file as a table of (n, b) steps, whoever wrote it.

The stat logger in the API server's process writes one kind of file, the observer in the engine core another. A damaged
line is counted and quoted, never repaired and never an error. A value that the server did not show is null.
Source of the columns: harness/stacks/vllm/inside/vllm_step_log/logger.py, format 1.
"""

from __future__ import annotations

import gzip
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
import pyarrow as pa

from harness.errors import RecordsError
from harness.kinds import ServingStack
from harness.model.spec.server import SERVER_KEYS
from harness.stacks.vllm.core_steps import (
    MARK,
    MAX_ENGINES,
    CoreSteps,
    check_columns,
    header_of,
    parsed,
    read_core_steps,
    record_lines,
)

INSIDE = Path(__file__).resolve().parent / "inside"
"""Goes on the server's PYTHONPATH; it imports nothing of the harness."""
FORMAT = 1
MAX_COUNT = 1 << 62
MAX_FLOAT_COUNT = 1 << 53
MAX_TEXT_CHARS = 64
_COLUMNS = {
    "at_ns": pa.int64(),
    "running": pa.int64(),
    "waiting": pa.int64(),
    "skipped_waiting": pa.int64(),
    "kv_usage": pa.float64(),
    "prefix_queries": pa.int64(),
    "prefix_hits": pa.int64(),
    "unpadded_tokens": pa.int64(),
    "padded_tokens": pa.int64(),
    "runtime_mode": pa.string(),
    "context_requests": pa.int64(),
    "context_tokens": pa.int64(),
    "generation_requests": pa.int64(),
    "generation_tokens": pa.int64(),
    "is_dummy": pa.bool_(),
    "prompt_tokens": pa.int64(),
    "generated_tokens": pa.int64(),
    "preempted": pa.int64(),
    "logger_ns": pa.int64(),
}
COLUMNS = tuple(_COLUMNS)
_DERIVED = {
    "kind": pa.string(),
    "n": pa.int64(),
    "b": pa.int64(),
    "began_ns": pa.int64(),
    "decode_context": pa.int64(),
}
SCHEMA = pa.schema([*_COLUMNS.items(), *_DERIVED.items()])
"""The columns of a record, and derived: kind of the step; n and b of a decode step, null for others.

n counts requests, and with speculative decoding tokens, as b does. Of an engine core, null for others: began_ns, when
schedule() was called; decode_context, summed sequence lengths of the step's decodes.
"""
_SETTINGS = {key: row.header for key, row in SERVER_KEYS.items() if row.header}
AHEAD = ("num_hash_lookahead_tokens", "num_prefill_lookahead")
"""Tokens after a block that its hash covers, and after a part of a prompt that the drafter reads."""
ENGINE_SETTINGS = ("scheduler", "kv_coordinator", "kv_groups", *AHEAD)
"""What the header of an engine core shows of its scheduler and its KV memory, beside the keys of a ServerSpec."""
OTHER_STACK = "vllm_rbln"
MAX_HEADER_BYTES = 1 << 20
BLOCK_BYTES = 1 << 16
"""Of a file that is read from its end."""
KNOWN_SCHEDULERS = ("Scheduler", "AsyncScheduler")
KNOWN_COORDINATORS = ("UnitaryKVCacheCoordinator", "KVCacheCoordinatorNoPrefixCache")
KNOWN_GROUPS = ["FullAttentionSpec"]
EMULATED = "emulated"
STEP_LOG_KEYS = frozenset(_SETTINGS)
"""Keys of a ServerSpec whose values in force the header shows."""
_IS_LOWER = (("unpadded_tokens", "padded_tokens"), ("prefix_hits", "prefix_queries"))
Kind = Literal["decode", "speculative", "prefill", "mixed", "idle", "dummy", "unknown"]
"""mixed: prompt and generated tokens together. speculative: several tokens for a request, and no word of drafts.
unknown: not decidable."""


@dataclass(frozen=True, slots=True)
class StepLog:
    """The file of a server. effective: its settings. steps: see ``SCHEMA``, instants in CLOCK_MONOTONIC ns.

    absent: settings and columns that this vLLM does not have. num_damaged: lines left out; first_damaged: the first of
    them, shortened. cores: the records of engine cores, where these are the file; at_ns is then the end of the step,
    else its receipt by the API server. engines: data-parallel engines whose steps these are.
    """

    vllm: str
    effective: Mapping[str, Any]
    absent: tuple[str, ...]
    steps: pa.Table
    num_damaged: int
    first_damaged: str
    cores: tuple[CoreSteps, ...] = ()
    engines: tuple[int, ...] = (0,)

    @property
    def settings(self) -> dict[str, Any]:
        """Keys of a ServerSpec with the values in force; a key that the header does not show is absent."""
        return settings_of(self.effective)

    @property
    def engine_settings(self) -> dict[str, Any]:
        """Of ``ENGINE_SETTINGS`` those that are shown."""
        return {key: self.effective[key] for key in ENGINE_SETTINGS if self.effective.get(key) is not None}

    @property
    def unknown_rules(self) -> str:
        """Why the scheduler's rules are not known to hold here; "" where they are, or nothing shows."""
        return unknown_rules(self.effective)

    @property
    def num_declared_engines(self) -> int:
        """Data-parallel engines behind the server's address, at least; one where a load balancer of its own is.

        An engine core of a dense model counts itself alone; the name of its process shows that there are others.
        """
        size = self.effective.get("data_parallel_size")
        others = 2 if self.effective.get("is_data_parallel") is True else 1
        if self.effective.get("data_parallel_external_lb") is True:
            return len(self.engines)
        shown = size if isinstance(size, int) and 0 < size <= MAX_ENGINES else 1
        return max(shown, others, *(engine + 1 for engine in self.engines))

    @property
    def has_graphs(self) -> bool:
        """Whether the server runs steps as captured graphs."""
        return has_graphs(self.effective)

    @property
    def num_drafts(self) -> int:
        """Tokens that speculative decoding drafts for a request and step; 0 without it."""
        drafts = self.effective.get("num_speculative_tokens")
        return drafts if isinstance(drafts, int) and drafts > 0 else 0

    @property
    def acceptance(self) -> str:
        """Of drafts: "synthetic" where it is drawn by given rates, "real" where the drafter decides; "" without."""
        is_synthetic = self.effective.get("rejection_sample_method") == "synthetic"
        return ("synthetic" if is_synthetic else "real") if self.num_drafts else ""

    @property
    def decode_steps(self) -> pa.Table:
        """at_ns, n, b and runtime_mode of the pure decode steps whose padding was shown."""
        # n and b are null for every other step.
        has_padding = pa.array([padded is not None for padded in self.steps["b"].to_pylist()], pa.bool_())
        return self.steps.filter(has_padding).select(["at_ns", "n", "b", "runtime_mode"])

    @property
    def num_by_kind(self) -> dict[str, int]:
        """How many steps there are of each kind."""
        return dict(Counter(cast("list[str]", self.steps["kind"].to_pylist())))

    @property
    def eager_by_n(self) -> dict[int, int]:
        """Decode steps that ran without a graph although graphs are on, by n."""
        if not self.has_graphs:
            return {}
        steps = self.decode_steps.select(["n", "runtime_mode"]).to_pylist()
        return dict(sorted(Counter(int(step["n"]) for step in steps if step["runtime_mode"] == "NONE").items()))

    @property
    def unseen(self) -> tuple[str, ...]:
        """What the records cannot show, each with its remedy or reason."""
        notes: list[str] = []
        if self._is_never_shown("padded_tokens"):
            notes.append(
                "padded tokens: this model runner does not report them"
                if self.effective.get("cudagraph_metrics")
                else "padded tokens: start the server with --cudagraph-metrics"
            )
        if self._is_never_shown("generation_requests"):
            notes.append(
                "requests of a step by phase: start the server with --enable-logging-iteration-details; "
                "decode and mixed steps are distinguished by token counts"
            )
        if self.absent:
            notes.append(f"vLLM {self.vllm or 'of unknown version'} has no {', '.join(self.absent)}")
        return tuple(notes)

    def _is_never_shown(self, column: str) -> bool:
        return self.steps.num_rows > 0 and self.steps[column].null_count == self.steps.num_rows

    @property
    def cost_us(self) -> dict[str, float]:
        """Time of the logger itself, microseconds a step. The cost of a step is in the record of the next step."""
        costs = np.asarray(self.steps["logger_ns"])[1:] / 1000.0
        if not len(costs):
            return {}
        return {"mean": float(costs.mean()), "p50": float(np.median(costs)), "max": float(costs.max())}


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """Sums over the decode steps of a server that drafts. num_drafts: requests with drafts, over all steps.

    accepted_at: of them, how many accepted the first draft, the first two, and so on. num_padded: requests that were
    admitted with drafts which the model always rejects; they are in the others. tokens, padded_tokens: of the steps
    whose padding is shown. eager: steps without a graph, by (requests, tokens).
    """

    num_steps: int
    num_drafts: int
    draft_tokens: int
    accepted_at: tuple[int, ...]
    num_padded: int
    tokens: int
    padded_tokens: int
    eager: Mapping[tuple[int, int], int]

    @property
    def accepted_tokens(self) -> int:
        """Drafts that were accepted."""
        return sum(self.accepted_at)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of the drafted requests that accepted at least so many drafts, from one on; () where none drafted.

        Requests padded at their admission are left out: their drafts are no guess of the drafter.
        """
        num_real = self.num_drafts - self.num_padded
        return tuple(number / num_real for number in self.accepted_at) if num_real > 0 else ()


def draft_figures(log: StepLog) -> DraftFigures | None:
    """The sums of a log; None of a server without drafts, and where no engine core wrote them."""
    steps = [step for core in log.cores for step in core.steps if step.drafts]
    if not log.num_drafts or not steps:
        return None
    num_drafts = draft_tokens = num_padded = tokens = padded = num_steps = 0
    accepted_at = [0] * log.num_drafts
    eager = Counter[tuple[int, int]]()
    for step in steps:
        padded_ids = step.padded_ids
        for name, drafts, accepted in zip(step.request_ids, step.drafts, step.accepted, strict=False):
            if drafts and accepted is not None:
                num_drafts, draft_tokens = num_drafts + 1, draft_tokens + drafts
                num_padded += name in padded_ids
                for place in range(min(accepted, log.num_drafts)):
                    accepted_at[place] += 1
        if step.details is None or step.details.context_requests or not step.details.generation_requests:
            continue
        num_steps += 1
        if (size := step.values["padded_tokens"]) is not None:
            tokens, padded = tokens + sum(step.tokens), padded + size
        if log.has_graphs and step.values["runtime_mode"] == "NONE":
            eager[len(step.tokens), sum(step.tokens)] += 1
    by_size = dict(sorted(eager.items()))
    return DraftFigures(num_steps, num_drafts, draft_tokens, tuple(accepted_at), num_padded, tokens, padded, by_size)


def settings_of(effective: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a ServerSpec that the settings in a header show, with their values."""
    shown = {key: effective[name] for key, name in _SETTINGS.items() if effective.get(name) is not None}
    sizes = shown.pop("decode_buckets", [])
    # Without graphs nothing is captured, whatever the list of sizes says.
    if has_graphs(effective) and sizes:
        shown["decode_buckets"] = sorted(sizes)
    return shown


def unknown_rules(effective: Mapping[str, Any], scheduler: object = None) -> str:
    """Why the scheduler's rules are not known to hold for a server with these settings; "" where nothing shows so.

    They are compared with vLLM's own schedulers and one pool of full attention, first come first served.
    """
    name = str(scheduler or effective.get("scheduler") or "")
    if name.startswith(OTHER_STACK) or name == EMULATED:
        return ""
    groups = effective.get("kv_groups", KNOWN_GROUPS)
    coordinator = effective.get("kv_coordinator", KNOWN_COORDINATORS[0])
    named = ", ".join(map(str, groups)) if isinstance(groups, list) else str(groups)
    is_own = name.startswith("vllm.") and name.rpartition(".")[2] in KNOWN_SCHEDULERS
    differing = {
        f"the scheduler is {name}": bool(name) and not is_own,
        f"KV memory is kept in groups of {named}": groups != KNOWN_GROUPS,
        f"it is coordinated by {coordinator}": coordinator not in KNOWN_COORDINATORS,
        "its drafter reads several tokens ahead": any((effective.get(name) or 0) > 1 for name in AHEAD),
        f"at most {effective.get('max_loras')} LoRA adapters share a batch": bool(effective.get("max_loras")),
        f"its queue is by {effective.get('policy')}": effective.get("policy") not in (None, "fcfs"),
    }
    return "; ".join(why for why, differs in differing.items() if differs)


def has_graphs(effective: Mapping[str, Any]) -> bool:
    """Whether a server with these settings runs steps as captured graphs."""
    return not effective.get("enforce_eager") and effective.get("cudagraph_mode") not in (None, "NONE")


def stack_of(scheduler: object) -> ServingStack | None:
    """Whose scheduler a class is, by its module; None where it is another one, or not shown."""
    name = str(scheduler or "")
    return (
        ServingStack.rbln if name.startswith(OTHER_STACK) else ServingStack.vllm if name.startswith("vllm.") else None
    )


@dataclass(frozen=True, slots=True)
class RecordedServer:
    """What the first line of a recording says of the server that was recorded.

    is_eager: it was started to run its steps without graphs.
    """

    vllm: str
    stack: ServingStack | None
    settings: Mapping[str, Any]
    is_eager: bool


def recorded_server(path: Path, mark: str = "vllm_sessions") -> RecordedServer | None:
    """The server of a file of recorded sessions, packed or not, or of the first in a folder; None of another file.

    mark: the key of the first line; "vllm_core_steps": of the steps of an engine core.
    """
    header = recorded_header(path, mark)
    if header is None:
        return None
    effective = cast("dict[str, Any]", header["effective"]) if isinstance(header.get("effective"), dict) else {}
    is_eager = effective.get("enforce_eager") is True
    return RecordedServer(
        str(header.get("vllm") or ""), stack_of(header.get("scheduler")), settings_of(effective), is_eager
    )


def recorded_header(path: Path, mark: str) -> dict[str, Any] | None:
    """The first line with this key of a record, packed or not, or of the first in a folder; None of another file."""
    files = sorted(each for each in path.rglob("*.jsonl*") if each.is_file()) if path.is_dir() else [path]
    for each in files:
        try:
            with gzip.open(each) if each.suffix == ".gz" else each.open("rb") as file:
                header = parsed(file.readline(MAX_HEADER_BYTES))
        except (OSError, EOFError):
            continue
        if isinstance(header, dict) and mark in header:
            return cast("dict[str, Any]", header)
    return None


def header_before(file: BinaryIO, offset: float = math.inf) -> tuple[bytes, bytes]:
    """The header in force of the first record at ``offset`` or later, and that record; the file is then read up to it.

    A file's first line is a header, and so is each that a server which is started again writes: an object with columns.
    Without such a record the last header of the file, and nothing. It is read from ``offset`` on, and back from there.
    """
    file.seek(0)
    first = file.readline()
    at = len(first)
    if first and offset > at:
        # The line that the byte before lies in ends where the first one behind ``offset`` begins.
        file.seek(0, SEEK_END) if offset == math.inf else file.seek(int(offset) - 1)
        file.readline()
        at = file.tell()
    header = b""
    for line in iter(file.readline, b""):
        if not _is_header(line):
            break
        header = line
    else:
        line = b""
    place = file.tell()
    header = header or _last_header(file, len(first), at) or first
    file.seek(place)
    return header, line


def _last_header(file: BinaryIO, first: int, end: int) -> bytes:
    """The last header that begins at ``first`` or later and before ``end``; empty where there is none."""
    while end > first:
        begin = max(first, end - BLOCK_BYTES)
        # From the newline before the first of these bytes on.
        file.seek(begin - 1)
        block = file.read(end - begin + 1)
        place = len(block)
        while (place := block.rfind(b"\n{", 0, place)) >= 0:
            file.seek(begin + place)
            if _is_header(line := file.readline()):
                return line
        end = begin
    return b""


def _is_header(line: bytes) -> bool:
    return line.startswith(b"{") and b'"columns"' in line


def read_step_log(content: bytes, *, where: str = "step log") -> StepLog:
    """The records of a server's file; RecordsError when it does not start with the header of a step log."""
    first = content.partition(b"\n")[0]
    if b'"observer_format"' in first:
        raise RecordsError("is of an observer before this version", where=where, hint="Commit 8443c613 reads it")
    if MARK in first:
        return _log_of_core(read_core_steps(content, where=where))
    header = _header(content[: content.find(b"\n") + 1], where)
    rows: list[tuple[list[Any], bytes]] = []
    damaged, absent = list[bytes](), [str(name) for name in _list(header.get("absent"))]
    hint = "Use a file per server, and --api-server-count 1"
    for value, line in record_lines(content, "vllm_step_log", absent, where, hint):
        row = _row(value)
        if row is None:
            damaged.append(line)
            continue
        if rows and row[0] < rows[-1][0][0]:
            # Of two records in the wrong order the one that does not fit the record before them is damaged.
            if len(rows) > 1 and row[0] < rows[-2][0][0]:
                damaged.append(line)
                continue
            damaged.append(rows.pop()[1])
        rows.append((row, line))
    effective = cast("dict[str, Any]", header["effective"])
    return StepLog(
        vllm=str(header.get("vllm", "")),
        effective=effective,
        absent=tuple(dict.fromkeys(absent)),
        steps=_table(
            [row for row, _ in rows], has_drafts=effective.get("num_speculative_tokens") is not None, absent=absent
        ),
        num_damaged=len(damaged),
        first_damaged=damaged[0][:120].decode("utf-8", "replace") if damaged else "",
        engines=(engine if isinstance(engine := header.get("engine"), int) and 0 <= engine < MAX_ENGINES else 0,),
    )


def merged(logs: Sequence[StepLog]) -> StepLog:
    """The logs of data-parallel engines as one, in the order of time; that of one engine as it is."""
    if len(logs) == 1:
        return logs[0]
    first = logs[0]
    return replace(
        first,
        absent=tuple(dict.fromkeys(name for log in logs for name in log.absent)),
        steps=pa.concat_tables([log.steps for log in logs]).sort_by("at_ns"),
        num_damaged=sum(log.num_damaged for log in logs),
        first_damaged=next((log.first_damaged for log in logs if log.first_damaged), ""),
        cores=tuple(core for log in logs for core in log.cores),
        engines=tuple(engine for log in logs for engine in log.engines),
    )


def numbered_through(logs: Sequence[StepLog]) -> StepLog:
    """The logs of several servers as one, their engines numbered through from 0."""
    renumbered: list[StepLog] = []
    first = 0
    for log in logs:
        engines = tuple(engine + first for engine in log.engines)
        cores = tuple(replace(core, requests=_renumbered(core.requests, first)) for core in log.cores)
        renumbered.append(replace(log, cores=cores, engines=engines))
        first = max(engines) + 1
    return merged(renumbered)


def _renumbered(requests: pa.Table, first: int) -> pa.Table:
    engines = [engine + first for engine in requests["engine"].to_pylist()]
    place = requests.schema.get_field_index("engine")
    return requests.set_column(place, requests.schema.field(place), pa.array(engines, pa.int64()))


def _log_of_core(core: CoreSteps) -> StepLog:
    """The steps of an engine core in the columns of a step log; what only the API server sees is null."""
    effective = {"scheduler": core.header.get("scheduler"), **cast("dict[str, Any]", core.header["effective"])}
    num_blocks = effective.get("num_gpu_blocks")
    has_drafts = effective.get("num_speculative_tokens") is not None
    rows: list[list[Any]] = []
    derived: list[tuple[int, int | None]] = []
    for place, step in enumerate(core.steps):
        values, details = step.values, step.details
        after = core.steps[place + 1].values if place + 1 < len(core.steps) else None
        free, running = values["free_blocks"], values["running"]
        row = dict.fromkeys(_COLUMNS)
        same = ("waiting", "skipped_waiting", "generated_tokens", "padded_tokens", "runtime_mode")
        row |= {name: values[name] for name in same}
        if row["padded_tokens"] is None and (
            effective.get("enforce_eager") or effective.get("cudagraph_mode") == "NONE"
        ):
            # Without graphs nothing is padded.
            row["padded_tokens"] = sum(step.tokens)
        row |= {"at_ns": values["end_ns"], "unpadded_tokens": sum(step.tokens), "logger_ns": values["observer_ns"]}
        # Those that ended with this step are named in the next line.
        row["running"] = None if running is None else max(0, running - (len(after["finished"]) if after else 0))
        row["is_dummy"], row["preempted"] = False, len(values["preempted"])
        if free is not None and isinstance(num_blocks, int) and num_blocks > 1:
            # One block is a placeholder.
            row["kv_usage"] = max(0.0, 1 - free / (num_blocks - 1))
        if details is not None:
            row |= {name: value for name, value in details._asdict().items() if name in row}
            if effective.get("enable_prefix_caching") and details.hits is not None:
                row |= {"prefix_queries": details.queries, "prefix_hits": details.hits}
        rows.append(list(row.values()))
        # Rejected drafts are computed and leave the sequence: without their number its length is not known.
        is_known = details is not None and (bool(step.drafts) or not has_drafts or not step.tokens)
        derived.append((values["schedule_ns"], details.decode_context if details is not None and is_known else None))
    return StepLog(
        vllm=str(core.header.get("vllm", "")),
        effective=effective,
        absent=core.absent,
        steps=_table(rows, has_drafts=has_drafts, absent=core.absent, derived=derived),
        num_damaged=core.num_damaged,
        first_damaged=core.first_damaged,
        cores=(core,),
        engines=(int(core.header["engine"]),),
    )


def load_step_log(path: Path) -> StepLog:
    """``read_step_log`` of a file."""
    with RecordsError.on_os_error("cannot be read", where=path):
        return read_step_log(path.read_bytes(), where=str(path))


def _header(line: bytes, where: str) -> dict[str, Any]:
    header = header_of(line, "vllm_step_log", FORMAT)
    if not isinstance(header.get("effective"), dict):
        raise RecordsError("does not start with the header of a step log", where=where)
    check_columns(header, tuple(_COLUMNS), where)
    return header


def _list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _row(value: object) -> list[Any] | None:
    """The values of a record; None when it is damaged."""
    row = _list(value)
    if len(row) != len(_COLUMNS) or not all(fits(value) for fits, value in zip(_FITS, row, strict=True)):
        return None
    values = dict(zip(_COLUMNS, row, strict=True))
    if values["at_ns"] is None or values["logger_ns"] is None:
        return None
    for low, high in _IS_LOWER:
        if values[low] is not None and values[high] is not None and values[low] > values[high]:
            return None
    return row


def _is_flag(value: object) -> bool:
    return value is None or isinstance(value, bool)


def _is_text(value: object) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= MAX_TEXT_CHARS and value.isprintable())


def _is_number(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= MAX_FLOAT_COUNT
    return value is None or isinstance(value, float)


def _is_count(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and 0 <= value <= MAX_COUNT
    return value is None


_IS_OF_KIND: Mapping[pa.DataType, Callable[[object], bool]] = {
    pa.bool_(): _is_flag,
    pa.string(): _is_text,
    pa.float64(): _is_number,
}
# Chosen once: comparing the kinds of pyarrow takes longer than reading a value.
_FITS = tuple(_IS_OF_KIND.get(kind, _is_count) for kind in _COLUMNS.values())


def _table(
    rows: Sequence[list[Any]],
    *,
    has_drafts: bool,
    absent: Sequence[str],
    derived: Sequence[tuple[int | None, int | None]] = (),
) -> pa.Table:
    """Rows of ``COLUMNS`` with what follows from them. derived: (began_ns, decode_context) of each, where known."""
    kinds: list[Kind] = []
    sizes: list[int | None] = []
    padded: list[int | None] = []
    for row in rows:
        step = dict(zip(_COLUMNS, row, strict=True))
        # An engine core shows the work of a step, or it is not known.
        shows_output = "generated_tokens" not in absent and not (derived and step["generation_requests"] is None)
        kind = _kind(step, has_drafts=has_drafts, shows_output=shows_output)
        n = step["unpadded_tokens"] if step["generation_requests"] is None else step["generation_requests"]
        n = step["generation_tokens"] if has_drafts and step["generation_tokens"] is not None else n
        kinds.append(kind)
        sizes.append(n if kind == "decode" else None)
        padded.append(step["padded_tokens"] if kind == "decode" else None)
    columns: list[list[Any]] = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in _COLUMNS]
    began, contexts = ([pair[place] for pair in derived] if derived else [None] * len(rows) for place in (0, 1))
    columns += [list(kinds), sizes, padded, list(began), list(contexts)]
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


def _kind(step: Mapping[str, Any], *, has_drafts: bool, shows_output: bool) -> Kind:
    """The kind of a step: from the scheduler's own counts where the server shows them, else from token counts."""
    if step["is_dummy"]:
        return "dummy"
    if step["generation_requests"] is not None and step["context_requests"] is not None:
        return _kind_by_details(step, has_drafts=has_drafts)
    tokens, generated = step["unpadded_tokens"], step["generated_tokens"]
    # The engine core's message after the last request has ended has no counts: nothing ran.
    is_over = shows_output and tokens is None and generated is None and step["running"] == 0
    if tokens == 0 or is_over:
        return "idle"
    if tokens is None or has_drafts or not shows_output:
        return "unknown"
    if not generated:
        # No request produced a token: chunks of prompts only.
        return "prefill"
    # A prompt's chunk makes the step larger than its output. So does a request that ended while its next token was
    # computed (asynchronous scheduling): such a step is left out of the decode steps rather than counted wrongly.
    return "decode" if tokens == generated and not step["prompt_tokens"] else "mixed"


def _kind_by_details(step: Mapping[str, Any], *, has_drafts: bool) -> Kind:
    prompts, requests = step["context_requests"], step["generation_requests"]
    tokens = (step["context_tokens"] or 0) + (step["generation_tokens"] or 0)
    if step["unpadded_tokens"] is not None and step["unpadded_tokens"] != tokens:
        # Counts and padding belong to different steps.
        return "unknown"
    if prompts:
        return "mixed" if requests else "prefill"
    if not requests:
        return "idle"
    return "decode" if has_drafts or step["generation_tokens"] == requests else "speculative"
