"""The proof that frozen runs are what they claim: the freeze's commit, the trees down to its file, and the ledger.

It is a git pack, from the repository of the freeze or from a published archive. git itself reads it, in a repository of
these objects alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import Field

from harness.analysis import Evidence, check_run
from harness.analysis.logs.derive import derived_of
from harness.errors import HarnessError, RecordsError, SpecError
from harness.judge.prereg.authorize import first_request_s, frozen_record
from harness.judge.prereg.frozen import Preregistration
from harness.judge.prereg.ledger import Entry, Ledger
from harness.judge.prereg.repository import Repository, file_sha256
from harness.kinds import kind_named
from harness.measure.records import layout, schema
from harness.measure.records.archive import FROZEN, PACK, PROOF, archive_of, wrong
from harness.measure.records.manifest import PreregistrationRecord
from harness.measure.records.run import SealedRun
from harness.model.spec import Spec
from harness.outputs import holder_of

# A run that was started more often may have been selected among its starts.
MAX_STARTS = 3
# A simulated run begins on a whole second.
CLOCK_TOLERANCE_S = 2.0
# The last one that reads the proof of an archive without a pack.
READS_OBJECTS = "2d281e68"
Sha = Annotated[str, Field(pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})$")]


class Claims(Spec, extra="ignore"):
    """What a repository says of a freeze beside the objects that git checks.

    ledger: its newest entry, None without. commits: of the frozen file, on any branch, newest first. lost: entries that
    were removed from the ledger. remotes: remote branches that have the freeze.
    """

    commit: Sha
    ledger: Sha | None = None
    commits: tuple[str, ...]
    lost: tuple[str, ...] = ()
    remotes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proof:
    """The proof of one freeze. ledger: in a repository of the pack's objects alone.

    repository: where claims and pack were gathered; None of an archive, whose ledger gets no more entries.
    """

    claims: Claims
    pack: bytes = field(repr=False)
    ledger: Ledger
    repository: Repository | None = None

    @classmethod
    def of(cls, claims: Claims, pack: bytes, frozen_sha256: str, repository: Repository | None = None) -> Proof:
        """The proof in a pack, which git unpacks; SpecError where it is none."""
        ledger = Ledger(Repository.of_pack(claims.commit, pack), frozen_sha256, claims.commit)
        ledger.repository.point(ledger.ref, claims.ledger or claims.commit)
        return cls(claims, pack, ledger, repository)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Of the ledger, by commit; RecordsError when the chain is broken."""
        return self.ledger.chain()


def gather(repository: Repository, record: PreregistrationRecord) -> Proof:
    """The proof of one freeze from a repository; SpecError when the commit is not in it."""
    if not repository.resolved(f"{record.commit}^{{commit}}"):
        what = f"does not have commit {record.commit}"
        raise SpecError(what, where=str(repository.root), hint="Fetch it into this repository")
    ref = Ledger(repository, record.sha256, record.commit).ref
    line = [commit.sha for commit in repository.line_of(record.commit, ref)]
    claims = Claims(
        commit=record.commit,
        ledger=line[-1] if line else None,
        commits=tuple(commit.sha for commit in repository.commits_of(record.path)),
        lost=tuple(commit.sha for commit in repository.past_heads(ref) if commit.sha not in line),
        remotes=tuple(repository.remotes_with(record.commit)),
    )
    folders = ("" if folder == PurePosixPath() else folder for folder in PurePosixPath(record.path).parents)
    trees = (f"{record.commit}:{folder}" for folder in folders)
    return Proof.of(claims, repository.pack(record.commit, *trees, *line), record.sha256, repository)


def find_proof(runs: Sequence[SealedRun], repository: Path | None = None) -> Proof:
    """The proof from ``repository``, or from around the runs, or from the current folder.

    Runs of an opened archive have the proof of that archive. Raises SpecError where the freeze is nowhere.
    """
    record = frozen_record(runs[0])
    if repository is None:
        if (opened := archive_of(runs[0])) is not None:
            return read_proof(opened)
        with suppress(HarnessError):
            return gather(Repository(runs[0].path), record)
    return gather(Repository(repository or Path.cwd()), record)


def read_proof(folder: Path) -> Proof:
    """The proof in an unpacked archive; RecordsError when it cannot be read."""
    try:
        if not (folder / PACK).is_file():
            what = f"has no {PACK}: an earlier version wrote it"
            raise RecordsError(what, where=str(folder), hint=f"Check it with the harness of commit {READS_OBJECTS}")
        claims = Claims.model_validate_json((folder / PROOF).read_bytes())
        return Proof.of(claims, (folder / PACK).read_bytes(), file_sha256(folder / FROZEN))
    except (OSError, ValueError, SpecError) as error:
        raise wrong(folder, f"has no readable {PROOF}") from error


def doubts_of(proof: Proof, frozen: Preregistration, runs: Sequence[SealedRun]) -> Iterator[str]:
    """Every reason to withhold a decision on these runs, each a clause; none when the proof holds."""
    yield from _doubts_of_commit(proof, frozen, runs[0])
    try:
        chain = proof.entries
    except RecordsError as error:
        yield error.what
        return
    if lost := proof.claims.lost:
        yield f"{len(lost)} entries were taken out of the ledger, first {lost[-1][:12]}"
    yield from _doubts_of_chain([entry for entry in chain.values() if entry.event != "look"], frozen)
    # A run that was repeated counts as it was sealed last.
    last = {entry.key: entry for entry in chain.values() if entry.event == "sealed"}
    by_start = {entry.start: entry for entry in last.values()}
    for run in runs:
        yield from _doubts_of_run(run, chain, by_start)
        yield from judged_again(run)


def aborts_of(chain: Mapping[str, Entry], runs_root: Path | None = None) -> list[str]:
    """Starts that sealed nothing, with their reasons. They withhold no decision, but readers must see them.

    runs_root: where runs may still be written.
    """
    ends = {entry.start: entry for entry in chain.values() if entry.event in ("sealed", "aborted")}
    aborts: list[str] = []
    for sha, entry in chain.items():
        end = ends.get(sha)
        if entry.event == "start" and (end is None or end.event == "aborted"):
            reason = _open_start(entry, runs_root) if end is None else end.reason
            aborts.append(f"{entry.label} at {entry.at_utc}: {reason}")
    return aborts


def _open_start(entry: Entry, runs_root: Path | None) -> str:
    """What became of a start without an end."""
    if runs_root is not None:
        folder = layout.run_folder(runs_root, *entry.key)
        if pid := holder_of(folder.with_name(f"{folder.name}{layout.PARTIAL}") / layout.LOCK):
            return f"still running (pid {pid})"
    return "its process ended without an entry"


def _doubts_of_commit(proof: Proof, frozen: Preregistration, run: SealedRun) -> Iterator[str]:
    """Doubts that the frozen file is in this commit and no other, and that the commit is not older than the file."""
    record, repository, commit = frozen_record(run), proof.ledger.repository, proof.claims.commit
    if repository.resolved(f"{commit}:{record.path}") != repository.name_of(run.file(layout.FROZEN)):
        yield f"the frozen file is not in commit {commit[:12]}"
        return
    if proof.claims.commits != (commit,):
        yield f"the frozen file was committed {len(proof.claims.commits)} times"
    at_s = repository.commits("-1", commit)[0].at_s
    if at_s != record.committed_at_s:
        yield f"the runs name another time of the freeze than its commit ({at_s})"
    frozen_at_s = datetime.fromisoformat(frozen.frozen_at_utc).timestamp()
    if at_s < frozen_at_s - CLOCK_TOLERANCE_S:
        yield f"the commit is dated {frozen_at_s - at_s:.0f} s before the frozen file was written"


def _doubts_of_chain(entries: Collection[Entry], frozen: Preregistration) -> Iterator[str]:
    if not entries:
        yield "its ledger is not here: nothing shows that these are all of its runs"
    starts = Counter[str]()
    seals: dict[str, list[Entry]] = {}
    retries, plans = frozen.experiment.limits.retries, frozen.plan_hashes
    for entry in entries:
        plan = plans.get((entry.condition, entry.replicate))
        before = seals.setdefault(entry.label, [])
        if entry.experiment != frozen.name or plan is None:
            yield f"the ledger names {entry.label}, which was not frozen"
        elif entry.event == "start":
            starts[entry.label] += 1
            if entry.plan != plan:
                yield f"{entry.label} was started with another plan"
            if any(seal.is_valid for seal in before) or len(before) > retries:
                yield f"{entry.label} was started again on {entry.host} after it was sealed"
        elif entry.event == "sealed":
            before.append(entry)
    for label, count in starts.items():
        if count > MAX_STARTS + retries:
            yield f"{label} was started {count} times, the limit is {MAX_STARTS + retries}"


def _doubts_of_run(run: SealedRun, chain: Mapping[str, Entry], ends: Mapping[str, Entry]) -> Iterator[str]:
    begun = frozen_record(run).start
    start, end = chain.get(begun), ends.get(begun)
    if start is None or start.event != "start" or start.key != run.key:
        yield f"the start of {run.label} is not in the ledger"
    elif end is None:
        yield f"the ledger does not say how {run.label} ended"
    elif end.manifest != file_sha256(run.path / layout.MANIFEST):
        yield f"{run.label} is not the run that was sealed"
    else:
        began_s, first_s = datetime.fromisoformat(start.at_utc).timestamp(), first_request_s(run)
        if first_s is not None and first_s < began_s - CLOCK_TOLERANCE_S:
            yield f"{run.label} sent its first request {began_s - first_s:.0f} s before the ledger says it started"


def judged_again(run: SealedRun) -> Iterator[str]:
    """Differences between the sealed tables and verdict of a run and those that its raw files give."""
    manifest, derived = run.manifest, derived_of(run)
    for table, sealed in manifest.derived.items():
        if schema.content_sha256(derived.tables[table]) != sealed.content_sha256:
            yield f"the raw files of {run.label} give another table of {table}"
    cost_model = None if kind_named(manifest.backend).is_virtual else run.cost_model
    findings = check_run(Evidence(manifest, run.table("requests"), derived, run.plan_if_readable, cost_model))
    broken = sorted({finding.code for finding in findings if finding.severity == "invalid"})
    if run.is_valid and broken:
        yield f"{run.label} was sealed valid, and its raw files break {', '.join(broken)}"
    if not run.is_valid and not broken and not manifest.findings:
        yield f"{run.label} was sealed INVALID, and nothing in it says why"
