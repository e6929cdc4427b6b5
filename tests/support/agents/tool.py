"""What every agent needs: its newest release in a folder of its own, and an environment without the network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from harness.clock import NS_PER_S, MonotonicClock

# Nothing listens there: whoever does not ask loopback gets no answer.
NOWHERE = "http://127.0.0.1:9"


def install(agent: ModuleType, folder: Path) -> str:
    """Install an agent's newest release under a folder, from npm or with pip; returns its number."""
    if not hasattr(agent, "PACKAGE"):
        run_quietly([sys.executable, "-m", "venv", str(folder)])
        run_quietly([str(folder / "bin/pip"), "install", "--quiet", *agent.PACKAGES])
        name = agent.PACKAGES[0].partition("[")[0]
        version = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
        return run_quietly([str(folder / "bin/python"), "-c", version]).strip()
    package = agent.PACKAGE
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit("agents: npm is not here. Install Node.js 20 or newer, or leave this agent out")
    run_quietly([npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), f"{package}@latest"])
    description = json.loads((folder / "node_modules" / package / "package.json").read_text())
    return str(description["version"])


def run_quietly(command: list[str], **options: object) -> str:
    """Run a command; SystemExit with the end of what it wrote where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"agents: {' '.join(command[:4])} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def offline(folder: Path) -> dict[str, str]:
    """Variables of an agent whose home is ``folder`` and that reaches only loopback; makes its folder of work."""
    (folder / "work").mkdir(parents=True, exist_ok=True)
    for name in ("one", "two", "three"):
        (folder / "work" / f"{name}.txt").write_text(name)
    keep = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"), NOWHERE)
    local = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
    return keep | proxies | local | {"HOME": str(folder), "OPENAI_API_KEY": "none"}


def pause(seconds: float) -> None:
    """A person who reads."""
    clock = MonotonicClock()
    clock.sleep_until_ns(clock.now_ns() + round(seconds * NS_PER_S))
