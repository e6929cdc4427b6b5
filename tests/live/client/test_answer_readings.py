"""Every way to read an answer gives the same: event by event, several receives at once, and the compiled loop's own.

``ANSWER_EXAMPLES`` asks for more inputs than a test run has time for.
"""

from __future__ import annotations

import json
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.live.client.answer import NO_KERNEL_STAMP, Answer, parse_each
from tests.support.readings import drawn_stream, read_in_every_way

EXAMPLES = int(os.environ.get("ANSWER_EXAMPLES", "12000"))


def test_all_readings_of_a_stream_agree() -> None:
    draw = random.Random(EXAMPLES)
    num_answers = sum(read_in_every_way(drawn_stream(draw), draw) for _ in range(EXAMPLES))
    # Neither all of them are broken, nor none.
    assert EXAMPLES // 20 < num_answers < EXAMPLES * 19 // 20


@pytest.mark.parametrize(
    "events",
    [
        # Joined by commas, the first two would be one document and the third would be two: as many as events.
        [b'{"id":"a","choices":[{"token_ids":[1', b"2]}]}", b'{"id":"a","choices":[]},{"id":"a","choices":[]}'],
        [b'{"a":"', b'"}', b"{},{}"],
        [b"{},{}", b'{"a":[1', b"2]}"],
    ],
)
def test_events_torn_into_each_other_are_no_documents(events: list[bytes]) -> None:
    assert json.loads(b"[%b]" % b",".join(events))
    assert parse_each(events) is None
    answer = Answer(stream=True)
    answer.feed_many(b"".join(b"data: %b\n\n" % event for event in events), [(0, NO_KERNEL_STAMP, len(events))])
    assert "not a JSON object" in answer.problem


@settings(max_examples=500)
@given(st.lists(st.text(st.sampled_from('{}[],:"\\ a1'), max_size=8), min_size=1, max_size=6))
def test_texts_are_read_together_exactly_when_each_is_json_by_itself(texts: list[str]) -> None:
    def is_json(text: str) -> bool:
        try:
            json.loads(text)
        except ValueError:
            return False
        return True

    documents = parse_each([text.encode() for text in texts])
    assert (documents is not None) == all(map(is_json, texts))
    assert documents is None or documents == [json.loads(text) for text in texts]
