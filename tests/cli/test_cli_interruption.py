"""Ctrl-C, SIGTERM and SIGKILL at random moments: no stray process, nothing half-written that looks whole."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.clock import NS_PER_MS, MonotonicClock
from harness.measure.records.store import RunStore
from tests.support.command_line import harness as command
from tests.support.experiments import UNHURRIED_TOML
from tests.support.places import processes_naming
from tests.support.processes import comes_true

pytestmark = pytest.mark.live

SLOW_EXPERIMENT = """
name = "slow"
base_seed = 3
replicates = 2
time_scale = 10

[workload]
num_sessions = 3
waits = "none"
prompt_tokens = {distribution = "fixed", value = 300}
generate_tokens = {distribution = "fixed", value = 60}

[[condition]]
name = "a"
"""


class Harness:
    """A ``harness run`` in a process of its own, with its output read line by line."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        path = folder / "slow.toml"
        path.write_text(SLOW_EXPERIMENT + UNHURRIED_TOML)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness", "run", str(path), "--runs", str(folder / "runs"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )

    def wait_for(self, words: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if words in line:
                return
        raise AssertionError(f"{words!r} never appeared")

    def wait_for_its_server(self) -> None:
        self.wait_for("to go")
        assert comes_true(self.emulators)

    def finish(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=300)
        return self.process.returncode, output

    def servers(self) -> list[int]:
        return [pid for pid in processes_naming(self.folder) if pid != self.process.pid]

    def emulators(self) -> list[int]:
        return [pid for pid in self.servers() if b"harness.measure.emulator" in _command(pid)]


def continue_run(folder: Path, *words: str) -> None:
    """``--resume``, to the end; nothing interrupts it, so that it needs no interpreter of its own."""
    done = command("run", "slow.toml", "--runs", "runs", "--resume", *words, cwd=folder)
    assert done.returncode == 0, done.stderr


def pause_ms(milliseconds: float) -> None:
    clock = MonotonicClock()
    clock.sleep_until_ns(clock.now_ns() + int(milliseconds * NS_PER_MS))


def test_the_first_ctrl_c_ends_after_the_current_run_and_resume_completes(tmp_path: Path):
    harness = Harness(tmp_path)
    harness.wait_for_its_server()
    harness.process.send_signal(signal.SIGINT)
    code, output = harness.finish()
    assert code == 130
    assert "--resume" in output
    (sealed,) = RunStore(tmp_path / "runs").sealed("slow")
    assert sealed.is_valid
    assert harness.servers() == []
    continue_run(tmp_path)
    assert len(RunStore(tmp_path / "runs").sealed("slow")) == 2


def test_the_second_ctrl_c_aborts_the_run(tmp_path: Path):
    harness = Harness(tmp_path)
    harness.wait_for_its_server()
    pause_ms(700)
    harness.process.send_signal(signal.SIGINT)
    pause_ms(100)
    harness.process.send_signal(signal.SIGINT)
    code, _ = harness.finish()
    assert code == 130
    assert len(RunStore(tmp_path / "runs").sealed("slow")) < 2
    assert harness.servers() == []


# ``make faults`` tries more random moments. What a kill leaves behind is the operating system's doing.
def test_a_harness_killed_at_a_random_moment_leaves_no_server_and_no_false_run(tmp_path: Path):
    harness = Harness(tmp_path, "--replicates", "1")
    harness.wait_for("to go")
    pause_ms(random.Random(1).uniform(0, 3000))
    harness.process.kill()
    harness.finish()
    assert comes_true(lambda: harness.servers() == [])
    store = RunStore(tmp_path / "runs")
    assert store.verify() == len(store.sealed())
    assert all(run.is_valid for run in store.sealed())
    continue_run(tmp_path, "--replicates", "1")
    assert len(store.sealed("slow")) == 1


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
