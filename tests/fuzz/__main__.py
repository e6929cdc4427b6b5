"""``python -m tests.fuzz SECONDS [FOLDER [INPUTS [TARGET...]]]``: fuzz every parser in turn, so long or so often.

What was found before is tried first, each time, and what got another answer than all before it is a seed: the corpus.
Quick targets get five times the time of others. Exit code 1 when anything was found.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import random
import resource
import sys
from pathlib import Path
from time import process_time_ns

from harness.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from tests.fuzz.fuzzer import HANGS_AFTER_S, Find, Fuzzer, alarmed
from tests.fuzz.targets import targets

# Of processor time. A target that answers so many inputs in a millisecond gets the long one.
SLICE_NS, LONG_SLICE_NS, QUICK_PER_MS = 100 * NS_PER_MS, 500 * NS_PER_MS, 7
MORE_MEMORY = 2 << 30
FINDS_A_TARGET = 20


def main(seconds: float, corpus: Path, most_inputs: int, names: list[str]) -> int:
    """0 when every target answered as it promises."""
    seed = random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    finds: list[Find] = []
    with alarmed() as folder:
        chosen = (target for target in targets() if not names or target.name in names)
        every = [Fuzzer(target, folder / "input.toml", rng) for target in chosen]
        for one in every:
            one.warm_up()
        for one in every:
            finds += _from_corpus(one, corpus)
        _limit_memory()
        began_ns = monotonic_ns()
        until_ns = began_ns + int(seconds * NS_PER_S)
        while monotonic_ns() < until_ns and sum(one.num_inputs for one in every) < most_inputs:
            for one in every:
                # Code that holds the interpreter hears no alarm: the process ends, and its input is still in its file.
                faulthandler.dump_traceback_later(30 * HANGS_AFTER_S, exit=True)
                finds += _slice(one, corpus)
        faulthandler.cancel_dump_traceback_later()
    for one in every:
        _keep_seeds(one, corpus)
        print(
            f"{one.num_inputs:10d} inputs, {one.num_accepted:9d} accepted, {len(one.seeds):4d} seeds  {one.target.name}"
        )
    in_all = _counted(every, corpus)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    took_s = (monotonic_ns() - began_ns) / NS_PER_S
    total = sum(one.num_inputs for one in every)
    print(f"{total} inputs into {len(every)} parsers in {took_s:.0f} s, seed {seed}, peak {peak_mb} MB")
    print(f"corpus in {corpus}")
    print(f"{in_all} inputs since the corpus was begun")
    for find in {(find.target, find.in_short): find for find in finds}.values():
        print(f"{find.target}: {find.what.strip()}\n    input {find.content[:200]!r}")
    return 1 if finds else 0


def _slice(one: Fuzzer, corpus: Path) -> list[Find]:
    finds: list[Find] = []
    began_ns, num_before = process_time_ns(), one.num_inputs
    while len(finds) < FINDS_A_TARGET:
        passed_ns, num_inputs = process_time_ns() - began_ns, one.num_inputs - num_before
        if passed_ns > (LONG_SLICE_NS if num_inputs > QUICK_PER_MS * passed_ns // NS_PER_MS else SLICE_NS):
            break
        if (find := one.try_input(one.next_input())) is not None:
            finds.append(find)
            _write(_folder(corpus, one), find.content)
            print(f"found in {find.target}: {find.in_short}", flush=True)
    return finds


def _from_corpus(one: Fuzzer, corpus: Path) -> list[Find]:
    """What is still found of what was found before; seeds that earlier searches learnt."""
    found = [one.try_input(path.read_bytes()) for path in sorted(_folder(corpus, one).glob("*")) if path.is_file()]
    for path in sorted((_folder(corpus, one) / "seeds").glob("*")):
        one.try_input(path.read_bytes())
    return [find for find in found if find is not None]


def _keep_seeds(one: Fuzzer, corpus: Path) -> None:
    for content in one.seeds[len(one.target.seeds) :]:
        _write(_folder(corpus, one) / "seeds", content)


def _counted(every: list[Fuzzer], corpus: Path) -> int:
    """Add the inputs of this search to those of earlier ones, by target; how many there are in all."""
    path = corpus / "counts.json"
    corpus.mkdir(parents=True, exist_ok=True)
    counts: dict[str, int] = json.loads(path.read_text()) if path.is_file() else {}
    counts |= {one.target.name: counts.get(one.target.name, 0) + one.num_inputs for one in every}
    path.write_text(json.dumps(counts, indent=1) + "\n")
    return sum(counts.values())


def _folder(corpus: Path, one: Fuzzer) -> Path:
    return corpus / one.target.name.replace(", ", "-").replace(" ", "-")


def _write(folder: Path, content: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / hashlib.sha256(content).hexdigest()[:16]).write_bytes(content)


def _limit_memory() -> None:
    """A target that asks for gigabytes because a number says so is found out."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MORE_MEMORY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    seconds_s, folder_s, inputs_s, *targets_s = [*sys.argv[1:], *("300", "runs/fuzz", "0")[len(sys.argv[1:4]) :]]
    sys.exit(main(float(seconds_s), Path(folder_s), int(inputs_s) or sys.maxsize, targets_s))
