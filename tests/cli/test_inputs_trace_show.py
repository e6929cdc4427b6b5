"""``harness trace show`` says on one screen what a trace is, what its import changed, and how to replay it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.tree import app
from harness.model.traces.importing import TRACE_FORMATS, import_trace
from harness.model.traces.recording import RecordedRequest, Recording, TraceHead, write_trace
from tests.support.sound_traces import SOUND

pytestmark = pytest.mark.same_everywhere

REQUEST = RecordedRequest(None, (), 0, "none", 200, 0, 10)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def harness(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exception is None, (done.exception, done.output)
    return done.output


def shown(*words: str) -> list[str]:
    return harness("trace", "show", *words).splitlines()


def value_of(lines: list[str], key: str) -> str:
    return next(line for line in lines if line.startswith(key)).removeprefix(key).strip()


def is_one_screen(lines: list[str]) -> bool:
    return len(lines) < 24 and all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize("kind", sorted(TRACE_FORMATS))
def test_a_trace_of_any_format_is_one_screen_that_ends_with_what_replays_it(tmp_path: Path, kind: str) -> None:
    source = tmp_path / f"in.{'csv' if kind == 'csv' else 'jsonl'}"
    source.write_text("".join(f"{line}\n" for line in SOUND[kind]()))
    import_trace([source], tmp_path / "mine.jsonl", name="mine")
    lines = shown("mine.jsonl")
    assert is_one_screen(lines)
    assert value_of(lines, "format").startswith(kind)
    for key in ("assumed", "estimated", "dropped", "broken"):
        assert value_of(lines, key)
    command = shlex.split(value_of(lines, "replay"))
    assert command == ["harness", "init", "mine", "--from", "mine.jsonl"]
    if kind == "claude":
        # A trace is replayed alike whatever it was made from.
        harness(*command[1:])
        assert 'trace = "mine.jsonl"' in (tmp_path / "mine.toml").read_text()


def test_what_was_assumed_estimated_and_dropped_stands_apart(tmp_path: Path) -> None:
    labels = ("2 x rows out of order of time: sorted", "3 x lengths estimated from characters, 4 to a token")
    head = TraceHead("t", "made", "together", 0, {"requests of another model": 5}, {"no JSON object": 7}, labels)
    write_trace(tmp_path / "t.jsonl", head, [Recording("a", 0, (REQUEST,))])
    lines = shown("t.jsonl")
    assert value_of(lines, "assumed") == labels[0]
    assert value_of(lines, "estimated") == labels[1]
    assert value_of(lines, "dropped") == "5 x requests of another model"
    assert value_of(lines, "broken") == "7 x no JSON object"


def test_many_long_reasons_are_cut_to_a_screen_and_all_of_them_are_one_option_away(tmp_path: Path) -> None:
    labels = tuple(f"{number} x assumption {number} " + "of many words " * 9 for number in range(30))
    dropped = {f"reason {number} " + "x" * 90: number + 1 for number in range(9)}
    head = TraceHead("Ünnamed trace / 1 " + "y" * 90, "made", "together", 0, dropped, {}, labels)
    write_trace(tmp_path / "a trace.jsonl", head, [Recording("a", 0, (REQUEST,))])
    lines = shown("a trace.jsonl")
    assert is_one_screen(lines)
    assert "harness init nnamed-trace-1-" in value_of(lines, "replay")
    command = shlex.split(lines[-1].partition("all of it: ")[2])
    assert command == ["harness", "trace", "show", "a trace.jsonl", "--all"]
    whole = "\n".join(shown(*command[3:]))
    assert all(label.rstrip() in whole for label in labels)
    assert all(reason in whole for reason in dropped)
    assert value_of(lines, "dropped").startswith("9 x reason 8"), "the most frequent first"
