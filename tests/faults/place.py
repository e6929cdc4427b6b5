"""A folder with a small experiment, commands in it that may be killed or starved, and what must be true afterwards.

Nothing of the harness is called from inside: each command is an interpreter of its own, as a person starts it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.measure.records import layout
from harness.measure.records.store import RunStore
from tests.support.experiments import UNHURRIED_TOML
from tests.support.places import processes_naming
from tests.support.processes import comes_true

REPLICATES = 2
EXPERIMENT = """
name = "small"
backend = "{backend}"
base_seed = 3
replicates = {replicates}
{more}

[workload]
num_sessions = 2
requests_per_session = 2
waits = "none"
prompt_tokens = {{distribution = "fixed", value = 300}}
generate_tokens = {{distribution = "fixed", value = 40}}

[client]
processes = {processes}

[[condition]]
name = "a"
"""


class Place:
    """One experiment file, its runs, and temporary files of its own. ``sealed``: manifests seen, by folder."""

    def __init__(self, folder: Path, backend: str, processes: int = 1, runs: Path | None = None) -> None:
        self.folder, self.runs, self.temporary = folder, runs or folder / "runs", folder / "tmp"
        self.sealed: dict[Path, str] = {}
        self.temporary.mkdir(parents=True)
        more = "time_scale = 20" if backend == "emulator" else ""
        text = EXPERIMENT.format(backend=backend, replicates=REPLICATES, processes=processes, more=more)
        (folder / "small.toml").write_text(text + UNHURRIED_TOML)

    def run(self, *words: str, under: Sequence[str] = ()) -> subprocess.Popen[str]:
        """``harness run`` in a session of its own; under: a command that sets limits."""
        return subprocess.Popen(
            [*under, sys.executable, "-m", "harness", "run", "small.toml", "--runs", str(self.runs), *words],
            cwd=self.folder,
            env={**os.environ, "TMPDIR": str(self.temporary)},
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def faults(self, said: str) -> list[str]:
        """What is wrong now that a command is over: words, processes, files, runs that were lost or are half."""
        found = [f"said {line}" for line in said.splitlines() if "Traceback" in line or "Broken pipe" in line]
        if not comes_true(lambda: not processes_naming(self.folder)):
            found.append(f"left processes {[_command(pid) for pid in processes_naming(self.folder)]}")
        found += [f"left {path.name}" for path in self.temporary.iterdir() if "torch" not in path.name]
        store = RunStore(self.runs)
        runs = store.sealed() if self.runs.is_dir() else []
        if runs and store.verify() != len(runs):
            found.append("verify counts other runs")
        for run in runs:
            if run.table("requests").num_rows != run.manifest.planned_requests:
                found.append(f"{run.path} is half a run")
        now = {run.path: hashlib.sha256((run.path / layout.MANIFEST).read_bytes()).hexdigest() for run in runs}
        found += [f"lost {path}" for path, manifest in self.sealed.items() if now.get(path) != manifest]
        self.sealed = now
        return found

    @property
    def is_whole(self) -> bool:
        return len(self.sealed) == REPLICATES


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")[:100]
    except OSError:
        return str(pid)
