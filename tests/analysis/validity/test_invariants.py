"""Every invariant of a run: whole runs pass, and each way of being broken gives its own finding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from harness.analysis import Evidence, check_experiment, check_run
from harness.analysis.cost.agreement import Agreement
from harness.analysis.logs.derive import derive_tables
from harness.analysis.run_tables import CACHED_COUNTER
from harness.analysis.summary import summarise
from harness.analysis.validity.stalls import check_freezes, check_read_together
from harness.measure.records.manifest import ClockRecord, Finding, Manifest, Observation, ServerRecord
from harness.measure.records.run import SealedRun
from harness.measure.records.writer import RunWriter
from harness.model.engine import CostModel, load_cost_model
from tests.support.analysis_tables import manifest, request_row, requests_table

# One session of two requests; the second reuses 256 tokens. G = 3 each: 4 decode tokens.
ROWS = (request_row(0, 0), request_row(0, 1, prompt_tokens=320, planned_prompt_tokens=320, cached_tokens=256))
LOG = """\
[PFX] [ALLOC] REQUEST=cmpl-r-0-0-0-0badc0de | OB_COUNT=1 OB=[0] | IB_COUNT=3 IB=[1, 2, 3]
[BUCKET] request_nums=1 padded_batch_size=1
[BUCKET] request_nums=1 padded_batch_size=1
[PFX] [FREE-REQUEST] REQUEST=cmpl-r-0-0-0-0badc0de | PREEMPTION=False | OUTER_BLOCKS=[0]
[PFX] [ALLOC] REQUEST=cmpl-r-0-1-0-0badf00d | OB_COUNT=1 OB=[1] | IB_COUNT=3 IB=[4, 5, 6]
[PFX] [CACHE-HIT] REQUEST=cmpl-r-0-1-0-0badf00d | OB_COUNT=1 OB=[0] | IB_COUNT=2 IB=[[1, 2]]
[BUCKET] request_nums=1 padded_batch_size=1
[BUCKET] request_nums=1 padded_batch_size=1
[PFX] [FREE-REQUEST] REQUEST=cmpl-r-0-1-0-0badf00d | PREEMPTION=False | OUTER_BLOCKS=[1]
"""


def raw_files(folder: Path, log: str = LOG, counter: tuple[int, int] = (0, 256)) -> None:
    lines = [f"1751364000.{i:06d} 7 DEBUG x {line}\n" for i, line in enumerate(log.splitlines())]
    (folder / "server.log").write_text("".join(lines))
    body = '# TYPE vllm:prompt_tokens_cached_total counter\nvllm:prompt_tokens_cached_total{{engine="0"}} {}\n'
    scrapes = [
        {"at_ns": at, "reason": reason, "status": 200, "body": body.format(value)}
        for at, (reason, value) in enumerate(zip(("before", "after"), counter, strict=True))
    ]
    (folder / "scrapes.jsonl").write_text("".join(json.dumps(scrape) + "\n" for scrape in scrapes))


def findings(
    folder: Path, rows: tuple[dict[str, Any], ...] = ROWS, cost_model: CostModel | None = None, **facts: Any
) -> list[Finding]:
    """Findings of a run whose raw files lie in ``folder``."""
    run_manifest = manifest(planned_requests=2, **facts)
    derived = derive_tables(folder, run_manifest)
    return check_run(Evidence(run_manifest, requests_table(*rows), derived, cost_model=cost_model))


def codes(folder: Path, rows: tuple[dict[str, Any], ...] = ROWS, **facts: Any) -> list[str]:
    """Codes of the findings that make the run invalid."""
    return [finding.code for finding in findings(folder, rows, **facts) if finding.severity == "invalid"]


def test_a_whole_run_has_no_findings(tmp_path: Path) -> None:
    raw_files(tmp_path)
    assert findings(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"status": "timeout", "completion_tokens": 3}, "request-failed"),
        ({"completion_tokens": 2}, "wrong-length"),
        ({"prompt_tokens": 321}, "prompt-drift"),
        ({"sent_ns": 1_000_000_000 - 50}, "sent-early"),
        ({"sent_ns": 1_011_000_000}, "rearrival-late"),
        ({"cached_tokens": 128}, "reuse-disagrees"),
        ({"response_id": ROWS[0]["response_id"]}, "id-repeated"),
    ],
)
def test_a_broken_row_makes_the_run_invalid(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    raw_files(tmp_path)
    assert code in codes(tmp_path, (ROWS[0], {**ROWS[1], **changes}))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", ("metrics-missing", "invalid")),
        ("# nothing\n", ("metrics-missing", "invalid")),
        ("vllm:num_requests_running 0\n", ("counter-missing", "warning")),
        *((f"{CACHED_COUNTER} {value}\n", ("counter-missing", "warning")) for value in ("NaN", "+Inf", "1e999")),
    ],
)
def test_a_cross_check_that_could_not_be_made_is_a_finding(
    tmp_path: Path, body: str, expected: tuple[str, str]
) -> None:
    raw_files(tmp_path)
    scrapes = [
        json.dumps({"at_ns": at, "reason": reason, "status": 200, "body": body})
        for at, reason in enumerate(("before", "after"))
    ]
    (tmp_path / "scrapes.jsonl").write_text("\n".join(scrapes))
    first = findings(tmp_path)[0]
    assert (first.code, first.severity) == expected


def test_reuse_that_no_answer_states_is_a_finding_and_not_zero(tmp_path: Path) -> None:
    raw_files(tmp_path, counter=(0, 4551))
    (finding,) = findings(tmp_path, tuple({**row, "cached_tokens": None} for row in ROWS))
    assert (finding.code, finding.severity) == ("reuse-unknown", "warning")
    assert (
        f"2 of 2 answers do not state usage.prompt_tokens_details, while {CACHED_COUNTER} rose by 4,551"
        in finding.evidence
    )
    assert "--enable-prompt-tokens-details" in finding.hint


def test_scrapes_that_failed_between_the_first_and_the_last_are_reported(tmp_path: Path) -> None:
    raw_files(tmp_path)
    scrapes = (tmp_path / "scrapes.jsonl").read_text().splitlines()
    failed = json.dumps({"at_ns": 1, "reason": "interval", "status": None, "body": "", "error": "timed out"})
    (tmp_path / "scrapes.jsonl").write_text("\n".join((scrapes[0], failed, failed, *scrapes[1:])))
    (finding,) = findings(tmp_path)
    assert (finding.code, finding.severity) == ("scrape-failed", "warning")
    assert finding.evidence == "2 of 4 scrapes have no readable body"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("stop", "1 'stop'"),
        ("tired", "1 'tired' (a word that vLLM does not document)"),
        ("", "1 '' (a word that vLLM does not document)"),
    ],
)
def test_an_answer_of_the_planned_length_that_states_another_end_is_a_finding(
    tmp_path: Path, reason: str, words: str
) -> None:
    raw_files(tmp_path)
    (finding,) = findings(tmp_path, (ROWS[0], {**ROWS[1], "finish_reason": reason}))
    assert (finding.code, finding.severity) == ("finish-reason", "warning")
    assert finding.evidence == f"1 answers have the planned length, but do not state 'length' as their end: {words}"


def test_a_missing_or_repeated_request_makes_the_run_invalid(tmp_path: Path) -> None:
    raw_files(tmp_path)
    assert "request-missing" in codes(tmp_path, ROWS[:1])
    assert "request-repeated" in codes(tmp_path, (*ROWS, ROWS[1]))


def test_lateness_is_judged_in_wall_time(tmp_path: Path) -> None:
    raw_files(tmp_path)
    late = (ROWS[0], {**ROWS[1], "sent_ns": 1_030_000_000})
    (found,) = findings(tmp_path, late)
    assert found.code == "rearrival-late"
    assert found.evidence.endswith(" ms late (p99, wall), limits.rearrival_lag_p99_ms is 10")
    # 30 ms of model time are 7.5 ms of wall time when the model runs four times as fast.
    assert codes(tmp_path, late, clock=ClockRecord(scale=4.0)) == []


def test_sessions_that_start_apart_make_the_run_invalid(tmp_path: Path) -> None:
    raw_files(tmp_path)
    rows = (ROWS[0], ROWS[1], request_row(1, 0, due_ns=0, trigger_ns=0, sent_ns=21_000_000))
    assert "start-spread" in codes(tmp_path, rows)


@pytest.mark.parametrize(
    ("audit", "code"),
    [
        ({"touching_stall_max_ms": 2000.0}, "host-stalled"),
        ({"stamp_lag_max_ms": 1800.0}, "client-stalled"),
        ({"is_stall_meter_complete": False}, "stall-meter-lost"),
    ],
)
def test_a_freeze_of_two_seconds_or_a_lost_meter_makes_the_run_invalid_unless_its_limits_say_otherwise(
    audit: dict[str, Any], code: str
) -> None:
    (finding,) = check_freezes(manifest(client_audit=audit))
    assert (finding.code, finding.severity) == (code, "invalid")
    limits = {"stall_ms": 5000.0, "stamp_lag_ms": 5000.0, "needs_stall_meter": False}
    kept = list(check_freezes(manifest(client_audit=audit, requested={"limits": limits})))
    assert [one.severity for one in kept] == (["warning"] if code == "stall-meter-lost" else [])


def test_a_calm_machine_and_a_run_without_a_client_have_no_finding_of_a_freeze() -> None:
    calm = {"touching_stall_max_ms": 8.0, "stamp_lag_max_ms": None, "is_stall_meter_complete": True}
    assert list(check_freezes(manifest(client_audit=calm))) == []
    assert list(check_freezes(manifest(client_audit={}))) == []


def together(first_ms: float, all_ms: float) -> dict[str, Any]:
    """The audit of 10 answers of 10 chunks, half of them read together. first_ms, all_ms: means over all of them."""
    widths = {"first": (10, first_ms), "all": (100, all_ms)}
    parts = {
        name: {"num": num, "num_together": num // 2, "sum_ms": num * mean_ms, "max_ms": 4 * mean_ms}
        for name, (num, mean_ms) in widths.items()
    }
    return {"read_together": parts}


def test_chunks_read_together_are_a_warning_and_beyond_their_limit_invalid() -> None:
    found = [
        [(each.code, each.severity) for each in check_read_together(manifest(client_audit=audit))]
        for audit in ({}, together(0.5, 0.9), together(2.0, 0.1), together(0.1, 2.0), together(6.0, 0.1))
    ]
    late = [[("read-together", severity)] for severity in ("warning", "warning", "invalid")]
    assert found == [[], [], *late]
    (finding,) = check_read_together(manifest(client_audit=together(0.1, 6.0)))
    assert finding.severity == "invalid"
    assert "5 of 10 first tokens (up to 0.1 ms early in the mean" in finding.evidence
    kept = manifest(client_audit=together(6.0, 6.0), requested={"limits": {"read_together_ms": 10.0}})
    assert [each.severity for each in check_read_together(kept)] == ["warning"]


@pytest.mark.parametrize(("limit", "expected"), [(None, []), (0.95, []), (0.5, ["channels-apart"])])
def test_channels_apart_within_a_run_are_invalid_by_the_experiments_own_limit(
    tmp_path: Path, limit: float | None, expected: list[str]
) -> None:
    raw_files(tmp_path)
    asked = manifest().requested | {"limits": {"residual_share": limit, "server_stall_ms": 1e6}}
    assert codes(tmp_path, cost_model=load_cost_model("paper"), requested=asked) == expected


def test_a_lost_decode_step_makes_the_run_invalid(tmp_path: Path) -> None:
    raw_files(tmp_path, LOG.replace("[BUCKET] request_nums=1 padded_batch_size=1\n", "", 1))
    assert codes(tmp_path) == ["decode-tokens"]


def test_the_three_witnesses_of_reuse_must_agree(tmp_path: Path) -> None:
    raw_files(tmp_path, counter=(0, 128))
    assert codes(tmp_path) == ["reuse-disagrees"]
    raw_files(
        tmp_path, LOG.replace("cmpl-r-0-1-0-0badf00d | OB_COUNT=1 OB=[0]", "cmpl-other-0-0badf00d | OB_COUNT=1 OB=[0]")
    )
    assert "request-foreign" in codes(tmp_path)


def test_a_declared_source_that_is_silent_makes_the_run_invalid(tmp_path: Path) -> None:
    raw_files(tmp_path, "\n".join(line for line in LOG.splitlines() if "BUCKET" not in line))
    assert codes(tmp_path) == ["observer-silent"]
    raw_files(tmp_path, "\n".join(line for line in LOG.splitlines() if "PFX" not in line))
    assert codes(tmp_path) == ["kv-log-silent"]
    (tmp_path / "scrapes.jsonl").unlink()
    assert codes(tmp_path) == ["kv-log-silent", "metrics-missing"]


def test_a_wall_clock_that_was_set_by_an_hour_is_called_so_and_nothing_is_said_to_have_stalled(tmp_path: Path) -> None:
    """The lines after the step carry stamps of an hour later, while a request is in flight."""
    raw_files(tmp_path)
    log = (tmp_path / "server.log").read_text()
    log = log.replace("1751364000.000003", "1751367600.000003")
    (tmp_path / "server.log").write_text(log)
    costs, offset_ns = load_cost_model("paper"), 1_751_364_000 * 10**9

    def found(moved_s: float) -> list[tuple[str, str]]:
        clock = ClockRecord(
            realtime_minus_monotonic_ns=offset_ns, realtime_minus_monotonic_after_ns=offset_ns + round(moved_s * 10**9)
        )
        return [(one.code, one.severity) for one in findings(tmp_path, cost_model=costs, clock=clock)]

    assert found(3600) == [("clock-moved", "invalid")]
    assert found(-3600) == [("clock-moved", "invalid")]
    assert found(0.5) == [("clock-moved", "warning")]


def test_an_undeclared_patch_makes_the_run_invalid(tmp_path: Path) -> None:
    raw_files(tmp_path)
    assert codes(tmp_path, observation=Observation(steps="none")) == ["patch-undeclared"]


def test_a_server_that_died_makes_the_run_invalid(tmp_path: Path) -> None:
    raw_files(tmp_path)
    assert codes(tmp_path, server=ServerRecord(is_alive_until_stop=False, exit_status=-9)) == ["server-died"]


def test_a_torn_log_is_a_warning_that_names_the_line(tmp_path: Path) -> None:
    raw_files(tmp_path)
    with open(tmp_path / "server.log", "a") as log:
        log.write("1751364000.000250 7 DEBUG x [PFX] [EVICTION] OB=\n")
    (finding,) = findings(tmp_path)
    assert (finding.code, finding.severity) == ("log-torn", "warning")
    assert "[EVICTION] OB=" in finding.evidence


def seal(root: Path, condition: str, requests: pa.Table, log: str = LOG, **facts: Any) -> SealedRun:
    run_manifest: Manifest = manifest(planned_requests=2, condition=condition, baseline="base", drawn_hash="d", **facts)
    with RunWriter(root, "e", condition, 0, 2) as writer:
        raw_files(writer.folder, log)
        writer.write("requests", requests)
        for name, table in derive_tables(writer.folder, run_manifest).tables.items():
            writer.write(name, table)
        return writer.seal(run_manifest)


def test_conditions_of_a_replicate_must_share_their_draw_and_their_work(tmp_path: Path) -> None:
    same = requests_table(*ROWS)
    base = seal(tmp_path, "base", same)
    assert check_experiment([base, seal(tmp_path, "same", same)]) == []
    longer = requests_table(ROWS[0], {**ROWS[1], "completion_tokens": 4})
    more_work = seal(tmp_path, "longer", longer)
    assert [finding.code for finding in check_experiment([base, more_work])] == ["work-differs"]
    other_plan = seal(tmp_path, "other", same, plan_hash="1" * 64)
    assert [finding.code for finding in check_experiment([base, other_plan])] == ["plan-differs"]


def test_conditions_that_declare_another_workload_have_another_plan(tmp_path: Path) -> None:
    conditions = [{"name": "base", "workload": {}}, {"name": "m7", "workload": {"num_background": 7}}]
    requested = {"experiment": {"condition": conditions}, "server": {"decode_buckets": [1], "cost_model": "paper"}}
    same = requests_table(*ROWS)
    base = seal(tmp_path, "base", same, requested=requested)
    other = seal(tmp_path, "m7", same, requested=requested, plan_hash="1" * 64)
    assert check_experiment([base, other]) == []


def test_a_summary_compares_conditions_on_both_channels(tmp_path: Path) -> None:
    slower = requests_table(ROWS[0], {**ROWS[1], "done_ns": ROWS[1]["done_ns"] + 500_000_000})
    runs = [seal(tmp_path, "base", requests_table(*ROWS)), seal(tmp_path, "slow", slower)]
    summary = summarise(runs)
    base, slow = summary.condition("base"), summary.condition("slow")
    assert base.comparison is None
    assert (base.reuse.num_rearrivals, base.reuse.num_reused, base.reuse.reused_tokens) == (1, 1, 256)
    assert base.histogram == {1: 4}
    assert base.b_ns == 2_000_000_000
    assert (slow.comparison.ratio_a, slow.comparison.ratio_b) == (1.0, 1.25)
    # The baseline's channels lie 94 % apart: the published tolerance would call any ratio agreement.
    assert slow.comparison.agreement is Agreement.CANNOT_TELL
    assert [finding.code for finding in summary.findings].count("channels-apart") == 2
    assert summary.to_arrow().num_rows == summary.runs_to_arrow().num_rows == 2


def test_invalid_runs_are_kept_out_of_sums(tmp_path: Path) -> None:
    with RunWriter(tmp_path, "e", "base", 0, 2) as writer:
        writer.write("requests", requests_table(*ROWS))
        invalid = writer.seal(manifest(baseline="base"), ["server-died: it died"])
    summary = summarise([invalid])
    assert summary.condition("base").b_ns is None
    assert summary.condition("base").runs[0].b_ns == 2_000_000_000
    assert summary.condition("base").runs[0].a is None
