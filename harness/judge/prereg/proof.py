"""The proof that frozen runs are what they claim: the freeze's commit, the trees down to its file, and the ledger.

A repository and a published archive go through the same checks, which need no git.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, ValidationError

from harness.analysis import Evidence, check_run
from harness.analysis.logs.derive import derived_of
from harness.errors import HarnessError, RecordsError
from harness.judge.prereg.authorize import first_request_s
from harness.judge.prereg.frozen import Preregistration
from harness.judge.prereg.ledger import Entry, Ledger, object_hash, read_chain
from harness.judge.prereg.repository import Repository, file_sha256
from harness.kinds import kind_named
from harness.measure.records import layout, schema
from harness.measure.records.archive import PROOF, archive_of, wrong
from harness.measure.records.manifest import PreregistrationRecord
from harness.measure.records.run import SealedRun
from harness.model.spec import Spec

# A run that was started more often may have been selected among its starts.
MAX_STARTS = 3
# A simulated run begins on a whole second.
CLOCK_TOLERANCE_S = 2.0


def _decoded(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else base64.b64decode(content, validate=True)


Encoded = Annotated[
    bytes,
    BeforeValidator(_decoded),
    PlainSerializer(lambda content: base64.b64encode(content).decode(), when_used="json"),
]
"""Bytes, in base64 in a file."""
# The tree and the committer time (s) of a commit object; git writes the lines in this order.
_COMMIT = re.compile(rb"tree ([0-9a-f]{40,64})\n(?:[^\n]+\n)*?committer [^\n]* (\d{1,12}) [+-]\d{4}\n")


class Proof(Spec):
    """All that a repository knows about one freeze.

    way: (kind, content) of the git objects from the commit to the folder of the frozen file.
    chain: (name, content) of every ledger entry, oldest first. commits: of the frozen file, on any branch,
    newest first. lost: entries that were removed from the ledger. remotes: remote branches that have the freeze.
    tag: tags on its commit, with the state of their signatures.
    """

    commit: str
    way: tuple[tuple[str, Encoded], ...]
    chain: tuple[tuple[str, Encoded], ...]
    commits: tuple[str, ...]
    lost: tuple[str, ...] = ()
    remotes: tuple[str, ...] = ()
    tag: str = ""


def gather(repository: Repository, record: PreregistrationRecord) -> Proof:
    """The proof of one freeze from a repository; SpecError when the commit is not in it."""
    ledger = Ledger(repository, record.sha256, record.commit)
    chain = ledger.objects()
    kept = {sha for sha, _ in chain}
    return Proof(
        commit=record.commit,
        way=tuple(_way(repository, record)),
        chain=tuple(chain),
        commits=tuple(commit.sha for commit in repository.commits_of(record.path)),
        lost=tuple(sha for sha in repository.past_heads(ledger.ref) if sha not in kept),
        remotes=tuple(repository.remotes_with(record.commit)),
        tag=repository.tag_at(record.commit),
    )


def find_proof(
    runs: Sequence[SealedRun], record: PreregistrationRecord, repository: Path | None = None
) -> tuple[Proof, Ledger | None]:
    """The proof and its ledger: from ``repository``, or from around the runs, or from the current folder.

    Runs of an opened archive have the proof of that archive, and no ledger that could be added to. Raises SpecError
    where the freeze is nowhere.
    """
    if repository is None and (opened := archive_of(runs[0])) is not None:
        return read_proof(opened), None
    if repository is None:
        with suppress(HarnessError):
            return _gathered(Repository(runs[0].path), record)
    return _gathered(Repository(repository or Path.cwd()), record)


def read_proof(folder: Path) -> Proof:
    """The proof in an unpacked archive; RecordsError when it cannot be read."""
    try:
        return Proof.model_validate_json((folder / PROOF).read_bytes())
    except (OSError, ValidationError) as error:
        raise wrong(folder, f"has no readable {PROOF}") from error


def _gathered(repository: Repository, record: PreregistrationRecord) -> tuple[Proof, Ledger]:
    return gather(repository, record), Ledger(repository, record.sha256, record.commit)


def doubts_of(proof: Proof, frozen: Preregistration, runs: Sequence[SealedRun]) -> Iterator[str]:
    """Every reason to withhold a decision on these runs, each a clause; none when the proof holds."""
    yield from _doubts_of_commit(proof, frozen, runs[0])
    try:
        chain = read_chain(proof.chain, proof.commit)
    except RecordsError as error:
        yield error.what
        return
    if proof.lost:
        yield f"{len(proof.lost)} entries were taken out of the ledger, first {proof.lost[-1][:12]}"
    yield from _doubts_of_chain([entry for entry in chain.values() if entry.event != "look"], frozen)
    # A run that was repeated counts as it was sealed last.
    last = {entry.key: entry for entry in chain.values() if entry.event == "sealed"}
    by_start = {entry.start: entry for entry in last.values()}
    for run in runs:
        yield from _doubts_of_run(run, chain, by_start)
        yield from judged_again(run)


def aborts_of(chain: Mapping[str, Entry]) -> list[str]:
    """Starts that sealed nothing, with their reasons. They withhold no decision, but readers must see them."""
    ends = {entry.start: entry for entry in chain.values() if entry.event in ("sealed", "aborted")}
    aborts: list[str] = []
    for sha, entry in chain.items():
        end = ends.get(sha)
        if entry.event == "start" and (end is None or end.event == "aborted"):
            reason = "its process ended without an entry" if end is None else end.reason
            aborts.append(f"{entry.label} at {entry.at_utc}: {reason}")
    return aborts


def _way(repository: Repository, record: PreregistrationRecord) -> Iterator[tuple[str, bytes]]:
    """The commit of the freeze, its root tree, and the tree of each folder down to the frozen file."""
    *folders, _ = PurePosixPath(record.path).parts
    trees = [f"{record.commit}:{'/'.join(folders[:depth])}" for depth in range(len(folders) + 1)]
    commit, *contents = repository.objects(record.commit, *trees)
    yield "commit", commit
    yield from (("tree", content) for content in contents)


def _tree_entries(tree: bytes, hash_bytes: int) -> dict[str, str]:
    """Name -> hash of the entries of a git tree object. Format of an entry: mode, space, name, NUL, binary hash."""
    entries: dict[str, str] = {}
    place = 0
    while (end := tree.find(b"\0", place)) >= 0:
        name = tree[place:end].partition(b" ")[2].decode("utf-8", "replace")
        entries[name] = tree[end + 1 : end + 1 + hash_bytes].hex()
        place = end + 1 + hash_bytes
    return entries


def _doubts_of_commit(proof: Proof, frozen: Preregistration, run: SealedRun) -> Iterator[str]:
    """Doubts that the frozen file is in this commit and no other, and that the commit is not older than the file."""
    record = run.manifest.preregistration
    assert record is not None, "only confirmatory runs come here"
    wanted, names, at_s = proof.commit, [*PurePosixPath(record.path).parts], 0
    for kind, content in proof.way:
        if object_hash(kind, content, proof.commit) != wanted:
            yield f"the freeze's commit {proof.commit[:12]} does not have the content that its name is the hash of"
            return
        if kind == "commit" and (commit := _COMMIT.match(content)):
            wanted, at_s = commit[1].decode(), int(commit[2])
        elif names:
            wanted = _tree_entries(content, len(proof.commit) // 2).get(names.pop(0), "")
    if names or object_hash("blob", run.file(layout.FROZEN).read_bytes(), proof.commit) != wanted:
        yield f"the frozen file is not in commit {proof.commit[:12]}"
        return
    if proof.commits != (proof.commit,):
        yield f"the frozen file was committed {len(proof.commits)} times"
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
    record = run.manifest.preregistration
    assert record is not None, "only confirmatory runs come here"
    start, end = chain.get(record.start), ends.get(record.start)
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
