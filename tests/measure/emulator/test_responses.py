"""Events made from a template are the events that serialising would give."""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np
import pytest

from harness.measure.emulator.model import decode
from harness.measure.emulator.protocol import ChatRequest, CompletionRequest
from harness.measure.emulator.responses import EmulatedAnswer
from harness.model.engine.core import EngineRequest
from harness.stacks.rbln.rules.dialect import DIALECTS


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.write = self.written.append

    def is_closing(self) -> bool:
        return False


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize("with_ids", [False, True])
def test_a_later_event_differs_from_the_first_only_in_text_and_tokens(kind: Any, with_ids: bool) -> None:
    prompt, wire = np.arange(5, dtype=np.int32), Wire()
    request = EngineRequest(0, "", "", prompt, 9, np.zeros(0, dtype=np.int64), 9)
    body = kind(prompt="x", messages=[], return_token_ids=with_ids)
    answer = EmulatedAnswer(body, request, DIALECTS["0.12.0"], response_id='cmpl-x[-1]"')
    answer.transport, answer.is_chunked = cast("Any", wire), False
    tokens = [3000, *b'"\\\n', 0xE9, 3001]
    for token in tokens:
        answer.push([token])
    first, *later = [json.loads(chunk.decode().split("data: ")[-1]) for chunk in wire.written]
    for token, chunk in zip(tokens[1:], later, strict=True):
        expected = json.loads(json.dumps(first))
        choice = expected["choices"][0]
        if kind is ChatRequest:
            choice["delta"]["content"] = decode([token])
        else:
            choice["text"], choice["prompt_token_ids"] = decode([token]), None
        choice["token_ids"] = [token] if with_ids else None
        assert chunk == expected
