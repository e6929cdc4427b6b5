"""Draws take what requests and steps took in other runs, where they met the like; a client goes on that much later."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.short_memory import (
    FIGURES,
    RECENT_NS,
    SERVER,
    SHARES,
    WORKLOAD,
    Delays,
    DrawnRun,
    Studied,
    delays_of,
    drawn,
    experiment,
    record_of_core,
)
from harness.clock import NS_PER_MS, ScaledClock
from harness.model.engine.core import StepEnd
from harness.model.experiment import PlannedRun, resolve
from harness.stacks.vllm.core_steps import COLUMNS
from harness.stacks.vllm.step_log import read_step_log

LOOKS_NS = 50_000
"""After the step before, in an engine that was not idle."""


def planned_run(num_sessions: int) -> PlannedRun:
    few = {**WORKLOAD, "num_sessions": num_sessions, "requests_per_session": 3, "start_offset_s": 0.02}
    server = {**SERVER, "slot_tokens": 8192, "decode_buckets": list(range(1, 9))}
    (planned,) = resolve(experiment(Studied("sim", few, server), SHARES[-1]))
    return planned


def delays_with(late_ms: int, first_ms: int, end_ms: int, *steps_ms: tuple[int, int]) -> Delays:
    """Of one request that met an idle server; steps_ms: by costs and measured."""
    times = [[NS_PER_MS * late_ms], [NS_PER_MS * first_ms], [NS_PER_MS * end_ms]]
    steps = np.array(steps_ms, dtype=np.int64).reshape(-1, 2).T * NS_PER_MS
    return Delays(*np.array([[-RECENT_NS], [2 * RECENT_NS], *times]), *steps)


def test_what_requests_take_beside_their_steps_moves_what_their_clients_send_next() -> None:
    planned = planned_run(1)
    none, late = (drawn(planned, [delays_with(*each)]) for each in ((0, 0, 0), (2, 3, 5)))
    added = {name: of(late) - of(none) for name, (_, of) in FIGURES.items()}
    assert np.allclose(added["TTFT p50, ms"], 5.0)
    assert np.allclose(added["session time less waits, mean s"], 3 * 0.007)
    assert np.allclose(added["duration, s"], 3 * 0.007)
    assert not added["reuse (share of prompt tokens)"].any()


class ObservedRun(DrawnRun):
    """A draw with the records that an observer in the engine core of a vLLM writes of it."""

    takes_equal_steps = False

    def play(self) -> int:
        self.lines, self._finished = list[dict[str, Any]](), list[int]()
        return super().play()

    def ended(self, server: int, end: StepEnd, /) -> None:
        step, begin_ns = end.start.step, end.start.start_ns
        was_idle = not self.lines or self.lines[-1]["end_ns"] != begin_ns
        decided_ns = begin_ns if was_idle else begin_ns + 2 * LOOKS_NS
        # An empty step takes no time.
        end_ns = max(end.start.end_ns, decided_ns)
        self.lines.append(
            {
                **{"step": len(self.lines), "schedule_ns": decided_ns, "scheduled_ns": decided_ns},
                **{"update_ns": end_ns, "end_ns": end_ns, "requests": [each.handle for each in end.start.requests]},
                **{"tokens": step.tokens, "running": step.num_seqs, "finished": self._finished},
                "admitted": [
                    [each.request, f"{each.request}", decided_ns - (not was_idle) * LOOKS_NS, tokens, cached, tokens]
                    for each in step.admissions
                    for cached, tokens in [(each.cached_tokens, each.cached_tokens + each.computed_tokens)]
                ],
            }
        )
        self._finished = [each.handle for each in end.finished]
        super().ended(server, end)


def test_delays_of_an_engine_cores_steps_are_those_that_were_drawn() -> None:
    planned = planned_run(6)
    idle, busy = delays_with(2, 3, 5, (1, 3)), delays_with(0, 3, 5)
    truth = Delays(*(np.concatenate(columns) for columns in zip(idle, busy, busy, strict=True)))
    truth.until_ns[1:], truth.since_ns[1:], truth.late_ns[2] = NS_PER_MS, RECENT_NS, NS_PER_MS
    run = ObservedRun(planned, [truth, truth], 1)
    rows = run.seen()

    empty: dict[str, object] = {"preempted": [], "waiting": 0, "skipped_waiting": 0, "free_blocks": 9, "observer_ns": 0}
    lines = [[{**dict.fromkeys(COLUMNS), **empty, **line}[name] for name in COLUMNS] for line in run.lines]
    effective = {"enforce_eager": True, "enable_prefix_caching": True}
    header = {"vllm_core_steps": 1, "vllm": "0.32.0", "engine": 0, "columns": COLUMNS, "absent": []}
    log = read_step_log(
        "".join(json.dumps(row) + "\n" for row in [{**header, "effective": effective}, *lines]).encode()
    )
    requests = log.cores[0].requests
    sessions, numbers = zip(*(run.names[int(name)] for name in requests["request_id"].to_pylist()), strict=True)
    requests = requests.append_column("session", pa.array(sessions)).append_column("request", pa.array(numbers))
    record = record_of_core(log, requests, ScaledClock(1.0), planned.cost_model)
    table = [
        {"session": key[0], "request": key[1], "due_ns": due_ns, "sent_ns": due_ns, "done_ns": done_ns}
        for key, (due_ns, _first, done_ns, _cached) in zip(sorted(run.requests), rows, strict=True)
    ]
    found = delays_of(table, [first_ns - due_ns for due_ns, first_ns, *_ in rows], record)

    assert {*found.first_ns.tolist()} == {3 * NS_PER_MS}
    assert {*found.end_ns.tolist()} == {5 * NS_PER_MS}
    assert np.allclose(found.lasted_ns / found.price_ns, 3)
    in_order = sorted(table, key=lambda row: row["due_ns"])
    came_ns = [run.requests[row["session"], row["request"]].arrival_ns - row["due_ns"] for row in in_order]
    late_ns = np.array(came_ns) - np.maximum(found.until_ns, 0)
    is_idle = found.until_ns < 0
    assert 0 < is_idle.sum() < len(late_ns)
    assert found.late_ns[is_idle].tolist() == late_ns[is_idle].tolist()
    # Of a request that missed the end of a step it is known which step it missed, not by how much.
    is_late = late_ns > 0
    assert (is_late & ~is_idle).any()
    assert (found.late_ns[is_late] > 0).all()
    assert (found.late_ns[~is_late] <= LOOKS_NS).all()
