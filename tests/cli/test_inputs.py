"""``harness trace import`` replaces no other trace, names the file of a broken line, and is told what files lack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from harness.cli.tree import app
from harness.model.traces.importing import TRACE_FORMATS
from tests.extras.formats.test_mooncake import sharing
from tests.support.sound_traces import SOUND


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def harness(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


TOOL = {"tool_name": "Bash", "tool_internal_latency_ms": 20}
IMPORTED = {
    ("plan", "waits", "import", "a.jsonl", "--format", "claude"): SOUND["claude"](),
    ("plan", "waits", "import", "a.jsonl", "--format", "tracelab"): [
        json.dumps({"provider": "claude", "tools": [TOOL] * 3})
    ],
    ("trace", "import", "a.jsonl"): SOUND["claude"](),
}


@pytest.mark.parametrize("command", IMPORTED, ids=" ".join)
def test_another_file_is_replaced_only_by_force_and_the_same_import_may_run_again(command: tuple[str, ...]) -> None:
    Path("a.jsonl").write_text("\n".join(IMPORTED[command]))
    Path("notes.md").write_text("notes of mine")
    refused = harness(*command, "-o", "notes.md")
    assert "is there already, with other content. Replace it with --force" in str(refused.exception)
    assert Path("notes.md").read_text() == "notes of mine"
    for output in ("made", "made", "notes.md"):
        done = harness(*command, "-o", output, *(["--force"] if output == "notes.md" else []))
        assert done.exit_code == 0, (done.output, done.exception)
    assert Path("notes.md").read_text() == Path("made").read_text().replace('"made"', '"notes"')


def test_a_broken_line_is_named_by_its_file(folder: Path) -> None:
    logs = folder / "logs"
    logs.mkdir()
    for name in ("one", "two", "three"):
        rows = [row.replace("s0", name).replace("s1", name) for row in SOUND["claude"]()[:4]]
        (logs / f"{name}.jsonl").write_text("\n".join([*rows, *["{"] * (name == "two")]))
    done = harness("trace", "import", "logs", "-o", "t.jsonl")
    assert "broken: 1 x no JSON object, first at logs/two.jsonl, line 5" in done.output
    assert "two" not in Path("t.jsonl").read_text()


def test_what_a_file_does_not_say_is_given_and_a_wrong_word_for_it_is_refused() -> None:
    Path("in.jsonl").write_text("\n".join(map(json.dumps, sharing(64, 4096))))
    words = ("trace", "import", "in.jsonl", "-o", "t.jsonl", "--block-tokens", "64")
    assert "named blocks    192 of 64 tokens" in harness(*words).output
    assert "Use s, ms, us or ns" in str(harness(*words, "--time-unit", "minutes").exception)


def test_formats_are_listed_with_what_they_do_not_promise() -> None:
    shown = harness("trace", "formats").output
    assert all(f"{name}: {each.description}" in shown for name, each in TRACE_FORMATS.items())
    assert "not promised: a block has 512 tokens" in harness("trace", "formats", "mooncake").output
    assert "unknown format 'moon'" in str(harness("trace", "formats", "moon").exception)
