"""The observer in vLLM's engine core records every step once, changes nothing, and its records are read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from harness.analysis import Evidence
from harness.analysis.cost.step_parts import StepParts, step_parts
from harness.analysis.logs.engine_steps import check_step_log, decode_contexts, step_spans
from harness.analysis.logs.parse import Derived, ParseCounts, metrics_table
from harness.analysis.validity.server_records import check_log_lines
from harness.clock import ScaledClock
from harness.errors import RecordsError
from harness.stacks.vllm.core_steps import COLUMNS, read_core_steps
from harness.stacks.vllm.launch import CORE_STEPS
from harness.stacks.vllm.step_log import INSIDE, StepLog, draft_figures, merged, read_step_log
from tests.support.analysis_tables import manifest, requests_table
from tests.support.command_line import harness

# The part of vLLM that the observer meets, constructed after vllm 0.30.0 (config/scheduler.py, v1/core/sched).
LITTLE_VLLM = {
    "vllm/plugins.py": """
from importlib.metadata import entry_points

def load_general_plugins():
    for plugin in entry_points(group="vllm.general_plugins"):
        plugin.load()()
""",
    "vllm/config/scheduler.py": """
class SchedulerConfig:
    is_async = False

    def get_scheduler_cls(self):
        from vllm.sched import AsyncScheduler, Scheduler
        return AsyncScheduler if self.is_async else Scheduler
""",
    "vllm/sched.py": """
from types import SimpleNamespace as Space

class Scheduler:
    def __init__(self, vllm_config):
        self.vllm_config, self.requests, self.running, self.waiting = vllm_config, {}, [], []
        self.kv_cache_manager = Space(block_pool=Space(get_num_free_blocks=lambda: 9 - len(self.running)))
        self.finished_req_ids = set()

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request.request_id)

    def schedule(self, throttle_prefills=False):
        new, self.waiting = self.waiting, []
        old, self.running = self.running, self.running + new
        new = [Space(req_id=name, prompt_token_ids=self.requests[name].prompt, num_computed_tokens=16) for name in new]
        tokens = {name: 1 for name in old} | {one.req_id: len(one.prompt_token_ids) - 16 for one in new}
        cached = Space(req_ids=old, resumed_req_ids=set(), num_computed_tokens=[0] * len(old))
        gone, self.finished_req_ids = self.finished_req_ids, set()
        return Space(num_scheduled_tokens=tokens, scheduled_new_reqs=new, scheduled_cached_reqs=cached,
                     preempted_req_ids=set(), finished_req_ids=gone)

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = [Space(new_token_ids=[7]) for _ in scheduler_output.num_scheduled_tokens]
        for name in model_runner_output.ended:
            self.running.remove(name)
            self.finished_req_ids.add(name)
        return {0: Space(outputs=outputs)}

class AsyncScheduler(Scheduler):
    def schedule(self, throttle_prefills=False):
        return super().schedule(throttle_prefills)
""",
}
# What an engine core does: loads the plugins, asks for the class of its scheduler, and calls it.
ENGINE_CORE = """
import sys
from types import SimpleNamespace as Space
from vllm.config.scheduler import SchedulerConfig
from vllm.plugins import load_general_plugins

load_general_plugins()
load_general_plugins()

def core(engine=0, is_async=False, **more):
    SchedulerConfig.is_async = is_async
    config = Space(
        model_config=Space(model="m", max_model_len=64),
        scheduler_config=Space(max_num_seqs=4),
        cache_config=Space(num_gpu_blocks=10, block_size=16, enable_prefix_caching=True),
        parallel_config=Space(data_parallel_index=engine, data_parallel_size=1),
        **more,
    )
    return SchedulerConfig().get_scheduler_cls()(config)

def add(scheduler, name, length):
    scheduler.add_request(Space(request_id=name, prompt=list(range(length)), num_tokens=length))

def ran(*ended, padded=None):
    stats = padded and Space(num_unpadded_tokens=padded[0], num_padded_tokens=padded[1], runtime_mode="FULL")
    return Space(ended=ended, cudagraph_stats=stats)
"""


def run_core(folder: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``script`` in a process that has the observer on its path, as a server of the harness has."""
    for name, source in LITTLE_VLLM.items():
        file = folder / "site" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(source)
    search = os.pathsep.join([str(INSIDE), str(folder / "site")])
    return subprocess.run(
        [sys.executable, "-c", ENGINE_CORE + script],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": search, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def parts_of(log: StepLog, *flights: tuple[int, int]) -> StepParts:
    """The parts of a run with requests in flight from the first to the second instant of each."""
    requests = pa.table({"sent_ns": [sent for sent, _ in flights], "done_ns": [done for _, done in flights]})
    return step_parts(log, requests, ScaledClock(1.0))


TWO_REQUESTS = """
scheduler = core()
add(scheduler, "cmpl-a-0-12345678", 36)
step = scheduler.schedule()
add(scheduler, "cmpl-b-0-12345678", 20)
scheduler.update_from_output(step, ran())
step = scheduler.schedule()
scheduler.update_from_output(scheduler_output=step, model_runner_output=ran(padded=(5, 8)))
step = scheduler.schedule(False)
scheduler.update_from_output(step, ran("cmpl-a-0-12345678", padded=(2, 4)))
step = scheduler.schedule()
scheduler.update_from_output(step, ran("cmpl-b-0-12345678", padded=(1, 1)))
"""


def test_every_step_is_recorded_as_the_scheduler_decided_it(tmp_path: Path) -> None:
    done = run_core(tmp_path, TWO_REQUESTS, **CORE_STEPS.variables(tmp_path / "core.jsonl"))

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    log = read_step_log((tmp_path / "core.jsonl").read_bytes())
    rows = log.steps.to_pylist()
    assert [row["kind"] for row in rows] == ["prefill", "mixed", "decode", "decode"]
    assert [(row["context_tokens"], row["generation_tokens"]) for row in rows] == [(20, 0), (4, 1), (0, 2), (0, 1)]
    assert [(row["n"], row["b"], row["runtime_mode"]) for row in rows[2:]] == [(2, 4, "FULL"), (1, 1, "FULL")]
    assert [row["running"] for row in rows] == [1, 2, 1, 1]
    assert [row["generated_tokens"] for row in rows] == [1, 2, 2, 1]
    assert (sum(row["prefix_queries"] for row in rows), sum(row["prefix_hits"] for row in rows)) == (56, 32)
    assert [row["decode_context"] for row in rows] == [0, 37, 38 + 21, 22]
    assert decode_contexts(log) == [0.0, 37.0, 59.0, 22.0]
    assert all(row["began_ns"] < row["at_ns"] for row in rows)
    assert log.settings["max_num_seqs"] == 4
    assert log.num_declared_engines == 1
    assert (log.num_damaged, log.engines) == (0, (0,))
    assert [row["skipped_waiting"] for row in rows] == [None] * 4
    # Requests ran all the time, so each step lasts from the end of the one before it.
    flight = (rows[0]["began_ns"] - 1000, rows[3]["at_ns"] + 500)
    parts = parts_of(log, flight)
    assert (parts.in_steps_ns, parts.between_ns) == (rows[3]["at_ns"] - rows[0]["began_ns"], 1500)
    assert parts.b_ns == flight[1] - flight[0]
    assert {name: group.num_steps for name, group in parts.groups.items()} == {
        "decode of 1": 1,
        "decode of 4": 1,
        "mixed": 1,
        "prefill, after cached tokens, engine was idle": 1,
    }
    # A step that ran before any request was in flight is no part of B.
    assert parts_of(log, (rows[1]["at_ns"], flight[1])).in_steps_ns < parts.in_steps_ns


DRAFTED = """
from vllm.sched import Scheduler

def with_drafts(self, original=Scheduler.schedule):
    step = original(self)
    step.scheduled_spec_decode_tokens = self.drafts
    for name, tokens in self.drafts.items():
        step.num_scheduled_tokens[name] += len(tokens)
    return step

def trimmed(self, step, result, original=Scheduler.update_from_output):
    outputs = original(self, step, result)
    for tokens in result.sampled_token_ids:
        del tokens[1:]
    return outputs

Scheduler.schedule, Scheduler.update_from_output = with_drafts, trimmed

def drafted(drafts, **sampled):
    for request in scheduler.requests.values():
        request.is_finished = lambda: False
    scheduler.drafts = drafts
    step = scheduler.schedule()
    names, total = list(step.num_scheduled_tokens), sum(step.num_scheduled_tokens.values())
    mode = "FULL" if total <= 8 else "NONE"
    stats = Space(num_unpadded_tokens=total, num_padded_tokens=max(8, total), runtime_mode=mode)
    places = {name: place for place, name in enumerate(names)}
    tokens = [sampled[name] for name in names]
    scheduler.update_from_output(
        step, Space(ended=(), cudagraph_stats=stats, sampled_token_ids=tokens, req_id_to_index=places)
    )

scheduler = core(
    speculative_config=Space(num_speculative_tokens=3, method="ngram"),
    compilation_config=Space(cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=[4, 8]),
    use_v2_model_runner=False,
)
add(scheduler, "a", 17)
add(scheduler, "b", 20)
drafted({"a": [-1, -1, -1]}, a=[7], b=[7])
drafted({"a": [1, 2, 3], "b": [4, 5, 6]}, a=[7, 7, 7], b=[7, 7, 7, 7])
add(scheduler, "c", 18)
drafted({"a": [1, 2, 3], "b": [4]}, a=[7], b=[7, 7], c=[7])
drafted({"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}, a=[7, 7], b=[7], c=[7, 7, 7])
"""


def counted(counts: dict[str, int]) -> pa.Table:
    """The metrics of a run in which a server counted this of its drafts."""
    records: list[bytes] = []
    for at_ns, (reason, factor) in enumerate((("before", 0), ("after", 1))):
        samples = [f"vllm:spec_decode_{name}_total {factor * count}\n" for name, count in counts.items()]
        record = {"at_ns": at_ns, "reason": reason, "status": 200, "body": "".join(samples)}
        records.append(json.dumps(record).encode() + b"\n")
    return metrics_table(records)[0]


def test_drafts_and_what_is_accepted_of_them_are_recorded_before_an_answer_is_cut(tmp_path: Path) -> None:
    done = run_core(tmp_path, DRAFTED, **CORE_STEPS.variables(tmp_path / "core.jsonl"))

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    log = read_step_log((tmp_path / "core.jsonl").read_bytes())
    (core,) = log.cores
    assert [step.drafts for step in core.steps] == [(3, 0), (3, 3), (3, 1, 0), (3, 3, 3)]
    assert [step.accepted for step in core.steps] == [(0, 0), (2, 3), (0, 1, 0), (1, 0, 2)]
    rows = log.steps.to_pylist()
    assert [row["kind"] for row in rows] == ["mixed", "decode", "mixed", "decode"]
    # Sizes count tokens.
    assert log.decode_steps.select(["n", "b"]).to_pylist() == [{"n": 8, "b": 8}, {"n": 12, "b": 12}]
    # The rejected tokens of a step are no part of the sequences of the next one.
    assert [row["decode_context"] for row in rows[1:]] == [17 + 4 + 20 + 4, 20 + 4 + 24 + 2, 21 + 4 + 26 + 4 + 18 + 4]
    figures = draft_figures(log)
    assert (figures.num_drafts, figures.draft_tokens, figures.accepted_tokens) == (8, 22, 9)
    assert figures.acceptance == (5 / 7, 3 / 7, 1 / 7)
    assert (figures.num_steps, figures.num_padded, figures.tokens, figures.padded_tokens) == (2, 1, 20, 20)
    assert figures.eager == {(3, 12): 1}
    assert log.effective["speculative_method"] == "ngram"
    found = {finding.code: finding for finding in check_step_log(manifest(), log, "")}
    assert "accepted at least 1 to 3 drafts: 0.714, 0.429, 0.143" in found["steps-drafts"].evidence
    assert found["steps-drafts"].evidence.endswith("by a real drafter, on prompts that are random tokens")
    for num_accepted, codes in ((9, []), (8, ["drafts-differ"])):
        counts = {"num_drafts": 8, "num_draft_tokens": 22, "num_accepted_tokens": num_accepted}
        derived = Derived({"metrics": counted(counts)}, ParseCounts(), steps_source="step-log", step_log=log)
        differing = [found.code for found in check_log_lines(Evidence(manifest(), requests_table(), derived))]
        assert differing == codes
    replayed = harness("server", "sizes", "--from", str(tmp_path / "core.jsonl"))
    assert '"synthetic_acceptance_rates": [0.7143, 0.4286, 0.1429]' in replayed.stdout
    assert found["steps-eager"].evidence.endswith("n = 3 (12 tokens, 1 steps)")
    assert found["steps-eager"].hint == "Capture them too: --cudagraph-capture-sizes 4 8 16"


def test_what_became_of_each_request_is_known(tmp_path: Path) -> None:
    run_core(tmp_path, TWO_REQUESTS, **CORE_STEPS.variables(tmp_path / "core.jsonl"))

    core = read_core_steps((tmp_path / "core.jsonl").read_bytes())
    first, second = core.requests.to_pylist()
    assert first["request_id"] == "cmpl-a-0-12345678"
    assert (first["prompt_tokens"], first["cached_tokens"], first["computed_tokens"]) == (36, 16, 20)
    assert (first["prefill_steps"], first["decode_steps"], first["preemptions"]) == (1, 2, 0)
    assert (second["prefill_steps"], second["decode_steps"]) == (1, 2)
    # It came while the first step ran, and waited for its end.
    step = core.steps[0].values
    assert step["scheduled_ns"] <= second["queued_ns"] <= step["update_ns"] < second["admitted_ns"]
    assert second["admitted_ns"] == core.steps[1].values["schedule_ns"]
    assert second["first_token_ns"] == core.steps[1].values["end_ns"] < second["last_ns"]


def test_a_step_that_is_decided_while_another_runs_belongs_to_its_own_result(tmp_path: Path) -> None:
    script = """
scheduler = core(is_async=True)
add(scheduler, "a", 20)
first = scheduler.schedule()
second = scheduler.schedule()
scheduler.update_from_output(first, ran(padded=(4, 4)))
third = scheduler.schedule()
scheduler.update_from_output(second, ran(padded=(1, 1)))
scheduler.update_from_output(third, ran(padded=(1, 2)))
"""
    done = run_core(tmp_path, script, **CORE_STEPS.variables(tmp_path / "core.jsonl"))

    assert done.stderr == ""
    log = read_step_log((tmp_path / "core.jsonl").read_bytes())
    rows = log.steps.to_pylist()
    assert [(row["kind"], row["padded_tokens"]) for row in rows] == [("prefill", 4), ("decode", 1), ("decode", 2)]
    assert rows[1]["began_ns"] < rows[0]["at_ns"]
    # A step that waited for the one before it lasts from the end of that.
    assert step_spans(log)[1:] == [(rows[0]["at_ns"], rows[1]["at_ns"]), (rows[1]["at_ns"], rows[2]["at_ns"])]
    flight = (rows[0]["began_ns"], rows[2]["at_ns"])
    assert (parts_of(log, flight).in_steps_ns, parts_of(log, flight).between_ns) == (flight[1] - flight[0], 0)


def test_each_engine_of_a_data_parallel_server_writes_its_own_file(tmp_path: Path) -> None:
    script = """
for engine in (0, 1):
    scheduler = core(engine)
    add(scheduler, f"r{engine}", 20)
    scheduler.update_from_output(scheduler.schedule(), ran())
"""
    # As vLLM names the processes of several engine cores; one alone is "EngineCore".
    named = "import multiprocessing; multiprocessing.current_process().name = 'EngineCore_DP0'\n"
    run_core(tmp_path, named + script, **CORE_STEPS.variables(tmp_path / "core.jsonl"))

    logs = [read_step_log((tmp_path / name).read_bytes()) for name in ("core.jsonl", "core.jsonl.1")]
    assert [log.num_declared_engines for log in logs] == [2, 2]
    whole = merged(logs)
    assert whole.engines == (0, 1)
    assert whole.steps.num_rows == 2
    assert whole.steps["at_ns"].to_pylist() == sorted(whole.steps["at_ns"].to_pylist())
    assert [core.requests["request_id"].to_pylist() for core in whole.cores] == [["r0"], ["r1"]]
    assert step_spans(whole) == [None, None]


def test_without_its_variable_nothing_is_wrapped_and_nothing_is_written(tmp_path: Path) -> None:
    script = """
from vllm.sched import Scheduler
before = vars(Scheduler).copy()
scheduler = core()
assert vars(Scheduler) == before and "chosen" not in SchedulerConfig.get_scheduler_cls.__qualname__
"""
    done = run_core(tmp_path, script)

    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site"]


def test_the_first_error_is_a_log_line_and_ends_the_observer_alone(tmp_path: Path) -> None:
    script = """
from vllm import sched
decide = sched.Scheduler.schedule
def broken(self, throttle_prefills=False):
    step = decide(self)
    real = step.num_scheduled_tokens
    step.num_scheduled_tokens = 3
    self.real = real
    return step
sched.Scheduler.schedule = broken
scheduler = core()
add(scheduler, "a", 20)
step = scheduler.schedule()
step.num_scheduled_tokens = scheduler.real
assert len(scheduler.update_from_output(step, ran())[0].outputs) == 1
scheduler.update_from_output(step, ran())
"""
    done = run_core(tmp_path, script, **CORE_STEPS.variables(tmp_path / "core.jsonl"))

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("[CORE STEPS] stopped after 0 steps") == 1
    assert "AttributeError" in done.stderr
    assert (tmp_path / "core.jsonl").read_bytes().count(b"\n") == 1


def test_an_error_of_the_scheduler_is_raised_as_it_is(tmp_path: Path) -> None:
    script = """
scheduler = core()
scheduler.requests = None
try:
    add(scheduler, "a", 20)
except TypeError as error:
    print(error)
"""
    done = run_core(tmp_path, script, **CORE_STEPS.variables(tmp_path / "core.jsonl"))

    assert done.stdout == "'NoneType' object does not support item assignment\n"
    assert done.stderr == ""


def test_a_file_that_cannot_be_written_is_a_log_line(tmp_path: Path) -> None:
    script = TWO_REQUESTS + "print(len(scheduler.running))\n"
    done = run_core(tmp_path, script, **CORE_STEPS.variables(tmp_path / "no" / "core.jsonl"))

    assert done.stdout == "0\n"
    assert "[CORE STEPS] not observing: FileNotFoundError" in done.stderr


HEADER: dict[str, Any] = {
    **{"vllm_core_steps": 1, "columns": list(COLUMNS), "engine": 0, "vllm": "0.30.0"},
    **{"effective": {"num_gpu_blocks": 10, "block_size": 16}, "absent": []},
}


def record(step: Any, requests: Any, tokens: object = 1, **values: object) -> list[Any]:
    """A record that ended 10 ns after its beginning."""
    at = 100 * (step + 1)
    usual = dict.fromkeys(COLUMNS) | {"admitted": [], "preempted": [], "finished": [], "observer_ns": 5}
    given = {"step": step, "requests": requests, "tokens": tokens, "generated_tokens": 1, "free_blocks": 5}
    instants = {"schedule_ns": at, "scheduled_ns": at + 2, "update_ns": at + 8, "end_ns": at + 10}
    return [(usual | given | instants | values)[name] for name in COLUMNS]


def file_of(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in (HEADER, *rows))


ADMITTED = [[0, "a", 90, 20, 16, 20]]


def test_a_damaged_line_is_counted_and_the_batches_that_rest_on_it_are_left_out() -> None:
    content = file_of(
        record(0, [0], 4, admitted=ADMITTED), ["damaged"], record(2, None), record(3, [0]), record(4, None)
    )
    core = read_core_steps(content)

    assert (core.num_damaged, core.first_damaged) == (2, '["damaged"]')
    assert [step.values["step"] for step in core.steps] == [0, 3, 4]
    assert core.steps[-1].request_ids == ("a",)


def test_steps_that_are_missing_or_never_ended_are_counted() -> None:
    content = file_of(
        record(0, [0], 4, admitted=ADMITTED), record(3, [0]), record(4, None, update_ns=None, end_ns=None)
    )
    core = read_core_steps(content)

    assert (core.num_missing, core.num_unended, len(core.steps)) == (2, 1, 2)


def test_a_request_whose_admission_is_not_in_the_file_makes_its_steps_unknown() -> None:
    log = read_step_log(file_of(record(7, [3], generated_tokens=None)))

    assert log.steps["kind"].to_pylist() == ["unknown"]
    assert log.cores[0].steps[0].details is None


def test_a_prompt_that_is_computed_again_after_a_preemption_is_no_decode_step() -> None:
    content = file_of(
        record(0, [0], 4, admitted=ADMITTED),
        record(1, [0]),
        record(2, [], 0, preempted=[0]),
        record(3, [0], 22, admitted=[[0, "a", None, 22, 0, 20]]),
        record(4, [0]),
    )
    log = read_step_log(content)

    assert log.steps["kind"].to_pylist() == ["prefill", "decode", "idle", "prefill", "decode"]
    request = log.cores[0].requests.to_pylist()[0]
    assert (request["preemptions"], request["recomputed_tokens"], request["computed_tokens"]) == (1, 22, 4)
    # The tokens of its prompt were completed once.
    assert log.steps["prompt_tokens"].to_pylist() == [20, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [1, 2]},
        {"end_ns": 3},
        {"schedule_ns": None},
        {"admitted": [[0]]},
        {"admitted": [[0, "a\n", 1, 1, 1, 1]]},
        {"requests": [-1]},
        {"runtime_mode": 7},
        {"step": True},
        {"observer_ns": None},
    ],
)
def test_a_record_that_no_observer_writes_is_damaged(change: dict[str, Any]) -> None:
    assert read_core_steps(file_of(record(**{"step": 0, "requests": [0], **change}))).num_damaged == 1


@pytest.mark.parametrize(
    "content", [b"", b"{}\n", b'{"vllm_core_steps":2}\n', b'{"vllm_core_steps":1,"effective":{}}\n']
)
def test_a_file_of_anything_else_is_refused(content: bytes) -> None:
    with pytest.raises(RecordsError, match="does not start with the header"):
        read_core_steps(content)


def test_two_servers_in_a_file_are_refused() -> None:
    with pytest.raises(RecordsError, match="several servers"):
        read_core_steps(file_of(record(0, [0]), HEADER))
