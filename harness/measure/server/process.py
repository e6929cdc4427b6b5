"""One server process: started, healthy, stopped, and proved gone; and the ports of this host.

A ServerProcess that has stopped, failed to start or died leaves no process and no listening port behind; every failure
is one ServerError with the exit status and the last log lines. It never talks to the model and never parses the log.
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

from harness.children import own_command
from harness.clock import NS_PER_MS, NS_PER_S, Clock, MonotonicClock
from harness.errors import ServerError
from harness.measure.client.target import Endpoint
from harness.measure.records.manifest import Finding
from harness.measure.server.ask import HTTP_OK, ask
from harness.measure.server.supervisor import Job
from harness.secrets import masked, noted_secrets

# Below the range from which Linux draws ports for outgoing connections, so that no client takes such a port by chance.
FREE_PORT_RANGE = (20_000, 32_000)


def free_port(host: str = "127.0.0.1") -> int:
    """A port of ``host`` without a listener, drawn at random below the kernel's own range."""
    generator = random.SystemRandom()
    for _ in range(1000):
        port = generator.randrange(*FREE_PORT_RANGE)
        if port_is_free(host, port):
            return port
    raise ServerError(f"no free port in {FREE_PORT_RANGE}", where=host, hint="Close servers that are not needed")


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could bind ``port`` now. Connections in TIME_WAIT do not count, as for the server itself."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def require_port(host: str, port: int) -> int:
    """``port`` itself, or any free one for 0. Raises ServerError that names a busy port and its owner."""
    if port == 0:
        return free_port(host)
    if port_is_free(host, port):
        return port
    owner = port_owner(port)
    by = f" by pid {owner[0]} ({owner[1]})" if owner else ""
    raise ServerError(
        f"port {port} is in use{by}", where=f"{host}:{port}", hint="End that process, or set port = 0 for any free port"
    )


def port_owner(port: int) -> tuple[int, str] | None:
    """(pid, command) of the process that listens on ``port``; None when the kernel does not show it."""
    for connection in psutil.net_connections("tcp"):
        is_listener = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        if is_listener and connection.pid is not None:
            with suppress(psutil.Error):
                return connection.pid, psutil.Process(connection.pid).name()
    return None


HEALTH_POLL_NS = 20 * NS_PER_MS
HEALTH_TIMEOUT_S = 2.0
# Beyond the grace: time for SIGKILL, reaping and the last log bytes.
STOP_MARGIN_NS = 10 * NS_PER_S
SUPERVISOR_START_NS = 30 * NS_PER_S
# Time for children of a dead server to finish their log lines, which the error quotes.
LAST_WORDS_GRACE_S = 0.5
TAIL_LINES = 6
TAIL_BYTES = 1 << 16
# "ValueError: no such artifact", "some.module.DeviceError: ...": how Python names the exception.
_EXCEPTION = re.compile(r"(?:^|[\s.])([A-Z]\w*(?:Error|Exception|Interrupt|Exit): .+)$")
SCRATCH_PREFIX = "rbln-harness-"
# A socket's address holds 107 bytes, of which a server may use 40 for a name.
LONGEST_SCRATCH_PARENT = 50
_wall_clock = MonotonicClock()


@dataclass(frozen=True, slots=True)
class ExitReport:
    """How a server ended. ``returncode`` is negative for a signal, None when the supervisor was killed.

    was_asked: the harness requested the stop before the server ended. killed: pids that needed SIGKILL (the server or
    processes it left behind). stop_ns: wall ns from the request to the proof; 0 when the server ended by itself.
    is_port_free: whether the port could be bound again afterwards; None when health was never checked.
    """

    pid: int
    returncode: int | None
    was_asked: bool
    killed: tuple[int, ...]
    stop_ns: int
    log_bytes: int
    is_port_free: bool | None

    @property
    def ending(self) -> str:
        """ "exit code 3" or "signal SIGKILL"."""
        if self.returncode is None:
            return "unknown exit status"
        if self.returncode < 0:
            return f"signal {signal.Signals(-self.returncode).name}"
        return f"exit code {self.returncode}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "killed": list(self.killed), "ending": self.ending}


class ServerLog(NamedTuple):
    """Where a server's output goes. stamps_path: when each part of the log was read, by ``clock``.

    Its content: little-endian int64 pairs, one per read: byte offset of the first byte read, and the instant right
    after the read.
    """

    path: Path
    stamps_path: Path
    clock: Clock


_Handle = TypeVar("_Handle", bound="ServerHandle")


class HealthWait(NamedTuple):
    """What a server is asked until it answers 200, for how long, and whether somebody still waits."""

    host: str
    port: int
    deadline_s: float
    path: str
    is_stopped: Callable[[], bool]


class ServerHandle(ABC):
    """A server as a run uses it, from its first healthy answer to its end. Leaving the context ends the server."""

    pid: int = 0
    """Of its process; 0 where it is somebody else's, or does not run yet."""

    def __enter__(self: _Handle) -> _Handle:
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    @property
    @abstractmethod
    def has_exited(self) -> bool:
        """Whether it has ended, requested or not, or stopped answering."""

    def wait_healthy(
        self,
        host: str,
        port: int,
        *,
        deadline_s: float,
        path: str = "/health",
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> int:
        """Wall ns until it answered, or nobody waits any more; ServerError when it does not in time."""
        return self._waited(HealthWait(host, port, deadline_s, path, is_stopped))

    @abstractmethod
    def _waited(self, wanted: HealthWait) -> int:
        """``wait_healthy``."""

    def changes(self) -> tuple[Finding, ...]:
        """Findings where it is not what it was when it was healthy."""
        return ()

    @abstractmethod
    def stop(self, grace_s: float = 10.0) -> ExitReport:
        """End it, and say how it ended."""

    def kill(self) -> ExitReport:
        """``stop`` without a grace period."""
        return self.stop(grace_s=0.0)


class ServerProcess(ServerHandle):
    """A server, its process group and its log. Use ``start``; then ``wait_healthy``; then ``stop`` (or ``with``).

    All work happens in the calling thread; nothing here runs beside the replay.
    """

    def __init__(
        self, supervisor: subprocess.Popen[bytes], control: socket.socket, log_path: Path, scratch: str = ""
    ) -> None:
        self._supervisor = supervisor
        self._control = control
        self._log_path = log_path
        self._scratch = scratch
        self._received = b""
        self._returncode: int | None = None
        self._has_exited = False
        self._was_asked = False
        self._log_error = ""
        self._report: ExitReport | None = None
        self._address: tuple[str, int] | None = None

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        log: ServerLog,
        env: Mapping[str, str] | None = None,
        orphan_grace_s: float = 3.0,
        scratch_variable: str = "",
    ) -> ServerProcess:
        """Start ``argv`` as the leader of a new process group; stdout and stderr go to ``log.path`` as bytes.

        env: additions to this process's environment. orphan_grace_s: wall seconds between SIGTERM and SIGKILL should
        the harness itself be killed. scratch_variable: environment variable that gives the server a folder for
        temporary files; the folder is removed with the server.
        Raises ServerError when the program cannot be executed.
        """
        ours, theirs = socket.socketpair()
        scratch = _scratch_folder() if scratch_variable else ""
        job = Job(
            argv=[str(word) for word in argv],
            # An engine that dies leaves its temporary files behind; TMPDIR puts them into the same folder.
            env={**os.environ, **(env or {}), **({scratch_variable: scratch, "TMPDIR": scratch} if scratch else {})},
            cwd=str(Path.cwd()),
            log_path=str(log.path.absolute()),
            stamps_path=str(log.stamps_path.absolute()),
            clock_scale=log.clock.scale,
            orphan_grace_ns=int(orphan_grace_s * NS_PER_S),
            scratch=scratch,
        )
        with theirs, tempfile.TemporaryFile() as errors:
            supervisor = subprocess.Popen(
                own_command("harness.measure.server.supervisor:main", theirs.fileno(), os.getpid()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(theirs.fileno(),),
                # Own session: a Ctrl-C in the terminal reaches the harness alone.
                start_new_session=True,
            )
            theirs.close()
            process = cls(supervisor, ours, log.path, scratch)
            try:
                process._introduce(job, errors)
            except BaseException:
                process._abandon()
                raise
        return process

    def _introduce(self, job: Job, errors: Any) -> None:
        """Send the job and wait until the supervisor reports that the program runs."""
        try:
            self._control.sendall(json.dumps(asdict(job)).encode() + b"\n")
            event = self._next_event(_wall_clock.now_ns() + SUPERVISOR_START_NS)
        except OSError:
            event = None
        if event is not None and event["event"] == "started":
            self.pid = int(event["pid"])
            return
        if event is not None:
            raise ServerError(
                f"cannot be started: {event['message']}", where=job.argv[0], hint="Check the command and its install"
            )
        errors.seek(0)
        last_words = errors.read().decode("utf-8", "replace").strip().splitlines()[-1:]
        raise ServerError(f"the supervisor process failed: {''.join(last_words) or 'no message'}", where=job.argv[0])

    @property
    def has_exited(self) -> bool:
        self._read_events(0)
        return self._has_exited

    @property
    def exit_report(self) -> ExitReport | None:
        """How it ended; None until ``stop``, ``kill`` or a failed check has cleaned up."""
        return self._report

    def check(self) -> None:
        """Raise ServerError when the server has ended by itself or its log can no longer be written."""
        self._read_events(0)
        if self._has_exited and not self._was_asked:
            report = self.stop(grace_s=LAST_WORDS_GRACE_S)
            tail = self.log_tail()
            raise ServerError(
                f"ended by itself with {report.ending}{self._cause()}",
                where=self._where,
                hint=self._before_tail(tail),
                below=tail,
            )
        if self._log_error:
            self.kill()
            raise ServerError(
                f"its log cannot be written ({self._log_error})", where=self._where, hint="Free some disk space"
            )

    def _waited(self, wanted: HealthWait) -> int:
        """Polls until the path answers 200. Where the server ends first or is too late, it is then gone."""
        host, port, deadline_s, path, is_stopped = wanted
        started_ns = _wall_clock.now_ns()
        deadline_ns = started_ns + int(deadline_s * NS_PER_S)
        answer = ""
        self._address = (host, port)
        while (left_ns := deadline_ns - _wall_clock.now_ns()) > 0:
            self.check()
            if is_stopped():
                return _wall_clock.now_ns() - started_ns
            reply = ask(Endpoint(host, port), path, deadline_s=min(HEALTH_TIMEOUT_S, left_ns / NS_PER_S))
            if reply.status == HTTP_OK:
                self.check()
                return _wall_clock.now_ns() - started_ns
            # A question that the deadline cut short says less than the answer before it.
            if not (answer and reply.error and left_ns < HEALTH_TIMEOUT_S * NS_PER_S):
                answer = reply.error or f"HTTP {reply.status}"
            # Wait for the supervisor, not for the clock: the end of the server is noticed at once.
            self._read_events(HEALTH_POLL_NS)
        self.kill()
        tail = self.log_tail()
        raise ServerError(
            f"not healthy after {deadline_s:g} s ({path} on port {port}: {answer or 'no connection'})",
            where=self._where,
            hint=f"Raise start_timeout_s if it only needs longer. {self._before_tail(tail)}",
            below=tail,
        )

    def stop(self, grace_s: float = 10.0) -> ExitReport:
        """SIGTERM by pid, ``grace_s`` wall seconds, SIGKILL to all that is left, and wait until nothing is.

        Safe to call again; the first report is kept. Raises ServerError when something cannot be killed.
        """
        if self._report is not None:
            return self._report
        self._read_events(0)
        began_ns = _wall_clock.now_ns()
        was_running = not self._has_exited
        self._was_asked = self._was_asked or was_running
        # When the supervisor has ended already, its last events say how.
        with suppress(OSError):
            self._control.sendall(json.dumps({"do": "stop", "grace_ns": int(grace_s * NS_PER_S)}).encode() + b"\n")
        gone = self._wait_gone(began_ns + int(grace_s * NS_PER_S) + STOP_MARGIN_NS)
        self._report = ExitReport(
            pid=self.pid,
            returncode=self._returncode,
            was_asked=self._was_asked,
            killed=tuple(gone.get("killed", ())),
            stop_ns=_wall_clock.now_ns() - began_ns if was_running else 0,
            log_bytes=int(gone.get("log_bytes", 0)),
            is_port_free=None if self._address is None else port_is_free(*self._address),
        )
        self._abandon()
        self._mask_log()
        return self._report

    def _mask_log(self) -> None:
        """Hide what the log repeats of the client's secrets; every byte keeps its place beside the stamps."""
        # A device, such as /dev/full, has no end.
        if not noted_secrets() or not self._log_path.is_file():
            return
        with suppress(OSError), self._log_path.open("r+b") as log:
            offset = 0
            for line in iter(log.readline, b""):
                if (hidden := masked(line)) != line:
                    log.seek(offset)
                    log.write(hidden)
                offset += len(line)

    def log_tail(self, num_lines: int = TAIL_LINES) -> list[str]:
        """The last lines of the log as text; broken bytes are replaced."""
        try:
            with self._log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - TAIL_BYTES))
                lines = log.read(TAIL_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:
            return []
        return lines[-num_lines:]

    @property
    def _where(self) -> str:
        return f"server (pid {self.pid})"

    def _cause(self) -> str:
        """The first exception named at the end of the log: those after it mostly follow from it."""
        for line in self.log_tail(TAIL_BYTES):
            if match := _EXCEPTION.search(line):
                return f": {match[1]}"
        return ""

    def _before_tail(self, tail: list[str]) -> str:
        return f"{self._log_path.name}, which is kept, ends with:" if tail else "Its log is empty"

    def _wait_gone(self, deadline_ns: int) -> dict[str, Any]:
        """The supervisor's report that no process is left; checked here when the supervisor was killed."""
        while True:
            event = self._next_event(deadline_ns)
            if event is None:
                break
            if event["event"] == "gone":
                self._supervisor.wait()
                return event
        if self._supervisor.poll() is None:
            raise ServerError(
                "did not end after SIGKILL", where=self._where, hint=f"Look at process group {self.pid} and end it"
            )
        return self._clear_group(deadline_ns)

    def _clear_group(self, deadline_ns: int) -> dict[str, Any]:
        """Without a supervisor: PDEATHSIG has killed the server; end the rest of its group and see it gone."""
        killed: list[int] = []
        while _group_exists(self.pid):
            if _wall_clock.now_ns() > deadline_ns:
                raise ServerError("process group cannot be killed", where=self._where)
            killed = [self.pid]
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            _wall_clock.sleep_until_ns(_wall_clock.now_ns() + 10 * NS_PER_MS)
        return {"killed": killed, "log_bytes": self._log_path.stat().st_size if self._log_path.exists() else 0}

    def _read_events(self, wait_ns: int) -> None:
        """Read the supervisor's next event, waiting up to ``wait_ns`` for it."""
        if self._report is None and not self._has_exited:
            self._next_event(_wall_clock.now_ns() + wait_ns)

    def _next_event(self, deadline_ns: int) -> dict[str, Any] | None:
        """The next event from the supervisor; None at the deadline or when the supervisor is gone."""
        while b"\n" not in self._received:
            wait_ms = max(0, deadline_ns - _wall_clock.now_ns()) / NS_PER_MS
            poller = select.poll()
            poller.register(self._control, select.POLLIN)
            if not poller.poll(wait_ms):
                return None
            try:
                data = self._control.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self._supervisor.wait()
                self._has_exited = True
                return None
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "exited":
            self._returncode = event["returncode"]
            self._has_exited = True
        elif event["event"] == "log_failed":
            self._log_error = event["message"]
        return event

    def _abandon(self) -> None:
        """Close the control socket, on which the supervisor ends, and reap it; it may have been killed."""
        self._control.close()
        try:
            self._supervisor.wait(timeout=STOP_MARGIN_NS / NS_PER_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _scratch_folder() -> str:
    parent = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=parent if len(parent) <= LONGEST_SCRATCH_PARENT else "/tmp")


def _group_exists(group: int) -> bool:
    """Whether a process of ``group`` lives; a zombie has ended and waits for its parent."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
