"""A small sound file of every format that can be imported: two sessions of three requests, with real waits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.trace_rows import assistant, at, result, text, tool, user

SESSIONS, TURNS = 2, 3
Lines = list[str]


def _lines(rows: Iterator[Any]) -> Lines:
    return [json.dumps(row) for row in rows]


def claude_rows(session: str, turns: int = TURNS, first_s: float = 0.0) -> Iterator[Any]:
    """A session that calls a tool in every turn."""
    yield user(first_s, sessionId=session, uuid=f"{session}-u")
    for turn in range(turns):
        start = first_s + 10 * turn
        usage = (10, 500, 510 * turn, 400)
        more = {"sessionId": session, "requestId": f"r-{session}-{turn}"}
        yield assistant(f"m-{session}-{turn}", start + 3, usage, text(), uuid=f"{session}-t{turn}", **more)
        yield assistant(f"m-{session}-{turn}", start + 4, usage, tool(f"{turn}"), uuid=f"{session}-a{turn}", **more)
        yield result(f"{turn}", start + 8) | {"sessionId": session, "uuid": f"{session}-r{turn}"}


def codex_rows(
    session: str, turns: int = TURNS, first_s: float = 0.0, meta: Any = None, stamp_s: float | None = None
) -> Iterator[Any]:
    """A session that calls a tool in every turn. stamp_s: one instant for all rows, as a fork writes its parent's."""

    def row(seconds: float, kind: str, payload: Any) -> Any:
        return {"timestamp": at(seconds if stamp_s is None else stamp_s), "type": kind, "payload": payload}

    total = 0
    yield row(first_s, "session_meta", {"id": session, **(meta or {})})
    yield row(first_s, "event_msg", {"type": "user_message"})
    for turn in range(turns):
        start, usage = first_s + 10 * turn, (1000 + 200 * turn, 1000 * bool(turn), 100, 20)
        total += usage[0] + usage[2]
        yield row(start + 3, "response_item", {"type": "function_call", "call_id": str(turn), "name": "f"})
        yield row(start + 3.5, "event_msg", codex_count(usage, total))
        yield row(start + 8, "response_item", {"type": "function_call_output", "call_id": str(turn)})


def codex_count(usage: tuple[int, ...], total: int) -> Any:
    keys = ("input_tokens", "cached_input_tokens", "output_tokens", "reasoning_output_tokens")
    last = dict(zip(keys, usage, strict=True))
    return {"type": "token_count", "info": {"last_token_usage": last, "total_token_usage": {"total_tokens": total}}}


def _claude() -> Lines:
    return _lines(row for session in range(SESSIONS) for row in claude_rows(f"s{session}", first_s=100 * session))


def _codex() -> Lines:
    return _lines(codex_rows("one", SESSIONS * TURNS))


def _tracelab() -> Lines:
    def rows() -> Iterator[Any]:
        for session in range(SESSIONS):
            for turn in range(TURNS):
                start = 100 * session + 10 * turn
                events = (("tool_result" if turn else "user_message", start, 40), ("text", start + 3, 400))
                yield {
                    "session_id": f"s{session}",
                    "round_index": turn,
                    "provider": "claude",
                    "input_tokens_total": 1000 + 200 * turn + session,
                    "prefix_tokens": 1000 * bool(turn),
                    "output_tokens": 100,
                    "timing_events": [
                        {"event_type": kind, "timestamp": at(seconds), "content_chars": characters}
                        for kind, seconds, characters in events
                    ],
                }

    return _lines(rows())


def _weka() -> Lines:
    def request(turn: int) -> Any:
        blocks = list(range(16 + 4 * turn))
        sizes = {"in": 64 * len(blocks), "out": 90, "hash_ids": blocks}
        return {"t": 10.0 * turn, "type": "n", "api_time": 2.0, "stop": "tool_use", **sizes}

    return _lines(
        {"id": f"s{session}", "block_size": 64, "hash_id_scope": "local", "requests": [*map(request, range(TURNS))]}
        for session in range(SESSIONS)
    )


def arrivals() -> Iterator[Any]:
    """Rows of Mooncake: each prompt is the one before, and two blocks more."""
    for place in range(SESSIONS * TURNS):
        blocks = [0, *range(10, 12 + 2 * place)]
        yield {"timestamp": 2500 * place, "input_length": 512 * len(blocks), "output_length": 60, "hash_ids": blocks}


def _bailian() -> Lines:
    rows = [
        row | {"timestamp": row["timestamp"] / 1000, "input_length": 16 * len(row["hash_ids"])} for row in arrivals()
    ]
    return _lines(iter([row | {"chat_id": place, "parent_chat_id": -1} for place, row in enumerate(rows)]))


def _agentic() -> Lines:
    def rows() -> Iterator[Any]:
        for place, row in enumerate(arrivals()):
            session, turn = divmod(place, TURNS)
            waits = {"wait_for": [f"{session}-{turn - 1}"], "delay": 700} if turn else {}
            yield (
                row
                | {"timestamp": 60_000 * session, "request_id": f"{session}-{turn}", "session_id": f"s{session}"}
                | waits
            )

    return _lines(rows())


def spans() -> Iterator[Any]:
    """Flat chat spans of two traces."""
    for place in range(SESSIONS * TURNS):
        session, turn = divmod(place, TURNS)
        usage = {"gen_ai.usage.input_tokens": 1000 + 300 * turn, "gen_ai.usage.output_tokens": 100}
        yield {
            "trace_id": f"{session + 1:032x}",
            "span_id": f"{place + 1:016x}",
            "start_time": at(100 * session + 10 * turn),
            "end_time": at(100 * session + 10 * turn + 3),
            "attributes": {"gen_ai.operation.name": "chat", **usage},
        }


def _table() -> Lines:
    rows = [
        f"s{session},{1000 * session},{turn},{1000 * bool(turn)},{1000 + 100 * turn},90,{500 + turn}"
        for session in range(SESSIONS)
        for turn in range(TURNS)
    ]
    return ["session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms", *rows]


def chat_usage(turn: int) -> Any:
    """Usage of a turn in OpenAI's form."""
    details = {"prompt_tokens_details": {"cached_tokens": 1000 * bool(turn)}}
    return {"prompt_tokens": 1000 + 300 * turn, "completion_tokens": 100} | details


def atif_document(session: str, turns: int = TURNS, first_s: float = 0.0) -> Any:
    """A trajectory whose steps have one time each."""
    steps: list[Any] = [{"step_id": 1, "source": "user", "timestamp": at(first_s), "message": "x"}]
    for turn in range(turns):
        usage = {"prompt_tokens": 1000 + 300 * turn, "completion_tokens": 100, "cached_tokens": 1000 * bool(turn)}
        time = {"timestamp": at(first_s + 3 + 10 * turn), "metrics": usage, "tool_calls": [{"tool_call_id": "c"}]}
        steps.append({"step_id": turn + 2, "source": "agent", "message": "x" * 300} | time)
    return {"schema_version": "ATIF-v1.7", "session_id": session, "agent": {"name": "a"}, "steps": steps}


def openhands_events(session: str, turns: int = TURNS, first_s: float = 0.0) -> Iterator[Any]:
    """Events of a conversation, as an export has them."""
    yield {"id": 0, "timestamp": at(first_s), "source": "user", "action": "message"}
    for turn in range(turns):
        answer = {"model_response": {"id": f"{session}-{turn}", "usage": chat_usage(turn)}, "function_name": "f"}
        start = first_s + 10 * turn
        common = {"tool_call_metadata": answer}
        yield {"id": 2 * turn + 1, "timestamp": at(start + 3), "source": "agent", "action": "run"} | common
        yield {"id": 2 * turn + 2, "timestamp": at(start + 8), "source": "agent", "observation": "run"} | common


def mini_swe_agent(session: str, turns: int = TURNS, first_s: float = 0.0) -> Any:
    """A trajectory of mini-swe-agent."""
    start = 1_772_359_200 + first_s
    messages: list[Any] = [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}]
    messages[1] |= {"extra": {"timestamp": start}}
    for turn in range(turns):
        response = {"id": f"{session}-{turn}", "usage": chat_usage(turn)}
        time = start + 10 * turn
        messages.append({"role": "assistant", "content": "x", "extra": {"response": response, "timestamp": time + 3}})
        messages.append({"role": "user", "content": "x", "extra": {"timestamp": time + 8}})
    return {"trajectory_format": "mini-swe-agent-1.1", "info": {"exit_status": "x"}, "messages": messages}


def opencode_session(session: str, turns: int = TURNS, first_s: float = 0.0) -> Any:
    """A session that calls a tool in every turn, as opencode exports it."""

    def ms(seconds: float) -> int:
        return round(1000 * (1_772_359_200 + first_s + seconds))

    messages: list[Any] = [{"info": {"role": "user", "time": {"created": ms(0)}}, "parts": [{"type": "text"}]}]
    for turn in range(turns):
        cache = {"read": 1000 * bool(turn), "write": 0}
        tokens = {"input": 200 * turn + 1000 * (not turn), "output": 100, "reasoning": 20, "cache": cache}
        tokens["total"] = 1120 + 200 * turn
        state = {"status": "completed", "time": {"start": ms(10 * turn + 3), "end": ms(10 * turn + 8)}}
        parts = [
            {"type": "step-start"},
            {"type": "text", "time": {"start": ms(10 * turn + 2), "end": ms(10 * turn + 3)}},
            {"type": "tool", "tool": "x", "callID": f"{turn}", "state": state},
            {"type": "step-finish"},
        ]
        time = {"created": ms(10 * turn), "completed": ms(10 * turn + 8)}
        messages.append({"info": {"role": "assistant", "time": time, "tokens": tokens}, "parts": parts})
    told = [message["info"]["tokens"] for message in messages[1:]]
    sums = {name: sum(tokens[name] for tokens in told) for name in ("input", "output", "reasoning")}
    cache = {name: sum(tokens["cache"][name] for tokens in told) for name in ("read", "write")}
    info = {"id": session, "version": "1.18.33", "time": {"created": ms(0)}, "tokens": sums | {"cache": cache}}
    return {"info": info, "messages": messages}


def gemini_session(session: str, turns: int = TURNS, first_s: float = 0.0) -> Any:
    """A session that calls a tool in every turn, as a document of Gemini CLI."""
    rows: list[Any] = [{"id": f"{session}-u", "timestamp": at(first_s), "type": "user", "content": [{"text": "x"}]}]
    for turn in range(turns):
        counts = {"input": 1000 + 200 * turn, "cached": 1000 * bool(turn), "output": 80, "thoughts": 20, "tool": 0}
        counts |= {"total": counts["input"] + 100}
        answer = {"content": "x", "tokens": counts, "toolCalls": [{"id": f"{session}-c{turn}", "name": "x"}]}
        rows.append({"id": f"{session}-a{turn}", "timestamp": at(first_s + 10 * turn + 3), "type": "gemini", **answer})
        content = [{"functionResponse": {"id": f"{session}-c{turn}"}}]
        stamp = at(first_s + 10 * turn + 8)
        rows.append({"id": f"{session}-r{turn}", "timestamp": stamp, "type": "user", "content": content})
    return {"sessionId": session, "projectHash": "x", "kind": "main", "messages": rows}


def qwen_rows(session: str, turns: int = TURNS, first_s: float = 0.0) -> Iterator[Any]:
    """A session of Qwen Code that calls a tool in every turn."""

    def row(name: str, seconds: float, kind: str, *parts: Any, **more: Any) -> Any:
        ids = {"uuid": f"{session}-{name}", "sessionId": session, "timestamp": at(first_s + seconds)}
        return {**ids, "type": kind, "provenance": "x", "message": {"parts": list(parts)}, **more}

    yield row("u", 0, "user", {"text": "x"})
    for turn in range(turns):
        counts = {"promptTokenCount": 1000 + 200 * turn, "candidatesTokenCount": 100, "thoughtsTokenCount": 20}
        counts |= {"cachedContentTokenCount": 1000 * bool(turn), "totalTokenCount": 1100 + 200 * turn}
        call = {"functionCall": {"id": f"c{turn}", "name": "x"}}
        yield row(f"a{turn}", 10 * turn + 3, "assistant", {"text": "x"}, call, usageMetadata=counts)
        yield row(f"r{turn}", 10 * turn + 8, "tool_result", {"functionResponse": {"id": f"c{turn}"}})


def lmcache_rows(session: str, turns: int = TURNS) -> Iterator[Any]:
    """Calls with their whole prompts."""
    messages: list[Any] = [{"role": "system", "content": f"{session} " * 40}]
    for turn in range(turns):
        messages = [*messages, {"role": "user", "content": f"{turn} " * 30}]
        gap = {"pre_gap": 0.5 * turn, "output_length": 60}
        yield {"session_id": session, "model": "m", "input": messages} | gap
        messages = [*messages, {"role": "assistant", "content": "y " * 30}]


def vllm_sessions() -> Iterator[Any]:
    """The file of a server: its settings, then each request when it came and when it had ended."""
    settings = {"block_tokens": 16, "effective": {"enable_prefix_caching": True}}
    opened = {"opened_ns": 0, "opened_unix_ns": 1_772_359_200_000_000_000}
    yield {"vllm_sessions": 1, "part": 0, "engine": 0, "recorder": "s0", "boot": "", **settings, **opened}
    for session in range(SESSIONS):
        for turn in range(TURNS):
            number, prompt = session * TURNS + turn, 10 + 100 * turn
            at_ns, known = 1_000_000_000 * (100 * session + 10 * turn + 1), (prompt - 100 + 60) // 16 if turn else 0
            lengths = {"prompt_tokens": prompt, "max_tokens": 60, "blocks": prompt // 16}
            chain = {"like": number - 1 if turn else -1, "known": known}
            yield {"request": number, "arrival_ns": at_ns, "queued_ns": at_ns + 5, **lengths, **chain}
            instants = {"admitted_ns": at_ns + 9, "first_token_ns": at_ns + 99, "end_ns": at_ns + 2_000_000_000}
            counts = {"cached_tokens": 16 * known, "generated_tokens": 60, "preemptions": 0, "reason": "length"}
            end = {"like": -1, "known": prompt // 16, "blocks": (prompt + 60) // 16}
            yield {"end": number, **instants, **counts, **end}


def _each(rows: Callable[[str, float], Iterator[Any]]) -> Callable[[], Lines]:
    return lambda: _lines(row for place in range(SESSIONS) for row in rows(f"s{place}", 100.0 * place))


SOUND: dict[str, Callable[[], Lines]] = {
    "claude": _claude,
    "codex": _codex,
    "tracelab": _tracelab,
    "weka": _weka,
    "mooncake": lambda: _lines(arrivals()),
    "bailian": _bailian,
    "agentic-mooncake": _agentic,
    "otel": lambda: _lines(spans()),
    "csv": _table,
    "atif": _each(lambda name, first_s: iter([atif_document(name, first_s=first_s)])),
    "openhands": _each(
        lambda name, first_s: iter([{"instance_id": name, "history": [*openhands_events(name, first_s=first_s)]}])
    ),
    "swe-agent": _each(lambda name, first_s: iter([mini_swe_agent(name, first_s=first_s)])),
    "opencode": _each(lambda name, first_s: iter([opencode_session(name, first_s=first_s)])),
    "gemini-cli": _each(lambda name, first_s: iter([gemini_session(name, first_s=first_s)])),
    "qwen-code": _each(lambda name, first_s: qwen_rows(name, first_s=first_s)),
    "lmcache": _each(lambda name, _: lmcache_rows(name)),
    "vllm-sessions": lambda: _lines(vllm_sessions()),
}
"""The lines of one sound file of each format. A CSV file begins with its header."""
