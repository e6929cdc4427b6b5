"""A recording that contradicts itself is refused with its reason, and a trace is described by its own counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.clock import NS_PER_S
from harness.errors import PlanError
from harness.model.traces.recording import (
    MOST_TOKENS,
    RecordedRequest,
    Recording,
    TraceHead,
    check_recording,
    describe_trace,
    open_trace,
    write_trace,
)

ALONE = RecordedRequest(None, (), 0, "none", 200, 0, 10)
NEXT = RecordedRequest(0, (0,), NS_PER_S, "tool", 300, 210, 10)


@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        ((ALONE, NEXT), ""),
        ((ALONE, NEXT._replace(keep_tokens=0, base=None)), ""),
        ((ALONE._replace(prompt_tokens=MOST_TOKENS),), ""),
        ((ALONE._replace(prompt_tokens=1, generate_tokens=2, abort_after_tokens=1),), ""),
        ((ALONE._replace(after=(0,)),), "it comes after [0], which are not all earlier requests"),
        ((ALONE, NEXT._replace(after=(-1,))), "it comes after [-1], which are not all earlier requests"),
        ((ALONE, NEXT._replace(after=())), "it begins with request 0, which need not have ended"),
        ((ALONE._replace(wait_ns=-1),), "its wait is negative (-1 ns)"),
        ((ALONE._replace(prompt_tokens=0),), "0 prompt and 10 generated tokens make no request"),
        ((ALONE._replace(generate_tokens=0),), "200 prompt and 0 generated tokens make no request"),
        ((ALONE._replace(prompt_tokens=MOST_TOKENS + 1),), "generated tokens make no request"),
        ((ALONE._replace(generate_tokens=MOST_TOKENS + 1),), "generated tokens make no request"),
        ((ALONE._replace(abort_after_tokens=10),), "its client leaves after 0 ns or 10 tokens"),
        ((ALONE._replace(abort_after_ns=-1),), "its client leaves after -1 ns or 0 tokens"),
        (
            (ALONE._replace(abort_after_ns=1, abort_after_tokens=1),),
            "its client leaves after a time and after a number of tokens",
        ),
        ((ALONE, NEXT._replace(keep_tokens=211)), "it keeps 211 of 210 tokens"),
        ((ALONE, NEXT._replace(prompt_tokens=209)), "it keeps 210 of 210 tokens"),
        ((ALONE._replace(abort_after_tokens=4), NEXT), "it keeps 210 of 204 tokens"),
        ((ALONE._replace(abort_after_ns=1), NEXT), "it keeps 210 of 200 tokens"),
        ((ALONE._replace(keep_tokens=1),), "it keeps 1 of 0 tokens"),
    ],
)
def test_a_recording_that_contradicts_itself_is_refused_with_the_reason(
    requests: tuple[RecordedRequest, ...], reason: str
) -> None:
    said = ""
    try:
        check_recording(Recording("a", 0, requests))
    except PlanError as error:
        said = str(error)
    assert reason in said
    assert bool(reason) == bool(said)


def described(folder: Path, *recordings: tuple[RecordedRequest, ...]) -> dict[str, str]:
    head = TraceHead("t", "made", "together", 100, {}, {}, ())
    trees = [Recording(str(place), 0, requests) for place, requests in enumerate(recordings)]
    with open_trace(write_trace(folder / "t.jsonl", head, trees)) as reader:
        return describe_trace(reader)


def test_an_endless_cache_hits_the_leading_blocks_that_came_before_and_no_later_ones(tmp_path: Path) -> None:
    named = [ALONE._replace(prompt_tokens=500, blocks=blocks) for blocks in ((1, 2, 3), (1, 9, 3), (4, 2, 3))]
    facts = described(tmp_path, *((request,) for request in named))
    assert facts["endless cache"] == "ceiling 6.7 % of prompt tokens", "block 1 of the second: 100 of 1,500 tokens"
    assert facts["named blocks"] == "5 of 100 tokens"


def test_a_trace_is_described_by_its_forks_joins_answers_that_were_left_and_known_waits(tmp_path: Path) -> None:
    waits = (NEXT, NEXT._replace(wait_ns=3 * NS_PER_S, base=None, keep_tokens=0), NEXT._replace(is_drawn=True))
    joined = ALONE._replace(after=(1, 2), wait_kind="tool", abort_after_tokens=4)
    facts = described(tmp_path, (ALONE, *waits, joined))
    assert facts["forks, joins"] == "1 and 1 requests; 1 answers are left"
    assert facts["unknown waits"].startswith("1: ")
    assert facts["tool waits, s"] == "3: min 0, median 1, max 3, sum 4", "the one that is drawn is not among them"
    assert facts["turn before"] == "ceiling 32.3 % of prompt tokens", "2 x 210 of 1,300"
    assert "unknown waits" not in described(tmp_path, (ALONE, NEXT))
