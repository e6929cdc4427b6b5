"""Nineteen ways to cheat a frozen decision, each tried: what is noticed, and what cannot be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.errors import HarnessError
from harness.judge.decisions.decide import Outcome
from harness.judge.prereg import Preregistration, authorize, decide
from harness.measure.records import layout
from harness.measure.records.disk import file_entry
from harness.measure.records.manifest import Manifest
from harness.measure.records.run import SealedRun
from harness.measure.records.store import RunStore
from harness.runner import run_experiment
from tests.judge.prereg.conftest import entered
from tests.support.workplace import Workplace, ends_after_one_run


def verdict(place: Workplace) -> str:
    """What the decision says: PASS, WITHHELD with its reason, or the one line that refuses the records."""
    try:
        (decision,) = decide(RunStore(place.runs).sealed("small")).decisions
    except HarnessError as error:
        return str(error)
    return (
        decision.outcome.value if decision.outcome is Outcome.PASS else f"{decision.outcome.value}: {decision.reason}"
    )


def forge(run: Path, **changes: Any) -> None:
    """Edit a manifest and seal it again, with hashes that fit the files as they are now."""
    manifest = Manifest.model_validate_json((run / layout.MANIFEST).read_bytes())
    table = {**manifest.model_dump(mode="json"), **changes}
    table["files"] = {name: file_entry(run / name).model_dump() for name in manifest.files}
    (run / layout.MANIFEST).write_text(Manifest.model_validate(table).to_json())


def head(place: Workplace) -> str:
    """The ledger's reference."""
    return place.git("for-each-ref", "--format=%(refname)", "refs/harness").strip()


def drop_one_and_copy_another(place: Workplace) -> None:
    shutil.rmtree(place.runs / "small/base/1")
    shutil.copytree(place.runs / "small/base/0", place.runs / "small/base/1")
    forge(place.runs / "small/base/1", replicate=1)


def swap_conditions(place: Workplace) -> None:
    base, more, aside = (place.runs / "small" / name for name in ("base", "more", "aside"))
    base.rename(aside)
    more.rename(base)
    aside.rename(more)
    for condition in ("base", "more"):
        for replicate in range(3):
            forge(place.runs / "small" / condition / str(replicate), condition=condition)


def rewrite_the_frozen_copies(place: Workplace) -> None:
    content = Preregistration.model_validate_json(place.frozen.read_text())
    (rule,) = content.rules
    loose = rule.model_copy(update={"rule": rule.rule.model_copy(update={"max_error": 9.0})})
    text = content.model_copy(update={"rules": (loose,), "digest": ""}).sealed().to_json()
    for run in RunStore(place.runs).sealed("small"):
        (run.path / layout.FROZEN).write_text(text)
        record = run.manifest.model_dump(mode="json")["preregistration"]
        forge(run.path, preregistration={**record, "sha256": file_entry(run.path / layout.FROZEN).sha256})


def loosen_with_a_second_commit(place: Workplace) -> None:
    place.frozen.write_text(place.frozen.read_text().replace(" ", "  ", 1))
    place.commit_all("a little looser")
    place.frozen.write_text(place.frozen.read_text().replace("  ", " ", 1))
    place.commit_all("as it was")


def edit_records_and_seal_again(place: Workplace) -> None:
    run = place.runs / "small/base/0"
    path = run / layout.table_path("requests")
    requests = pq.ParquetFile(path).read()
    sooner = pa.chunked_array([[done_ns - 1_000_000 for done_ns in requests["done_ns"].to_pylist()]])
    place_of = requests.schema.get_field_index("done_ns")
    pq.write_table(requests.set_column(place_of, requests.schema.field("done_ns"), sooner), path)
    forge(run)


def measure_again_elsewhere(place: Workplace) -> None:
    preregistration, authorization = authorize(place.frozen)
    run_experiment(preregistration.experiment, runs_root=place.root / "runs" / "elsewhere", authorization=authorization)


def delete_and_resume(place: Workplace) -> None:
    shutil.rmtree(place.runs / "small/more/2")
    preregistration, authorization = authorize(place.frozen, runs_root=place.runs)
    run_experiment(preregistration.experiment, runs_root=place.runs, authorization=authorization, resume=True)


def delete_the_ledger(place: Workplace) -> None:
    place.git("update-ref", "-d", head(place))


def wind_the_ledger_back(place: Workplace) -> None:
    """Take the last run out of the ledger, delete it and make it once more."""
    ref = head(place)
    place.git("update-ref", ref, f"{ref}~2")
    shutil.rmtree(sorted((place.runs / "small").glob("*/2"), key=lambda run: run.stat().st_mtime)[-1])
    preregistration, authorization = authorize(place.frozen, runs_root=place.runs)
    run_experiment(preregistration.experiment, runs_root=place.runs, authorization=authorization, resume=True)


def backdate_the_freeze(place: Workplace) -> None:
    for run in RunStore(place.runs).sealed("small"):
        record = run.manifest.model_dump(mode="json")["preregistration"]
        forge(run.path, preregistration={**record, "committed_at_s": record["committed_at_s"] - 10**6})


def call_an_invalid_run_valid(place: Workplace) -> None:
    forge(place.runs / "small/base/0", status="valid", findings=[], invalid_reasons=[], timings={})


def call_a_bad_run_invalid(place: Workplace) -> None:
    forge(place.runs / "small/base/0", status="invalid", invalid_reasons=["rearrival-late: I did not like it"])


def loosen_the_limits(place: Workplace) -> None:
    run = place.runs / "small/base/0"
    requested = json.loads((run / layout.MANIFEST).read_bytes())["requested"]
    requested["limits"]["rearrival_lag_p99_ms"] = 1e9
    forge(run, requested=requested)


def take_the_repository_away(place: Workplace) -> None:
    (place.root / ".git").rename(place.root.parent / "hidden")


def clone_the_repository_without_its_freeze(place: Workplace) -> None:
    take_the_repository_away(place)
    place.git("init", "-q")


def exploratory_runs_dressed_up(place: Workplace) -> None:
    """Measure without an authorization, and copy the record of the freeze into the manifests."""
    record = RunStore(place.runs).sealed("small")[0].manifest.model_dump(mode="json")["preregistration"]
    shutil.rmtree(place.runs)
    for run in run_experiment(place.spec, runs_root=place.runs).runs:
        shutil.copy(place.frozen, run.path / layout.FROZEN)
        table = run.manifest.model_dump(mode="json")
        files = {**table["files"], layout.FROZEN: file_entry(place.frozen).model_dump()}
        (run.path / layout.MANIFEST).write_text(
            Manifest.model_validate({**table, "preregistration": record, "files": files}).to_json()
        )


Cheat = Callable[[Workplace], None]
NOTICED: dict[Cheat, str] = {
    drop_one_and_copy_another: "was made from plan|belongs to run",
    swap_conditions: "was made with another|was made from plan",
    rewrite_the_frozen_copies: "WITHHELD: the frozen file is not in commit",
    loosen_with_a_second_commit: "WITHHELD: the frozen file was committed 3 times",
    edit_records_and_seal_again: "WITHHELD: base/0 is not the run that was sealed",
    delete_the_ledger: "WITHHELD: its ledger is not here",
    wind_the_ledger_back: "WITHHELD: 2 entries were taken out of the ledger",
    backdate_the_freeze: "WITHHELD: the runs name another time of the freeze than its commit",
    call_an_invalid_run_valid: "WITHHELD: base/0 is not the run that was sealed",
    call_a_bad_run_invalid: "WITHHELD: base/0 is not the run that was sealed",
    loosen_the_limits: "was made with another limits than was frozen",
    clone_the_repository_without_its_freeze: "does not have commit",
    take_the_repository_away: "WITHHELD: nothing shows when these runs were frozen",
    exploratory_runs_dressed_up: "WITHHELD: base/0 is not the run that was sealed",
}


@pytest.fixture(scope="module")
def judged_repository(measured_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An honest experiment, looked at once: it passes."""
    with pytest.MonkeyPatch.context() as patched:
        place = entered(measured_repository, tmp_path_factory.mktemp("judged"), patched)
        assert verdict(place) == "PASS"
    return place.root


@pytest.mark.parametrize("cheat", NOTICED, ids=lambda cheat: cheat.__name__)
def test_a_cheat_is_noticed(
    judged_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cheat: Cheat
) -> None:
    place = entered(judged_repository, tmp_path, monkeypatch)
    cheat(place)
    told = verdict(place)
    assert not told.startswith("PASS")
    assert any(words in told for words in NOTICED[cheat].split("|")), told


@pytest.mark.parametrize("cheat", [measure_again_elsewhere, delete_and_resume], ids=lambda cheat: cheat.__name__)
def test_a_run_that_was_sealed_once_is_not_made_again_wherever_its_records_lie(
    measured: Workplace, cheat: Cheat
) -> None:
    with pytest.raises(HarnessError, match=r"was sealed already on .*: a frozen run is made once"):
        cheat(measured)


def test_a_run_that_is_started_until_it_pleases_decides_nothing(place: Workplace) -> None:
    frozen = place.freeze().path
    preregistration, authorization = authorize(frozen, runs_root=place.runs)
    for _ in range(3):
        authorization.ledger.start(authorization.planned.runs[0])
    run_experiment(preregistration.experiment, runs_root=place.runs, authorization=authorization)
    assert "WITHHELD: base/0 was started 4 times, the limit is 3" in verdict(place)


def test_a_verdict_that_is_looked_at_first_cannot_be_kept_or_repeated_away(still_open: Workplace) -> None:
    """Load the machine in a block that displeases, look, and choose whether to repeat it."""
    place, frozen = still_open, still_open.frozen
    assert verdict(place).startswith("WITHHELD: base/1 is INVALID")
    # To take the INVALID run away, so that its block is only missing, is no way out.
    shutil.rmtree(place.runs / "small/base/1")
    assert verdict(place).startswith("WITHHELD: 5 of 6 frozen runs are sealed")
    place.run_confirmatory(frozen, busy=["base/1"], resume=True)
    shutil.rmtree(place.runs / "small/base/1")
    with pytest.raises(HarnessError, match="was sealed already"):
        place.run_confirmatory(frozen, resume=True)


def _interrupted_and_resumed(place: Workplace, frozen: Path) -> tuple[SealedRun, ...]:
    _, authorization = authorize(frozen, runs_root=place.runs)
    # One that was killed leaves a start without an end.
    authorization.ledger.start(authorization.planned.runs[0])
    place.run_confirmatory(frozen, **ends_after_one_run())
    return place.run_confirmatory(frozen, resume=True)


def test_an_honest_experiment_passes_interrupted_resumed_and_moved(place: Workplace, tmp_path: Path) -> None:
    runs = _interrupted_and_resumed(place, place.freeze().path)
    assert len(runs) == 6
    judgement = decide(runs).require_passed()
    assert verdict(place) == "PASS"
    assert [told.split(" at ")[0] for told in judgement.aborts] == ["base/0"]
    assert "ended without an entry" in judgement.aborts[0]
    # On another machine: a clone with its ledger, and the runs in some folder of their own.
    place.git("clone", "-q", str(place.root), str(tmp_path / "clone"))
    Workplace(tmp_path / "clone").git("fetch", "-q", "origin", "refs/harness/*:refs/harness/*")
    moved = tmp_path / "moved"
    place.runs.rename(moved)
    judgement = decide(RunStore(moved).sealed("small"), repository=tmp_path / "clone")
    assert [one.outcome for one in judgement.decisions] == [Outcome.PASS]


def test_runs_of_two_processes_stand_in_one_chain(place: Workplace) -> None:
    _, authorization = authorize(place.freeze().path)
    _, other = authorize(place.root / "plans/frozen/small.json")
    first, second = authorization.planned.runs[:2]
    authorization.ledger.aborted(authorization.ledger.start(first), first.key, "a")
    other.ledger.aborted(other.ledger.start(second), second.key, "b")
    assert [entry.number for entry in authorization.ledger.chain().values()] == [0, 1, 2, 3]
    assert [entry.event for entry in other.ledger.chain().values()] == ["start", "aborted", "start", "aborted"]
