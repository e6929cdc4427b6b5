"""What is in force is read back from the server's own words, and what differs from the request makes a run invalid."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.analysis.validity.invariants import check_settings
from harness.measure.records.manifest import Manifest
from harness.model.spec import ServerSpec
from harness.stacks.rbln.launch.launch_log import (
    LaunchFacts,
    launch_findings,
    read_launch,
    replicas_findings,
    rules_findings,
)
from harness.stacks.rbln.rules.kv_rules import rules_for_version, rules_for_vllm

RBLN = "(EngineCore pid=9) 1795254182.886212 9 INFO vllm_rbln.x"
LOG = [
    "1795254176.1 8 INFO vllm.entrypoints.openai.api_server vLLM server version 0.22.0, serving model /a",
    f"{RBLN} Updating scheduler_config.max_num_seqs from 1 to 8 based on rbln_config.json",
    f"{RBLN} Updating model_config.max_model_len from 40960 to 8192 based on rbln_config.json",
    "1795254181.4 9 INFO vllm.v1.engine.core Initializing a V1 LLM engine (v0.22.0) with config: model='/a', "
    "max_seq_len=8192, tensor_parallel_size=1, enable_prefix_caching=True, enable_chunked_prefill=True",
    "1795254182.5 9 INFO vllm.v1.core.kv_cache_utils GPU KV cache size: 65,664 tokens",
    f"{RBLN} [CORE STEPS] one record per step (vllm-rbln 0.11.1) in /runs/observer.jsonl",
    f"{RBLN} ================",
    f"{RBLN} FINAL PERFORMANCE STATISTICS [MODEL]",
    f"{RBLN} PREFILL METRICS:",
    f"{RBLN}   Total call counts: 20",
    f"{RBLN}   Latency (ms): mean 227.15 | p50 239.99 | p90 281.17 | p99 313.64 | max 317.80",
    f"{RBLN}   Average device time: 512.25 us",
    f"{RBLN} DECODE METRICS:",
    f"{RBLN}   Total call counts: 528",
    f"{RBLN}   Latency (ms): mean 11.93 | p50 8.85 | p90 22.52 | p99 36.49 | max 62.89",
    f"{RBLN} PADDED DECODE METRICS: No data recorded",
    f"{RBLN} FINAL PERFORMANCE STATISTICS [SAMPLER]",
    f"{RBLN} DECODE METRICS:",
    f"{RBLN}   Total call counts: 528",
]
SCRAPE = json.dumps(
    {
        "at_ns": 1,
        "reason": "before",
        "status": 200,
        "body": "# TYPE vllm:cache_config_info gauge\n"
        'vllm:cache_config_info{block_size="128",num_gpu_blocks="1026",engine="0"} 1.0\nvllm:other 1.0\n',
    }
)
OTHER_BLOCKS = SCRAPE.replace("128", "64")


def _findings(facts: LaunchFacts, *, needs_observer: bool = True, **server: Any) -> list[tuple[str, str, str]]:
    in_force = facts.effective()
    manifest = Manifest(
        experiment="e",
        condition="c",
        replicate=0,
        plan_hash="",
        planned_requests=0,
        requested={"server": ServerSpec(**server).model_dump(mode="json")},
        effective={"server": in_force, "shown": sorted(in_force)},
    )
    found = [*launch_findings(facts, needs_observer=needs_observer), *check_settings(manifest)]
    return [(finding.code, finding.severity, finding.evidence) for finding in found]


def test_the_settings_in_force_are_read_from_log_and_metrics() -> None:
    facts = read_launch(LOG, [json.dumps({"status": 0, "error": "no answer"}), SCRAPE])
    assert facts.effective() == {"max_num_seqs": 8, "slot_tokens": 8192, "prefix_caching": True, "usable_kv_slots": 8}
    assert facts.version == "0.22.0"
    assert _findings(facts) == []


def test_the_step_statistics_of_the_worker_are_read() -> None:
    metrics = read_launch(LOG).device_metrics
    assert metrics["MODEL"]["prefill"]["p99_ms"] == 313.64
    assert metrics["MODEL"]["prefill"]["device_us"] == 512.25
    assert metrics["MODEL"]["decode"] == {
        "calls": 528,
        "mean_ms": 11.93,
        "p50_ms": 8.85,
        "p90_ms": 22.52,
        "p99_ms": 36.49,
        "max_ms": 62.89,
    }
    assert metrics["MODEL"]["padded decode"] == {"calls": 0}
    assert metrics["SAMPLER"] == {"decode": {"calls": 528}}


# vllm-rbln 0.12.1: one message of many lines, of which only the first has a header.
REPORT = """{head} INFO vllm_rbln.v1.metrics.performance ==================================================
(EngineCore pid=9) PERFORMANCE STATISTICS [runner]
(EngineCore pid=9) ==================================================
(EngineCore pid=9) MODEL + SAMPLE (PREFILL) METRICS:
(EngineCore pid=9)   Total call counts        : 20
(EngineCore pid=9)   Mean latency (ms)        : 227.15
(EngineCore pid=9)   Median latency (ms)      : 239.99
(EngineCore pid=9)   P90 latency (ms)         : 281.17
(EngineCore pid=9)   P99 latency (ms)         : 313.64
(EngineCore pid=9) --------------------------------------------------
(EngineCore pid=9) E2E (DECODE) METRICS:
(EngineCore pid=9)   Total call counts        : 528
(EngineCore pid=9)   Median latency (ms)      : 9.85
(EngineCore pid=9) E2E (PADDED DECODE) METRICS: No data recorded
""".format(head="(EngineCore pid=9) 1795254182.886212 9").splitlines()


def test_the_one_report_of_later_releases_is_read() -> None:
    facts = read_launch([*LOG[:6], *REPORT])
    assert facts.device_metrics == {
        "MODEL + SAMPLE": {
            "prefill": {"calls": 20, "mean_ms": 227.15, "p50_ms": 239.99, "p90_ms": 281.17, "p99_ms": 313.64}
        },
        "E2E": {"decode": {"calls": 528, "p50_ms": 9.85}, "padded decode": {"calls": 0}},
    }
    assert facts.unread == []


def test_a_json_report_fills_what_the_log_lacks() -> None:
    section = {"call_count": 3, "mean_latency_ms": 1.5, "latency_percentiles_ms": {"p50": 1.4, "p90": 1.9}}
    report = json.dumps({"name": "runner", "rank": "", "sections": {"MODEL + SAMPLE (DECODE)": section}})
    facts = read_launch(REPORT, (), [report])
    assert facts.device_metrics["MODEL + SAMPLE"]["decode"] == {
        "calls": 3,
        "mean_ms": 1.5,
        "p50_ms": 1.4,
        "p90_ms": 1.9,
    }
    assert "prefill" in facts.device_metrics["MODEL + SAMPLE"]


@pytest.mark.parametrize(
    ("log", "report"),
    [
        ([f"{RBLN}   Latency (ms): average 1.0 | p50 2.0"], None),
        ([f"{RBLN}   Latency in total (ms): 3.0"], None),
        ([], "{"),
        ([], '{"sections": {"MODEL": {"call_count": 1, "mean_latency_ms": 1e999}}}'),
        ([], '{"sections": {"SOMETHING NEW": {"call_count": 1, "mean_latency_ms": 1.0}}}'),
    ],
)
def test_statistics_of_a_form_that_nobody_knows_are_a_finding(log: list[str], report: str | None) -> None:
    facts = read_launch([*LOG[:9], *log, *LOG[9:]], [SCRAPE], [] if report is None else [report])
    assert [code for code, _, _ in _findings(facts)] == ["statistics-unread"]


@pytest.mark.parametrize(
    ("server", "evidence"),
    [
        ({"max_num_seqs": 4, "decode_buckets": (4,), "kv_slots": 8}, "max_num_seqs: requested 4, in force 8"),
        ({"slot_tokens": 4096}, "slot_tokens: requested 4096, in force 8192"),
        ({"prefix_caching": False}, "prefix_caching: requested False, in force True"),
        ({"kv_slots": 16}, "usable_kv_slots: requested 16, in force 8"),
        ({"kv_slots": 6}, "usable_kv_slots: requested 5, in force 8"),
    ],
)
def test_a_setting_that_differs_makes_the_run_invalid(server: dict[str, Any], evidence: str) -> None:
    assert ("setting-differs", "invalid", evidence) in _findings(read_launch(LOG, [SCRAPE]), **server)


@pytest.mark.parametrize(("tokens", "asked", "blocks"), [(65536, None, 121), (65536, 512, 512), (278528, None, 512)])
def test_blocks_that_kinds_of_layers_share_are_counted_by_the_tokens_that_the_server_states(
    tokens: int, asked: int | None, blocks: int
) -> None:
    facts = read_launch([])
    facts.cache = {"num_gpu_blocks": "512", "block_size": "544", "kv_cache_size_tokens": str(tokens)}
    assert facts.paged(asked) == {"num_gpu_blocks": blocks, "block_size": 544}


def test_what_the_server_never_told_is_said_and_not_guessed() -> None:
    ((code, severity, evidence),) = _findings(read_launch(LOG[1:2]), needs_observer=False)
    assert (code, severity) == ("setting-unknown", "warning")
    assert evidence == "nothing shows kv_slots, prefix_caching, slot_tokens"


@pytest.mark.parametrize(
    ("line", "evidence"),
    [
        (None, "the observer never logged that it is on"),
        ("[CORE STEPS] not observing: vllm-rbln 0.13.0 is not one of", "[CORE STEPS] not observing: vllm-rbln 0.13.0"),
        ("[CORE STEPS] one record per step\n[CORE STEPS] stopped after step 7: OSError", "stopped after step 7"),
    ],
)
def test_an_observer_that_is_not_on_to_the_end_makes_the_run_invalid(line: str | None, evidence: str) -> None:
    log = [one for one in LOG if "[CORE STEPS]" not in one] + (line or "").splitlines()
    ((code, severity, said),) = _findings(read_launch(log, [SCRAPE]))
    assert (code, severity) == ("observer-off", "invalid")
    assert evidence in said
    assert _findings(read_launch(log, [SCRAPE]), needs_observer=False) == []


@pytest.mark.parametrize(
    ("last_words", "evidence"),
    [
        ([], "the engine core ended during the run without a message"),
        (["(EngineCore pid=9) RuntimeError: device error"], "(EngineCore pid=9) RuntimeError: device error"),
    ],
)
def test_an_engine_core_that_died_is_the_first_reason_of_an_invalid_run(last_words: list[str], evidence: str) -> None:
    dead = "(APIServer pid=8) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
    findings = _findings(read_launch([*LOG, *last_words, dead], [SCRAPE]))
    assert findings[0] == ("engine-died", "invalid", evidence)


def test_an_engine_core_that_the_server_stopped_itself_did_not_die() -> None:
    stopped = "(APIServer pid=8) INFO vllm.v1.engine.core_client [shutdown] MPClient: engine manager stopped"
    dead = "(APIServer pid=8) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
    assert _findings(read_launch([*LOG, stopped, dead], [SCRAPE])) == []


@pytest.mark.parametrize(
    ("rules", "stack", "warning"),
    [
        ("auto", "vllm-rbln 0.12.1a8", None),
        ("vendor-0.12.0", "vllm-rbln 0.12.0", None),
        ("vendor-0.11.1", "", None),
        ("vendor-0.11.1", "vllm-rbln 0.12.0", "which follows vendor-0.12.0; the requested rules are vendor-0.11.1"),
        ("auto", "vllm-rbln 0.99.0", "the rules of vllm-rbln 0.99.0 are unknown; predictions follow vendor-0.12.0"),
        ("auto", "vllm 0.32.0+cpu", None),
        ("vllm-paged", "vllm 0.30.0", "which follows vllm-paged-0.30; the requested rules are vllm-paged"),
        ("auto", "vllm 0.99.0", "the rules of vllm 0.99.0 are unknown; predictions follow vllm-paged"),
    ],
)
def test_a_server_that_follows_other_rules_gets_a_warning(rules: str, stack: str, warning: str | None) -> None:
    name, _, version = stack.partition(" ")
    is_vllm = name == "vllm"
    followed = ServerSpec(model="m" * is_vllm, rules=rules).rule_set(version)
    served = rules_for_vllm(version) if is_vllm else rules_for_version(version)
    found = rules_findings(rules, stack, served, followed)
    assert [finding.code for finding in found] == (["rules-differ"] if warning else [])
    assert all(warning is not None and warning in finding.evidence for finding in found)


SILENT = json.dumps({"status": 0, "error": "the scraper was killed"})


@pytest.mark.parametrize(
    ("scrapes", "expected"),
    [
        ([SILENT, SCRAPE], []),
        ([SCRAPE, SILENT], []),
        ([SCRAPE, OTHER_BLOCKS], ["replica 1 has block_size 64 for 128, usable_kv_slots 9 for 8 in replica 0"]),
        ([SILENT, SCRAPE, OTHER_BLOCKS], ["replica 2 has block_size 64 for 128, usable_kv_slots 9 for 8 in replica 1"]),
        ([SCRAPE, SILENT, OTHER_BLOCKS], ["replica 2 has block_size 64 for 128, usable_kv_slots 9 for 8 in replica 0"]),
        ([SILENT, SILENT, SCRAPE], []),
    ],
)
def test_a_replica_is_compared_with_one_whose_metrics_were_read_too(scrapes: list[str], expected: list[str]) -> None:
    shown = [read_launch(LOG, [scrape]) for scrape in scrapes]
    assert [finding.evidence for finding in replicas_findings("base", shown, {})] == expected


def test_of_a_replica_that_answered_no_scrape_the_log_is_compared() -> None:
    smaller = [line.replace("from 1 to 8", "from 1 to 4") for line in LOG]
    (finding,) = replicas_findings("base", [read_launch(LOG, [SCRAPE]), read_launch(smaller, [SILENT])], {})
    assert (finding.code, finding.severity) == ("replicas-differ", "invalid")
    assert finding.evidence == "replica 1 has max_num_seqs 4 for 8 in replica 0"
