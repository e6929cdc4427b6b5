"""A server on another host, over the ``ssh`` client alone: checked, laid out, and served through one forwarded port.

The command, patch, observer and refusals are those of this host. No files stay on the other host and no protocol of
our own listens there. Its log carries its own wall clock, whose offset to this host's clock is measured and recorded
with its uncertainty.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, cast

from harness.clock import MonotonicClock
from harness.errors import ServerError, SpecError
from harness.records import layout
from harness.redact import redacted_arguments, redacted_env
from harness.server.life import LOOPBACK, LaunchPlan
from harness.spec import ServerSpec
from harness.stack.rbln.artifacts import (
    ArtifactConfig,
    check_artifact,
    identity_of,
    read_artifact,
    requested_stack,
    settings_applied,
)
from harness.stack.rbln.devices import DeviceReport, parse_devices, require_idle
from harness.stack.rbln.observer import INSIDE
from harness.stack.rbln.patches.shipped import Patch, patch_status, require_pristine, shipped_patches
from harness.stack.rbln.serving import (
    HOST_SCRIPT,
    SOCKET_FOLDER_VARIABLE,
    ServedArtifact,
    declared,
    logging_config,
    serve_arguments,
    server_env,
    visible_devices,
)

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
    """Stack, artifact and devices of the other host. target: content of the file that a patch would change."""

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
        """The local command that runs the words ``remote`` there, quoted for its shell."""
        return [*self.ssh, *SSH_OPTIONS, *options, "--", self.name, shlex.join(remote)]

    def call(self, action: str, job: dict[str, Any]) -> dict[str, Any]:
        """Run one action of the host script there; its result. ServerError with the message of ssh or Python."""
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
            message = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
            raise ServerError(
                f"cannot be used: {message[-1].rstrip('.')}",
                where=self.name,
                hint=f"Check server.ssh and server.environment: ssh {self.name} {self.python} -V",
            )
        # A login shell may print a greeting first.
        return cast("dict[str, Any]", json.loads(done.stdout.splitlines()[-1]))

    def read_clock(self, rounds: int = CLOCK_ROUNDS) -> ClockOffset:
        """Its wall clock against our monotonic clock, from the quickest of ``rounds`` exchanges over one connection.

        The answer was stamped somewhere within the exchange, so half its duration is the uncertainty.
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
                        line = exchange.stdout.readline()  # the greeting of a login shell
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
    facts = host.call("probe", {"artifact": artifact, "target": patch.target})
    if not facts["site_packages"]:
        raise ServerError("has no vllm-rbln in that environment", where=f"{host.name}:{host.python}")
    described = facts["artifact"]
    if described["config"] is None:
        raise SpecError(
            "no such artifact", where=f"{host.name}:{artifact}", hint="Compile it there: harness server compile"
        )
    with tempfile.TemporaryDirectory() as scratch:
        # Read and refused as a folder of this host would be; empty files stand for the graphs.
        for name in described["sizes"]:
            path = Path(scratch) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        (Path(scratch) / "rbln_config.json").write_text(described["config"], encoding="utf-8")
        config = read_artifact(Path(scratch))
    return RemoteStack(
        versions=facts["versions"],
        site_packages=facts["site_packages"],
        target=None if facts["target"] is None else base64.b64decode(facts["target"]),
        config=config,
        identity=identity_of(Path(artifact), described),
        devices=parse_devices(facts["devices"], where=host.name) if facts.get("devices") else None,
        host=facts["host"],
    )


def check_remote(stack: RemoteStack, server: ServerSpec, host: RemoteHost) -> tuple[int, ...]:
    """The devices to use. Refuses what this host would refuse."""
    check_artifact(stack.config, server, f"{host.name}:{server.artifact}")
    devices = server.devices or tuple(range(stack.config.num_devices))
    if stack.devices is not None:
        require_idle(devices, stack.devices)
    return tuple(devices)


def patch_for(stack: RemoteStack, mode: str, host: str) -> tuple[dict[str, Any], Patch | None, bytes | None]:
    """The manifest's record, the patch and the patched content, for the file installed there and a patch mode."""
    with tempfile.TemporaryDirectory() as scratch:
        # The status of a copy is that of the original: only content counts.
        site = Path(scratch)
        patch = shipped_patches()[0]
        version = stack.versions.get("vllm-rbln", "")
        (site / f"{patch.package}-{version}.dist-info").mkdir()
        if stack.target is not None:
            (site / patch.target).parent.mkdir(parents=True)
            (site / patch.target).write_bytes(stack.target)
        # Errors name the file there, not the copy.
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
    return (sys.executable, "-m", "harness.stack.rbln.remote_life", str(job_path))


def write_job(path: Path, job: dict[str, Any]) -> None:
    """The job of ``remote_life``, readable by this user alone: the environment of a server may hold tokens."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(job, file, indent=2)


# The other side gives up a silent connection after this time. The local end of ssh notices after 30 s.
SILENCE_S = 60.0


def check_remote_server(server: ServerSpec) -> tuple[RemoteHost, RemoteStack, tuple[int, ...]]:
    """The host, its stack and the devices to use. Refuses an artifact that does not fit, and busy devices."""
    if not server.environment:
        raise SpecError(
            "is missing", where="server.environment", hint="Name the virtual environment of vllm on that host"
        )
    host = RemoteHost(server.ssh, f"{server.environment}/bin/python")
    stack = look(host, server.artifact)
    return host, stack, check_remote(stack, server, host)


def remote_plan(server: ServerSpec, *, backend: str, port: int, run_folder: Path) -> LaunchPlan:
    """The launch of a server on another host. port: this host's end of the forwarded connection."""
    host, stack, devices = check_remote_server(server)
    patch_record, patch, content = patch_for(stack, server.patch, host.name)
    model = Path(server.artifact).name
    laid_out = host.call("prepare", _prepared(stack, patch, content))
    folder, remote_port = str(laid_out["folder"]), int(laid_out["port"])
    env = server_env(
        server,
        {
            **visible_devices(stack.versions.get("vllm-rbln", ""), devices),
            "VLLM_LOGGING_CONFIG_PATH": f"{folder}/{layout.SERVER_LOGGING}",
            SOCKET_FOLDER_VARIABLE: folder,
        },
        [*([] if content is None else [f"{folder}/overlay"]), *([f"{folder}/observer"] if server.observer else [])],
        Path(folder) / layout.OBSERVER if server.observer else None,
    )
    arguments = serve_arguments(server, ServedArtifact(Path(server.artifact), stack.config, model), remote_port)
    job: dict[str, Any] = {
        "argv": [f"{server.environment}/bin/vllm", *arguments],
        "env": env,
        "grace_s": server.stop_grace_s,
        "silence_s": SILENCE_S,
    }
    host.call("write", {"path": f"{folder}/job.json", "text": json.dumps(job)})
    life = _write_life(run_folder, host, folder, local_port=port, remote_port=remote_port)
    return LaunchPlan(
        backend=backend,
        argv=life_command(life),
        host=LOOPBACK,
        port=port,
        model=model,
        env={"PYTHONUNBUFFERED": "1"},
        files={"remote": life},
        requested={
            **requested_stack(
                server, stack.config, versions=stack.versions, identity=stack.identity, devices=stack.devices
            ),
            "remote": {
                "host": stack.host,
                **job,
                "argv": list(redacted_arguments(job["argv"])),
                "env": redacted_env(job["env"]),
            },
        },
        observation=declared(server, patch_record),
        effective=settings_applied(server, stack.config, stack.versions, patch_record),
        device_command=() if stack.devices is None else tuple(host.command("rbln-smi", "-j")),
        read_offset=lambda: astuple(host.read_clock()),
    )


def _write_life(run_folder: Path, host: RemoteHost, folder: str, *, local_port: int, remote_port: int) -> Path:
    """The job of the process that keeps the server alive, as a file of the run folder."""
    path = (run_folder / layout.REMOTE).absolute()
    write_job(
        path,
        {
            "host": host.name,
            "python": host.python,
            "ssh": list(host.ssh),
            "folder": folder,
            "local_port": local_port,
            "remote_port": remote_port,
            "observer": layout.OBSERVER,
            "observer_path": str((run_folder / layout.OBSERVER).absolute()),
            "silence_s": SILENCE_S,
            "ssh_log_path": str((run_folder / layout.SSH_LOG).absolute()),
        },
    )
    return path


def _prepared(stack: RemoteStack, patch: Patch | None, content: bytes | None) -> dict[str, Any]:
    """The files laid out there first: observer, host script, logging configuration, overlay."""
    return {
        "files": {
            **packed(INSIDE, "observer"),
            **{
                name: base64.b64encode(body).decode()
                for name, body in (
                    ("remote_host.py", HOST_SCRIPT.read_bytes()),
                    (layout.SERVER_LOGGING, json.dumps(logging_config()).encode()),
                )
            },
        },
        "overlay": None
        if patch is None or content is None
        else {
            "site_packages": stack.site_packages,
            "package": patch.package,
            "target": patch.target,
            "content": base64.b64encode(content).decode(),
        },
    }
