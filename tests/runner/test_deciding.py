"""``--until decided`` on the simulator: where it ends, what it says on the way, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.analysis.method.sequential import StopVerdict
from harness.analysis.method.stopping import standing_of
from harness.errors import SpecError
from harness.report import write_report
from harness.runner import ExperimentOutcome, StopFlag, run_experiment
from harness.runner.progress import BlockLooked, ProgressEvent, RunSealed
from harness.spec import ExperimentSpec
from tests.support.experiments import small_experiment

RULE = {"margin": 0.05, "budget": 8, "alpha": 0.2, "looks": [2, 3, 4]}


def experiment(**stop: Any) -> ExperimentSpec:
    """Two grids for three sessions without waits, so far apart that few blocks tell."""
    more = {"name": "more", "treatment": "no-waits", "server": {"decode_buckets": [1, 2, 3, 4, 8]}}
    conditions = [{"name": "base", "treatment": "no-waits", "server": {"decode_buckets": [8]}}, more]
    workload = {"num_sessions": 3}
    return small_experiment(backend="sim", stop={**RULE, **stop}, condition=conditions, workload=workload)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[ExperimentOutcome, list[ProgressEvent]]:
    """The experiment as it was performed once, without a break."""
    root, events = tmp_path_factory.mktemp("straight"), list[ProgressEvent]()
    return run_experiment(experiment(), runs_root=root, on_progress=events.append, until_decided=True), events


def test_an_experiment_ends_at_its_first_decisive_block_and_a_continued_one_stays_ended(straight) -> None:
    outcome, events = straight
    looked = [event.standing for event in events if isinstance(event, BlockLooked)]
    assert outcome.is_decided
    assert outcome.is_complete
    assert outcome.num_planned == 16
    assert [one.num_blocks for one in looked] == [1, 2, 3]
    assert [one.is_decided for one in looked] == [False, False, True]
    assert len(outcome.runs) == 6
    root = outcome.runs[0].path.parents[2]
    again = run_experiment(experiment(), runs_root=root, resume=True, until_decided=True)
    assert (again.num_performed, again.is_decided) == (0, True)


def test_the_report_says_what_was_declared_and_draws_what_was_found(straight, tmp_path: Path) -> None:
    page = write_report(straight[0].runs, tmp_path / "report.html", timelines=()).read_text()
    assert "Declared before the first run: margin 0.05, alpha 0.2, at most 8 blocks, looks at 2, 3, 4 blocks" in page
    assert 'id="sequence-' in page
    assert "--until decided --runs NEW_FOLDER" in page


def test_an_interrupted_experiment_decides_as_if_it_had_not_been(straight, tmp_path: Path) -> None:
    stop = StopFlag()

    def in_the_second_block(event: ProgressEvent) -> None:
        if isinstance(event, RunSealed) and event.label == "more/1":
            stop.request()

    broken = run_experiment(
        experiment(), runs_root=tmp_path, until_decided=True, stop=stop, on_progress=in_the_second_block
    )
    assert (len(broken.runs), broken.is_complete) == (3, False)
    mended = run_experiment(experiment(), runs_root=tmp_path, resume=True, until_decided=True)
    assert standing_of(mended.runs) == standing_of(straight[0].runs)


@pytest.mark.same_everywhere
def test_a_budget_that_runs_out_ends_inconclusive(tmp_path: Path) -> None:
    outcome = run_experiment(experiment(alpha=1e-6, budget=2, looks=[2]), runs_root=tmp_path, until_decided=True)
    found = standing_of(outcome.runs)
    assert found is not None
    assert outcome.is_complete
    assert [one.verdict for one in found.comparisons] == [StopVerdict.INCONCLUSIVE]


@pytest.mark.same_everywhere
def test_a_rule_that_came_after_a_run_is_refused(tmp_path: Path) -> None:
    spec = experiment()
    one_block = spec.model_copy(update={"replicates": 1, "stop": None})
    run_experiment(one_block, runs_root=tmp_path)
    with pytest.raises(SpecError, match="was sealed under no stopping rule"):
        run_experiment(spec, runs_root=tmp_path, resume=True, until_decided=True)


@pytest.mark.same_everywhere
def test_a_rule_that_was_changed_after_a_run_is_refused(tmp_path: Path) -> None:
    run_experiment(experiment().model_copy(update={"replicates": 1}), runs_root=tmp_path)
    with pytest.raises(SpecError, match="was sealed under another one"):
        run_experiment(experiment(margin=0.2), runs_root=tmp_path, resume=True, until_decided=True)


def test_without_a_rule_there_is_no_looking(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="declares no stopping rule"):
        run_experiment(small_experiment(backend="sim"), runs_root=tmp_path, until_decided=True)
