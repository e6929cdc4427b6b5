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

from harness.analysis.logs.parse import ParseCounts, parse_log
from harness.extras.twin.environment import TwinEnvironment
from harness.measure.client.replay_state import token_digest
from harness.measure.records.layout import step_reports
from harness.measure.records.run import SealedRun
from harness.model.plan.files import read_plan
from harness.model.plan.model import Plan
from harness.stacks.rbln.rules.kv_rules import AUTO, rule_set
from tests.support.cut_logs import assert_no_cut_invents_or_loses
from tests.support.twin_runs import Turn, check_observed, counters, device_trace, faultless_turns, increase, run_on_twin

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

NUM_SESSIONS = 12
SURVIVAL = {6: (1920, 1, 1920), 7: (0, 2, 1920)}
"""m: cached tokens of the re-arrival, evictions, what prefix_cache_hits_total claims. Source: the paper, table S4."""


def plan_of(run: SealedRun) -> Plan:
    return read_plan(run.file("plan.jsonl"))


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


# Where the answer turns, on the default release.
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


@pytest.mark.parametrize("twin", ["0.12.0", "0.12.1a8", "0.11.1"], indirect=True)
def test_concurrent_sessions_are_logged_counted_and_observed_as_the_device_saw_them(
    twin: TwinEnvironment, tmp_path: Path
) -> None:
    workload = {"num_sessions": NUM_SESSIONS, "wait_cap_s": 3.0}

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
    assert_every_line_is_read(run)
