"""The replay: a plan in, one row per planned request and one per chunk out, by one client process or several.

What the server does wrong is a row with a status, never an exception and never a retry. The client's own lateness is
in the rows. Of several processes each replays some sessions from a common start; their rows are merged. Garbage
collection is off meanwhile, and other threads get short turns. Nothing is judged.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import itertools
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from operator import itemgetter
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from harness.clock import NS_PER_MS, NS_PER_US, monotonic_ns
from harness.errors import ServerError, SpecError
from harness.measure.client.held_tokens import held_facts
from harness.measure.client.host import (
    SHORT_SLICE_NS,
    CpuMeter,
    SchedulerSlice,
    StallMeter,
    pause_facts,
    preferred,
    real_time,
    stall_facts,
    stamp_facts,
)
from harness.measure.client.replay_state import ReplayEvent, ReplayState
from harness.measure.client.target import ReplayResult, Target
from harness.measure.records.schema import CHUNKS, RowStream
from harness.model.plan.model import Plan
from harness.model.plan.tokens import AS_PLANNED
from harness.processes import END_TIMEOUT_S, helper_process

__all__ = ["ReplayEvent", "ReplayResult", "StopSignal", "Target", "replay"]

# From the moment all processes are ready to the common start: each must read a line in this time.
START_LEAD_NS = 20 * NS_PER_MS
POLL_S = 0.05
READY, STOP = "ready", "stop"
CHUNKS_FILE = "chunks.arrow"


class StopSignal(Protocol):
    """Ends a replay early: a threading.Event, or an object with the same method."""

    def is_set(self) -> bool: ...


def replay(
    plan: Plan, target: Target, *, on_event: Callable[[ReplayEvent], None] | None = None, stop: StopSignal | None = None
) -> ReplayResult:
    """Replay every session of the plan against a server, all released at one instant, and return what happened.

    on_event: called for each final row, by another thread. stop: once it is set, requests in flight are given up
    ("connection") and the others stay "not_sent".
    Raises SpecError when this machine cannot run the client, ServerError when the host's name cannot be resolved.
    """
    is_stopped = stop.is_set if stop is not None else lambda: False
    with StallMeter(target.clock) as stalls:
        if target.options.processes > 1:
            result = _replay_in_processes(plan, target, on_event=on_event, is_stopped=is_stopped)
        else:
            result = replay_here(plan, target, on_event=on_event, is_stopped=is_stopped)
    result.audit.update(stall_facts(stalls, result.requests))
    result.audit.update(stamp_facts(result.chunks, target.clock.scale))
    result.audit.update(held_facts(result.chunks, result.requests))
    result.audit.update(pause_facts(result.audit["client_pauses_ns"], result.requests, target.clock.scale))
    return result


def partition_sessions(plan: Plan, num_processes: int) -> list[list[int]]:
    """Session indices by process, about as many requests in each. Chains stay whole; no process is empty."""
    earlier = list(range(plan.num_sessions))  # another session of the same chain; the first one names itself

    def first_of(session: int) -> int:
        while earlier[session] != session:
            session = earlier[session]
        return session

    for session in plan.sessions:
        for other in (*session.predecessors, *(() if session.continues is None else (session.continues,))):
            low, high = sorted((first_of(session.index), first_of(other)))
            earlier[high] = low
    chains: dict[int, list[int]] = {}
    for session in range(plan.num_sessions):
        chains.setdefault(first_of(session), []).append(session)
    sizes = {chain: sum(len(plan.sessions[index].requests) for index in members) for chain, members in chains.items()}
    shards: list[list[int]] = [[] for _ in range(num_processes)]
    loads = [0] * num_processes
    for chain in sorted(chains, key=lambda chain: (-sizes[chain], chain)):
        place = loads.index(min(loads))
        shards[place] += chains[chain]
        loads[place] += sizes[chain]
    return [sorted(hand) for hand in shards if hand]


class Task(NamedTuple):
    """What a client process replays. folder: where it leaves its chunks."""

    plan: Plan
    sessions: list[int]
    target: Target
    folder: Path
    keeps_events: bool


class _Outcome(NamedTuple):
    """What a client process recorded, apart from the chunks in its file."""

    requests: pa.Table
    num_chunks: int
    start_ns: int
    audit: dict[str, Any]


class _Part(NamedTuple):
    """A client process, and the line to it.

    It sends READY, then each ReplayEvent where they are wanted, then its _Outcome, or a text about why there is none.
    It gets its Task, then the common start (CLOCK_MONOTONIC ns), perhaps STOP.
    """

    process: Popen[bytes]
    line: Connection

    def send(self, message: Task | int | str) -> None:
        with suppress(OSError):  # a process that died is noticed when it is read
            self.line.send(message)

    def receive(self) -> Any:
        """Its next message; a text when it has ended without an outcome."""
        try:
            return self.line.recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                return f"Its exit status was {self.process.wait(END_TIMEOUT_S)}; see `ulimit -a`"
            return "The process still runs"


def _replay_in_processes(
    plan: Plan, target: Target, *, on_event: Callable[[ReplayEvent], None] | None, is_stopped: Callable[[], bool]
) -> ReplayResult:
    """Replay with ``target.options.processes`` processes and merge what they recorded.

    Raises ServerError when a client process ended without a result.
    """
    cpu = CpuMeter()
    with tempfile.TemporaryDirectory(prefix="harness-client-", dir=target.records) as name:
        shards = partition_sessions(plan, target.options.processes)
        folders = [Path(name) / str(place) for place in range(len(shards))]
        with ExitStack() as stack:
            parts = [_Part(*stack.enter_context(helper_process(f"{__name__}:work"))) for _ in shards]
            for part, sessions, folder in zip(parts, shards, folders, strict=True):
                folder.mkdir()
                part.send(Task(plan, sessions, replace(target, records=folder), folder, on_event is not None))
            outcomes = _run_all(parts, plan.num_requests, on_event, is_stopped)
        merged = _merge([_result(*pair) for pair in zip(outcomes, folders, strict=True)])
    workers_s = merged.audit["cpu_s"]
    usage = cpu.read(workers_s)
    merged.audit.update(usage)
    merged.audit["cpu_s"], merged.audit["cpu_helpers_s"] = round(usage["cpu_s"] + workers_s, 4), 0.0
    return merged


def _run_all(
    parts: list[_Part],
    num_requests: int,
    on_event: Callable[[ReplayEvent], None] | None,
    is_stopped: Callable[[], bool],
) -> list[_Outcome]:
    """Wait until all processes are ready, give them a common start, and pass on their events until the last ends."""
    open_parts = {part.line: part for part in parts}
    outcomes: dict[_Part, _Outcome] = {}
    num_finished = num_ready = 0
    has_stopped = False
    while open_parts:
        if is_stopped() and not has_stopped:
            has_stopped = True
            for part in parts:
                part.send(STOP)
        for line in wait(list(open_parts), POLL_S):
            part = open_parts[cast("Connection", line)]
            message = part.receive()
            if isinstance(message, _Outcome):
                outcomes[part] = message
                del open_parts[part.line]
            elif isinstance(message, ReplayEvent) and on_event is not None:
                num_finished += 1
                on_event(message._replace(num_finished=num_finished, num_requests=num_requests))
            elif message == READY:
                num_ready += 1
                if num_ready == len(parts):
                    start_ns = monotonic_ns() + START_LEAD_NS
                    for each in parts:
                        each.send(start_ns)
            else:
                raise ServerError(
                    "a client process ended without a result", where="client.processes", hint=str(message)
                )
    return [outcomes[part] for part in parts]


def _result(outcome: _Outcome, folder: Path) -> ReplayResult:
    # The open file can be read after its folder is gone.
    file = ipc.open_file(pa.OSFile(str(folder / CHUNKS_FILE)))

    def batches() -> Iterator[pa.RecordBatch]:
        return map(file.get_batch, range(file.num_record_batches))

    chunks = RowStream(CHUNKS, outcome.num_chunks, batches)
    return ReplayResult(outcome.requests, chunks, outcome.start_ns, outcome.audit)


def _merge(results: list[ReplayResult]) -> ReplayResult:
    """Rows in plan order, counters summed; the figures of each process stay under "processes"."""
    audits = [result.audit for result in results]
    added = ("spun_wall_ns", "num_wakeups", "num_reconnects", "num_spilled_chunks", "num_early_sends", "cpu_s")
    audit: dict[str, Any] = {
        **audits[0],
        **{name: sum(each[name] for each in audits) for name in added},
        "client_pauses_ns": sorted(pause for each in audits for pause in each["client_pauses_ns"]),
        "clock_steps": sorted({step for each in audits for step in each["clock_steps"]}),
        "tolerated": dict(sum((Counter(each["tolerated"]) for each in audits), Counter[str]())),
        "replicas": {name: replica for each in audits for name, replica in each["replicas"].items()},
        "read_together": _sum_together([each["read_together"] for each in audits]),
        "processes": [{"run_nonce": each["run_nonce"], "cpu_s": each["cpu_s"]} for each in audits],
    }

    def batches() -> Iterator[pa.RecordBatch]:
        # No session is in two processes.
        by_session = heapq.merge(*(_sessions(result.chunks.batches()) for result in results), key=itemgetter(0))
        return (batch for _session, batch in by_session)

    requests = pa.concat_tables([result.requests for result in results])
    return ReplayResult(
        requests.sort_by([("session", "ascending"), ("request", "ascending")]),
        RowStream(CHUNKS, sum(result.chunks.num_rows for result in results), batches),
        results[0].start_ns,
        audit,
    )


def _sum_together(parts: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """``together_facts`` of several processes as those of one."""
    return {
        name: {key: (max if key == "max_ms" else sum)(part[name][key] for part in parts) for key in parts[0][name]}
        for name in parts[0]
    }


def _sessions(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Cut each batch where another session begins: the session and its rows."""
    for batch in batches:
        session = batch.column("session").to_numpy()
        edges = [0, *(np.flatnonzero(np.diff(session)) + 1).tolist(), len(session)]
        for first, past in itertools.pairwise(edges):
            yield int(session[first]), batch.slice(first, past - first)


def work(fd: str) -> None:
    """One client process: take the task from the line ``fd``, prepare, wait for the start, replay, send the outcome."""
    line = Connection(int(fd))
    task: Task = line.recv()
    stopped = threading.Event()

    def end() -> NoReturn:
        # The harness has ended, so nothing would read a result: remove the folder and end silently.
        shutil.rmtree(task.folder.parent, ignore_errors=True)
        os._exit(0)

    def command() -> int | str:
        try:
            return line.recv()
        except (EOFError, OSError):
            end()

    def choose_start() -> int:
        line.send(READY)
        start_ns = command()
        threading.Thread(target=watch_for_stop, daemon=True).start()
        if isinstance(start_ns, int):
            return start_ns
        stopped.set()
        return monotonic_ns()

    def watch_for_stop() -> None:
        while True:
            command()
            stopped.set()

    message: _Outcome | str
    try:
        message = _perform(task, line.send if task.keeps_events else None, stopped.is_set, choose_start)
    except Exception as error:  # mostly a limit of the machine
        message = f"Its last line: {next(iter(str(error).splitlines()), type(error).__name__)}"
    try:
        line.send(message)
    except OSError:
        end()


def _perform(
    task: Task,
    on_event: Callable[[ReplayEvent], None] | None,
    is_stopped: Callable[[], bool],
    choose_start: Callable[[], int],
) -> _Outcome:
    share = ProcessShare(frozenset(task.sessions), choose_start)
    result = replay_here(task.plan, task.target, on_event=on_event, is_stopped=is_stopped, share=share)
    with pa.OSFile(str(task.folder / CHUNKS_FILE), "wb") as file, ipc.new_file(file, CHUNKS) as writer:
        for batch in result.chunks.batches():
            writer.write_batch(batch)
    return _Outcome(result.requests, result.chunks.num_rows, result.start_ns, result.audit)


# Other threads of this process give the interpreter back within this time; Python's default is 5 ms.
SWITCH_INTERVAL_S = 50e-6
MAX_OFFSET_SAMPLES = 200
START_SOON_NS = 5 * NS_PER_MS
# As records name it, in which there were others.
CLIENT = "epoll"


@dataclass(frozen=True, slots=True)
class ProcessShare:
    """The part of a replay that one of several processes performs.

    sessions: those it replays, with rows for them alone. choose_start: called when all is ready; returns the common
    start in CLOCK_MONOTONIC ns.
    """

    sessions: Collection[int]
    choose_start: Callable[[], int]


def replay_here(
    plan: Plan,
    target: Target,
    *,
    on_event: Callable[[ReplayEvent], None] | None,
    is_stopped: Callable[[], bool],
    share: ProcessShare | None = None,
) -> ReplayResult:
    """Replay in this thread: the whole plan, or the share of this process."""
    options = target.options
    if not sys.platform.startswith("linux"):
        raise SpecError("the client needs Linux (epoll, timerfd)", where="replay", hint="Run it on a Linux host")
    # Imported here: what it needs is not there on other systems.
    from harness.measure.client.loop import EpollReplay

    state = ReplayState(plan, target, keeps_events=on_event is not None, only=None if share is None else share.sessions)
    state.prefetch_all()
    with (
        _delivery(state, on_event) as deliver,
        _undisturbed(),
        # Before the slice, which is for other policies alone.
        real_time(options.realtime) as is_real_time,
        preferred(options.realtime and not is_real_time) as nice,
        SchedulerSlice() as turns,
    ):
        cpu = CpuMeter()
        slice_ns = turns.ask(SHORT_SLICE_NS)
        loop = EpollReplay(state, target, is_stopped=is_stopped, on_slack=deliver)
        start_ns = loop.run(turns, _start_soon if share is None else share.choose_start)
        offsets = loop.offsets
        facts = {
            "spin_us": options.spin_us,
            "spun_wall_ns": loop.spun_ns,
            "num_wakeups": loop.num_wakeups,
            # From the common start until every row had its final status.
            "replay_wall_ns": loop.ended_ns - start_ns,
            "num_reconnects": loop.num_reconnects,
            "clock_offset_samples_ns": offsets.some(MAX_OFFSET_SAMPLES),
            "clock_steps": offsets.steps(),
        }
        facts |= state.chunks.together_facts(offsets)
        requests = state.rows_table()
        usage = cpu.read()
    sent_and_due = zip(requests["sent_ns"].to_pylist(), requests["due_ns"].to_pylist(), strict=True)
    facts = {
        "client": CLIENT,
        "stream": state.stream,
        **({} if state.needs_token_ids else {"text_sizes": target.text_sizes.to_json()}),
        **({"prompt_ids": target.prompt_ids.to_json()} if target.prompt_ids != AS_PLANNED else {}),
        **facts,
        "num_spilled_chunks": state.chunks.num_spilled,
        "num_early_sends": sum(sent_ns is not None and sent_ns < due_ns for sent_ns, due_ns in sent_and_due),
        "run_nonce": state.nonce,
        "tolerated": dict(state.tolerated),
        "replicas": state.replicas,
        "client_pauses_ns": state.pauses_ns,
        **usage,
        "is_real_time": is_real_time,
        "nice": nice,
        **({"cores": sorted(os.sched_getaffinity(0))} if options.own_core else {}),
        "scheduler_slice_us": None if slice_ns is None else slice_ns / NS_PER_US,
    }
    chunks = state.chunks.stream(state.rows, state.clock, offsets)
    return ReplayResult(requests, chunks, state.clock.from_monotonic_ns(start_ns), facts)


def _start_soon() -> int:
    return monotonic_ns() + START_SOON_NS


@contextlib.contextmanager
def _undisturbed() -> Generator[None]:
    """No garbage collection, and short turns for other threads; both are restored after the block."""
    was_enabled, interval_s = gc.isenabled(), sys.getswitchinterval()
    # Not the oldest generation: each look through what imports made takes 80 ms, at every run and every probe.
    gc.collect(1)
    gc.disable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _delivery(state: ReplayState, on_event: Callable[[ReplayEvent], None] | None) -> Generator[Callable[[], None]]:
    """A function that hands new final rows to another thread, which calls ``on_event``.

    An exception of ``on_event`` ends the delivery, not the replay, and is raised after it.
    """
    if on_event is None:
        yield lambda: None
        return
    events: queue.SimpleQueue[ReplayEvent | None] = queue.SimpleQueue()
    failures: list[Exception] = []

    def call() -> None:
        while (event := events.get()) is not None:
            try:
                on_event(event)
            except Exception as error:
                failures.append(error)
                return

    def deliver() -> None:
        for event in state.finished_events:
            events.put(event)
        state.finished_events.clear()

    thread = threading.Thread(target=call, name="replay-events", daemon=True)
    thread.start()
    try:
        yield deliver
        deliver()
    finally:
        events.put(None)
        thread.join()
    if failures:
        raise failures[0]
