"""Each engine step of a vLLM becomes a record, and records become decode steps (n, b); nothing can harm the server."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.errors import RecordsError
from harness.extras.twin.environment import TwinEnvironment, twin_variables
from harness.stacks.vllm.inside.vllm_step_log import SETTINGS
from harness.stacks.vllm.launch import STEP_LOG
from harness.stacks.vllm.step_log import COLUMNS, INSIDE, StepLog, load_step_log, read_step_log

# The part of vLLM that a stat logger meets, constructed after vllm 0.30.0 (v1/metrics/loggers.py and stats.py).
LITTLE_VLLM = """
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from importlib.metadata import entry_points

class StatLoggerBase(ABC):
    @abstractmethod
    def __init__(self, vllm_config, engine_index=0): ...
    @abstractmethod
    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0): ...
    @abstractmethod
    def log_engine_initialized(self): ...
    def log(self): pass

def load_stat_logger_plugin_factories():
    return [plugin.load() for plugin in entry_points(group="vllm.stat_logger_plugins")]

@dataclass
class PrefixCacheStats:
    queries: int = 0
    hits: int = 0

@dataclass
class SchedulerIterationDetails:
    iteration_index: int
    num_ctx_requests: int
    num_ctx_tokens: int
    num_generation_requests: int
    num_generation_tokens: int
    elapsed_ms: float
    is_dummy: bool = False

@dataclass
class SchedulerStats:
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    iteration_details: SchedulerIterationDetails | None = None
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    cudagraph_stats: object = None

@dataclass
class CUDAGraphStat:
    num_unpadded_tokens: int
    num_padded_tokens: int
    num_paddings: int
    runtime_mode: str

class IterationStats:
    def __init__(self):
        self.num_generation_tokens = self.num_preempted_reqs = self.num_prompt_tokens = 0
"""
# What vLLM's API server does with a stat logger: loads it by its entry point, then calls it for every message.
SERVE = """
import logging
logging.basicConfig(level=20, format="%(levelname)s %(name)s %(message)s")
from types import SimpleNamespace as Space
from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories
from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, SchedulerIterationDetails, SchedulerStats

config = Space(
    model_config=Space(model="m", max_model_len=8192, enforce_eager=False),
    scheduler_config=Space(max_num_seqs=6, max_num_batched_tokens=2048, enable_chunked_prefill=True),
    cache_config=Space(num_gpu_blocks=None, block_size=16, enable_prefix_caching=True),
    compilation_config=Space(cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=[1, 2, 4]),
    parallel_config=Space(tensor_parallel_size=1, data_parallel_size=1, _api_process_count=1),
    device_config=Space(device_type="cuda"),
    speculative_config=None,
    observability_config=Space(cudagraph_metrics=True, enable_logging_iteration_details=True),
)
loggers = [make(config, 0) for make in load_stat_logger_plugin_factories()]
config.cache_config.num_gpu_blocks = 512

def record(stats, iteration):
    for logger in loggers:
        logger.record(stats, iteration, mm_cache_stats=None, engine_idx=0)

def step(n, padded, mode, prompts=0, prompt_tokens=0):
    iteration = IterationStats()
    iteration.num_generation_tokens = n
    iteration.num_preempted_reqs = 1
    tokens = n + prompt_tokens
    stats = SchedulerStats(
        num_running_reqs=n + prompts,
        num_waiting_reqs=2,
        kv_cache_usage=0.25,
        prefix_cache_stats=PrefixCacheStats(queries=64, hits=32),
        cudagraph_stats=CUDAGraphStat(tokens, padded, padded - tokens, mode),
        iteration_details=SchedulerIterationDetails(0, prompts, prompt_tokens, n, n, 1.5),
    )
    record(stats, iteration)

for logger in loggers:
    logger.log_engine_initialized()
step(3, 4, "FULL")
step(2, 104, "PIECEWISE", 1, 100)
step(6, 6, "NONE")
record(None, None)
for logger in loggers:
    logger.log()
print("served")
"""


def little_vllm(folder: Path, source: str = LITTLE_VLLM) -> Path:
    """A folder with the modules of vLLM that ``SERVE`` imports."""
    for name in ("vllm/v1/metrics", "vllm/compilation"):
        (folder / name).mkdir(parents=True)
    (folder / "vllm/v1/metrics/loggers.py").write_text(source)
    (folder / "vllm/v1/metrics/stats.py").write_text("from vllm.v1.metrics.loggers import *\n")
    (folder / "vllm/compilation/cuda_graph.py").write_text("from vllm.v1.metrics.loggers import CUDAGraphStat\n")
    return folder


def serve(python: Path | str, search: list[Path], variables: dict[str, str], script: str = SERVE) -> str:
    """Run a little server; its log. It must serve to its end."""
    path = os.pathsep.join(map(str, [INSIDE, *search]))
    done = subprocess.run(
        [str(python), "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.stdout.endswith("served\n"), done.stderr
    return done.stderr


def log_of(*rows: dict[str, Any], **effective: Any) -> StepLog:
    """The file of a logger that wrote ``rows``; columns left out are null."""
    header = {"vllm_step_log": 1, "columns": list(COLUMNS), "vllm": "0.30.0", "effective": effective, "absent": []}
    values = [
        [{"at_ns": place, "logger_ns": 1000, **row}.get(name) for name in list(COLUMNS)]
        for place, row in enumerate(rows)
    ]
    return read_step_log("".join(json.dumps(line) + "\n" for line in [header, *values]).encode())


def counts(requests: int, tokens: int, prompts: int = 0, prompt_tokens: int = 0) -> dict[str, int]:
    return {
        "generation_requests": requests,
        "generation_tokens": tokens,
        "context_requests": prompts,
        "context_tokens": prompt_tokens,
    }


LEFT_OUT = tuple(
    name
    for name, place in SETTINGS.items()
    if f"{place.rpartition('.')[2]}=" not in SERVE and f"{place.partition('.')[0]}=None" not in SERVE
)
"""Settings that the constructed configuration leaves out, as another release may."""


def check_served(log: StepLog) -> None:
    """The three steps of ``SERVE``, and the settings of its server."""
    assert log.effective["max_num_seqs"] == 6
    assert log.effective["cudagraph_capture_sizes"] == [1, 2, 4]
    assert log.effective["num_gpu_blocks"] == 512
    assert log.steps["kind"].to_pylist() == ["decode", "mixed", "decode"]
    assert log.steps["n"].to_pylist() == [3, None, 6]
    assert log.steps["b"].to_pylist() == [4, None, 6]
    assert log.steps["preempted"].to_pylist() == [1, 1, 1]
    assert log.steps["prefix_hits"].to_pylist() == [32, 32, 32]
    assert log.steps["kv_usage"].to_pylist() == [0.25, 0.25, 0.25]
    assert log.eager_by_n == {6: 1}
    assert log.num_damaged == 0
    assert log.cost_us["max"] > 0


def test_a_server_shows_every_step_and_its_settings(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    serve(sys.executable, [little_vllm(tmp_path)], STEP_LOG.variables(file))
    log = load_step_log(file)
    check_served(log)
    assert log.absent == LEFT_OUT


@pytest.mark.twin
def test_the_real_loader_and_the_real_statistics_of_vllm_give_the_same(twin: TwinEnvironment, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    variables = twin_variables(twin)
    serve(twin.python, [Path(variables["PYTHONPATH"])], variables | STEP_LOG.variables(file))
    log = load_step_log(file)
    check_served(log)
    assert log.vllm == twin.stamp["versions"]["vllm"].partition("+")[0]


def test_attributes_that_a_release_does_not_have_are_named_and_null(tmp_path: Path) -> None:
    source = LITTLE_VLLM.replace("    num_skipped_waiting_reqs: int = 0\n", "").replace(
        "self.num_preempted_reqs = ", ""
    )
    file = tmp_path / "steps.jsonl"
    script = SERVE.replace("    iteration.num_preempted_reqs = 1\n", "")
    serve(sys.executable, [little_vllm(tmp_path, source)], STEP_LOG.variables(file), script)
    log = load_step_log(file)
    assert log.absent == (*LEFT_OUT, "skipped_waiting", "preempted")
    assert log.steps["preempted"].null_count == 3
    assert log.unseen[-1].endswith("has no " + ", ".join(log.absent))
    assert log.steps["n"].to_pylist() == [3, None, 6]


def test_an_attribute_that_raises_is_null_and_the_server_goes_on(tmp_path: Path) -> None:
    script = SERVE.replace(
        "for logger in loggers:\n    logger.log_engine",
        "SchedulerStats.num_waiting_reqs = property(lambda self: 1 / 0, lambda self, value: None)\n"
        "for logger in loggers:\n    logger.log_engine",
    )
    file = tmp_path / "steps.jsonl"
    serve(sys.executable, [little_vllm(tmp_path)], STEP_LOG.variables(file), script)
    log = load_step_log(file)
    assert log.steps["waiting"].null_count == 3
    assert "waiting" in log.absent


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_log_line_and_the_server_goes_on(tmp_path: Path) -> None:
    log = serve(sys.executable, [little_vllm(tmp_path)], STEP_LOG.variables(Path("/dev/full")))
    lines = [line for line in log.splitlines() if "STEP LOG" in line]
    assert lines == ["WARNING vllm.vllm_step_log [STEP LOG] stopped: OSError: [Errno 28] No space left on device"]


def test_without_its_variable_the_logger_writes_nothing(tmp_path: Path) -> None:
    place = little_vllm(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert "STEP LOG" not in serve(sys.executable, [place], {})
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (counts(3, 3), "decode"),
        (counts(3, 9), "speculative"),
        (counts(3, 3, 1, 100), "mixed"),
        (counts(0, 0, 1, 100), "prefill"),
        (counts(0, 0), "idle"),
        (counts(3, 3) | {"is_dummy": True}, "dummy"),
        # Padding and counts of different steps are never joined.
        (counts(3, 3) | {"unpadded_tokens": 4, "padded_tokens": 4}, "unknown"),
        ({"unpadded_tokens": 3, "generated_tokens": 3, "prompt_tokens": 0}, "decode"),
        ({"unpadded_tokens": 103, "generated_tokens": 3, "prompt_tokens": 0}, "mixed"),
        ({"unpadded_tokens": 4, "generated_tokens": 4, "prompt_tokens": 7}, "mixed"),
        ({"unpadded_tokens": 100, "generated_tokens": 0}, "prefill"),
        ({"unpadded_tokens": 0, "generated_tokens": 0}, "idle"),
        ({"generated_tokens": 3}, "unknown"),
        ({"running": 0}, "idle"),
        ({"running": 1}, "unknown"),
    ],
)
def test_the_kind_of_a_step_follows_from_its_counts(row: dict[str, Any], kind: str) -> None:
    assert log_of(row).steps["kind"].to_pylist() == [kind]


def test_draft_tokens_without_counts_of_requests_leave_a_step_undecided() -> None:
    row = {"unpadded_tokens": 3, "generated_tokens": 3, "prompt_tokens": 0}
    assert log_of(row, num_speculative_tokens=2).num_by_kind == {"unknown": 1}


def test_only_decode_steps_with_shown_padding_are_given() -> None:
    log = log_of(
        counts(3, 3) | {"unpadded_tokens": 3, "padded_tokens": 4, "runtime_mode": "FULL"},
        counts(3, 3),
        counts(3, 3, 1, 100) | {"unpadded_tokens": 103, "padded_tokens": 104},
    )
    assert log.decode_steps.to_pylist() == [{"at_ns": 0, "n": 3, "b": 4, "runtime_mode": "FULL"}]


@pytest.mark.parametrize(
    "effective", [{"cudagraph_mode": "NONE"}, {"cudagraph_mode": "FULL", "enforce_eager": True}, {}]
)
def test_eager_steps_count_only_where_graphs_are_on(effective: dict[str, Any]) -> None:
    eager = counts(9, 9) | {"unpadded_tokens": 9, "padded_tokens": 9, "runtime_mode": "NONE"}
    assert log_of(eager, **effective).eager_by_n == {}
    assert log_of(eager, eager, cudagraph_mode="FULL").eager_by_n == {9: 2}


def test_what_a_server_did_not_show_is_named_with_its_option() -> None:
    (padding, phases) = log_of({"running": 1}).unseen
    assert "start the server with --cudagraph-metrics" in padding
    assert "--enable-logging-iteration-details" in phases
    (padding, _) = log_of({"running": 1}, cudagraph_metrics=True).unseen
    assert padding == "padded tokens: this model runner does not report them"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[1,2",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 5000,
        json.dumps([5, *[None] * 17, None]).encode(),
        json.dumps([None] * 18 + [1]).encode(),
        json.dumps([-1, *[None] * 17, 1]).encode(),
        json.dumps([1 << 70, *[None] * 17, 1]).encode(),
        json.dumps([5, True, *[None] * 16, 1]).encode(),
        json.dumps([5, *[None] * 3, True, *[None] * 13, 1]).encode(),
        json.dumps([5, *[None] * 8, "FULL\n", *[None] * 8, 1]).encode(),
        json.dumps([5, *[None] * 8, "F" * 65, *[None] * 8, 1]).encode(),
        # More hits than queries, and less padded than unpadded.
        json.dumps([5, None, None, None, None, 3, 4, *[None] * 11, 1]).encode(),
        json.dumps([5, *[None] * 6, 8, 4, *[None] * 9, 1]).encode(),
    ],
)
def test_a_damaged_line_is_counted_and_quoted(line: bytes) -> None:
    content = whole_file()
    head, _, tail = content.partition(b"\n")
    log = read_step_log(head + b"\n" + line + b"\n" + tail)
    assert log.num_damaged == 1
    assert log.first_damaged == line[:120].decode("utf-8", "replace")
    assert log.steps.num_rows == 2


@pytest.mark.parametrize("instants", [[3, 9, 1, 11], [3, 900, 9, 11]])
def test_a_record_out_of_time_is_damaged_and_no_other(instants: list[int]) -> None:
    log = log_of(*({"at_ns": at_ns} for at_ns in instants))
    assert (log.steps["at_ns"].to_pylist(), log.num_damaged) == ([3, 9, 11], 1)


def test_a_last_line_cut_short_is_damaged() -> None:
    log = read_step_log(whole_file()[:-5])
    assert (log.steps.num_rows, log.num_damaged) == (1, 1)


@pytest.mark.parametrize("content", [b"", b"\n", b"{}\n", b'{"vllm_step_log":2,"effective":{}}\n', b"[1]\n"])
def test_a_file_without_the_header_is_refused(content: bytes) -> None:
    with pytest.raises(RecordsError, match="does not start with the header of a step log"):
        read_step_log(content)


def test_steps_of_several_servers_in_a_file_are_refused() -> None:
    with pytest.raises(RecordsError, match=r"several servers\. Use a file per server, and --api-server-count 1"):
        read_step_log(whole_file() * 2)


def test_no_line_of_any_bytes_is_more_than_a_damaged_line() -> None:
    chosen = random.Random(31)
    head, *rows = whole_file().splitlines()
    lines: list[bytes] = []
    for _ in range(20_000):
        line = bytearray(chosen.choice(rows))
        for _ in range(chosen.randint(1, 6)):
            line[chosen.randrange(len(line))] = chosen.choice(b'0123456789-.eE,[]{}"nulltrue\x00\xff')
        lines.append(bytes(line).replace(b"\n", b""))
    log = read_step_log(b"\n".join([head, *lines, b""]))
    assert log.steps.num_rows + log.num_damaged == 20_000
    assert log.num_damaged > 1000


def test_a_server_with_a_list_of_plugins_gets_the_logger_too(tmp_path: Path) -> None:
    assert "VLLM_PLUGINS" not in STEP_LOG.variables(tmp_path)
    assert STEP_LOG.variables(tmp_path, "a,b")["VLLM_PLUGINS"] == "a,b,vllm_step_log"
    assert "VLLM_PLUGINS" not in STEP_LOG.variables(tmp_path, "vllm_step_log")


def whole_file() -> bytes:
    """Two decode steps."""
    header = {"vllm_step_log": 1, "columns": list(COLUMNS), "vllm": "0.30.0", "effective": {}, "absent": []}
    rows = [[at, 3, 0, 0, 0.5, 64, 32, 3, 4, "FULL", 0, 0, 3, 3, False, 0, 3, 0, 900] for at in (5, 6)]
    return "".join(json.dumps(line) + "\n" for line in [header, *rows]).encode()
