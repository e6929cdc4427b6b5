"""A server on another host, over the ``ssh`` client alone: looked at, laid out, served through one forwarded port.

Nothing stays on the other host and no protocol of our own listens there. Its log carries its own wall clock, which is
measured against this host's and recorded with its uncertainty.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from harness.clock import MonotonicClock
from harness.errors import ServerError, SpecError
from harness.spec import ServerSpec
from harness.stack.rbln.artifacts import ArtifactConfig, check_artifact, read_artifact
from harness.stack.rbln.devices.smi import DeviceReport, parse_devices, require_idle
from harness.stack.rbln.patches.shipped import Patch, patch_status, require_pristine, shipped_patches

HOST_SCRIPT = Path(__file__).resolve().parents[1] / "inside" / "remote_host.py"
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=10")
CALL_TIMEOUT_S = 180.0
CLOCK_ROUNDS = 25


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The other host's wall clock minus this host's monotonic clock, ns, known to within uncertainty_ns."""

    offset_ns: int
    uncertainty_ns: int


@dataclass(frozen=True, slots=True)
class RemoteStack:
    """What was found on the other host."""

    versions: dict[str, str]
    site_packages: str
    target: bytes | None
    config: ArtifactConfig
    identity: dict[str, Any]
    devices: DeviceReport | None
    host: dict[str, str]


@dataclass(frozen=True, slots=True)
class RemoteHost:
    """An ssh destination, and the Python there that everything runs in. ssh: the client, as a command."""

    name: str
    python: str
    ssh: tuple[str, ...] = ("ssh",)

    def command(self, *remote: str, options: tuple[str, ...] = ()) -> list[str]:
        """The local command that runs ``remote`` words there, quoted for its shell."""
        return [*self.ssh, *SSH_OPTIONS, *options, "--", self.name, shlex.join(remote)]

    def call(self, action: str, job: dict[str, Any]) -> dict[str, Any]:
        """Run one action of the host script there; its answer. ServerError with what ssh or Python said."""
        script = HOST_SCRIPT.read_text(encoding="utf-8") + f"\nmain({action!r}, json.loads({json.dumps(job)!r}))\n"
        try:
            done = subprocess.run(
                self.command(self.python, "-"),
                input=script,
                capture_output=True,
                text=True,
                timeout=CALL_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServerError(f"cannot be reached ({type(error).__name__})", where=self.name) from error
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
            raise ServerError(
                f"cannot be used: {said[-1].rstrip('.')}",
                where=self.name,
                hint=f"Check server.ssh and server.environment: ssh {self.name} {self.python} -V",
            )
        # A login shell may greet before us.
        return cast("dict[str, Any]", json.loads(done.stdout.splitlines()[-1]))

    def read_clock(self, rounds: int = CLOCK_ROUNDS) -> ClockOffset:
        """Its wall clock against our monotonic one, by the quickest of ``rounds`` exchanges over one connection.

        The answer was stamped somewhere within the exchange: half its duration is the uncertainty.
        """
        code = "import sys, time\nfor _ in sys.stdin: print('clock', time.time_ns(), flush=True)"
        clock = MonotonicClock()
        best = ClockOffset(0, 1 << 62)
        try:
            with subprocess.Popen(
                self.command(self.python, "-u", "-c", code),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            ) as exchange:
                assert exchange.stdin is not None
                assert exchange.stdout is not None
                for _ in range(rounds):
                    sent_ns = clock.now_ns()
                    exchange.stdin.write(b"\n")
                    line = exchange.stdout.readline()
                    while line and not line.startswith(b"clock "):
                        line = exchange.stdout.readline()  # a login shell greets before us
                    answered_ns = int(line.removeprefix(b"clock "))
                    received_ns = clock.now_ns()
                    half_ns = (received_ns - sent_ns + 1) // 2
                    if half_ns < best.uncertainty_ns:
                        best = ClockOffset(answered_ns - sent_ns - half_ns, half_ns)
                exchange.stdin.close()
        except (OSError, ValueError) as error:
            raise ServerError("its clock cannot be read over ssh", where=self.name) from error
        return best


def look(host: RemoteHost, artifact: str) -> RemoteStack:
    """The stack, the artifact and the devices on ``host``; SpecError or ServerError names what is missing there."""
    patch = shipped_patches()[0]
    found = host.call("probe", {"artifact": artifact, "target": patch.target})
    if not found["site_packages"]:
        raise ServerError("has no vllm-rbln in that environment", where=f"{host.name}:{host.python}")
    described = found["artifact"]
    if described["config"] is None:
        raise SpecError("no such artifact", where=f"{host.name}:{artifact}", hint="Compile it there: harness compile")
    with tempfile.TemporaryDirectory() as scratch:
        # The same reading and the same refusals as for a folder of this host; graphs are stood for by empty files.
        for name in described["sizes"]:
            path = Path(scratch) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        (Path(scratch) / "rbln_config.json").write_text(described["config"], encoding="utf-8")
        config = read_artifact(Path(scratch))
    sizes = cast("dict[str, int]", described["sizes"])
    return RemoteStack(
        versions=found["versions"],
        site_packages=found["site_packages"],
        target=None if found["target"] is None else base64.b64decode(found["target"]),
        config=config,
        identity={
            "name": Path(artifact).name,
            "sha256_edges": described["sha256_edges"],
            "num_files": len(sizes),
            "size_bytes": sum(sizes.values()),
        },
        devices=parse_devices(found["devices"], where=host.name) if found.get("devices") else None,
        host=found["host"],
    )


def check_remote(stack: RemoteStack, server: ServerSpec, host: RemoteHost) -> tuple[int, ...]:
    """The devices to use; the same refusals as on this host."""
    check_artifact(stack.config, server, f"{host.name}:{server.artifact}")
    devices = server.devices or tuple(range(stack.config.num_devices))
    if stack.devices is not None:
        require_idle(devices, stack.devices)
    return tuple(devices)


def patch_for(stack: RemoteStack, mode: str, host: str) -> tuple[dict[str, Any], Patch | None, bytes | None]:
    """The manifest's record, the patch and the patched content, for the installed file there and a patch mode."""
    with tempfile.TemporaryDirectory() as scratch:
        # The status of a copy is the status of the original: everything is decided by content.
        site = Path(scratch)
        patch = shipped_patches()[0]
        version = stack.versions.get("vllm-rbln", "")
        (site / f"{patch.package}-{version}.dist-info").mkdir()
        if stack.target is not None:
            (site / patch.target).parent.mkdir(parents=True)
            (site / patch.target).write_bytes(stack.target)
        # Refusals name the file there, not the copy.
        status = replace(patch_status(site), target=Path(f"{host}:{stack.site_packages}") / patch.target)
        if mode == "none":
            if status.state == "patched":
                require_pristine(status)
            return {"mode": "none", "version": version, "found_sha256": status.found_sha256}, None, None
        chosen = require_pristine(status)
        record = {"mode": mode, "name": chosen.name, "target": chosen.target, "version": version, **chosen.hashes}
        return record, chosen, chosen.apply(stack.target or b"", status.target)


def packed(folder: Path, below: str) -> dict[str, str]:
    """Files of ``folder`` as the host script lays them out under ``below``: name to base64."""
    return {
        f"{below}/{path.relative_to(folder).as_posix()}": base64.b64encode(path.read_bytes()).decode()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def life_command(job_path: Path) -> tuple[str, ...]:
    """The local process that stands for the remote server."""
    return (sys.executable, "-m", "harness.stack.rbln.remote.life", str(job_path))


def write_job(path: Path, job: dict[str, Any]) -> None:
    """What ``life`` does, for this user alone: the environment of a server may hold tokens."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(job, file, indent=2)
