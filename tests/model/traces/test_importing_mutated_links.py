"""Ids and parents taken away, fields absent, null or of another type: a change is never silent."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.model.traces.importing import read_recordings
from tests.extras.formats.test_otel_agents import delegating
from tests.model.traces.test_links import agent_rows, woken_parent
from tests.support.mutated_accounts import WITH_ARRIVALS, rows_of
from tests.support.naive_traces import NAIVE
from tests.support.sound_traces import SOUND, atif_document, codex_rows, gemini_session, opencode_session, qwen_rows

Place = tuple[str | int, ...]
NUM_DRAWS = 60
# Values that are anything: another one is another recording.
FREE = ("hash_ids", "session_id", "input", "timestamp")
LINKS = {
    "claude": ("sessionId", "agentId", "uuid", "parentUuid", "toolUseResult", "tool_use_id", "id", "origin"),
    "otel": ("trace_id", "span_id", "parent_span_id", "gen_ai.conversation.id", "gen_ai.operation.name"),
    "codex": ("id", "call_id", "source", "subagent", "thread_spawn", "parent_thread_id", "ordinal"),
    "qwen-code": ("sessionId", "agentId", "uuid", "parentUuid", "isSidechain", "id", "forkedFrom", "functionResponse"),
    "gemini-cli": ("sessionId", "kind", "id", "agentId", "functionResponse"),
    "opencode": ("id", "parentID", "sessionId", "metadata"),
    "atif": ("session_id", "subagent_trajectory_ref", "step_id"),
    "weka": ("agent_id", "hash_ids", "status"),
    "agentic-mooncake": ("request_id", "session_id", "wait_for"),
    "openhands": ("id", "tool_call_metadata", "model_response", "instance_id"),
    "swe-agent": ("id", "response"),
    "tracelab": ("session_id", "round_index"),
    "lmcache": ("session_id",),
    "mooncake": ("hash_ids",),
    "bailian": ("chat_id", "hash_ids"),
    "vllm-sessions": ("request", "end", "like", "known", "recorder", "block_tokens"),
}


def linked(rows: Iterable[Any], chain: str) -> list[Any]:
    """Rows that name the one before them of the same conversation."""
    before: dict[str, str] = {}
    out: list[Any] = []
    for place, row in enumerate(rows):
        out.append(row | {"uuid": f"u{place}", "parentUuid": before.get(row.get(chain, ""))})
        before[row.get(chain, "")] = f"u{place}"
    return out


def claude_session() -> list[Any]:
    rows = linked([*woken_parent(60), *agent_rows("a", 3), *agent_rows("b", 3)], "agentId")
    rows[2]["toolUseResult"] = {"agentId": "a"}
    return rows


def codex_session() -> list[Any]:
    child = codex_rows("child", 2, 14.5, {"source": {"subagent": {"thread_spawn": {"parent_thread_id": "s"}}}})
    return [row | {"ordinal": place} for rows in (codex_rows("s"), child) for place, row in enumerate(rows)]


def qwen_session() -> list[Any]:
    side = {"isSidechain": True, "agentId": "k", "sessionId": "s"}
    return linked([*qwen_rows("s"), *(row | side for row in list(qwen_rows("k", 1, 14.0))[:2])], "agentId")


def gemini_session_with_agent() -> list[Any]:
    main, child = gemini_session("s"), gemini_session("k", 1, 14.0) | {"kind": "subagent"}
    main["messages"][3]["toolCalls"][0]["agentId"] = "k"
    return [main, child | {"messages": child["messages"][:2]}]


def opencode_sessions() -> list[Any]:
    main, child = opencode_session("s"), opencode_session("k", 1, 14.0)
    main["messages"][2]["parts"][2]["state"]["metadata"] = {"sessionId": "k"}
    child["info"]["parentID"] = "s"
    return [main, child]


def trajectories() -> list[Any]:
    main, child = atif_document("s"), atif_document("k", 1, 14.0)
    answer = next(step for step in main["steps"][3:] if "metrics" in step)
    answer["observation"] = {"results": [{"subagent_trajectory_ref": [{"session_id": child["session_id"]}]}]}
    return [main, child]


def weka_session() -> list[Any]:
    def request(t: float, *blocks: int, **more: Any) -> Any:
        return {
            "t": t,
            "type": "n",
            "in": 64 * len(blocks),
            "out": 9,
            "hash_ids": list(blocks),
            "api_time": 1.0,
            **more,
        }

    agents = [
        {
            "type": "subagent",
            "t": 1,
            "agent_id": name,
            "status": "completed",
            "requests": [request(2, number, number + 1)],
        }
        for name, number in (("k", 10), ("l", 20))
    ]
    calls = [request(0, 1, 2, 3, stop="tool_use"), *agents, request(5, 1, 2, 3, 4, 5)]
    return [{"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": calls}]


def rows_that_wait() -> list[Any]:
    def row(name: str, session: str, blocks: list[int], **more: Any) -> Any:
        lengths = {"input_length": 512 * len(blocks), "output_length": 9, "hash_ids": blocks}
        return {"request_id": name, "session_id": session, "delay": 5, **lengths, **more}

    return [
        row("a", "one", [1], timestamp=0, wait_for=[]),
        row("b", "two", [2], wait_for=["a"]),
        row("c", "three", [3], wait_for=["a"]),
        row("d", "one", [1, 4], wait_for=["a", "b", "c"]),
    ]


def sound(kind: str) -> Callable[[], list[Any]]:
    return lambda: list(map(json.loads, SOUND[kind]()))


SOUND_ALONE = ("openhands", "swe-agent", "tracelab", "lmcache", "mooncake", "bailian", "vllm-sessions")
RECORDINGS: dict[str, Callable[[], list[Any]]] = {
    **{kind: sound(kind) for kind in SOUND_ALONE},
    "claude": claude_session,
    "otel": delegating,
    "codex": codex_session,
    "qwen-code": qwen_session,
    "gemini-cli": gemini_session_with_agent,
    "opencode": opencode_sessions,
    "atif": trajectories,
    "weka": weka_session,
    "agentic-mooncake": rows_that_wait,
}


def without(value: Any, names: tuple[str, ...]) -> Iterator[Any]:
    """The value without each of these keys in turn, wherever it stands."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        if isinstance(value, dict) and key in names and part:
            yield {other: each for other, each in value.items() if other != key}
        for changed in without(part, names):
            if isinstance(value, dict):
                yield {**value, key: changed}
            else:
                yield [*value[:key], changed, *value[key + 1 :]]


def read(kind: str, rows: list[Any], folder: Path) -> tuple[Any, Any]:
    """(what each recording is, what the import says)."""
    files: list[list[Any]] = [[]]
    for row in rows:
        if row.get("type") == "session_meta" and files[-1]:
            files.append([])
        files[-1].append(row)
    paths = [folder / f"{place}.jsonl" for place in range(len(files))]
    for path, lines in zip(paths, files, strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    try:
        _, recordings, notes = read_recordings(paths, kind=kind)
    except HarnessError as error:
        return None, str(error)
    found = sorted(repr((one.start_ns * (kind in WITH_ARRIVALS), one.requests)) for one in recordings)
    counts = [sorted(each.items()) for each in (notes.assumed, notes.dropped, notes.broken, notes.unknown, notes.left)]
    return found, (notes.labels, counts)


@pytest.mark.parametrize("kind", sorted(LINKS))
def test_a_link_that_is_missing_changes_nothing_or_a_label_or_a_count(tmp_path: Path, kind: str) -> None:
    rows = RECORDINGS[kind]()
    whole, said = read(kind, rows, tmp_path)
    num_changed = 0
    for place, row in enumerate(rows):
        for changed in without(row, LINKS[kind]):
            links, words = read(kind, [*rows[:place], changed, *rows[place + 1 :]], tmp_path)
            num_changed += links != whole
            assert links == whole or words != said, f"{kind}: {row} became {changed}, without a word"
    assert num_changed


def places(value: Any, above: Place = ()) -> Iterator[Place]:
    """Where each value of an object stands within a row; rows within a row are rows."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in pairs:
        if isinstance(name, str):
            yield (*above, name)
        yield from places(inner, (*above, name))


def with_odd_field(row: Any, place: Place, rng: random.Random) -> Any:
    row = holder = copy.deepcopy(row)
    for name in place[:-1]:
        holder = holder[name]
    if (other := rng.choice(["absent", None, [], {}, [3], True])) == "absent":
        del holder[place[-1]]
    else:
        holder[place[-1]] = other
    return row


@pytest.mark.parametrize("kind", sorted(NAIVE.keys() - {"csv"}))
def test_a_field_that_is_missing_or_of_another_type_changes_no_figure_without_a_word(tmp_path: Path, kind: str) -> None:
    rng, rows = random.Random(kind), [json.loads(line) for line in rows_of(kind)]
    whole, said = read(kind, rows, tmp_path)
    for _ in range(NUM_DRAWS):
        number = rng.randrange(len(rows))
        place = rng.choice([each for each in places(rows[number]) if each[0] not in FREE])
        changed = with_odd_field(rows[number], place, rng)
        found, words = read(kind, [*rows[:number], changed, *rows[number + 1 :]], tmp_path)
        assert found == whole or words != said, f"{kind}: row {number}, {place}: {changed}"
