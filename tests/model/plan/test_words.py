"""Words fill a prompt to the planned number of a server's tokens, whatever its tokenizer makes of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.model.plan.model import RequestPlan, SessionPlan
from harness.model.plan.tokens import TokenStreams
from harness.model.plan.words import WORDS, TextSizes
from tests.support.replays import plan_of

BYTES = TextSizes("tokenize", tuple(float(len(word) + 1) for word in WORDS))
DRAWN = np.random.default_rng(5).integers(0, len(WORDS), 5000)


def test_where_a_word_is_a_token_the_words_are_those_drawn() -> None:
    for count in (1, 2, 3, 100):
        assert TextSizes().fill(DRAWN, count) == (DRAWN[:count].tolist(), 0.0)


@given(length=st.integers(4, 3000), start=st.integers(0, 1000))
def test_where_a_byte_is_a_token_every_length_from_four_on_but_the_gap_is_exact(length: int, start: int) -> None:
    words, left = BYTES.fill(DRAWN[start:], length)
    assert left == 0.0
    assert len("".join(f" {WORDS[word]}" for word in words)) == length


@settings(max_examples=15)
@given(st.lists(st.integers(1, 9), min_size=len(WORDS), max_size=len(WORDS)), st.integers(20, 2000))
def test_a_word_of_one_token_makes_every_length_exact(sizes: list[int], length: int) -> None:
    known = TextSizes("tokenize", (1.0, *map(float, sizes[1:])))
    words, left = known.fill(DRAWN, length)
    assert left == 0.0
    assert sum(known.word_tokens[word] for word in words) == length


def test_a_length_that_no_words_have_is_missed_by_less_than_a_word() -> None:
    assert TextSizes("tokenize", (2.0,) * len(WORDS)).fill(DRAWN, 101)[1] == 1.0
    assert BYTES.fill(DRAWN, 2) == ([], 2)


@pytest.mark.parametrize("sizes", [BYTES, TextSizes("usage", tuple(1 + 0.31 * len(word) for word in WORDS))])
def test_a_longer_text_begins_as_the_shorter_but_for_its_last_words(sizes: TextSizes) -> None:
    texts = [sizes.fill(DRAWN, length)[0] for length in range(50, 900, 7)]
    for shorter, longer in pairwise(texts):
        assert longer[: len(shorter) - 5] == shorter[:-5]
        assert len(longer) >= len(shorter) - 1


def requests(*lengths: tuple[int, int]) -> tuple[RequestPlan, ...]:
    return tuple(RequestPlan(keep, new, 10, 0) for keep, new in lengths)


def test_a_prompt_that_continues_another_one_begins_with_exactly_its_text() -> None:
    streams = TokenStreams(plan_of(SessionPlan(0, 0, None, None, requests((0, 2000), (2010, 333), (2353, 200)))), BYTES)
    answers = {0: ["0123456789"] * 2}
    prompts = [streams.text_prompt(0, request, answers) for request in range(3)]
    assert [len(prompt) for prompt in prompts] == [2000, 2343, 2553]
    assert prompts[1].startswith(f"{prompts[0]}0123456789 ")
    assert prompts[2].startswith(f"{prompts[1]}0123456789 ")


def test_a_truncated_prompt_has_the_planned_length_too() -> None:
    streams = TokenStreams(plan_of(SessionPlan(0, 0, None, None, requests((0, 2000), (700, 50)))), BYTES)
    first, second = (streams.text_prompt(0, request, {0: [""]}) for request in range(2))
    assert len(second) == 750
    assert second[:670] == first[:670]


def test_sessions_share_the_text_of_their_shared_blocks_and_nothing_more() -> None:

    sessions = tuple(SessionPlan(index, 0, None, None, requests((0, 900))) for index in range(3))
    shared = replace(plan_of(*sessions), shared_prefix_tokens=256)
    first, second, third = (TokenStreams(shared, BYTES).fresh_text(session, 0) for session in range(3))
    assert first[:256] == second[:256] == third[:256]
    assert len({text[256:300] for text in (first, second, third)}) == 3
    named = replace(plan_of(*(replace(each, blocks=(7, 9, each.index)) for each in sessions)), block_tokens=128)
    first, second, third = (TokenStreams(named, BYTES).fresh_text(session, 0) for session in range(3))
    assert first[:256] == second[:256] == third[:256]
    assert len({text[256:300] for text in (first, second, third)}) == 3
    assert {len(text) for text in (first, second, third)} == {900}


def test_what_a_template_adds_is_part_of_the_planned_length() -> None:
    sizes = TextSizes("tokenize", BYTES.word_tokens, first_tokens=19, turn_tokens=21)
    streams = TokenStreams(plan_of(SessionPlan(0, 0, None, None, requests((0, 200), (210, 90)))), sizes)
    first, _, second = streams.chat_messages(0, 1, {0: ["0123456789"]})
    assert (len(first["content"]), len(second["content"])) == (200 - 19, 90 - 21)


def test_a_turn_that_is_shorter_than_the_template_still_has_a_word() -> None:
    sizes = TextSizes("tokenize", turn_tokens=21)
    streams = TokenStreams(plan_of(SessionPlan(0, 0, None, None, requests((0, 200), (210, 8)))), sizes)
    assert len(streams.fresh_text(0, 1).split()) == 1


def test_sizes_are_written_down_with_all_that_the_prompts_depend_on() -> None:
    written = BYTES.to_json()
    assert (
        TextSizes(written["source"], tuple(written["word_tokens"]), written["first_tokens"], written["turn_tokens"])
        == BYTES
    )
    assert written["words_per_token"] == pytest.approx(len(WORDS) / sum(len(word) + 1 for word in WORDS), abs=1e-6)
