"""Random histories of one server: who is submitted, aborted and when a step runs, as plain values that can be shrunk.

A history names every prompt token by where it comes from, so that dropping any operation leaves the rest meaningful.
It is drawn from a seed alone, never from what either scheduler did.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 128
STOP_TOKEN = 1
"""Sampled where a request ends early; no stream of tokens holds it."""
GENERATED = 1 << 20
"""Streams from here on are what the request of handle (stream - GENERATED) generates."""
FRESH = 1 << 10
"""Streams from here up to GENERATED are one request's own prompt text; those below are shared by all."""
NAMED = 1 << 9
"""Streams from here up to FRESH are named blocks, as recorded traces have them."""

IntArray: TypeAlias = npt.NDArray[np.int64]
Segment: TypeAlias = tuple[int, int, int]
"""(stream, start, count)"""
MOST_SLOT_TOKENS = 8192


@dataclass(frozen=True)
class Geometry:
    """One server configuration of a history. partition_tokens: None when a slot holds a whole request.

    max_active_seqs: an admission limit below max_num_seqs, None for none.
    """

    max_num_seqs: int
    kv_slots: int
    slot_tokens: int
    partition_tokens: int | None = None
    prefix_caching: bool = True
    block_tokens: int = BLOCK_TOKENS
    max_active_seqs: int | None = None

    @property
    def slots_per_seq(self) -> int:
        return -(-self.slot_tokens // (self.partition_tokens or self.slot_tokens))

    @property
    def kind(self) -> str:
        """The dimension a count of steps is reported under."""
        if not self.prefix_caching:
            return "caching off"
        needed = self.max_num_seqs * self.slots_per_seq
        relation = "below" if self.kv_slots < needed else "equal to" if self.kv_slots == needed else "above"
        shape = "several partitions" if self.slots_per_seq > 1 else "one partition"
        lowered = self.max_active_seqs is not None and self.max_active_seqs < self.max_num_seqs
        return f"{shape}, slots {relation} the limit" + (", admission below it" if lowered else "")


class Submit(NamedTuple):
    """A request arrives; refused while another with its handle is alive.

    stop_tokens: output length at which the model stops, if before max_tokens. salt: requests of different salts share
    nothing, 0 for none.
    """

    handle: int
    prompt: tuple[Segment, ...]
    max_tokens: int
    stop_tokens: int | None = None
    salt: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(count for _, _, count in self.prompt)


class Abort(NamedTuple):
    """A client gave up between two steps."""

    handle: int


class RunStep(NamedTuple):
    """schedule(), the aborts that arrive while the device works, update_from_output().

    failed_copy: which reused slot cannot be copied, if the step is a prefill that reuses so many; -1 for none.
    """

    aborts_inside: tuple[int, ...] = ()
    failed_copy: int = -1


Operation: TypeAlias = Submit | Abort | RunStep


@dataclass(frozen=True)
class History:
    """What happens to one server, in order."""

    geometry: Geometry
    operations: tuple[Operation, ...]
    seed: int = -1


@lru_cache(maxsize=4096)
def stream_tokens(stream: int, count: int) -> IntArray:
    """The first ``count`` tokens of a stream, none of them STOP_TOKEN; shape (count,)."""
    mixed = np.arange(count, dtype=np.uint64) + np.uint64((stream + 1) << 20)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(150_000)).astype(np.int64) + 2


def materialise(segments: tuple[Segment, ...]) -> IntArray:
    """The tokens of a prompt."""
    # Whole kilotokens, so that few lengths of a stream are ever made.
    parts = [
        stream_tokens(stream, -(-(start + count) // 1024) * 1024)[start : start + count]
        for stream, start, count in segments
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def head(segments: tuple[Segment, ...], count: int) -> tuple[Segment, ...]:
    """The first ``count`` tokens of a prompt."""
    kept: list[Segment] = []
    for stream, start, length in segments:
        if count <= 0:
            break
        kept.append((stream, start, min(length, count)))
        count -= length
    return tuple(kept)


@dataclass
class Mood:
    """What a stretch of a history is like; drawn anew now and then."""

    arrival: float
    re_arrival: float
    remembered: int
    shared: float
    long_prompts: float
    generation: int
    abort: float
    reused_handles: float
    salts: int
    grows: bool


@dataclass
class _Writer:
    """Draws one history operation by operation."""

    chosen: random.Random
    geometry: Geometry
    next_handle: int = 0
    next_stream: int = FRESH
    known: list[tuple[tuple[Segment, ...], int]] = field(default_factory=list)
    recent: list[int] = field(default_factory=list)

    def mood(self) -> Mood:
        chosen = self.chosen
        grows = self.geometry.slots_per_seq > 1 and chosen.random() < 0.5
        # Across partitions, answers that outgrow their prompts: what preemption is about.
        generation = chosen.choice([40, 300, self.geometry.slot_tokens] if grows else [1, 2, 8, 40, 40, 300])
        # Steps that one request adds, when a full batch shares them: from a lightly loaded server to a growing queue.
        steps_each = 1 + generation / (4 if grows else 2) / self.geometry.max_num_seqs
        return Mood(
            # Several may arrive in one step; at more than two a step, most of them would never leave the queue.
            arrival=min(0.7, chosen.choice([0.2, 0.4, 0.6, 0.8, 1.1, 2.0]) / steps_each),
            re_arrival=chosen.choice([0.0, 0.5, 0.8, 0.95]),
            remembered=chosen.choice([2, 12, 12, 60]),
            shared=chosen.choice([0.0, 0.0, 0.3, 0.9]),
            long_prompts=chosen.choice([0.1, 0.5, 0.9]),
            grows=grows,
            generation=generation,
            abort=chosen.choice([0.0, 0.0, 0.01, 0.01, 0.1, 0.5]),
            reused_handles=chosen.choice([0.0, 0.0, 0.0, 0.1]),
            salts=chosen.choice([0, 0, 0, 0, 0, 2]),
        )

    def length(self, mood: Mood, most: int) -> int:
        """1..most tokens: tiny, around a multiple of a block, anything, or as long as possible."""
        chosen, block = self.chosen, self.geometry.block_tokens
        draw = chosen.random()
        if mood.grows and draw < 0.7:
            return chosen.randint(1, min(most, 2 * block))
        if chosen.random() < mood.long_prompts:
            if draw < 0.1:
                return most - chosen.randint(0, min(3, most - 1))
            return chosen.randint(max(1, most // 2), most)
        if draw < 0.3:
            return min(most, chosen.randint(1, 5))
        if draw < 0.6:
            return min(most, max(1, block * chosen.randint(1, max(1, most // block)) + chosen.randint(-1, 1)))
        return chosen.randint(1, min(most, 600))

    def prompt(self, mood: Mood) -> tuple[Segment, ...]:
        chosen, most = self.chosen, self.geometry.slot_tokens - 1
        fresh, self.next_stream = self.next_stream, self.next_stream + 1
        if self.known and chosen.random() < mood.re_arrival:
            segments, generated = chosen.choice(self.known[-mood.remembered :])
            whole = sum(count for _, _, count in segments)
            draw = chosen.random()
            if draw < 0.2:
                kept = whole - generated
            elif draw < 0.6:
                kept = whole
            else:
                kept = chosen.randint(1, whole)
            extra = 0 if draw < 0.2 else chosen.choice([0, 1, 8, 8, 100, self.geometry.block_tokens, 700])
            kept = min(kept, most)
            extra = max(0, min(extra, most - kept))
            tail = ((fresh, 0, extra),) if extra else ()
            return head(segments, kept) + tail
        if chosen.random() < mood.shared:
            system = chosen.randint(0, 2)
            shared_tokens = min(most - 1, chosen.choice([100, 128, 300, 512, 1000]))
            if shared_tokens >= 1:
                own = self.length(mood, most - shared_tokens)
                return ((system, 0, shared_tokens), (fresh, 0, own))
        return ((fresh, 0, self.length(mood, most)),)

    def submit(self, mood: Mood) -> Submit:
        chosen = self.chosen
        prompt = self.prompt(mood)
        max_tokens = chosen.randint(mood.generation // 2 if mood.grows else 1, mood.generation)
        stop = chosen.randint(1, max_tokens) if chosen.random() < 0.15 else None
        handle = self.handle(mood)
        generated = max_tokens if stop is None else stop
        self.known.append(((*prompt, (GENERATED + handle, 0, generated)), generated))
        self.recent.append(handle)
        return Submit(handle, prompt, max_tokens, stop, chosen.randint(0, mood.salts))

    def handle(self, mood: Mood) -> int:
        """A new handle, or one of before, whose request may still be alive."""
        if self.recent and self.chosen.random() < mood.reused_handles:
            return self.chosen.choice(self.recent[-40:])
        self.next_handle += 1
        return self.next_handle - 1

    def victims(self, mood: Mood) -> tuple[int, ...]:
        chosen = self.chosen
        if not self.recent or chosen.random() >= mood.abort:
            return ()
        most = chosen.choice([1, 1, 1, 1, 2, 2, 5, 16])
        return tuple(chosen.sample(self.recent[-16:], k=min(len(self.recent[-16:]), most)))

    def operations(self, num_steps: int) -> Iterator[Operation]:
        mood = self.mood()
        for index in range(num_steps):
            if index % 97 == 96:
                mood = self.mood()
            while self.chosen.random() < mood.arrival:
                yield self.submit(mood)
            for handle in self.victims(mood):
                yield Abort(handle)
            yield RunStep(self.victims(mood))


def draw_geometry(chosen: random.Random) -> Geometry:
    """Slots above, equal to and below the limit; one and several partitions; caching on and, rarely, off."""
    limit = chosen.choice([1, 2, 3, 4, 6, 8, 8, 12, 16, 32])
    # 128 is the accelerator's; the vendor's code takes any.
    block = chosen.choice([128, 128, 128, 128, 16, 64, 96, 256, 512])
    draw = chosen.random()
    if draw < 0.14:
        # A long answer needs a slot every block, and there are few: the youngest is preempted again and again.
        few = chosen.choice([16, 32, 64, 128])
        return Geometry(max(4, limit), chosen.randint(5, 10), 4 * few, few, block_tokens=few)
    if draw < 0.42:
        return _partitioned(chosen, limit, block)
    slot_tokens = block * chosen.choice([1, 2, 3, 4, 8, 16, 16, 64])
    if slot_tokens > MOST_SLOT_TOKENS:
        slot_tokens = block * 4
    below = (max(2, limit - 1), max(2, limit // 2), 2)
    slots = chosen.choice([limit, limit, limit, limit + 1, limit + limit, 3 * limit, *below])
    if chosen.random() < 0.08:
        return Geometry(limit, slots, slot_tokens, None, prefix_caching=False, block_tokens=block)
    return Geometry(limit, slots, slot_tokens, None, block_tokens=block)


def _partitioned(chosen: random.Random, limit: int, block: int) -> Geometry:
    """A sequence takes a slot per partition."""
    partition = block * chosen.choice([1, 1, 2, 3, 4, 8])
    per_seq = chosen.choice([2, 2, 3, 4, 7, 16])
    while partition * per_seq > MOST_SLOT_TOKENS:
        partition, per_seq = max(block, partition // block // 2 * block), max(2, per_seq // 2)
    full = limit * per_seq
    least = per_seq + 1
    # Few slots for many requests is where growth fails and the youngest is preempted.
    slots = chosen.choice([full, full + 1, full + limit, full - 1, full // 2, full // 2, least, least + 1])
    return Geometry(limit, max(least, slots), partition * per_seq, partition, block_tokens=block)


def draw_history(
    seed: int, num_steps: int, *, with_active_limit: bool = False, with_failed_copies: bool = False
) -> History:
    """The history of a seed.

    with_active_limit: half of the servers admit fewer than they could. with_failed_copies: on most servers KV copies
    fail now and then, the first of a prefill or a later one.
    """
    chosen = random.Random(seed)
    geometry = draw_geometry(chosen)
    if with_active_limit and chosen.random() < 0.5:
        geometry = replace(geometry, max_active_seqs=chosen.randint(1, geometry.max_num_seqs))
    operations = draw_operations(geometry, num_steps, chosen, seed)
    if with_failed_copies:
        # Numbers of its own: what else happens is the same for every set of rules.
        operations = tuple(_failing(operations, random.Random(f"copies of {seed}")))
    return History(geometry, operations, seed)


def draw_operations(geometry: Geometry, num_steps: int, chosen: random.Random, seed: int) -> tuple[Operation, ...]:
    """What happens to a server of this geometry."""
    operations = tuple(_Writer(chosen, geometry).operations(num_steps))
    naming = random.Random(f"names of {seed}")
    return tuple(_named(operations, naming)) if naming.random() < NAMED_SHARE else operations


NAMED_SHARE = 0.3
"""Of the histories: in so many, prompts share blocks by name."""


def _named(operations: tuple[Operation, ...], chosen: random.Random) -> Iterator[Operation]:
    """The same lengths, but prompts begin with named blocks: a tree, in which sessions part at the end of any block."""
    named_tokens, branches = chosen.choice([16, 64, 128, 512]), chosen.choice([1, 2, 3])
    chains: dict[int, tuple[Segment, ...]] = {}

    def chain(stream: int) -> tuple[Segment, ...]:
        if stream not in chains:
            path, names = 0, list[int]()
            for _ in range(chosen.choice([0, 1, 2, 5, 12])):
                path = path * branches + chosen.randint(1, branches)
                names.append(NAMED + path % (FRESH - NAMED))
            chains[stream] = tuple((name, 0, named_tokens) for name in names)
        return chains[stream]

    def renamed(segment: Segment) -> tuple[Segment, ...]:
        stream, start, count = segment
        if not FRESH <= stream < GENERATED or start:
            return (segment,)
        names = head(chain(stream), count)
        left = count - sum(tokens for _, _, tokens in names)
        return (*names, (stream, count - left, left)) if left else names

    for operation in operations:
        if isinstance(operation, Submit):
            prompt = tuple(part for segment in operation.prompt for part in renamed(segment))
            operation = operation._replace(prompt=prompt)
        yield operation


def _failing(operations: tuple[Operation, ...], chosen: random.Random) -> Iterator[Operation]:
    """The same, with a KV copy that fails in some of the steps."""
    chance = chosen.choice([0.0, 0.02, 0.3])
    for operation in operations:
        fails = isinstance(operation, RunStep) and chosen.random() < chance
        yield operation._replace(failed_copy=chosen.choice([0, 0, 1, 2])) if fails else operation


def simpler(operation: Operation) -> Iterator[Operation]:
    """Versions of one operation that do less."""
    if isinstance(operation, RunStep):
        yield from _simpler_step(operation)
    elif isinstance(operation, Submit):
        yield from _simpler_submit(operation)


def _simpler_step(operation: RunStep) -> Iterator[Operation]:
    if operation.aborts_inside:
        yield operation._replace(aborts_inside=())
    if operation.failed_copy >= 0:
        yield operation._replace(failed_copy=-1)


def _simpler_submit(operation: Submit) -> Iterator[Operation]:
    if operation.salt:
        yield operation._replace(salt=0)
    if operation.stop_tokens is not None:
        yield operation._replace(stop_tokens=None)
    for smaller in (1, 2, operation.max_tokens // 2, operation.max_tokens - 1):
        if 1 <= smaller < operation.max_tokens:
            yield operation._replace(max_tokens=smaller, stop_tokens=None)
    whole = operation.prompt_tokens
    for smaller in (1, BLOCK_TOKENS, BLOCK_TOKENS + 1, whole // 2, whole - BLOCK_TOKENS, whole - 1):
        if 1 <= smaller < whole:
            yield operation._replace(prompt=head(operation.prompt, smaller))


def without(history: History, first: int, count: int) -> History:
    """The history less ``count`` operations from ``first`` on."""
    kept = history.operations[:first] + history.operations[first + count :]
    return replace(history, operations=kept)
