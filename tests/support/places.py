"""A place to run experiments from files on the real stack: an environment that may be patched, traces, commands."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.extras.twin.backend import cached_artifact, step_costs, twin_spec
from harness.extras.twin.environment import INSIDE, SETTINGS_VARIABLE, TwinEnvironment, twin_variables
from harness.measure.records.run import SealedRun
from harness.measure.records.store import RunStore
from harness.model.engine import load_cost_model
from tests.support.command_line import harness
from tests.support.experiments import UNHURRIED_TOML
from tests.support.stacks import write_driver


def _inline(table: Mapping[str, Any]) -> str:
    """A table on one line of TOML."""
    parts = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    return "{" + ", ".join(parts) + "}"


OWN = {"workload", "faults"}


class Place:
    """A folder with experiment files, an environment that may be patched, and one device trace per condition."""

    def __init__(self, twin: TwinEnvironment, environment: Path, folder: Path) -> None:
        self.twin, self.environment, self.folder = twin, environment, folder
        self.site = environment / twin.site_packages.relative_to(twin.folder)
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.driver = write_driver(folder / "driver")

    def harness(self, *words: str) -> subprocess.CompletedProcess[str]:
        # HOME: the overlays of these tests are not the user's. TMPDIR: what is left in it can be seen.
        variables = {"HOME": str(self.folder), "TMPDIR": str(self.temporary), "COLUMNS": "1000"}
        # A host without the driver's tool is refused.
        variables["PATH"] = f"{self.driver}:{os.environ['PATH']}"
        return harness(*words, cwd=self.folder, environment=variables)

    def trace(self, name: str, condition: str) -> Path:
        return self.folder / f"{name}-{condition}.trace.jsonl"

    def write(self, name: str, workload: str, conditions: Mapping[str, dict[str, Any]], server: str = "") -> str:
        """An experiment file. conditions: changes of [server] by name.

        Among them "workload" are changes of [workload], "faults" of the stand-in device.
        """
        lines = [
            f'name = "{name}"\nbackend = "rbln"\nreplicates = 1\nbase_seed = 11\n[workload]\n{workload}\n[server]',
            f'environment = "{self.environment}"\nartifact = "{cached_artifact(self.twin, twin_spec())}"',
            f"start_timeout_s = 300.0\nstop_grace_s = 30.0\n{server}",
            # A shared machine wakes the client late; this is about decisions, not about time.
            UNHURRIED_TOML,
        ]
        for condition, changes in conditions.items():
            settings = self.folder / f"{name}-{condition}.settings.json"
            told = {
                "trace_path": str(self.trace(name, condition)),
                "faults": changes.get("faults", ()),
                # "device": the trace then has the true instants of every call, not those of a modelled device.
                "timing": "device",
                "costs": step_costs(load_cost_model("paper"), changes.get("decode_buckets", (1, 2, 4, 8))),
            }
            settings.write_text(json.dumps(told))
            env = {**twin_variables(self.twin), SETTINGS_VARIABLE: str(settings), "PYTHONPATH": str(INSIDE)}
            lines.append(f'[[condition]]\nname = "{condition}"\nserver.env = {_inline(env)}')
            lines += [f"server.{key} = {json.dumps(value)}" for key, value in changes.items() if key not in OWN]
            lines += [f"workload.{key} = {json.dumps(value)}" for key, value in changes.get("workload", {}).items()]
        (self.folder / f"{name}.toml").write_text("\n".join(lines) + "\n")
        return f"{name}.toml"

    def run(self, name: str, file: str) -> dict[str, SealedRun]:
        """The sealed runs by condition; all must be valid."""
        done = self.harness("run", file, "--runs", "runs")
        assert done.returncode == 0, done.stdout + done.stderr
        return {run.condition: run for run in RunStore(self.folder / "runs").sealed(name)}

    def patched(self, *words: str) -> str:
        done = self.harness("server", "patch", *words, "--environment", str(self.environment))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def left_behind(self) -> list[str]:
        """Processes that name this folder, unfinished runs, unfinished overlays, temporary files.

        torch's cache of compiled kernels is no leftover: the next server starts sooner with it.
        """
        found = [f"process {pid}" for pid in processes_naming(self.folder)]
        found += [str(path) for path in (*self.folder.rglob("*.partial"), *self.temporary.iterdir())]
        return [one for one in found if "torchinductor" not in one]


def processes_naming(folder: Path) -> list[int]:
    """Processes whose command line or environment names ``folder``, this one apart."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in words:
                found.append(int(entry.name))
    return found
