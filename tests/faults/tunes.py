"""A tune that is killed at a random moment, or whose disk fills up in one of its stages: the same answer, or none.

Each tune is a process of its own; the same tune then goes on in the same folder until it has its answer. A device's
tune measures its costs and compiles its candidates too; its servers are simulated, its compiler is a stand-in.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from harness.clock import NS_PER_S, MonotonicClock
from harness.errors import HarnessError
from harness.model.spec import parse_experiment
from harness.tune import confirm, page
from harness.tune.explore import QUICK
from harness.tune.path import Tune, TuneStoppedError
from tests.faults.disks import PAGE, mounted
from tests.support.forked import start_forked
from tests.tune.test_compiling import make_host, perform

STAGES = ("diagnose", "explore", "confirm")
DEVICE_STAGES = ("price", "compile")
ENDS_WITHIN_S = 300
DISK_BYTES = 64 << 20
# What a stage may still write: the confirmation of so few plans fills some 400 kB.
ROOM = {"price": 300_000, "diagnose": 120_000, "explore": 6_000, "compile": 60_000, "confirm": 300_000}
EXPERIMENT = {
    "name": "small",
    "backend": "sim",
    "base_seed": 771,
    "workload": {"num_sessions": 8, "wait_cap_s": 20.0},
    "tune": {"may_change": ["kv_slots"]},
    "condition": [{"name": "base"}],
}

DEVICE = EXPERIMENT | {
    "backend": "rbln",
    "server": {"artifact": "models/today", "environment": "stack"},
    # Other sizes need a model of their own; so do fewer requests at once.
    "tune": {"may_change": ["decode_buckets", "max_num_seqs"]},
}


def device_tunes(number: int, folder: Path, rng: random.Random) -> tuple[Counter[str], list[str]]:
    """``tunes`` of a device whose costs nobody knows and whose candidates are compiled."""
    return tunes(number, folder, rng, DEVICE_STAGES)


def tunes(
    number: int, folder: Path, rng: random.Random, stages: Sequence[str] = STAGES
) -> tuple[Counter[str], list[str]]:
    """``number`` kills, and half as many full disks in each stage; what was wrong then."""
    fell: Counter[str] = Counter()
    found: list[str] = []
    clock = MonotonicClock()
    began_ns = clock.now_ns()
    if refused := _host_fault(folder) if stages == DEVICE_STAGES else "":
        return fell, [refused]
    code, whole = _tuned(folder / "whole")
    typical_s = (clock.now_ns() - began_ns) / NS_PER_S
    said = (folder / "whole.log").read_text()
    unmet = [stage for stage in stages if f"\n{stage}:" not in f"\n{said}"]
    if code or whole is None or unmet:
        return fell, [f"a tune without a fault ends with {code}, without the stages {unmet}"]
    turn = 0
    while fell["kill"] < number:
        place, turn, code = folder / f"kill-{turn}", turn + 1, 1
        while code and fell["kill"] < number:
            began_ns = clock.now_ns()
            code, answer = _tuned(place, kill_after_s=rng.uniform(0, typical_s))
            fell["kill"] += bool(code)
            if not code:
                # How long a tune takes on this machine now.
                typical_s = 0.7 * typical_s + 0.3 * (clock.now_ns() - began_ns) / NS_PER_S
            found += _faults(f"kill {fell['kill']}", code, answer, whole)
        found += _completed(place, whole)
    disk = folder / "disk"
    disk.mkdir()
    has_disk = mounted(disk, DISK_BYTES)
    try:
        for stage in stages:
            for each in range(max(1, number // 2)):
                place = disk / f"{stage}-{each}"
                room = rng.randrange(ROOM[stage])
                code, answer = _tuned(place, stage=stage, room=room, is_disk=has_disk)
                fell[f"disk in {stage}" if code else "disk with room"] += 1
                found += _faults(f"{stage} with room for {room} bytes", code, answer, whole)
                (disk / "filler").unlink(missing_ok=True)
                found += _completed(place, whole)
                shutil.rmtree(place)
    finally:
        if has_disk:
            mounted(disk, 0)
    return fell, found


def _faults(what: str, code: int, answer: str | None, whole: str) -> list[str]:
    found = [f"{what}: another answer: {answer}"] if answer not in (None, whole) else []
    found += [f"{what}: exit 0 without an answer"] if code == 0 and answer is None else []
    found += [f"{what}: exit {code}"] if code not in (0, 1, -signal.SIGKILL) else []
    print(f"{what}: exit {code}, {'no answer' if answer is None else 'an answer'} {found}", flush=True)
    return found


def _completed(place: Path, whole: str) -> list[str]:
    code, answer = _tuned(place)
    return [] if (code, answer) == (0, whole) else [f"{place.name} goes on to exit {code}, {answer}"]


def _tuned(
    folder: Path, *, kill_after_s: float = 0.0, stage: str = "", room: int = 0, is_disk: bool = False
) -> tuple[int, str | None]:
    """Exit code and tuned.toml of a tune in this folder. room: bytes that it may write from the begin of a stage on."""
    folder.mkdir(parents=True, exist_ok=True)
    if (host := _host_of(folder)).is_dir() and not (folder / "models").exists():
        shutil.copytree(host, folder, dirs_exist_ok=True)
    variables = {**os.environ, "TMPDIR": str(folder)}
    out = folder.parent / f"{folder.name}.log"
    of_process = {"cwd": folder, "variables": variables, "out": out, "err": out}
    process = start_forked(_tune, folder, stage, room, is_disk, **of_process)
    process.join(kill_after_s or ENDS_WITHIN_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode is not None
    path = folder / "runs" / "small-tune" / "tuned.toml"
    return process.exitcode, path.read_text().replace(str(folder), ".") if path.is_file() else None


def _host_of(folder: Path) -> Path:
    """The host of a device that this campaign made, if any; a disk lies in a folder of its own."""
    root = folder.parent.parent if folder.parent.name == "disk" else folder.parent
    return root / "host"


def _host_fault(folder: Path) -> str:
    """Makes the host of a device; why that failed, "" where it is there."""
    out = folder / "host.log"
    making = start_forked(_make_host, folder / "host", cwd=folder, variables=dict(os.environ), out=out, err=out)
    making.join()
    return f"the host of a device was not made: {out.read_text().splitlines()[-1]}" if making.exitcode else ""


def _make_host(folder: Path) -> None:
    folder.mkdir()
    os.chdir(folder)
    make_host()


def _tune(folder: Path, stage: str, room: int, is_disk: bool) -> None:
    """A short tune; 1 where it ends in an error or is stopped."""
    confirm.MOST_BLOCKS = 6
    page._frontier = _no_picture

    def say(line: str) -> None:
        print(line, flush=True)
        if stage and line.startswith(f"{stage}:"):
            _fill(folder.parent / "filler", room) if is_disk else resource.setrlimit(
                resource.RLIMIT_FSIZE, (room // 16, resource.RLIM_INFINITY)
            )

    spec = parse_experiment(DEVICE if Path("models").is_dir() else EXPERIMENT, where="small")
    try:
        Tune(spec, folder / "runs", perform, say, effort=QUICK.divided(6)).run()
    except (HarnessError, TuneStoppedError, OSError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        raise SystemExit(1) from None


def _no_picture(*_: object) -> str:
    return ""


def _fill(filler: Path, room: int) -> None:
    """Leave room for so many bytes on the disk."""
    free = os.statvfs(filler.parent)
    with filler.open("wb") as file:
        file.write(b"\0" * max(0, free.f_bavail * free.f_frsize - room // PAGE * PAGE - PAGE))
