"""The answers to several prompts of one request, as vLLM gives them.

``tests/extras/twin/test_twin_shapes`` holds the same calls to the real stack.
"""

from __future__ import annotations

import pytest

from tests.support.emulator_process import Emulator, Start

pytestmark = pytest.mark.live


def prompt_of(start: int, length: int) -> list[int]:
    """Token ids that no other test sends."""
    return [1000 + (start * 10_000 + place) % 140_000 for place in range(length)]


def test_every_prompt_has_its_choice(emulator: Emulator) -> None:
    prompts = [prompt_of(2, 5), prompt_of(3, 7)]
    answer = emulator.complete(prompts, max_tokens=2, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == prompts
    assert answer["usage"] == {
        "prompt_tokens": 12,
        "total_tokens": 16,
        "completion_tokens": 4,
        "prompt_tokens_details": None,
    }


def test_a_stream_of_choices_says_whose_each_event_is(emulator: Emulator) -> None:
    body = {"prompt": [prompt_of(4, 20), prompt_of(5, 10)], "max_tokens": 3}
    whole = emulator.complete(**body)
    events = emulator.stream("/v1/completions", **body, stream_options={"include_usage": True})
    texts = ["", ""]
    for event in events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert events[-1]["usage"] == {"prompt_tokens": 30, "total_tokens": 36, "completion_tokens": 6}


def test_a_client_that_leaves_takes_all_its_choices_with_it(start_emulator: Start) -> None:
    emulator = start_emulator(time_scale=1.0)
    body = {"prompt": [prompt_of(6, 3), prompt_of(7, 3)], "max_tokens": 4000, "stream": True}
    with emulator.client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    emulator.complete("y", max_tokens=1)
    assert emulator.metric("vllm:num_requests_running") == 0
