"""The real vLLM and vllm-rbln on the stand-in device behave as the harness says they do.

Every server here is started, replayed against, scraped and judged by the code that an NPU server would get. Skipped
where the twin is not installed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from twin_follow import follow, log_messages
from twin_runs import counters, device_trace, faultless_tokens, increase, run_on_twin

from harness.analysis import ParseCounts, parse_log
from harness.engine import EngineConfig
from harness.live.client_script import token_digest
from harness.plan import Plan, read_plan
from harness.records import SealedRun
from harness.spec import ServerSpec

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

SURVIVAL = {5: (1920, 0, 1920), 6: (1920, 1, 1920), 7: (0, 2, 1920), 8: (0, 3, 1920)}
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


def assert_no_wrong_token(run: SealedRun) -> None:
    expected = faultless_tokens(plan_of(run), *token_range(run))
    for row in run.table("requests").to_pylist():
        place = row["session"], row["request"]
        assert row["token_digest"] == token_digest(expected[place]), place


def assert_engine_follows(run: SealedRun, server: ServerSpec) -> None:
    """Every admission, eviction, reuse, block id and (n, b) of the server's log, in order, is the engine's."""
    messages = log_messages(run.file("server.log").read_text(encoding="utf-8", errors="replace"))
    followed = follow(messages, EngineConfig.from_server(server), plan_of(run), lambda name: place_in(run, name))
    assert not followed.difference, followed.difference
    decodes, prefills = device_trace(run, "decode"), device_trace(run, "prefill")
    assert followed.decodes == len(decodes)
    assert followed.prefills == len([record for record in prefills if record["chunk"] == 0])
    print(f"{followed.prefills} prefills, {followed.decodes} decode steps, {followed.evictions} evictions, "
          f"{followed.lines} log lines compared")  # fmt: skip


def assert_bucket_lines_equal_the_device_trace(run: SealedRun) -> None:
    logged = re.findall(
        r"\[BUCKET\] request_nums=(\d+) padded_batch_size=(\d+)", run.file("server.log").read_text(errors="replace")
    )
    traced = [(record["n"], record["b"]) for record in device_trace(run, "decode")]
    assert [(int(n), int(b)) for n, b in logged] == traced


def assert_every_line_is_read(run: SealedRun) -> None:
    """The parser leaves no line of ours unread, whole or cut anywhere, and events before the cut stay the same."""
    content = run.file("server.log").read_bytes()
    counts = ParseCounts()
    whole = list(parse_log([content], counts))
    assert counts.unread == 0, counts.unread_samples
    assert Counter(type(event).__name__ for event in whole)["BucketEvent"] == len(device_trace(run, "decode"))
    for cut in range(len(content) // 7, len(content), len(content) // 7):
        part = list(parse_log([content[:cut]], ParseCounts()))
        assert part == whole[: len(part)]


@pytest.mark.parametrize("num_background", sorted(SURVIVAL))
@pytest.mark.usefixtures("twin")
def test_a_sessions_kv_survives_as_long_as_the_paper_saw(tmp_path: Path, num_background: int) -> None:
    cached, evictions, hits = SURVIVAL[num_background]

    run = run_on_twin(tmp_path, "survival", {"source": "sequential", "num_background": num_background})

    assert run.is_valid, run.invalid_reasons
    rows = run.table("requests").to_pylist()
    assert [row["cached_tokens"] for row in rows] == [0] * (num_background + 1) + [cached]
    assert run.file("server.log").read_text().count("[PFX] [EVICTION]") == evictions
    assert increase(run, "vllm:prefix_cache_hits_total") == hits
    assert increase(run, "vllm:prompt_tokens_cached_total") == cached
    assert len(device_trace(run, "copy")) == bool(cached)
    assert_no_wrong_token(run)
    assert_engine_follows(run, ServerSpec())


@pytest.mark.parametrize("num_sessions", [8, 12])
@pytest.mark.usefixtures("twin")
def test_concurrent_sessions_are_scheduled_reused_and_logged_as_the_engine_says(
    tmp_path: Path, num_sessions: int
) -> None:
    workload = {"num_sessions": num_sessions, "wait_cap_s": 3.0}

    run = run_on_twin(tmp_path, "concurrent", workload)

    assert run.is_valid, run.invalid_reasons
    rows = run.table("requests").to_pylist()
    assert [row["status"] for row in rows] == ["ok"] * (2 * num_sessions)
    assert_bucket_lines_equal_the_device_trace(run)
    assert sum(row["cached_tokens"] for row in rows) == increase(run, "vllm:prompt_tokens_cached_total")
    assert sum(row["prompt_tokens"] for row in rows) == increase(run, "vllm:prompt_tokens_total")
    assert counters(run, "after")["vllm:num_requests_running"] == 0
    assert all(record["unwritten_reads"] == 0 for record in device_trace(run, "decode"))
    assert_no_wrong_token(run)
    assert_engine_follows(run, ServerSpec())
    assert_every_line_is_read(run)
