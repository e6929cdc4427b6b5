"""Every step of vllm-rbln has the columns of its device; observing changes none, and its errors are its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.errors import RecordsError
from harness.stacks.rbln.launch.serving import OBSERVER
from harness.stacks.vllm.step_log import INSIDE, StepLog, load_step_log, read_step_log
from tests.support.little_stack import write_little_stack

# Loads plugins as vLLM does, then runs an engine core of five steps with the names of the real one.
ENGINE = """
import importlib.metadata, json, logging, sys
from types import SimpleNamespace as Space
logging.basicConfig(level=20, format="%(levelname)s %(name)s %(message)s")
for _ in range(2):
    for plugin in importlib.metadata.entry_points(group="vllm.general_plugins"):
        plugin.load()()
assert "vllm_rbln.v1.core.optimum_scheduler" not in sys.modules, "the plugin imported the scheduler early"
from vllm.config.scheduler import SchedulerConfig
import vllm_rbln.v1.worker.optimum_model_runner as runner
import vllm_rbln.model_executor.models.optimum.model_base as model
import optimum.rbln.utils.runtime_utils as runtime
{before}
scheduler = SchedulerConfig().get_scheduler_cls()()
engine = runner.RBLNOptimumModelRunner(model.RBLNOptimumDecoderMixin(), runtime.RBLNPytorchRuntime())
made = []
def step():
    output = scheduler.schedule()
    made.append(scheduler.update_from_output(output, engine.execute_model(output)))
for name in "abc":
    scheduler.add_request(Space(request_id=name, num_tokens=300))
step(); step(); step()
{during}
step()
scheduler.running.clear()
step()
print(json.dumps(made))
"""
EXPECTED = [
    {"tokens": [["out", "chunk"], ["out", "chunk"]]},
    {"tokens": [["out", "chunk"], ["out", "chunk"]]},
    {"tokens": [["out", "chunk"], ["out", "chunk"]]},
    {"tokens": [["out", 4]]},
    {"tokens": []},
]
ON = "INFO vllm.vllm_step_log [CORE STEPS] one record per step, with its device (vllm-rbln {})"


@dataclass(frozen=True)
class Engine:
    """How a little engine core ended. lines: that the observer logged."""

    made: object
    lines: list[str]
    file: Path

    @property
    def log(self) -> StepLog:
        return load_step_log(self.file)

    @property
    def sizes(self) -> list[tuple[str, int | None]]:
        """Kind and b of every step."""
        return [(row["kind"], row["b"]) for row in self.log.steps.to_pylist()]


WHOLE = [("prefill", None)] * 3 + [("decode", 4), ("idle", None)]


def _run(tmp_path: Path, *, before: str = "", during: str = "", **stack: str) -> Engine:
    root = write_little_stack(tmp_path / "stack", **stack)
    file = tmp_path / "observer.jsonl"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(INSIDE), str(root)]), **OBSERVER.variables(file)}
    code = ENGINE.replace("{before}", before).replace("{during}", during)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return Engine(json.loads(done.stdout), [line for line in done.stderr.splitlines() if "[CORE STEPS]" in line], file)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An observed engine core that nothing disturbed."""
    return _run(tmp_path_factory.mktemp("engine"))


def test_every_step_has_what_its_device_did(engine: Engine) -> None:
    assert engine.made == EXPECTED
    assert (engine.sizes, engine.lines) == (WHOLE, [ON.format("0.11.1")])
    (core,) = engine.log.cores
    rows = [step.values for step in core.steps]
    assert [step.request_ids for step in core.steps] == [("a",), ("b",), ("c",), ("a", "b", "c"), ()]
    assert [row["device_calls"] for row in rows] == [2, 2, 2, 1, 0]
    # Of the prompt what is not cached is computed.
    assert core.steps[0].tokens == (172,)
    assert rows[0]["admitted"][0][3:] == [300, 128, 300]
    assert core.steps[0].details.parts == ((128, 172),)
    assert [row["evictions"] for row in rows[:4]] == [[], [], [[0, "request"]], [[1, "dummy"]]]
    assert [row["dummy_slot"] for row in rows] == [None, None, None, 1, None]
    assert [(row["slots_held"], row["slots_free"]) for row in rows[:4]] == [(1, 1), (2, 0), (2, 0), (1, 1)]
    assert (rows[3]["unpadded_tokens"], rows[3]["padded_tokens"]) == (3, 4)
    for row in rows[:4]:
        instants = ["schedule_ns", "scheduled_ns", "device_start_ns", "device_end_ns", "executed_ns", "end_ns"]
        assert [row[name] for name in instants] == sorted(row[name] for name in instants)
    assert (core.header["vllm_rbln"], core.header["num_slots"]) == ("0.11.1", 2)


def test_a_preempted_requests_eviction_is_named_so(tmp_path: Path) -> None:
    engine = _run(tmp_path, during="scheduler.kv_cache_manager.prefix_cache_manager.free_request('c', preemption=True)")
    assert engine.log.cores[0].steps[3].values["evictions"] == [[0, "preempt"]]


OWN_LAYOUT = """
class Pinned(model.RBLNOptimumDecoderMixin):
    def {name}(self, n): return (4, slice(0, n))
def execute_model(self, output):
    n = len(output.num_scheduled_tokens)
    return [self.runtime.forward({model}.{name}(n)[0])] if n else []
model.RBLNOptimumDecoderMixin.decode_layout = lambda self, n: ({base}, None)
runner.RBLNOptimumModelRunner.execute_model = execute_model
"""


@pytest.mark.parametrize("layout", [{"model": "self.model", "base": "4"}, {"model": "Pinned()", "base": "0"}])
def test_the_batch_size_is_seen_where_newer_versions_or_a_model_of_its_own_choose_it(
    tmp_path: Path, layout: dict[str, str]
) -> None:
    engine = _run(tmp_path, version="0.12.0", before=OWN_LAYOUT.format(name="decode_layout", **layout))
    assert (engine.sizes, engine.lines) == (WHOLE, [ON.format("0.12.0")])


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (
            OWN_LAYOUT.format(name="quite_another_layout", model="Pinned()", base="4"),
            "LookupError: no known function laid out a decode step",
        ),
        (
            "model.RBLNOptimumDecoderMixin.preprocess_for_decoder = lambda self, n: {'padded_batch_size': 'four'}",
            "ValueError: invalid literal for int() with base 10: 'four'",
        ),
    ],
)
def test_what_it_cannot_read_ends_the_observing_before_a_wrong_record_and_not_the_serving(
    tmp_path: Path, before: str, reason: str
) -> None:
    engine = _run(tmp_path, before=before)
    assert len(engine.made) == 5
    assert engine.lines[1:] == [f"WARNING vllm.vllm_step_log [CORE STEPS] stopped after 4 steps: {reason}"]
    assert engine.sizes == WHOLE[:3]


@pytest.mark.parametrize(
    ("stack", "before", "reason"),
    [
        ({"version": "0.10.4"}, "", "vllm-rbln 0.10.4 is not one of 0.11.x, 0.12.x"),
        ({"version": "0.13.0"}, "", "vllm-rbln 0.13.0 is not one of 0.11.x, 0.12.x"),
        ({"without": "get_dummy_block"}, "", "has no RBLNPrefixKVCacheManager.get_dummy_block"),
        ({"without": "preprocess_for_decoder"}, "", "has no RBLNOptimumDecoderMixin.decode_layout"),
        ({"without": "_config"}, "", "has no attribute '_config'"),
        (
            {},
            "del sys.modules['optimum.rbln.utils.runtime_utils']",
            "the server has not loaded optimum.rbln.utils.runtime_utils.RBLNPytorchRuntime",
        ),
    ],
)
def test_an_unknown_stack_is_refused_with_one_line_and_its_steps_have_no_device(
    tmp_path: Path, stack: dict[str, str], before: str, reason: str
) -> None:
    engine = _run(tmp_path, before=before, **stack)
    assert engine.made == EXPECTED
    (line,) = engine.lines
    assert "WARNING vllm.vllm_step_log [CORE STEPS] not observing the device: " in line
    assert reason in line
    assert engine.sizes == [(kind, None) for kind, _b in WHOLE]
    assert "device_ns" not in engine.log.cores[0].steps[0].values


def test_the_servers_own_errors_pass_through_unchanged(tmp_path: Path) -> None:
    during = """
try:
    engine.runtime.forward("broken")
except RuntimeError as error:
    assert str(error) == "device error"
else:
    raise SystemExit(9)
"""
    assert _run(tmp_path, during=during).made == EXPECTED


@pytest.mark.parametrize(
    ("column", "value"),
    [("device_ns", -1), ("slots_free", 1.5), ("evictions", 3), ("evictions", [[]]), ("evictions", [[1, 2]])],
)
def test_a_record_that_no_device_gives_is_damaged(engine: Engine, column: str, value: Any) -> None:
    header, *lines = engine.file.read_bytes().splitlines()
    row = json.loads(lines[0])
    row[json.loads(header)["columns"].index(column)] = value
    assert read_step_log(b"\n".join([header, json.dumps(row).encode(), b""])).num_damaged == 1


def test_the_file_of_the_observer_before_is_refused_with_the_version_that_reads_it() -> None:
    with pytest.raises(RecordsError, match="is of an observer before this version") as refused:
        read_step_log(b'{"observer_format":1,"columns":["step"]}\n')
    assert refused.value.hint == "Commit 8443c613 reads it"
