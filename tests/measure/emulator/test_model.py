"""The toy tokenizer is exact both ways, and the emulated model depends on its context alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness.measure.emulator.model import (
    EOS,
    FIRST_WORD,
    NUM_WORDS,
    ContextHash,
    StopConditions,
    decode,
    encode,
    plan_answer,
)

words = st.integers(FIRST_WORD, FIRST_WORD + NUM_WORDS - 1)


@given(st.text())
def test_text_survives_encoding_and_decoding(text: str) -> None:
    assert decode(encode(text), skip_special_tokens=False) == text


@given(st.text(max_size=40), st.lists(words, max_size=20), st.text(max_size=20))
def test_an_answer_sent_back_as_text_is_the_same_tokens(prompt: str, answer: list[int], more: str) -> None:
    assert encode(prompt + decode(answer))[: len(encode(prompt))] == encode(prompt)
    assert encode(decode(answer)) == answer
    assert encode(decode(answer) + more)[: len(answer)] == answer


def test_special_tokens_are_one_token_each() -> None:
    assert encode("<|im_start|>a<|im_end|>") == [151_644, ord("a"), EOS]


@given(st.lists(st.integers(0, 151_000), min_size=1, max_size=300), st.integers(0, 299))
def test_rolling_hash_does_not_depend_on_where_the_prompt_ended(tokens: list[int], cut: int) -> None:
    context = ContextHash.of(np.asarray(tokens[:cut], dtype=np.int32), 7)
    for token in tokens[cut:]:
        context = context.after(token)
    assert context == ContextHash.of(np.asarray(tokens, dtype=np.int32), 7)


def test_a_prompt_longer_than_the_power_table_is_hashed_whole() -> None:
    tokens = np.arange(70_000, dtype=np.int32)
    assert ContextHash.of(tokens[:-1], 0).after(69_999) == ContextHash.of(tokens, 0)


def test_without_a_stop_condition_the_answer_has_max_tokens() -> None:
    assert plan_answer(ContextHash(1), 17, StopConditions()).num_tokens == 17


def test_eos_law_never_strikes_before_min_tokens() -> None:
    lengths = {
        plan_answer(ContextHash(seed), 200, StopConditions(min_tokens=20, eos_rate=0.2)).num_tokens
        for seed in range(50)
    }
    assert min(lengths) >= 20
    assert len(lengths) > 5
