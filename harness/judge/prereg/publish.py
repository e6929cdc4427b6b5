"""A published experiment: one archive that a stranger can check without its repository, its git or its authors.

It is an RO-Crate with checksums: the frozen file, the proof of its commit, the ledger, every sealed run and the
verdict, signed where a key is given.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
from harness.clock import utc_now
from harness.errors import SpecError
from harness.html import style
from harness.judge.prereg.authorize import check_sealed_runs
from harness.judge.prereg.freeze import HARNESS_FOLDER
from harness.judge.prereg.frozen import Preregistration
from harness.judge.prereg.judge import Judgement, decide
from harness.judge.prereg.page import archive_page
from harness.judge.prereg.proof import Proof, find_proof, read_proof
from harness.judge.prereg.repository import check_signature, file_sha256, sign_file
from harness.measure.records import layout
from harness.measure.records.archive import (
    CRATE,
    EXPLORATORY,
    EXPLORATORY_NOTE,
    FROZEN,
    PACK,
    PAGE,
    PROOF,
    RUNS,
    SIGNATURE_OF_SUMS,
    SUMS,
    VERDICT,
    checked_files,
    files_of,
    wrong,
)
from harness.measure.records.run import SealedRun
from harness.measure.records.store import RunStore
from harness.measure.server.provenance import source_sha256
from harness.outputs import check_output

FORMAT = "harness-verdict/3"


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of checking an archive: what is proven, by whom, since when, and what cannot be proven.

    unheld: words of the archive's own that nothing holds to its runs, and no signer answers for.
    """

    judgement: Judgement
    proven: tuple[str, ...]
    unproven: tuple[str, ...]
    frozen: Preregistration
    unheld: tuple[str, ...] = ()


def publish(
    runs: Sequence[SealedRun], archive: Path, *, repository: Path | None = None, signing_key: Path | None = None
) -> Judgement:
    """Write the archive of one experiment's runs; SpecError when they are exploratory or the archive exists."""
    _check_new(archive)
    frozen = check_sealed_runs(runs)
    if frozen is None:
        raise SpecError(
            "these runs are exploratory: nothing was frozen",
            where=runs[0].experiment,
            hint="`harness prereg publish --exploratory` packs them as such; for a decision: harness prereg freeze",
        )
    proof = find_proof(runs, repository)
    judgement = decide(runs, proof=proof)
    files = {
        FROZEN: runs[0].file(layout.FROZEN).read_bytes(),
        PROOF: f"{proof.claims.model_dump_json(indent=1)}\n".encode(),
        PACK: proof.pack,
        **_words(frozen, judgement, proof),
    }
    _pack(runs, files, archive, CONFIRMATORY, signing_key)
    return judgement


def publish_exploratory(runs: Sequence[SealedRun], archive: Path, *, signing_key: Path | None = None) -> None:
    """Write the archive of runs before which nothing was fixed, marked as such; SpecError where they were frozen."""
    _check_new(archive)
    if check_sealed_runs(runs) is not None:
        raise SpecError("these runs were frozen", where="--exploratory", hint="Leave it out: publish says the verdict")
    _pack(runs, {EXPLORATORY: f"{EXPLORATORY_NOTE}.\n".encode()}, archive, EXPLORATORY_NOTE, signing_key)


def _check_new(archive: Path) -> None:
    if archive.exists():
        raise SpecError("exists already, and an archive is never changed", where=str(archive), hint="Choose a new name")
    check_output(archive)


def _pack(
    runs: Sequence[SealedRun], files: Mapping[str, bytes], archive: Path, description: str, signing_key: Path | None
) -> None:
    """The archive of runs and files, with their checksums and, where a key is given, a signature."""
    with tempfile.TemporaryDirectory(prefix="harness-publish-") as temporary:
        folder = Path(temporary)
        for run in _with_earlier_tries(runs):
            run.verify()
            shutil.copytree(run.path, folder / RUNS / run.experiment / run.condition / run.path.name)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        (folder / CRATE).write_text(_crate(folder, runs[0].manifest.title, description), encoding="utf-8")
        sums = "".join(f"{file_sha256(folder / name)}  {name}\n" for name in files_of(folder))
        (folder / SUMS).write_text(sums, encoding="utf-8")
        if signing_key is not None:
            sign_file(folder / SUMS, signing_key)
        unfinished = archive.with_name(f".{archive.name}.tmp")
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as out:
            for name in files_of(folder):
                out.write(folder / name, name)
        unfinished.replace(archive)


def check(archive: Path, signers: Path | None = None) -> Checked:
    """Check an archive, or a folder that one was unpacked into, by its content alone.

    signers: ssh's file of allowed signers, for names instead of keys. Raises RecordsError that names what does not
    hold.
    """
    with tempfile.TemporaryDirectory(prefix="harness-publish-") as temporary:
        return _checked(archive, checked_files(archive, Path(temporary)), signers)


def _checked(archive: Path, folder: Path, signers: Path | None) -> Checked:
    if (folder / EXPLORATORY).is_file():
        hint = "Read it: harness verify ARCHIVE; harness table ARCHIVE"
        raise SpecError(f"is {EXPLORATORY_NOTE}, and nothing can be proven of them", where=str(archive), hint=hint)
    proof = read_proof(folder)
    runs = _runs(archive, folder)
    frozen = check_sealed_runs(runs)
    if frozen is None or (folder / FROZEN).read_bytes() != runs[0].file(layout.FROZEN).read_bytes():
        raise wrong(archive, "its frozen file is not the one its runs were made under")
    judgement = decide(runs, proof=proof)
    unlike = _unlike(archive, folder, _words(frozen, judgement, proof))
    proven, unproven, what = _proven(frozen, judgement, proof), [*unlike], "the archive: seals, ledger and verdict"
    if (signature := folder / SIGNATURE_OF_SUMS).is_file():
        proven.append(f"signed {what}: {check_signature(folder / SUMS, signature, signers)}")
    else:
        unproven.append(f"who made {what}: it is not signed")
    # A signature by a key that nobody named is anybody's.
    unheld = () if signers is not None and signature.is_file() else tuple(unlike)
    return Checked(judgement, tuple(proven), (*unproven, _times(proof), *_ALWAYS_UNPROVEN), frozen, unheld)


def _proven(frozen: Preregistration, judgement: Judgement, proof: Proof) -> list[str]:
    account = judgement.account
    assert account is not None, "frozen runs have an account"
    num_invalid = len(account.of_state("INVALID"))
    standing = f", {num_invalid} of them INVALID" if num_invalid else ""
    return [
        f"{account.num_sealed} of {len(frozen.plans)} frozen runs{standing}, each file as it was sealed "
        f"({judgement.origin.rstrip('.')})",
        f"plans, predictions and criteria are those of {frozen.digest[:12]}",
        f"the ledger of {len(proof.entries)} entries stands behind commit {proof.claims.commit[:12]}",
    ]


def _made_by() -> dict[str, str]:
    """The harness that writes an archive: an equal one writes equal words."""
    code = hashlib.sha256((source_sha256(HARNESS_FOLDER) + style()).encode()).hexdigest()
    return {"version": harness.__version__, "code_sha256": code}


def _words(frozen: Preregistration, judgement: Judgement, proof: Proof) -> dict[str, bytes]:
    """The files that say what was decided, for programs and for people."""
    made_by, unproven = _made_by(), [_times(proof), *_ALWAYS_UNPROVEN]
    name = f"rbln-harness {made_by['version']} (code {made_by['code_sha256'][:12]})"
    page = archive_page(frozen, judgement, _proven(frozen, judgement, proof), unproven, name)
    return {VERDICT: _verdict(judgement).encode(), PAGE: page.encode()}


def _unlike(archive: Path, folder: Path, words: Mapping[str, bytes]) -> list[str]:
    """That verdict and page cannot be held to what this version writes, since another version wrote them.

    Raises RecordsError where they say something else than the runs give.
    """
    present = set(files_of(folder))
    unlike = [name for name, text in words.items() if name not in present or (folder / name).read_bytes() != text]
    if not unlike:
        return []
    not_given = f"its {unlike[0]} is not what its runs give"
    try:
        written: dict[str, Any] = json.loads((folder / VERDICT).read_bytes())
        then, now, made_by = _outcomes(written), _outcomes(json.loads(words[VERDICT])), dict(written["made_by"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise wrong(archive, f"{not_given}: it cannot be read") from error
    if then != now:
        raise wrong(archive, f"{not_given}: it says {then}, this version says {now}")
    if made_by == _made_by():
        raise wrong(archive, not_given)
    version = made_by.get("version")
    return [f"the words of {VERDICT} and {PAGE}: another version of the harness ({version}) wrote them"]


def _outcomes(verdict: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(rule, subject, outcome, label) of every decision in a verdict."""
    return [(one["rule"], one["subject"], one["outcome"], one["label"]) for one in verdict["decisions"]]


_ALWAYS_UNPROVEN = (
    "that no other clone of the repository made other runs of this freeze",
    "that nothing was measured with these plans before the freeze",
    "that the machine reported the truth to the harness",
)


def _times(proof: Proof) -> str:
    remotes = [f"branch {name} had the freeze when this was published (ask its host)" for name in proof.claims.remotes]
    attested = ", ".join(remotes) or "nobody else attests a time"
    return f"since when: times are those of the machine that froze and ran; {attested}"


def _verdict(judgement: Judgement) -> str:
    """The verdict as JSON: decisions with their blocks, the origin, and what became of every frozen run."""
    account = judgement.account
    assert account is not None, "frozen runs have an account"
    names = ("rule", "subject", "outcome", "label", "reason", "num_blocks")
    states = {state: len(account.of_state(state)) for state in ("valid", "INVALID", "missing")}
    verdict = {
        "format": FORMAT,
        "made_by": _made_by(),
        "origin": judgement.origin,
        "decisions": [{name: getattr(decision, name) for name in names} for decision in judgement.decisions],
        "blocks": {"frozen": account.num_blocks, "valid": account.num_valid_blocks},
        "runs": {"frozen": len(account.runs), **states},
        "repetitions": account.repetitions,
        "invalid_or_repeated": [
            {**asdict(run), "retries_left": run.retries_left}
            for run in account.runs
            if run.state == "INVALID" or run.repeated
        ],
        "aborts": judgement.aborts,
    }
    return json.dumps(verdict, indent=1) + "\n"


RO_CRATE = "https://w3id.org/ro/crate/1.1"


CONFIRMATORY = "Confirmatory runs with their preregistration, ledger and verdict"


def _crate(folder: Path, title: str, description: str) -> str:
    """RO-Crate metadata."""
    names = files_of(folder)
    graph: list[dict[str, Any]] = [
        {"@id": CRATE, "@type": "CreativeWork", "about": {"@id": "./"}, "conformsTo": {"@id": RO_CRATE}},
        {
            "@id": "./",
            "@type": "Dataset",
            "name": title,
            "description": description,
            "datePublished": utc_now().date().isoformat(),
            "license": "not stated",
            "hasPart": [{"@id": name} for name in names],
        },
    ]
    for name in names:
        size, sha256 = str((folder / name).stat().st_size), file_sha256(folder / name)
        graph.append({"@id": name, "@type": "File", "contentSize": size, "sha256": sha256})
    return json.dumps({"@context": f"{RO_CRATE}/context", "@graph": graph}, indent=1) + "\n"


def _runs(archive: Path, folder: Path) -> list[SealedRun]:
    """The verified runs of an unpacked archive, which holds no other file below its folder of runs."""
    store = RunStore(folder / RUNS)
    store.verify()
    runs = store.sealed()
    if len({run.experiment for run in runs}) != 1:
        raise wrong(archive, "does not hold the runs of one experiment")
    known = {run.path.relative_to(folder).as_posix() for run in _with_earlier_tries(runs)}
    for name in files_of(folder):
        if name.startswith(f"{RUNS}/") and "/".join(name.split("/")[:4]) not in known:
            raise wrong(archive, f"holds {name!r}, which belongs to none of its runs")
    return runs


def _with_earlier_tries(runs: Sequence[SealedRun]) -> Iterator[SealedRun]:
    """The runs, each before the INVALID runs that it repeats."""
    for run in runs:
        yield run
        yield from RunStore(run.path.parents[2]).earlier_tries(run)
