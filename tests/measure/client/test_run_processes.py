"""Several client processes for one replay: one start, chains of sessions kept whole, the same rows as one process."""

from __future__ import annotations

import subprocess
import sys
import threading
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_MS, NS_PER_S, ScaledClock
from harness.errors import ServerError
from harness.measure.client.null_server import NullServer
from harness.measure.client.run import ReplayEvent, ReplayResult, Target, Task, partition_sessions, replay
from harness.measure.client.target import Endpoint
from harness.measure.records.schema import CHUNKS, REQUESTS
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.spec import ClientSpec
from tests.support.processes import WITHIN_S
from tests.support.raw_server import HANG, RawServer, Reply, answered
from tests.support.tls import Served, over

REQUEST = RequestPlan(0, 20, 4, 3 * NS_PER_MS)
AGAIN = RequestPlan(24, 5, 4, 3 * NS_PER_MS)


def plan_of(*links: tuple[int | None, int | None]) -> Plan:
    """A plan with one session of two requests per (after, continues)."""
    sessions = tuple(
        SessionPlan(index, 0, after, continues, (REQUEST, AGAIN)) for index, (after, continues) in enumerate(links)
    )
    return Plan("test", 7, 0, "as-drawn", 0, (1000, 60_000), sessions)


FREE = (None, None)


def run(plan: Plan, server: Served, options: ClientSpec, scheme: str = "http", **more: Any) -> ReplayResult:
    with over(scheme, server) as served:
        endpoint = Endpoint(served.host, served.port, is_https=scheme == "https")
        target = Target(endpoint, "null", options, ScaledClock(2.0), request_timeout_ns=400 * NS_PER_S)
        return replay(plan, target, **more)


class TestDealing:
    def test_every_session_is_dealt_once_and_hands_are_even(self) -> None:
        hands = partition_sessions(plan_of(*[FREE] * 10), 3)
        assert sorted(session for hand in hands for session in hand) == list(range(10))
        assert sorted(map(len, hands)) == [3, 3, 4]

    def test_what_follows_or_continues_another_stays_with_it(self) -> None:
        plan = plan_of(FREE, FREE, (0, None), (2, 0), (1, None), FREE)
        hands = partition_sessions(plan, 3)
        assert [0, 2, 3] in hands
        assert any({1, 4} <= set(hand) for hand in hands)

    def test_there_are_no_empty_hands(self) -> None:
        assert partition_sessions(plan_of(FREE, FREE), 8) == [[0], [1]]


@pytest.mark.live
class TestAReplayInProcesses:
    @pytest.mark.parametrize(
        ("stream", "scheme"),
        [(True, "http"), (True, "https"), pytest.param(False, "http", marks=pytest.mark.same_everywhere)],
    )
    def test_rows_are_those_of_one_process(self, stream: bool, scheme: str) -> None:
        plan = plan_of(FREE, FREE, (0, 0), FREE, (1, None))
        with NullServer() as server:
            together = run(plan, server, ClientSpec(stream=stream))
            apart = run(plan, server, ClientSpec(stream=stream, processes=2), scheme)
        assert apart.requests.schema == REQUESTS
        assert apart.chunks.schema == CHUNKS
        planned = ["session", "request", "status", "prompt_tokens", "completion_tokens", "cached_tokens"]
        assert apart.requests.select(planned).equals(together.requests.select(planned))
        assert (
            apart.chunks.to_table()
            .select(["session", "request", "chunk", "num_tokens"])
            .equals(together.chunks.to_table().select(["session", "request", "chunk", "num_tokens"]))
        )

    @pytest.mark.same_everywhere
    def test_all_sessions_are_due_at_one_start_none_is_sent_before_and_all_events_count_on(self) -> None:
        events: list[ReplayEvent] = []
        with NullServer() as server:
            result = run(plan_of(*[FREE] * 6), server, ClientSpec(processes=3), on_event=events.append)
        first = [row for row in result.requests.to_pylist() if row["request"] == 0]
        assert {row["due_ns"] for row in first} == {result.start_ns}
        assert all(row["sent_ns"] >= result.start_ns for row in first)
        assert result.audit["num_early_sends"] == 0
        assert len(result.audit["processes"]) == 3
        assert sorted((event.session, event.request) for event in events) == [(s, r) for s in range(6) for r in (0, 1)]
        assert [event.num_finished for event in events] == list(range(1, 13))

    def test_stopping_early_reaches_every_process(self) -> None:
        stop = threading.Event()

        with RawServer(lambda asked: Reply([], HANG) if asked.request else answered(asked)) as server:
            options = ClientSpec(processes=2)
            result = run(plan_of(FREE, FREE), server, options, stop=stop, on_event=lambda _event: stop.set())
        rows = result.requests.to_pylist()
        assert len(rows) == 4
        assert {row["status"] for row in rows if row["request"] == 1} <= {"connection", "not_sent"}

    def test_a_process_that_cannot_run_ends_the_replay(self) -> None:
        with NullServer() as server:
            server.host = "no-such-host.invalid"
            with pytest.raises(ServerError, match=r"client process ended without a result\. Its last line: .*invalid"):
                run(plan_of(FREE, FREE), server, ClientSpec(processes=2))

    def test_a_process_whose_harness_is_gone_leaves_neither_files_nor_words(self, tmp_path: Path) -> None:
        folder = tmp_path / "harness-client-x" / "0"
        folder.mkdir(parents=True)
        ours, theirs = Pipe()
        with NullServer() as server, theirs:
            target = Target(
                Endpoint(server.host, server.port), "null", ClientSpec(), ScaledClock(1.0), NS_PER_S, folder
            )
            ended = subprocess.Popen(
                [sys.executable, "-c", f"from harness.measure.client.run import work; work({theirs.fileno()})"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
            )
            theirs.close()
            ours.send(Task(plan_of(FREE), [0], target, folder, keeps_events=True))
            ours.close()
            output, _ = ended.communicate(timeout=WITHIN_S)
        assert (ended.returncode, output) == (0, b"")
        assert not folder.parent.exists()
