"""What one engine step shows to the outside: everything that two schedulers must agree on.

Plain values only, so that a difference can be printed as it is.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Seen(NamedTuple):
    """One step. lines: what schedule() logged about KV memory, in order: allocations, evictions, hits, preemptions.

    abort_lines, finish_lines: what aborts during the step and the end of it logged. block_tables: slots by request.
    copy_lines, recomputed_tokens: of a prefill whose KV copy was made to fail: what the runner logged about copies, and
    the tokens that it then had computed; empty and 0 otherwise. free_slots: -1 when prefix caching is off. running,
    waiting: after the step.
    """

    kind: str
    requests: tuple[int, ...]
    preempted: tuple[int, ...]
    cached_slots: tuple[int, ...]
    cached_lengths: tuple[int, ...]
    hash_hit_tokens: int
    block_tables: dict[int, tuple[int, ...]]
    dummy_slot: int
    lines: tuple[str, ...]
    abort_lines: tuple[str, ...]
    finish_lines: tuple[str, ...]
    copy_lines: tuple[str, ...]
    recomputed_tokens: int
    finished: tuple[int, ...]
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    free_slots: int
    free_blocks: int

    @property
    def is_idle(self) -> bool:
        return self.kind == "IDLE"

    def counts(self) -> dict[str, int]:
        """What happened in it."""
        return {
            self.kind: 1,
            "aborts inside a step": bool(self.abort_lines),
            "preempting steps": bool(self.preempted),
            "preempted": len(self.preempted),
            "evictions": sum("[EVICTION]" in line for line in self.lines),
            "prefills with reuse": bool(self.cached_slots),
            "prefills reusing several slots": len(self.cached_slots) > 1,
            "false hash hits": self.hash_hit_tokens > sum(self.cached_lengths),
            "failed copies": bool(self.recomputed_tokens),
            "dummy requests": self.dummy_slot >= 0,
            "finished": len(self.finished),
        }


class PagedSeen(NamedTuple):
    """One step. cached: tokens reused, by admitted request. blocks: by scheduled request. free_order: free blocks.

    lookups: tokens looked up and found, and the same after preemptions. padding: the graph's mode, and padded tokens.
    running, waiting: after the step.
    """

    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    cached: dict[int, int]
    preempted: tuple[int, ...]
    blocks: dict[int, tuple[int, ...]]
    lookups: tuple[int, int, int, int]
    padding: tuple[str, int]
    finished: tuple[int, ...]
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    free_order: tuple[int, ...]

    @property
    def is_idle(self) -> bool:
        return not self.requests

    def counts(self) -> dict[str, int]:
        """What happened in it."""
        return {
            "decode and idle steps": max(self.tokens, default=1) == 1,
            "steps with parts of prompts": max(self.tokens, default=1) > 1,
            "preempting steps": bool(self.preempted),
            "preempted": len(self.preempted),
            "admissions with reuse": sum(tokens > 0 for tokens in self.cached.values()),
            "steps that resume": self.lookups[2] > 0,
            "steps without a graph": self.padding[0] == "NONE",
            "padded steps": self.padding[1] > sum(self.tokens),
            "finished": len(self.finished),
        }


AnySeen: TypeAlias = Seen | PagedSeen


def difference(vendor: AnySeen, engine: AnySeen) -> list[str]:
    """One line per field that differs, the vendor's value first."""
    return [
        f"{name}: vendor {theirs!r}, engine {ours!r}"
        for name, theirs, ours in zip(vendor._fields, vendor, engine, strict=True)
        if theirs != ours
    ]
