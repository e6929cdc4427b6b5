"""Full disks and limits of the shell: a disk of so many pages, files of so many bytes, so many files, so much memory.

A disk is a tmpfs that is made so large and no larger, where mounting is allowed (root); file sizes are exact to the
byte. Afterwards there is room, and the experiment is completed.
"""

from __future__ import annotations

import random
import resource
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

from tests.faults.place import Place
from tests.support.command_line import harness_apart

ENDS_WITHIN_S = 300
PAGE = 4096
DISK_BYTES, FILE_BYTES = 480_000, 120_000
KINDS = ("disk", "disk", "disk", "file size", "file size", "file size", "files", "files", "memory")


def disks(number: int, folder: Path, rng: random.Random) -> tuple[Counter[str], list[str]]:
    """How many limits of which kind refused something, and what was wrong then."""
    fell: Counter[str] = Counter()
    found: list[str] = []
    disk = folder / "disk"
    disk.mkdir()
    has_disk = mounted(disk, DISK_BYTES)
    try:
        for turn in range(100_000):
            if fell.total() >= number:
                break
            kind = rng.choice(KINDS if has_disk else KINDS[3:])
            found += _starved(kind, Place(folder / str(turn), "sim", runs=disk / "runs"), rng, fell)
            shutil.rmtree(disk / "runs", ignore_errors=True)
            shutil.rmtree(folder / str(turn))
    finally:
        if has_disk:
            mounted(disk, 0)
    return fell, found


def _starved(kind: str, place: Place, rng: random.Random, fell: Counter[str]) -> list[str]:
    """One experiment under one limit; what was wrong."""
    limit = _limit(kind, rng)
    disk = place.runs.parent
    if kind == "disk":
        mounted(disk, limit)
    code, said = _run(place, kind, limit)
    found = place.faults(said)
    # A C++ library that memory is refused may end the process itself; what was sealed is looked at all the same.
    is_aborted = code == -signal.SIGABRT and "std::bad_alloc" in said
    if (
        (code not in (0, 1, 3) and not is_aborted)
        or (code == 0 and not place.is_whole)
        or (code and said.strip().count("\nharness: ") > 1)
    ):
        found.append(f"exit {code} with {len(place.sealed)} runs: {said[-300:]}")
    if code:
        fell[f"{kind}, aborted by a library" if is_aborted else kind] += 1
    if kind == "disk":
        mounted(disk, 4 * DISK_BYTES)
    if code and rng.random() < 0.2:
        code, said = _run(place, "none", 0, "--resume", "--retry-invalid")
        found += place.faults(said)
        if code or not place.is_whole:
            found.append(f"cannot be completed: {said[-300:]}")
    print(f"{fell.total()} {kind} {limit} exit {code}, {len(place.sealed)} sealed {found}", flush=True)
    return [f"{kind} of {limit}: {one}" for one in found]


def _run(place: Place, kind: str, limit: int, *words: str) -> tuple[int, str]:
    """Exit code and words of the experiment under the limit; those of an interpreter need one of their own."""
    if kind in OF_INTERPRETERS:
        process = place.run(*words, under=("prlimit", f"--{OF_INTERPRETERS[kind]}={limit}:{limit}"))
        try:
            said = process.communicate(timeout=ENDS_WITHIN_S)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            return -1, "hangs"
        return process.returncode, said
    limits = {resource.RLIMIT_FSIZE: limit} if kind == "file size" else {}
    variables = {"TMPDIR": str(place.temporary)}
    arguments = ("run", "small.toml", "--runs", str(place.runs), *words)
    done = harness_apart(*arguments, cwd=place.folder, environment=variables, limits=limits)
    return done.returncode, done.stdout + done.stderr


OF_INTERPRETERS = {"memory": "as", "files": "nofile"}


def _limit(kind: str, rng: random.Random) -> int:
    return {
        "disk": PAGE * rng.randrange(1, DISK_BYTES // PAGE),
        "file size": rng.randrange(FILE_BYTES),
        # With fewer Python itself does not start.
        "files": rng.randrange(6, 40),
        "memory": rng.randrange(100 << 20, 1500 << 20),
    }[kind]


def mounted(disk: Path, size: int) -> bool:
    """Make the disk so large, 0: take it away; False where one may not."""
    if not size:
        return subprocess.run(["umount", str(disk)], check=False).returncode == 0
    again = ["-o", f"remount,size={size}"] if disk.is_mount() else ["-o", f"size={size}"]
    done = subprocess.run(["mount", "-t", "tmpfs", *again, "tmpfs", str(disk)], capture_output=True, check=False)
    return done.returncode == 0
