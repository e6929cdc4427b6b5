"""What a recording says, read in the plainest way from the page of its format: a second opinion on every reader.

Each function takes the parsed rows of one file and gives its sessions. It knows the forms of ``sound_traces`` only, and
shares no code with the readers. A row that it does not know is not there; a wait that the rows do not say is None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

MS = 1_000_000
S = 1_000_000_000


class Call(NamedTuple):
    """One call: tokens, of which ``keep`` are of the call before, and the wait before it in ns.

    wait: of a session's first call its arrival since the first of all, 0 where sessions have none.
    """

    prompt: int
    keep: int
    generate: int
    wait: int | None


class Answer(NamedTuple):
    """One call with its instants in ns: when it was asked for, and complete. visible: what the next prompt may hold."""

    asked: int | None
    ended: int
    prompt: int
    cached: int
    generate: int
    visible: int
    is_lost_before: bool = False


Sessions = list[list[Call]]
Rows = list[Any]


def _ns(text: str) -> int:
    return round(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1000) * MS


def _once(rows: Iterable[Any]) -> Rows:
    return [json.loads(text) for text in dict.fromkeys(json.dumps(row) for row in rows)]


def _grouped(rows: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, Rows]:
    groups: dict[Any, Rows] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _waited(answers: list[Answer]) -> list[Call]:
    """Calls from answers in order: a wait lasts from the answer before to the moment at which the next was asked."""
    calls: list[Call] = []
    before: Answer | None = None
    for answer in answers:
        if before is None:
            calls.append(Call(answer.prompt, 0, answer.generate, 0))
        else:
            keep = min(answer.cached, before.prompt + before.visible)
            is_known = answer.asked is not None and not answer.is_lost_before
            calls.append(
                Call(
                    answer.prompt,
                    keep,
                    answer.generate,
                    max((answer.asked or 0) - before.ended, 0) if is_known else None,
                )
            )
        before = answer
    return calls


def claude(rows: Rows) -> Sessions:
    """Rows of one message id are an answer; the user rows before it say when it was asked for.

    An agent's first call comes after the answer whose tool started it; the next answer waits for an agent that had
    ended when that tool's result came.
    """
    groups = _grouped(_once(rows), lambda row: (row["sessionId"], row.get("agentId", "")))
    answers = {key: _claude_answers(group) for key, group in groups.items()}
    calls = {key: _waited(list(each.values())) for key, each in answers.items()}
    tools: dict[tuple[str, str], str] = {}  # which answer called a tool
    for (session, agent), group in groups.items():
        for row in group if not agent else ():
            parts = row["message"]["content"] if isinstance(row["message"]["content"], list) else []
            if row["type"] == "assistant":
                tools |= {(session, part["id"]): row["message"]["id"] for part in parts if part["type"] == "tool_use"}
    for (session, agent), group in groups.items():
        for row in group if not agent else ():
            key = session, row.get("toolUseResult", {}).get("agentId", "")
            if key[1] and answers.get(key) and row["type"] == "user":
                starter = tools.get((session, row["message"]["content"][0]["tool_use_id"]), "")
                _link(answers[session, ""], calls[session, ""], starter, list(answers[key].values()), calls[key], row)
    return list(calls.values())


def _link(  # the answers and calls of a session and of its agent
    answers: dict[str, Answer], calls: list[Call], starter: str, agents: list[Answer], child: list[Call], row: Any
) -> None:
    if starter not in answers:
        return
    place, above = list(answers).index(starter), answers[starter]
    if child[0].wait is not None:
        child[0] = child[0]._replace(wait=max((agents[0].asked or 0) - above.ended, 0))
    if agents[-1].ended <= _ns(row["timestamp"]) and place + 1 < len(calls) and calls[place + 1].wait is not None:
        asked = list(answers.values())[place + 1].asked or 0
        calls[place + 1] = calls[place + 1]._replace(wait=max(asked - max(above.ended, agents[-1].ended), 0))


def _claude_answers(rows: Rows) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    asked: int | None = None
    called: set[str] = set()
    open_calls: set[str] = set()
    is_lost = False
    for row in sorted(rows, key=lambda row: row["timestamp"]):
        now, message = _ns(row["timestamp"]), row.get("message", {})
        parts = message["content"] if isinstance(message.get("content"), list) else []
        if row["type"] == "user":
            asked = now
            for part in parts:
                is_lost = is_lost or part["tool_use_id"] not in called
                open_calls.discard(part["tool_use_id"])
        elif row["type"] == "assistant":
            usage, name = message["usage"], message["id"]
            cached = usage["cache_read_input_tokens"]
            prompt, generate = (
                usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached,
                usage["output_tokens"],
            )
            if name not in answers:
                answers[name] = Answer(asked, now, prompt, cached, generate, generate, is_lost or bool(open_calls))
                asked, is_lost, open_calls = None, False, set()
            answers[name] = answers[name]._replace(ended=now)
            names = {part["id"] for part in parts if part["type"] == "tool_use"}
            called, open_calls = called | names, open_calls | names
    return answers


def codex(rows: Rows) -> Sessions:
    """A token count ends a call that has an output; inputs before it say when it was asked for."""
    answers: list[Answer] = []
    asked: int | None = None
    ended: int | None = None
    called: set[str] = set()
    open_calls: set[str] = set()
    is_lost, totals = False, None
    known = [row for row in rows if row["type"] in ("event_msg", "response_item")]
    for row in sorted(known, key=lambda row: row["timestamp"]):
        now, payload, kind = _ns(row["timestamp"]), row["payload"], row["payload"].get("type")
        if kind == "user_message":
            asked = now
        elif kind == "function_call_output":
            asked = now
            is_lost = is_lost or payload["call_id"] not in called
            open_calls.discard(payload["call_id"])
        elif kind == "function_call":
            is_lost, ended = is_lost or (ended is None and bool(open_calls)), now
            called.add(payload["call_id"])
            open_calls = {payload["call_id"]}
        elif kind == "token_count" and payload["info"]["total_token_usage"] != totals:
            totals, usage = payload["info"]["total_token_usage"], payload["info"]["last_token_usage"]
            if ended is not None or answers:  # an output that is missing ended when it was counted
                is_lost = is_lost or (ended is None and bool(open_calls))
                ended, open_calls = (now, set()) if ended is None else (ended, open_calls)
                sizes = (usage["input_tokens"], usage["cached_input_tokens"], usage["output_tokens"])
                visible = usage["output_tokens"] - usage["reasoning_output_tokens"]
                answers.append(Answer(asked, ended, *sizes, visible, is_lost))
                asked, ended, is_lost = None, None, False
    return [_waited(answers)]


def tracelab(rows: Rows) -> Sessions:
    """A row is a round; its events say when it was asked for and complete."""
    sessions: Sessions = []
    inputs, outputs = ("user_message", "tool_result"), ("text",)
    sound = [row for row in _once(rows) if _events(row, inputs) and _events(row, outputs)]
    for group in _grouped(sound, lambda row: row["session_id"]).values():
        group.sort(key=lambda row: row["round_index"])
        answers: list[Answer] = []
        for place, row in enumerate(group):
            asked, ended = _events(row, inputs), _events(row, outputs) or 0
            is_lost = place > 0 and group[place - 1]["round_index"] != row["round_index"] - 1
            sizes = (row["input_tokens_total"], row["prefix_tokens"], row["output_tokens"], row["output_tokens"])
            answers.append(Answer(asked, ended, *sizes, is_lost))
        sessions.append(_waited(answers))
    return sessions


def _events(row: Any, kinds: tuple[str, ...]) -> int | None:
    return max((_ns(each["timestamp"]) for each in row["timing_events"] if each["event_type"] in kinds), default=None)


def weka(rows: Rows) -> Sessions:
    """A line is a session; a wait lasts from a request's end (``t`` and ``api_time``) to the next one's ``t``."""
    sessions: Sessions = []
    for row in _once(rows):
        calls: list[Call] = []
        requests = [each for each in sorted(row["requests"], key=lambda each: each["t"]) if each["type"] == "n"]
        for place, each in enumerate(requests):
            before = requests[place - 1] if place else None
            keep = 0
            if before is not None:
                stream, common = before["in"] + before["out"], _common(before["hash_ids"], each["hash_ids"])
                is_whole = common == len(before["hash_ids"]) and each["in"] >= stream
                keep = stream if is_whole else min(common * row["block_size"], each["in"], stream)
            wait = 0 if before is None else max(round((each["t"] - before["t"] - before["api_time"]) * S), 0)
            calls.append(Call(each["in"], keep, each["out"], wait))
        sessions.append(calls)
    return sessions


def _common(one: list[Any], other: list[Any]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _arrivals(rows: Rows, unit: int) -> Sessions:
    first = min((row["timestamp"] for row in rows), default=0)
    return [
        [Call(row["input_length"], 0, row["output_length"], round(row["timestamp"] * unit) - round(first * unit))]
        for row in rows
    ]


def mooncake(rows: Rows) -> Sessions:
    """A row is a request at its instant; rows have no ids, so equal ones are several."""
    return _arrivals(rows, MS)


def bailian(rows: Rows) -> Sessions:
    """A row is a request at its instant; a chat id names one."""
    return _arrivals(_once(rows), S)


def agentic(rows: Rows) -> Sessions:
    """A request starts ``delay`` after those that it waits for."""
    rows = _once(rows)
    by_id = {row["request_id"]: row for row in rows}
    roots = [row for row in rows if not any(name in by_id for name in row.get("wait_for", ()))]
    first = min((row["timestamp"] for row in roots), default=0)
    calls: list[Call] = []
    for row in rows:
        above = [by_id[name] for name in row.get("wait_for", ()) if name in by_id]
        wait, keep = round((row["timestamp"] - first) * MS), 0
        if row.get("wait_for"):
            wait = round(row["delay"] * MS) if above else None
        for before in above:
            common, stream = (
                _common(before["hash_ids"], row["hash_ids"]),
                before["input_length"] + before["output_length"],
            )
            whole = len(before["hash_ids"]) if before["input_length"] % 512 == 0 else len(before["hash_ids"]) - 1
            keep = stream if common >= whole and row["input_length"] >= stream else min(common * 512, stream)
        calls.append(Call(row["input_length"], keep, row["output_length"], wait))
    return [calls]


def otel(rows: Rows) -> Sessions:
    """A chat span is a call; it waits from the end of the chat before it in its trace."""
    chats = [row for row in _once(rows) if row["attributes"].get("gen_ai.operation.name") == "chat"]
    first = min((_ns(row["start_time"]) for row in chats), default=0)
    sessions: Sessions = []
    for group in _grouped(chats, lambda row: row["trace_id"]).values():
        group.sort(key=lambda row: row["start_time"])
        calls: list[Call] = []
        for place, row in enumerate(group):
            counts = [row["attributes"][f"gen_ai.usage.{name}_tokens"] for name in ("input", "output")]
            cached, wait, keep = row["attributes"].get("gen_ai.usage.cache_read.input_tokens", 0), 0, 0
            if place:
                wait = _ns(row["start_time"]) - _ns(group[place - 1]["end_time"])
                keep = min(cached, calls[-1].prompt + calls[-1].generate, counts[0])
            else:
                wait = _ns(row["start_time"]) - first
            calls.append(Call(counts[0], keep, counts[1], wait))
        sessions.append(calls)
    return sessions


def csv(rows: Rows) -> Sessions:
    """A row is a round with the wait after it; rows are dicts of whole numbers by column."""
    rows = _once(rows)
    first = min((row["arrival_time"] for row in rows), default=0)
    sessions: Sessions = []
    for group in _grouped(rows, lambda row: row["session_id"]).values():
        group.sort(key=lambda row: row["round_idx"])
        calls = [Call(group[0]["prefix_len"] + group[0]["input_len"], 0, group[0]["output_len"], 0)]
        calls[0] = calls[0]._replace(wait=(group[0]["arrival_time"] - first) * MS)
        for before, row in pairwise(group):
            is_next = row["round_idx"] == before["round_idx"] + 1
            keep = min(row["prefix_len"], calls[-1].prompt + calls[-1].generate)
            wait = before["tool_wait_after_ms"] * MS if is_next else None
            calls.append(Call(row["prefix_len"] + row["input_len"], keep, row["output_len"], wait))
        sessions.append(calls)
    return sessions


def _usage(usage: Any) -> tuple[int, int, int, int]:
    cached = usage.get("cached_tokens", usage.get("prompt_tokens_details", {}).get("cached_tokens"))
    return usage["prompt_tokens"], cached, usage["completion_tokens"], usage["completion_tokens"]


def _asked_and_answered(rows: Iterable[tuple[str, int, Any]]) -> list[Answer]:
    """Answers of ("in" or "out", instant, usage) in order; one that nothing was asked for waited until it came."""
    answers: list[Answer] = []
    asked: int | None = None
    for kind, now, usage in rows:
        if kind == "in":
            asked = now
        else:
            answers.append(Answer(now if asked is None else asked, now, *_usage(usage)))
            asked = None
    return answers


def atif(rows: Rows) -> Sessions:
    """A step of the agent with metrics is a call; a user's step says when it was asked for."""
    return [_waited(_asked_and_answered(_atif_steps(_once(row["steps"])))) for row in _once(rows)]


def _atif_steps(steps: Rows) -> Iterator[tuple[str, int, Any]]:
    for step in sorted(steps, key=lambda step: step["step_id"]):
        if step["source"] in ("user", "agent"):
            yield "in" if step["source"] == "user" else "out", _ns(step["timestamp"]), step.get("metrics")


def openhands(rows: Rows) -> Sessions:
    """An action holds the usage of its answer; observations and a person's messages say when the next was asked for."""
    return [_waited(_asked_and_answered(_openhands_events(_once(row["history"])))) for row in _once(rows)]


def _openhands_events(events: Rows) -> Iterator[tuple[str, int, Any]]:
    seen: set[str] = set()  # one answer may be several actions
    for event in sorted(events, key=lambda event: event["timestamp"]):
        answer = event.get("tool_call_metadata", {}).get("model_response")
        if "observation" in event or (event["source"] == "user" and event["action"] == "message"):
            yield "in", _ns(event["timestamp"]), None
        elif answer and answer["id"] not in seen:
            seen.add(answer["id"])
            yield "out", _ns(event["timestamp"]), answer["usage"]


def swe_agent(rows: Rows) -> Sessions:
    """An assistant's message holds usage and the time at which it came; the message before it was sent at its own."""
    return [_waited(_asked_and_answered(_messages(row["messages"]))) for row in _once(rows)]


def _messages(messages: Rows) -> Iterator[tuple[str, int, Any]]:
    for message in sorted(_once(messages), key=lambda message: message.get("extra", {}).get("timestamp", 0)):
        extra = message.get("extra")
        if extra and message["role"] in ("user", "assistant"):
            usage = extra.get("response", {}).get("usage")
            yield "out" if message["role"] == "assistant" else "in", round(extra["timestamp"] * 1000) * MS, usage


def opencode(rows: Rows) -> Sessions:
    """An assistant's message was asked for when it was created; it ends with its text, or as its first tool starts."""
    sessions: Sessions = []
    for row in _once(rows):
        answers: list[Answer] = []
        for message in sorted(_once(row["messages"]), key=lambda message: message["info"]["time"]["created"]):
            info = message["info"]
            if info["role"] != "assistant":
                continue
            tokens, texts = info["tokens"], [part["time"]["end"] for part in message["parts"] if part["type"] == "text"]
            prompt = tokens["input"] + tokens["cache"]["read"] + tokens["cache"]["write"]
            sizes = (prompt, tokens["cache"]["read"], tokens["output"] + tokens["reasoning"], tokens["output"])
            starts: list[int] = [part["state"]["time"]["start"] for part in message["parts"] if part["type"] == "tool"]
            ended: int = max(*texts, min(starts, default=0))
            answers.append(Answer(info["time"]["created"] * MS, ended * MS, *sizes))
        sessions.append(_waited(answers))
    return sessions


def gemini_cli(rows: Rows) -> Sessions:
    """A message with counts is an answer; the others say when it was asked for."""

    def events(messages: Rows) -> Iterator[_Event]:
        for message in messages:
            ids = [part["functionResponse"]["id"] for part in message["content"] if "functionResponse" in part]
            tokens = message.get("tokens")
            if message["type"] == "gemini":
                counts = (tokens["input"], tokens["cached"], tokens["output"] + tokens["thoughts"], tokens["output"])
                yield _ns(message["timestamp"]), {call["id"] for call in message["toolCalls"]}, counts
            elif message["type"] == "user":
                yield _ns(message["timestamp"]), set(ids), None

    return [_waited(_with_tools(events(_once(row["messages"])))) for row in _once(rows)]


def qwen_code(rows: Rows) -> Sessions:
    """A row with usage is an answer; the others say when it was asked for."""

    def events(group: Rows) -> Iterator[_Event]:
        for row in group:
            ids = {call["id"] for part in row["message"]["parts"] for call in part.values() if isinstance(call, dict)}
            usage = row.get("usageMetadata")
            if row["type"] == "assistant":
                answer, hidden = usage["candidatesTokenCount"], usage["thoughtsTokenCount"]
                counts = (usage["promptTokenCount"], usage["cachedContentTokenCount"], answer, answer - hidden)
                yield _ns(row["timestamp"]), ids, counts
            elif row["type"] in ("user", "tool_result"):
                yield _ns(row["timestamp"]), ids, None

    groups = _grouped(_once(rows), lambda row: row["sessionId"]).values()
    return [_waited(_with_tools(events(group))) for group in groups]


_Event = tuple[int, set[str], "tuple[int, int, int, int] | None"]
"""An instant; the tools that an answer called, or whose results a row has; an answer's counts."""


def _with_tools(events: Iterable[_Event]) -> list[Answer]:
    """Answers; a call is lost where a tool's result has no call, or a call of a tool no result."""
    answers: list[Answer] = []
    asked: int | None = None
    called: set[str] = set()
    waiting: set[str] = set()
    is_lost = False
    for now, ids, counts in sorted(events, key=lambda event: event[0]):
        if counts is None:
            asked, is_lost, waiting = now, is_lost or not ids <= called, waiting - ids
        else:
            answers.append(Answer(asked, now, *counts, is_lost or bool(waiting)))
            asked, is_lost, waiting, called = None, False, ids, called | ids
    return answers


def lmcache(rows: Rows) -> Sessions:
    """A row holds its whole prompt, 4 characters a token; an answer that comes again has its counted tokens."""
    sessions: Sessions = []
    for group in _grouped(_once(rows), lambda row: row["session_id"]).values():
        group.sort(key=lambda row: len(row["input"]))
        calls: list[Call] = []
        for place, row in enumerate(group):
            before = group[place - 1] if place else None
            if before is None:
                calls.append(Call(_sizes(row["input"]), 0, row["output_length"], 0))
                continue
            common = _common(before["input"], row["input"])
            if common == len(before["input"]) < len(row["input"]):
                rest = row["input"][common:]
                is_held = rest[0]["role"] == "assistant"
                kept = calls[-1].prompt + calls[-1].generate * is_held
                more = _sizes(rest[is_held:])
                calls.append(Call(kept + more, kept, row["output_length"], round(row["pre_gap"] * S)))
            else:
                keep = min(_sizes(row["input"][:common]), calls[-1].prompt)
                calls.append(Call(_sizes(row["input"]), keep, row["output_length"], round(row["pre_gap"] * S)))
        sessions.append(calls)
    return sessions


def _sizes(messages: Rows) -> int:
    return sum(-(-len(json.dumps(message, sort_keys=True)) // 4) for message in messages)


def vllm_sessions(rows: Rows) -> Sessions:
    """A request continues the longest prompt and answer, over when it was queued, whose KV blocks it begins with.

    The engine's clock says who came first; a wait is from the end to the arrival by the clock of the day, or 0.
    """
    came: dict[int, Any] = {}
    ends: dict[int, Any] = {}
    for row in rows:
        came.setdefault(row["request"], row) if "request" in row else ends.setdefault(row.get("end"), row)
    streams: dict[int, tuple[list[Any], list[Any]]] = {-1: ([], [])}  # blocks of a prompt, and with its answer
    for number, row in sorted(came.items()):
        prompt = _begun(streams, row["like"], row["known"], row["blocks"], number)
        end = ends.get(number, {"like": -1, "known": 0, "blocks": 0})
        whole = _begun(streams, end["like"], end["known"], end["blocks"], number)
        streams[number] = (prompt, whole if end["like"] >= 0 else prompt + whole[len(prompt) :])
    calls: list[Call] = []
    over = sorted((number for number in came if number in ends), key=lambda number: came[number]["queued_ns"])
    first_ns = min((came[number]["arrival_ns"] for number in over), default=0)
    for number in over:
        row, best = came[number], -1
        for other in over:
            length = len(streams[other][1])
            begins = 0 < length > len(streams[best][1]) and streams[number][0][:length] == streams[other][1]
            best = other if begins and ends[other]["end_ns"] <= row["queued_ns"] else best
        keep = 0 if best < 0 else came[best]["prompt_tokens"] + ends[best]["generated_tokens"]
        left = ends[number]["reason"] == "abort"
        generate = row["max_tokens"] if left else ends[number]["generated_tokens"]
        wait_ns = row["arrival_ns"] - first_ns if best < 0 else max(row["arrival_ns"] - ends[best]["end_ns"], 0)
        calls.append(Call(row["prompt_tokens"], keep, generate, wait_ns))
    return [calls]


def _begun(streams: Any, like: int, known: int, blocks: int, number: int) -> list[Any]:
    """Names of so many blocks, the first ``known`` of them those of another request."""
    first = streams[like][1][:known] if like in streams else [None] * known
    return first + [(number, place) for place in range(len(first), blocks)]


NAIVE: dict[str, Callable[[Rows], Sessions]] = {
    "claude": claude,
    "codex": codex,
    "tracelab": tracelab,
    "weka": weka,
    "mooncake": mooncake,
    "bailian": bailian,
    "agentic-mooncake": agentic,
    "otel": otel,
    "csv": csv,
    "atif": atif,
    "openhands": openhands,
    "swe-agent": swe_agent,
    "opencode": opencode,
    "gemini-cli": gemini_cli,
    "qwen-code": qwen_code,
    "lmcache": lmcache,
    "vllm-sessions": vllm_sessions,
}
