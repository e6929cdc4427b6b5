"""Drawn plans through an emulated vLLM with the recorder on, and what an import of its file must say of them.

``python -m tests.support.recorded_sessions PLANS [FIRST_SEED]`` compares so many plans; exit status 0 means that every
session, turn, length, link and wait is right, and that the scheduler's rules decide as the server did.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from harness.extras.sessions.commands import read_engine, rules_of
from harness.extras.sessions.replay import Replay, replay
from harness.measure.emulator.sessions import SessionRecorder
from harness.measure.emulator.step_log import step_log_header
from harness.model.engine import EngineConfig, load_cost_model
from harness.model.engine.core import EngineCore, EngineRequest, StepEnd, StepStart
from harness.model.engine.paged import scheduler_of
from harness.model.engine.scheduler import Step
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.spec import ServerSpec
from harness.model.traces.importing import import_trace
from harness.model.traces.recording import TraceFile, read_trace
from harness.stacks.vllm.core_steps import COLUMNS
from harness.stacks.vllm.inside.vllm_step_log.sessions import Limits
from harness.stacks.vllm.step_log import read_step_log
from tests.support.virtual_emulator import TokenDriver, run_virtually

MS = 1_000_000
SLOT_TOKENS = 768


class Turn(NamedTuple):
    """One request of a session, as an import has it. base: place of the one that it continues, -1 where it is fresh."""

    base: int
    wait_ns: int
    prompt: int
    keep: int
    generate: int
    left_tokens: int
    left: bool


Sessions = list[tuple[int, tuple[Turn, ...]]]
"""(start, turns) of each tree of requests, by start."""


def drawn_server(chosen: random.Random) -> ServerSpec:
    """Memory from one longest request up: what was kept is evicted while others run."""
    limit, block = chosen.choice((1, 2, 3, 6)), chosen.choice((8, 16, 32))
    longest = SLOT_TOKENS // block
    table = {
        "rules": "vllm-paged",
        "cost_model": "emulated-gpu",
        "slot_tokens": SLOT_TOKENS,
        "max_num_seqs": limit,
        "decode_buckets": chosen.choice(((1,), (1, 2, 4), (1, 2, 3, 4, 5, 6), (8,))),
        "block_size": block,
        "num_gpu_blocks": 1 + chosen.choice((longest, longest + 7, 3 * longest)),
        "max_num_batched_tokens": chosen.choice((40, 300, 2048)),
        "async_scheduling": chosen.random() < 0.5,
    }
    return ServerSpec.model_validate(table)


def drawn_plan(chosen: random.Random, block: int) -> Plan:
    """Sessions of some turns, with a system prompt that they share, with forks, and with answers that are left.

    Every answer that is continued fills a block, without which no block shows that it was.
    """
    shared = chosen.choice((0, 0, 5, 64, 100))
    sessions: list[SessionPlan] = []
    for index in range(chosen.randint(1, 6)):
        before = chosen.choice(sessions) if sessions and chosen.random() < 0.5 else None
        streamed = before.requests[-1].stream_tokens if before is not None else 0
        if before is None or streamed > SLOT_TOKENS // 2 or before.requests[-1].abort_after_ns:
            streamed, continues = 0, None
        else:
            continues = before.index
        requests = _drawn_turns(chosen, streamed, shared, block)
        start_ns = chosen.choice((0, chosen.randrange(2000 * MS)))
        sessions.append(SessionPlan(index, start_ns, continues, continues, requests))
    return Plan("drawn", 1, chosen.randrange(1 << 30), "as-drawn", shared, (300, 2000), tuple(sessions))


def _drawn_turns(chosen: random.Random, streamed: int, shared: int, block: int) -> tuple[RequestPlan, ...]:
    requests: list[RequestPlan] = []
    for _ in range(chosen.randint(1, 6)):
        least = 1 + (shared if not streamed else 0)
        new, generate = least + chosen.randrange(150), block + chosen.randrange(60)
        if streamed + new + generate >= SLOT_TOKENS:
            break
        left = chosen.random()
        tokens = chosen.randint(block, generate - 1) if left < 0.15 and generate > block else 0
        wait_ns = chosen.choice((0, chosen.randrange(500 * MS)))
        requests.append(RequestPlan(streamed, new, generate, wait_ns, abort_after_tokens=tokens))
        streamed = requests[-1].stream_tokens
    if chosen.random() < 0.15 and not requests[-1].abort_after_tokens:
        # Nothing goes on from an answer of which nobody knows how much was received.
        last = requests.pop()
        left_ns = chosen.randrange(1, 300 * MS)
        requests.append(RequestPlan(last.keep_tokens, last.new_tokens, last.generate_tokens, abort_after_ns=left_ns))
    return tuple(requests)


def recorded(plan: Plan, server: ServerSpec, path: Path, limits: Limits | None = None) -> list[StepEnd]:
    """Play a plan in virtual time, and write the file of its sessions; the steps."""
    record = SessionRecorder(EngineConfig.from_server(server), path, limits=limits)
    steps = run_virtually(plan, server)
    for end in steps:
        record.started(end.start)
        record.ended(end)
    return steps


class _Decisions(TokenDriver):
    """Keeps each step as it was decided: with asynchronous scheduling, when the step before it began."""

    def keep(self) -> None:
        """Before anything is played."""
        self.decided: dict[int, tuple[int, Step]] = {}
        # Free blocks after schedule(), where no other step was decided since.
        self.free: dict[int, int] = {}

    def started(self, _server: int, start: StepStart, /) -> None:
        self.decided.setdefault(start.number, (start.start_ns, start.step))
        scheduler: Any = self.cores[0].scheduler
        server, ahead = scheduler._state.server, 1 - int(scheduler._state.server["current"][0])
        if server["is_ahead"][0] and scheduler._state.steps[ahead]["num_scheduled"] > 0:
            self.decided[start.number + 1] = (start.start_ns, scheduler._step(ahead))
            self.free[start.number + 1] = scheduler.free_blocks
        else:
            self.free.setdefault(start.number, scheduler.free_blocks)


def recorded_with_steps(plan: Plan, server: ServerSpec, sessions: Path, steps: Path) -> list[StepEnd]:
    """Play a plan, and write the files that the observer in an engine core writes: of its sessions and of its steps."""
    config = EngineConfig.from_server(server)
    scheduler = scheduler_of(config, load_cost_model(server.cost_model))
    driver = _Decisions(plan, EngineCore(scheduler), config)
    driver.keep()
    driver.play()
    record = SessionRecorder(config, sessions)
    lines: list[Any] = [core_header(config)]
    requests: dict[int, EngineRequest] = {}
    for end in driver.steps:
        record.started(end.start)
        record.ended(end)
        requests |= {request.handle: request for request in end.start.arrivals}
        number = end.start.number
        lines.append(core_row(config, end, requests, *driver.decided[number], driver.free.get(number)))
    steps.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return driver.steps


class Files(NamedTuple):
    """What a server wrote."""

    sessions: Path
    steps: Path


def record(seed: int, folder: Path) -> Files:
    """The files of the plan of a seed, which is played once."""
    folder.mkdir(exist_ok=True)
    files = Files(folder / "sessions.jsonl", folder / "core.jsonl")
    for path, content in zip(files, _recorded_bytes(seed), strict=True):
        path.write_bytes(content)
    return files


@cache
def _recorded_bytes(seed: int) -> tuple[bytes, bytes]:
    chosen = random.Random(f"recorded sessions {seed}")
    server = drawn_server(chosen)
    plan = drawn_plan(chosen, EngineConfig.from_server(server).block_tokens)
    with tempfile.TemporaryDirectory() as folder:
        sessions, steps = Path(folder) / "sessions.jsonl", Path(folder) / "core.jsonl"
        recorded_with_steps(plan, server, sessions, steps)
        return sessions.read_bytes(), steps.read_bytes()


def replayed(files: Files, costs: str = "emulated-gpu") -> Replay:
    """What the scheduler's rules make of the files."""
    log = read_step_log(files.steps.read_bytes())
    requests, chains, _size = read_engine([files.sessions], 0)
    config = rules_of(log.settings, log.vllm)
    return replay(config, load_cost_model(costs), requests, chains, log.cores[0].steps, has_costs=True)


def core_header(config: EngineConfig) -> dict[str, Any]:
    """The first line of a file of an engine core's steps."""
    shown = step_log_header(config, 0)
    settings = {name: shown[name] for name in ("vllm", "engine", "started_ns", "effective", "absent")}
    return {"vllm_core_steps": 1, "columns": list(COLUMNS), **settings}


def core_row(
    config: EngineConfig,
    end: StepEnd,
    requests: dict[int, EngineRequest],
    decided_ns: int,
    step: Step,
    free_blocks: int | None = None,
) -> list[Any]:
    """A step as the observer writes it. step: as it was decided. free_blocks: then, where known."""
    admitted: list[Any] = []
    for each in step.admissions:
        request = requests[each.request]
        tokens = each.cached_tokens + each.computed_tokens
        name = f"r{each.request}"
        admitted.append([each.request, name, request.queued_ns, tokens, each.cached_tokens, len(request.prompt)])
    values = dict.fromkeys(COLUMNS) | {
        "step": end.start.number,
        "schedule_ns": decided_ns,
        "scheduled_ns": decided_ns,
        "update_ns": end.ends_ns[-1],
        "end_ns": end.ends_ns[-1],
        "requests": list(step.requests),
        "tokens": list(step.tokens),
        "admitted": admitted,
        "preempted": list(step.preempted),
        "finished": [],
        "free_blocks": free_blocks,
        "generated_tokens": len(end.requests),
        "padded_tokens": config.graph_of(step.tokens)[1],
        "observer_ns": 0,
    }
    return [values[name] for name in COLUMNS]


def imported(*files: Path) -> TraceFile:
    """The trace of files of sessions."""
    import_trace(files, files[0].parent / "out" / "trace.jsonl", name="t")
    return read_trace(files[0].parent / "out" / "trace.jsonl")


def planned_sessions(plan: Plan, steps: Sequence[StepEnd]) -> Sessions:
    """What was played, from the plan and the order in which its requests were queued."""
    order = [request for end in steps for request in end.start.arrivals]
    by_key = {_key(request): request for request in order}
    trees: dict[tuple[int, int], list[tuple[int, int]]] = {}
    roots: dict[tuple[int, int], tuple[int, int]] = {}
    for session, index in sorted(by_key, key=lambda key: (by_key[key].arrival_ns, order.index(by_key[key]))):
        parent = _parent(plan, session, index)
        root = roots[session, index] = (session, index) if parent is None else roots[parent]
        trees.setdefault(root, []).append((session, index))
    first_ns = min(by_key[root].arrival_ns for root in trees)
    return sorted(
        (by_key[root].arrival_ns - first_ns, tuple(_turn(plan, by_key, tree, key) for key in tree))
        for root, tree in trees.items()
    )


def _key(request: EngineRequest) -> tuple[int, int]:
    session, index = request.external_id.split("-")
    return int(session), int(index)


def _parent(plan: Plan, session: int, index: int) -> tuple[int, int] | None:
    if not plan.request(session, index).keep_tokens:
        return None
    if index:
        return session, index - 1
    before = plan.sessions[session].continues
    return None if before is None else (before, len(plan.sessions[before].requests) - 1)


def _turn(
    plan: Plan, played: dict[tuple[int, int], EngineRequest], tree: list[tuple[int, int]], key: tuple[int, int]
) -> Turn:
    session, index = key
    planned, request, parent = plan.request(*key), played[key], _parent(plan, *key)
    wait_ns = 0
    if parent is not None:
        wait_ns = plan.request(session, index - 1).wait_after_ns if index else plan.sessions[session].start_offset_ns
    left = request.finish_reason == "abort"
    # Of an answer that was left after a time, as much as was made.
    left_tokens = (planned.abort_after_tokens or request.num_generated) if left else 0
    return Turn(
        base=-1 if parent is None else tree.index(parent),
        wait_ns=wait_ns,
        prompt=planned.prompt_tokens,
        keep=planned.keep_tokens,
        generate=planned.generate_tokens,
        left_tokens=left_tokens,
        left=left,
    )


def imported_sessions(trace: TraceFile) -> Sessions:
    """What the import says."""
    return sorted(
        (
            recording.start_ns,
            tuple(
                Turn(
                    -1 if request.base is None else request.base,
                    request.wait_ns,
                    request.prompt_tokens,
                    request.keep_tokens,
                    request.generate_tokens,
                    request.abort_after_tokens,
                    bool(request.abort_after_tokens or request.abort_after_ns),
                )
                for request in recording.requests
            ),
        )
        for recording in trace.recordings
    )


def check_plan(seed: int, folder: Path) -> Counter[str]:
    """Play, record and import the plan of a seed; AssertionError where the import says anything else."""
    chosen = random.Random(f"recorded sessions {seed}")
    server = drawn_server(chosen)
    block = EngineConfig.from_server(server).block_tokens
    plan = drawn_plan(chosen, block)
    folder.mkdir()
    steps = recorded(plan, server, folder / "sessions.jsonl")
    trace = imported(folder / "sessions.jsonl")
    expected = planned_sessions(plan, steps)
    assert imported_sessions(trace) == expected, f"seed {seed}"
    assert not trace.head.dropped
    assert not trace.head.broken
    check_shared_blocks(trace, plan.shared_prefix_tokens // block)
    found = Counter({"plans": 1, "requests": trace.num_requests, "sessions": len(expected)})
    turns = [turn for _start, turns in expected for turn in turns]
    found["aborted"] = sum(turn.left for turn in turns)
    found["forks"] = sum(session.continues is not None for session in plan.sessions)
    found["links"] = sum(turn.base >= 0 for turn in turns)
    found["evicted"] = _num_evicted(plan, steps, block)
    by_rules = replayed(record(seed, folder / "replay"))
    assert by_rules.num_differ == by_rules.num_cached_differ == 0, f"seed {seed}: {by_rules.first}"
    assert not by_rules.num_free_differ, f"seed {seed}: {by_rules.first_free}"
    waits = by_rules.waits
    assert not waits.elsewhere, f"seed {seed}: {waits.elsewhere[0]}"
    assert {each.error_ns for each in waits.tokens} <= {0}, f"seed {seed}"
    found["waits compared"], found["TTFT compared"] = len(waits.queued), len(waits.tokens)
    found["steps replayed"], found["preempted"] = by_rules.num_steps, by_rules.num_preempted
    return found


def check_shared_blocks(trace: TraceFile, num_shared: int) -> None:
    """Fresh prompts share the blocks of the system prompt, and no other."""
    heads = [recording.requests[0].blocks for recording in trace.recordings]
    for place, mine in enumerate(heads):
        for theirs in heads[:place]:
            common = [a == b for a, b in zip(mine, theirs, strict=False)]
            assert common.count(True) == min(num_shared, len(mine), len(theirs))


def _num_evicted(plan: Plan, steps: Sequence[StepEnd], block: int) -> int:
    """Requests that found less in the cache than they keep."""
    admitted = [each for end in steps for each in end.start.arrivals if each.scheduled_ns >= 0]
    return sum(each.cached_tokens < plan.request(*_key(each)).keep_tokens - 2 * block for each in admitted)


def main(num_plans: int, first: int = 0) -> int:
    """Compare so many plans."""
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + num_plans):
            total += check_plan(seed, Path(folder) / str(seed))
    print(", ".join(f"{count} {what}" for what, count in total.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
