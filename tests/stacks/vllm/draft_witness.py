"""Drives vLLM's own schedulers with drafts and the observer in place, and writes down what their statistics say.

Runs in an environment of vLLM, without a model: ``python -m tests.stacks.vllm.draft_witness MODEL FOLDER SEEDS``. What
the model accepts is drawn. A line for each seed: the sums of the scheduler's own ``spec_decoding_stats``.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_step_log import core

from tests.differential.histories import Submit
from tests.differential.paged_side import PagedGeometry
from tests.differential.paged_vendor import PagedVendor

SUMS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def server_of(model: Path, seed: int) -> PagedVendor:
    """A scheduler with little memory: n-grams or EAGLE, 1 to 4 drafts, asynchronous or not."""
    geometry = PagedGeometry(
        max_num_seqs=4,
        kv_slots=4,
        slot_tokens=256,
        block_tokens=4,
        prefix_caching=True,
        num_gpu_blocks=66,
        max_num_batched_tokens=48,
        capture_sizes=(60,),
        async_scheduling=bool(seed % 2),
        num_drafts=1 + seed // 2 % 4,
        draft_method="eagle" if seed // 4 % 2 else "ngram",
    )
    return PagedVendor(geometry, model)


def sums_of(server: PagedVendor) -> dict[str, Any]:
    """Sums that grow with each step of the server."""
    sums: dict[str, Any] = {**dict.fromkeys(SUMS, 0), "accepted_at": []}
    update = server.scheduler.update_from_output

    def counted(*arguments: Any) -> Any:
        outputs = update(*arguments)
        for each in outputs.values():
            if stats := each.scheduler_stats and each.scheduler_stats.spec_decoding_stats:
                sums.update({name: sums[name] + getattr(stats, name) for name in SUMS})
                at = sums["accepted_at"] or [0] * len(stats.num_accepted_tokens_per_pos)
                sums["accepted_at"] = [a + b for a, b in zip(at, stats.num_accepted_tokens_per_pos, strict=True)]
        return outputs

    server.scheduler.update_from_output = counted
    return sums


def main(model: str, folder: str, seeds: str) -> None:
    """Play a history for each seed, of prompts that come again, and print its sums."""
    core.observe(Scheduler)
    core.observe(AsyncScheduler)
    for seed in range(int(seeds)):
        os.environ[core.FILE_VARIABLE] = str(Path(folder) / f"core-{seed}.jsonl")
        os.environ["VLLM_SESSIONS_FILE"] = str(Path(folder) / f"sessions-{seed}.jsonl")
        server, chosen = server_of(Path(model), seed), random.Random(seed)
        sums = sums_of(server)
        for number in range(200):
            if chosen.random() < 0.3:
                prompt = ((chosen.choice((0, 1, 2)), 0, chosen.randint(1, 110)),)
                server.submit(Submit(number, prompt, chosen.randint(1, 12)))
            server.step(())
        print(json.dumps(sums))


if __name__ == "__main__":
    main(*sys.argv[1:])
