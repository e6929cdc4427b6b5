"""Each answer that a server may get wrong, over http and https, each in a process of its own: its time and its memory.

The server of the test lives in the same process, so that its memory counts as well.
"""

from __future__ import annotations

import multiprocessing
import random
import resource
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.clock import NS_PER_S, MonotonicClock
from tests.support.misbehaviours import CATALOGUE, ENDLESS, Misbehaviour
from tests.support.raw_server import CHUNKED_HEAD, Asked, RawServer, Reply, chunked, events
from tests.support.replays import SCHEMES, plan_of, rows_of, run, session
from tests.support.tls import certificate

DEADLINE_S, MORE_S, MOST_MB = 1.0, 2.0, 400
HANGS_AFTER_S = 60.0


def misbehaviours(number: int, _folder: Path, _rng: random.Random) -> tuple[Counter[str], list[str]]:
    """Each ``number`` times: how many ended how, and what was wrong; the slowest and the largest are said."""
    fell: Counter[str] = Counter()
    found: list[str] = []
    slowest, largest = (0.0, ""), (0, "")
    certificate()  # for all processes
    for wrong in (*CATALOGUE, *ENDLESS):
        for scheme in SCHEMES * number:
            name = f"{wrong.name}, {scheme}"
            status, says, took_s, peak_mb = _alone(wrong, scheme)
            fell[status] += 1
            found += [f"{name}: {one}" for one in _faults(wrong, status, says, took_s, peak_mb)]
            slowest, largest = max(slowest, (took_s, name)), max(largest, (peak_mb, name))
            print(f"{fell.total()} {name}: {status} after {took_s:.2f} s, {peak_mb} MB: {says[:90]}", flush=True)
    print(f"deadline {DEADLINE_S} s; slowest {slowest[0]:.2f} s ({slowest[1]}); most {largest[0]} MB ({largest[1]})")
    return fell, found


def _faults(wrong: Misbehaviour, status: str, says: str, took_s: float, peak_mb: int) -> list[str]:
    found: list[str] = []
    if wrong.status and status != wrong.status:
        found.append(f"{status} instead of {wrong.status}: {says}")
    if status in {"ok", "exception", "hangs"} and wrong.status != "ok":
        found.append(f"{status}: {says}")
    if took_s > DEADLINE_S + MORE_S:
        found.append(f"took {took_s:.1f} s")
    if peak_mb > MOST_MB:
        found.append(f"took {peak_mb} MB")
    return found


def _alone(wrong: Misbehaviour, scheme: str) -> tuple[str, str, float, int]:
    """Status and words of the row, seconds from its trigger to its end, most memory of the process in MB."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_replayed, args=(wrong, scheme, there))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(HANGS_AFTER_S) else ("hangs", "", HANGS_AFTER_S, 0)
    except EOFError:
        process.join()
        return "exception", f"the process ended with {process.exitcode}", 0.0, 0
    finally:
        process.kill()
        process.join()


def _replayed(wrong: Misbehaviour, scheme: str, told: Connection) -> None:
    def answer(asked: Asked) -> Reply:
        return wrong.answer(asked) if not asked.session else Reply([CHUNKED_HEAD, *chunked(events(asked))])

    def first_row() -> dict[str, Any]:
        with RawServer(answer) as server:
            return rows_of(run(plan_of(session(0, num_requests=1)), server, scheme, timeout_s=DEADLINE_S))[0]

    clock = MonotonicClock()
    began_ns = clock.now_ns()
    try:
        row = first_row()
        status, says = row["status"], row["error"]
        took_s = (
            (row["done_ns"] - row["sent_ns"]) / NS_PER_S if row["done_ns"] else (clock.now_ns() - began_ns) / NS_PER_S
        )
    except BaseException:
        status, says, took_s = "exception", traceback.format_exc(), (clock.now_ns() - began_ns) / NS_PER_S
    told.send((status, says, took_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // 10**6))
