"""A server on another host, over the ``ssh`` client alone: checked, laid out, and served through one forwarded port.

The command, patch, observer and refusals are those of this host. No files stay on the other host and the harness
opens no port there. Its log carries its own wall clock, whose offset to this host's clock is measured and recorded
with its uncertainty.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

from harness.children import own_command, script_command, text_command
from harness.clock import MonotonicClock
from harness.errors import ServerError, SpecError, escape_controls
from harness.measure.records import layout
from harness.measure.server.life import LOOPBACK, LaunchPlan, write_config
from harness.measure.server.vllm_serve import SOCKET_FOLDER_VARIABLE
from harness.model.spec import ServerSpec
from harness.redact import redacted_arguments, redacted_env
from harness.stacks.rbln.launch.artifacts import (
    ArtifactConfig,
    artifact_config,
    check_artifact,
    identity_of,
    requested_stack,
    settings_applied,
)
from harness.stacks.rbln.launch.devices import DeviceReport, parse_devices, require_idle
from harness.stacks.rbln.launch.inside import remote_host
from harness.stacks.rbln.launch.patches import require_pristine, shipped_patches, status_of, unpatched
from harness.stacks.rbln.launch.serving import (
    OtherHost,
    ServedArtifact,
    declared,
    logging_config,
    serve_arguments,
    server_env,
    visible_devices,
)
from harness.stacks.rbln.rules.kv_rules import rules_for_version
from harness.stacks.vllm.step_log import INSIDE

HOST_SCRIPT = Path(remote_host.__file__).resolve()
"""Runs in the Python of the serving stack on the other host."""
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=10")
CALL_TIMEOUT_S = 180.0
CLOCK_ROUNDS = 25


class ClockOffset(NamedTuple):
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
                self.command(*script_command(self.python)),
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
        code = "import time\nfor _ in sys.stdin: print('clock', time.time_ns(), flush=True)"
        clock = MonotonicClock()
        best = ClockOffset(0, 1 << 62)
        try:
            with subprocess.Popen(
                self.command(*text_command(self.python, code, "-u")),
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


def probe_stack(host: RemoteHost, artifact: str) -> RemoteStack:
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
    config = artifact_config(described["config"], described["sizes"], f"{host.name}:{artifact}")
    return RemoteStack(
        versions=facts["versions"],
        site_packages=facts["site_packages"],
        target=None if facts["target"] is None else base64.b64decode(facts["target"]),
        config=config,
        identity=identity_of(Path(artifact), described),
        devices=parse_devices(facts["devices"], where=host.name) if facts.get("devices") else None,
        host=facts["host"],
    )


def patch_for(stack: RemoteStack, mode: str, host: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The manifest's record of the patch, and the overlay that the host script lays out; None without a patch."""
    candidates = shipped_patches()
    version = stack.versions.get("vllm-rbln", "")
    target = Path(f"{host}:{stack.site_packages}") / candidates[0].target
    status = status_of(stack.target, target, version, candidates)
    if mode == "none":
        return unpatched(status), None
    chosen = require_pristine(status)
    return chosen.record(version), {
        "site_packages": stack.site_packages,
        "package": chosen.package,
        "target": chosen.target,
        "content": base64.b64encode(chosen.apply(stack.target or b"", target)).decode(),
    }


def laid_out_files() -> dict[str, str]:
    """What is laid out there first, name to base64: observer, host script, logging configuration."""
    observer = [path for path in sorted(INSIDE.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    contents = {f"observer/{path.relative_to(INSIDE).as_posix()}": path.read_bytes() for path in observer}
    contents["remote_host.py"] = HOST_SCRIPT.read_bytes()
    contents[layout.SERVER_LOGGING] = json.dumps(logging_config()).encode()
    return {name: base64.b64encode(content).decode() for name, content in contents.items()}


# The other side gives up a silent connection after this time. The local end of ssh notices after 30 s.
SILENCE_S = 60.0
LINES_PER_SILENCE = 6
LAST_LINES = 5
NOT_YET_LISTENING = ": open failed: connect failed"


def check_remote_server(server: ServerSpec) -> tuple[RemoteHost, RemoteStack, tuple[int, ...]]:
    """The host, its stack and the devices to use. Refuses an artifact that does not fit, and busy devices."""
    if not server.environment:
        raise SpecError(
            "is missing", where="server.environment", hint="Name the virtual environment of vllm on that host"
        )
    host = RemoteHost(server.ssh, f"{server.environment}/bin/python")
    stack = probe_stack(host, server.artifact)
    check_artifact(stack.config, server, f"{host.name}:{server.artifact}")
    devices = server.devices or tuple(range(stack.config.num_devices))
    if stack.devices is not None:
        require_idle(devices, stack.devices)
    return host, stack, devices


def remote_plan(server: ServerSpec, *, backend: str, port: int, run_folder: Path) -> LaunchPlan:
    """The launch of a server on another host. port: this host's end of the forwarded connection."""
    host, stack, devices = check_remote_server(server)
    patch_record, overlay = patch_for(stack, server.patch, host.name)
    model = Path(server.artifact).name
    laid_out = host.call("prepare", {"files": laid_out_files(), "overlay": overlay})
    folder, remote_port = str(laid_out["folder"]), int(laid_out["port"])
    env = server_env(
        server,
        {
            **visible_devices(stack.versions.get("vllm-rbln", ""), devices),
            "VLLM_LOGGING_CONFIG_PATH": f"{folder}/{layout.SERVER_LOGGING}",
            SOCKET_FOLDER_VARIABLE: folder,
        },
        [*([] if overlay is None else [f"{folder}/overlay"]), *([f"{folder}/observer"] if server.observer else [])],
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
    job_file = _write_job(run_folder, host, folder, local_port=port, remote_port=remote_port)
    return LaunchPlan(
        backend=backend,
        argv=own_command(f"{__name__}:hold_server", job_file),
        host=LOOPBACK,
        port=port,
        model=model,
        env={"PYTHONUNBUFFERED": "1"},
        files={"remote": job_file},
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
        effective=settings_applied(
            server, stack.config, rules_for_version(stack.versions.get("vllm-rbln", "")), patch_record
        ),
        device_command=() if stack.devices is None else tuple(host.command("rbln-smi", "-j")),
        read_offset=host.read_clock,
    )


def _write_job(run_folder: Path, host: RemoteHost, folder: str, *, local_port: int, remote_port: int) -> Path:
    """The job of ``hold_server``, as a file of the run folder."""
    path = (run_folder / layout.REMOTE).absolute()
    write_config(
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


def hold_server(job_file: str) -> int:
    """The local process of a remote server: it holds the connection, and fetches the observer's file when that ends.

    The end of the connection is the end of the server. SIGTERM asks the other side to stop; the server then shuts down
    cleanly and its last log lines still arrive. Nothing is restarted. Returns the exit status.
    """
    job: dict[str, Any] = json.loads(Path(job_file).read_text(encoding="utf-8"))
    host = RemoteHost(job["host"], job["python"], tuple(job["ssh"]))
    forward = f"127.0.0.1:{job['local_port']}:127.0.0.1:{job['remote_port']}"
    words = host.command(
        job["python"],
        f"{job['folder']}/remote_host.py",
        "serve",
        f"{job['folder']}/job.json",
        options=("-o", "ExitOnForwardFailure=yes", "-L", forward),
    )
    # Standard output carries the server's log alone: a message of ssh would split its lines.
    ssh_log = Path(job["ssh_log_path"])
    with ssh_log.open("wb") as messages:
        connection = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=messages, bufsize=0)
    ended = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        # One request is enough; a second handler would wait for the lock that this one holds.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        ended.set()
        # A requested stop, not a lost connection: the files will be fetched.
        _send(connection, b"stop\n", is_last=True)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    threading.Thread(target=_keep_alive, args=(connection, job["silence_s"], ended), daemon=True).start()
    status = connection.wait()
    ended.set()
    if status:
        _print_ssh_messages(ssh_log)
    try:
        result = host.call("clear", {"folder": job["folder"], "observer": job["observer"]})
    except ServerError as error:
        print(escape_controls(f"harness: {error}; {host.name}:{job['folder']} is left behind"), file=sys.stderr)
    else:
        if result["observer"] is not None:
            Path(job["observer_path"]).write_bytes(base64.b64decode(result["observer"]))
    return status if status >= 0 else 128 - status


def _keep_alive(connection: subprocess.Popen[bytes], silence_s: float, ended: threading.Event) -> None:
    """Send an empty line well before the other side would give up the connection."""
    while not ended.wait(silence_s / LINES_PER_SILENCE):
        _send(connection, b"\n")


def _send(connection: subprocess.Popen[bytes], line: bytes, *, is_last: bool = False) -> None:
    # A lost connection ends the process anyway, and the pipe may be closed after the last line.
    with contextlib.suppress(OSError, ValueError):
        assert connection.stdin is not None
        connection.stdin.write(line)
        if is_last:
            connection.stdin.close()


def _print_ssh_messages(ssh_log: Path) -> None:
    """Print the last messages of ssh: often the only reason of an end. Health checks before the start are left out."""
    messages = ssh_log.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = [line for line in messages if line.strip() and NOT_YET_LISTENING not in line]
    for line in lines[-LAST_LINES:]:
        print(escape_controls(f"ssh: {line.removeprefix('ssh: ')}"), flush=True)


SERVICE = OtherHost(check_remote_server, remote_plan)
