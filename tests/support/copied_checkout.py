"""A copy of the checkout whose files a test may really add and change, and a Python that runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.checkout import ROOT
from tests.support.command_line import harness_apart

TRIED_BACKEND = """\
from dataclasses import dataclass

from harness.model.spec.server import ENGINE_KEYS
from harness.kinds import KINDS, BackendKind
from harness.measure.server.doctor import Check
from harness.runner.backends.base import Backend
from harness.runner.backends.sim import perform_simulated_run


@dataclass(frozen=True, slots=True)
class TriedBackend(Backend):
    kind: BackendKind = KINDS["tried"]
    shown_keys = ENGINE_KEYS

    def readiness(self):
        return Check(name="backend tried", ok=True, found="a page of Python", need="nothing", how="Use it")

    def perform(self, run, context):
        return perform_simulated_run(run, context)


BACKEND = TriedBackend()
"""
"""A module that adds a backend, which simulates. Its kind is named "tried"."""


class CopiedCheckout:
    """A copy in ``root``. more: what it has beside code, patches and plans."""

    def __init__(self, root: Path, more: tuple[str, ...] = ()) -> None:
        self.root = root
        for name in ("harness", "benchmarks", "patches", "plans", *more):
            if (ROOT / name).is_dir():
                # Bytecode comes along, or each copy compiles every module; but no file that is being written.
                shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("*.pyc.*"))
            else:
                shutil.copy(ROOT / name, root / name)

    def write(self, name: str, text: str) -> None:
        assert not (self.root / name).exists()
        (self.root / name).write_text(text)

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.root / name).read_text()
        assert text.count(old) == 1, (name, old)
        (self.root / name).write_text(text.replace(old, new))

    def python(self, *words: str, variables: Mapping[str, str] | None = None) -> str:
        """What a Python of the copy prints; variables: of its environment, beside those of the test."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore:overflow", *words],
            env={**os.environ, **self._variables, **(variables or {})},
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def harness(self, *words: str, exit_code: int = 0, variables: Mapping[str, str] | None = None) -> str:
        """What ``harness`` of the copy prints; variables: as of ``python``."""
        environment = {**self._variables, **(variables or {})}
        done = harness_apart(*words, cwd=self.root, environment=environment, checkout=self.root)
        assert done.returncode == exit_code, done.stdout + done.stderr
        return done.stdout

    @property
    def _variables(self) -> dict[str, str]:
        # Machine code comes along with the bytecode: what an answer searches takes minutes without.
        return {"PYTHONPATH": str(self.root), "PYTHONSAFEPATH": "1", "COLUMNS": "1000"}
