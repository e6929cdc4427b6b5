"""Derived tables: causes of evictions from line order, instants on the run's clock, and rebuilding without change."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pyarrow as pa
import pytest

from harness.analysis.cost.reconstruct import step_contexts
from harness.analysis.logs.derive import ToRunClock, collect, derive_tables, of_model, rebuild
from harness.analysis.logs.parse import Derived, ParseCounts, metrics_table, parse_log
from harness.analysis.run_tables import join_request_id
from harness.errors import RecordsError
from harness.measure.records.manifest import ClockRecord
from harness.measure.records.run import SealedRun
from harness.measure.records.writer import RunWriter
from tests.support.analysis_tables import GOLDEN, manifest, request_row, requests_table

BODY = (
    "# HELP vllm:prompt_tokens_cached_total c\n# TYPE vllm:prompt_tokens_cached_total counter\n"
    'vllm:prompt_tokens_cached_total{model_name="m",engine="0"} %s\n'
)
EVICT = "[PFX] [EVICTION] OB={} | IB_COUNT=1 | FREE_BLOCKS_AFTER=1 | INACTIVE_MAPPINGS_AFTER=[]"
ALLOC = "[PFX] [ALLOC] REQUEST=r | OB_COUNT=1 OB=[{}] | IB_COUNT=1 IB=[1]"
BUCKET = "[BUCKET] request_nums=1 padded_batch_size=1"


def derive_log(folder: Path, *messages: str, scale: float = 1.0) -> Derived:
    """Tables of a precise log whose lines are 1 ms apart, the first at realtime 1751364000 s."""
    text = "".join(f"1751364000.{i:03d}000 7 DEBUG x {message}\n" for i, message in enumerate(messages))
    (folder / "server.log").write_text(text)
    clock = ClockRecord(scale=scale, realtime_minus_monotonic_ns=1_751_363_999_000_000_000)
    return derive_tables(folder, manifest(clock=clock))


def callers(derived: Derived) -> list[str]:
    return [row["caller"] for row in derived.tables["kv_events"].to_pylist() if row["kind"] == "eviction"]


def test_an_eviction_whose_slot_is_given_in_the_same_schedule_is_the_requests(tmp_path: Path) -> None:
    assert callers(derive_log(tmp_path, BUCKET, EVICT.format(3), ALLOC.format(3), BUCKET)) == ["request"]


def test_an_eviction_that_nobody_claims_before_the_next_step_is_the_dummys(tmp_path: Path) -> None:
    # The freed slot is exactly the one the next admission receives: the step line between them is what tells.
    assert callers(derive_log(tmp_path, EVICT.format(3), BUCKET, ALLOC.format(3), BUCKET)) == ["dummy"]


def test_an_eviction_after_a_preempted_requests_release_is_the_preemptions(tmp_path: Path) -> None:
    freed = "[PFX] [FREE-REQUEST] REQUEST=r | PREEMPTION=True | OUTER_BLOCKS=[3]"
    derived = derive_log(tmp_path, freed, EVICT.format(3), ALLOC.format(3), EVICT.format(2), BUCKET)
    assert callers(derived) == ["preempt", "dummy"]
    assert derived.num_preemptions == 1


def test_without_step_lines_no_cause_is_named(tmp_path: Path) -> None:
    assert callers(derive_log(tmp_path, EVICT.format(3), ALLOC.format(3))) == [""]


def test_the_golden_log_gives_its_steps_and_causes() -> None:
    for name in ("default", "precise"):
        derived = derive_golden(name)
        steps, events = derived.tables["steps"].to_pylist(), derived.tables["kv_events"].to_pylist()
        assert [(row["n"], row["b"]) for row in steps] == [(1, 1), (2, 2), (1, 1), (2, 2), (1, 1)]
        assert callers(derived) == ["dummy", "request", "preempt"]
        assert [row["step"] for row in events if row["kind"] == "alloc"] == [0, 1, 3, 4]
        assert [row["reused_tokens"] for row in events if row["kind"] == "cache_hit"] == [256]
        assert derived.settings == {"scheduler_config.max_num_seqs": "2"}
        assert derived.faults == ("DEALLOCATE-WARNING slot 7",)


def derive_golden(name: str, folder: Path | None = None) -> Derived:
    counts = ParseCounts()
    stamps = (folder / "server.log.stamps").read_bytes() if folder else b""
    events = parse_log([(GOLDEN / f"{name}.log").read_bytes()], counts)
    return collect(events, counts, ToRunClock(manifest().clock, stamps))


def test_precise_stamps_become_model_time(tmp_path: Path) -> None:
    derived = derive_log(tmp_path, BUCKET, BUCKET, scale=4.0)
    # (realtime - offset) * scale: 1 s after the monotonic zero, then 1 ms later, four times as fast.
    assert derived.tables["steps"].column("log_ns").to_pylist() == [4_000_000_000, 4_004_000_000]
    assert derived.log_ns_source == "created"


def test_a_stamp_centuries_away_leaves_its_line_without_an_instant(tmp_path: Path) -> None:
    text = f"1751364000.000000 7 DEBUG x {BUCKET}\n9999999999.000000 7 DEBUG x {BUCKET}\n"
    (tmp_path / "server.log").write_text(text)
    clock = ClockRecord(scale=4.0, realtime_minus_monotonic_ns=1_751_363_999_000_000_000)
    derived = derive_tables(tmp_path, manifest(clock=clock))
    assert derived.tables["steps"].column("log_ns").to_pylist() == [4_000_000_000, None]


def test_default_lines_take_the_stamp_of_the_read_that_completed_them(tmp_path: Path) -> None:
    log = (GOLDEN / "default.log").read_bytes()
    first_step_end = log.find(b"\n", log.find(b"[BUCKET]")) + 1
    # The first step's newline came with the second read.
    stamps = struct.pack("<4q", 0, 1_000, first_step_end - 1, 2_000)
    (tmp_path / "server.log.stamps").write_bytes(stamps + b"torn")
    derived = derive_golden("default", tmp_path)
    assert derived.tables["steps"].column("log_ns").to_pylist()[0] == 2_000
    assert derived.tables["kv_events"].column("log_ns").to_pylist()[0] == 1_000
    assert derived.log_ns_source == "received"


def test_without_bucket_lines_steps_come_from_iteration_lines(tmp_path: Path) -> None:
    line = (
        "Iteration(0): {} context requests, 9 context tokens, {} generation requests, {} generation tokens, "
        "iteration elapsed time: 0.10 ms"
    )
    derived = derive_log(tmp_path, line.format(1, 0, 0), line.format(0, 3, 3), line.format(0, 5, 5))
    assert [(row["n"], row["b"]) for row in derived.tables["steps"].to_pylist()] == [(3, 4), (5, 8)]
    assert derived.steps_source == "iteration-log"


def test_contexts_are_rebuilt_from_the_order_of_the_log(tmp_path: Path) -> None:
    alloc, free = (
        "[PFX] [ALLOC] REQUEST={} | OB_COUNT=1 OB=[{}] | IB_COUNT=1 IB=[1]",
        "[PFX] [FREE-REQUEST] REQUEST={} | ",
    )
    a, b = "cmpl-r-0-0-0-0badc0de", "cmpl-r-1-0-0-0badc0de"
    two = "[BUCKET] request_nums=2 padded_batch_size=2"
    derived = derive_log(
        tmp_path,
        alloc.format(a, 0),
        BUCKET,
        alloc.format(b, 1),
        two,
        two,
        free.format(a) + "PREEMPTION=False | OUTER_BLOCKS=[0]",
        BUCKET,
    )
    requests = requests_table(request_row(0, 0, prompt_tokens=100), request_row(1, 0, prompt_tokens=1000))
    contexts = step_contexts(derived.tables["steps"], derived.tables["kv_events"], requests)
    # a: 101, 102, 103; b: 1001, 1002, 1003, each counted with the token its prefill gave.
    assert contexts.context_tokens.tolist() == [101, 102 + 1001, 103 + 1002, 1003]
    assert contexts.is_exact


def test_a_step_that_the_kv_lines_do_not_explain_makes_contexts_inexact(tmp_path: Path) -> None:
    alloc = "[PFX] [ALLOC] REQUEST=cmpl-r-0-0-0-0badc0de | OB_COUNT=1 OB=[0] | IB_COUNT=1 IB=[1]"
    derived = derive_log(tmp_path, alloc, "[BUCKET] request_nums=2 padded_batch_size=2")
    contexts = step_contexts(derived.tables["steps"], derived.tables["kv_events"], requests_table(request_row(0, 0)))
    assert not contexts.is_exact
    assert contexts.why_not == "1 steps have another n than the KV lines imply"


@pytest.mark.parametrize(
    ("log_id", "response_ids", "joined"),
    [
        ("cmpl-x-0-0badc0de", {"cmpl-x"}, "cmpl-x"),
        ("cmpl-x-0", {"cmpl-x"}, "cmpl-x"),
        ("cmpl-x-3-0-0-0badc0de", {"cmpl-x", "cmpl-x-3", "cmpl-x-3-0"}, "cmpl-x-3-0"),
        ("chatcmpl-x-0badc0de", {"chatcmpl-x"}, "chatcmpl-x"),
        ("chatcmpl-x_1-0badc0de", {"chatcmpl-x"}, "chatcmpl-x"),
        ("cmpl-x-0badc0de", {"cmpl-x"}, None),
        ("cmpl-y-0-0badc0de", {"cmpl-x"}, None),
        ("chatcmpl-x-0badc0de", {"chatcmpl-x", "chatcmpl-x-0badc0de"}, None),
    ],
)
def test_log_ids_join_the_one_response_they_can_mean(log_id: str, response_ids: set[str], joined: str | None) -> None:
    assert join_request_id(log_id, dict.fromkeys(response_ids)) == joined


def test_scrapes_become_samples_and_unreadable_ones_are_counted() -> None:
    good = {"at_ns": 5, "reason": "before", "status": 200, "body": BODY % 128}
    lines = [
        json.dumps(good),
        json.dumps({**good, "status": 0, "body": ""}),
        "{torn",
        json.dumps({**good, "body": "a b"}),
    ]
    table, num_scrapes, num_failed = metrics_table(line.encode() for line in lines)
    assert (num_scrapes, num_failed) == (4, 3)
    assert table.to_pylist() == [
        {
            "scrape": 0,
            "at_ns": 5,
            "reason": "before",
            "name": "vllm:prompt_tokens_cached_total",
            "labels": 'engine="0",model_name="m"',
            "value": 128.0,
        }
    ]


@pytest.mark.parametrize("bodies", [("", "NaN"), ("NaN", "")])
def test_a_scrape_without_names_is_not_taken_for_one_without_lines(bodies: tuple[str, str]) -> None:
    scrapes = [{"at_ns": 5, "reason": "before", "status": 200, "body": body} for body in bodies]
    table, num_scrapes, num_failed = metrics_table(json.dumps(scrape).encode() for scrape in scrapes)
    # The parser takes a lone word for a sample.
    assert (table["scrape"].to_pylist(), num_scrapes, num_failed) == ([bodies.index("NaN")], 2, 0)


def sealed_golden(root: Path) -> SealedRun:
    with RunWriter(root, "e", "c", 0, 1) as writer:
        writer.raw("server.log").write((GOLDEN / "precise.log").read_bytes())
        writer.raw("scrapes.jsonl").write(
            (json.dumps({"at_ns": 5, "reason": "before", "status": 200, "body": BODY % 0}) + "\n").encode()
        )
        writer.close_raw()
        writer.write("requests", requests_table(request_row(0, 0)))
        for name, table in derive_tables(writer.folder, manifest()).tables.items():
            writer.write(name, table)
        return writer.seal(manifest())


def test_where_nothing_can_be_written_the_error_does_not_speak_of_an_unsealed_run(tmp_path: Path) -> None:
    run = sealed_golden(tmp_path)
    shutil.rmtree(run.path / "derived")
    (run.path / "derived").write_text("in the way")
    with pytest.raises(RecordsError, match="cannot write records") as refused:
        rebuild(run)
    assert "unsealed" not in str(refused.value)
    assert "Make the folder writable, or copy the runs elsewhere first" in str(refused.value)


def test_tables_that_this_code_derives_differently_are_not_written(tmp_path: Path) -> None:
    run = sealed_golden(tmp_path)
    steps = run.manifest.derived["steps"].model_copy(update={"content_sha256": "0" * 64})
    other = SealedRun(run.path, run.manifest.model_copy(update={"derived": {**run.manifest.derived, "steps": steps}}))
    before = (run.path / "derived" / "steps.parquet").read_bytes()
    with pytest.raises(RecordsError, match=r"rebuilt table\(s\) steps differ"):
        rebuild(other)
    assert (run.path / "derived" / "steps.parquet").read_bytes() == before


def test_metrics_of_two_models_give_the_runs_model_and_name_the_other() -> None:
    labels = ['engine="0",model_name="mine"', 'engine="0",model_name="theirs"', ""]
    metrics = pa.table({"labels": pa.array(labels).dictionary_encode(), "value": [1.0, 2.0, 3.0]})
    kept, others = of_model(metrics, "mine")
    assert (kept["value"].to_pylist(), others) == ([1.0, 3.0], ("theirs",))
    assert of_model(kept, "an alias") == (kept, ()), "the only model there is the run's"
    assert of_model(metrics, "unnamed") == (metrics, ("mine", "theirs"))
