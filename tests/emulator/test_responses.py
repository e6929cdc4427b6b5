"""Events made from a template are the events that serialising would give."""

from __future__ import annotations

import json

import numpy as np
import pytest

from harness.emulator.core import EngineRequest
from harness.emulator.model import ContextHash
from harness.emulator.responses import Answer
from harness.stack.rbln.rules.dialect import DIALECTS


def engine_request() -> EngineRequest:
    prompt = np.arange(5, dtype=np.int32)
    return EngineRequest(0, "", "", prompt, 9, np.zeros(0, dtype=np.int64), ContextHash(1), 9)


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("text", [" word", 'quote " and \\', "", "é\n"])
def test_a_later_event_differs_from_the_first_only_in_text_and_tokens(is_chat: bool, with_ids: bool, text: str) -> None:
    dialect = DIALECTS["0.12.0"]
    answer = Answer(dialect, "cmpl-x[-1]", 1, "model", is_chat, [engine_request()], return_token_ids=with_ids)
    first = answer.chunk(0, "first", [3], 1).decode().split("data: ")[-1]
    expected = json.loads(first)
    choice = expected["choices"][0]
    if is_chat:
        choice["delta"]["content"] = text
    else:
        choice["text"], choice["prompt_token_ids"] = text, None
    choice["token_ids"] = [7, 8] if with_ids else None
    for _ in range(2):
        assert json.loads(answer.chunk(0, text, [7, 8], 3).removeprefix(b"data: ")) == expected
