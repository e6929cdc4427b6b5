"""The sessions of a first experiment: drawn, or recorded agents that fit the server and some minutes of its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from harness.clock import NS_PER_S
from harness.errors import SpecError

if TYPE_CHECKING:
    from harness.model.traces.account import ReadOptions
    from harness.model.traces.recording import TraceFile
    from harness.runner.backends.base import FirstExperiment, Line

# What two drawn requests of a session can take together, rounded up.
DRAWN_TOKENS = 2_560
AGENTS_AT_A_TIME = 8
LONGEST_S = 300.0
"""Of the server's time that one run of recorded agents takes: six replicates of two conditions are an hour."""
OVERLOADED = 1.25
"""Requests whose end comes so many times later than recorded are more than a server can do."""
HUMAN_WAIT_CAP_NS = 60 * NS_PER_S
MOST_SIMULATED = 512
"""Sessions of a recording that are simulated to know how long all of them take."""
SHARED_SHARE = 0.01
"""Of prompt tokens that begin as an earlier request's, from which on rules must be able to reuse them."""


@dataclass(frozen=True)
class Workload:
    """The lines of [workload]. slot_tokens: longest request that it needs room for; 0: the default's.

    num_at_once: agents that it lets run at a time. server: lines of [server] that it needs. shared: share of its prompt
    tokens that begin as those of an earlier session.
    """

    lines: tuple[Line, ...]
    slot_tokens: int = 0
    notes: tuple[str, ...] = ()
    num_at_once: int = AGENTS_AT_A_TIME
    server: tuple[Line, ...] = ()
    shared: float = 0.0


ReadTrace: TypeAlias = "tuple[str, TraceFile, tuple[str, ...]]"
Predicted = Callable[[Workload], float]
"""Seconds that one run takes with this workload, by simulation."""


def drawn(start: FirstExperiment) -> Workload:
    """Drawn sessions with prompts that fit the server."""
    lines: list[Line] = [
        (f"num_sessions = {AGENTS_AT_A_TIME}", "agents at a time"),
        ("wait_cap_s = 10.0", "waits for tools are cut here"),
    ]
    if start.room_tokens < DRAWN_TOKENS:
        low, high, answer = start.room_tokens // 8, start.room_tokens // 4, start.room_tokens // 16
        lines.append((f'prompt_tokens = {{ distribution = "uniform", low = {low}, high = {high} }}', ""))
        lines.append((f'generate_tokens = {{ distribution = "uniform", low = {answer // 2}, high = {answer} }}', ""))
    return Workload(tuple(lines))


def recorded(
    read: ReadTrace, start: FirstExperiment, predicted: Predicted, agents: int = 0, *, takes_rules: bool = False
) -> Workload:
    """The sessions of a recorded trace. read: from ``read_trace_of``.

    Lengths are divided where they are too long. Where the whole takes longer than some minutes, less of it is replayed.
    agents: so many at once, several of them with one recording; 0: each recording once. takes_rules: whether the server
    takes other rules without being another one.
    """
    from harness.model.spec.server import MOST_CONTEXT_TOKENS
    from harness.runner.backends.base import SLOT_TOKENS

    written, trace, notes = read
    requests = [request for recording in trace.recordings for request in recording.requests]
    longest = max(request.prompt_tokens + request.generate_tokens for request in requests)
    shared = _shared(trace)
    server = _reusing(shared) if takes_rules and shared >= SHARED_SHARE else ()
    room_tokens = MOST_CONTEXT_TOKENS if server else start.room_tokens
    # Lengths are rounded up, prompt and answer each.
    divisor = 1 if longest <= room_tokens else -(-longest // (room_tokens - 2))
    lines: list[Line] = [
        ('source = "trace"', ""),
        (f'trace = "{written}"', f"{len(trace.recordings)} sessions, {len(requests)} requests"),
    ]
    if divisor > 1:
        why = f"divides every length: the longest request has {longest} tokens, and {room_tokens} fit"
        lines.append((f'scale = "1/{divisor}"', why))
    if any(request.wait_kind == "human" for request in requests):
        lines.append(('human_waits = "cap"', "waits for a person; those for tools are kept as recorded"))
        lines.append((f"human_wait_cap_s = {HUMAN_WAIT_CAP_NS / NS_PER_S:.1f}", ""))
    needed = min(-(-longest // divisor) + 2, room_tokens)
    slots = -(-needed // 128) * 128 if start.sets_slot_tokens and needed > SLOT_TOKENS else 0
    at_once = agents or min(AGENTS_AT_A_TIME, len(trace.recordings))

    def made(population: Sequence[Line]) -> Workload:
        return Workload((*lines, *population), slots, notes, at_once, server, shared)

    if agents:
        dealt = f"at once, begun within the mean wait; recordings dealt to them: {len(trace.recordings)}"
        share = "the blocks that several recordings name" if shared else "no tokens"
        return made([(f"agents = {agents}", f"{dealt}; they share {share}")])

    def took_s(chosen: Sequence[Line]) -> float:
        return predicted(made(chosen))

    if trace.head.arrivals == "recorded":
        return made(_as_recorded(trace, took_s, has_costs=start.has_costs))
    return made(_taking_turns(trace, took_s))


def _as_recorded(trace: TraceFile, took_s: Callable[[Sequence[Line]], float], *, has_costs: bool) -> list[Line]:
    """A stretch of recorded arrivals; where it is more than the server can do, some requests at a time in its order."""
    starts_ns = [recording.start_ns for recording in trace.recordings]
    span_s = (max(starts_ns) - min(starts_ns)) / NS_PER_S
    # Where few come in, long enough for as many as run at a time elsewhere.
    stretch_s = min(span_s, max(LONGEST_S, span_s * AGENTS_AT_A_TIME / len(starts_ns)))

    def stretch(seconds: float) -> list[Line]:
        if seconds >= span_s:
            return []
        part = len(starts_ns) * seconds / span_s
        where = f"of {span_s:.0f} s, some {part:.0f} sessions; another stretch for each replicate"
        return [(f"stretch_s = {seconds:.1f}", where)]

    if not has_costs:
        # By the costs of another device nothing shows how busy this one is.
        return stretch(stretch_s)
    late = took_s(stretch(stretch_s)) / max(stretch_s, _idle_end_s(trace, stretch_s), 1.0)
    if late <= OVERLOADED:
        return stretch(stretch_s)
    why = f"as recorded they take this server {late:.1f} times as long as they came in"
    turns: list[Line] = [(f"concurrency = {AGENTS_AT_A_TIME}", f"at a time, in the recorded order: {why}")]
    shorter = LONGEST_S / took_s([*stretch(stretch_s), *turns])
    return [*stretch(stretch_s * min(1.0, shorter)), *turns]


def _idle_end_s(trace: TraceFile, stretch_s: float) -> float:
    """When the sessions of the first part of a recording would end on a server that takes no time: waits alone."""
    first_ns = min(recording.start_ns for recording in trace.recordings)
    ends_ns = [0]
    for recording in trace.recordings:
        since_ns = recording.start_ns - first_ns
        ended_ns: list[int] = []
        for request in recording.requests if since_ns <= stretch_s * NS_PER_S else ():
            wait_ns = min(request.wait_ns, HUMAN_WAIT_CAP_NS) if request.wait_kind == "human" else request.wait_ns
            ended_ns.append(max((ended_ns[before] for before in request.after), default=since_ns) + wait_ns)
        ends_ns += ended_ns
    return max(ends_ns) / NS_PER_S


def _taking_turns(trace: TraceFile, took_s: Callable[[Sequence[Line]], float]) -> list[Line]:
    """Some agents at a time, of all recordings or of as many as the time allows."""
    count = len(trace.recordings)
    if count <= AGENTS_AT_A_TIME:
        return []
    turns: list[Line] = [(f"concurrency = {AGENTS_AT_A_TIME}", "agents at a time; left out: all start at once")]
    part = min(count, MOST_SIMULATED)
    whole_s = took_s([*turns, *([(f"num_sessions = {part}", "")] if part < count else [])]) * count / part
    if whole_s <= LONGEST_S:
        return turns
    fewer = max(AGENTS_AT_A_TIME, int(count * LONGEST_S / whole_s))
    why = f"of {count}, drawn for each replicate; all take some {whole_s / 60:.0f} min a run"
    return [(f"num_sessions = {fewer}", why), *turns]


def _shared(trace: TraceFile) -> float:
    """The share of prompt tokens in blocks with which another session's request began before."""
    known: set[int] = set()
    hits = tokens = 0
    for recording in trace.recordings:
        for request in recording.requests:
            new = next((place for place, name in enumerate(request.blocks) if name not in known), len(request.blocks))
            hits, tokens = hits + new * trace.head.block_tokens, tokens + request.prompt_tokens
        known.update(name for request in recording.requests for name in request.blocks)
    return hits / tokens


def _reusing(shared: float) -> tuple[Line, ...]:
    """Rules of a server that reuses what sessions share."""
    why = f"reuses blocks of other sessions: {100 * shared:.0f} % of the prompt tokens here; slots keep a session's own"
    return ('rules = "vllm-paged"', why), ('cost_model = "emulated-gpu"', "a modelled GPU")


def imported_file(name: str, source: str) -> Path:
    """Where the trace of an experiment is written; beside recordings that have that name themselves."""
    path = Path(f"{name}.jsonl")
    return path.with_name(f"{name}-trace.jsonl") if source and path.resolve() == Path(source).resolve() else path


def read_trace_of(source: str, name: str, options: ReadOptions) -> ReadTrace:
    """(the trace as the experiment names it, its content, what the import says); imported where it is none yet.

    source: files of any format, or a trace. name: of the experiment.
    """
    from harness.cli.inputs import import_notes
    from harness.model.traces.account import ReadOptions
    from harness.model.traces.importing import import_trace
    from harness.model.traces.recording import is_trace, load_trace, read_trace

    path = Path(source)
    if not path.exists() or is_trace(path):
        if options != ReadOptions():
            what = "is a trace already: block tokens, time unit and waits were settled by its import"
            raise SpecError(what, where=source, hint="Leave these options out, or give the recordings themselves")
        return source, load_trace(source), ()
    output = imported_file(name, source)
    if output.exists():
        raise SpecError("is there already", where=str(output), hint="Choose another name: harness init NAME")
    head, notes = import_trace([path], output, name=name, options=options)
    return str(output), read_trace(output), tuple(import_notes(output, head, notes))
