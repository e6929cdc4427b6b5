"""A small process between the harness and the server: it starts and ends the server and copies its log.

The server and all its children are gone when the supervisor ends, whichever of harness, server and supervisor dies
first. The supervisor never decides when to stop, opens no socket and never parses the log.

Why a process and not a thread of the harness:
- a SIGKILLed harness closes its end of the socket pair, and the supervisor then ends the server. PR_SET_PDEATHSIG alone
  fires when the *thread* that forked ends, and does not reach grandchildren (vLLM's EngineCore);
- it is a child subreaper, so a grandchild that left the process group is still its child and is found;
- reading and stamping the log happens outside the replay's interpreter lock.

Protocol, one JSON object a line. Harness to supervisor: {"do": "stop", "grace_ns": n}; end of file means stop, with
``orphan_grace_ns``. Supervisor to harness: {"event": "started" | "exec_failed" | "log_failed" | "exited" | "gone", ...}
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from types import FrameType
from typing import Any

import psutil

from harness.clock import NS_PER_MS, NS_PER_S, MonotonicClock, ScaledClock

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
F_SETPIPE_SZ = 1031
# A server must not block on its own log while the supervisor waits for a core.
LOG_PIPE_BYTES = 1 << 20
LOG_READ_BYTES = 1 << 16
# Grace for processes that a server leaves behind when it ends by itself.
STRAGGLER_GRACE_NS = NS_PER_S // 2
# A fork of the harness could hold a copy of its end of the socket pair, so the parent is checked too.
PARENT_POLL_MS = 500

# Truncated: the stamps count from the first byte of this server's log.
LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
STAMP = struct.Struct("<qq")


class LogRead(Enum):
    """Result of one read of the log pipe."""

    DATA = "data"
    NOTHING_YET = "nothing yet"
    END = "end"


@dataclass(frozen=True, slots=True)
class Job:
    """What to run and where its output goes. Times in ns of CLOCK_MONOTONIC.

    scratch: a folder that is removed when no process of the server is left; "" for none.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    log_path: str
    stamps_path: str
    clock_scale: float
    orphan_grace_ns: int
    scratch: str = ""


def main(control_fd: str, parent: str) -> None:
    """Read the job from the control socket (its descriptor), run it, report. parent: pid of the harness."""
    control = socket.socket(fileno=int(control_fd))
    # The server must not keep the connection to the harness open.
    control.set_inheritable(False)
    # A Ctrl-C or a hang-up reaches the harness, which decides.
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    received = b""
    while b"\n" not in received:
        data = control.recv(LOG_READ_BYTES)
        if not data:
            return
        received += data
    _Supervisor(Job(**json.loads(received)), control, int(parent)).run()


class _Supervisor:
    """One server process, from fork to the proof that no process of it is left."""

    def __init__(self, job: Job, control: socket.socket, parent_pid: int) -> None:
        self._job = job
        self._control: socket.socket | None = control
        self._parent_pid = parent_pid
        self._model_clock = ScaledClock(job.clock_scale)
        self._clock = MonotonicClock()
        self._server_pid = 0
        self._wait_status: int | None = None
        self._kill_at_ns: int | None = None
        self._stop_began = False
        self._killed: list[int] = []
        self._log_bytes = 0
        self._log_error = ""
        self._was_terminated = False

    def run(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            self._report(event="exec_failed", message=f"prctl: {os.strerror(ctypes.get_errno())}")
            return
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.signal(signal.SIGTERM, self._note_sigterm)
        try:
            self._log = os.open(self._job.log_path, LOG_FLAGS, 0o644)
            self._stamps = os.open(self._job.stamps_path, LOG_FLAGS, 0o644)
        except OSError as error:
            self._report(event="exec_failed", message=f"{error.filename}: {error.strerror}")
            return
        log_read, log_write = os.pipe2(os.O_CLOEXEC)
        with_larger_pipe(log_read)
        if not self._spawn(libc, log_write):
            return
        os.close(log_write)
        os.set_blocking(log_read, False)
        self._watch(log_read, wake_read)

    def _note_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self._was_terminated = True

    def _spawn(self, libc: ctypes.CDLL, log_write: int) -> bool:
        """Fork and exec the server as the leader of a new process group; report the result to the harness."""
        error_read, error_write = os.pipe2(os.O_CLOEXEC)
        supervisor_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_server(libc, log_write, error_write, supervisor_pid)
        os.close(error_write)
        failure = os.read(error_read, 4096)
        os.close(error_read)
        if failure:
            os.waitpid(pid, 0)
            self._report(event="exec_failed", message=failure.decode("utf-8", "replace"))
            return False
        self._server_pid = pid
        self._report(event="started", pid=pid)
        return True

    def _become_server(self, libc: ctypes.CDLL, log_write: int, error_write: int, supervisor_pid: int) -> None:
        """In the child: never returns."""
        try:
            os.setpgid(0, 0)
            # Should the supervisor itself be killed, the server follows. This process has one thread, which lives as
            # long as the process, so the per-thread rule of PDEATHSIG does no harm here.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != supervisor_pid:
                os._exit(127)
            # Ignored signals survive an exec; the server must start with the defaults. Python ignores SIGPIPE itself.
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            os.chdir(self._job.cwd)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(log_write, 1)
            os.dup2(log_write, 2)
            os.execvpe(self._job.argv[0], self._job.argv, self._job.env)
        except OSError as error:
            os.write(error_write, f"{error.filename or self._job.argv[0]}: {error.strerror}".encode())
        except ValueError as error:
            os.write(error_write, f"{self._job.argv[0]!r}: {error}".encode())
        finally:
            os._exit(127)

    def _watch(self, log_read: int, wake_read: int) -> None:
        """Until no descendant is left: copy the log, obey the harness, reap."""
        poller = select.poll()
        poller.register(log_read, select.POLLIN)
        poller.register(wake_read, select.POLLIN)
        assert self._control is not None
        poller.register(self._control.fileno(), select.POLLIN)
        while True:
            for descriptor, _events in poller.poll(self._poll_timeout_ms()):
                if not self._serve(descriptor, log_read, wake_read):
                    poller.unregister(descriptor)
            if self._was_terminated or os.getppid() != self._parent_pid:
                self._begin_stop(self._job.orphan_grace_ns)
            no_child_left = self._reap()
            if no_child_left:
                break
            if self._kill_at_ns is not None and self._clock.now_ns() >= self._kill_at_ns:
                self._kill_descendants()
        while self._copy_log(log_read) == LogRead.DATA:
            pass
        if self._job.scratch:
            shutil.rmtree(self._job.scratch, ignore_errors=True)
        self._report(event="gone", killed=self._killed, log_bytes=self._log_bytes)

    def _serve(self, descriptor: int, log_read: int, wake_read: int) -> bool:
        """Handle one readable descriptor; False when it has ended."""
        if descriptor == log_read:
            return self._copy_log(log_read) != LogRead.END
        if descriptor == wake_read:
            os.read(wake_read, 4096)
            return True
        if self._obey():
            return True
        self._begin_stop(self._job.orphan_grace_ns)
        return False

    def _poll_timeout_ms(self) -> int:
        if self._kill_at_ns is None:
            return PARENT_POLL_MS
        return max(1, min(PARENT_POLL_MS, (self._kill_at_ns - self._clock.now_ns()) // NS_PER_MS + 1))

    def _obey(self) -> bool:
        """One read of the control socket; False when the harness has closed it or died."""
        assert self._control is not None
        try:
            data = self._control.recv(LOG_READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self._control = None
            return False
        # Commands are tens of bytes on a local socket, each sent whole: a read never ends inside one.
        for line in data.splitlines():
            command = json.loads(line)
            if command["do"] == "stop":
                self._begin_stop(command["grace_ns"])
        return True

    def _begin_stop(self, grace_ns: int) -> None:
        """SIGTERM to the server itself, once; a later call can only make the grace shorter."""
        kill_at_ns = self._clock.now_ns() + grace_ns
        self._kill_at_ns = kill_at_ns if self._kill_at_ns is None else min(self._kill_at_ns, kill_at_ns)
        if not self._stop_began:
            self._stop_began = True
            # Not yet reaped (only _reap does that), so the pid cannot belong to another process.
            if self._wait_status is None:
                os.kill(self._server_pid, signal.SIGTERM)

    def _reap(self) -> bool:
        """Collect every ended child; True when none is left, alive or dead."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self._server_pid:
                self._wait_status = status
                returncode = os.waitstatus_to_exitcode(status)
                self._report(event="exited", returncode=returncode, at_ns=self._model_clock.now_ns())
                if self._kill_at_ns is None:
                    self._kill_at_ns = self._clock.now_ns() + STRAGGLER_GRACE_NS

    def _kill_descendants(self) -> None:
        """SIGKILL the server's group and every descendant outside it; the next call kills those orphaned meanwhile."""
        descendants = living_descendants(os.getpid())
        for pid in descendants:
            # A process listed here may have ended since; its pid is then a zombie of ours or unused, and no other
            # process, unless the kernel reused all pids within microseconds.
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            if pid not in self._killed:
                self._killed.append(pid)
        self._kill_at_ns = self._clock.now_ns() + 20 * NS_PER_MS

    def _copy_log(self, log_read: int) -> LogRead:
        """One read of the log pipe, stamped right after it."""
        try:
            data = os.read(log_read, LOG_READ_BYTES)
        except BlockingIOError:
            return LogRead.NOTHING_YET
        received_ns = self._model_clock.now_ns()
        if not data:
            return LogRead.END
        if not self._log_error:
            try:
                write_all(self._stamps, STAMP.pack(self._log_bytes, received_ns))
                write_all(self._log, data)
            except OSError as error:
                # Keep reading: a server that blocks on its log would be a second fault on top of a full disk.
                self._log_error = f"{self._job.log_path}: {error.strerror}"
                self._report(event="log_failed", message=self._log_error)
        self._log_bytes += len(data)
        return LogRead.DATA

    def _report(self, **event: Any) -> None:
        if self._control is None:
            return
        try:
            self._control.sendall(json.dumps(event).encode() + b"\n")
        except OSError:
            self._control = None


def with_larger_pipe(descriptor: int) -> None:
    """Ask for a pipe of LOG_PIPE_BYTES; a kernel that refuses leaves its default of 64 KiB."""
    try:
        fcntl.fcntl(descriptor, F_SETPIPE_SZ, LOG_PIPE_BYTES)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EBUSY, errno.EINVAL):
            raise


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte of ``data``; a full disk raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def living_descendants(root_pid: int) -> list[int]:
    """Pids of all processes below ``root_pid`` that are not zombies, parents first."""
    pids: list[int] = []
    for process in psutil.Process(root_pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
    return pids
