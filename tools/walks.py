"""Runs the walks of ``tools/walks.md`` as a person would, each in an empty folder, and prints how long they took.

Exit code 1 and the command's words where one of them does not end as the page says, with 0.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from harness.clock import NS_PER_MS, NS_PER_S, MonotonicClock

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).with_suffix(".md")
ANSWER = "# the answer"
# A run that a busy machine made late is INVALID: its command says so with this code, and it is tried again.
RUN_INVALID, TRIES = 3, 3


def walks(page: str) -> Iterator[tuple[str, list[str]]]:
    """The title of each walk, and its commands."""
    for section in page.split("\n## ")[1:]:
        blocks = re.findall(r"^```console\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        yield section.partition("\n")[0], re.findall(r"^\$ (.+)$", "\n".join(blocks), re.MULTILINE)


def wait_for(port: str) -> None:
    """Return when the server on a port answers."""
    clock = MonotonicClock()
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        except OSError:
            clock.sleep_until_ns(clock.now_ns() + 100 * NS_PER_MS)
        else:
            return
    raise SystemExit(f"walks: nothing answers on port {port}")


def walk(commands: list[str], folder: Path, variables: dict[str, str], started: list[subprocess.Popen[bytes]]) -> float:
    """Run commands in their order; returns the seconds until the one with the answer ended."""
    clock, answered_s = MonotonicClock(), 0.0
    begun_ns = clock.now_ns()
    for command in commands:
        words = command.partition("  #")[0].strip()
        if words.endswith("&"):
            words = words.removesuffix("&")
            started.append(subprocess.Popen(["bash", "-c", f"exec {words} 2>/dev/null"], cwd=folder, env=variables))
            wait_for(re.findall(r"--port (\d+)", words)[0])
            continue
        for again in range(TRIES):
            more = " --resume --retry-invalid" if again else ""
            done = subprocess.run(
                ["bash", "-c", words + more], cwd=folder, env=variables, capture_output=True, text=True, check=False
            )
            if done.returncode != RUN_INVALID:
                break
        if done.returncode:
            raise SystemExit(f"walks: exit code {done.returncode} of: {words}\n{done.stdout}{done.stderr}")
        if ANSWER in command:
            answered_s = (clock.now_ns() - begun_ns) / NS_PER_S
    return answered_s


def main() -> None:
    """Walk each walk, and print its times."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    clock = MonotonicClock()
    for title, commands in walks(PAGE.read_text(encoding="utf-8")):
        started: list[subprocess.Popen[bytes]] = []
        begun_ns = clock.now_ns()
        with tempfile.TemporaryDirectory() as folder:
            variables = {**os.environ, "PATH": path, "HOME": folder, "COLUMNS": "80"}
            try:
                answered_s = walk(commands, Path(folder), variables, started)
            finally:
                for server in started:
                    server.kill()
                    server.wait()
        took_s = (clock.now_ns() - begun_ns) / NS_PER_S
        print(
            f"{title}: {len(commands)} commands, the answer after {answered_s:.0f} s, all in {took_s:.0f} s", flush=True
        )


if __name__ == "__main__":
    main()
