"""Runs as Prometheus metrics: a parser reads the measures back, and the board queries only what is written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from harness.analysis.compare.measures import MEASURES, value_over
from harness.analysis.summary import summarise
from harness.extras.prometheus.metrics import metric_name
from harness.measure.records.run import SealedRun
from harness.present.export import named_format, write_runs
from tests.support.report_runs import Shape, seal_demo, seal_run

COLUMNS_OF_A_BOARD = 24


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[SealedRun]:
    return seal_demo(tmp_path_factory.mktemp("demo"), num_replicates=3)


@pytest.fixture(scope="module")
def folder(runs: list[SealedRun], tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("prometheus")
    write_runs(runs, named_format("prometheus"), there, may_replace=False)
    return there


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[Any]:
    families = read_text((folder / "metrics.prom").read_text(encoding="utf-8"))
    return [sample for family in families for sample in family.samples]


@pytest.fixture(scope="module")
def board(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "grafana.json").read_text(encoding="utf-8"))


def value_of(samples: list[Any], name: str, **labels: str) -> float:
    (value,) = [each.value for each in samples if each.name == name and labels.items() <= each.labels.items()]
    return value


def test_every_measure_of_runs_and_conditions_is_read_back_in_base_units(
    runs: list[SealedRun], samples: list[Any]
) -> None:
    of_base = [run for run in runs if run.condition == "base-waits"]
    for measure, name, per_unit in (
        ("A", "a_seconds_per_token", 1),
        ("ttft_p50", "ttft_p50_seconds", 1000),
        ("tokens", "tokens_per_second", 1),
        ("padding", "slots_per_occupied_slot", 1),
    ):
        for prefix, chosen, replicate in (("condition", of_base, {}), ("run", of_base[1:2], {"replicate": "1"})):
            expected = value_over(MEASURES[measure], chosen)
            found = value_of(samples, f"harness_{prefix}_{name}", condition="base-waits", **replicate)
            assert found == pytest.approx(expected / per_unit)
    written = {each.name for each in samples}
    known = [one for name, one in MEASURES.items() if name != "cost" and value_over(one, of_base) is not None]
    assert len([name for name in written if name.startswith("harness_run_")]) == len(known) > 5
    assert metric_name(MEASURES["session_p90"]) == "session_p90_seconds"
    assert metric_name(MEASURES["session_goodput"]) == "session_goodput_per_second"


def test_each_sample_says_where_its_figure_is_from(samples: list[Any]) -> None:
    assert {each.labels["origin"] for each in samples} == {
        "Emulated with modelled step times; no accelerator was measured."
    }


def test_ratios_stand_with_their_ends_and_the_verdict(runs: list[SealedRun], samples: list[Any]) -> None:
    for answer in summarise(runs).answers:
        labels = {"condition": answer.condition, "channel": answer.channel.upper()}
        assert value_of(samples, "harness_cost_ratio", **labels) == pytest.approx(answer.ratio)
        assert value_of(samples, "harness_cost_ratio_high", **labels) == pytest.approx(answer.interval.high)
        (said,) = {each.labels["verdict"] for each in samples if labels.items() <= each.labels.items()} - {""} or {""}
        assert said == (answer.label if answer.is_main else "")


def test_a_ratio_whose_channels_contradict_says_that_it_is_withheld(tmp_path: Path) -> None:
    # Half a second before every first token is time in flight that the cost model does not explain.
    apart = [seal_run(tmp_path), seal_run(tmp_path, Shape(condition="slow", slowdown=2))]
    write_runs(apart, named_format("prometheus"), tmp_path / "out", may_replace=False)
    assert 'verdict="withheld"' in (tmp_path / "out" / "metrics.prom").read_text(encoding="utf-8")


def test_history_has_the_same_figures_at_the_times_at_which_the_runs_ended(
    folder: Path, runs: list[SealedRun], samples: list[Any]
) -> None:
    text = (folder / "openmetrics.txt").read_text(encoding="utf-8")
    timed = [sample for family in read_openmetrics(text) for sample in family.samples]
    assert [(each.name, each.labels, each.value) for each in timed] == [
        (each.name, each.labels, each.value) for each in samples
    ]
    last_s = max(run.manifest.clock.realtime_minus_monotonic_ns for run in runs) / 1e9
    assert all(last_s <= float(each.timestamp) < last_s + 3600 for each in timed)


def test_the_board_queries_only_metrics_and_labels_that_the_export_writes(
    board: dict[str, Any], samples: list[Any]
) -> None:
    written = {each.name for each in samples}
    labels = {label for each in samples for label in each.labels}
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [each["query"]["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    assert len(queries) > 10
    for query in queries:
        assert set(re.findall(r"harness_\w+", query)) <= written, query
        assert set(re.findall(r"[{,]\s*(\w+)=~", query)) <= labels, query
    legends = [target.get("legendFormat", "") for panel in board["panels"] for target in panel["targets"]]
    assert set(re.findall(r"{{(\w+)}}", " ".join(legends))) <= labels


def test_the_board_has_the_shape_that_grafana_imports(board: dict[str, Any]) -> None:
    """The fields of a dashboard by Grafana's JSON model: panels with a place, a type and queries of one source."""
    assert board["schemaVersion"] >= 36
    assert board["uid"]
    assert board["title"]
    names = {each["name"] for each in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)\}?", json.dumps(board))) - {"__range", "__all"} == names
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["type"] in {"table", "bargauge", "timeseries"}
        assert panel["title"]
        assert panel["description"]
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= COLUMNS_OF_A_BOARD
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
