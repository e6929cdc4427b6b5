"""A session's stream of token ids is kept in pieces of text, and only a piece that is cut is touched."""

from __future__ import annotations

import pytest

from harness.client.prompts import TextPiece, take_tokens, text_piece
from harness.errors import PlanError


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
