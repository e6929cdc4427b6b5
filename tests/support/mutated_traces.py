"""Recordings of every format with damaged lines: values of the wrong kind, keys gone, bytes flipped, lines torn.

``python -m tests.support.mutated_traces 1000000`` reads so many lines and prints what came of them; it ends at the
first traceback, hang or half-written trace.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from harness.errors import HarnessError
from harness.model.plan.model import Plan
from harness.model.traces.importing import TRACE_FORMATS, import_trace
from harness.model.traces.lower import Lowering, sessions_of
from harness.model.traces.recording import read_trace
from tests.support.agent_logs import assistant, result, text, tool, user
from tests.support.sound_traces import (
    atif_document,
    gemini_session,
    lmcache_rows,
    mini_swe_agent,
    opencode_session,
    openhands_events,
    qwen_rows,
    vllm_sessions,
)

LINES_A_FILE = 100
HANGS_AFTER_S = 30
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**40,
    -(10**40),
    0.5,
    1e300,
    -0.0,
    "",
    "x" * 3000,
    "NaN",
    "\ud800",
    "\x1b[31m",
    [],
    {},
    [[]] * 5,
    {"id": {}},
    "2026-03-01T10:00:00Z",
    "9999-12-31T23:59:59Z",
    "0001-01-01T00:00:00+14:00",
)


def _claude(at: int) -> Any:
    name = f"m{at}"
    rows: tuple[Any, ...] = (
        user(at),
        assistant(name, at + 0.5, (5, 50, 10 * at, 20), text(), tool(f"c{at}")),
        result(f"c{at}", at + 0.8),
        {"type": "system", "subtype": "compact_boundary", "sessionId": "s", "timestamp": "2026-03-01T10:00:00Z"},
        assistant(name, at, (5, 0, 9, 1), text(), isSidechain=True, agentId=f"k{at % 3}"),
    )
    return rows[at % 5]


def _codex(at: int) -> Any:
    usage = {"input_tokens": 100 + at, "cached_input_tokens": at, "output_tokens": 9, "reasoning_output_tokens": 3}
    payloads: tuple[tuple[str, Any], ...] = (
        ("session_meta", {"id": "s", "source": {"subagent": {"thread_spawn": {"parent_thread_id": "p"}}}}),
        ("response_item", {"type": "function_call", "call_id": f"c{at}", "name": "x"}),
        ("response_item", {"type": "function_call_output", "call_id": f"c{at - 1}", "output": "x"}),
        ("event_msg", {"type": "user_message", "message": "x"}),
        ("event_msg", {"type": "token_count", "info": {"last_token_usage": usage}}),
    )
    kind, payload = payloads[at % 5]
    return {"timestamp": f"2026-03-01T10:{at // 60 % 60:02d}:{at % 60:02d}.000Z", "type": kind, "payload": payload}


def _tracelab(at: int) -> Any:
    stamp = f"2026-03-01T10:{at // 60 % 60:02d}:{at % 60:02d}.000Z"
    events = [{"event_type": "user_message", "timestamp": stamp}, {"event_type": "text", "timestamp": stamp}]
    tools = [{"tool_name": "Bash", "tool_call_timestamp": stamp, "tool_result_timestamp": stamp}]
    return {
        "provider": "claude",
        "session_id": f"s{at % 4}",
        "round_index": at,
        "timing_events": events,
        "tools": tools,
        "input_tokens_total": 100 + at,
        "prefix_tokens": at,
        "output_tokens": 9,
    }


def _weka(at: int) -> Any:
    ask = {"t": at, "type": "n", "in": 130, "out": 9, "hash_ids": [1, at], "api_time": 1.0, "stop": "tool_use"}
    child = {"type": "subagent", "t": 1, "agent_id": "k", "status": "completed", "requests": [ask]}
    return {"id": f"s{at}", "block_size": 64, "hash_id_scope": "local", "requests": [ask, child, ask]}


def _arrival(at: int) -> Any:
    return {"timestamp": at, "input_length": 600 + at, "output_length": 5, "hash_ids": [1, at % 7]}


def _bailian(at: int) -> Any:
    return _arrival(at) | {
        "input_length": 30,
        "chat_id": at,
        "parent_chat_id": at - 3 if at % 4 else -1,
        "turn": 1,
        "type": "text",
    }


def _agentic(at: int) -> Any:
    waits = {"wait_for": [str(at - 1), str(at - 2)][: at % 3], "delay": at % 5, "tool_wait_ms": 3}
    return (
        _arrival(at) | {"request_id": str(at), "session_id": str(at % 3), "branches": [], "prefix_reset": False} | waits
    )


def _span(at: int) -> Any:
    usage = {"gen_ai.usage.input_tokens": 10 + at, "gen_ai.usage.output_tokens": 5, "gen_ai.operation.name": "chat"}
    start, end = (f"2026-03-01T10:{second // 60 % 60:02d}:{second % 60:02d}Z" for second in (at, at + 2))
    return {"trace_id": "t", "span_id": str(at), "start_time": start, "end_time": end, "name": "x", "attributes": usage}


def _swe_agent(at: int) -> Any:
    query = [{"role": "user", "content": "x" * (40 + at)}]
    step = {"query": query, "response": "x" * 30, "action": "ls", "execution_time": 0.5}
    stats = {"tokens_sent": 300, "tokens_received": 40, "api_calls": 3}
    return {"environment": f"e{at}", "trajectory": [step] * 3, "info": {"model_stats": stats}}


def _table(at: int) -> str:
    return f"{at // 3},100,{at % 3},0,200,10,300"


RECORDS: dict[str, Callable[[int], Any]] = {
    "claude": _claude,
    "codex": _codex,
    "tracelab": _tracelab,
    "weka": _weka,
    "mooncake": _arrival,
    "bailian": _bailian,
    "agentic-mooncake": _agentic,
    "otel": _span,
    "csv": _table,
    "atif": lambda at: atif_document(f"s{at}", first_s=at),
    "openhands": lambda at: {"instance_id": at, "history": [*openhands_events(f"s{at}", first_s=at)]},
    "swe-agent": lambda at: mini_swe_agent(f"s{at}", first_s=at) if at % 2 else _swe_agent(at),
    "opencode": lambda at: opencode_session(f"s{at}", first_s=at),
    "gemini-cli": lambda at: gemini_session(f"s{at}", first_s=at),
    "qwen-code": lambda at: [*qwen_rows(f"s{at // 7}", first_s=at)][at % 7],
    "lmcache": lambda at: [*lmcache_rows(f"s{at // 3}")][at % 3],
    "vllm-sessions": lambda at: [*vllm_sessions()][at % 7],
}
CSV_HEAD = b"session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n"


def damaged_file(kind: str, rng: random.Random, num_lines: int = LINES_A_FILE) -> bytes:
    """A recording of which about a third of the lines is damaged."""
    lines = [_damaged_line(RECORDS[kind](at), rng, whole=kind == "otel") for at in range(num_lines)]
    if kind == "otel":
        document = b'{"spans": [' + b",".join(lines) + b"]}"
        return document if rng.random() < 0.9 else _damaged_bytes(bytearray(document), rng)
    return (CSV_HEAD if kind == "csv" else b"") + b"\n".join(lines) + b"\n" * rng.randrange(2)


def _damaged_line(record: Any, rng: random.Random, *, whole: bool) -> bytes:
    """whole: it stays JSON, because one damaged byte would end the whole document."""
    luck = rng.random()
    if isinstance(record, str):
        line = record.encode()
    else:
        line = json.dumps(damaged_value(record, rng) if luck < 0.2 else record).encode()
    return _damaged_bytes(bytearray(line), rng) if 0.2 <= luck < 0.35 and not whole else line


def damaged_value(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        table = dict(cast("dict[str, Any]", value))
        key = rng.choice(list(table))
        if rng.random() < 0.15:
            del table[key]
        else:
            table[key] = damaged_value(table[key], rng)
        return table
    if isinstance(value, list) and value and rng.random() < 0.8:
        members = list(cast("list[Any]", value))
        place = rng.randrange(len(members))
        members[place] = damaged_value(members[place], rng)
        return members * rng.choice((1, 1, 1, 40))
    return rng.choice(ODD)


def _damaged_bytes(line: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(line) + 1)
        line[place : place + rng.randrange(6)] = rng.randbytes(rng.randrange(6))
    return bytes(line[: rng.randrange(len(line) + 1)] if rng.random() < 0.3 else line)


def read_damaged(kind: str, content: bytes, folder: Path) -> str:
    """What came of it: "a plan", or the start of the one line that says why there is none.

    Raises AssertionError where the reader broke its promise, and whatever a reader did not catch.
    """
    source, output = folder / f"in.{'csv' if kind == 'csv' else 'json'}", folder / "out.jsonl"
    source.write_bytes(content)
    output.unlink(missing_ok=True)
    try:
        import_trace([source], output, name="t", kind=kind)
    except HarnessError as error:
        refusal = error
    else:
        refusal = None
    if refusal is not None:
        assert "\n" not in str(refusal)
        assert not output.exists()
        return type(refusal).__name__
    trace = read_trace(output)
    sessions, block_tokens, _ = sessions_of(trace.recordings, trace.head.block_tokens, Lowering(), random.Random(1))
    Plan("trace", 1, 0, "as-drawn", 0, (1000, 150_000), sessions, block_tokens=block_tokens)
    return "a plan"


def _contents(num_lines: int, seed: int) -> Iterator[tuple[str, bytes]]:
    rng = random.Random(seed)
    for number in range(num_lines // LINES_A_FILE):
        kind = sorted(TRACE_FORMATS)[number % len(TRACE_FORMATS)]
        yield kind, damaged_file(kind, rng)


def read_many(num_lines: int, seed: int) -> Counter[str]:
    """What came of so many lines in files of a hundred, all formats in turn."""
    came: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for kind, content in _contents(num_lines, seed):
            # Of processor time: a busy machine makes nothing hang.
            signal.setitimer(signal.ITIMER_VIRTUAL, HANGS_AFTER_S)
            came[f"{kind}: {read_damaged(kind, content, Path(folder))}"] += 1
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return came


if __name__ == "__main__":
    for what, count in sorted(read_many(int(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 1).items()):
        print(f"{count:8d} files  {what}")
