"""A recorder that is asked for days: so many requests of sessions through it, and what it takes.

``python -m tests.support.many_sessions REQUESTS FOLDER`` prints memory, files and CPU time a request; again, it
prints what is read of the files, the last of which was cut within a line. With ``cost`` behind it prints what the whole
observer takes of a scheduler that does nothing itself: CPU time with the variable and without, alternately.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, quantiles
from types import SimpleNamespace
from typing import Any, NamedTuple

from harness.extras.formats.vllm_sessions import read_requests
from harness.model.traces.base import ReadNotes
from harness.stacks.vllm.inside.vllm_step_log import core, sessions
from harness.stacks.vllm.inside.vllm_step_log.sessions import Ended, Limits, SessionFile

AT_A_TIME = 200
TURNS = 12
HEADER = {"engine": 0, "block_tokens": 16, "vllm": "0.33.0", "effective": {"enable_prefix_caching": True}, "absent": []}


class Asked(NamedTuple):
    """One request, and the hashes of its prompt's blocks and of its answer's too."""

    prompt: list[bytes]
    whole: list[bytes]


def asked(number: int, seed: int = 1) -> Iterator[Asked]:
    """Requests of sessions that take turns; each prompt begins with the one before and its answer."""
    chosen = random.Random(seed)
    streams: list[list[bytes]] = [[] for _ in range(AT_A_TIME)]
    turns, first = [0] * AT_A_TIME, [_new(chosen) for _ in range(8)]
    for _ in range(number):
        place = chosen.randrange(AT_A_TIME)
        if not turns[place]:
            streams[place] = list(first)
        prompt = [*streams[place], *(_new(chosen) for _ in range(chosen.randint(1, 20)))]
        whole = [*prompt, *(_new(chosen) for _ in range(chosen.randint(0, 8)))]
        streams[place], turns[place] = whole, (turns[place] + 1) % TURNS
        yield Asked(prompt, whole)


def _new(chosen: random.Random) -> bytes:
    return chosen.getrandbits(256).to_bytes(32, "little")


def record(number: int, folder: Path, limits: Limits) -> tuple[float, int]:
    """Write so many requests; (CPU us a request, of arrival and end together; bytes resident beyond the start)."""
    file, spent_ns, before = SessionFile(str(folder / "s.jsonl"), HEADER, limits), 0, resident()
    for handle, request in enumerate(asked(number)):
        now_ns = 1000 * handle
        began_ns = time.thread_time_ns()
        file.came(handle, (now_ns, now_ns), (16 * len(request.prompt), 128), request.prompt)
        end = Ended(now_ns, now_ns, now_ns + 1, 0, 16 * (len(request.whole) - len(request.prompt)), 0, "stop")
        file.ended(handle, end, request.whole, len(request.prompt))
        file.flush()
        spent_ns += time.thread_time_ns() - began_ns
    return spent_ns / number / 1000, resident() - before


class Scheduler:
    """What an engine core calls, and the observer wraps. It admits what waits and ends it with the next step."""

    def __init__(self, vllm_config: object) -> None:
        self.vllm_config, self.waiting, self.running = vllm_config, list[Any](), list[Any]()
        self.finished_req_ids = set[str]()

    def add_request(self, request: Any) -> None:
        self.waiting.append(request)

    def schedule(self) -> SimpleNamespace:
        new, self.waiting, gone = self.waiting, [], self.finished_req_ids
        self.running, self.finished_req_ids = new, set()
        admitted = [SimpleNamespace(req_id=each.request_id, num_computed_tokens=0) for each in new]
        return SimpleNamespace(scheduled_new_reqs=admitted, finished_req_ids=gone, preempted_req_ids=None)

    def update_from_output(self, _scheduled: SimpleNamespace, _ran: object) -> None:
        for each in self.running:
            each.num_output_tokens, each.block_hashes = 1, each.whole
        self.finished_req_ids = {each.request_id for each in self.running}


def play(requests: Sequence[Any]) -> float:
    """CPU us a request: each comes, is admitted, has a token and ends."""
    scheduler = Scheduler(SimpleNamespace())
    began_ns = time.thread_time_ns()
    for request in requests:
        scheduler.add_request(request)
        scheduler.update_from_output(scheduler.schedule(), None)
    return (time.thread_time_ns() - began_ns) / len(requests) / 1000


def cost(number: int, folder: Path, rounds: int = 15) -> None:
    """Print what observing takes a request: its mean over the rounds, and the middle 80 % of them."""
    core.observe(Scheduler)
    differences: list[float] = []
    for place in range(rounds):
        spent: dict[bool, float] = {}
        for is_on in (True, False) if place % 2 else (False, True):
            os.environ[sessions.FILE_VARIABLE] = str(folder / "cost.jsonl") if is_on else ""
            spent[is_on] = play(drawn_requests(number, place))
            (folder / "cost.jsonl").unlink(missing_ok=True)
        differences.append(spent[True] - spent[False])
    low, *_between, high = quantiles(differences, n=10)
    print(f"observing takes {mean(differences):.1f} us of CPU a request; 80 % of rounds: {low:.1f} to {high:.1f}")


def drawn_requests(number: int, seed: int) -> list[Any]:
    """Requests as a scheduler of vLLM has them."""
    return [
        SimpleNamespace(
            request_id=f"cmpl-{place}",
            arrival_time=sessions.unix_ns() / 1e9,
            num_prompt_tokens=16 * len(each.prompt),
            max_tokens=128,
            num_output_tokens=0,
            block_hashes=each.prompt,
            whole=each.whole,
            status=SimpleNamespace(name="FINISHED_STOPPED"),
        )
        for place, each in enumerate(asked(number, seed))
    ]


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def files_in(folder: Path) -> list[Path]:
    """The files of the recorder, in the order in which they were begun."""
    return sorted(folder.glob("s*.jsonl"), key=lambda path: (len(path.name), path.name))


def main(number: int, folder: Path) -> None:
    """Record where FOLDER is not there yet, cut the last file within its last line; else read what is there."""
    if not folder.exists():
        folder.mkdir(parents=True)
        spent_us, grown = record(number, folder, Limits(disk_bytes=64 << 30))
        files = files_in(folder)
        size = sum(path.stat().st_size for path in files)
        print(f"{number} requests in {len(files)} files, {size / number:.0f} bytes and {spent_us:.1f} us of CPU each")
        print(f"memory of the recorder: {grown / 1e6:.0f} MB more")
        os.truncate(files[-1], files[-1].stat().st_size - 30)
        return
    files = files_in(folder)
    notes = ReadNotes()
    seen = read_requests(files, notes)
    ended = sum(request.end is not None for request in seen)
    linked = sum(request.like >= 0 for request in seen)
    print(f"read: {len(seen)} requests, {ended} ended, {linked} begin with blocks of an earlier one")
    print(f"broken: {dict(notes.broken)}; peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


if __name__ == "__main__":
    if sys.argv[3:] == ["cost"]:
        cost(int(sys.argv[1]), Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]), Path(sys.argv[2]))
