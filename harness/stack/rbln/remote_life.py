"""The local process of a remote server: one ssh connection whose end is the server's end, and the files it brings back.

SIGTERM says so over the connection and closes its input, on which the other side stops the server in good order and its
last log lines still arrive. It never restarts anything.
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
    """Serve until the connection ends; then fetch the observer's file and clear the other host up. Its exit status."""
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
    # The server's log comes over standard output, alone: a word of ssh itself would tear one of its lines.
    said_path = Path(job["ssh_log_path"])
    with said_path.open("wb") as said:
        connection = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=said, bufsize=0)
    ended = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        ended.set()
        # Asked to stop, and not cut off: what it wrote will be fetched.
        _say(connection, b"stop\n", is_last=True)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    threading.Thread(target=_say_now_and_then, args=(connection, job["silence_s"], ended), daemon=True).start()
    status = connection.wait()
    ended.set()
    if status:
        _repeat(said_path)
    try:
        left = host.call("clear", {"folder": job["folder"], "observer": job["observer"]})
    except HarnessError as error:
        print(f"harness: {error}; {host.name}:{job['folder']} is left behind", file=sys.stderr)
    else:
        if left["observer"] is not None:
            Path(job["observer_path"]).write_bytes(base64.b64decode(left["observer"]))
    return status if status >= 0 else 128 - status


def _say_now_and_then(connection: subprocess.Popen[bytes], silence_s: float, ended: threading.Event) -> None:
    """Tell the other side that this one is there, well within the silence after which it gives us up."""
    while not ended.wait(silence_s / LINES_PER_SILENCE):
        _say(connection, b"\n")


def _say(connection: subprocess.Popen[bytes], line: bytes, *, is_last: bool = False) -> None:
    # A connection that is gone ends the process anyway, and so does a pipe that was closed after the last line.
    with contextlib.suppress(OSError, ValueError):
        assert connection.stdin is not None
        connection.stdin.write(line)
        if is_last:
            connection.stdin.close()


def _repeat(said_path: Path) -> None:
    """Say what ssh said last, but of probes before the server listened: why it ended may stand there alone."""
    said = said_path.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = [line for line in said if line.strip() and NOT_YET_LISTENING not in line]
    for line in lines[-LAST_LINES:]:
        print(f"ssh: {line.removeprefix('ssh: ')}", flush=True)


if __name__ == "__main__":
    sys.exit(live(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
