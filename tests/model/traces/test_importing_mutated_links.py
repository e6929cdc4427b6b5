"""Every id and parent of a linked recording taken away, one at a time: a change of links is never silent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.model.traces.importing import read_recordings
from tests.extras.formats.test_otel_agents import delegating
from tests.model.traces.test_links import agent_rows, woken_parent

LINKS = {
    "claude": ("sessionId", "agentId", "uuid", "parentUuid", "toolUseResult", "tool_use_id", "id", "origin"),
    "otel": ("trace_id", "span_id", "parent_span_id", "gen_ai.conversation.id", "gen_ai.operation.name"),
}


def rows_of(kind: str) -> list[Any]:
    if kind == "otel":
        return delegating()
    before: dict[str, str] = {}
    rows: list[Any] = []
    for place, row in enumerate([*woken_parent(60), *agent_rows("a", 3), *agent_rows("b", 3)]):
        chain = row.get("agentId", "")
        rows.append(row | {"uuid": f"u{place}", "parentUuid": before.get(chain)})
        before[chain] = f"u{place}"
    rows[2]["toolUseResult"] = {"agentId": "a"}
    return rows


def without(value: Any, names: tuple[str, ...]) -> Iterator[Any]:
    """The value without each of these keys in turn, wherever it stands."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        if key in names and part:
            yield {other: each for other, each in value.items() if other != key}
        for changed in without(part, names):
            if isinstance(value, dict):
                yield value | {key: changed}
            else:
                yield [*value[:key], changed, *value[key + 1 :]]


def read(kind: str, rows: list[Any], folder: Path) -> tuple[Any, Any]:
    """(the requests and their links, what the import says)."""
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        _, recordings, notes = read_recordings([folder / "in.jsonl"], kind=kind)
    except HarnessError as error:
        return None, str(error)
    links = [[(each.after, each.base, each.keep_tokens, each.wait_ns) for each in one.requests] for one in recordings]
    said = (notes.labels, dict(notes.dropped), dict(notes.broken), dict(notes.left), len(recordings))
    return links, said


@pytest.mark.parametrize("kind", sorted(LINKS))
def test_a_link_that_is_missing_changes_nothing_or_a_label_or_a_count(tmp_path: Path, kind: str) -> None:
    rows = rows_of(kind)
    sound, said = read(kind, rows, tmp_path)
    assert len(sound) == 1
    num_changed = 0
    for place, row in enumerate(rows):
        for changed in without(row, LINKS[kind]):
            links, words = read(kind, [*rows[:place], changed, *rows[place + 1 :]], tmp_path)
            num_changed += links != sound
            assert links == sound or words != said, f"{kind}: {row} became {changed}, without a word"
    assert num_changed > 5
