"""The null servers are alike, the C client replays what the plan says, the table shows medians with their range."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.client import (
    Bench,
    Quantity,
    Shape,
    bare_loop,
    bench_memory,
    bench_peers,
    bench_rearrival,
    c_programs,
    columns_of,
    floor_rearrival,
    plan_of,
    rearrival_plan,
    to_markdown,
    to_table,
)
from benchmarks.peers import Peer, parse_peer
from harness.clock import NS_PER_MS
from harness.errors import SpecError
from harness.measure.client.run import ReplayResult
from harness.model.spec import ClientSpec


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, list[str]]]:
    with c_programs() as commands:
        if not commands:
            pytest.skip("no C compiler on this machine")
        yield commands


def counts(result: ReplayResult) -> list[dict[str, object]]:
    names = ["session", "request", "status", "prompt_tokens", "completion_tokens", "cached_tokens"]
    return result.requests.select(names).to_pylist()


@pytest.mark.live
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("token_interval_ns", [0, NS_PER_MS])
def test_the_two_null_servers_give_the_same_rows(
    programs: dict[str, list[str]], stream: bool, token_interval_ns: int
) -> None:
    plan = plan_of(Shape(5, 3, 50, 7))
    options = ClientSpec(stream=stream)
    fast, _ = Bench(programs["nullserver"]).run(plan, options, token_interval_ns=token_interval_ns)
    plain, _ = Bench(None).run(plan, options, token_interval_ns=token_interval_ns)
    assert counts(fast) == counts(plain)
    assert {row["status"] for row in counts(fast)} == {"ok"}


@pytest.mark.live
def test_the_c_client_is_never_early_either(programs: dict[str, list[str]]) -> None:
    bench = Bench(programs["nullserver"], programs["floorclient"])
    plan = rearrival_plan(is_quick=True)
    lags_ns = floor_rearrival(bench, plan)
    assert len(lags_ns) == plan.num_waits
    assert lags_ns.min() > 0


@pytest.mark.live
def test_the_bare_loop_gives_a_rate_and_its_cpu(programs: dict[str, list[str]]) -> None:
    rate, cpu_s = bare_loop(Bench(programs["nullserver"]), 4, 200)
    assert rate > 0
    assert cpu_s > 0


@pytest.mark.live
def test_a_scenario_runs_without_a_compiler() -> None:
    bench = Bench(None, is_quick=True)
    bench_rearrival(bench)
    assert all(set(by_client) == {"epoll"} for by_client in bench.figures.values())


def test_the_table_shows_median_range_and_goal() -> None:
    bench = Bench(None)
    for value in (3.0, 1.5, 20_000.0):
        bench.note("epoll", Quantity("lag", "us", "<= 20"), value)
    text = StringIO()
    Console(width=160, file=text).print(to_table(bench))
    assert "3 [1.5 .. 20,000]" in text.getvalue()
    assert "<= 20" in text.getvalue()
    assert "| lag | us | <= 20 | 3 [1.5 .. 20,000] |" in to_markdown(bench)


BURST = """
import sys, threading, urllib.request
def send(place):
    body = b'{"model":"null","prompt":"a b c","max_tokens":2,"stream":false}'
    urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/v1/completions", body)).read()
threads = [threading.Thread(target=send, args=(place,)) for place in range(int(sys.argv[2]))]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.mark.live
def test_the_memory_of_a_replay_is_that_of_a_process_of_its_own() -> None:
    bench = Bench(None, is_quick=True)
    bench_memory(bench)
    ((quantity, by_client),) = bench.figures.items()
    assert (quantity.unit, quantity.goal) == ("MB", "<= 100")
    assert 0 < by_client["epoll"][0] < 100


class TestPeers:
    @pytest.mark.live
    def test_a_peer_has_a_column_with_the_spread_of_its_burst(self, tmp_path: Path) -> None:
        script = tmp_path / "burst.py"
        script.write_text(BURST)
        peer = parse_peer(f"threads={sys.executable} {script} {{url}} {{num_requests}}")
        bench = Bench(None)
        bench_peers(bench, [peer])
        assert columns_of(bench) == ("epoll", "threads")
        ((by_client),) = bench.figures.values()
        assert by_client["threads"][0] > 0

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("guidellm", "is not NAME=COMMAND"),
            ("x=true", "neither {url} nor {port}"),
            ("x=curl {url} {model}", "unknown field"),
        ],
    )
    def test_a_peer_that_cannot_be_meant_is_refused(self, text: str, says: str) -> None:
        with pytest.raises(SpecError, match=re.escape(says)):
            parse_peer(text)

    @pytest.mark.live
    @pytest.mark.parametrize(
        ("command", "says"),
        [("/nowhere/at/all {url}", "cannot be run"), ("false {url}", "exit code 1 after 0 of 64 requests")],
    )
    def test_a_peer_that_fails_says_how(self, command: str, says: str) -> None:
        with pytest.raises(SpecError, match=re.escape(says)):
            bench_peers(Bench(None), [Peer("broken", command)])
