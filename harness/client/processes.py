"""One replay by several client processes: each replays some of the sessions from a common start; rows are merged.

Sessions that follow or continue one another stay in one process. The calling process sends nothing itself.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from harness.client.host import CpuMeter
from harness.client.run import Share, replay_here
from harness.client.script import ReplayEvent
from harness.client.target import Endpoint, ReplayResult, Target
from harness.clock import NS_PER_MS, monotonic_ns
from harness.errors import HarnessError, ServerError, SpecError
from harness.plan import Plan, read_plan, write_plan
from harness.records import layout
from harness.records.schema import CHUNKS, RowStream
from harness.spec import ClientSpec

if TYPE_CHECKING:
    from subprocess import Popen

# From the moment all processes are ready to the common start: each must read a line in this time.
START_LEAD_NS = 20 * NS_PER_MS
POLL_S = 0.05
READ_BYTES = 65_536
END_TIMEOUT_S = 10.0


def deal_sessions(plan: Plan, num_processes: int) -> list[list[int]]:
    """Session indices by process, about as many requests in each. Chains stay whole; no process is empty."""
    chain_of = list(range(plan.num_sessions))
    for session in plan.sessions:  # what a session follows or continues comes before it in the plan
        for other in {*session.predecessors, *(() if session.continues is None else (session.continues,))}:
            old, new = chain_of[session.index], chain_of[other]
            chain_of = [new if chain == old else chain for chain in chain_of] if old != session.index else chain_of
            chain_of[session.index] = new
    chains: dict[int, list[int]] = {}
    for session, chain in enumerate(chain_of):
        chains.setdefault(chain, []).append(session)
    sizes = {chain: sum(len(plan.sessions[index].requests) for index in members) for chain, members in chains.items()}
    hands: list[list[int]] = [[] for _ in range(num_processes)]
    loads = [0] * num_processes
    for chain in sorted(chains, key=lambda chain: (-sizes[chain], chain)):
        place = loads.index(min(loads))
        hands[place] += chains[chain]
        loads[place] += sizes[chain]
    return [sorted(hand) for hand in hands if hand]


def replay_in_processes(
    plan: Plan, target: Target, *, on_event: Callable[[ReplayEvent], None] | None, is_stopped: Callable[[], bool]
) -> ReplayResult:
    """Replay with ``target.options.processes`` processes and merge what they recorded.

    Raises SpecError when the client is not 'epoll', ServerError when a client process ended without a result.
    """
    if target.options.name != "epoll":
        raise SpecError(
            "only client 'epoll' runs in several processes", where="client.processes", hint="Set client.processes = 1"
        )
    cpu = CpuMeter()
    with tempfile.TemporaryDirectory(prefix="harness-client-", dir=target.records) as name:
        folder = Path(name)
        plan_path = write_plan(plan, folder / layout.PLAN)
        with ExitStack() as stack:
            parts = [
                stack.enter_context(
                    _part(plan_path, folder / str(place), target, sessions, keeps_events=on_event is not None)
                )
                for place, sessions in enumerate(deal_sessions(plan, target.options.processes))
            ]
            _run_all(parts, plan.num_requests, on_event, is_stopped)
        results = [_read_result(folder / str(place)) for place in range(len(parts))]
    merged = _merge(results)
    workers_s = merged.audit["cpu_s"]
    usage = cpu.read(workers_s)
    merged.audit.update(usage)
    merged.audit["cpu_s"], merged.audit["cpu_helpers_s"] = round(usage["cpu_s"] + workers_s, 4), 0.0
    return merged


@contextmanager
def _part(
    plan: Path, folder: Path, target: Target, sessions: list[int], *, keeps_events: bool
) -> Generator[Popen[str]]:
    """A client process that prepares its sessions and waits for the start; it has ended after the block."""
    folder.mkdir()
    task = {
        "plan": str(plan),
        "folder": str(folder),
        "sessions": sessions,
        "endpoint": asdict(target.endpoint),
        "model": target.model,
        "options": target.options.model_dump(mode="json"),
        "scale": target.clock.scale,
        "request_timeout_ns": target.request_timeout_ns,
        "keeps_events": keeps_events,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.client.processes"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # The harness alone answers Ctrl-C.
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
        yield process
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        process.stderr.close()


def _run_all(
    parts: list[Popen[str]],
    num_requests: int,
    on_event: Callable[[ReplayEvent], None] | None,
    is_stopped: Callable[[], bool],
) -> None:
    """Wait until all processes are ready, give them a common start, and pass on their events until the last ends."""
    num_finished = num_ready = 0
    has_stopped = False
    for part, words in _lines(parts):
        if words is None and part is None:
            if is_stopped() and not has_stopped:
                has_stopped = True
                _write_line(parts, "stop")
        elif words is None:
            raise ServerError(
                "a client process ended without a result", where="client.processes", hint=_last_words(part)
            )
        elif words[0] == "ready":
            num_ready += 1
            if num_ready == len(parts):
                _write_line(parts, str(monotonic_ns() + START_LEAD_NS))
        elif words[0] == "event" and on_event is not None:
            num_finished += 1
            late_ns = None if words[4] == "None" else int(words[4])
            on_event(ReplayEvent(int(words[1]), int(words[2]), words[3], late_ns, num_finished, num_requests))


def _last_words(part: Popen[str] | None) -> str:
    """The last line of a process that ended early, as a hint."""
    with suppress(subprocess.TimeoutExpired, AttributeError):
        assert part is not None
        assert part.stderr is not None
        status = part.wait(END_TIMEOUT_S)
        os.set_blocking(part.stderr.fileno(), False)
        lines = part.stderr.read().strip().splitlines()
        return f"Its last line: {lines[-1][:200]}" if lines else f"Its exit status was {status}; see `ulimit -a`"
    return "The process still runs"


def _lines(parts: list[Popen[str]]) -> Iterator[tuple[Popen[str] | None, list[str] | None]]:
    """(process, words of a line it wrote), (process, None) when it ended early, (None, None) now and then."""
    pipes = {part.stdout.fileno(): (part, b"") for part in parts if part.stdout is not None}
    while pipes:
        ready, _, _ = select.select(list(pipes), [], [], POLL_S)
        yield None, None
        for fd in ready:
            part, rest = pipes[fd]
            data = os.read(fd, READ_BYTES)
            *lines, rest = (rest + data).split(b"\n")
            pipes[fd] = part, rest
            for line in lines:
                words = line.decode().split()
                if words[0] == "done":
                    pipes.pop(fd)
                yield part, words
            if not data and fd in pipes:
                pipes.pop(fd)
                yield part, None


def _write_line(parts: Iterable[Popen[str]], line: str) -> None:
    for part in parts:
        assert part.stdin is not None
        with suppress(BrokenPipeError):
            part.stdin.write(line + "\n")
            part.stdin.flush()


def _read_result(folder: Path) -> ReplayResult:
    with pa.OSFile(str(folder / "requests.arrow")) as file:
        requests = ipc.open_file(file).read_all()
    facts = json.loads((folder / "result.json").read_text())
    # The open file can be read after its folder is gone.
    file = ipc.open_file(pa.OSFile(str(folder / "chunks.arrow")))

    def batches() -> Iterator[pa.RecordBatch]:
        return map(file.get_batch, range(file.num_record_batches))

    chunks = RowStream(file.schema, facts["num_chunks"], batches)
    return ReplayResult(requests, chunks, facts["start_ns"], facts["audit"])


def _merge_chunks(streams: list[RowStream]) -> RowStream:
    """The chunks of several processes in plan order. No session is in two processes."""

    def batches() -> Iterator[pa.RecordBatch]:
        by_session = heapq.merge(*(_sessions(stream.batches()) for stream in streams), key=itemgetter(0))
        return (batch for _session, batch in by_session)

    return RowStream(CHUNKS, sum(stream.num_rows for stream in streams), batches)


def _sessions(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Cut each batch where another session begins: the session and its rows."""
    for batch in batches:
        session = batch.column("session").to_numpy()
        edges = [0, *(np.flatnonzero(np.diff(session)) + 1).tolist(), len(session)]
        for first, past in itertools.pairwise(edges):
            yield int(session[first]), batch.slice(first, past - first)


def _merge(results: list[ReplayResult]) -> ReplayResult:
    """Tables in plan order, counters summed; the figures of each process stay under "processes"."""
    requests = pa.concat_tables([result.requests for result in results])
    audits = [result.audit for result in results]
    added = ("spun_wall_ns", "num_wakeups", "num_reconnects", "num_spilled_chunks", "num_early_sends", "cpu_s")
    audit: dict[str, Any] = {
        **audits[0],
        **{name: sum(each[name] for each in audits) for name in added},
        "client_pauses_ns": sorted(pause for each in audits for pause in each["client_pauses_ns"]),
        "clock_steps": sorted({step for each in audits for step in each["clock_steps"]}),
        "processes": [{"run_nonce": each["run_nonce"], "cpu_s": each["cpu_s"]} for each in audits],
    }
    return ReplayResult(
        requests.sort_by([("session", "ascending"), ("request", "ascending")]),
        _merge_chunks([result.chunks for result in results]),
        results[0].start_ns,
        audit,
    )


def work() -> None:
    """One client process: read the task, prepare, wait for the start, replay, write the tables."""
    from harness.clock import clock_for

    task = json.loads(sys.stdin.readline())
    folder = Path(task["folder"])
    stopped = threading.Event()
    target = Target(
        Endpoint(**task["endpoint"]),
        task["model"],
        ClientSpec.model_validate(task["options"]),
        clock_for(task["scale"]),
        task["request_timeout_ns"],
        folder,
    )

    def choose_start() -> int:
        print("ready", flush=True)
        line = sys.stdin.readline()
        if not line:
            _end_without_result(folder)
        line = line.strip()
        threading.Thread(target=watch_for_stop, daemon=True).start()
        if not line.isdecimal():
            stopped.set()
        return int(line) if line.isdecimal() else monotonic_ns()

    def watch_for_stop() -> None:
        if not sys.stdin.readline():  # "stop", or the end of the harness
            _end_without_result(folder)
        stopped.set()

    def report(event: ReplayEvent) -> None:
        print("event", event.session, event.request, event.status, event.late_ns, flush=True)

    result = replay_here(
        read_plan(Path(task["plan"])),
        target,
        on_event=report if task["keeps_events"] else None,
        is_stopped=stopped.is_set,
        share=Share(frozenset(task["sessions"]), choose_start),
    )
    with pa.OSFile(str(folder / "requests.arrow"), "wb") as file, ipc.new_file(file, result.requests.schema) as writer:
        writer.write_table(result.requests)
    with pa.OSFile(str(folder / "chunks.arrow"), "wb") as file, ipc.new_file(file, result.chunks.schema) as writer:
        for batch in result.chunks.batches():
            writer.write_batch(batch)
    facts = {"start_ns": result.start_ns, "audit": result.audit, "num_chunks": result.chunks.num_rows}
    (folder / "result.json").write_text(json.dumps(facts))
    print("done", flush=True)


def _end_without_result(folder: Path) -> NoReturn:
    """The harness has ended, so nothing would read a result: remove the folder and end silently."""
    shutil.rmtree(folder.parent, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    try:
        work()
    except BrokenPipeError:
        os._exit(0)
    except (HarnessError, OSError, MemoryError, RuntimeError) as error:
        # The harness shows this line; mostly it is a limit of the machine.
        sys.exit(str(error).partition("\n")[0] or type(error).__name__)
