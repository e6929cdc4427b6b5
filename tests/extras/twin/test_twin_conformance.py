"""The real vLLM and vllm-rbln on the stand-in device behave as the harness says they do.

Every server here is started, replayed against, scraped and judged by the code that an NPU server would get. Skipped
where the twin is not installed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.logs.parse import ParseCounts, parse_log
from harness.extras.twin.environment import TwinEnvironment
from harness.measure.client.replay_state import token_digest
from harness.measure.records.layout import step_reports
from harness.measure.records.run import SealedRun
from harness.model.engine import EngineConfig
from harness.model.plan.files import read_plan
from harness.model.plan.model import Plan
from harness.model.spec import ServerSpec
from harness.stacks.rbln.rules.kv_rules import AUTO, rule_set
from tests.support.cut_logs import assert_no_cut_invents_or_loses
from tests.support.observed import check_observed
from tests.support.twin_follow import Asked, Followed, follow, log_messages
from tests.support.twin_runs import Turn, counters, device_trace, faultless_turns, increase, run_on_twin

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

NUM_SESSIONS = 12
SURVIVAL = {6: (1920, 1, 1920), 7: (0, 2, 1920)}
"""m: cached tokens of the re-arrival, evictions, what prefix_cache_hits_total claims. Source: the paper, table S4."""


def plan_of(run: SealedRun) -> Plan:
    return read_plan(run.file("plan.jsonl"))


def place_in(run: SealedRun, engine_id: str) -> tuple[int, int]:
    """(session, request) of an id in the server's log: the client's own id lies inside it."""
    for row in run.table("requests").select(["session", "request", "request_id"]).to_pylist():
        if f"-{row['request_id']}-" in engine_id:
            return row["session"], row["request"]
    raise AssertionError(f"{engine_id} was not sent by the client")


def token_range(run: SealedRun) -> tuple[int, int]:
    """The range [low, high) of the tokens that the served artifact generates; its folder stands in the command."""
    graphs = [Path(word) / "prefill.rbln" for word in run.manifest.server.argv]
    (shapes,) = [json.loads(graph.read_text()) for graph in graphs if graph.is_file()]
    return shapes["token_low"], shapes["token_high"]


def turns_of(run: SealedRun) -> dict[tuple[int, int], Turn]:
    """What every request of the run sent and must have got."""
    return faultless_turns(plan_of(run), *token_range(run))


def assert_no_wrong_token(run: SealedRun) -> None:
    expected = turns_of(run)
    for row in run.table("requests").to_pylist():
        place = row["session"], row["request"]
        assert row["token_digest"] == token_digest(expected[place].answer), place


def follow_run(run: SealedRun, trace: list[dict[str, Any]], server: ServerSpec) -> Followed:
    """Play a trace of the run to the engine, beside the run's log."""
    turns = turns_of(run)

    def asked(engine_id: str) -> Asked:
        turn = turns[place_in(run, engine_id)]
        return Asked(turn.prompt, len(turn.answer))

    messages = log_messages(run.file("server.log").read_text(encoding="utf-8", errors="replace"))
    return follow(trace, messages, EngineConfig.from_server(server), asked)


def assert_engine_follows(run: SealedRun, server: ServerSpec) -> Followed:
    """From the server's true arrivals alone, every admission, eviction, reuse, block id and (n, b) is the engine's."""
    followed = follow_run(run, device_trace(run), server)
    assert not followed.difference, followed.difference
    assert followed.arrivals == followed.admissions == plan_of(run).num_requests > 0
    assert followed.decodes == len(device_trace(run, "decode")) > 0
    assert followed.lines > followed.steps > followed.decodes
    print(f"{plan_of(run).source}: {followed.text()}, compared and equal")
    return followed


def assert_bucket_lines_equal_the_device_trace(run: SealedRun) -> None:
    logged = re.findall(
        r"\[BUCKET\] request_nums=(\d+) padded_batch_size=(\d+)", run.file("server.log").read_text(errors="replace")
    )
    traced = [(record["n"], record["b"]) for record in device_trace(run, "decode")]
    assert [(int(n), int(b)) for n, b in logged] == traced


def assert_every_line_is_read(run: SealedRun) -> None:
    """The parser leaves no line of ours unread, and a cut anywhere costs at most the line it goes through."""
    content = run.file("server.log").read_bytes()
    counts = ParseCounts()
    kinds = Counter(type(event).__name__ for event in parse_log([content], counts))
    assert counts.unread == 0, counts.unread_samples
    assert kinds["BucketEvent"] == len(device_trace(run, "decode"))
    cuts = assert_no_cut_invents_or_loses(content)
    assert set(cuts) >= {"alloc", "BucketEvent", "eviction", "free_request", "anywhere"}
    print(f"cuts: {', '.join(f'{count} {kind}' for kind, count in cuts.items())}")


def assert_another_order_of_arrival_is_noticed(run: SealedRun, server: ServerSpec) -> None:
    """The comparison is of the scheduler's choices: two requests that came in the other order make a difference."""
    trace = device_trace(run)
    first, second = [record for record in trace if record["kind"] == "arrival"][:2]
    for name in ("request", "prompt_tokens"):
        first[name], second[name] = second[name], first[name]
    assert "requests of schedule()" in follow_run(run, trace, server).difference


# Where the answer turns, on the default release; the engine, which has all sizes, follows the other releases below.
@pytest.mark.parametrize(("twin", "num_background"), [("0.12.0", place) for place in SURVIVAL], indirect=["twin"])
def test_a_sessions_kv_survives_as_long_as_the_paper_saw(
    twin: TwinEnvironment, tmp_path: Path, num_background: int
) -> None:
    cached, evictions, hits = SURVIVAL[num_background]
    workload = {"source": "sequential", "num_background": num_background}

    run = run_on_twin(tmp_path, "survival", workload, {"environment": twin.version})

    assert run.is_valid, run.invalid_reasons
    rows = run.table("requests").to_pylist()
    assert [row["cached_tokens"] for row in rows] == [0] * (num_background + 1) + [cached]
    assert run.file("server.log").read_text().count("[PFX] [EVICTION]") == evictions
    assert increase(run, "vllm:prefix_cache_hits_total") == hits
    assert increase(run, "vllm:prompt_tokens_cached_total") == cached
    assert len(device_trace(run, "copy")) == bool(cached)
    assert_no_wrong_token(run)
    print(f"{twin.version}: {check_observed(run, run.file('device_trace.jsonl'))}")
    followed = assert_engine_follows(run, ServerSpec(rules=rule_set(AUTO, twin.version).name))
    assert (followed.reuses, followed.evictions) == (bool(cached), evictions)
    assert followed.false_hits == (hits > cached)


@pytest.mark.parametrize("twin", ["0.12.0", "0.12.1a8", "0.11.1"], indirect=True)
def test_concurrent_sessions_are_scheduled_reused_and_logged_as_the_engine_says(
    twin: TwinEnvironment, tmp_path: Path
) -> None:
    workload = {"num_sessions": NUM_SESSIONS, "wait_cap_s": 3.0}
    server = ServerSpec(rules=rule_set(AUTO, twin.version).name)

    run = run_on_twin(tmp_path, "concurrent", workload, {"environment": twin.version})

    assert run.is_valid, run.invalid_reasons
    rows = run.table("requests").to_pylist()
    assert [row["status"] for row in rows] == ["ok"] * (2 * NUM_SESSIONS)
    assert run.manifest.effective["server"]["rules"] == rule_set(AUTO, twin.version).name
    # Where a release writes its step statistics as JSON, they lie in the run.
    assert bool(step_reports(run.path)) == ("0.12.1" in twin.version)
    assert_bucket_lines_equal_the_device_trace(run)
    assert sum(row["cached_tokens"] for row in rows) == increase(run, "vllm:prompt_tokens_cached_total")
    assert sum(row["prompt_tokens"] for row in rows) == increase(run, "vllm:prompt_tokens_total")
    assert counters(run, "after")["vllm:num_requests_running"] == 0
    assert all(record["unwritten_reads"] == 0 for record in device_trace(run, "decode"))
    assert_no_wrong_token(run)
    print(f"{twin.version}: {check_observed(run, run.file('device_trace.jsonl'))}")
    followed = assert_engine_follows(run, server)
    assert followed.reuses > 0
    assert followed.evictions > 0
    # More sessions than the limit: whom a finished request makes room for is the scheduler's choice.
    assert server.max_num_seqs < NUM_SESSIONS
    assert followed.queued_admissions > 0
    assert_another_order_of_arrival_is_noticed(run, server)
    assert_every_line_is_read(run)
