"""Recordings of every format with rows removed, doubled, moved, or of a renamed type: is a change ever silent?

``python -m tests.support.mutated_accounts 100000 11 [FORMAT ...]`` reads so many of each format and prints what came of
them; it ends at the first count or wait that is wrong without a word. Every call is compared: its tokens, those it
keeps, and its wait. What is right says ``naive_traces``, from the changed file. The sums of each account are asserted
by the import itself.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import HarnessError
from harness.model.traces.account import ReadNotes
from harness.model.traces.importing import read_recordings
from harness.model.traces.recording import RecordedRequest, Recording
from tests.support.naive_traces import NAIVE
from tests.support.sound_traces import SOUND, at
from tests.support.trace_rows import assistant, result, text, tool, user

ROWS_INSIDE = {"atif": "steps", "openhands": "history", "swe-agent": "messages", "weka": "requests"}
ROWS_INSIDE.update({"opencode": "messages", "gemini-cli": "messages"})
WAYS = ("removed", "doubled", "moved", "renamed")
# LMCache's rows have no type: what would be renamed is a role in a prompt, which makes it another prompt.
UNTYPED = ("lmcache", "mooncake", "csv")
# A line of a vLLM's recorder is of the type of its first key.
TYPES = re.compile(
    r'("(?:type|source|role|kind|event_type|gen_ai\.operation\.name)": "\w+|^\{"(?:request|end|vllm_sessions))"'
)
SHARE_OF_DOCUMENTS = 0.2
# Arrivals count where sessions are replayed as recorded.
WITH_ARRIVALS = ("mooncake", "bailian", "agentic-mooncake", "otel", "csv", "vllm-sessions")
# Sessions in which a row of an unknown type leaves no wait known.
WHOLE_SESSIONS = ("claude", "codex", "qwen-code", "gemini-cli", "opencode", "atif", "swe-agent")
# Rows have numbers that count them.
NUMBERS = {"codex": "ordinal", "atif": "step_id", "openhands": "id"}
# Rows have numbers, links or sums, which say that a call between two others is missing.
COUNTS_CALLS = ("claude", "codex", "tracelab", "csv", "atif", "openhands", "opencode", "swe-agent", "agentic-mooncake")


@cache
def rows_of(kind: str) -> tuple[str, ...]:
    """The rows of a sound file, with the links, sums and further rows that real files have."""
    lines = SOUND[kind]()
    return (
        tuple(lines) if kind not in RICHER else tuple(json.dumps(row) for row in RICHER[kind](map(json.loads, lines)))
    )


def _linked(rows: Iterable[Any]) -> Iterator[Any]:
    before: dict[tuple[str, str], str] = {}
    for row in rows:
        chain = row["sessionId"], row.get("agentId", "")
        yield row | {"parentUuid": before.get(chain)}
        before[chain] = row["uuid"]


def _with_agents(rows: Iterable[Any]) -> Iterator[Any]:
    return _linked(sorted(_beside_agents(rows), key=lambda row: row["timestamp"]))


def _beside_agents(rows: Iterable[Any]) -> Iterator[Any]:
    """Two sessions of which one waits for an agent of its first tool, and the other's agent runs in the background."""
    ends_s = {"s0": 7.0, "s1": 115.0}
    for row in rows:
        session, name = row["sessionId"], row["uuid"].partition("-")[2]
        if name == "r0":
            row |= {"toolUseResult": {"agentId": f"k{session}"}}
            if session == "s1":
                row |= {"timestamp": at(104.2)}
            yield from _agent_rows(session, 100.0 * (session == "s1") + 4.5, ends_s[session])
        yield row


def _agent_rows(session: str, first_s: float, last_s: float) -> Iterator[Any]:
    def row(name: str, made: Any) -> Any:
        side = {"isSidechain": True, "agentId": f"k{session}", "sessionId": session}
        return made | side | {"uuid": f"k{session}-{name}"}

    yield row("u", user(first_s))
    yield row("a0", assistant(f"k{session}-0", first_s + 1, (10, 290, 0, 50), text(), tool("k")))
    yield row("r", result("k", first_s + 1.5))
    yield row("a1", assistant(f"k{session}-1", last_s, (10, 60, 300, 55), text()))


def _numbered(rows: Iterable[Any]) -> Iterator[Any]:
    return (row | {"ordinal": place} for place, row in enumerate(rows))


def _with_tools(rows: Iterable[Any]) -> Iterator[Any]:
    """Spans with an agent around them, a tool after each, and cached tokens."""
    for place, row in enumerate(rows):
        common = {"trace_id": row["trace_id"], "start_time": row["end_time"]}
        root, turn = f"{row['trace_id'][-4:]}aaaaaaaaaaaa", place % 3
        if not turn:
            agent = {"gen_ai.operation.name": "invoke_agent"}
            yield common | {"span_id": root, "end_time": at(100 * place + 60), "attributes": agent}
        cached = {"gen_ai.usage.cache_read.input_tokens": 1000 * bool(turn)}
        yield row | {"parent_span_id": root, "attributes": row["attributes"] | cached}
        tool = {"gen_ai.operation.name": "execute_tool"}
        yield common | {
            "span_id": f"f{place:015x}",
            "parent_span_id": root,
            "end_time": row["end_time"],
            "attributes": tool,
        }


def _with_totals(rows: Iterable[Any]) -> Iterator[Any]:
    for row in rows:
        usages = [step["metrics"] for step in row["steps"] if "metrics" in step]
        names = {"prompt": "prompt_tokens", "completion": "completion_tokens", "cached": "cached_tokens"}
        sums = {f"total_{to}_tokens": sum(usage[name] for usage in usages) for to, name in names.items()}
        yield row | {"final_metrics": sums}


def _with_calls(rows: Iterable[Any]) -> Iterator[Any]:
    for row in rows:
        answers = sum(message["role"] == "assistant" for message in row["messages"])
        yield row | {"info": row["info"] | {"model_stats": {"api_calls": answers}}}


def _with_shared(rows: Iterable[Any]) -> Iterator[Any]:
    """Requests with a fork, an answer that its client leaves, and two sessions that begin with the same blocks."""
    yield from rows
    for number, (like, known, prompt, generated, reason) in enumerate(
        (
            (2, 16, 300, 60, "length"),
            (1, 10, 200, 60, "stop"),  # a fork
            (-1, 0, 100, 20, "abort"),
            (8, 7, 200, 60, "stop"),
            (8, 4, 90, 60, "stop"),  # another session with the blocks of that first prompt
        ),
        start=6,
    ):
        at_ns = 1_000_000_000 * (300 + 10 * number)
        lengths = {"prompt_tokens": prompt, "max_tokens": 60, "blocks": prompt // 16}
        # By the clock of the day one came before what it continues was over.
        arrival_ns = at_ns - 9_000_000_000 * (number == 9)
        came = {"request": number, "arrival_ns": arrival_ns, "queued_ns": at_ns + 5}
        yield {**came, **lengths, "like": like, "known": known}
        counts = {"cached_tokens": 16 * known, "generated_tokens": generated, "preemptions": 0, "reason": reason}
        chain = {"like": -1, "known": prompt // 16, "blocks": (prompt + generated) // 16}
        yield {"end": number, "admitted_ns": at_ns + 9, "end_ns": at_ns + 2_000_000_000, **counts, **chain}


RICHER = {
    "claude": _with_agents,
    "codex": _numbered,
    "otel": _with_tools,
    "atif": _with_totals,
    "swe-agent": _with_calls,
}
RICHER.update({"vllm-sessions": _with_shared, "qwen-code": _linked})


def mutated(kind: str, rng: random.Random) -> tuple[list[str], str]:
    """The rows of a sound file after one to three changes, and what was changed."""
    lines = list(rows_of(kind))
    head = lines[: kind == "csv"]
    rows, changes = lines[len(head) :], list[str]()
    inside = ROWS_INSIDE.get(kind)
    ways = WAYS[: 3 if kind in UNTYPED else 4]
    num_whole = 0
    for _ in range(rng.randrange(1, 4)):
        if inside is None:
            rows = _changed(rows, changes, rng.choice(ways), rng)
        elif rng.random() < SHARE_OF_DOCUMENTS:
            num_whole += 1
        else:
            place = rng.randrange(len(rows))
            document: Any = json.loads(rows[place])
            within = _changed([json.dumps(row) for row in document[inside]], changes, rng.choice(ways), rng)
            rows[place] = json.dumps(document | {inside: [json.loads(row) for row in within]})
    for _ in range(num_whole):  # last, so that a document that stands twice is the same twice
        rows = _changed(rows, changes, rng.choice(WAYS[:3]), rng)
    return [*head, *rows], ", ".join(changes)


def _changed(rows: list[str], changes: list[str], what: str, rng: random.Random) -> list[str]:
    if not rows:
        return rows
    place = rng.randrange(len(rows))
    row, rest = rows[place], rows[:place] + rows[place + 1 :]
    to = rng.randrange(len(rest) + 1) if what == "moved" else place
    changes.append(f"row {place} {what}{f' to {to}' if what == 'moved' else ''}")
    if what == "removed":
        return rest
    if what == "moved":
        return [*rest[:to], row, *rest[to:]]
    again = row if what == "doubled" else TYPES.sub(r'\1_2"', row, count=1)
    return (
        [*rows[:place], row, again, *rows[place + 1 :]]
        if what == "doubled"
        else [*rows[:place], again, *rows[place + 1 :]]
    )


class _Read(NamedTuple):
    """What an import reads: each call of each session with its tokens, what it keeps, and its wait.

    follows: (prompt and answer of a call, those of the one call that it waited for).
    """

    sessions: list[list[tuple[int, ...]]]
    words: frozenset[str]
    follows: frozenset[tuple[int, ...]]
    num_unknown: int


def _read(kind: str, lines: Iterable[str], folder: Path) -> _Read | str:
    """Why, where the import refuses."""
    source = folder / f"in.{'csv' if kind == 'csv' else 'jsonl'}"
    source.write_text("".join(f"{line}\n" for line in lines))
    try:
        _, recordings, notes = read_recordings([source], kind=kind)
    except HarnessError as error:
        return str(error).partition(": ")[2][:50]
    requests = ((one, each.requests) for each in recordings for one in each.requests if len(one.after) == 1)
    follows = frozenset((*_size(one), *_size(all_of[one.after[0]])) for one, all_of in requests)
    sessions = [_calls(kind, each) for each in recordings]
    return _Read(sessions, frozenset(_words(notes)), follows, notes.unknown.total())


def _size(request: RecordedRequest) -> tuple[int, int]:
    return request.prompt_tokens, request.generate_tokens


def _words(notes: ReadNotes) -> Iterator[str]:
    yield from notes.assumed
    for name in ("dropped", "broken", "unknown", "left"):
        yield from (f"{count} x {reason}" for reason, count in getattr(notes, name).items())


UNKNOWN = -1


def _calls(kind: str, recording: Recording) -> list[tuple[int, ...]]:
    start_ns = recording.start_ns if kind in WITH_ARRIVALS else 0
    return [
        (
            one.prompt_tokens,
            one.keep_tokens,
            one.generate_tokens,
            UNKNOWN if one.is_drawn else one.wait_ns + (0 if one.after else start_ns),
        )
        for one in recording.requests
    ]


def _parsed(kind: str, lines: list[str]) -> list[Any]:
    if kind != "csv":
        return [json.loads(line) for line in lines]
    names = lines[0].split(",")
    rows = (dict(zip(names, line.split(","), strict=True)) for line in lines[1:])
    return [{name: value if name == "session_id" else int(value) for name, value in row.items()} for row in rows]


def _naive(kind: str, lines: list[str]) -> Counter[tuple[int, ...]]:
    sessions = NAIVE[kind](_parsed(kind, lines))
    return Counter((*call[:3], UNKNOWN if call.wait is None else call.wait) for calls in sessions for call in calls)


def _lacks_a_number(kind: str, lines: list[str]) -> bool:
    """Whether a row is missing that stood between two others, by the numbers of the rest."""
    rows: list[Any] = [json.loads(line) for line in lines]
    for group in [row[ROWS_INSIDE[kind]] for row in rows] if kind in ROWS_INSIDE else [rows]:
        numbers = {row[NUMBERS[kind]] for row in group}
        if numbers and max(numbers) - min(numbers) >= len(numbers):
            return True
    return False


def _is_late(kind: str, lines: list[str]) -> bool:
    """Whether a row stands behind one that is stamped more than 1 s later; a row with a known id is none."""
    rows: list[Any] = [json.loads(line) for line in (lines if kind == "codex" else dict.fromkeys(lines))]
    latest, is_late = "", False
    for row in rows:
        stamp = "" if row["type"] == "session_meta" else row["timestamp"]
        is_late = is_late or (bool(stamp) and _seconds(latest) - _seconds(stamp) > 1)
        latest = max(latest, stamp)
    return is_late


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp() if stamp else 0.0


@cache
def _sound(kind: str) -> _Read:
    with tempfile.TemporaryDirectory() as folder:
        read = _read(kind, rows_of(kind), Path(folder))
    assert isinstance(read, _Read), read
    assert _differ(read.sessions, _naive(kind, list(rows_of(kind)))) == ([], []), f"{kind}: its sound file"
    return read


def came_of(kind: str, lines: list[str], changes: str, folder: Path) -> str:
    """What came of one changed recording; AssertionError where a count or a wait is wrong without a word."""
    sound, read = _sound(kind), _read(kind, lines, folder)
    if isinstance(read, str):
        return f"refused: {read}"
    words = read.words - sound.words
    more, less = _differ(read.sessions, _naive(kind, lines))
    if (kind in COUNTS_CALLS and not read.follows <= sound.follows) or (
        kind in NUMBERS and _lacks_a_number(kind, lines)
    ):
        assert words, f"{kind}: {changes}: a row or call between two is missing, without a word"
    if kind in ("claude", "codex", "qwen-code") and "renamed" not in changes and _is_late(kind, lines):
        assert any("out of order" in word for word in words), f"{kind}: {changes}: rows out of order, without a word"
    if kind in WHOLE_SESSIONS and read.num_unknown and changes.count("row ") == 1:
        is_known = all(call[3] != UNKNOWN for calls in read.sessions for call in calls)
        assert not is_known, f"{kind}: {changes}: a row of an unknown type, and all waits known"
    if not more and not less:
        return "right, and labelled" if words else "right"
    differ = f"{kind}: {changes}: {more} read, {less} right"
    assert words, f"{differ}, without a word"
    assert not all("sorted" in word for word in words), f"{differ}, and only sorted: {sorted(words)}"
    return f"labelled: {sorted(words)}"


def _differ(sessions: list[list[tuple[int, ...]]], right: Counter[tuple[int, ...]]) -> tuple[list[Any], list[Any]]:
    """(calls read that are not right, right calls that were not read); a wait that is drawn is right for any."""
    read = Counter(call for calls in sessions for call in calls)
    more, less = list((read - right).elements()), list((right - read).elements())
    for call in [call for call in more if call[3] == UNKNOWN]:
        same = [other for other in less if other[:3] == call[:3]]
        if same:
            more.remove(call)
            less.remove(same[0])
    return more, less


def read_many(kind: str, number: int, seed: int) -> Counter[str]:
    """What came of so many changed recordings of one format."""
    rng, came = random.Random(f"{kind} {seed}"), Counter[str]()
    known: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        for _ in range(number):
            lines, changes = mutated(kind, rng)
            content = "\n".join(lines)
            if content not in known:
                known[content] = came_of(kind, lines, changes, Path(folder))
            came[known[content]] += 1
    came["distinct"] = len(known)
    return came


def main(words: list[str]) -> None:
    """Print a line a format: how many came out right, labelled or refused."""
    number, seed = int(words[0]), int(words[1]) if len(words) > 1 else 1
    for kind in words[2:] or sorted(NAIVE):
        came = read_many(kind, number, seed)
        print(f"{kind}: {', '.join(f'{count} {what}' for what, count in sorted(came.items()))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
