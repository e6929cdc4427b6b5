"""A git repository of a user's own, with one small experiment in it that runs in virtual time."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.judge.prereg import FreezeOptions, authorize, freeze
from harness.judge.prereg.freeze import Frozen
from harness.judge.prereg.ledger import Ledger
from harness.measure.records import layout
from harness.measure.records.manifest import Finding, Manifest, load_manifest
from harness.measure.records.run import SealedRun
from harness.measure.records.store import RunStore
from harness.model.spec import ExperimentSpec, load_experiment
from harness.run_key import RunKey
from harness.runner import StopFlag, run_experiment
from harness.runner.progress import RunSealed

EXPERIMENT = """
name = "small"
backend = "sim"
replicates = 3
base_seed = {seed}
baseline = "base"
rules = ["plans/rules/mine.toml"]
prediction = {{draws = 20}}

[workload]
num_sessions = 4
wait_cap_s = 2.0
prompt_tokens = {{distribution = "uniform", low = 200, high = 400}}
generate_tokens = {{distribution = "uniform", low = 8, high = 24}}

[server]
max_num_seqs = 8

[[condition]]
name = "base"

[[condition]]
name = "more"
server.decode_buckets = [1, 2, 3, 4, 8]
"""

RULE = """
name = "mine"
kind = "cost-validation"
min_replicates = 3
max_error = {max_error}
"""


STALLED = "client-stalled: the machine stopped for 2,300 ms, the limit is 1,000 ms"


@dataclass(frozen=True)
class BusyMachine(Ledger):
    """The ledger of a machine whose runs are INVALID where it was busy: in virtual time none is by itself."""

    busy: frozenset[str] = frozenset()

    def sealed(self, start: str, key: RunKey, manifest: Path) -> None:
        if f"{key.condition}/{key.replicate}" in self.busy:
            code, evidence = STALLED.split(": ")
            finding = Finding(code=code, severity="invalid", evidence=evidence)
            found = {"status": "invalid", "invalid_reasons": (STALLED,), "findings": (finding,)}
            manifest.write_text(load_manifest(manifest).model_copy(update=found).to_json())
        super().sealed(start, key, manifest)


@dataclass(frozen=True)
class Workplace:
    """The repository, and short names for what a user does in it."""

    root: Path

    @property
    def experiment_file(self) -> Path:
        return self.root / "plans" / "experiments" / "small.toml"

    @property
    def rule_file(self) -> Path:
        return self.root / "plans" / "rules" / "mine.toml"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def frozen(self) -> Path:
        return self.root / "plans" / "frozen" / "small.json"

    @property
    def sealed(self) -> list[SealedRun]:
        return RunStore(self.runs).sealed("small")

    @property
    def spec(self) -> ExperimentSpec:
        return load_experiment(self.experiment_file)

    def write(self, path: str, content: str) -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
        return target

    def git(self, *arguments: str, at: str | None = None) -> str:
        """Run git; at: the time it believes it is, e.g. "@4000000000 +0000"."""
        dates = {} if at is None else {"GIT_COMMITTER_DATE": at, "GIT_AUTHOR_DATE": at}
        done = subprocess.run(
            ["git", "-C", str(self.root), *arguments],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, **dates},
        )
        return done.stdout

    def commit_all(self, message: str = "work", at: str | None = None) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message, at=at)

    def amend_all(self) -> None:
        """Put every change into the last commit, as if it had always been so."""
        self.git("add", "-A")
        self.git("commit", "-q", "--amend", "--no-edit")

    def freeze(self, **options: object) -> Frozen:
        """Freeze and commit."""
        asked = FreezeOptions(**{"is_committed": True, **options})  # type: ignore[arg-type]
        return freeze(self.spec, self.experiment_file, options=asked)

    def run_confirmatory(self, frozen: Path, busy: Iterable[str] = (), **options: object) -> tuple[SealedRun, ...]:
        """Run what was frozen; options: of ``run_experiment``. busy: labels of runs during which the machine was."""
        preregistration, authorization = authorize(frozen, runs_root=self.runs)
        ledger = authorization.ledger
        shared = BusyMachine(ledger.repository, ledger.frozen_sha256, ledger.freeze_commit, frozenset(busy))
        return run_experiment(
            preregistration.experiment,
            runs_root=self.runs,
            authorization=replace(authorization, ledger=shared),
            **options,  # type: ignore[arg-type]
        ).runs

    def allow_retries(self, retries: int) -> None:
        """Let the experiment repeat INVALID runs, and its rule decide on two of its three blocks."""
        with self.experiment_file.open("a") as file:
            file.write(f"\n[limits]\nretries = {retries}\n")
        self.rule_file.write_text(RULE.format(max_error=0.03).replace("min_replicates = 3", "min_replicates = 2"))
        self.commit_all()

    def run_exploratory(self) -> tuple[SealedRun, ...]:
        return run_experiment(self.spec, runs_root=self.runs).runs


def ends_after_one_run() -> dict[str, Any]:
    """Options of ``run_experiment`` by which a person ends it when its first run is sealed."""
    stop = StopFlag()

    def on_progress(event: object) -> None:
        if isinstance(event, RunSealed):
            stop.request()

    return {"stop": stop, "on_progress": on_progress}


def rewrite_manifest(run: Path, **changes: object) -> None:
    """Other values in the manifest of a run, as its owner can write them."""
    path = run / layout.MANIFEST
    path.write_text(Manifest.model_validate({**json.loads(path.read_bytes()), **changes}).to_json())


def new_workplace(root: Path, seed: int = 424242) -> Workplace:
    """A fresh repository with the experiment and its rule committed."""
    place = Workplace(root)
    # Without a template's samples of hooks: each test copies all of it.
    subprocess.run(["git", "init", "-q", "--template=", str(root)], check=True)
    (root / ".git" / "info").mkdir()
    place.git("config", "user.name", "Tester")
    place.git("config", "user.email", "tester@example.invalid")
    place.write(".gitignore", "runs/\n")
    place.write("plans/experiments/small.toml", EXPERIMENT.format(seed=seed))
    place.write("plans/rules/mine.toml", RULE.format(max_error=0.03))
    place.commit_all()
    return place
