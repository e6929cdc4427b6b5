"""The local process of a remote server: it holds one ssh connection, and fetches files when the connection ends.

The end of the connection is the end of the server. SIGTERM asks the other side to stop; the server then shuts down
cleanly and its last log lines still arrive. Nothing is restarted.
"""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from harness.errors import HarnessError
from harness.stack.rbln.remote import RemoteHost

LAST_LINES = 5
NOT_YET_LISTENING = ": open failed: connect failed"
LINES_PER_SILENCE = 6


def live(job: dict[str, Any]) -> int:
    """Serve until the connection ends, then fetch the observer's file and clean up there; returns the exit status."""
    host = RemoteHost(job["host"], job["python"], tuple(job["ssh"]))
    forward = f"127.0.0.1:{job['local_port']}:127.0.0.1:{job['remote_port']}"
    script = f"{job['folder']}/remote_host.py"
    words = host.command(
        job["python"],
        script,
        "serve",
        f"{job['folder']}/job.json",
        options=("-o", "ExitOnForwardFailure=yes", "-L", forward),
    )
    # Standard output carries the server's log alone: a message of ssh would split its lines.
    ssh_log = Path(job["ssh_log_path"])
    with ssh_log.open("wb") as messages:
        connection = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=messages, bufsize=0)
    ended = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        # One request is enough; a second handler would wait for the lock that this one holds.
        for asked in (signal.SIGTERM, signal.SIGINT):
            signal.signal(asked, _ignore)
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
    except HarnessError as error:
        print(f"harness: {error}; {host.name}:{job['folder']} is left behind", file=sys.stderr)
    else:
        if result["observer"] is not None:
            Path(job["observer_path"]).write_bytes(base64.b64decode(result["observer"]))
    return status if status >= 0 else 128 - status


def _ignore(_number: int, _frame: FrameType | None) -> None: ...


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
        print(f"ssh: {line.removeprefix('ssh: ')}", flush=True)


if __name__ == "__main__":
    sys.exit(live(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
