"""Fleets under kill -9, and a fleet against one device, on emulated devices.

Everything runs on this host, below one folder. No NPU is measured.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from harness.analysis import run_figures
from harness.clock import NS_PER_S, MonotonicClock
from harness.measure.records import layout
from harness.measure.records.run import SealedRun
from harness.measure.records.store import RunStore
from harness.measure.server.process import free_port
from harness.model.spec import ExperimentSpec, FleetSpec
from harness.run_key import RunKey
from harness.runner import run_experiment

HOSTS = ("alpha", "beta")
EXPERIMENT = """
name = "{name}"
time_scale = 8.0
replicates = {blocks}
base_seed = 7
limits = {{rearrival_lag_p99_ms = 5000.0, start_spread_ms = 5000.0, stall_ms = 60000.0, stamp_lag_ms = 60000.0}}
workload = {{num_sessions = 3, wait_cap_s = 2.0, prompt_tokens = {{distribution = "uniform", low = 200, high = 400}}, generate_tokens = {{distribution = "uniform", low = 8, high = 24}}}}
condition = [{{name = "base"}}, {{name = "more", server.decode_buckets = [1, 2, 3, 4, 8]}}]
fleet = {{devices = [0, 1], overcommit = true{where}}}
"""  # noqa: E501
# Of the two hosts of ``path``.
ADDRESSES = ("10.77.0.1", "10.77.0.2")
HARNESS = (sys.executable, "-c", "from harness.cli import main; main()")
STRAY_S = 60.0
# Nothing killed and nothing sealed for so long: something waits for what never comes.
STUCK_S = 240.0
# Between two kills, s.
KILL_EVERY_S = (0.5, 12.0)
KINDS = ("driver", "device process", "scheduler", "Dask worker")


@dataclass
class Cluster:
    """A scheduler and a worker per device, each started again when it is gone, as a shell's loop would.

    within: words before the command that is to run on a host, "" being the driver's. env: of all of them.
    """

    folder: Path
    address: str
    within: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, "subprocess.Popen[bytes]"])

    def keep(self) -> None:
        """Start whatever of it is not running."""
        protocol, host, port = self.address.replace("//", "").split(":")
        words = ("--protocol", protocol, "--host", host, "--port", port, "--no-dashboard")
        self._keep("scheduler", "", sys.executable, "-m", "dask", "scheduler", *words)
        for host in HOSTS:
            for device in ("0", "1"):
                words = ("fleet", "worker", self.address, "--host", host, "--device", device)
                self._keep(f"{host}/dev{device}", host, *HARNESS, *words)

    def cache(self, host: str) -> Path:
        """Where the workers of a host keep what they made."""
        return self.folder / f"cache-{host}"

    def _keep(self, name: str, host: str, *command: str) -> None:
        if name not in self.processes or self.processes[name].poll() is not None:
            self.processes[name] = self.started(name.replace("/", "-"), host, *command)

    def started(self, log: str, host: str, *command: str) -> subprocess.Popen[bytes]:
        """A process of a host, that writes to its log and holds no terminal."""
        env = {**os.environ, **self.env, "XDG_CACHE_HOME": str(self.cache(host))}
        return _started(self.folder, log, [*self.within.get(host, ()), *command], env)

    def end(self) -> None:
        """Ask all of it to end, as Ctrl-C in a terminal does; AssertionError where one does not within a minute."""
        for process in self.processes.values():
            process.terminate()
        for name, process in self.processes.items():
            try:
                process.wait(STRAY_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise AssertionError(f"{name} survived SIGTERM") from None


def _started(
    folder: Path, log: str, command: Sequence[str], env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    with (folder / f"{log}.log").open("ab") as out:
        return subprocess.Popen(command, env=env, stdout=out, stderr=out, cwd=folder, start_new_session=True)


def wait_s(seconds: float) -> None:
    clock = MonotonicClock()
    clock.sleep_until_ns(clock.now_ns() + int(seconds * NS_PER_S))


@contextmanager
def cluster(folder: Path, is_wanted: bool) -> Generator[Cluster | None]:
    """A cluster that is gone afterwards; None where none is wanted."""
    made = Cluster(folder, f"tcp://127.0.0.1:{free_port()}") if is_wanted else None
    try:
        yield made
    finally:
        if made is not None:
            made.end()


def _experiment(folder: Path, name: str, num_blocks: int, hosts: Cluster | None) -> Path:
    where = f', hosts = ["alpha", "beta"], scheduler = "{hosts.address}"' if hosts else ""
    file = folder / f"{name}.toml"
    file.write_text(EXPERIMENT.format(name=name, blocks=num_blocks, where=where), encoding="utf-8")
    return file


@dataclass
class Kills:
    """SIGKILLs of processes drawn at random. most: how many there may be. by_kind: those so far."""

    most: int
    generator: random.Random
    by_kind: Counter[str] = field(default_factory=Counter[str])

    @property
    def count(self) -> int:
        return self.by_kind.total()


def faults(folder: Path, num_kills: int, *, over_hosts: bool, seed: int = 1, num_blocks: int = 8) -> Counter[str]:
    """Run experiments of a fleet to their end through ``num_kills`` SIGKILLs at random moments; who was hit how often.

    Raises AssertionError when a run is missing, damaged or there twice, when nothing goes on, or a process is left.
    """
    kills, round_ = Kills(num_kills, random.Random(seed)), 0
    with cluster(folder, over_hosts) as hosts:
        while kills.count < num_kills:
            name = f"faults-{round_}"
            _through(_experiment(folder, name, num_blocks, hosts), folder, hosts, kills)
            require_whole(folder, name, num_blocks, hosts)
            round_ += 1
    _require_no_strays(folder)
    return kills.by_kind


def require_whole(folder: Path, name: str, num_blocks: int, hosts: Cluster | None) -> None:
    """AssertionError unless each run of an experiment is there once, whole, and of its device."""
    sealed = RunStore(folder / "runs").sealed(name)
    assert len({run.key for run in sealed}) == len(sealed) == 2 * num_blocks, f"{len(sealed)} runs of {2 * num_blocks}"
    fleet = FleetSpec(devices=(0, 1), hosts=HOSTS, scheduler=hosts.address) if hosts else FleetSpec(devices=(0, 1))
    for run in sealed:
        run.verify()
        record, place = run.manifest.fleet, fleet.place_of(run.replicate)
        assert record is not None
        assert (record.host if hosts else "", record.device) == place, f"{run.label} was made on {record}"
    print(f"{name}: {len(sealed)} runs, each once, whole and of its device", flush=True)


def _through(file: Path, folder: Path, hosts: Cluster | None, kills: Kills) -> None:
    """Start the driver until an experiment is complete, and kill processes meanwhile."""
    clock = MonotonicClock()
    began_ns = due_ns = changed_ns = clock.now_ns()
    state, kind, driver = (0, 0), "", None
    while driver is None or driver.poll() not in (0, 3):
        if hosts is not None:
            hosts.keep()
        if driver is None or driver.poll() is not None:
            _tell_end(driver, folder)
            driver = _started(folder, "driver", [*HARNESS, "run", str(file), "--resume", "--runs", "runs"])
        wait_s(0.2)
        now_ns, num_sealed = clock.now_ns(), len(list((folder / "runs" / file.stem).glob(f"*/*/{layout.MANIFEST}")))
        kind = kind or kills.generator.choice(KINDS if hosts else KINDS[:2])
        if now_ns > due_ns and kills.count < kills.most and _is_killed(kind, driver, hosts, kills.generator):
            kills.by_kind[kind] += 1
            seconds = (now_ns - began_ns) / NS_PER_S
            print(f"  {kills.count}: {kind} at {seconds:.1f} s, {num_sealed} runs sealed", flush=True)
            kind, due_ns = "", now_ns + int(kills.generator.uniform(*KILL_EVERY_S) * NS_PER_S)
        if state != (state := (num_sealed, kills.count)):
            changed_ns = now_ns
        assert now_ns - changed_ns < STUCK_S * NS_PER_S, f"nothing goes on: {num_sealed} sealed, logs in {folder}"


def _tell_end(driver: subprocess.Popen[bytes] | None, folder: Path) -> None:
    """Say why a driver ended that was not killed."""
    if driver is not None and driver.returncode > 0:
        print(f"  the driver ended: {(folder / 'driver.log').read_text().splitlines()[-1]}", flush=True)


def _is_killed(kind: str, driver: subprocess.Popen[bytes], hosts: Cluster | None, generator: random.Random) -> bool:
    """SIGKILL one process of a kind, if there is one now and runs are being made."""
    parents = [driver, *(hosts.processes.values() if hosts else ())]
    below = [child for parent in parents if parent.poll() is None for child in _children(parent.pid)]
    measuring = [child.pid for child in below if "harness.runner.fleet.worker" in _words(child)]
    pids = {"driver": [driver.pid], "device process": measuring}
    if hosts:
        pids["scheduler"] = [hosts.processes["scheduler"].pid]
        pids["Dask worker"] = [process.pid for name, process in hosts.processes.items() if name != "scheduler"]
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
    while left := [process for process in psutil.process_iter() if _is_of(process, folder)]:
        assert clock.now_ns() - began_ns < STRAY_S * NS_PER_S, f"left running: {[_words(process) for process in left]}"
        wait_s(1)


def _is_of(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error):
        is_ours = Path(process.cwd()).is_relative_to(folder) or str(folder) in " ".join(process.cmdline())
        return is_ours and process.status() != psutil.STATUS_ZOMBIE
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
    for name, sealed in runs.items():
        print(f"{name}: {len(sealed)} runs, {sum(run.is_valid for run in sealed)} valid")
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


def path(folder: Path, num_cuts: int, seed: int = 1) -> None:
    """Cut, slow and restore the path to a host while it works; AssertionError unless what it sealed arrives as it was.

    Two hosts are two network namespaces of this machine at one bridge, with TLS between them. Needs root.
    """
    generator = random.Random(seed)
    with _two_hosts() as (within, switch):
        hosts = Cluster(folder, f"tls://{ADDRESSES[0]}:8786", within, _tls(folder))
        try:
            for number in range(num_cuts):
                hosts.keep()
                _through_a_bad_path(folder, f"path-{number}", hosts, switch, generator)
        finally:
            hosts.end()
    _require_no_strays(folder)


def _through_a_bad_path(
    folder: Path, name: str, hosts: Cluster, switch: Callable[[str], None], generator: random.Random
) -> None:
    """One experiment: the path is cut for a moment, slow for a while, then cut for longer than TCP waits."""
    file, num_blocks = _experiment(folder, name, 8, hosts), 8
    plan = [("cut", generator.uniform(2, 8)), ("slow", generator.uniform(5, 15)), ("cut", generator.uniform(45, 75))]
    clock, driver, num_starts, sealed = MonotonicClock(), None, 0, dict[RunKey, str]()
    began_ns = clock.now_ns()
    while driver is None or driver.poll() not in (0, 3):
        hosts.keep()
        if driver is None or driver.poll() is not None:
            _tell_end(driver, folder)
            num_starts += 1
            driver = hosts.started("driver", "", *HARNESS, "run", str(file), "--resume", "--runs", "runs")
        wait_s(0.2)
        assert clock.now_ns() - began_ns < 3 * STUCK_S * NS_PER_S, f"does not end: logs in {folder}"
        if not (plan and any(hosts.cache("beta").glob(f"rbln-harness/fleet/*/{name}/*/*{layout.PARTIAL}"))):
            continue
        what, seconds = plan.pop(0)
        wait_s(generator.uniform(0, 2))
        switch(what)
        for _ in range(int(seconds)):
            wait_s(1)
            hosts.keep()
        there = _seals(hosts.cache("beta").glob("rbln-harness/fleet/*"), name)
        num_waiting = len(there.keys() - _seals([folder / "runs"], name).keys())
        switch("whole")
        sealed |= there
        print(f"  {what} for {seconds:.0f} s: then {num_waiting} runs were sealed at beta and not here", flush=True)
    require_whole(folder, name, num_blocks, hosts)
    print(f"  its driver was started {num_starts} times", flush=True)
    here = _seals([folder / "runs"], name)
    assert sealed.items() <= here.items(), "what was sealed at beta was made again"


def _seals(roots: Iterable[Path], name: str) -> dict[RunKey, str]:
    """The sealed runs of an experiment below some records folders, each with what it was sealed with."""
    return {run.key: run.manifest.seal for root in roots for run in RunStore(root).sealed(name)}


@contextmanager
def _two_hosts() -> Generator[tuple[dict[str, tuple[str, ...]], Callable[[str], None]]]:
    """Two network namespaces behind a bridge in a third: words that run a command in each, and the switch between."""
    spaces = {name: f"harness-{name}-{os.getpid()}" for name in ("middle", "alpha", "beta")}
    middle = ("ip", "netns", "exec", spaces["middle"])

    def switch(what: str) -> None:
        """``cut``: what is sent to or from beta is lost without a word; ``slow``: 256 kbit/s each way; else whole."""
        _do(*middle, "ip", "link", "set", "beta", *(("nomaster",) if what == "cut" else ("master", "bridge")))
        for host in HOSTS:
            control = (*middle, "tc", "qdisc")
            subprocess.run([*control, "del", "dev", host, "root"], stderr=subprocess.DEVNULL, check=False)
            if what == "slow":
                _do(*control, "add", "dev", host, "root", "tbf", *("rate", "256kbit", "burst", "4k", "latency", "2s"))

    try:
        for space in spaces.values():
            _do("ip", "netns", "add", space)
            _do("ip", "-n", space, "link", "set", "lo", "up")
        _do(*middle, "ip", "link", "add", "bridge", "type", "bridge")
        _do(*middle, "ip", "link", "set", "bridge", "up")
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            _do(*middle, "ip", "link", "add", host, "type", "veth", "peer", "name", "wire", "netns", spaces[host])
            _do(*middle, "ip", "link", "set", host, "up", "master", "bridge")
            _do("ip", "-n", spaces[host], "address", "add", f"{address}/24", "dev", "wire")
            _do("ip", "-n", spaces[host], "link", "set", "wire", "up")
        inside = {host: ("ip", "netns", "exec", spaces[host]) for host in HOSTS}
        yield {**inside, "": inside["alpha"]}, switch
    finally:
        for space in spaces.values():
            subprocess.run(["ip", "netns", "del", space], check=False)


def _tls(folder: Path) -> dict[str, str]:
    """Dask's variables for a key and certificate of our own, as docs/guides/fleet.md has them."""
    key, certificate = folder / "fleet.key", folder / "fleet.crt"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=fleet -keyout"
    _do(*words.split(), str(key), "-out", str(certificate))
    settings = {"CA_FILE": str(certificate)}
    for who in ("SCHEDULER", "WORKER", "CLIENT"):
        settings |= {f"{who}__CERT": str(certificate), f"{who}__KEY": str(key)}
    tls = {f"DASK_DISTRIBUTED__COMM__TLS__{name}": value for name, value in settings.items()}
    return {**tls, "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "true"}


def _do(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> None:
    """``python -m benchmarks.fleet faults KILLS`` (half of them over two hosts), ``path TIMES`` or ``null BLOCKS``."""
    what, number = sys.argv[1], int(sys.argv[2])
    folder = Path(tempfile.mkdtemp(prefix="harness-fleet-")).resolve()
    if what == "null":
        null(folder, number, 1.0)
    elif what == "path":
        path(folder, number)
    for over_hosts in (True, False) if what == "faults" else ():
        part = folder / ("hosts" if over_hosts else "host")
        part.mkdir()
        hit = faults(part, (number + over_hosts) // 2, over_hosts=over_hosts)
        print(f"{'over hosts' if over_hosts else 'one host'}: {dict(hit)}; nothing lost, twice or left", flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
