"""What one engine step shows to the outside: everything that two schedulers must agree on.

Plain values only, so that a difference can be printed as it is.
"""

from __future__ import annotations

from typing import NamedTuple


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


def difference(vendor: Seen, engine: Seen) -> list[str]:
    """One line per field that differs, the vendor's value first."""
    return [
        f"{name}: vendor {theirs!r}, engine {ours!r}"
        for name, theirs, ours in zip(Seen._fields, vendor, engine, strict=True)
        if theirs != ours
    ]
