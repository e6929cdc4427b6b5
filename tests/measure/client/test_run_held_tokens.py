"""First tokens that came together with later ones are counted, and how long they were held."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from harness.clock import NS_PER_MS
from harness.measure.client.held_tokens import held_facts
from harness.measure.records.schema import CHUNKS, RowStream


def facts(*answers_ms: Sequence[float]) -> tuple[int, int, float]:
    """Answers, those of them whose first token was held, and ms in the mean. answers_ms: chunks since the send."""
    chunks = [
        {
            "session": session,
            "request": 0,
            "chunk": place,
            "received_ns": round((100 + at_ms) * NS_PER_MS),
            "num_tokens": 1,
        }
        for session, answer in enumerate(answers_ms)
        for place, at_ms in enumerate(answer)
    ]
    requests = pa.table(
        {
            "session": pa.array(range(len(answers_ms)), pa.int32()),
            "request": pa.array([0] * len(answers_ms), pa.int32()),
            "sent_ns": pa.array([100 * NS_PER_MS] * len(answers_ms), pa.int64()),
        }
    )
    held = held_facts(RowStream.of(pa.Table.from_pylist(chunks, CHUNKS)), requests)["held_first"]
    return held["num_answers"], held["num_held"], held["mean_ms"]


def test_the_time_that_a_first_token_was_held_is_that_of_the_tokens_that_came_with_it() -> None:
    # Five at once, then one each 10 ms: the first of the five was made 40 ms before.
    assert facts([50.0] * 5 + [60.0, 70.0, 80.0, 90.0]) == (1, 1, pytest.approx(40.0))
    # Two bursts of four: 4 tokens in the 40 ms between them.
    assert facts([50.0] * 4 + [90.0] * 4) == (1, 1, pytest.approx(30.0))
    # All at once: at most a share of the time since the send.
    assert facts([80.0] * 8) == (1, 1, pytest.approx(70.0))


def test_a_burst_may_take_several_reads() -> None:
    assert facts([50.0, 50.1, 50.1, 50.1, 50.2, 50.2, 60.0, 70.0])[:2] == (1, 1)


def test_tokens_that_come_one_by_one_or_two_together_now_and_then_were_not_held() -> None:
    # However fast the server is, and however busy.
    assert facts([50.0, 60.0, 70.0, 80.0], [50.0, 50.2, 50.4, 50.6, 50.8, 51.0, 51.2]) == (2, 0, 0.0)
    assert facts([50.0, 50.0, 60.0, 70.0, 70.0, 80.0], [50.0, 60.0, 60.0, 70.0]) == (2, 0, 0.0)


def test_answers_of_fewer_tokens_are_not_judged() -> None:
    assert facts([50.0, 50.0, 50.0]) == (0, 0, 0.0)
    assert facts() == (0, 0, 0.0)
