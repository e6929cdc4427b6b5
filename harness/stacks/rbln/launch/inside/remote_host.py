"""The harness's part on another host, over ssh: probe, lay out files, serve, clean up. Standard library only.

It runs in the serving stack's Python. The server ends when standard input ends or falls silent, so a lost connection,
a dead network path or a killed harness leaves no server and no folder behind.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

PREFIX = "rbln-harness-"
# The server's sockets are in this folder. An address holds 107 bytes, 40 of them for a socket's name.
LONGEST_PARENT = 50
PACKAGES = ("vllm", "vllm-rbln", "optimum-rbln", "rebel-compiler", "torch", "transformers")
EDGE_BYTES = 1 << 20
CUT_OFF = b"cut off"
LAST_WORD_S = 1.0
SILENT_PARTS = 4
"""Silence is heard in parts: of the time in which this machine itself stood still, only one counts."""


def probe(job: dict[str, Any]) -> dict[str, Any]:
    """The stack, the artifact, the file that a patch would change, and the driver's report of the devices.

    site_packages: of vllm-rbln; "" when it is not installed.
    """
    versions: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    is_installed = "vllm-rbln" in versions
    site = str(importlib.metadata.distribution("vllm-rbln").locate_file("")) if is_installed else ""
    facts: dict[str, Any] = {"versions": versions, "site_packages": site}
    target = Path(site) / job["target"]
    facts["target"] = base64.b64encode(target.read_bytes()).decode() if site and target.is_file() else None
    facts["artifact"] = describe_artifact(Path(job["artifact"]))
    smi = shutil.which("rbln-smi")
    if smi:
        done = subprocess.run([smi, "-j"], capture_output=True, text=True, check=False)
        facts["devices"] = done.stdout if done.returncode == 0 else ""
    facts["host"] = {"node": platform.node(), "kernel": platform.release(), "python": platform.python_version()}
    return facts


def describe_artifact(folder: Path) -> dict[str, Any]:
    """Its configuration, sizes of all files, and a SHA-256 over names, sizes and contents.

    Compiled graphs are many gigabytes, so of a file above 2 MiB only the first and last MiB and the size are hashed.
    """
    config = folder / "rbln_config.json"
    digest = hashlib.sha256()
    sizes: dict[str, int] = {}
    for path in sorted(file for file in folder.rglob("*") if file.is_file()):
        name, size = path.relative_to(folder).as_posix(), path.stat().st_size
        sizes[name] = size
        digest.update(f"{name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= 2 * EDGE_BYTES:
                digest.update(file.read())
            else:
                digest.update(file.read(EDGE_BYTES))
                file.seek(-EDGE_BYTES, 2)
                digest.update(file.read(EDGE_BYTES))
    text = config.read_text(encoding="utf-8") if config.is_file() else None
    return {"config": text, "sizes": sizes, "sha256_edges": digest.hexdigest()}


def prepare(job: dict[str, Any]) -> dict[str, Any]:
    """Create a folder with ``files`` (name to base64) and, for an overlay, a patched copy of the package."""
    parent = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent if len(parent) <= LONGEST_PARENT else "/tmp"))
    for name, content in job["files"].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(content))
    overlay = job.get("overlay")
    if overlay:
        package = Path(overlay["site_packages"]) / overlay["package"]
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(package, folder / "overlay" / overlay["package"], ignore=ignore)
        target = folder / "overlay" / overlay["target"]
        target.unlink()
        target.write_bytes(base64.b64decode(overlay["content"]))
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    return {"folder": str(folder), "port": port}


def write(job: dict[str, Any]) -> dict[str, Any]:
    """Write a text file that only this user can read."""
    descriptor = os.open(job["path"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(job["text"])
    return {}


def serve(job: dict[str, Any], folder: Path) -> int:
    """Run ``argv`` until it or standard input ends; returns its exit status, signal n as 128 + n.

    folder: all files of this server. After "stop" the other end fetches and removes it; after a lost connection it is
    removed here. The other end sends a line regularly: ``silence_s`` without a line counts as a lost connection.
    """
    received: list[bytes] = []
    # A single stream: two channels of the connection could arrive in any order, with lines split.
    child = subprocess.Popen(
        job["argv"],
        env={**os.environ, **job["env"]},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    listener = threading.Thread(target=_stop_at_end_of_input, args=(child, job, received), daemon=True)
    listener.start()
    status = child.wait()
    # A lost connection ends the server by its closed output too, and may do so first.
    listener.join(LAST_WORD_S)
    # Processes that the server left behind, for example its engine core.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    # The sender of "stop" may have been killed while the server shut down.
    if (received == [CUT_OFF] or _is_hung_up()) and folder.name.startswith(PREFIX):
        shutil.rmtree(folder, ignore_errors=True)
    return status if status >= 0 else 128 - status


def _is_hung_up() -> bool:
    """Whether the reader of standard output is gone."""
    poller = select.poll()
    poller.register(1, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poller.poll(0))


def _stop_at_end_of_input(child: subprocess.Popen[bytes], job: dict[str, Any], received: list[bytes]) -> None:
    poller = select.poll()
    poller.register(0, select.POLLIN)
    words, silent = b"", 0
    while silent < SILENT_PARTS:
        if not poller.poll(job["silence_s"] * 1000 / SILENT_PARTS):
            silent += 1
            continue
        part, silent = os.read(0, 4096), 0
        if not part:
            break
        # An empty line only keeps the connection alive.
        words += part.strip()
    received.append(words or CUT_OFF)
    child.terminate()
    try:
        child.wait(job["grace_s"])
    except subprocess.TimeoutExpired:
        child.kill()


def clear(job: dict[str, Any]) -> dict[str, Any]:
    """Remove a folder made by ``prepare``; returns its observer file."""
    folder = Path(job["folder"])
    if not folder.name.startswith(PREFIX):
        raise ValueError(f"{folder} was not made by the harness")
    observed = folder / job["observer"]
    content = base64.b64encode(observed.read_bytes()).decode() if observed.is_file() else None
    shutil.rmtree(folder, ignore_errors=True)
    return {"observer": content}


def main(action: str, job: dict[str, Any]) -> int:
    """Run an action; its result goes to standard output as a line of JSON."""
    print(json.dumps({"probe": probe, "prepare": prepare, "write": write, "clear": clear}[action](job)))
    return 0


if __name__ == "__main__" and len(sys.argv) > 2:
    # serve JOB_FILE: the environment in it may hold tokens, so the file is deleted once read.
    job_file = Path(sys.argv[2])
    wanted = json.loads(job_file.read_text(encoding="utf-8"))
    job_file.unlink()
    sys.exit(serve(wanted, job_file.parent))
