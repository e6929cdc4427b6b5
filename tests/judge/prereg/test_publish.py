"""A published archive: what a stranger is told of an honest one, and that a changed one is refused in one line."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import subprocess
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from html import unescape
from pathlib import Path
from shutil import which

import pytest
from typer.testing import CliRunner

from harness.analysis.stats import Interval
from harness.cli.tree import app
from harness.errors import RecordsError, SpecError
from harness.judge.decisions.decide import Decision, Outcome
from harness.judge.prereg import check_published, publish, publish_exploratory
from harness.judge.prereg.page import archive_page
from harness.judge.prereg.repository import Repository, sign_file
from harness.measure.records import layout
from harness.measure.records.manifest import EarlierTry, load_manifest
from harness.measure.records.store import RunStore
from tests.docs.pages import lines_that_the_review_guide_lacks
from tests.judge.prereg.test_authorize import harness
from tests.support import command_line
from tests.support.sshd import make_key
from tests.support.workplace import STALLED, Workplace

needs_ssh_keygen = pytest.mark.skipif(which("ssh-keygen") is None, reason="signing needs ssh-keygen")


@pytest.fixture(scope="module")
def archive(measured_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "small.zip"
    publish(Workplace(measured_repository).sealed, path)
    return path


def rewritten(archive: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """The archive with its files changed."""
    with zipfile.ZipFile(archive) as packed:
        files = {name: packed.read(name) for name in packed.namelist()}
    change(files)
    other = archive.with_name("other.zip")
    with zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as packed:
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


def test_the_check_says_origin_blocks_invalid_runs_and_repetitions(with_invalid: Path) -> None:
    told = command_line.harness("prereg", "check", str(with_invalid), environment={"COLUMNS": "200"})
    assert told.returncode == 0, told.stderr
    for words in (
        "Predicted: simulated in virtual time",
        "PASS  mine: more (2 of 3 blocks)",
        f"INVALID base/1: {STALLED}; 1 of 1 repetitions used",
        f"repeated more/2, valid now; was INVALID: {STALLED}",
        "repetitions: at most 1 of an INVALID run, 2 used",
        "started and not sealed: base/0 at",
        "question: Does one more compiled size <b> cost less?",
        "criteria: mine (cost-validation), frozen at",
        "predicted: more costs",
        "proven: 6 of 6 frozen runs, 1 of them INVALID, each file as it was sealed (Predicted: simulated",
        "not proven: that the machine reported the truth to the harness",
    ):
        assert words in told.stdout
    assert len(told.stdout.splitlines()) <= 23
    assert lines_that_the_review_guide_lacks(told.stdout) == []
    assert lines_that_the_review_guide_lacks("sealed: a new line\n") == ["sealed: a new line"]


def test_the_verdict_for_programs_has_the_same(with_invalid: Path) -> None:
    with zipfile.ZipFile(with_invalid) as packed:
        verdict = json.loads(packed.read("verdict.json"))
    assert verdict["origin"].startswith("Predicted: simulated")
    assert verdict["decisions"][0]["num_blocks"] == 2
    assert verdict["blocks"] == {"frozen": 3, "valid": 2}
    assert verdict["runs"] == {"frozen": 6, "valid": 5, "INVALID": 1, "missing": 0}
    assert verdict["repetitions"] == {"allowed_per_run": 1, "used": 2, "unused": 0}
    assert [(run["label"], run["state"]) for run in verdict["invalid_or_repeated"]] == [
        ("base/1", "INVALID"),
        ("more/2", "valid"),
    ]


def test_the_page_in_the_archive_says_the_same_to_a_reader(with_invalid: Path) -> None:
    with zipfile.ZipFile(with_invalid) as packed:
        page = packed.read("index.html").decode()
    text = " ".join(unescape(re.sub(r"<(style).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL)).split())
    for words in (
        "Predicted: simulated in virtual time",
        "Does one more compiled size <b> cost less?",
        "more : decode buckets 1, 2, 3, 4, 8",
        "base, more: 3 plans, ",
        "PASS mine : more (2 of 3 blocks)",
        "5 valid, 1 INVALID",
        f"INVALID base/1: {STALLED}; 1 of 1 repetitions used; was INVALID: {STALLED}",
        f"repeated more/2, valid now; was INVALID: {STALLED}",
        "max_error 0.03",
        "ratio to its baseline",
        "6 of 6 frozen runs, 1 of them INVALID",
        "that no other clone of the repository made other runs",
        "harness prereg check .",
    ):
        assert words in text, words
    assert "http" not in re.sub(r"http-equiv", "", page), "it loads nothing"


def test_the_page_draws_the_interval_of_a_cost_ratio_below_its_sentence(with_invalid: Path) -> None:
    checked = check_published(with_invalid)
    interval = Interval(0.95, 0.92, 0.99, 0.95, "t", "block", 6, 0, 1)
    decision = Decision("mine", "more vs base", Outcome.PASS, "why", intervals={"ratio": interval}, sentence="5 % less")
    page = archive_page(checked.frozen, replace(checked.judgement, decisions=(decision,)), (), (), "a test")
    places = [page.index(words) for words in ("5 % less: PASS", "cost ratio 0.9500", ">why<", "max_error")]
    assert places == sorted(places)


def test_all_intervals_of_a_page_are_drawn_on_one_scale(with_invalid: Path) -> None:
    checked = check_published(with_invalid)
    ends = ((0.83, 0.80, 0.86), (0.994, 0.991, 0.997))
    decisions = tuple(
        Decision(
            "mine", f"{low}", Outcome.PASS, "why", intervals={"ratio": Interval(at, low, high, 0.95, "t", "b", 6, 0, 1)}
        )
        for at, low, high in ends
    )
    page = archive_page(checked.frozen, replace(checked.judgement, decisions=decisions), (), (), "a test")
    bars = re.findall(r'<line x1="([\d.]+)%" x2="([\d.]+)%" y1="16"', page)
    widths = [float(last) - float(first) for first, last in bars]
    assert widths[0] / widths[1] == pytest.approx(10, rel=0.02)


def test_an_open_experiment_is_published_withheld(still_open: Workplace) -> None:
    place = still_open
    judgement = publish(place.sealed, place.root / "small.zip")
    assert [one.outcome.value for one in judgement.decisions] == ["WITHHELD"]
    assert check_published(place.root / "small.zip").judgement.decisions == judgement.decisions


def test_a_frozen_file_that_was_edited_since_changes_nothing_in_the_archive(measured: Workplace) -> None:
    measured.frozen.write_text(measured.frozen.read_text()[:-20])
    assert publish(measured.sealed, measured.root / "small.zip").notes
    check_published(measured.root / "small.zip").judgement.require_passed()


def test_an_unpacked_archive_is_checked_where_it_lies(archive: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(tmp_path / "there")
    assert check_published(tmp_path / "there") == check_published(archive)
    (tmp_path / "there/index.html").write_text("PASS")
    with pytest.raises(RecordsError, match=r"index\.html differs from its checksum"):
        check_published(tmp_path / "there")


def _sum_again(files: dict[str, bytes]) -> None:
    """Write checksums that fit the files as they are now."""
    sums = (f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(files.items()))
    files["SHA256SUMS"] = "".join(line for line in sums if not line.endswith("  SHA256SUMS\n")).encode()


def _of_another_version(verdict: bytes) -> bytes:
    return verdict.replace(json.loads(verdict)["made_by"]["code_sha256"].encode(), b"0" * 64)


def _with_claim(name: str, value: object) -> Callable[[bytes], bytes]:
    return lambda proof: json.dumps({**json.loads(proof), name: value}).encode()


Content = Callable[[bytes], bytes]
NO_FILE = "which is no file of a published experiment"
# A file, its other content (None: it is gone), and what is said of it; first under the checksums as they were.
AS_SUMMED: list[tuple[str, Content | None, str]] = [
    ("runs/small/base/0/plan.jsonl", lambda plan: plan + b"x", "plan.jsonl differs from its checksum"),
    ("runs/small/base/0/more", lambda _: b"x", "is missing or was added"),
    ("proof.json", None, "lacks proof.json"),
    ("../outside", lambda _: b"x", NO_FILE),
    ("SHA256SUMS", None, "lacks SHA256SUMS"),
]
SUMMED_AGAIN: list[tuple[str, Content | None, str]] = [
    ("verdict.json", lambda verdict: verdict.replace(b"PASS", b"FAIL"), "its verdict.json is not what its runs give"),
    (
        "verdict.json",
        lambda verdict: _of_another_version(verdict).replace(b"PASS", b"FAIL"),
        "its verdict.json is not what its runs give: it says",
    ),
    ("verdict.json", lambda _: b"\xff", "its verdict.json is not what its runs give"),
    ("verdict.json", None, "lacks verdict.json"),
    ("index.html", lambda page: page.replace(b"PASS", b"FAIL"), "its index.html is not what its runs give"),
    ("index.html", None, "its index.html is not what its runs give"),
    ("notes.txt", lambda _: b"x", f"'notes.txt', {NO_FILE}"),
    ("runs/small/base/0.partial/notes.txt", lambda _: b"x", "notes.txt', which belongs to none of its runs"),
    (
        "runs/small/base/0/plan.jsonl",
        lambda plan: plan + bytes(128 << 20),
        r"would unpack to \d+ bytes, the limit for its size is 67108864",
    ),
    ("proof.json", _with_claim("commits", 5), "has no readable proof.json"),
    ("proof.json", _with_claim("commit", "--help"), "has no readable proof.json"),
    ("proof.json", _with_claim("ledger", None), "its verdict.json is not what its runs give"),
    ("proof.pack", None, "has no proof.pack: an earlier version wrote it"),
    ("proof.pack", lambda pack: pack[:-30], "has no readable proof.json"),
]


@pytest.mark.parametrize(
    ("name", "content", "words", "are_sums_new"),
    [(*row, are_new) for rows, are_new in ((AS_SUMMED, False), (SUMMED_AGAIN, True)) for row in rows],
)
def test_an_archive_that_was_changed_is_refused(
    archive: Path, name: str, content: Content | None, words: str, *, are_sums_new: bool
) -> None:
    def change(files: dict[str, bytes]) -> None:
        before = files.pop(name, b"")
        files.update({} if content is None else {name: content(before)})
        if are_sums_new:
            _sum_again(files)

    with pytest.raises(RecordsError, match=words):
        check_published(rewritten(archive, change))


def test_git_alone_reads_the_proof_and_finds_no_file_and_no_history_in_it(archive: Path) -> None:
    with zipfile.ZipFile(archive) as packed:
        pack, claims = packed.read("proof.pack"), json.loads(packed.read("proof.json"))
    repository = Repository.of_pack(claims["commit"], pack)
    names = subprocess.run(
        ["git", "-C", str(repository.root), "cat-file", "--batch-check=%(objecttype)", "--batch-all-objects"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    # The freeze and its ledger of 12 entries; the trees of the root, plans and plans/frozen.
    assert Counter(names) == {"commit": 13, "tree": 3}


def test_words_of_another_version_are_not_held_to_its_own_and_that_is_said(archive: Path) -> None:
    def change(files: dict[str, bytes]) -> None:
        files["verdict.json"] = _of_another_version(files["verdict.json"]).replace(b"channels", b"both channels")
        _sum_again(files)

    forged = rewritten(archive, change)
    checked = check_published(forged)
    assert any("another version of the harness (0.1.0) wrote them" in claim for claim in checked.unproven)
    told = command_line.harness("prereg", "check", str(forged), environment={"COLUMNS": "200"})
    assert told.returncode == 5
    assert told.stdout.startswith("not proven: the words of verdict.json and index.html: another version")
    assert "the archive is whole; decision: PASS" in told.stdout
    assert command_line.harness("prereg", "check", str(archive)).returncode == 0


@needs_ssh_keygen
def test_a_named_signer_answers_for_the_words_of_another_version(archive: Path, tmp_path: Path) -> None:
    key, signers = tmp_path / "key", tmp_path / "signers"
    make_key(key)
    signers.write_text(f"somebody {key.with_suffix('.pub').read_text()}")

    def change(files: dict[str, bytes]) -> None:
        files["verdict.json"] = _of_another_version(files["verdict.json"])
        _sum_again(files)
        (tmp_path / "SHA256SUMS").write_bytes(files["SHA256SUMS"])
        files["SHA256SUMS.sig"] = sign_file(tmp_path / "SHA256SUMS", key).read_bytes()

    signed = rewritten(archive, change)
    assert check_published(signed).unheld
    assert check_published(signed, signers).unheld == ()


def test_an_archive_with_a_few_changed_bytes_is_refused_or_says_the_same(archive: Path) -> None:
    content = archive.read_bytes()
    honest = check_published(archive)
    generator = random.Random(1)
    for _ in range(100):
        changed = bytearray(content)
        for place in generator.sample(range(len(content)), generator.randint(1, 5)):
            changed[place] ^= generator.randint(1, 255)
        other = archive.with_name("other.zip")
        other.write_bytes(changed)
        # A byte that unpacking does not look at changes nothing: a date, or a name that is written twice.
        with suppress(RecordsError):
            assert check_published(other) == honest


def test_invalid_runs_that_were_repeated_are_published_too(measured: Workplace) -> None:
    run = measured.sealed[0]
    earlier = shutil.copytree(run.path, run.path.with_name(f"0{layout.RETRIED}0"))
    invalid = run.manifest.model_copy(update={"status": "invalid", "invalid_reasons": ("late",)})
    (earlier / layout.MANIFEST).write_text(invalid.to_json())
    tried = EarlierTry(folder=earlier.name, seal=load_manifest(earlier / layout.MANIFEST).seal, invalid_reasons=())
    again = run.manifest.model_copy(update={"earlier_tries": (tried,)})
    (run.path / layout.MANIFEST).write_text(again.to_json())
    path = measured.root / "small.zip"
    judgement = publish(RunStore(measured.runs).sealed("small"), path)
    checked = check_published(path)
    assert checked.judgement == judgement
    assert checked.proven[0].startswith("6 of 6 frozen runs")
    with zipfile.ZipFile(path) as packed:
        assert f"runs/small/base/{earlier.name}/manifest.json" in packed.namelist()


def test_exploratory_runs_are_published_as_such_alone(place: Workplace) -> None:
    runs, archive = place.run_exploratory(), place.root / "small.zip"
    with pytest.raises(SpecError, match=r"exploratory.*--exploratory"):
        publish(runs, archive)

    publish_exploratory(runs, archive)
    said = "exploratory: nothing was fixed before these runs, so they decide nothing"
    named = str(archive)
    for words in ("verify --runs", "table small --runs", "verify", "table"):
        done = CliRunner().invoke(app, [*words.split(), named], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        assert said in done.output
    with pytest.raises(SpecError, match="nothing can be proven of them"):
        check_published(archive)


def test_frozen_runs_are_not_published_as_exploratory(measured: Workplace) -> None:
    with pytest.raises(SpecError, match="these runs were frozen"):
        publish_exploratory(measured.sealed, measured.root / "small.zip")


@needs_ssh_keygen
def test_the_signature_of_an_archive_is_verified_by_name_and_by_key(place: Workplace) -> None:
    key, stranger = (place.root.parent / name for name in ("key", "stranger"))
    for path in (key, stranger):
        make_key(path)
    runs = place.run_confirmatory(place.freeze().path)
    publish(runs, place.root / "small.zip", signing_key=key)
    signers = place.root.parent / "signers"
    signers.write_text(f"me@example.invalid {key.with_suffix('.pub').read_text()}")
    told = harness(place, "prereg", "check", "small.zip", "--signers", str(signers))
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("me@example.invalid") == 1
    assert "SHA256:" in "".join(check_published(place.root / "small.zip").proven)
    signers.write_text(f"other@example.invalid {stranger.with_suffix('.pub').read_text()}")
    refused = harness(place, "prereg", "check", "small.zip", "--signers", str(signers))
    assert refused.returncode == 1
    assert "its signature does not hold" in refused.stderr
