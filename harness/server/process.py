"""The life of one server process: started, found healthy, stopped, and proved gone.

A ServerProcess that has stopped, failed to start or died leaves no process and no listening port behind; every failure
is one ServerError with the exit status and the last log lines. It never talks to the model and never parses the log.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from harness.clock import NS_PER_MS, NS_PER_S, Clock, MonotonicClock
from harness.errors import ServerError
from harness.server.ask import HTTP_OK, ask
from harness.server.ports import port_is_free
from harness.server.supervisor import Job

HEALTH_POLL_NS = 20 * NS_PER_MS
HEALTH_TIMEOUT_S = 2.0
# Beyond the grace: time for SIGKILL, reaping and the last log bytes.
STOP_MARGIN_NS = 10 * NS_PER_S
SUPERVISOR_START_NS = 30 * NS_PER_S
# What a dead server's children may still write to the log, which the error will quote.
LAST_WORDS_GRACE_S = 0.5
TAIL_LINES = 6
TAIL_BYTES = 1 << 16
# "ValueError: no such artifact", "some.module.DeviceError: ...": how Python names what ended it.
_EXCEPTION = re.compile(r"(?:^|[\s.])([A-Z]\w*(?:Error|Exception|Interrupt|Exit): .+)$")
SCRATCH_PREFIX = "rbln-harness-"
# A socket's address holds 107 bytes, of which a server may use 40 for a name.
LONGEST_SCRATCH_PARENT = 50
_wall_clock = MonotonicClock()


@dataclass(frozen=True, slots=True)
class ExitReport:
    """How a server ended. ``returncode`` is negative for a signal, None when the supervisor was killed.

    was_asked: the harness told it to stop before it ended. killed: pids that needed SIGKILL (the server itself or what
    it left behind). stop_ns: wall ns from the request to the proof; 0 when it ended by itself. is_port_free: its port
    could be bound again afterwards; None when it was never asked for its health.
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


class ServerProcess:
    """A server, its process group and its log. Use ``start``; then ``wait_healthy``; then ``stop`` (or ``with``).

    The calling thread does all the work: nothing here runs beside the replay.
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
        self.pid = 0

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        log_path: Path,
        stamps_path: Path,
        clock: Clock,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        orphan_grace_s: float = 3.0,
        scratch_variable: str = "",
    ) -> ServerProcess:
        """Start ``argv`` as the leader of its own process group; stdout and stderr go to ``log_path`` as bytes.

        env: additions to this process's environment. stamps_path: little-endian int64 pairs (byte offset of the first
        byte of a read, the instant of ``clock`` right after it), one per read. orphan_grace_s: wall seconds between
        SIGTERM and SIGKILL should the harness itself be killed. scratch_variable: tells the server a folder for what it
        would leave in the common one for temporary files; the folder goes when the server does.
        Raises ServerError when the program cannot be executed.
        """
        ours, theirs = socket.socketpair()
        scratch = _scratch_folder() if scratch_variable else ""
        job = Job(
            argv=[str(word) for word in argv],
            # An engine that dies leaves what it put into its temporary folder, so that is the same one.
            env={**os.environ, **(env or {}), **({scratch_variable: scratch, "TMPDIR": scratch} if scratch else {})},
            cwd=str(cwd or Path.cwd()),
            log_path=str(log_path.absolute()),
            stamps_path=str(stamps_path.absolute()),
            clock_scale=clock.scale,
            orphan_grace_ns=int(orphan_grace_s * NS_PER_S),
            scratch=scratch,
        )
        with theirs, tempfile.TemporaryFile() as errors:
            supervisor = subprocess.Popen(
                _supervisor_command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(theirs.fileno(),),
                # Own session: a Ctrl-C in the terminal reaches the harness alone.
                start_new_session=True,
            )
            theirs.close()
            process = cls(supervisor, ours, log_path, scratch)
            try:
                process._introduce(job, errors)
            except BaseException:
                process._abandon()
                raise
        return process

    def _introduce(self, job: Job, errors: Any) -> None:
        """Send the job and wait for the supervisor's word that the program runs."""
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

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    @property
    def has_exited(self) -> bool:
        """Whether the server process itself has ended, asked for or not."""
        self._read_events(0)
        return self._has_exited

    @property
    def exit_report(self) -> ExitReport | None:
        """How it ended; None until ``stop``, ``kill`` or a failed check has cleaned up."""
        return self._report

    def check(self) -> None:
        """Raise ServerError when the server has ended unasked or its log can no longer be written."""
        self._read_events(0)
        if self._has_exited and not self._was_asked:
            report = self.stop(grace_s=LAST_WORDS_GRACE_S)
            raise ServerError(
                f"ended by itself with {report.ending}{self._cause()}", where=self._where, hint=self._last_words()
            )
        if self._log_error:
            self.kill()
            raise ServerError(
                f"its log cannot be written ({self._log_error})", where=self._where, hint="Free some disk space"
            )

    def wait_healthy(self, host: str, port: int, *, deadline_s: float, path: str = "/health") -> int:
        """Poll ``path`` until it answers 200; returns the wall ns that took.

        Raises ServerError when the server ends first or ``deadline_s`` wall seconds pass; it is then gone.
        """
        started_ns = _wall_clock.now_ns()
        deadline_ns = started_ns + int(deadline_s * NS_PER_S)
        answer = "no connection"
        self._address = (host, port)
        while _wall_clock.now_ns() < deadline_ns:
            self.check()
            reply = ask(host, port, path, deadline_s=HEALTH_TIMEOUT_S)
            if reply.status == HTTP_OK:
                self.check()
                return _wall_clock.now_ns() - started_ns
            answer = reply.error or f"HTTP {reply.status}"
            # Waiting on the supervisor, not on the clock: a death is seen at once.
            self._read_events(HEALTH_POLL_NS)
        self.kill()
        raise ServerError(
            f"not healthy after {deadline_s:g} s ({path} on port {port}: {answer})",
            where=self._where,
            hint=f"Raise start_timeout_s if it only needs longer. {self._last_words()}",
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
        # When the supervisor is gone already, reading its last words tells how.
        with contextlib.suppress(OSError):
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
        return self._report

    def kill(self) -> ExitReport:
        """End it now: ``stop`` without a grace."""
        return self.stop(grace_s=0.0)

    def log_tail(self, num_lines: int = TAIL_LINES) -> list[str]:
        """The last lines of the log as text; broken bytes are replaced."""
        try:
            with self._log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - TAIL_BYTES))
                lines = log.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return []
        return lines[-num_lines:]

    @property
    def _where(self) -> str:
        return f"server (pid {self.pid})"

    def _cause(self) -> str:
        """The first exception that the end of the log names: what comes after it is mostly its echo."""
        for line in self.log_tail(TAIL_BYTES):
            if match := _EXCEPTION.search(line):
                return f": {match[1]}"
        return ""

    def _last_words(self) -> str:
        tail = self.log_tail()
        if not tail:
            return "Its log is empty"
        return f"{self._log_path.name}, which is kept, ends with:\n  " + "\n  ".join(tail)

    def _wait_gone(self, deadline_ns: int) -> dict[str, Any]:
        """The supervisor's proof that no process is left, or its equal when the supervisor was killed."""
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
            _signal_group(self.pid, signal.SIGKILL)
            _wall_clock.sleep_until_ns(_wall_clock.now_ns() + 10 * NS_PER_MS)
        return {"killed": killed, "log_bytes": self._log_path.stat().st_size if self._log_path.exists() else 0}

    def _read_events(self, wait_ns: int) -> None:
        """Take in what the supervisor has said, waiting up to ``wait_ns`` for a first word."""
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


def _supervisor_command(control_fd: int) -> list[str]:
    """The interpreter that runs the supervisor from this very source, whatever the working folder."""
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path[0] = {root!r}; from harness.server.supervisor import main; main()"
    return [sys.executable, "-c", code, str(control_fd), str(os.getpid())]


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def _group_exists(group: int) -> bool:
    """Whether a process of ``group`` lives; a zombie has ended and waits for its parent."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
