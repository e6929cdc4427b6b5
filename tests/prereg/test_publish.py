"""A published archive: what a stranger is told of an honest one, and that a changed one is refused in one line."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from shutil import which

import pytest

from harness.errors import RecordsError, SpecError
from harness.prereg import check_published, publish
from tests.prereg.test_ticket import harness
from tests.support.workplace import Workplace

needs_ssh_keygen = pytest.mark.skipif(which("ssh-keygen") is None, reason="signing needs ssh-keygen")


@pytest.fixture
def archive(place: Workplace) -> Path:
    path = place.root / "small.zip"
    publish(place.run_confirmatory(place.freeze().path), path)
    return path


def rewritten(archive: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """The archive with its files changed."""
    with zipfile.ZipFile(archive) as packed:
        files = {name: packed.read(name) for name in packed.namelist()}
    change(files)
    other = archive.with_name("other.zip")
    with zipfile.ZipFile(other, "w") as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return other


def test_a_stranger_is_told_what_is_proven_and_what_is_not(archive: Path) -> None:
    checked = check_published(archive)
    checked.judgement.require_passed()
    assert checked.proven[0].startswith("6 of 6 frozen runs")
    assert "the ledger of 12 entries" in checked.proven[2]
    told = "\n".join(checked.unproven)
    assert "it is not signed" in told
    assert "nobody else attests a time" in told
    assert "no other clone" in told


def _flip_a_log(files: dict[str, bytes]) -> None:
    files["runs/small/base/0/server.log"] += b"x"


def _add(files: dict[str, bytes]) -> None:
    files["runs/small/base/0/more"] = b"x"


def _drop(files: dict[str, bytes]) -> None:
    del files["proof.json"]


def _climb(files: dict[str, bytes]) -> None:
    files["../outside"] = b"x"


def _no_sums(files: dict[str, bytes]) -> None:
    del files["SHA256SUMS"]


def _hostile_proof(files: dict[str, bytes]) -> None:
    old = hashlib.sha256(files["proof.json"]).hexdigest().encode()
    files["proof.json"] = files["proof.json"].replace(b'"chain": [', b'"chain": [["x", "no base64"], ')
    new = hashlib.sha256(files["proof.json"]).hexdigest().encode()
    files["SHA256SUMS"] = files["SHA256SUMS"].replace(old, new)


def _other_verdict(files: dict[str, bytes]) -> None:
    old = hashlib.sha256(files["verdict.json"]).hexdigest().encode()
    files["verdict.json"] = files["verdict.json"].replace(b"PASS", b"FAIL")
    new = hashlib.sha256(files["verdict.json"]).hexdigest().encode()
    files["SHA256SUMS"] = files["SHA256SUMS"].replace(old, new)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_flip_a_log, "server.log differs from its checksum"),
        (_add, "is missing or was added"),
        (_drop, "is missing or was added"),
        (_climb, "which is no plain file"),
        (_no_sums, "has no readable SHA256SUMS"),
        (_other_verdict, "its verdict is not what its runs give"),
        (_hostile_proof, "has no readable proof.json"),
    ],
)
def test_an_archive_that_was_changed_is_refused(
    archive: Path, change: Callable[[dict[str, bytes]], None], words: str
) -> None:
    with pytest.raises(RecordsError, match=words):
        check_published(rewritten(archive, change))


def test_what_is_no_archive_says_so(tmp_path: Path) -> None:
    path = tmp_path / "no.zip"
    path.write_bytes(b"PK no")
    with pytest.raises(RecordsError, match="cannot be unpacked"):
        check_published(path)


def test_exploratory_runs_are_not_published(place: Workplace) -> None:
    with pytest.raises(SpecError, match="exploratory"):
        publish(place.run_exploratory(), place.root / "small.zip")


@needs_ssh_keygen
def test_signatures_of_freeze_and_archive_are_verified_by_name_and_by_key(place: Workplace) -> None:
    key, stranger = (place.root.parent / name for name in ("key", "stranger"))
    for path in (key, stranger):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    runs = place.run_confirmatory(place.freeze(signing_key=key).path)
    publish(runs, place.root / "small.zip", signing_key=key)
    signers = place.root.parent / "signers"
    signers.write_text(f"me@example.invalid {key.with_suffix('.pub').read_text()}")
    told = harness(place, "publish", "--check", "small.zip", "--signers", str(signers))
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("me@example.invalid") == 2
    assert "SHA256:" in "".join(check_published(place.root / "small.zip").proven)
    signers.write_text(f"other@example.invalid {stranger.with_suffix('.pub').read_text()}")
    refused = harness(place, "publish", "--check", "small.zip", "--signers", str(signers))
    assert refused.returncode == 1
    assert "its signature does not hold" in refused.stderr
