"""What `benchmarks --compare` says of two benchmark runs follows from their ratios to the reference alone."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import typer

import benchmarks.parser
from benchmarks.__main__ import bench
from benchmarks.compare import changes, read_figures, write_figures
from benchmarks.figure import Figure, Measured, in_turns
from harness.errors import SpecError
from tests.support.checkout import ROOT

QUIET = (10.0, 10.1, 9.9, 10.05, 9.95)


def figure(samples: tuple[float, ...], reference: tuple[float, ...] = (1.0,) * 5, **how: str) -> Figure:
    return Figure("loop", "x", "", "", Measured(samples, reference, how.get("beside", "a C loop")))


def verdict(then: Figure, now: Figure) -> str:
    (change,) = changes({then.name: then}, [now])
    return change.verdict


def times(samples: tuple[float, ...], by: float) -> tuple[float, ...]:
    return tuple(by * sample for sample in samples)


def test_what_takes_a_third_longer_is_slower_and_what_takes_less_is_faster() -> None:
    assert verdict(figure(QUIET), figure(times(QUIET, 1.33))) == "slower"
    assert verdict(figure(times(QUIET, 1.33)), figure(QUIET)) == "faster"


def test_a_machine_half_as_fast_changes_nothing() -> None:
    slow_machine = figure(times(QUIET, 2), times((1.0,) * 5, 2))
    assert verdict(figure(QUIET), slow_machine) == "no change shown"


def test_what_scatters_as_much_as_it_moved_is_not_called_slower() -> None:
    loud = (5.0, 18.0, 9.0, 14.0, 20.0)
    assert verdict(figure(QUIET), figure(loud)) == "no change shown"


def test_a_rate_is_slower_when_it_falls() -> None:
    then, now = (
        Figure("rate", "", "", "", Measured(rates, (1.0,) * 5, "", "more")) for rates in (QUIET, times(QUIET, 0.5))
    )
    assert verdict(then, now) == "slower"


def test_what_cannot_be_compared_says_why() -> None:
    assert changes({}, [figure(QUIET)])[0].verdict == "not in the old file"
    assert verdict(figure(QUIET, beside="Python"), figure(QUIET)) == "another reference then"
    assert verdict(figure(QUIET[:2], (1.0,) * 2), figure(QUIET)) == "too few samples"
    assert changes({}, [Figure("share", "0.95")]) == []


def test_a_written_file_is_read_as_it_was(tmp_path: Path) -> None:
    found = [figure(QUIET), Figure("share", "0.95", "0.95", "no speed")]
    write_figures(tmp_path / "old.json", found)
    assert list(read_figures(tmp_path / "old.json").values()) == found


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"where": {"loop": {"name": 1}}}'])
def test_any_other_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "old.json").write_text(text)
    with pytest.raises(SpecError, match="is no file of measured figures"):
        read_figures(tmp_path / "old.json")


def test_own_code_and_reference_take_turns() -> None:
    order: list[str] = []
    measured = in_turns(lambda: order.append("own") or 2.0, lambda: order.append("other") or 4.0, 2, "the other")
    assert order == ["own", "other", "own", "other"]
    assert str(measured) == "2 [2 .. 2] times as good as the other"


def test_an_unknown_section_is_one_line_with_those_that_are_there() -> None:
    command = [sys.executable, "-m", "benchmarks", "nothing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "unknown section 'nothing'. Use one of ['parser', " in done.stderr


def test_the_parser_is_measured_written_and_found_slower_than_a_faster_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmarks.parser, "bench_parser", partial(benchmarks.parser.bench_parser, 2_000))
    names = [f"log parser, {form} format" for form in ("precise", "default")]
    beside = "a loop that only splits the lines"
    write_figures(
        tmp_path / "old.json",
        [Figure(name, "x", "", "", Measured(times(QUIET, 100), (1.0,) * 5, beside, "more")) for name in names],
    )
    with pytest.raises(typer.Exit) as ended:
        bench(["parser"], output=tmp_path / "now.json", compare=tmp_path / "old.json")
    shown = " ".join(capsys.readouterr().out.split())
    assert (ended.value.exit_code, shown.count(" slower: ")) == (4, 2)
    assert shown.count("times as good as a loop that only splits the lines") == 2
    assert list(read_figures(tmp_path / "now.json")) == names
