"""A server that does not state its reuse: dashes and nulls with the reason beside them, never a zero."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from tests.support.command_line import harness
from tests.support.report_runs import seal_demo


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("silent") / "demo"
    seal_demo(root, num_replicates=1, states_reuse=False)
    return root


def rows_as(form: str, runs: Path, *words: str) -> list[dict[str, object]]:
    result = harness("table", "demo", *words, "--format", form, "--runs", str(runs))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout) if form == "json" else list(csv.DictReader(io.StringIO(result.stdout)))


def test_the_table_shows_a_dash_and_why(runs: Path) -> None:
    result = harness("table", "demo", "--runs", str(runs), environment={"COLUMNS": "150"})
    words = " ".join(result.stdout.split())
    assert "0/6" not in words
    assert "are unknown: the server did not state the cached tokens of its answers" in words
    assert "--enable-prompt-tokens-details" in words


def test_json_and_csv_hold_null_and_nothing(runs: Path) -> None:
    unknown = ("a_ns", "ratio_a", "num_reused", "reused_tokens", "computed_prefill_tokens")
    for row in rows_as("json", runs):
        assert [row[name] for name in unknown] == [None] * len(unknown)
        assert row["num_rearrivals"] == 6
    for row in rows_as("csv", runs):
        assert [row[name] for name in unknown] == [""] * len(unknown)


def test_the_table_by_wait_holds_null_and_says_why(runs: Path) -> None:
    rows = rows_as("json", runs, "--reuse-by-wait")
    assert {row["num_reused"] for row in rows} == {row["kept_share"] for row in rows} == {None}
    told = harness("table", "demo", "--reuse-by-wait", "--runs", str(runs)).stdout
    assert "did not state the cached tokens" in " ".join(told.split())


def test_requests_are_neither_reused_nor_recomputed(runs: Path) -> None:
    groups = {row["group"] for row in rows_as("json", runs, "--serving")}
    assert "unknown" in groups
    assert not {"reused", "recomputed"} & groups
    found = harness(
        "query", "select distinct prefix from latencies order by 1", "--format", "json", "--runs", str(runs)
    )
    assert [row["prefix"] for row in json.loads(found.stdout)] == ["first", "unknown"]


def test_the_report_says_why_dashes_stand_there(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = harness("report", "demo", "-o", str(page), "--runs", str(runs), draws=True)
    assert result.returncode == 0, result.stderr
    text = page.read_text(encoding="utf-8")
    assert "A dash is not zero: reuse and channel A of base-nowaits" in text
    assert "reuse unknown: not reported" in text
    assert "reuse not reported" in text
    assert "0 of 6" not in text
