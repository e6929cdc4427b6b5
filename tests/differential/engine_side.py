"""The harness's engine, fed with the same history and described in the same values.

Its KV events become log lines by the emulator's own formatter, so that the emulator's log is held to the vendor's too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from harness.errors import PlanError
from harness.measure.emulator.logs import copy_lines, kv_event_line
from harness.model.engine import EngineConfig, KvEvent, Scheduler, load_cost_model
from harness.model.plan.blocks import token_block_keys
from tests.differential.histories import GENERATED, Geometry, Submit, materialise, stream_tokens
from tests.differential.seen import Seen

SALT_BITS = 0x1B03738712FAD5C9
"""Odd multiples of it tell salts apart, as the emulator's random number per salt does."""


def config_of(geometry: Geometry, rules: str, **others: Any) -> EngineConfig:
    """The engine's configuration of a geometry. others: keys that geometries with slots lack, or have otherwise."""
    names = (
        *("max_num_seqs", "kv_slots", "slot_tokens", "partition_tokens"),
        *("block_tokens", "prefix_caching", "max_active_seqs"),
    )
    keys = {name: getattr(geometry, name) for name in names}
    keys["decode_buckets"] = tuple(sorted({1, geometry.max_num_seqs}))
    return EngineConfig(rules=rules, **{**keys, **others})


class EngineServer:
    """One engine scheduler in the state after its start."""

    def __init__(self, geometry: Geometry, rules: str = "vendor-0.11.1") -> None:
        self._prefix_caching = geometry.prefix_caching
        self._block_tokens = geometry.block_tokens
        self.scheduler = Scheduler(config_of(geometry, rules), load_cost_model("paper"))
        self._late_keys: dict[int, tuple[int, list[int]]] = {}

    def submit(self, request: Submit) -> bool:
        """Queue a request, keys of its prompt at once, of generated blocks as they fill; False when it is refused."""
        prompt = materialise(request.prompt)
        num_generated = -(-(request.max_tokens) // 1024) * 1024
        whole = np.concatenate([prompt, stream_tokens(GENERATED + request.handle, num_generated)])
        keys = token_block_keys(whole.astype(np.int32), self._block_tokens) ^ np.int64(request.salt * SALT_BITS)
        in_prompt = len(prompt) // self._block_tokens
        try:
            self.scheduler.submit(
                request.handle, len(prompt), request.max_tokens, keys[:in_prompt], stop_tokens=request.stop_tokens
            )
        except PlanError:
            return False
        self._late_keys[request.handle] = (len(prompt), keys.tolist())
        return True

    def abort(self, handles: tuple[int, ...]) -> tuple[str, ...]:
        """Drop requests in the order given; the lines of it."""
        for handle in handles:
            self.scheduler.abort(handle)
        return self._lines(self.scheduler.take_kv_events())

    def step(self, aborts_inside: tuple[int, ...], failed_copy: int = -1) -> Seen:
        """One step."""
        scheduler = self.scheduler
        step = scheduler.schedule()
        tables = {request: scheduler.block_table(request) for request in step.requests}
        copies: list[str] = []
        if 0 <= failed_copy < len(step.cached_slots):
            step = scheduler.recomputed(step, failed_copy)
            (request,) = step.requests
            copies = [message for _, message in copy_lines(step, tables[request], str(request))]
        abort_lines = self.abort(aborts_inside)
        before = {request: self._output_tokens(request) for request in step.requests if request not in aborts_inside}
        finished = scheduler.finish_step()
        for request, output in before.items():
            if request not in finished:
                self._append_full_block(request, output + 1)
        return Seen(
            kind=step.kind,
            requests=step.requests,
            preempted=tuple(sorted(step.preempted)),
            cached_slots=step.cached_slots,
            cached_lengths=step.cached_lengths,
            hash_hit_tokens=step.hash_hit_tokens,
            block_tables=tables,
            dummy_slot=step.dummy_slot,
            lines=self._lines(step.kv_events),
            abort_lines=abort_lines,
            finish_lines=self._lines(scheduler.take_kv_events()),
            copy_lines=tuple(copies),
            recomputed_tokens=step.computed_tokens if copies else 0,
            finished=finished,
            running=scheduler.running,
            waiting=scheduler.waiting,
            free_slots=scheduler.free_slots if self._prefix_caching else -1,
            free_blocks=scheduler.free_blocks,
        )

    def _output_tokens(self, request: int) -> int:
        return self.scheduler.output_tokens(request)

    def _append_full_block(self, request: int, output_tokens: int) -> None:
        prompt_tokens, keys = self._late_keys[request]
        if (prompt_tokens + output_tokens) % self._block_tokens == 0:
            place = (prompt_tokens + output_tokens) // self._block_tokens - 1
            self.scheduler.append_block_key(request, keys[place])

    def _lines(self, events: Iterable[KvEvent]) -> tuple[str, ...]:
        return tuple(kv_event_line(event, str(event.request))[1] for event in events)
