"""The backend sim: the simulator's numbers, in records that nothing above can tell from measured ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.analysis import run_figures
from harness.analysis.logs.derive import rebuild
from harness.analysis.summary import summarise
from harness.errors import RunInvalidError, SpecError
from harness.extras.paper.rules.interference import measured_waiting_session_ns
from harness.judge.prereg.proof import judged_again
from harness.measure.records.run import SealedRun
from harness.measure.records.store import RunStore
from harness.model.plan.files import read_plan
from harness.model.sim import simulate
from harness.model.spec import ServerSpec
from harness.present.report.facts import gather_facts
from harness.runner import run_experiment
from harness.runner.backends import backend_named
from harness.stacks.rbln.rules.kv_rules import AUTO, NEWEST_STABLE
from harness.stacks.vllm.step_log import draft_figures, load_step_log
from tests.support.experiments import small_experiment

pytestmark = pytest.mark.same_everywhere

RULES = ("vendor-0.11.1", "vendor-0.11.2", "paper", "paper+dummy")
PAGED = {"rules": "vllm-paged", "cost_model": "emulated-gpu", "num_gpu_blocks": 800}
CROWDED = {"num_sessions": 10, "wait_cap_s": 2.0}


def simulated(tmp_path: Path, **changes: object) -> tuple[SealedRun, ...]:
    return run_experiment(small_experiment(backend="sim", **changes), runs_root=tmp_path).runs


def result_of(run: SealedRun):
    return simulate(read_plan(run.file("plan.jsonl")), ServerSpec.model_validate(run.manifest.requested_server))


@pytest.mark.parametrize("rules", RULES)
def test_requests_steps_and_figures_are_the_simulators(tmp_path: Path, rules: str) -> None:
    for run in simulated(tmp_path, server={"rules": rules}, workload=CROWDED):
        expected, figures = result_of(run), run_figures(run)
        requests, steps = run.table("requests"), run.table("steps")
        assert run.is_valid, run.invalid_reasons
        assert requests.column("done_ns").to_pylist() == expected.requests.column("completed_ns").to_pylist()
        assert requests.column("cached_tokens").to_pylist() == expected.requests.column("cached_tokens").to_pylist()
        assert requests.column("response_head_ns").to_pylist() == expected.requests.column("first_token_ns").to_pylist()
        assert steps.num_rows == expected.num_decode_steps
        assert sum(steps.column("n").to_pylist()) == sum(n * h for n, h in enumerate(expected.decode_histogram))
        assert (figures.a.decode_ns, figures.a.prefill_ns) == (expected.decode_ns, expected.prefill_ns)
        assert figures.waiting_session_ns == expected.wait_session_ns
        assert figures.num_evictions == expected.num_evictions
        # Channel B is what a perfect client sees of a server without overhead: the steps and nothing else.
        assert figures.b_ns == figures.a.total_ns


def test_a_run_records_the_rules_it_followed_by_name(tmp_path: Path) -> None:
    for run in simulated(tmp_path):
        assert run.manifest.requested_server["rules"] == AUTO
        assert run.manifest.effective["server"]["rules"] == run.server.rules == NEWEST_STABLE
        standing = dict(dict(gather_facts([run]))["Run status"])
        assert standing["rules in force"] == NEWEST_STABLE


def test_evictions_name_their_callers(tmp_path: Path) -> None:
    (run, _) = simulated(tmp_path, workload=CROWDED)
    expected = result_of(run).evictions.column("caller").to_pylist()
    events = run.table("kv_events").to_pylist()
    assert [event["caller"] for event in events if event["kind"] == "eviction"] == expected
    assert expected


def test_every_token_is_a_chunk_when_streaming_and_an_answer_is_one_when_not(tmp_path: Path) -> None:
    streamed = simulated(tmp_path / "streamed")[0]
    whole = simulated(tmp_path / "whole", client={"stream": False})[0]
    tokens = sum(streamed.table("requests").column("completion_tokens").to_pylist())
    assert streamed.table("chunks").num_rows == tokens
    assert whole.table("chunks").num_rows == whole.table("requests").num_rows
    assert sum(whole.table("chunks").column("num_tokens").to_pylist()) == tokens
    assert whole.table("requests").column("response_head_ns") == whole.table("requests").column("done_ns")


def test_waiting_measured_from_stamps_and_streams_is_the_modelled_one(tmp_path: Path) -> None:
    for run in simulated(tmp_path, workload=CROWDED):
        modelled = run_figures(run).waiting_session_ns
        measured = measured_waiting_session_ns(run)
        # The log's microseconds: at most one per prefill and waiting session.
        assert measured == pytest.approx(modelled, abs=1000 * 20 * 10)
        assert modelled > 0


@pytest.mark.parametrize("server", [{}, {"rules": "paper"}, PAGED], ids=str)
def test_the_simulator_writes_the_tables_itself_and_derive_leaves_them(
    tmp_path: Path, server: dict[str, object]
) -> None:
    for run in simulated(tmp_path, server=server, workload=CROWDED):
        files = {path.name for path in run.path.iterdir()}
        assert not files & {"server.log", "server.log.stamps", "scrapes.jsonl"}
        assert ("steps.jsonl" in files) == run.server.is_paged
        before = {name: run.table(name) for name in ("steps", "kv_events", "metrics")}
        assert before["steps"].num_rows > 0
        derived = rebuild(run)
        for name, table in before.items():
            assert derived.tables[name].equals(table)
        assert list(judged_again(run)) == []
    assert RunStore(tmp_path).verify() == 2


def test_two_simulations_differ_in_nothing(tmp_path: Path) -> None:
    first, again = simulated(tmp_path / "a"), simulated(tmp_path / "b")
    for one, other in zip(first, again, strict=True):
        for name in ("requests", "chunks", "steps", "kv_events", "metrics"):
            assert one.table(name).equals(other.table(name))


def test_a_simulated_run_says_what_it_is(tmp_path: Path) -> None:
    run = simulated(tmp_path)[0]
    assert run.manifest.backend == "sim"
    assert "virtual time" in run.manifest.server.facts["launch"]["label"]
    assert run.manifest.clock.scale == 1.0
    assert summarise([run]).time_scale == 1.0


def test_a_library_user_can_insist_on_valid_runs(tmp_path: Path) -> None:
    outcome = run_experiment(small_experiment(backend="sim"), runs_root=tmp_path)
    assert outcome.require_valid() is outcome
    with pytest.raises(RunInvalidError, match="1 of 2 runs are sealed; missing: base/0"):
        replace(outcome, runs=outcome.runs[1:], missing=("base/0",)).require_valid()
    manifest = outcome.runs[0].manifest.model_copy(update={"status": "invalid", "invalid_reasons": ("late: 7 ms",)})
    spoilt = replace(outcome, runs=(replace(outcome.runs[0], manifest=manifest), *outcome.runs[1:]))
    with pytest.raises(RunInvalidError, match=r"1 of \d+ runs are invalid, first base/0: late: 7 ms"):
        spoilt.require_valid()


def test_a_condition_without_prefix_caching_is_a_valid_ablation(tmp_path: Path) -> None:
    conditions = [{"name": "base"}, {"name": "off", "server": {"prefix_caching": False}}]
    base, off = simulated(tmp_path, workload={"num_sessions": 4, "wait_cap_s": 2.0}, condition=conditions)
    assert off.is_valid, off.invalid_reasons
    assert (run_figures(base).cached_tokens or 0) > 0 == run_figures(off).cached_tokens
    assert not off.manifest.observation.has_kv_log
    assert off.table("kv_events").num_rows == 0


def test_a_server_with_paged_memory_is_recorded_by_its_step_log(tmp_path: Path) -> None:
    server = {**PAGED, "num_gpu_blocks": 5200, "max_num_seqs": 10}
    for run in simulated(tmp_path, server=server, workload=CROWDED):
        expected, log = result_of(run), load_step_log(run.file("steps.jsonl"))
        requests, figures = run.table("requests"), run_figures(run)
        assert run.is_valid, run.invalid_reasons
        assert (figures.a.decode_ns, figures.a.prefill_ns) == (expected.decode_ns, expected.prefill_ns)
        assert figures.b_ns == figures.a.total_ns
        assert (log.num_damaged, log.unseen) == (0, ())
        assert requests.column("done_ns").to_pylist() == expected.requests.column("completed_ns").to_pylist()
        assert requests.column("cached_tokens").to_pylist() == expected.requests.column("cached_tokens").to_pylist()
        assert run.table("steps").num_rows == log.decode_steps.num_rows == expected.num_decode_steps
        largest = run.manifest.decode_buckets[-1]
        assert log.eager_by_n == {
            n: count for n, count in enumerate(expected.decode_histogram) if count and n > largest
        }
        assert bool(log.eager_by_n) == (largest == 8)
        generated = sum(row["generated_tokens"] for row in log.steps.to_pylist())
        assert generated == sum(requests.column("completion_tokens").to_pylist())
        assert sum(row["preempted"] for row in log.steps.to_pylist()) == expected.preemptions


@pytest.mark.parametrize("is_async", [False, True])
def test_a_server_with_drafts_is_recorded_as_an_engine_core_is(tmp_path: Path, is_async: bool) -> None:
    drafts = {"num_speculative_tokens": 3, "speculative_method": "eagle3", "async_scheduling": is_async}
    rates = {"synthetic_acceptance_rates": [0.8, 0.6, 0.4]}
    # The largest batches have no graph.
    server = {**PAGED, **drafts, **rates, "max_num_seqs": 8, "decode_buckets": [1, 2, 4, 8, 16, 24]}
    for run in simulated(tmp_path, server=server, workload=CROWDED):
        expected, figures = result_of(run), run_figures(run)
        assert run.is_valid, run.invalid_reasons
        assert run.manifest.effective["server"]["synthetic_acceptance_rates"] == [0.8, 0.6, 0.4]
        assert (figures.a.decode_ns, figures.a.prefill_ns) == (expected.decode_ns, expected.prefill_ns)
        assert figures.num_steps == expected.num_decode_steps
        assert run.table("requests").column("done_ns").to_pylist() == expected.requests["completed_ns"].to_pylist()
        assert max(run.table("chunks").column("num_tokens").to_pylist()) == 4
        found = {finding.code: finding.evidence for finding in run.manifest.findings}
        assert found["steps-drafts"].endswith("acceptance was synthetic")
        assert " 7 (28 tokens," in found["steps-eager"]
        figures = draft_figures(load_step_log(run.file("steps.jsonl")))
        assert figures.acceptance == pytest.approx((0.8, 0.6, 0.4), abs=0.05)


def test_a_preempted_request_reports_what_its_first_admission_reused(tmp_path: Path) -> None:
    server = {**PAGED, "slot_tokens": 4096, "num_gpu_blocks": 257, "max_num_seqs": 8}
    for run in simulated(tmp_path, server=server, workload={"num_sessions": 12}):
        expected = result_of(run)
        assert expected.preemptions > 0
        assert run.is_valid, run.invalid_reasons
        reported = run.table("requests").column("cached_tokens").to_pylist()
        assert reported == expected.requests.column("cached_tokens").to_pylist()


def test_settings_of_paged_memory_are_in_force_and_slots_are_not(tmp_path: Path) -> None:
    run = simulated(tmp_path, server=PAGED)[0]

    shown = run.manifest.effective["server"]
    assert (shown["num_gpu_blocks"], shown["block_size"], shown["max_num_batched_tokens"]) == (800, 16, 2048)
    assert "kv_slots" not in shown


def test_paged_rules_refuse_kv_slots() -> None:
    with pytest.raises(SpecError, match=r"server\.kv_slots: the rules vllm-paged do not have it"):
        backend_named("sim").check_server(ServerSpec.model_validate({**PAGED, "kv_slots": 9}))
