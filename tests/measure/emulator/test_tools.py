"""Scripted tool calls: an agent that is pointed at the emulator gets calls of its own tools, and is refused without."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.errors import SpecError
from harness.measure.emulator.config import parse_config
from harness.measure.emulator.tools import script_of, scripted_call, words_of
from tests.support.emulator_process import Start

SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}, "mode": {"enum": ["a", "b"]}},
    "required": ["command", "timeout", "mode"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "read", "parameters": {"properties": {"path": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "bash", "parameters": SCHEMA}},
]


def test_arguments_are_those_that_the_tool_requires_around_the_words() -> None:
    call = scripted_call(script_of("bash=40"), TOOLS, 0)
    arguments = call.before + "some words" + call.after
    assert json.loads(arguments) == {"command": ": some words", "timeout": 1, "mode": "a"}
    assert words_of({"tool_calls": [{"function": {"name": "bash", "arguments": arguments}}]}) == "some words"
    assert words_of({"tool_calls": [{"function": {"arguments": "no JSON"}}, 7]}) == "no JSON"
    other = scripted_call(script_of("40, 0"), TOOLS, 0)
    assert (other.name, json.loads(other.before + other.after)) == ("read", {"path": ""})
    assert scripted_call(script_of("40, 0"), TOOLS, 1) is scripted_call(script_of("40"), TOOLS, 5) is None


def test_a_script_that_is_none_is_refused() -> None:
    with pytest.raises(SpecError, match="tool and tokens of each answer in turn"):
        parse_config({"tools": "bash:40"}, where="x")


def test_an_agent_gets_calls_of_given_lengths_whole_and_streamed_and_then_a_text(start_emulator: Start) -> None:
    emulator = start_emulator(
        tools="bash=40", time_scale=100, server={"rules": "vllm-paged", "cost_model": "emulated-gpu"}
    )
    messages: list[dict[str, Any]] = [{"role": "user", "content": "do it"}]
    body: dict[str, Any] = {"messages": messages, "tools": TOOLS}
    whole = emulator.client.post("/v1/chat/completions", json=body).json()
    (choice,) = whole["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"], call["function"]["name"]) == (
        "tool_calls",
        None,
        "bash",
    )
    assert json.loads(call["function"]["arguments"])["command"].startswith(": ")
    assert whole["usage"]["completion_tokens"] == 40
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = emulator.stream("/v1/chat/completions", **body, stream_options=options)
    deltas = [event["choices"][0]["delta"] for event in events]
    pieces = [each["tool_calls"][0]["function"]["arguments"] for each in deltas if each.get("tool_calls")]
    assert "".join(pieces) == call["function"]["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert [event["usage"]["completion_tokens"] for event in events] == [*range(41)]
    assert last["usage"]["completion_tokens"] == 40
    messages += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "done"}]
    then = emulator.client.post("/v1/chat/completions", json=body | {"max_tokens": 5}).json()
    assert then["choices"][0]["finish_reason"] == "length"
    assert then["choices"][0]["message"]["content"]
    assert then["usage"]["prompt_tokens"] > whole["usage"]["total_tokens"], "the call is part of the next prompt"
    assert then["usage"]["prompt_tokens_details"]["cached_tokens"] >= whole["usage"]["total_tokens"] // 16 * 16


def test_tools_without_a_script_are_refused_in_vllms_words_and_long_answers_are_explained(
    start_emulator: Start,
) -> None:
    emulator = start_emulator(time_scale=1000, server={"slot_tokens": 1024, "max_num_seqs": 1})
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    refused = emulator.client.post("/v1/chat/completions", json=body | {"tools": TOOLS})
    assert refused.status_code == 400
    assert "--enable-auto-tool-choice" in refused.json()["error"]["message"]
    assert emulator.client.post("/v1/chat/completions", json=body | {"tools": TOOLS, "tool_choice": "none"}).is_success
    assert "has no max_tokens: it has " in emulator.log_so_far
