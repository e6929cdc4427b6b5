"""Nothing that a person or an agent wrote leaves a log."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from harness.cli.tree import app
from tests.support.trace_rows import SECRET, assistant, result, text, tool, user


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
