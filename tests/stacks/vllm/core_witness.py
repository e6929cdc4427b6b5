"""Drives vLLM's own schedulers with the observer in place, and writes down each step beside it from their own output.

Runs in an environment of vLLM, without a model:
``python -m tests.stacks.vllm.core_witness MODEL FOLDER FIRST_SEED HISTORIES STEPS [cost|cost-sessions]``. With these it
prints what observing steps, or sessions alone, takes: CPU time of the same histories with the observer and without,
alternately.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_step_log import core, sessions

from tests.differential.histories import Abort, RunStep, Submit
from tests.differential.paged_side import draw_paged_history
from tests.differential.paged_vendor import Decided, PagedVendor

COSTS = {"cost": core.FILE_VARIABLE, "cost-sessions": sessions.FILE_VARIABLE}


class Driven(PagedVendor):
    """A scheduler whose steps run without what ``step`` reads of the release that the rules follow."""

    def run(self, aborts_inside: tuple[int, ...]) -> None:
        """One step of the engine core."""
        decided, _preempted = self._next()
        self.abort(aborts_inside)
        self._update(decided)


class Witness(Driven):
    """A scheduler whose steps are written down by the one that calls it, in the order in which they end."""

    def __init__(self, geometry: Any, model: Path) -> None:
        super().__init__(geometry, model)
        self.steps: list[dict[str, Any]] = []

    def _decide(self) -> Decided:
        before_ns = core.now_ns()
        decided = super()._decide()
        output, scheduler = decided.output, self.scheduler
        step = {
            "around_schedule": [before_ns, core.now_ns()],
            "requests": list(decided.names),
            "tokens": list(decided.tokens),
            "cached": decided.cached,
            "preempted": sorted(output.preempted_req_ids or ()),
            "finished": sorted(output.finished_req_ids),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "skipped_waiting": len(scheduler.skipped_waiting) if hasattr(scheduler, "skipped_waiting") else None,
            "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }
        decided.output._witness = step
        return decided

    def _update(self, decided: Decided) -> list[Any]:
        before_ns = core.now_ns()
        ended = super()._update(decided)
        step = decided.output._witness
        step["around_update"] = [before_ns, core.now_ns()]
        step["generated_tokens"] = sum(len(output.new_token_ids) for output in ended)
        self.steps.append(step)
        return ended


def play(model: Path, folder: Path, seed: int, num_steps: int) -> tuple[int, str]:
    """Play the history of a seed; steps that ended, and the error of vLLM that ended the history, if any."""
    history: Any = draw_paged_history(seed, num_steps)
    os.environ[core.FILE_VARIABLE] = str(folder / f"core-{seed}.jsonl")
    server = Witness(history.geometry, model)
    problem = ""
    for operation in history.operations:
        try:
            if isinstance(operation, Submit):
                server.submit(operation)
            elif isinstance(operation, Abort):
                server.abort((operation.handle,))
            elif isinstance(operation, RunStep):
                server.run(operation.aborts_inside)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            break
    with open(folder / f"witness-{seed}.jsonl", "w", encoding="utf-8") as file:
        for step in server.steps:
            file.write(json.dumps(step) + "\n")
    return len(server.steps), problem


def cpu_ns_per_step(model: Path, seed: int, num_steps: int) -> float:
    """CPU time of this thread in a history, by step."""
    history: Any = draw_paged_history(seed, num_steps)
    server = Driven(history.geometry, model)
    steps, began_ns = 0, time.thread_time_ns()
    for operation in history.operations:
        if isinstance(operation, Submit):
            server.submit(operation)
        elif isinstance(operation, Abort):
            server.abort((operation.handle,))
        elif isinstance(operation, RunStep):
            server.run(operation.aborts_inside)
            steps += 1
    return (time.thread_time_ns() - began_ns) / steps


def print_cost(model: Path, seeds: range, num_steps: int) -> None:
    """Print the mean over histories of the difference, us a step, with a 95 % bootstrap interval."""
    names = ("__init__", "add_request", "schedule", "update_from_output", "finish_requests")
    plain = {owner: {name: getattr(owner, name) for name in names} for owner in (Scheduler, AsyncScheduler)}
    for seed in seeds:  # what is computed once in a process
        cpu_ns_per_step(model, seed, 20)
    differences, without = [], []
    for seed in seeds:
        before_ns = cpu_ns_per_step(model, seed, num_steps)
        for owner in plain:
            core.observe(owner)
        observed_ns = cpu_ns_per_step(model, seed, num_steps)
        for owner, functions in plain.items():
            for name, function in functions.items():
                setattr(owner, name, function)
        without.append((before_ns + cpu_ns_per_step(model, seed, num_steps)) / 2)
        differences.append(observed_ns - without[-1])
    random = np.random.default_rng(20261125)
    means = random.choice(np.array(differences), (10_000, len(differences))).mean(axis=1) / 1000
    low, high = np.percentile(means, [2.5, 97.5])
    num_requests = sum(
        isinstance(operation, Submit) for seed in seeds for operation in draw_paged_history(seed, num_steps).operations
    )
    per_request = len(seeds) * num_steps / num_requests
    print(
        f"{num_requests} requests; {per_request:.2f} steps each: [{low * per_request:.1f}, {high * per_request:.1f}] us"
    )
    print(
        f"observing: {np.mean(differences) / 1000:.1f} [{low:.1f}, {high:.1f}] us of CPU a step, beside "
        f"{np.mean(without) / 1000:.1f} us without; {len(seeds)} histories of {num_steps} steps"
    )


def main(model: str, folder: str, first: str, num_histories: str, num_steps: str, what: str = "") -> None:
    """Play the histories of the seeds."""
    if what in COSTS:
        os.environ[COSTS[what]] = str(Path(folder) / "cost.jsonl")
        print_cost(Path(model), range(int(first), int(first) + int(num_histories)), int(num_steps))
        return
    for scheduler_class in (Scheduler, AsyncScheduler):
        core.observe(scheduler_class)
    total = 0
    for seed in range(int(first), int(first) + int(num_histories)):
        steps, problem = play(Path(model), Path(folder), seed, int(num_steps))
        total += steps
        if problem:
            print(f"seed {seed}: {problem}")
    print(f"{total} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
