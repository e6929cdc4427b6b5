"""The same work on many tasks by as many processes as there are cores, where it is long enough to be worth them.

Processes are forked, so that they know what was read and drawn before; they end with the one that forked them. Tasks
are tried once: a process that dies ends the whole.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar, cast

from harness.clock import NS_PER_S, MonotonicClock
from harness.errors import HarnessError

Task = TypeVar("Task")
Result = TypeVar("Result")
Tell = Callable[[Any], None]

# Forking, and fetching results, cost up to a quarter of this.
WORTH_S = 0.4


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def side_by_side(
    work: Callable[[Task, Tell], Result],
    tasks: Sequence[Task],
    on_told: Tell = lambda _said: None,
    processes: int | None = None,
    worth_s: float = WORTH_S,
) -> Iterator[tuple[int, Result]]:
    """The place and result of each task, as they are done; what ``work`` tells meanwhile goes to ``on_told``.

    processes: at most so many, default one for each core. The first task is done here; only where the others would then
    last longer than ``worth_s`` are they shared out, in their order. Results and what is told must be picklable.
    Raises what ``work`` raises, and HarnessError when a process dies.
    """
    clock = MonotonicClock()
    began_ns, left = clock.now_ns(), list(range(len(tasks)))
    count = 1 if multiprocessing.parent_process() is not None else processes or num_cores()
    while left and (len(left) == len(tasks) or count < 2 or len(left) < 2):
        place = left.pop(0)
        yield place, work(tasks[place], on_told)
        each_s = (clock.now_ns() - began_ns) / NS_PER_S / (len(tasks) - len(left))
        if each_s * len(left) < worth_s:
            count = 1
    if left:
        yield from _shared_out(work, tasks, left, on_told, min(count, len(left)))


def _shared_out(
    work: Callable[[Task, Tell], Result], tasks: Sequence[Task], left: list[int], on_told: Tell, count: int
) -> Iterator[tuple[int, Result]]:
    lines: dict[Connection, ForkProcess] = {}
    try:
        for _ in range(count):
            line, process = _forked(work, tasks, list(lines))
            lines[line] = process
            line.send(left.pop(0))
        busy = list(lines)
        while busy:
            for line in wait(busy):
                assert isinstance(line, Connection)
                place, kind, said = _received(line, lines[line])
                if kind == "told":
                    on_told(said)
                    continue
                if kind == "raised":
                    raise said
                if left:
                    line.send(left.pop(0))
                else:
                    busy.remove(line)
                yield place, said
    finally:
        for line, process in lines.items():
            line.close()
            process.kill()
            process.join()


def _forked(
    work: Callable[[Task, Tell], Result], tasks: Sequence[Task], others: Sequence[Connection]
) -> tuple[Connection, ForkProcess]:
    ours, theirs = cast("tuple[Connection, Connection]", multiprocessing.Pipe())

    def serve() -> None:
        # A Ctrl-C in the terminal is for the first process to answer.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Else a line would stay open, and its process alive, when the first process is killed.
        for line in (ours, *others):
            line.close()
        try:
            while True:
                _do(work, tasks, theirs, theirs.recv())
        except (EOFError, OSError):
            return
        except BaseException:
            # No room even for an answer: the first process says that this one ended, and no stack is printed here.
            os._exit(1)

    process = ForkProcess(target=serve, daemon=True)
    with theirs, warnings.catch_warnings():
        # Python warns of threads that hold a lock now; those of the libraries reset theirs in the new process.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return ours, process


def _do(work: Callable[[Task, Tell], Result], tasks: Sequence[Task], line: Connection, place: int) -> None:
    """One task in a forked process; tells its result, or its error."""
    try:
        said = ("done", work(tasks[place], lambda told: line.send((place, "told", told))))
    except Exception as error:
        said = ("raised", error)
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            said = ("raised", HarnessError(f"{type(error).__name__}: {error}", where=f"task {place}"))
    line.send((place, *said))


def _received(line: Connection, process: ForkProcess) -> tuple[int, str, Any]:
    try:
        return line.recv()
    except (EOFError, OSError):
        process.join()
        raise HarnessError(
            f"one of the processes that share the work ended with status {process.exitcode}",
            where="harness.processes",
            hint="Look for what kills it (memory?)",
        ) from None
