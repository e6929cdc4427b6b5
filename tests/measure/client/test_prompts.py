"""A session's stream of token ids is kept in pieces of text, and only a piece that is cut is touched."""

from __future__ import annotations

import pytest

from harness.errors import PlanError
from harness.measure.client.answer import ReceivedAnswer
from harness.measure.client.prompts import TextPiece, prompts_of, take_tokens, text_piece
from harness.model.plan.model import RequestPlan, SessionPlan
from harness.model.plan.words import TextSizes
from tests.support.replays import plan_of


class TestStreamsOfIds:
    def test_a_prompt_keeps_whole_pieces_as_they_are_and_cuts_only_the_last(self) -> None:
        pieces = [text_piece([1, 22, 333]), text_piece([4, 5])]
        assert take_tokens(pieces, 5, where="") == pieces
        assert take_tokens(pieces, 4, where="")[1] == TextPiece(1, b"4")
        assert take_tokens(pieces, 3, where="") == pieces[:1]
        assert take_tokens(pieces, 2, where="") == [TextPiece(2, b"1,22")]
        assert take_tokens(pieces, 0, where="") == []

    def test_keeping_more_than_there_is_is_refused(self) -> None:
        with pytest.raises(PlanError, match="2 tokens shorter"):
            take_tokens([text_piece([1])], 3, where="session 0")


@pytest.mark.parametrize("form", ["text", "chat"])
def test_an_answer_that_no_prompt_contains_leaves_its_place_to_the_next(form: str) -> None:
    requests = (RequestPlan(0, 20, 10, 0), RequestPlan(20, 3, 5, 0), RequestPlan(28, 2, 1, 0))
    prompts = prompts_of(plan_of(SessionPlan(0, 0, None, None, requests), prompt_form=form), TextSizes())
    for request in range(2):
        prompts.next_prompt(0, request)
    answer = ReceivedAnswer(stream=True, needs_token_ids=False)
    answer.texts.append(" carried")
    prompts.carry(0, answer)
    assert b" carried" in b"".join(prompts.next_prompt(0, 2))
