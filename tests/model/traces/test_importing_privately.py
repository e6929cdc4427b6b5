"""Nothing that a person or an agent wrote leaves a log, and no input of a reader ends in a traceback."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from harness.cli.tree import app
from harness.errors import HarnessError
from harness.model.traces.importing import TRACE_FORMATS, import_trace
from tests.support.agent_logs import SECRET, assistant, result, text, tool, user
from tests.support.mutated_traces import damaged_file, read_damaged


def planted(folder: Path) -> Path:
    """A log in which every text a person, an agent, a tool or a path could have is the secret."""
    rows = [
        {"type": "summary", "summary": SECRET, "sessionId": SECRET, "uuid": SECRET},
        user(0.0, gitBranch=SECRET, uuid=SECRET, version=SECRET),
        assistant("a", 1.0, (5, 500, 0, 20), text(), tool(SECRET), cwd=SECRET, requestId=SECRET),
        result(SECRET, 2.0, agent=SECRET),
        assistant("a2", 3.0, (5, 20, 500, 20), {"type": "thinking", "thinking": SECRET, "signature": SECRET}),
        {"type": "user", "sessionId": SECRET, "message": {"content": SECRET}},
        {"type": "assistant", "sessionId": SECRET, "timestamp": SECRET, "message": {"id": SECRET}},
    ]
    project = folder / f"-home-{SECRET}"
    project.mkdir()
    path = project / f"{SECRET}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + f"{{{SECRET}\n")
    return project


def test_no_text_path_command_or_id_reaches_the_trace_and_the_terminal_names_only_the_file_that_was_given(
    tmp_path: Path,
) -> None:
    output = tmp_path / "out.jsonl"
    planted_folder = planted(tmp_path)
    done = CliRunner().invoke(app, ["trace", "import", str(planted_folder), "-o", str(output), "--format", "claude"])
    assert done.exit_code == 0, done.output
    log = next(planted_folder.iterdir())
    assert f"2 x a row without its time, first at {log}, line 6" in done.output, "a file is named to who gave it"
    assert SECRET not in done.output.replace(str(log), "") + done.stderr + output.read_text()


LINES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "timestamp",
                    "message",
                    "usage",
                    "id",
                    "content",
                    "sessionId",
                    "payload",
                    "info",
                    "in",
                    "out",
                    "t",
                    "requests",
                    "hash_ids",
                    "wait_for",
                    "request_id",
                    "input_length",
                    "output_length",
                    "input_tokens_total",
                    "timing_events",
                    "session_id",
                    "spans",
                    "attributes",
                    "start_time",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@pytest.mark.parametrize("kind", sorted(TRACE_FORMATS))
@settings(max_examples=12)
@given(records=st.lists(LINES, min_size=1, max_size=4))
def test_whatever_a_file_says_ends_in_a_trace_or_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, kind: str, records: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    said = ""
    try:
        import_trace([source], folder / "out.jsonl", name="t", kind=kind)
    except HarnessError as error:
        said = str(error)
    assert "\n" not in said
    assert bool(said) != (folder / "out.jsonl").exists()


@pytest.mark.parametrize("kind", sorted(TRACE_FORMATS))
def test_damaged_lines_of_a_real_shape_end_in_a_whole_plan_or_in_one_line(tmp_path: Path, kind: str) -> None:
    rng = random.Random(f"damaged {kind}")
    came = [read_damaged(kind, damaged_file(kind, rng, num_lines=40), tmp_path) for _ in range(8)]
    assert "a plan" in came, "most lines are whole: some file must be read"
