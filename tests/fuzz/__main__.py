"""``python -m tests.fuzz SECONDS [TARGET...]``: fuzz every parser in turn, or those that are named.

Inputs that were found lie in ``FINDS`` afterwards. Exit code 1 when there are any.
"""

from __future__ import annotations

import faulthandler
import hashlib
import random
import resource
import sys
from pathlib import Path
from time import process_time_ns

from harness.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from tests.fuzz.fuzzer import HANGS_AFTER_S, Find, Fuzzer, alarmed
from tests.fuzz.targets import targets

FINDS = Path("runs/fuzz")
TURN_NS = 300 * NS_PER_MS
"""Processor time of a target before the next one's turn."""
MORE_MEMORY = 2 << 30
FINDS_A_TURN = 20


def main(seconds: float, names: list[str]) -> int:
    """0 when every target answered as it promises."""
    seed = random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    finds: list[Find] = []
    with alarmed() as folder:
        chosen = (target for target in targets() if not names or target.name in names)
        every = [Fuzzer(target, folder / "input.toml", rng) for target in chosen]
        for one in every:
            one.warm_up()
        _limit_memory()
        until_ns = monotonic_ns() + int(seconds * NS_PER_S)
        while monotonic_ns() < until_ns:
            for one in every:
                # Code that holds the interpreter hears no alarm: the process ends, and its input is still in its file.
                faulthandler.dump_traceback_later(30 * HANGS_AFTER_S, exit=True)
                finds += _turn(one)
        faulthandler.cancel_dump_traceback_later()
    for one in every:
        print(f"{one.num_inputs:10d} inputs, {one.num_accepted:9d} accepted  {one.target.name}")
    print(f"{sum(one.num_inputs for one in every)} inputs into {len(every)} parsers, seed {seed}")
    for find in {(find.target, find.in_short): find for find in finds}.values():
        print(f"{find.target}: {find.what.strip()}\n    input {find.content[:200]!r}")
    return 1 if finds else 0


def _turn(one: Fuzzer) -> list[Find]:
    finds: list[Find] = []
    until_ns = process_time_ns() + TURN_NS
    while process_time_ns() < until_ns and len(finds) < FINDS_A_TURN:
        if (find := one.try_input(one.next_input())) is not None:
            finds.append(find)
            FINDS.mkdir(parents=True, exist_ok=True)
            (FINDS / hashlib.sha256(find.content).hexdigest()[:16]).write_bytes(find.content)
            print(f"found in {find.target}: {find.in_short}", flush=True)
    return finds


def _limit_memory() -> None:
    """A target that asks for gigabytes because a number says so is found out."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MORE_MEMORY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
