"""Recorded sessions through the scheduler's rules: nothing differs on the emulator, and what is changed is found."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.extras.sessions.commands import read_engine
from harness.extras.sessions.verdict import verdict_of
from harness.extras.sessions.waits import StepTimes, Timeline
from tests.support.command_line import harness
from tests.support.recorded_sessions import Files, record, replayed

NUM_PLANS = 12


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the objects of a file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if isinstance(line, dict):
            change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def change_setting(files: Files, **values: int) -> None:
    """Write other settings into the headers of both files."""
    for path in files:
        changed(path, lambda line: line.get("effective", {}).update(values))


def command(files: Files, *options: str) -> subprocess.CompletedProcess[str]:
    return harness("predict", "replay", str(files.sessions), "--steps", str(files.steps), *options)


def test_no_decision_of_the_emulated_server_differs_and_its_costs_are_the_models(tmp_path: Path) -> None:
    steps = preempted = queued = waited = tokens = 0
    for seed in range(NUM_PLANS):
        found = replayed(record(seed, tmp_path / str(seed)))
        assert (found.num_differ, found.num_cached_differ, found.notes) == (0, 0, []), f"seed {seed}: {found.first}"
        assert found.num_free_differ == 0, f"seed {seed}: {found.first_free}"
        assert {ratio for _count, ratio in found.typical_ratios().values()} == {1.0}
        assert found.waits.elsewhere == []
        assert {each.error_ns for each in found.waits.tokens} <= {0}
        queued += len(found.waits.queued)
        waited += sum(each.steps > 0 for each in found.waits.queued)
        tokens += len(found.waits.tokens)
        steps += found.num_steps
        preempted += found.num_preempted
    assert steps > 1000
    assert queued >= tokens > 100
    assert waited > 10


def test_memory_of_another_size_is_told_where_no_decision_shows_it(tmp_path: Path) -> None:
    files = record(0, tmp_path)
    change_setting(files, num_gpu_blocks=144)
    found = replayed(files)
    assert found.num_differ == 0
    assert found.num_free_differ == found.num_steps
    done = command(files)
    assert (
        f"free KV blocks: {found.num_steps} steps differ, first step 0: 141 recorded, 140 by the rules" in done.stdout
    )
    assert "0 decisions differ" in done.stdout
    assert done.returncode == 4


def test_drafts_by_rules_that_nobody_knows_and_their_costs_are_refused_before_any_figure(tmp_path: Path) -> None:
    files = record(0, tmp_path)
    change_setting(files, num_speculative_tokens=2)
    for options, words in ((), "whose rules are not known"), (("--cost-model", "emulated-gpu"), "no cost model knows"):
        done = command(files, *options)
        assert (done.returncode, done.stdout) == (1 if options else 2, "")
        assert words in " ".join(done.stderr.split())


def test_blocks_that_the_file_does_not_know_are_a_difference_of_cached_tokens(tmp_path: Path) -> None:
    files = record(3, tmp_path)

    def forget(line: dict[str, Any]) -> None:
        if "request" in line:
            line["like"], line["known"] = -1, 0

    changed(files.sessions, forget)
    found = replayed(files)
    assert found.first.kind == "cached tokens"
    assert found.num_cached_differ > 0


def test_cached_counts_that_the_two_files_have_otherwise_are_said(tmp_path: Path) -> None:
    files = record(3, tmp_path)

    def plant(line: dict[str, Any]) -> None:
        if line.get("cached_tokens") is not None:
            line["cached_tokens"] += 16

    changed(files.sessions, plant)
    found = replayed(files)
    assert found.num_differ == 0
    assert found.num_contradicted > 5
    done = command(files)
    assert f"cached tokens of {found.num_contradicted} of" in done.stdout
    assert "in the sessions" in done.stdout
    assert done.returncode == 4


def test_costs_are_compared_apart_from_decisions(tmp_path: Path) -> None:
    files = record(1, tmp_path)
    lines = [json.loads(line) for line in files.steps.read_text().splitlines()]
    for line in lines[1:]:
        # Every step lasts twice as long; when it was decided stays.
        line[1:5] = [2 * instant for instant in line[1:5]]
        line[7] = [[*entry[:2], 2 * entry[2], *entry[3:]] for entry in line[7]]
    files.steps.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def slower(line: dict[str, Any]) -> None:
        for name in ("arrival_ns", "queued_ns", "admitted_ns", "first_token_ns", "end_ns"):
            if line.get(name) is not None:
                line[name] *= 2

    changed(files.sessions, slower)
    found = replayed(files)
    assert found.num_differ == 0
    assert {ratio for _count, ratio in found.typical_ratios().values()} == {2.0}
    waits = found.waits
    assert waits.elsewhere == []
    assert {each.from_decisions_ns for each in waits.tokens} == {0}
    # Requests come while a step runs or between steps: what lies between is not of a model's making.
    assert any(each.from_costs_ns == -each.ttft_ns // 2 for each in waits.tokens)
    assert all(-each.ttft_ns // 2 <= each.from_costs_ns < 0 for each in waits.tokens)


def test_the_recorded_waits_are_those_of_the_requests(tmp_path: Path) -> None:
    files = record(1, tmp_path)
    requests, _chains, _size = read_engine([files.sessions], 0)
    waits = replayed(files).waits
    ends = {each.number: (each.queued_ns, each.end) for each in requests if each.end is not None}
    admitted = {number: end.admitted_ns - queued_ns for number, (queued_ns, end) in ends.items() if end.admitted_ns}
    told = {each.request: each.wait_ns for each in waits.queued if each.request in admitted}
    assert told == admitted
    firsts = [end.first_token_ns - queued_ns for queued_ns, end in ends.values() if end.first_token_ns]
    assert [each.ttft_ns for each in waits.tokens] == firsts


def test_one_seat_less_changes_the_queue_and_the_error_of_ttft_is_of_decisions(tmp_path: Path) -> None:
    files = record(10, tmp_path)
    change_setting(files, max_num_seqs=1)  # the server had 2
    waits = replayed(files).waits
    first = waits.elsewhere[0]
    assert first.steps_by_rules > first.steps
    assert any(each.from_decisions_ns > 0 for each in waits.tokens)
    assert {each.from_costs_ns for each in waits.tokens} == {0}
    done = command(files)
    assert f"queueing: {len(waits.elsewhere) + waits.num_admitted_once} of " in done.stdout
    assert f"first: request {first.request}, queued before step {first.first_step}, waits " in done.stdout
    assert "from costs: unknown, name a --cost-model" in done.stdout


def test_a_step_lasts_as_the_costs_say_and_time_between_steps_is_kept() -> None:
    times = [StepTimes(0, 0, 0, 10, 10, 20, 20), StepTimes(1, 12, 12, 20, 20, 4, 4)]
    line = Timeline(times, [each.by_costs_ns for each in times])
    assert [line.at(instant) for instant in (0, 5, 10, 11, 12, 16, 20, 30)] == [0, 10, 20, 21, 22, 24, 26, 36]


def test_files_of_two_servers_are_refused_and_every_setting_that_differs_is_named(tmp_path: Path) -> None:
    files = record(2, tmp_path)
    changed(files.steps, lambda line: line.get("effective", {}).update(max_num_batched_tokens=43, num_gpu_blocks=977))
    done = command(files)
    assert done.returncode == 1
    assert done.stdout == ""
    said = " ".join(done.stderr.split())
    assert "max_num_batched_tokens 300 in the sessions and 43 in the steps" in said
    assert "977 in the steps" in said


def test_steps_of_which_none_ended_compare_nothing_and_missing_ones_are_counted(tmp_path: Path) -> None:
    files = record(2, tmp_path)
    header, *lines = files.steps.read_text().splitlines(keepends=True)
    files.steps.write_text(header + "".join(lines[:5] + lines[7:]))
    assert "2 lines of steps are damaged or missing" in command(files).stdout
    files.steps.write_text(header)
    done = command(files)
    assert done.returncode == 1
    assert "no step that ended" in done.stderr


@pytest.mark.parametrize("differs", [False, True])
def test_the_command_says_how_many_decisions_differ_and_leaves_with_4_where_any_does(
    tmp_path: Path, differs: bool
) -> None:
    files = record(2, tmp_path)
    if differs:
        change_setting(files, max_num_batched_tokens=43)
    done = command(files, "--cost-model", "emulated-gpu")
    assert done.returncode == (4 if differs else 0), done.stderr
    assert ("0 decisions differ" in done.stdout) != differs
    assert bool(re.search("first: step .* recorded", done.stdout)) == differs
    assert "times emulated-gpu" in done.stdout
    assert ("queueing: 0 of " in done.stdout) != differs
    assert ("error of TTFT: none" in done.stdout) != differs


@pytest.mark.parametrize(
    ("shown", "is_known"),
    [
        ({"kv_groups": ["FullAttentionSpec"], "kv_coordinator": "UnitaryKVCacheCoordinator"}, True),
        ({"scheduler": "vllm.v1.core.sched.async_scheduler.AsyncScheduler", "num_hash_lookahead_tokens": 0}, True),
        ({"kv_groups": ["MambaSpec", "X"]}, False),
        ({"kv_coordinator": "HybridKVCacheCoordinator"}, False),
        ({"scheduler": "mine.Scheduler"}, False),
        ({"num_hash_lookahead_tokens": 1}, True),
        ({"num_prefill_lookahead": 3}, False),
    ],
)
def test_rules_are_called_unknown_beside_another_pool_than_full_attention(
    tmp_path: Path, shown: dict[str, Any], is_known: bool
) -> None:
    files = record(2, tmp_path)
    changed(files.steps, lambda line: line.get("effective", {}).update(shown))
    done = command(files)
    assert ("unknown here" in done.stdout) != is_known


def test_steps_of_vllm_rbln_are_refused_since_its_scheduler_has_other_rules(tmp_path: Path) -> None:
    files = record(3, tmp_path)
    scheduler = "vllm_rbln.v1.core.optimum_scheduler.RBLNOptimumScheduler"
    changed(files.steps, lambda line: line.update(scheduler=scheduler) if "vllm_core_steps" in line else None)
    done = command(files)
    assert done.returncode == 1
    assert "is of vllm-rbln" in done.stderr
    assert "decisions differ" not in done.stdout


def test_tune_from_a_recording_says_first_how_far_its_rules_hold(tmp_path: Path) -> None:
    files = record(2, tmp_path)
    done = harness("tune", "--from", str(files.sessions), "--backend", "sim", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 0 <= done.stdout.find("0 decisions differ") < done.stdout.index("wrote tune-")


@pytest.mark.parametrize("has_steps", [True, False])
def test_what_the_rules_do_not_know_is_named_before_any_figure(tmp_path: Path, has_steps: bool) -> None:
    files = record(2, tmp_path)
    settings = {"kv_groups": ["FullAttentionSpec", "SlidingWindowSpec"], "max_loras": 4, "policy": "priority"}

    def unusual(line: dict[str, Any]) -> None:
        if "effective" in line:
            line["scheduler"] = "vllm.v1.core.sched.scheduler.Scheduler"
            line["effective"] |= settings
        elif line.get("request") == 0:
            line["structured"] = 1

    changed(files.sessions, unusual)
    changed(files.steps, unusual) if has_steps else files.steps.unlink()
    first = verdict_of(files.sessions)[1 if has_steps else 0]
    assert first.startswith("the rules are unknown here: KV memory is kept in groups of")
    assert "at most 4 LoRA adapters share a batch; its queue is by priority" in first
    assert re.search("1 of [0-9]+ requests have structured outputs", first)


def test_the_steps_of_another_process_are_not_taken_and_other_formats_have_no_verdict(tmp_path: Path) -> None:
    files = record(2, tmp_path)
    changed(files.steps, lambda line: line.update(pid=7) if "vllm_core_steps" in line else None)
    (line,) = verdict_of(files.sessions)
    assert "no steps of it lie beside" in line
    assert verdict_of(files.steps) == verdict_of(tmp_path / "none") == verdict_of(tmp_path) == []


def test_a_stat_loggers_file_names_no_requests_and_is_refused(tmp_path: Path) -> None:
    files = record(2, tmp_path)
    done = harness("predict", "replay", str(files.sessions), "--steps", str(files.sessions))
    assert done.returncode != 0
    assert "core.jsonl" not in done.stdout
    done = harness("predict", "replay", str(tmp_path / "none.jsonl"), "--steps", str(files.steps))
    assert done.returncode == 2
    assert "none.jsonl" in done.stderr


def test_several_parts_of_a_recording_are_refused_since_their_blocks_have_other_names(tmp_path: Path) -> None:
    files = record(2, tmp_path)
    later = tmp_path / "sessions.1.jsonl"
    later.write_text(files.sessions.read_text())

    def move(line: dict[str, Any]) -> None:
        if "vllm_sessions" in line:
            line["part"] = 1
        for name in {"request", "end"} & line.keys():
            line[name] += 100_000

    changed(later, move)
    done = harness("predict", "replay", str(files.sessions), str(later), "--steps", str(files.steps))
    assert done.returncode == 1
    assert "several files, whose blocks have other names" in done.stderr
