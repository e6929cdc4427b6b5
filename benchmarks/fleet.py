"""Fleets under kill -9, and a fleet against one device: what is promised of both, tried on emulated devices.

Everything runs on this host, below one folder. Nothing of an NPU is shown. Next: docs/fleet.md quotes what it prints.
"""

from __future__ import annotations

import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from harness.analysis import run_figures
from harness.clock import NS_PER_S, MonotonicClock
from harness.live.server.ports import free_port
from harness.records import RunStore, SealedRun
from harness.runner import run_experiment
from harness.spec import ExperimentSpec, FleetSpec

HOSTS = ("alpha", "beta")
EXPERIMENT = """
name = "{name}"
time_scale = 8.0
replicates = {blocks}
base_seed = 7
limits = {{rearrival_lag_p99_ms = 5000.0, start_spread_ms = 5000.0, stall_ms = 60000.0, stamp_lag_ms = 60000.0}}
workload = {{num_sessions = 3, wait_cap_s = 2.0, prompt_tokens = {{law = "uniform", low = 200, high = 400}}, generate_tokens = {{law = "uniform", low = 8, high = 24}}}}
condition = [{{name = "base"}}, {{name = "more", server.decode_buckets = [1, 2, 3, 4, 8]}}]
fleet = {{devices = [0, 1], overcommit = true{where}}}
"""  # noqa: E501
STRAY_S = 60.0
KINDS = ("driver", "device process", "scheduler", "Dask worker")
MARKS = ("harness.runner.fleet.worker", "harness.emulator", "harness.live.server", "harness.live.audit")


@dataclass
class Cluster:
    """A scheduler and a worker per device, each started again when it is gone, as a shell's loop would."""

    folder: Path
    port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, "subprocess.Popen[bytes]"])

    def keep(self) -> None:
        """Start whatever of it is not running."""
        self._keep("scheduler", "dask", "scheduler", "--host", "127.0.0.1", "--port", str(self.port), "--no-dashboard")
        for host in HOSTS:
            for device in ("0", "1"):
                words = ("fleet", "worker", f"tcp://127.0.0.1:{self.port}", "--host", host, "--device", device)
                self._keep(f"{host}/dev{device}", "harness.cli", *words, cache=self.folder / f"cache-{host}")

    def _keep(self, name: str, module: str, *words: str, cache: Path | None = None) -> None:
        if name in self.processes and self.processes[name].poll() is None:
            return
        command = [sys.executable, "-c", "from harness.cli import main; main()"]
        command = [sys.executable, "-m", module] if module == "dask" else command
        env = os.environ | ({} if cache is None else {"XDG_CACHE_HOME": str(cache)})
        with (self.folder / f"{name.replace('/', '-')}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*command, *words], env=env, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )

    def end(self) -> None:
        """End all of it."""
        for process in self.processes.values():
            process.kill()
            process.wait()


def wait_s(seconds: float) -> None:
    clock = MonotonicClock()
    clock.sleep_until_ns(clock.now_ns() + int(seconds * NS_PER_S))


@contextmanager
def cluster(folder: Path, is_wanted: bool) -> Generator[Cluster | None]:
    """A cluster that is gone afterwards; None where none is wanted."""
    made = Cluster(folder) if is_wanted else None
    try:
        yield made
    finally:
        if made is not None:
            made.end()


def faults(folder: Path, num_kills: int, *, over_hosts: bool, seed: int = 1, num_blocks: int = 8) -> Counter[str]:
    """Run experiments of a fleet to their end through ``num_kills`` SIGKILLs at random moments; who was hit how often.

    Raises AssertionError when a run is missing, damaged or there twice, or when a process is left.
    """
    generator, hit, round_ = random.Random(seed), Counter[str](), 0
    with cluster(folder, over_hosts) as hosts:
        while sum(hit.values()) < num_kills:
            name = f"faults-{round_}"
            where = f', hosts = ["alpha", "beta"], scheduler = "tcp://127.0.0.1:{hosts.port}"' if hosts else ""
            file = folder / f"{name}.toml"
            file.write_text(EXPERIMENT.format(name=name, blocks=num_blocks, where=where), encoding="utf-8")
            _through(file, folder, hosts, generator, hit, num_kills)
            sealed = RunStore(folder / "runs").sealed(name)
            keys = Counter(run.key for run in sealed)
            assert len(keys) == len(sealed) == 2 * num_blocks, f"{len(sealed)} runs of {2 * num_blocks}"
            places = FleetSpec(devices=(0, 1), hosts=HOSTS, scheduler="tcp://127.0.0.1:1") if hosts else None
            for run in sealed:
                run.verify()
                assert run.device == (places.place_of(run.replicate).device if places else run.replicate % 2)
            round_ += 1
    _require_no_strays(folder)
    return hit


def _through(
    file: Path, folder: Path, hosts: Cluster | None, generator: random.Random, hit: Counter[str], num_kills: int
) -> None:
    """Start the driver as often as it takes, and kill meanwhile."""
    while True:
        if hosts is not None:
            hosts.keep()
            wait_s(8)
        command = [sys.executable, "-c", "from harness.cli import main; main()", "run", str(file), "--resume"]
        with (folder / "driver.log").open("ab") as log:
            driver = subprocess.Popen(
                [*command, "--runs", str(folder / "runs")], stdout=log, stderr=log, cwd=folder, start_new_session=True
            )
        while driver.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                driver.wait(generator.uniform(3, 25))
            kind = generator.choice(KINDS if hosts else KINDS[:2])
            while sum(hit.values()) < num_kills and driver.poll() is None:
                if _is_killed(kind, driver, hosts, generator):
                    hit[kind] += 1
                    print(f"  {sum(hit.values())}: {kind}", flush=True)
                    break
                wait_s(0.2)
            if hosts is not None:
                hosts.keep()
        if driver.returncode in (0, 3):
            return


def _is_killed(kind: str, driver: subprocess.Popen[bytes], hosts: Cluster | None, generator: random.Random) -> bool:
    """SIGKILL one process of a kind, if there is one now and runs are being made."""
    parents = [driver, *(hosts.processes.values() if hosts else ())]
    below = [child for one in parents if one.poll() is None for child in _children(one.pid)]
    measuring = [one.pid for one in below if "harness.runner.fleet.worker" in _words(one)]
    pids = {"driver": [driver.pid], "device process": measuring}
    if hosts:
        pids["scheduler"] = [hosts.processes["scheduler"].pid]
        pids["Dask worker"] = [one.pid for name, one in hosts.processes.items() if name != "scheduler"]
    if not measuring:
        return False
    with suppress(ProcessLookupError):
        os.kill(generator.choice(pids[kind]), signal.SIGKILL)
        return True
    return False


def _children(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _require_no_strays(folder: Path) -> None:
    """AssertionError when something that ran below ``folder`` still does after a minute."""
    clock = MonotonicClock()
    began_ns = clock.now_ns()
    while left := [one for one in psutil.process_iter() if _is_of(one, folder)]:
        assert clock.now_ns() - began_ns < STRAY_S * NS_PER_S, f"left running: {[_words(one) for one in left]}"
        wait_s(1)


def _is_of(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error):
        is_ours = any(mark in " ".join(process.cmdline()) for mark in MARKS)
        return is_ours and Path(process.cwd()).is_relative_to(folder) and process.status() != psutil.STATUS_ZOMBIE
    return False


def null(folder: Path, num_blocks: int, time_scale: float) -> None:
    """Print how four emulated devices side by side differ from one device that runs the same blocks one by one."""
    table = {
        "name": "null",
        "time_scale": time_scale,
        "replicates": num_blocks,
        "base_seed": 11,
        "workload": {"num_sessions": 4, "wait_cap_s": 3.0},
        "condition": [{"name": "base"}],
    }
    alone = ExperimentSpec.model_validate(table)
    fleet = ExperimentSpec.model_validate({**table, "fleet": {"devices": [0, 1, 2, 3], "overcommit": True}})
    runs = {
        name: run_experiment(spec, runs_root=folder / name).runs
        for name, spec in (("once", alone), ("again", alone), ("fleet", fleet))
    }
    for name, found in runs.items():
        print(f"{name}: {len(found)} runs, {sum(run.is_valid for run in found)} valid")
    for name in ("again", "fleet"):
        for channel in ("a", "b"):
            print(f"ln cost of channel {channel.upper()}, {name} / once: {_spread(runs[name], runs['once'], channel)}")


def _spread(runs: tuple[SealedRun, ...], others: tuple[SealedRun, ...], channel: str) -> str:
    logs = [math.log(_cost(run, channel) / _cost(other, channel)) for run, other in zip(runs, others, strict=True)]
    return f"mean {statistics.mean(logs):+.4f}, sd {statistics.stdev(logs):.4f}, {len(logs)} blocks"


def _cost(run: SealedRun, channel: str) -> float:
    figures = run_figures(run)
    if channel == "b":
        return figures.b_ns
    assert figures.a is not None
    return figures.a.total_ns


def main() -> None:
    """``python -m benchmarks.fleet faults [KILLS]``, half of them over two hosts' workers; or ``null [BLOCKS]``."""
    what, number = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="harness-fleet-") as name:
        folder = Path(name).resolve()
        if what == "null":
            null(folder, number, 1.0)
            return
        for over_hosts in (False, True):
            own = folder / ("hosts" if over_hosts else "host")
            own.mkdir()
            hit = faults(own, (number + over_hosts) // 2, over_hosts=over_hosts)
            print(f"{'over hosts' if over_hosts else 'one host'}: {dict(hit)}; nothing lost, twice or left", flush=True)


if __name__ == "__main__":
    main()
