"""Parallel work: the same function for many tasks, in forked processes where that saves time; and Dask, if installed.

Forked processes know everything that was read before, and end with the process that forked them. A task is tried once:
when a process dies, the whole ends. A helper process is a fresh interpreter, and loads what it needs alone.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar, cast

from harness.children import own_command
from harness.clock import NS_PER_S, MonotonicClock
from harness.errors import HarnessError, SpecError

Task = TypeVar("Task")
Result = TypeVar("Result")
Report = Callable[[Any], None]

# Forking, and fetching results, cost up to a quarter of this.
MIN_PARALLEL_S = 0.4
END_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 10.0
ALLOWED_DEATHS = 5
"""A task is given up when its workers died more often: then the task is the likely cause."""


def num_cores() -> int:
    """Cores that this process may use; in a container or task set fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def optional(package: str, extra: str, where: str) -> Any:
    """A package that only an optional extra of the harness installs; a SpecError with ``where`` without it."""
    try:
        return import_module(package)
    except ImportError as error:
        hint = f"Install it: pip install 'rbln-harness[{extra}]'"
        raise SpecError(f"the package {package} is not installed", where=where, hint=hint) from error


def distributed(where: str) -> Any:
    """Dask's package of that name, for several hosts."""
    return optional("distributed", "cluster", where)


@contextmanager
def helper_process(function: str) -> Generator[tuple[subprocess.Popen[bytes], Connection]]:
    """A process that calls a function ("package.module:name") with the descriptor of a line; and the line's other end.

    It has ended after the block: it should end by itself when the block tells it to, and must when the line ends.
    """
    ours, theirs = cast("tuple[Connection, Connection]", multiprocessing.Pipe())
    with theirs:
        process = subprocess.Popen(
            own_command(function, theirs.fileno()),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            # The harness alone answers Ctrl-C.
            start_new_session=True,
        )
    try:
        yield process, ours
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
        ours.close()


def parallel_map(
    work: Callable[[Task, Report], Result],
    tasks: Sequence[Task],
    on_progress: Report = lambda _progress: None,
    workers: int | str | None = None,
    min_parallel_s: float = MIN_PARALLEL_S,
) -> Iterator[tuple[int, Result]]:
    """Yield the place and result of each task as it is done.

    work: gets a task and a function that passes picklable progress to ``on_progress``. workers: the most
    processes, by default one per core; or the address of a Dask scheduler, whose workers do all tasks and pass no
    progress on. The first task is done in this process; the others are distributed, in order, only
    where they would last longer than ``min_parallel_s``. Results must be picklable.
    Raises what ``work`` raises, and HarnessError when a process dies.
    """
    if isinstance(workers, str):
        yield from _on_cluster(work, tasks, workers)
        return
    clock = MonotonicClock()
    began_ns, left = clock.now_ns(), list(range(len(tasks)))
    count = 1 if multiprocessing.parent_process() is not None else workers or num_cores()
    while left and (len(left) == len(tasks) or count < 2 or len(left) < 2):
        place = left.pop(0)
        yield place, work(tasks[place], on_progress)
        each_s = (clock.now_ns() - began_ns) / NS_PER_S / (len(tasks) - len(left))
        if each_s * len(left) < min_parallel_s:
            count = 1
    if left:
        yield from _distributed(work, tasks, left, on_progress, min(count, len(left)))


def _on_cluster(
    work: Callable[[Task, Report], Result], tasks: Sequence[Task], address: str
) -> Iterator[tuple[int, Result]]:
    """``parallel_map`` on the workers of a Dask cluster; a task whose worker dies is tried again by another."""
    dask = distributed("--cluster")
    try:
        client = dask.Client(address, timeout=CONNECT_TIMEOUT_S)
    except (OSError, ValueError) as error:
        raise SpecError(f"no scheduler answers ({error})", where=address, hint="Check the address") from error
    with client:
        place_of = {
            client.submit(work, task, _no_progress, pure=False, retries=ALLOWED_DEATHS): place
            for place, task in enumerate(tasks)
        }
        try:
            for future in dask.as_completed(list(place_of)):
                yield place_of.pop(future), future.result()
        finally:
            # After Ctrl-C nothing fetches the remaining results.
            client.cancel(list(place_of))


def _no_progress(_progress: object) -> None:
    pass


def _distributed(
    work: Callable[[Task, Report], Result], tasks: Sequence[Task], left: list[int], on_progress: Report, count: int
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
                place, kind, content = _received(line, lines[line])
                if kind == "progress":
                    on_progress(content)
                    continue
                if kind == "raised":
                    raise content
                if left:
                    line.send(left.pop(0))
                else:
                    busy.remove(line)
                yield place, content
    finally:
        for line, process in lines.items():
            line.close()
            process.kill()
            process.join()


def _forked(
    work: Callable[[Task, Report], Result], tasks: Sequence[Task], others: Sequence[Connection]
) -> tuple[Connection, ForkProcess]:
    ours, theirs = cast("tuple[Connection, Connection]", multiprocessing.Pipe())

    def serve() -> None:
        # The first process alone answers Ctrl-C.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Otherwise a line would stay open, and its process alive, when the first process is killed.
        for line in (ours, *others):
            line.close()
        try:
            while True:
                _do(work, tasks, theirs, theirs.recv())
        except (EOFError, OSError):
            return
        except BaseException:
            # No memory even for an answer: the first process reports that this one ended; no stack is printed here.
            os._exit(1)

    process = ForkProcess(target=serve, daemon=True)
    with theirs, warnings.catch_warnings():
        # Python warns about locks of other threads; the libraries reset theirs in the new process.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return ours, process


def _do(work: Callable[[Task, Report], Result], tasks: Sequence[Task], line: Connection, place: int) -> None:
    """Do one task in a forked process and send its result or its error."""
    try:
        answer = ("done", work(tasks[place], lambda progress: line.send((place, "progress", progress))))
    except Exception as error:
        answer = ("raised", error)
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            answer = ("raised", HarnessError(f"{type(error).__name__}: {error}", where=f"task {place}"))
    line.send((place, *answer))


def _received(line: Connection, process: ForkProcess) -> tuple[int, str, Any]:
    try:
        return line.recv()
    except (EOFError, OSError):
        process.join()
        raise HarnessError(
            f"a worker process ended with status {process.exitcode}",
            where="harness.processes",
            hint="Look for what kills it (memory?)",
        ) from None
