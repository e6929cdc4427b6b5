"""The ledger of a freeze: every start of one of its runs, and how that ended, as a chain of git commits.

Each entry is a commit without changes whose parent is the entry before it; the first entry's parent is the freeze. So
the hash of an entry covers all entries before it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from harness.analysis.stats import grouped
from harness.clock import utc_now
from harness.errors import RecordsError, SpecError
from harness.judge.prereg.repository import Commit, Repository, file_sha256
from harness.measure.records import layout
from harness.measure.records.manifest import load_manifest
from harness.measure.records.run import SealedRun
from harness.model.experiment import PlannedRun
from harness.model.spec import Spec
from harness.run_key import RunKey

REF = "refs/harness/ledger/"
# Two processes may append at the same moment: the slower process tries again.
TRIES = 20
_START_AGAIN = "Restore that run from a copy, or freeze the experiment again under a new name"


def _instant(text: str) -> str:
    try:
        datetime.fromisoformat(text).timestamp()
    except OverflowError as error:
        raise ValueError("a year that no clock shows") from error
    return text


Instant = Annotated[str, AfterValidator(_instant)]
"""A date and time as Python writes it."""


class Entry(Spec, extra="ignore"):
    """One entry. number: place in the chain, from 0. plan: the plan's hash. start: commit of the start that ended.

    manifest: SHA-256 of the sealed manifest; is_valid: of its run. Ledgers of earlier versions have looks too, which
    decide nothing.
    """

    event: Literal["start", "sealed", "aborted", "look"]
    number: int = Field(ge=0)
    experiment: str
    condition: str = ""
    replicate: int = 0
    host: str
    at_utc: Instant
    plan: str = ""
    start: str = ""
    manifest: str = ""
    is_valid: bool = False
    reason: str = ""

    @property
    def key(self) -> RunKey:
        return RunKey(self.experiment, self.condition, self.replicate)

    @property
    def label(self) -> str:
        return f"{self.condition}/{self.replicate}"


@dataclass(frozen=True, slots=True)
class Ledger:
    """The ledger of one freeze in a repository. freeze_commit: parent of the first entry."""

    repository: Repository
    frozen_sha256: str
    freeze_commit: str

    @property
    def ref(self) -> str:
        """The git reference of the ledger: one per freeze, wherever its runs lie."""
        return REF + self.frozen_sha256[:40]

    def chain(self) -> dict[str, Entry]:
        """All entries by commit, checked; RecordsError when the chain is broken."""
        return read_chain(self.repository.line_of(self.freeze_commit, self.ref), self.freeze_commit)

    def start(self, run: PlannedRun) -> str:
        """Add the start of a run, before the run does anything; returns the entry's commit."""
        return self._append(run.key, event="start", plan=run.plan.hash)

    def sealed(self, start: str, key: RunKey, manifest: Path) -> None:
        """Add the end of a start: the manifest that was sealed."""
        is_valid = load_manifest(manifest).is_valid
        sha256 = file_sha256(manifest)
        self._append(key, event="sealed", start=start, manifest=sha256, is_valid=is_valid)

    def aborted(self, start: str, key: RunKey, reason: str) -> None:
        """Add the end of a start that sealed nothing, with the reason."""
        self._append(key, event="aborted", start=start, reason=reason[:200])

    def admit(self, todo: Sequence[PlannedRun], sealed: Sequence[SealedRun]) -> None:
        """Refuse to start a run that was sealed before, here or elsewhere; add entries that sealed runs lack.

        An INVALID run may be made again as often as the frozen limits allow.
        """
        chain = self.chain()
        ended = grouped((entry for entry in chain.values() if entry.event == "sealed"), lambda entry: entry.key)
        for run in todo:
            entries = ended.get(run.key, [])
            if any(entry.is_valid for entry in entries) or len(entries) > run.spec.limits.retries:
                raise SpecError(
                    f"{run.label} was sealed already on {entries[-1].host} at {entries[-1].at_utc}: "
                    "a frozen run is made once",
                    where=self.ref,
                    hint=_START_AGAIN,
                )
        for run in sealed:
            record = run.manifest.preregistration
            start = None if record is None else chain.get(record.start)
            if run.key not in ended and record is not None and start is not None and start.event == "start":
                self.sealed(record.start, run.key, run.path / layout.MANIFEST)

    def _append(self, key: RunKey, **fields: object) -> str:
        for _ in range(TRIES):
            chain = self.chain()
            entry = Entry.model_validate(
                {
                    **key._asdict(),
                    "number": len(chain),
                    "host": socket.gethostname(),
                    "at_utc": utc_now().isoformat(timespec="milliseconds"),
                    **fields,
                }
            )
            message = f"{entry.event} {entry.experiment}/{entry.label}\n\n{entry.model_dump_json()}\n"
            parent = [self.freeze_commit, *chain][-1]
            if (sha := self.repository.append(self.ref, parent, message)) is not None:
                return sha
        raise RecordsError("the ledger is busy", where=self.ref, hint="Start again when the others are done")


def read_chain(commits: Iterable[Commit], freeze_commit: str) -> dict[str, Entry]:
    """Entries by commit, oldest first; RecordsError that names the first entry that does not fit."""
    chain: dict[str, Entry] = {}
    for number, commit in enumerate(commits):
        try:
            entry = Entry.model_validate_json(commit.body.strip())
        except ValidationError as error:
            raise _broken(number, "cannot be read") from error
        if commit.parents != [freeze_commit, *chain][-1]:
            raise _broken(number, "does not follow the entry before it")
        if entry.number != number:
            raise _broken(number, f"calls itself {entry.number}")
        chain[commit.sha] = entry
    return chain


def _broken(number: int, what: str) -> RecordsError:
    return RecordsError(f"the ledger is broken: entry {number} {what}", hint="Fetch it again from where it was pushed")
