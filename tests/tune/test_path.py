"""One command goes from an experiment to a confirmed configuration, and on where it was interrupted."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from harness.analysis.summary import summarise
from harness.cli.watch import view
from harness.clock import NS_PER_MS
from harness.errors import RecordsError, ServerError, SpecError
from harness.measure.records.store import RunStore
from harness.model.spec import ExperimentSpec, parse_experiment
from harness.model.spec.base import tomllib
from harness.runner import ExperimentOutcome, run_experiment
from harness.runner.progress import StopFlag
from harness.tune import confirm
from harness.tune.explore import QUICK
from harness.tune.page import TuneResult
from harness.tune.path import Tune, TuneStoppedError

LOSING = {"num_sessions": 8, "wait_cap_s": 20.0}


def experiment(**changes: Any) -> ExperimentSpec:
    table = {
        "name": "small",
        "backend": "sim",
        "base_seed": 771,
        "workload": LOSING,
        "tune": {"may_change": ["kv_slots"]},
        "condition": [{"name": "base"}],
    }
    return parse_experiment(table | changes, where="test")


def perform(spec: ExperimentSpec, folder: Path, until_ns: int, **options: Any) -> ExperimentOutcome:
    assert until_ns > 0
    return run_experiment(spec, runs_root=folder, resume=True, **options)


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """A measurement of six plans at most."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(confirm, "MOST_BLOCKS", 6)
        yield


def tuned(folder: Path, spec: ExperimentSpec | None = None, **given: Any) -> tuple[TuneResult, list[str]]:
    said: list[str] = []
    given = {"perform": perform, **given}
    made = Tune(spec or experiment(), folder / "runs", say=said.append, effort=QUICK.divided(6), **given)
    return made.run(), said


class Whole(NamedTuple):
    """A tune from its beginning to its end, and what the same command then says."""

    folder: Path
    stages: TuneResult
    again: TuneResult
    said: list[str]
    is_untouched: bool


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    stages, _ = tuned(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("manifest.json")}
    again, said = tuned(folder)
    return Whole(
        folder, stages, again, said, {path: path.stat().st_mtime_ns for path in folder.rglob("manifest.json")} == before
    )


@pytest.fixture(scope="module")
def whole(once: Whole) -> Path:
    return once.folder


def test_it_ends_in_a_sentence_a_file_and_the_server_to_start(once: Whole) -> None:
    answer = once.again.answer
    assert answer.state == "confirmed"
    assert answer.sentence.startswith("16 KV slots in place of 8: ")
    assert answer.sentence.endswith(", confirmed (simulated).")
    assert answer.rests.startswith("On 6 new plans (simulated); simulated TTFT p50 ")
    folder = once.folder / "runs" / "small-tune"
    text = (folder / "tuned.toml").read_text(encoding="utf-8")
    assert answer.sentence in text
    assert "harness server emulator --max-num-seqs 8 --decode-buckets 1,2,4,8 --kv-slots 16" in text
    assert tomllib.loads(text)["server"]["kv_slots"] == 16
    assert any("lost reuse: " in line for line in once.said)


def test_the_times_to_tokens_beside_a_measured_answer_are_those_of_its_runs(once: Whole) -> None:
    summary = summarise(RunStore(once.folder / "runs" / "small-tune").sealed("small-confirm"))
    p50_ms = {
        name: figures.of("ttft").at(0.5).value / NS_PER_MS
        for name in ("today", "best")
        if (figures := summary.serving_of(name)) is not None
    }
    said = re.search(r"simulated TTFT p50 (\S+) -> (\S+) ms", once.again.answer.rests)
    assert [float(text.replace(",", "")) for text in said.groups()] == pytest.approx(list(p50_ms.values()), rel=0.01)


def test_watching_shows_the_stage_and_the_runs_of_each_stage(whole: Path) -> None:
    console = Console(width=120, record=True, file=StringIO())
    console.print(view(whole / "runs", 120))
    shown = console.export_text()
    assert "stage: done: confirmed" in shown
    assert re.search(r"small-confirm +\S* *12 ", shown)
    assert re.search(r"small-diagnose +\S* *3 ", shown)


def test_the_same_command_makes_nothing_again_and_says_the_same(once: Whole) -> None:
    assert once.again.answer == once.stages.answer
    assert once.is_untouched


def test_a_key_that_nobody_wrote_is_no_part_of_what_a_tune_asks(whole: Path) -> None:
    asked = json.loads((whole / "runs" / "small-tune" / "tune.json").read_bytes())
    assert asked["experiment"]["workload"] == {"wait_cap_s": 20.0}
    assert "server" not in asked["experiment"]


def test_the_plans_of_the_measurement_are_new_to_everything_before_it(whole: Path) -> None:
    store = RunStore(whole / "runs" / "small-tune")
    diagnosed = {run.manifest.plan_hash for run in store.sealed("small-diagnose")}
    measured = {run.manifest.plan_hash for run in store.sealed("small-confirm")}
    assert len(diagnosed) == 3
    assert len(measured) == 6
    assert not diagnosed & measured


def test_what_was_interrupted_at_any_run_goes_on_to_the_same_answer(once: Whole, tmp_path: Path) -> None:
    stopped = 0
    for _ in range(40):

        def interrupted(spec: ExperimentSpec, folder: Path, until_ns: int, **options: Any) -> ExperimentOutcome:
            stop = StopFlag()
            made: list[str] = []

            def sealed(event: Any) -> None:
                made.extend([event.label] if type(event).__name__ == "RunSealed" else [])
                if len(made) == 3:
                    stop.after_run = True

            return perform(spec, folder, until_ns, stop=stop, on_progress=sealed, **options)

        try:
            stages, _ = tuned(tmp_path, perform=interrupted)
        except TuneStoppedError:
            stopped += 1
            continue
        break
    else:
        pytest.fail("it was never done")
    assert stopped > 3
    assert stages.answer == once.stages.answer


NO_START = ServerError("the server ended while it started", where="best/0", hint="Read server.log")
NO_ROOM = RecordsError("cannot be written (No space left on device)", where="best/0")


# ``make faults`` kills tunes at random, and fills the disk in each stage.
def test_a_stage_that_fails_leaves_no_answer_and_the_same_command_goes_on_to_it(once: Whole, tmp_path: Path) -> None:
    def failing(spec: ExperimentSpec, folder: Path, until_ns: int, **options: Any) -> ExperimentOutcome:
        made: list[str] = []

        def sealed(event: Any) -> None:
            made.extend([event.label] if type(event).__name__ == "RunSealed" else [])
            if len(made) == after:
                raise error

        if not spec.name.endswith(stage):
            return perform(spec, folder, until_ns, **options)
        if not after:
            raise error
        return perform(spec, folder, until_ns, on_progress=sealed, **options)

    folder = tmp_path / "runs" / "small-tune"
    folder.mkdir(parents=True)
    (folder / "explored.json").write_bytes((once.folder / "runs" / "small-tune" / "explored.json").read_bytes())
    for stage, after, error in (("diagnose", 2, NO_ROOM), ("confirm", 0, NO_START)):
        with pytest.raises(type(error), match=re.escape(error.what)):
            tuned(tmp_path, perform=failing)
        assert not (folder / "tuned.toml").exists()
        assert len(RunStore(folder).sealed(f"small-{stage}")) == after
    assert tuned(tmp_path)[0].answer == once.stages.answer


def test_a_server_that_loses_nothing_is_kept_without_a_measurement(tmp_path: Path) -> None:
    server = {"max_num_seqs": 1, "decode_buckets": [1], "kv_slots": 9}
    stages, _ = tuned(tmp_path, experiment(workload={"num_sessions": 1}, server=server))
    assert stages.answer.state == "keep"
    assert stages.answer.sentence.startswith("Keep {1}/1, 9 slots: no configuration within the bounds is predicted")
    assert not (tmp_path / "runs" / "small-tune" / "frozen.json").exists()


def test_another_question_in_the_same_folder_is_refused_and_names_what_differs(whole: Path) -> None:
    with pytest.raises(SpecError, match=r"asked otherwise \(tune differ\)"):
        tuned(whole, experiment(tune={"may_change": ["decode_buckets"]}))
    with pytest.raises(SpecError, match=r"asked otherwise \(experiment differ\)"):
        tuned(whole, experiment(base_seed=9))
    assert tuned(whole, experiment(tune={"may_change": ["kv_slots"], "budget": "2h"}))[0].answer is not None


def test_a_measurement_that_was_changed_after_it_was_frozen_is_refused(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "runs" / "small-tune" / "confirm.toml"
    file.write_text(file.read_text(encoding="utf-8").replace("margin = 0.01", "margin = 0.2"), encoding="utf-8")
    with pytest.raises(RecordsError, match="was changed after it was frozen"):
        tuned(tmp_path)
    frozen = json.loads((tmp_path / "runs" / "small-tune" / "frozen.json").read_bytes())
    assert 0.8 < frozen["predicted"]["best"]["ratio"] < 0.99


def test_what_was_fixed_and_changed_after_the_first_run_is_refused(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "runs" / "small-tune"
    kept = (folder / "frozen.json").read_text()
    (folder / "frozen.json").write_text(re.sub(r'"ratio": [0-9.]+', '"ratio": 0.5', kept))
    with pytest.raises(RecordsError, match=r"frozen\.json: was changed after run .*, which has another hash of it"):
        tuned(tmp_path)
    assert not (folder / "tuned.toml").exists()
    (folder / "frozen.json").write_text(kept)
    assert tuned(tmp_path)[0].answer.state == "confirmed"


def test_confirmed_needs_the_share_within_the_targets_and_the_cost_on_the_same_plans(tmp_path: Path) -> None:
    asked = {"may_change": ["kv_slots"], "percentile": 60}
    stages, _ = tuned(tmp_path, experiment(tune=asked, slo={"ttft_ms": 5000.0}))
    answer = stages.answer
    assert answer.state == "confirmed"
    assert re.search(r"requests [0-9.]+ % .* within the targets, holds; today's: requests", answer.rests)
    confirm_file = tmp_path / "runs" / "small-tune" / "confirm.toml"
    stop = tomllib.loads(confirm_file.read_text(encoding="utf-8"))["stop"]
    assert stop["looks"] == [stop["budget"]], "a share takes all plans"
    assert answer.measured[0].share is not None
    few = replace(answer.measured[0], share=replace(answer.measured[0].share, verdict="open"))
    assert not few.is_better
