# pyright: basic, reportMissingImports=false
"""Drives vLLM's own schedulers with drafts and the observer in place, and writes down what their statistics say.

Runs in an environment of vLLM, without a model: ``python -m tests.stacks.vllm.draft_witness MODEL FOLDER SEEDS``. What
the model accepts is drawn. A line for each seed: the sums of the scheduler's own ``spec_decoding_stats``.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import deque
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm_step_log import core

from tests.differential.paged_side import PagedGeometry
from tests.differential.paged_vendor import config_of, scheduler_of
from tests.differential.vllm_requests import chain_hasher, parameters_of

BLOCK_TOKENS, MAX_TOKENS = 4, 12


def drafting_scheduler(model: Path, drafts: int, *, is_async: bool) -> Any:
    """A scheduler with little memory and n-grams as drafts."""
    geometry = PagedGeometry(
        max_num_seqs=4,
        kv_slots=4,
        slot_tokens=256,
        block_tokens=BLOCK_TOKENS,
        prefix_caching=True,
        num_gpu_blocks=66,
        max_num_batched_tokens=48,
        capture_sizes=(4, 8, 16),
        async_scheduling=is_async,
        num_drafts=drafts,
        draft_method="ngram",
    )
    return scheduler_of(config_of(geometry, model), geometry)


class Driven:
    """An engine core without a model: prompts that come again, and acceptance by a seed."""

    def __init__(self, model: Path, seed: int) -> None:
        self._draw = random.Random(seed)
        self._drafts, self._is_async = 1 + seed // 2 % 4, bool(seed % 2)
        self.scheduler = drafting_scheduler(model, self._drafts, is_async=self._is_async)
        self._hasher = chain_hasher(BLOCK_TOKENS)
        self._batches: deque[Any] = deque()
        self._num_requests = 0
        self.sums = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
        self.accepted_at = [0] * self._drafts

    def submit(self) -> None:
        """A request whose prompt is one of three, cut at a drawn length."""
        prompt = [self._draw.choice((1, 2, 3))] * 120
        self.scheduler.add_request(
            Request(
                request_id=f"r{self._num_requests}",
                prompt_token_ids=prompt[: self._draw.randint(1, 110)],
                sampling_params=parameters_of(self._draw.randint(1, MAX_TOKENS)),
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )
        self._num_requests += 1

    def step(self) -> None:
        """A step is decided, and the one before it ends; without asynchronous scheduling the same."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            sampled = [not self.scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens]
            self._batches.append((output, sampled))
        if len(self._batches) > self._is_async:
            self._end(*self._batches.popleft())

    def _end(self, output: Any, is_sampled: list[bool]) -> None:
        names, tokens = list(output.num_scheduled_tokens), []
        known = output.scheduled_cached_reqs
        admitted = {new.req_id for new in output.scheduled_new_reqs} | set(known.resumed_req_ids)
        for name, samples in zip(names, is_sampled, strict=True):
            drafts = output.scheduled_spec_decode_tokens.get(name, ())
            # What pads a request at its admission is never accepted.
            most = 0 if name in admitted else len(drafts)
            tokens.append([7] * (1 + self._draw.randint(0, most)) if samples else [])
        places = {name: place for place, name in enumerate(names)}
        result = ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=tokens)
        for outputs in self.scheduler.update_from_output(output, result).values():
            stats = outputs.scheduler_stats and outputs.scheduler_stats.spec_decoding_stats
            if stats:
                for name in self.sums:
                    self.sums[name] += getattr(stats, name)
                for place, number in enumerate(stats.num_accepted_tokens_per_pos):
                    self.accepted_at[place] += number
        if not self._is_async:
            guesses = [[5] * self._draw.randint(0, self._drafts) for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, guesses))


def main(model: str, folder: str, seeds: str) -> None:
    """Play a history for each seed, and print its sums."""
    core.observe(Scheduler)
    core.observe(AsyncScheduler)
    for seed in range(int(seeds)):
        os.environ[core.FILE_VARIABLE] = str(Path(folder) / f"core-{seed}.jsonl")
        os.environ["VLLM_SESSIONS_FILE"] = str(Path(folder) / f"sessions-{seed}.jsonl")
        driven, draw = Driven(Path(model), seed), random.Random(seed)
        for _ in range(200):
            if draw.random() < 0.3:
                driven.submit()
            driven.step()
        print(json.dumps({**driven.sums, "accepted_at": driven.accepted_at}))


if __name__ == "__main__":
    main(*sys.argv[1:])
