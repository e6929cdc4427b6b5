"""Signals at random moments: to the harness, to all its processes, or to one child; then the same again with --resume.

Every experiment goes on until it is whole; a kill may fall anywhere from the start of Python to the last rename.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections import Counter
from contextlib import suppress
from pathlib import Path

from harness.clock import NS_PER_S, MonotonicClock, monotonic_ns
from tests.faults.place import Place
from tests.support.places import processes_naming

# Two signals at one moment are one: the run that is going on may be finished, on a busy machine.
ENDS_WITHIN_S = 300
KINDS = ("harness", "harness", "harness", "all", "child", "child", "TERM", "INT", "INT twice")


def kills(number: int, folder: Path, rng: random.Random) -> tuple[Counter[str], list[str]]:
    """How many signals of which kind fell, and what was wrong after them."""
    fell: Counter[str] = Counter()
    found: list[str] = []
    typical_s, turn = 8.0, 0
    while fell.total() < number:
        place = Place(folder / str(turn), "emulator", processes=1 + turn % 2)
        turn += 1
        while not place.is_whole and fell.total() < number:
            kind = rng.choice(KINDS)
            began_ns = monotonic_ns()
            process = place.run("--resume")
            said = _struck(process, place, kind, rng.uniform(0, typical_s))
            if said is None:
                found.append(f"{kind}: hangs")
                process.kill()
                said = ""
            elif process.returncode == 0:
                # Over before the signal fell: how long an experiment takes on this machine now.
                typical_s = 0.7 * typical_s + 0.3 * (monotonic_ns() - began_ns) / NS_PER_S
            else:
                fell[kind] += 1
            found += [f"{kind}: {one}" for one in place.faults(said)]
            if process.returncode == 0 and not place.is_whole:
                found.append(f"{kind}: exit 0 without all runs: {said[-300:]}")
            if kind == "child" and process.returncode not in (0, 1, 3):
                found.append(f"child: exit {process.returncode}: {said[-300:]}")
            print(f"{fell.total()} {kind} {process.returncode} {len(place.sealed)} sealed {found[-1:]}", flush=True)
    return fell, found


def _struck(process: subprocess.Popen[str], place: Place, kind: str, after_s: float) -> str | None:
    """What the harness said until it was over; None when it did not end."""
    clock = MonotonicClock()
    until_ns = clock.now_ns() + int(after_s * NS_PER_S)
    while process.poll() is None and clock.now_ns() < until_ns:
        clock.sleep_until_ns(min(until_ns, clock.now_ns() + NS_PER_S // 20))
    if process.poll() is None:
        with suppress(ProcessLookupError):
            _strike(process, place, kind)
    try:
        return process.communicate(timeout=ENDS_WITHIN_S)[0]
    except subprocess.TimeoutExpired:
        return None


def _strike(process: subprocess.Popen[str], place: Place, kind: str) -> None:
    if kind == "harness":
        process.kill()
    elif kind == "all":
        for pid in (process.pid, *processes_naming(place.folder)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    elif kind == "child":
        if children := [pid for pid in processes_naming(place.folder) if pid != process.pid]:
            os.kill(random.choice(children), signal.SIGKILL)
    else:
        number = signal.SIGTERM if kind == "TERM" else signal.SIGINT
        for _ in range(2 if kind.endswith("twice") else 1):
            process.send_signal(number)
