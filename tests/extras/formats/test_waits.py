"""Waits of recorded agents as a distribution: the same readers, tools as one, nothing dropped silently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.errors import SpecError
from harness.extras.formats.waits import import_recorded_waits
from harness.model.plan.waits import load_waits
from tests.support.command_line import harness
from tests.support.trace_rows import SECRET, assistant, result, text, tool, user


def write_session(path: Path, *waits_s: float) -> None:
    """A session of Claude Code with one tool call for each wait."""
    rows, now = [user(0)], 1.0
    for place, wait_s in enumerate(waits_s):
        rows.append(assistant(f"m{place}", now, (100, 0, 0, 10), tool(f"call{place}")))
        rows.append(result(f"call{place}", now + wait_s))
        now += wait_s + 1
    rows.append(assistant("last", now, (100, 0, 0, 10), text()))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_tool_waits_of_an_agents_log_become_a_distribution_that_can_be_drawn_from(tmp_path: Path) -> None:
    write_session(tmp_path / "log.jsonl", 1.0, 2.0, 3.0, 4.0, 0.0)
    counted = import_recorded_waits([tmp_path / "log.jsonl"], tmp_path / "mine.toml", name="mine", kind="auto")
    assert (counted["format"], counted["waits"], counted["left_out_zero"]) == ("claude", 4, 1)
    assert counted["requests_without_a_tool_wait"] == 1
    waits = load_waits(str(tmp_path / "mine.toml"))
    assert waits.mixture_quantile_ms(0.5) == pytest.approx(2500)
    assert SECRET not in (tmp_path / "mine.toml").read_text()


def test_a_trace_of_arrivals_alone_has_no_tool_waits_and_writes_nothing(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 600, "output_length": 10, "hash_ids": [1]}
    (tmp_path / "m.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(SpecError, match="no tool was waited for"):
        import_recorded_waits([tmp_path / "m.jsonl"], tmp_path / "mine.toml", name="mine")
    assert not (tmp_path / "mine.toml").exists()


def test_the_command_takes_every_format_of_the_trace_readers(tmp_path: Path) -> None:
    write_session(tmp_path / "log.jsonl", 1.5, 2.5)
    words = ("plan", "waits", "import", str(tmp_path / "log.jsonl"), "-o", str(tmp_path / "mine.toml"), "--format")
    done, refused = harness(*words, "claude"), harness(*words, "clawed")
    assert done.returncode == 0
    assert "claude: 2 waits for tools" in done.stdout
    assert refused.returncode == 2
    assert "unknown format 'clawed'" in refused.stderr
