"""Authorizes a confirmatory run: the frozen file must be committed and older, and all it names unchanged.

Every refusal is one line with its reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.clock import NS_PER_S, ScaledClock, utc_now
from harness.errors import PlanError, RecordsError, SpecError
from harness.judge.prereg.freeze import HARNESS_FOLDER, artifact_sha256, check_new_seed, located
from harness.judge.prereg.frozen import (
    ANEW,
    Preregistration,
    RunAuthorization,
    changed_rule_code,
    parse_preregistration,
    read_frozen,
)
from harness.judge.prereg.ledger import Ledger
from harness.judge.prereg.repository import Commit, Repository, file_sha256
from harness.measure.records import layout
from harness.measure.records.inputs import changed_inputs
from harness.measure.records.manifest import PreregistrationRecord
from harness.measure.records.run import SealedRun
from harness.measure.server.provenance import source_sha256
from harness.model.experiment import PlannedRuns, resolve
from harness.model.plan.files import read_plan
from harness.stacks.rbln.rules.kv_rules import AUTO, rule_set, rules_for_version

EDITED = "differs from the file that was committed: it was edited since"
AGAIN = "Restore it, or freeze the changed experiment under a new name"


def authorize(path: Path, *, runs_root: Path | None = None) -> tuple[Preregistration, RunAuthorization]:
    """Check a frozen file and everything it names, and return the authorization for its runs.

    runs_root: the folder of the runs; a sealed exploratory run there with the same seed is a reason to refuse.
    Raises SpecError with the first reason.
    """
    content = read_frozen(path)
    try:
        frozen = parse_preregistration(content, where=str(path))
    except SpecError:
        if differs_from_commit(path):
            raise SpecError(EDITED, where=str(path), hint=f"Restore it: git checkout HEAD -- {path}") from None
        raise
    repository = Repository(path)
    commit = _check_committed(repository, path)
    _check_files(repository, frozen)
    _check_code_and_artifacts(frozen)
    planned = _checked_plans(repository, frozen)
    its_files = [path, located(repository, frozen.experiment_file)]
    its_files += sorted({repository.root / plan.path for plan in frozen.plans})
    check_new_seed(
        repository,
        frozen.experiment,
        leave_out=its_files,
        runs_root=runs_root,
        how="Copy the experiment's file, give the copy another name =, commit it and freeze it with --seed",
    )
    sha256 = hashlib.sha256(content).hexdigest()
    record = PreregistrationRecord(
        path=repository.relative(path),
        sha256=sha256,
        commit=commit.sha,
        committed_at_s=commit.at_s,
        tag=repository.tag_at(commit.sha),
    )
    return frozen, RunAuthorization(record, content, planned, Ledger(repository, sha256, commit.sha))


def differs_from_commit(path: Path) -> bool:
    """Whether a file was committed and was changed in the work tree since."""
    try:
        repository = Repository(path)
        return bool(repository.commits_of(repository.relative(path))) and not repository.is_checked_out(path)
    except SpecError:
        return False


def _check_committed(repository: Repository, path: Path) -> Commit:
    name = repository.relative(path)
    commits = repository.commits_of(name)
    if not commits or not repository.is_checked_out(path):
        raise SpecError(
            "is not committed, so nothing shows that it is older than the measurement",
            where=str(path),
            hint=f"Commit it and its plans first: "
            f"git add {name} {Path(name).with_suffix('')} && git commit -m 'Freeze {path.stem}'",
        )
    if len(commits) > 1:
        raise SpecError(
            "was committed more than once, and a frozen file never changes",
            where=str(path),
            hint="Freeze the changed experiment under a new name",
        )
    (commit,), now_s = commits, utc_now().timestamp()
    if commit.at_s > now_s:
        raise SpecError(
            f"its commit {commit.sha[:12]} is dated {commit.at_s - now_s:.0f} s in the future: the run would start "
            "before its freeze",
            where=str(path),
            hint="Correct the clock, or commit again",
        )
    return commit


def _kind(path: str) -> str:
    folders = set(path.replace(":", "/").split("/"))
    kinds = {"costs": "the cost model", "waits": "the wait distribution", "patches": "a patch"}
    return next((kind for folder, kind in kinds.items() if folder in folders), "an input")


def _check_files(repository: Repository, frozen: Preregistration) -> None:
    files = [
        (frozen.experiment_file, "the experiment"),
        *((rule.file, f"criterion {rule.rule.name!r}") for rule in frozen.rules),
        *((file, _kind(file.path)) for file in frozen.files),
    ]
    for file, what in files:
        path = located(repository, file)
        if not path.is_file():
            raise SpecError(f"{what} is gone since the freeze", where=str(path), hint=AGAIN)
        if file_sha256(path) != file.sha256:
            raise SpecError(f"{what} was changed after the freeze", where=str(path), hint=AGAIN)


def _check_code_and_artifacts(frozen: Preregistration) -> None:
    if source_sha256(HARNESS_FOLDER) != frozen.code_sha256:
        raise SpecError(
            f"the harness's code was changed after the freeze (it was {frozen.code_sha256[:12]})",
            where=str(HARNESS_FOLDER),
            hint=f"Check out {frozen.code_commit[:12] or 'the code it was frozen with'}, or {ANEW}",
        )
    if changed := changed_rule_code(frozen):
        raise SpecError(changed, where="rules", hint=f"Install the version that it was frozen with, or {ANEW}")
    for folder, sha256 in frozen.artifacts.items():
        present = artifact_sha256(folder)
        if present != sha256:
            what = "is gone" if present is None else "was compiled again or changed"
            raise SpecError(f"the compiled artifact {what} since the freeze", where=folder, hint=AGAIN)


def _checked_plans(repository: Repository, frozen: Preregistration) -> PlannedRuns:
    """The runs of the frozen experiment, each with its frozen plan."""
    planned_runs = resolve(frozen.experiment)
    built = {(run.condition.name, run.replicate): run.plan.hash for run in planned_runs}
    for planned in frozen.plans:
        path = repository.root / planned.path
        which = f"the plan of {planned.condition}/{planned.replicate}"
        try:
            present = read_plan(path).hash
        except PlanError as error:
            what = f"{which} was changed after the freeze ({error.what})"
            raise SpecError(what, where=str(path), hint=AGAIN) from error
        if not present == planned.hash == built.get((planned.condition, planned.replicate)):
            raise SpecError(f"{which} is not the frozen plan {planned.hash[:12]}", where=str(path), hint=AGAIN)
    return planned_runs


def check_sealed_runs(runs: Sequence[SealedRun]) -> Preregistration | None:
    """The preregistration that sealed runs were made under; None when they are exploratory.

    Raises RecordsError when runs of both kinds, or of two preregistrations, are mixed; when the copy in a run is not
    what its manifest names; when a run was made from another plan; and when a run began before its freeze.
    """
    records = [run.manifest.preregistration for run in runs]
    kinds = {"exploratory" if record is None else record.sha256 for record in records}
    if kinds <= {"exploratory"}:
        return None
    if len(kinds) > 1:
        names = sorted(kind[:12] for kind in kinds)
        raise RecordsError(
            f"runs of experiment {runs[0].experiment!r} were made under different freezes ({', '.join(names)})",
            where=str(runs[0].path.parent.parent),
            hint="Keep each in its own records folder",
        )
    frozen: Preregistration | None = None
    for run in runs:
        record = frozen_record(run)
        copy = run.file(layout.FROZEN)
        content = read_frozen(copy)
        if hashlib.sha256(content).hexdigest() != record.sha256:
            what = "its copy of the frozen file is not the file that its manifest names"
            raise RecordsError(what, where=str(copy), hint="Restore the run from a copy")
        # All copies have the hash, and so the content, of the first.
        frozen = frozen or parse_preregistration(content, where=str(copy))
        for what, hint in _differences(run, frozen, record):
            raise RecordsError(what, where=str(run.path), hint=hint)
    return frozen


def frozen_record(run: SealedRun) -> PreregistrationRecord:
    """What a confirmatory run says of its freeze."""
    record = run.manifest.preregistration
    assert record is not None, "only confirmatory runs come here"
    return record


def _differences(run: SealedRun, frozen: Preregistration, record: PreregistrationRecord) -> Iterator[tuple[str, str]]:
    """(what, hint) of everything in which a run is not as frozen. Rules that no release follows are exempt."""
    manifest, spec = run.manifest, frozen.experiment
    again = "Perform the run again from the frozen file"
    if frozen.plan_hashes.get((run.condition, run.replicate)) != manifest.plan_hash:
        yield f"was made from plan {manifest.plan_hash[:12]}, which its preregistration does not name for it", again
    condition = next((each for each in spec.condition if each.name == run.condition), None)
    changed = ["condition"] if condition is None else changed_inputs(run, spec, condition)
    if run.limits != spec.limits:
        changed.append("limits")
    if condition is not None and manifest.treatment != condition.treatment:
        changed.append("treatment")
    if changed:
        yield f"was made with another {' and '.join(changed)} than was frozen", again
    # The cost model gives the run's modelled device time (A).
    costs = manifest.files.get(layout.COST_MODEL)
    if costs is None:
        yield "holds no copy of its cost model", "Restore the run from a copy"
    elif costs.sha256 not in {file.sha256 for file in frozen.files}:
        what = f"was made with another cost model ({costs.sha256[:12]}) than the frozen file"
        yield what, "Restore the frozen file and perform the run again"
    elif file_sha256(run.file(layout.COST_MODEL)) != costs.sha256:
        yield "its copy of the cost model is not the file that its manifest names", "Restore the run from a copy"
    served = rules_for_version(manifest.serving_version)
    named = frozen.condition_rules.get(run.condition) or str(manifest.requested_server.get("rules", AUTO))
    predicted = rule_set(frozen.prediction_rules or named)
    if served is not None and predicted.releases and predicted != served:
        yield (
            f"was served by vllm-rbln {manifest.serving_version}, which follows {served.name}, and its prediction was "
            f"frozen under {predicted.name}",
            f"Freeze again with --predict-with {served.name}, or serve a release of those rules",
        )
    first_s = first_request_s(run)
    if first_s is not None and first_s < record.committed_at_s:
        early = f"{record.committed_at_s - first_s:.3f} s before its freeze was committed ({record.commit[:12]})"
        yield f"began {early}", "It cannot count as confirmatory; perform it again"


def first_request_s(run: SealedRun) -> float | None:
    """When the first request left, seconds since the epoch; None when none did."""
    sent = [instant for instant in run.table("requests").column("sent_ns").to_pylist() if instant is not None]
    if not sent:
        return None
    record = run.manifest.clock
    monotonic_ns = ScaledClock(record.scale).to_monotonic_ns(min(sent))
    return (monotonic_ns + record.realtime_minus_monotonic_ns) / NS_PER_S
