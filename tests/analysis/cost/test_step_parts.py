"""Time in steps, and B - A part by part: the parts sum to it exactly, whatever the steps and requests were."""

from __future__ import annotations

import json
import random

import pyarrow as pa
import pytest

from harness.analysis.cost.reconstruct import channel_b, chunked_channel_a
from harness.analysis.cost.step_parts import BETWEEN, StepParts, step_parts
from harness.clock import ScaledClock
from harness.model.engine import CostModel
from harness.stacks.vllm.core_steps import COLUMNS
from harness.stacks.vllm.step_log import StepLog, read_step_log

COSTS = CostModel(
    "costs",
    "none",
    {1: 9_000_000_000_000, 4: 11_000_000_000_000},
    context_fs=300_000_000,
    chunk_step_fs=2_000_000_000_000,
    chunk_token_fs=5_000_000_000,
    eager_ns=70_000,
)
EFFECTIVE = {"num_gpu_blocks": 500, "block_size": 16, "enable_prefix_caching": True, "cudagraph_mode": "FULL"}


def log_of(lines: list[dict[str, object]]) -> StepLog:
    header = {"vllm_core_steps": 1, "vllm": "0.32.0", "engine": 0, "columns": COLUMNS, "effective": EFFECTIVE}
    empty: dict[str, object] = {
        **{"preempted": [], "finished": [], "admitted": [], "waiting": 0, "skipped_waiting": 0, "free_blocks": 400},
        **{"generated_tokens": 1, "unpadded_tokens": None, "padded_tokens": None, "runtime_mode": None},
        "observer_ns": 1000,
    }
    rows = [list({name: {**empty, **line}[name] for name in COLUMNS}.values()) for line in lines]
    return read_step_log("".join(json.dumps(row) + "\n" for row in [{**header, "absent": []}, *rows]).encode())


def random_log(rng: random.Random) -> StepLog:
    """A server that computes prompts in parts, alone or beside decodes, with pauses and steps that overlap."""
    left: dict[int, int] = {}
    lines: list[dict[str, object]] = []
    now_ns, finished = 1_000_000_000, list[int]()
    for step in range(150):
        admitted = []
        if rng.random() < 0.3 or not left:
            handle, prompt, cached = step, rng.randrange(20, 90), rng.choice((0, 16))
            left[handle] = prompt - cached
            admitted = [[handle, f"cmpl-{step}-0-12345678", now_ns, prompt, cached, prompt]]
        batch = list(left)
        tokens = [min(40, left[handle]) if left[handle] > 0 else 1 for handle in batch]
        is_decode = all(left[handle] <= 0 for handle in batch)
        for handle, count in zip(batch, tokens, strict=True):
            left[handle] -= count
        done = [handle for handle in batch if left[handle] < -rng.randrange(1, 20)]
        begin_ns = now_ns - rng.choice((0, 0, 300_000)) * bool(lines)
        now_ns += rng.randrange(1_000_000, 30_000_000)
        n = len(batch)
        padding = {"unpadded_tokens": n, "padded_tokens": n, "runtime_mode": rng.choice(("FULL", "NONE"))}
        lines.append(
            {
                **{"step": step, "schedule_ns": begin_ns, "scheduled_ns": begin_ns, "update_ns": now_ns},
                **{"end_ns": now_ns, "requests": batch, "tokens": tokens, "admitted": admitted, "running": n},
                **{"finished": finished, "generated_tokens": n},
                **(padding if is_decode else {}),
            }
        )
        finished = done
        for handle in done:
            del left[handle]
        now_ns += rng.choice((0, 200_000, 5_000_000))
    return log_of(lines)


def requests_of(*flights: tuple[int, int]) -> pa.Table:
    return pa.table({"sent_ns": [sent for sent, _ in flights], "done_ns": [done for _, done in flights]})


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_sum_to_b_less_a(seed: int) -> None:
    rng = random.Random(seed)
    log = random_log(rng)
    first, last = log.steps["began_ns"][0].as_py(), log.steps["at_ns"][-1].as_py()
    starts = [rng.randrange(first - 10_000_000, last) for _ in range(8)]
    requests = requests_of(*((start, start + rng.randrange(1, (last - first) // 3)) for start in starts))

    parts = step_parts(log, requests, ScaledClock(1.0), COSTS)
    a = chunked_channel_a(log, log.decode_steps, COSTS)
    b_ns = channel_b(requests)
    assert (parts.a_ns, parts.b_ns) == (a.total_ns, b_ns)
    assert sum(parts.apart_ns.values()) == b_ns - a.total_ns
    assert 0 < parts.in_steps_ns <= b_ns
    assert parts.apart_ns[BETWEEN] == parts.between_ns >= 0
    kinds = {name.partition(" ")[0].rstrip(",") for name in parts.groups}
    assert {"decode", "prefill", "mixed"} <= kinds
    assert sum(group.num_steps for group in parts.groups.values()) == log.steps.num_rows

    both = parts + parts
    assert sum(both.apart_ns.values()) == 2 * (b_ns - a.total_ns)
    assert sum(StepParts().apart_ns.values()) == 0


def step(number: int, begin_ms: int, end_ms: int, **values: object) -> dict[str, object]:
    stamps = dict.fromkeys(("schedule_ns", "scheduled_ns"), begin_ms * 1_000_000)
    ends = dict.fromkeys(("update_ns", "end_ns"), end_ms * 1_000_000)
    return {"step": number, **stamps, **ends, "requests": [0], "running": 1, **values}


def test_prefills_are_told_apart_by_what_came_before_them() -> None:
    log = log_of(
        [
            step(0, 10, 20, tokens=[30], admitted=[[0, "a", 0, 50, 0, 50]], generated_tokens=0),
            step(1, 20, 30, tokens=[20]),
            step(2, 50, 60, requests=[1], tokens=[4], admitted=[[1, "b", 0, 20, 16, 20]], finished=[0]),
        ]
    )
    parts = step_parts(log, requests_of((0, 35_000_000), (40_000_000, 70_000_000)), ScaledClock(1.0), COSTS)
    measured_ms = {name: group.measured_ns / 1e6 for name, group in parts.groups.items()}
    assert measured_ms == {
        "prefill, later part": 10,
        "prefill, first part, engine was idle": 10,
        "prefill, after cached tokens, engine was idle": 10,
    }
    assert parts.between_ns == (10 + 5 + 10 + 10) * 1_000_000


def test_a_host_that_slows_down_drifts_and_larger_batches_do_not() -> None:
    def drift(*step_ms: int) -> float | None:
        lines = [step(0, 10, 20, tokens=[30], admitted=[[0, "a", 0, 30, 0, 30]])]
        end_ms = 20
        for number, each_ms in enumerate(step_ms, 1):
            padding = {"unpadded_tokens": 1, "padded_tokens": 1, "runtime_mode": "FULL"}
            lines.append(step(number, end_ms, end_ms + each_ms, tokens=[1], **padding))
            end_ms += each_ms
        parts = step_parts(log_of(lines), requests_of((0, end_ms * 1_000_000)), ScaledClock(1.0), COSTS)
        return parts.drift

    assert drift(*[10] * 99) is None
    steady, slower = drift(*[100] * 200), drift(*[100] * 150, *[128] * 50)
    # Longer contexts cost more by the model, so that equal steps are a small drift.
    assert steady < 0.02
    assert slower == pytest.approx(0.28, abs=0.02)
