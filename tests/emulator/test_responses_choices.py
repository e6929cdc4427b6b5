"""Several answers to a prompt (``n``), the prompt before the answer (``echo``), log probabilities: as vLLM gives them.

``tests/extras/twin/test_twin_shapes`` holds the same calls to the real stack.
"""

from __future__ import annotations

import re

import openai
import pytest

from tests.support.emulator_process import Emulator, Start

pytestmark = pytest.mark.live
CHAT = {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 3, "temperature": 1}


def prompt_of(start: int, length: int) -> list[int]:
    """Token ids that no other test sends."""
    return [1000 + (start * 10_000 + place) % 140_000 for place in range(length)]


def test_every_choice_is_an_engine_request_of_its_own(start_emulator: Start) -> None:
    emulator = start_emulator(log_requests=True)
    prompt = prompt_of(1, 300)

    answer = emulator.complete(prompt, max_tokens=4, n=3, temperature=1, request_id="three", return_token_ids=True)

    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3
    # The prompt counts once, its reuse is that of the choice that ended last.
    assert answer["usage"]["prompt_tokens"] == 300
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 256
    assert emulator.metric("vllm:prompt_tokens_total") == 900
    assert emulator.metric("vllm:request_success_total", finished_reason="length") == 3
    assert emulator.metric("vllm:request_params_n_sum") == 3
    assert emulator.metric("vllm:request_params_n_count") == 1
    assert emulator.metric("vllm:request_max_num_generation_tokens_count") == 1
    assert emulator.stop() == 0
    names = re.findall(r"\[ALLOC\] REQUEST=(\S+)", emulator.log)
    assert [name[:-8] for name in names] == [f"{choice}_cmpl-three-0-" for choice in range(3)]
    assert len({name[-8:] for name in names}) == 1
    assert emulator.log.count("Received request cmpl-three-0:") == 1


def test_the_first_choice_is_the_answer_that_comes_alone(emulator: Emulator) -> None:
    alone = emulator.complete("tell me", max_tokens=5, temperature=1)
    several = emulator.complete("tell me", max_tokens=5, temperature=1, n=2)
    assert several["choices"][0] == alone["choices"][0]


def test_choices_of_several_prompts_stand_together(emulator: Emulator) -> None:
    prompts = [prompt_of(2, 5), prompt_of(3, 7)]
    answer = emulator.complete(prompts, max_tokens=2, n=2, temperature=1, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert answer["usage"] == {
        "prompt_tokens": 12,
        "total_tokens": 20,
        "completion_tokens": 8,
        "prompt_tokens_details": None,
    }


def test_a_stream_of_choices_says_whose_each_event_is(emulator: Emulator) -> None:
    body = {"prompt": prompt_of(4, 20), "max_tokens": 3, "n": 2, "temperature": 1}
    whole = emulator.complete(**body)
    events = emulator.stream("/v1/completions", **body, stream_options={"include_usage": True})
    texts = ["", ""]
    for event in events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert events[-1]["usage"] == {"prompt_tokens": 20, "total_tokens": 26, "completion_tokens": 6}


def test_a_chat_opens_every_choice_before_the_first_text(emulator: Emulator) -> None:
    events = emulator.stream("/v1/chat/completions", **CHAT, n=2)
    choices = [event["choices"][0] for event in events]
    assert [(choice["index"], choice["delta"].get("role")) for choice in choices[:2]] == [
        (0, "assistant"),
        (1, "assistant"),
    ]
    assert sorted(choice["index"] for choice in choices[2:]) == [0, 0, 0, 1, 1, 1]


def test_a_client_that_leaves_takes_all_its_choices_with_it(start_emulator: Start) -> None:
    emulator = start_emulator(time_scale=1.0)
    body = {"prompt": "x", "max_tokens": 4000, "n": 3, "temperature": 1, "stream": True}
    with emulator.client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    emulator.complete("y", max_tokens=1)
    assert emulator.metric("vllm:num_requests_running") == 0


def test_echo_puts_the_prompt_before_the_answer(emulator: Emulator) -> None:
    plain = emulator.complete("tell me", max_tokens=3)["choices"][0]["text"]
    assert emulator.complete("tell me", max_tokens=3, echo=True)["choices"][0]["text"] == "tell me" + plain
    events = emulator.stream("/v1/completions", prompt="tell me", max_tokens=3, echo=True)
    assert events[0]["choices"][0]["text"].startswith("tell me ")
    assert events[0]["choices"][0]["prompt_token_ids"] == list(b"tell me")
    assert "".join(event["choices"][0]["text"] for event in events) == "tell me" + plain


def test_an_echo_alone_generates_one_token_and_hides_it(emulator: Emulator) -> None:
    answer = emulator.complete("tell me", max_tokens=0, echo=True)
    assert answer["choices"][0]["text"] == "tell me"
    assert answer["usage"]["completion_tokens"] == 1


def test_with_token_ids_an_echo_is_those(emulator: Emulator) -> None:
    answer = emulator.complete("tell me", max_tokens=2, echo=True, return_token_ids=True)
    assert not answer["choices"][0]["text"].startswith("tell me")
    assert answer["choices"][0]["prompt_token_ids"] == list(b"tell me")


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_logprobs_list_as_many_tokens_as_asked_for(emulator: Emulator, num_top: int) -> None:
    choice = emulator.complete("tell me", max_tokens=2, logprobs=num_top, return_token_ids=True)["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == [0, len(logprobs["tokens"][0])]
    assert logprobs["token_logprobs"] == [0.0, 0.0]
    assert [len(top) for top in logprobs["top_logprobs"]] == [max(1, num_top)] * 2
    assert all(top[token] == 0.0 for top, token in zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True))


def test_streamed_logprobs_add_up_to_the_whole_ones(emulator: Emulator) -> None:
    body = {"prompt": "tell me", "max_tokens": 4, "logprobs": 2, "return_tokens_as_token_ids": True}
    whole = emulator.complete(**body)["choices"][0]["logprobs"]
    parts = [event["choices"][0]["logprobs"] for event in emulator.stream("/v1/completions", **body)]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert all(token.startswith("token_id:") for token in whole["tokens"])
    # In a stream offsets count what was shown, not the names of the tokens.
    assert [part["text_offset"] for part in parts] == [[0], [5], [10], [15]]


def test_an_unmodified_openai_client_reads_choices_and_logprobs(emulator: Emulator) -> None:
    with openai.OpenAI(base_url=f"{emulator.address}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="emulated-qwen3-4b",
            messages=[{"role": "user", "content": "Hello?"}],
            max_tokens=2,
            n=2,
            logprobs=True,
            top_logprobs=2,
        )
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2, 2]
        assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
