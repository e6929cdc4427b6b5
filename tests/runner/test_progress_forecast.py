"""What an experiment still takes is told from its plans, and corrected by the runs that have finished."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.compare.answer import ChannelWords
from harness.analysis.compare.ratio import Verdict
from harness.analysis.compare.stopping import declared_status
from harness.analysis.figures import run_figures
from harness.errors import SpecError
from harness.judge.decisions.decide import decide_stopped
from harness.model.experiment import resolve
from harness.model.spec import ExperimentSpec
from harness.present.report import write_report
from harness.present.report.terminal import status_lines
from harness.run_key import RunKey
from harness.runner import ExperimentOutcome, StopFlag, run_experiment
from harness.runner.progress import BlockLooked, Forecast, ProgressEvent, RunSealed, predicted_work
from tests.support.bare_reports import with_figures
from tests.support.experiments import small_experiment

pytestmark = pytest.mark.same_everywhere


def forecast_of(backend: str, **spec: Any) -> tuple[Forecast, list[RunKey]]:
    planned = list(resolve(small_experiment(backend=backend, replicates=3, condition=[{"name": "only"}], **spec)))
    return Forecast(planned), [run.key for run in planned]


def test_a_modelled_server_differs_from_its_forecast_by_its_set_up() -> None:
    forecast, (first, second, third) = forecast_of("emulator")
    said_s = {key: forecast.of(key) or 0.0 for key in (first, second, third)}
    forecast.finished(first, said_s[first] + 2.0)
    assert [forecast.of(second), forecast.of(third)] == pytest.approx([said_s[second] + 2.0, said_s[third] + 2.0])
    assert forecast.left_s() == pytest.approx(said_s[second] + said_s[third] + 4.0)


def test_what_has_a_pace_of_its_own_is_forecast_at_that_pace() -> None:
    forecast, (first, second, third) = forecast_of("attached", time_scale=1.0)
    said_s = {key: forecast.of(key) or 0.0 for key in (first, second, third)}
    forecast.finished(first, 3 * said_s[first])
    assert [forecast.of(second), forecast.of(third)] == pytest.approx([3 * said_s[second], 3 * said_s[third]])


def test_simulated_runs_are_forecast_at_the_pace_of_those_after_the_first_and_before_not_at_all() -> None:
    forecast, keys = forecast_of("sim")
    assert forecast.left_s() is None
    forecast.finished(keys[0], 50.0)  # it loads code
    assert forecast.left_s() is None
    forecast.finished(keys[1], 2.0)
    assert forecast.left_s() == pytest.approx(2.0, rel=0.2)


def test_a_machine_that_became_busy_is_forecast_by_its_latest_runs() -> None:
    planned = list(resolve(small_experiment(backend="sim", replicates=20)))
    forecast, keys = Forecast(planned), [run.key for run in planned]
    for place, key in enumerate(keys[:-1]):
        forecast.finished(key, 1.0 if place < 20 else 5.0)
    assert forecast.left_s() == pytest.approx(5.0, rel=0.1)


def test_devices_that_keep_step_wait_for_each_other() -> None:
    shared = {"fleet": {"devices": [0, 1, 2], "lockstep": True}, "replicates": 3}
    planned = list(resolve(small_experiment(backend="emulator", **shared)))
    forecast = Forecast(planned)
    longest_s, in_turn_s = dict[int, float](), 0.0
    for run in planned:
        wall_s = forecast.of(run.key)
        longest_s[run.period.number] = max(longest_s.get(run.period.number, 0.0), wall_s)
        in_turn_s += wall_s
    assert forecast.left_s() == pytest.approx(sum(longest_s.values()))
    assert sum(longest_s.values()) < in_turn_s


def test_simulated_devices_take_turns_on_this_machine() -> None:
    shared = {"fleet": {"devices": [0, 1, 2], "lockstep": True}, "replicates": 3}
    planned = list(resolve(small_experiment(backend="sim", **shared)))
    forecast = Forecast(planned)
    for run in planned[:2]:
        forecast.finished(run.key, 3.0)
    assert forecast.left_s() == pytest.approx(3.0 * len(planned[2:]), rel=0.1)


def test_a_simulated_run_takes_what_its_tokens_take() -> None:
    few, many = (
        next(iter(resolve(small_experiment(backend="sim", workload={"num_sessions": number})))) for number in (2, 30)
    )
    assert predicted_work(few) < predicted_work(many)


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
    looked = [event.status for event in events if isinstance(event, BlockLooked)]
    assert outcome.is_decided
    assert outcome.is_complete
    assert outcome.num_planned == 16
    assert [one.num_blocks for one in looked] == [1, 2, 3, 4]
    assert [one.is_decided for one in looked] == [False, False, False, True]
    assert len(outcome.runs) == 8
    root = outcome.runs[0].path.parents[2]
    again = run_experiment(experiment(), runs_root=root, resume=True, until_decided=True)
    assert (again.num_performed, again.is_decided) == (0, True)


def test_each_block_says_when_there_can_be_an_interval_and_how_many_blocks_are_left(tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    spec = experiment(looks=[4, 6], alpha=0.02)
    run_experiment(spec, runs_root=tmp_path, on_progress=events.append, until_decided=True)
    lines = [status_lines(event.status)[1] for event in events if isinstance(event, BlockLooked)]
    assert [line.partition("none before ")[2] for line in lines] == [
        *["block 4"] * 3,
        "block 6, as so few show nothing at its level, decides after about 2 more blocks",
        "block 6, as so few show nothing at its level, decides after about 1 more block",
        "",
    ]


def test_the_report_says_what_was_declared_and_draws_what_was_found(straight, tmp_path: Path) -> None:
    with with_figures():
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
    assert declared_status(mended.runs) == declared_status(straight[0].runs)


@pytest.mark.parametrize(
    ("before", "refused"), [({"stop": None}, "was sealed under no stopping rule"), ({}, "was sealed under another one")]
)
def test_a_rule_that_came_or_changed_after_a_run_is_refused(
    tmp_path: Path, before: dict[str, None], refused: str
) -> None:
    run_experiment(experiment().model_copy(update={"replicates": 1, **before}), runs_root=tmp_path)
    with pytest.raises(SpecError, match=refused):
        run_experiment(experiment(margin=0.2), runs_root=tmp_path, resume=True, until_decided=True)


def test_a_rule_on_steps_that_no_engine_stamped_is_decided_by_time_in_flight_and_says_so(tmp_path: Path) -> None:
    outcome = run_experiment(experiment(channel="s"), runs_root=tmp_path, until_decided=True)
    status = declared_status(outcome.runs)
    assert [(one.channel, one.verdict) for one in status.comparisons] == [("b", Verdict.LOWER)]
    assert status.channel_note.startswith("Time in flight (B) decides: time in steps (S) is not there")


def test_runs_without_modelled_device_time_are_decided_by_time_in_flight_and_it_is_said(tmp_path: Path) -> None:
    spec = experiment(budget=2, looks=[2])
    runs = run_experiment(spec, runs_root=tmp_path, until_decided=True).runs
    for run in runs:
        run._values[run_figures.__wrapped__] = replace(run_figures(run), a=None)
    status = declared_status(runs)
    (looks,) = status.comparisons
    assert (looks.channel, looks.num_blocks) == ("b", 2)
    note = "Time in flight (B) decides: modelled device time (A) is not there"
    assert note in status_lines(status)[-1]
    (decision,) = decide_stopped(status, {looks.condition: ChannelWords()})
    assert note in decision.reason
    assert note in write_report(runs, tmp_path / "report.html", timelines=()).read_text()
