"""The observer sees every step and changes none, and whatever goes wrong with it stays its own affair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.analysis.logs.observer import load_observer, read_observer
from harness.errors import RecordsError
from harness.measure.records import layout
from harness.stacks.rbln.launch.serving import OBSERVER, OBSERVER_FOLDER
from tests.support.little_stack import write_little_stack

# Loads plugins as vLLM does, then runs an engine core of five steps with the names of the real one.
ENGINE = """
import importlib.metadata, json, logging, sys
logging.basicConfig(level=20, format="%(levelname)s %(name)s %(message)s")
for _ in range(2):
    for plugin in importlib.metadata.entry_points(group="vllm.general_plugins"):
        plugin.load()()
assert "vllm_rbln.v1.core.optimum_scheduler" not in sys.modules, "the plugin imported the scheduler early"
import vllm_rbln.v1.worker.optimum_model_runner as runner
import vllm_rbln.model_executor.models.optimum.model_base as model
import optimum.rbln.utils.runtime_utils as runtime
from vllm_rbln.v1.core.optimum_scheduler import RBLNOptimumScheduler
{before}
scheduler = RBLNOptimumScheduler()
engine = runner.RBLNOptimumModelRunner(model.RBLNOptimumDecoderMixin(), runtime.RBLNPytorchRuntime())
made = []
def step():
    output = scheduler.schedule()
    made.append(scheduler.update_from_output(output, engine.execute_model(output)))
scheduler.waiting += ["a", "b", "c"]
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


@dataclass(frozen=True)
class Engine:
    """How a little engine core ended."""

    made: object
    log: str
    file: Path

    @property
    def lines(self) -> list[str]:
        return [line for line in self.log.splitlines() if "[OBSERVER]" in line]


def _run(tmp_path: Path, *, before: str = "", during: str = "", is_on: bool = True, **stack: str) -> Engine:
    root = write_little_stack(tmp_path / "stack", **stack)
    file = tmp_path / layout.OBSERVER
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(OBSERVER_FOLDER), str(root)])}
    environment |= OBSERVER.variables(file) if is_on else {}
    code = ENGINE.replace("{before}", before).replace("{during}", during)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return Engine(json.loads(done.stdout), done.stderr, file)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An observed engine core that nothing disturbed."""
    return _run(tmp_path_factory.mktemp("engine"))


def test_every_step_becomes_one_row(engine: Engine) -> None:
    assert engine.made == EXPECTED
    records = load_observer(engine.file)
    steps = records.steps.to_pylist()
    assert [row["kind"] for row in steps] == ["prefill", "prefill", "prefill", "decode", "idle"]
    assert [(row["n"], row["b"]) for row in steps] == [(1, 1), (1, 1), (1, 1), (3, 4), (0, 0)]
    assert [row["requests"] for row in steps] == [["a"], ["b"], ["c"], ["a", "b", "c"], []]
    assert [row["device_calls"] for row in steps] == [2, 2, 2, 1, 0]
    assert (steps[0]["prompt_tokens"], steps[0]["cached_tokens"], steps[0]["computed_tokens"]) == (300, 128, 172)
    assert [row["evictions"] for row in steps[:3]] == [[], [], [{"slot": 0, "caller": "request"}]]
    assert steps[3]["evictions"] == [{"slot": 1, "caller": "dummy"}]
    assert [row["dummy_slot"] for row in steps] == [-1, -1, -1, 1, -1]
    assert [(row["slots_held"], row["slots_free"]) for row in steps[:4]] == [(1, 1), (2, 0), (2, 0), (1, 1)]
    assert [(row["running"], row["waiting"]) for row in steps] == [(1, 2), (2, 1), (3, 0), (3, 0), (0, 0)]
    for row in steps[:4]:
        instants = ["schedule_ns", "scheduled_ns", "device_start_ns", "device_end_ns", "executed_ns", "end_ns"]
        assert [row[name] for name in instants] == sorted(row[name] for name in instants)
    assert (records.header["vllm_rbln"], records.header["num_slots"]) == ("0.11.1", 2)
    assert not records.is_last_line_torn
    assert engine.lines == [
        f"INFO vllm_rbln.rbln_observer [OBSERVER] one record per step (vllm-rbln 0.11.1) in {engine.file}"
    ]


def test_a_preempted_requests_eviction_is_named_so(tmp_path: Path) -> None:
    engine = _run(tmp_path, during="scheduler.kv_cache_manager.prefix_cache_manager.free_request('c', preemption=True)")
    evictions = [row["evictions"] for row in load_observer(engine.file).steps.to_pylist()]
    assert evictions[3] == [{"slot": 0, "caller": "preempt"}]


def test_without_its_variable_it_does_nothing(tmp_path: Path) -> None:
    engine = _run(tmp_path, is_on=False)
    assert engine.made == EXPECTED
    assert not engine.file.exists()
    assert not engine.lines


def test_it_attaches_when_the_scheduler_was_imported_before_the_plugin(tmp_path: Path) -> None:
    code = ENGINE.replace("import importlib.metadata", "import vllm_rbln.v1.core.optimum_scheduler, importlib.metadata")
    code = "\n".join(line for line in code.splitlines() if not line.startswith("assert "))
    root = write_little_stack(tmp_path / "stack")
    file = tmp_path / layout.OBSERVER
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(OBSERVER_FOLDER), str(root)]),
        **OBSERVER.variables(file),
    }
    code = code.replace("{before}", "").replace("{during}", "")
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    assert load_observer(file).steps.num_rows == 5


def test_the_bucket_is_seen_where_newer_versions_choose_it(tmp_path: Path) -> None:
    engine = _run(
        tmp_path,
        version="0.12.0",
        before="""
def decode_layout(self, n): return (4, slice(0, n))
def execute_model(self, output):
    n = len(output.num_scheduled_tokens)
    return [self.runtime.forward(self.model.decode_layout(n)[0])] if n else []
model.RBLNOptimumDecoderMixin.decode_layout = decode_layout
runner.RBLNOptimumModelRunner.execute_model = execute_model
""",
    )
    assert [row["b"] for row in load_observer(engine.file).steps.to_pylist()] == [1, 1, 1, 4, 0]


OWN_LAYOUT = """
class Pinned(model.RBLNOptimumDecoderMixin):
    def {name}(self, n): return (4, slice(0, n))
def execute_model(self, output):
    n = len(output.num_scheduled_tokens)
    return [self.runtime.forward(Pinned().{name}(n)[0])] if n else []
model.RBLNOptimumDecoderMixin.decode_layout = lambda self, n: (0, None)
runner.RBLNOptimumModelRunner.execute_model = execute_model
"""


def test_the_bucket_of_a_model_that_lays_its_batch_out_itself_is_seen_too(tmp_path: Path) -> None:
    engine = _run(tmp_path, version="0.12.0", before=OWN_LAYOUT.format(name="decode_layout"))
    assert [row["b"] for row in load_observer(engine.file).steps.to_pylist()] == [1, 1, 1, 4, 0]


def test_a_layout_that_nobody_knows_ends_the_observing_before_a_wrong_record_is_written(tmp_path: Path) -> None:
    engine = _run(tmp_path, version="0.12.0", before=OWN_LAYOUT.format(name="quite_another_layout"))
    assert "stopped after step 3: NotObservable: no known function laid out a decode step" in engine.lines[-1]
    assert [row["kind"] for row in load_observer(engine.file).steps.to_pylist()] == ["prefill"] * 3


@pytest.mark.parametrize("version", ["0.10.4", "0.13.0"])
def test_an_unknown_version_is_refused_with_one_line_and_served_as_before(tmp_path: Path, version: str) -> None:
    engine = _run(tmp_path, version=version)
    assert engine.made == EXPECTED
    assert engine.lines == [
        f"WARNING vllm_rbln.rbln_observer [OBSERVER] not observing: vllm-rbln {version} is not one of 0.11.x, 0.12.x"
    ]
    assert not engine.file.exists()


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("get_dummy_block", "RBLNPrefixKVCacheManager.get_dummy_block"),
        ("preprocess_for_decoder", "RBLNOptimumDecoderMixin.decode_layout"),
        ("_config", "_config"),
    ],
)
def test_a_stack_whose_functions_have_other_names_is_refused_with_one_line(
    tmp_path: Path, name: str, missing: str
) -> None:
    engine = _run(tmp_path, without=name)
    assert engine.made == EXPECTED
    (line,) = engine.lines
    assert "not observing" in line
    assert missing in line
    assert not engine.file.exists()


def test_a_server_on_another_path_of_the_stack_is_refused_with_one_line(tmp_path: Path) -> None:
    engine = _run(tmp_path, before="del sys.modules['optimum.rbln.utils.runtime_utils']")
    assert engine.made == EXPECTED
    (line,) = engine.lines
    assert "the server has not loaded optimum.rbln.utils.runtime_utils.RBLNPytorchRuntime" in line


def test_a_file_that_cannot_be_written_is_one_line_and_the_server_goes_on(tmp_path: Path) -> None:
    (tmp_path / layout.OBSERVER).mkdir()
    engine = _run(tmp_path)
    assert engine.made == EXPECTED
    (line,) = engine.lines
    assert "not observing: IsADirectoryError" in line


def test_a_full_disk_ends_the_observing_and_not_the_serving(tmp_path: Path) -> None:
    engine = _run(
        tmp_path,
        during="""
import os
def full(descriptor, data): raise OSError(28, "No space left on device")
os.write = full
""",
    )
    assert engine.made == EXPECTED
    assert [line for line in engine.lines if line.startswith("WARNING")] == [
        "WARNING vllm_rbln.rbln_observer [OBSERVER] stopped after step 3: OSError: [Errno 28] No space left on device"
    ]
    assert load_observer(engine.file).steps.num_rows == 3


def test_an_answer_it_cannot_read_ends_the_observing_and_not_the_serving(tmp_path: Path) -> None:
    engine = _run(
        tmp_path,
        during="scheduler.skipped_waiting = None",
    )
    assert engine.made == EXPECTED
    assert sum("stopped after step 3: TypeError" in line for line in engine.lines) == 1


def test_the_servers_own_errors_pass_through_unchanged(tmp_path: Path) -> None:
    engine = _run(
        tmp_path,
        during="""
try:
    engine.runtime.forward("broken")
except RuntimeError as error:
    assert str(error) == "device error"
else:
    raise SystemExit(9)
""",
    )
    assert engine.made == EXPECTED


def _header_and(*rows: list[object]) -> bytes:
    from harness.analysis.logs.observer import SCHEMA

    header = {"observer_format": 1, "columns": SCHEMA.names, "pid": 1}
    return b"".join(json.dumps(value).encode() + b"\n" for value in (header, *rows))


def test_a_record_that_was_cut_by_a_kill_is_left_out_and_said(engine: Engine) -> None:
    records = read_observer(engine.file.read_bytes()[:-20])
    assert records.steps.num_rows == 4
    assert records.is_last_line_torn


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"[1,2]\n", "does not start with an observer's header"),
        (b'{"observer_format":2}\n', "does not start with an observer's header"),
        (b'{"observer_format":1,"columns":["step"]}\n', "other columns"),
        (_header_and([0, 1]), "another length"),
        (_header_and() + b"{]\n", "line 2 is not a record"),
    ],
)
def test_a_file_that_no_observer_wrote_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(RecordsError, match=message):
        read_observer(content)


def test_two_servers_in_one_file_are_told_apart_from_one(engine: Engine) -> None:
    content = engine.file.read_bytes()
    lines = content.splitlines(keepends=True)
    with pytest.raises(RecordsError, match="two servers wrote to it"):
        read_observer(content + b"".join(lines[1:]))


def test_the_observer_joins_a_list_of_allowed_plugins(tmp_path: Path) -> None:
    assert "VLLM_PLUGINS" not in OBSERVER.variables(tmp_path)
    assert OBSERVER.variables(tmp_path, "rbln")["VLLM_PLUGINS"] == "rbln,rbln_observer"
