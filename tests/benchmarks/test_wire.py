"""A client that reads late says so, held to a proxy that stamps in a process of its own; and the tables beside it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from benchmarks.generators import (
    ANSWER_TOKENS,
    TOOLS,
    Reported,
    beside_wire,
    main,
    program_of,
    to_markdown,
    write_tokenizer,
)
from benchmarks.late import FAR_MS, LateRun
from benchmarks.wire import Seen, wire
from harness.analysis.validity.stalls import check_read_together
from harness.clock import NS_PER_MS, MonotonicClock
from harness.errors import SpecError
from harness.measure.client.null_server import NullServer, NullServerConfig
from harness.measure.client.run import ReplayResult, replay
from harness.measure.client.self_audit import null_target
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.spec import ClientSpec
from tests.support.analysis_tables import manifest

NUM_TOKENS = 6
TOKEN_INTERVAL_MS = 60
STOP_MS = 200
NEAR_MS = TOKEN_INTERVAL_MS / 2


def plan(num_requests: int) -> Plan:
    """Requests of one session, one after the other."""
    requests = tuple(RequestPlan(place * (50 + NUM_TOKENS), 50, NUM_TOKENS, 0) for place in range(num_requests))
    return Plan("wire", 1, 0, "as-drawn", 0, (1000, 2000), (SessionPlan(0, 0, None, None, requests),))


class StandsStill(threading.Event):
    """The stop signal of a replay. A look after a heartbeat without an event lasts while several tokens come."""

    looked_ns = 0

    def is_set(self) -> bool:
        clock = MonotonicClock()
        rested_ns = clock.now_ns() - (self.looked_ns or clock.now_ns())
        if rested_ns > 30 * NS_PER_MS:
            clock.sleep_until_ns(clock.now_ns() + STOP_MS * NS_PER_MS)
        self.looked_ns = clock.now_ns()
        return False


def replayed(stop: threading.Event, num_requests: int = 1) -> tuple[ReplayResult, list[Seen]]:
    config = NullServerConfig(token_interval_ns=TOKEN_INTERVAL_MS * NS_PER_MS)
    with NullServer(config) as server:
        with wire(f"http://{server.host}:{server.port}") as proxy:
            port = int(proxy.url.rpartition(":")[2])
            result = replay(plan(num_requests), null_target("127.0.0.1", port, ClientSpec()), stop=stop)
        seen = proxy.seen(NUM_TOKENS)
    assert result.requests["status"].to_pylist() == ["ok"] * num_requests
    return result, seen


def ttft_ms(result: ReplayResult) -> list[float]:
    """Of each request."""
    chunks = result.chunks.to_table().to_pylist()
    firsts = {chunk["request"]: chunk for chunk in reversed(chunks)}
    sent = zip(*(result.requests[name].to_pylist() for name in ("request", "sent_ns")), strict=True)
    return [
        ((firsts[place]["kernel_ns"] or firsts[place]["received_ns"]) - sent_ns) / NS_PER_MS for place, sent_ns in sent
    ]


@pytest.mark.live
def test_a_client_that_stood_still_differs_from_the_wire_by_what_it_says() -> None:
    result, (seen,) = replayed(StandsStill())
    assert seen.request_id == result.requests["request_id"].to_pylist()[0]
    assert len(seen.token_ns) == NUM_TOKENS
    assert ttft_ms(result)[0] - seen.ttft_ms > FAR_MS
    assert result.audit["read_together"]["first"]["sum_ms"] > FAR_MS
    (finding,) = check_read_together(manifest(client_audit=result.audit))
    assert (finding.code, finding.severity) == ("read-together", "invalid")


@pytest.mark.live
def test_a_client_that_reads_in_time_has_the_first_token_of_the_wire() -> None:
    """A machine that stands still may part some of them, and makes none earlier than on the wire."""
    result, seen = replayed(threading.Event(), num_requests=3)
    apart_ms = [client - each.ttft_ms for client, each in zip(ttft_ms(result), seen, strict=True)]
    assert -NEAR_MS < min(apart_ms) < NEAR_MS


def test_only_a_run_far_from_the_wire_has_to_be_marked() -> None:
    near, said, unsaid = LateRun(4, 0, ""), LateRun(9, 10, "invalid"), LateRun(-9, 0, "")
    assert [run.is_held for run in (near, said, unsaid)] == [True, True, False]


def test_a_tool_stands_beside_the_wire() -> None:
    ms = NS_PER_MS
    seen = [Seen("", start * ms, [(start + 10) * ms, (start + 30) * ms], (start + 40) * ms) for start in (0, 60)]
    row = beside_wire(Reported(12.0, None, 45.0, 50.0), seen, 1.5)
    assert row == (2.0, None, 5.0, 10.0, 1.5, 40.0)
    text = to_markdown({"tool": [row, row]})
    cells = ["tool", "2 [2 .. 2]", "-", "5 [5 .. 5]", "10 [10 .. 10]", "1.5 [1.5 .. 1.5]", "40 [40 .. 40]"]
    assert text.splitlines()[-1].strip("| ").split(" | ") == cells


def test_an_environment_without_the_tool_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="GuideLLM is not installed there"):
        program_of(TOOLS["guidellm"], tmp_path)
    with pytest.raises(SpecError, match="vllm bench serve is not installed there"):
        main(["--vllm", str(tmp_path)])


def test_any_ids_of_the_tokenizer_are_a_text_of_as_many_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    letters = [text for text, place in vocabulary.items() if place]
    assert all(len(text) == 1 and text.isascii() and text.isprintable() for text in letters)
    assert len(letters) > ANSWER_TOKENS
