"""A published experiment: one archive that a stranger can check without its repository, its git or its authors.

It is an RO-Crate with checksums: the frozen file, the proof of its commit, the ledger, every sealed run and the
verdict, signed where a key is given.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from harness.clock import utc_now
from harness.errors import RecordsError, SpecError, in_one_line
from harness.prereg.authorize import check_sealed_runs
from harness.prereg.judge import Judgement, judge
from harness.prereg.proof import Proof, find_proof
from harness.prereg.repository import SUFFIX, Repository, check_signature, file_sha256, sign_file, signature_of
from harness.records import RunStore, SealedRun, layout

SUMS = "SHA256SUMS"
PROOF = "proof.json"
FROZEN = "frozen.json"
VERDICT = "verdict.json"
CRATE = "ro-crate-metadata.json"
RUNS = "runs"
# Time stamps by other parties beside the frozen file: RFC 3161 tokens and OpenTimestamps proofs.
STAMPS = (".tsr", ".ots")
NEEDED = {SUMS, PROOF, FROZEN, VERDICT, CRATE}
SIGNATURE_OF_SUMS = SUMS + SUFFIX
OPTIONAL = {SIGNATURE_OF_SUMS, *(FROZEN + suffix for suffix in (SUFFIX, *STAMPS))}
# Tables are compressed before they are packed and logs shrink by 10 to 40 times; deflate could make 1,030 of it.
MOST_BYTES = 64 << 30
MOST_EXPANSION = 100
MOST_BYTES_OF_A_SMALL_ARCHIVE = 64 << 20


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of checking an archive: what is proven, by whom, since when, and what cannot be proven."""

    judgement: Judgement
    proven: tuple[str, ...]
    unproven: tuple[str, ...]


def publish(
    runs: Sequence[SealedRun], archive: Path, *, repository: Path | None = None, signing_key: Path | None = None
) -> Judgement:
    """Write the archive of one experiment's runs; SpecError when they are exploratory or the archive exists."""
    if archive.exists():
        raise SpecError("exists already, and an archive is never changed", where=str(archive), hint="Choose a new name")
    if check_sealed_runs(runs) is None:
        raise SpecError(
            "these runs are exploratory: nothing was frozen", where=runs[0].experiment, hint="harness prereg freeze"
        )
    record = runs[0].manifest.preregistration
    assert record is not None, "what was frozen is recorded"
    proof, _ = find_proof(runs, record, repository)
    judgement = judge(runs, proof=proof)
    with tempfile.TemporaryDirectory(prefix="harness-publish-") as temporary:
        folder = Path(temporary)
        for run in _with_earlier_tries(runs):
            run.verify()
            shutil.copytree(run.path, folder / RUNS / run.experiment / run.condition / run.path.name)
        shutil.copy(runs[0].file(layout.FROZEN), folder / FROZEN)
        for beside in _beside(runs, repository, record.path):
            shutil.copy(beside, folder / (FROZEN + beside.name.removeprefix(PurePosixPath(record.path).name)))
        (folder / PROOF).write_text(proof.model_dump_json(indent=1) + "\n", encoding="utf-8")
        (folder / VERDICT).write_text(_verdict(judgement), encoding="utf-8")
        (folder / CRATE).write_text(_crate(folder, runs[0].manifest.title), encoding="utf-8")
        sums = "".join(f"{file_sha256(folder / name)}  {name}\n" for name in _files(folder))
        (folder / SUMS).write_text(sums, encoding="utf-8")
        if signing_key is not None:
            sign_file(folder / SUMS, signing_key)
        unfinished = archive.with_name(f".{archive.name}.tmp")
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as out:
            for name in _files(folder):
                out.write(folder / name, name)
        unfinished.replace(archive)
    return judgement


def check(archive: Path, signers: Path | None = None) -> Checked:
    """Check an archive by its content alone; RecordsError names what does not hold.

    signers: ssh's file of allowed signers, for names instead of keys.
    """
    with tempfile.TemporaryDirectory(prefix="harness-publish-") as name:
        folder = Path(name)
        _unpack(archive, folder)
        _check_sums(archive, folder)
        proof = _proof(archive, folder)
        runs = _runs(archive, folder)
        frozen = check_sealed_runs(runs)
        if frozen is None or (folder / FROZEN).read_bytes() != runs[0].file(layout.FROZEN).read_bytes():
            raise _wrong(archive, "its frozen file is not the one its runs were made under")
        judgement = judge(runs, proof=proof)
        if _verdict(judgement).encode() != (folder / VERDICT).read_bytes():
            raise _wrong(archive, "its verdict is not what its runs give")
        proven = [
            f"{len(runs)} of {len(frozen.plans)} frozen runs, each file as it was sealed",
            f"plans, predictions and criteria are those of {frozen.digest[:12]}",
            f"the ledger of {len(proof.chain)} entries stands behind commit {proof.commit[:12]}",
        ]
        unproven = _signatures(folder, signers, proven)
        unproven += _times(folder, proof)
    return Checked(judgement, tuple(proven), (*unproven, *_ALWAYS_UNPROVEN))


_ALWAYS_UNPROVEN = (
    "that no other clone of the repository made other runs of this freeze",
    "that nothing was measured with these plans before the freeze",
    "that the machine reported the truth to the harness",
)


def _signatures(folder: Path, signers: Path | None, proven: list[str]) -> list[str]:
    """Add the signers to ``proven``; returns what is not signed."""
    unproven: list[str] = []
    for name, what in ((FROZEN, "the freeze"), (SUMS, "the archive: seals, ledger and verdict")):
        signature = signature_of(folder / name)
        if signature.is_file():
            proven.append(f"signed {what}: {check_signature(folder / name, signature, signers)}")
        else:
            unproven.append(f"who made {what}: it is not signed")
    return unproven


def _times(folder: Path, proof: Proof) -> list[str]:
    stamps = [name for name in (FROZEN + suffix for suffix in STAMPS) if (folder / name).is_file()]
    others = [f"{name} is carried, and was not verified here (ask its authority)" for name in stamps]
    others += [f"branch {name} had the freeze when this was published (ask its host)" for name in proof.remotes]
    attested = ", ".join(others) or "nobody else attests a time"
    return [f"since when: times are those of the machine that froze and ran; {attested}"]


def _beside(runs: Sequence[SealedRun], repository: Path | None, path: str) -> list[Path]:
    """Signature and time stamps beside the frozen file, where its repository is available."""
    try:
        frozen = Repository(repository or runs[0].path).root / path
    except SpecError:
        return []
    return [file for suffix in (SUFFIX, *STAMPS) if (file := frozen.with_name(frozen.name + suffix)).is_file()]


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _verdict(judgement: Judgement) -> str:
    names = ("rule", "subject", "outcome", "label", "reason")
    decisions = [{name: getattr(decision, name) for name in names} for decision in judgement.decisions]
    return json.dumps({"decisions": decisions, "aborts": judgement.aborts}, indent=1) + "\n"


RO_CRATE = "https://w3id.org/ro/crate/1.1"


def _crate(folder: Path, title: str) -> str:
    """RO-Crate metadata."""
    names = _files(folder)
    graph: list[dict[str, Any]] = [
        {"@id": CRATE, "@type": "CreativeWork", "about": {"@id": "./"}, "conformsTo": {"@id": RO_CRATE}},
        {
            "@id": "./",
            "@type": "Dataset",
            "name": title,
            "description": "Confirmatory runs with their preregistration, ledger and verdict",
            "datePublished": utc_now().date().isoformat(),
            "license": "not stated",
            "hasPart": [{"@id": name} for name in names],
        },
    ]
    for name in names:
        size, sha256 = str((folder / name).stat().st_size), file_sha256(folder / name)
        graph.append({"@id": name, "@type": "File", "contentSize": size, "sha256": sha256})
    return json.dumps({"@context": f"{RO_CRATE}/context", "@graph": graph}, indent=1) + "\n"


# What Python's zipfile raises where bytes of an archive were changed.
_UNREADABLE = (zipfile.BadZipFile, zlib.error, struct.error, RuntimeError, EOFError, ValueError, OverflowError, OSError)


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack the files of a published experiment; nothing is unpacked when the archive holds anything else."""
    try:
        with zipfile.ZipFile(archive) as packed:
            infos = packed.infolist()
            _check_listing(archive, infos)
            packed.extractall(folder, infos)
    except _UNREADABLE as error:
        raise _wrong(archive, f"cannot be unpacked ({in_one_line(error)})") from error


def _check_listing(archive: Path, infos: Sequence[zipfile.ZipInfo]) -> None:
    names = {info.filename for info in infos}
    if len(names) != len(infos):
        raise _wrong(archive, "holds a name twice")
    for info in infos:
        if stat.S_ISLNK(info.external_attr >> 16) or not _is_known(info.filename):
            raise _wrong(archive, f"holds {info.filename!r}, which is no file of a published experiment")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _wrong(archive, f"holds {info.filename!r}, compressed in a way that publish never uses")
    if missing := sorted(NEEDED - names):
        raise _wrong(archive, f"lacks {missing[0]}")
    total = sum(info.file_size for info in infos)
    limit = min(MOST_BYTES, max(MOST_BYTES_OF_A_SMALL_ARCHIVE, MOST_EXPANSION * archive.stat().st_size))
    if total > limit:
        raise _wrong(archive, f"would unpack to {total} bytes, the limit for its size is {limit}")


def _is_known(name: str) -> bool:
    parts = name.split("/")
    is_below_runs = len(parts) > 4 and parts[0] == RUNS
    is_plain = not any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts)
    return name in NEEDED | OPTIONAL or (is_below_runs and is_plain)


def _runs(archive: Path, folder: Path) -> list[SealedRun]:
    """The verified runs of an unpacked archive, which holds no other file below its folder of runs."""
    store = RunStore(folder / RUNS)
    store.verify()
    runs = store.sealed()
    if len({run.experiment for run in runs}) != 1:
        raise _wrong(archive, "does not hold the runs of one experiment")
    known = {run.path.relative_to(folder).as_posix() for run in _with_earlier_tries(runs)}
    for name in _files(folder):
        if name.startswith(f"{RUNS}/") and "/".join(name.split("/")[:4]) not in known:
            raise _wrong(archive, f"holds {name!r}, which belongs to none of its runs")
    return runs


def _with_earlier_tries(runs: Sequence[SealedRun]) -> Iterator[SealedRun]:
    """The runs, each before the INVALID runs that it repeats."""
    for run in runs:
        yield run
        yield from RunStore(run.path.parents[2]).earlier_tries(run)


def _check_sums(archive: Path, folder: Path) -> None:
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(archive, f"has no readable {SUMS}") from error
    sums = {name: sha256 for sha256, _, name in (line.partition("  ") for line in lines)}
    if odd := sorted((set(_files(folder)) - {SUMS, SIGNATURE_OF_SUMS}) ^ sums.keys()):
        raise _wrong(archive, f"{odd[0]} is missing or was added")
    for name, sha256 in sums.items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != sha256:
            raise _wrong(archive, f"{name} differs from its checksum")


def _proof(archive: Path, folder: Path) -> Proof:
    try:
        return Proof.model_validate_json((folder / PROOF).read_bytes())
    except (OSError, ValidationError) as error:
        raise _wrong(archive, f"has no readable {PROOF}") from error


def _wrong(archive: Path, what: str) -> RecordsError:
    return RecordsError(what, where=str(archive), hint="Ask its authors for another copy")
