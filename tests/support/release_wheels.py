"""Wheels of a stack of a few lines, for the alarm: what stands in them is chosen by the test."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEDULER = "vllm_rbln/v1/core/optimum_scheduler.py"
SOURCE = '''
class Scheduler:
    """Decides."""

    def schedule(self, waiting: list[int]) -> int:
        # the oldest first
        request = waiting[0]
        logger.debug("chose %d", request)
        if len(self.running) == self.limit:
            raise ValueError("full")
        return request

    def _unrelated(self):
        return 1

LINE = "[PFX] [ALLOC] REQUEST=%s"
'''
FACTS = [
    {"name": "order", "file": SCHEDULER, "functions": ["Scheduler.schedule"], "affects": ["rules"], "says": "oldest"},
    {"name": "line", "file": SCHEDULER, "formats": "[PFX]", "affects": ["log grammar"], "says": "one line"},
    {"name": "queue", "file": "vllm/queue.py", "functions": ["Queue"], "affects": ["rules"], "says": "a deque"},
]
QUEUE = "class Queue:\n    def pop(self):\n        return self.items.popleft()\n"


def wheel(folder: Path, version: str, files: Mapping[str, str], *, package: str = "vllm_rbln", pin: str = "") -> Path:
    """A wheel of ``package`` with these files."""
    path = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        needs = f"Requires-Dist: vllm=={pin}+cpu\n" if pin else ""
        archive.writestr(f"{package}-{version}.dist-info/METADATA", f"Name: {package}\nVersion: {version}\n{needs}")
    return path


def stack(folder: Path, version: str, source: str = SOURCE, *, vllm: str = "0.30.0", queue: str = QUEUE) -> Path:
    """A wheel of vllm-rbln, and beside it one of the vLLM that it is pinned to."""
    wheel(folder, vllm, {"vllm/queue.py": queue}, package="vllm")
    return wheel(folder, version, {SCHEDULER: source}, pin=vllm)


def empty_table(folder: Path, facts: list[dict[str, Any]] | None = None) -> Path:
    """A table in which no release is recorded."""
    path = folder / "facts.json"
    path.write_text(json.dumps({"releases": {}, "facts": FACTS if facts is None else facts}))
    return path
