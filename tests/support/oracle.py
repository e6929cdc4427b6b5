"""A slow, plain engine to hold the compiled one against: lists and dicts, one step at a time, the vendor's rules.

Written from the rules as they are stated (allocate, evict, look up; first-in first-out slots; second most recent
holder; pre-paid dummy eviction), not from the compiled code, and sharing nothing with it but the table of rule sets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from harness.stacks.rbln.rules.kv_rules import RULE_SETS, RuleSet


@dataclass
class OracleRequest:
    prompt_tokens: int
    max_tokens: int
    stop_tokens: int
    keys: list[int]
    session: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass
class OracleMapping:
    blocks: list[int]
    is_active: bool = True


@dataclass
class OracleStep:
    kind: str
    requests: tuple[int, ...] = ()
    cached_slots: tuple[int, ...] = ()
    cached_lengths: tuple[int, ...] = ()
    hash_hit_tokens: int = 0
    computed_tokens: int = 0
    context_tokens: int = 0
    preempted: tuple[int, ...] = ()
    dummy_slot: int = -1
    evicted: tuple[tuple[int, str], ...] = ()


class Oracle:
    """One server from its start on."""

    def __init__(
        self,
        limit: int,
        physical_slots: int,
        max_model_len: int,
        block_tokens: int = 128,
        slot_tokens: int | None = None,
        prefix_caching: bool = True,
        active_limit: int | None = None,
        rules: RuleSet = RULE_SETS["vendor-0.11.1"],
    ) -> None:
        self.limit, self.max_model_len, self.prefix_caching = limit, max_model_len, prefix_caching
        self.rules = rules
        self.active_limit = limit if active_limit is None else active_limit
        self.slot_tokens = slot_tokens or max_model_len
        self.block_tokens = block_tokens if prefix_caching else self.slot_tokens
        self.ratio = self.slot_tokens // self.block_tokens
        self.is_full = physical_slots >= limit * math.ceil(max_model_len / self.slot_tokens)
        self.num_slots = physical_slots if self.is_full else physical_slots - 1
        self.requests: dict[int, OracleRequest] = {}
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.batch: list[int] = []
        self.free_blocks = list(range(1, self.num_slots * self.ratio + 1))
        self.hash_of: dict[int, int] = {}
        self.holders: dict[int, list[int]] = {}
        self.free_slots = list(range(self.num_slots))
        self.mappings: dict[int, OracleMapping] = {}  # in order of eviction: of allocation, or of last use
        self.slot_of_block: dict[int, int] = {}
        self.evicted: list[tuple[int, str]] = []

    # --- what the outside does

    def submit(
        self, request: int, prompt: int, max_tokens: int, keys: list[int], stop: int | None = None, session: int = 0
    ) -> None:
        """session: whose request it is, which only the paper's rules ask."""
        stop_tokens = max_tokens if stop is None else stop
        self.requests[request] = OracleRequest(prompt, max_tokens, stop_tokens, list(keys), session)
        self.waiting.append(request)

    def abort(self, request: int) -> None:
        if request not in self.requests:
            return
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
        self.free(request)
        del self.requests[request]

    def schedule(self) -> OracleStep:
        self.evicted, self.batch = [], []
        if self.waiting and len(self.running) < self.active_limit:
            request = self.waiting[0]
            state = self.requests[request]
            state.computed_tokens = 0
            if self.allocate(request, is_prefill=True):
                hits = self.look_up_blocks(state)
                slots, lengths = self.look_up_slots(hits)
                self.waiting.pop(0)
                self.running.append(request)
                state.computed_tokens = state.tokens
                self.batch = [request]
                return OracleStep(
                    "PREFILL",
                    (request,),
                    tuple(slots),
                    tuple(lengths),
                    len(hits) * self.block_tokens,
                    state.tokens - sum(lengths),
                    state.tokens,
                    evicted=tuple(self.evicted),
                )
        preempted = self.decode()
        context = sum(self.requests[request].tokens for request in self.batch)
        for request in self.batch:
            self.requests[request].computed_tokens += 1
        dummy = self.dummy_slot() if self.prefix_caching and 0 < len(self.batch) < self.limit else -1
        return OracleStep(
            "DECODE" if self.batch else "IDLE",
            tuple(self.batch),
            preempted=tuple(preempted),
            dummy_slot=dummy,
            context_tokens=context,
            evicted=tuple(self.evicted),
        )

    def finish_step(self) -> tuple[int, ...]:
        finished: list[int] = []
        for request in self.batch:
            state = self.requests.get(request)
            if state is None:
                continue
            state.output_tokens += 1
            if state.tokens >= self.max_model_len or state.output_tokens >= min(state.max_tokens, state.stop_tokens):
                self.free(request)
                self.running.remove(request)
                del self.requests[request]
                finished.append(request)
        self.batch = []
        return tuple(finished)

    # --- decisions

    def decode(self) -> list[int]:
        preempted: list[int] = []
        place = 0
        while place < len(self.running):
            request = self.running[place]
            while not self.allocate(request, is_prefill=False):
                victim = self.running.pop()
                self.free(victim, is_preemption=True)
                self.requests[victim].computed_tokens = 0
                self.waiting.insert(0, victim)
                preempted.append(victim)
                if victim == request:
                    return preempted
            self.batch.append(request)
            place += 1
        return preempted

    def dummy_slot(self) -> int:
        if not self.is_full:
            return self.num_slots
        assert self.make_room(1, "dummy")
        return self.free_slots[0]

    # --- memory

    def allocate(self, request: int, *, is_prefill: bool) -> bool:
        state = self.requests[request]
        needed = math.ceil(min(state.tokens, self.max_model_len) / self.block_tokens) - len(state.blocks)
        if needed > len(self.free_blocks):
            return False
        if needed <= 0:
            return True
        slots_needed = math.ceil(needed / self.ratio)
        if not is_prefill:
            slots_needed = 1 if (state.computed_tokens // self.block_tokens) % self.ratio == 0 else 0
        if self.prefix_caching and not self.make_room(slots_needed, "request"):
            return False
        new = [self.pop_block() for _ in range(needed)]
        state.blocks += new
        if not self.prefix_caching:
            return True
        if slots_needed == 0:
            self.put(state.slots[-1], new)
        for index in range(slots_needed):
            slot = self.free_slots.pop(0)
            self.mappings[slot] = OracleMapping([])
            state.slots.append(slot)
            self.put(slot, new[index * self.ratio : (index + 1) * self.ratio])
        if is_prefill:
            for block, key in zip(state.blocks, state.keys[: state.tokens // self.block_tokens], strict=False):
                self.hash_of[block] = key
                self.holders.setdefault(key, []).append(block)
        return True

    def put(self, slot: int, blocks: list[int]) -> None:
        self.mappings[slot].blocks += blocks
        for block in blocks:
            before = self.slot_of_block.get(block)
            if self.rules.is_index_repaired and before not in (None, slot) and block in self.mappings[before].blocks:
                self.mappings[before].blocks.remove(block)
            self.slot_of_block[block] = slot

    def pop_block(self) -> int:
        block = self.free_blocks.pop(0)
        if block in self.hash_of:
            self.holders[self.hash_of.pop(block)].remove(block)
        return block

    def make_room(self, slots: int, caller: str) -> bool:
        missing = slots - len(self.free_slots)
        if missing <= 0:
            return True
        inactive = [slot for slot, mapping in self.mappings.items() if not mapping.is_active]
        if len(inactive) < missing:
            return False
        for slot in inactive[:missing]:
            self.evict(slot, caller)
        return True

    def evict(self, slot: int, caller: str) -> None:
        for block in self.mappings.pop(slot).blocks:
            self.slot_of_block.pop(block, None)  # even where it names a younger slot by now
        self.free_slots.append(slot)
        self.evicted.append((slot, caller))

    def free(self, request: int, *, is_preemption: bool = False) -> None:
        state = self.requests[request]
        for slot in state.slots:
            if is_preemption:
                self.evict(slot, "preempt")
            else:
                self.mappings[slot].is_active = False
        if not is_preemption:
            self.use(state.slots)
        freed = list(reversed(state.blocks))
        if self.rules.is_index_repaired:
            self.free_blocks = [block for block in freed if block not in self.hash_of] + self.free_blocks
            freed = [block for block in freed if block in self.hash_of]
        self.free_blocks += freed
        state.blocks, state.slots = [], []

    # --- reuse

    def look_up_blocks(self, state: OracleRequest) -> list[int]:
        hits: list[int] = []
        if not self.prefix_caching:
            return hits
        for key in state.keys[: (state.tokens - 1) // self.block_tokens]:
            holders = self.holders[key]
            if len(holders) < 2:
                break
            hits.append(holders[-2])
        return hits

    def look_up_slots(self, hits: list[int]) -> tuple[list[int], list[int]]:
        slots: list[int] = []
        lengths: list[int] = []
        for first in range(0, len(hits), self.ratio):
            group = hits[first : first + self.ratio]
            slot = self.slot_of_block.get(group[0])
            if slot is None:
                break
            common = 0
            for mine, theirs in zip(group, self.mappings[slot].blocks, strict=False):
                if mine != theirs:
                    break
                common += 1
            if common == 0:
                break
            slots.append(slot)
            lengths.append(common * self.block_tokens)
        self.use(slots)
        if self.rules.keeps_matched_blocks:
            for place in range(len(slots) - 1, -1, -1):
                first = place * self.ratio
                for block in reversed(hits[first : first + lengths[place] // self.block_tokens]):
                    if block in self.free_blocks:
                        self.free_blocks.remove(block)
                        self.free_blocks.append(block)
        return slots, lengths

    def use(self, slots: list[int]) -> None:
        """Slots were read or given back: by last use they leave last, the first of a prefix the latest."""
        if self.rules.evicts_by_last_use:
            for slot in reversed(slots):
                self.mappings[slot] = self.mappings.pop(slot)


@dataclass
class PaperSlot:
    """Whose prompt a slot holds, and how long it is. A slot that was given back can be evicted once it is settled."""

    session: int
    prompt: int
    is_given_back: bool = False
    is_settled: bool = False


class PaperOracle(Oracle):
    """The published study's own simulator: a slot holds one prompt, of which its session reuses whole blocks.

    Written from section 4-1 of the paper. A slot that is given back can be evicted from the admission after the next
    one on, the earliest taken first.
    """

    def __init__(self, limit: int, physical_slots: int, max_model_len: int, rules: RuleSet) -> None:
        super().__init__(limit, physical_slots, max_model_len, rules=rules)
        self.free_slots = list(range(physical_slots))
        self.held: dict[int, PaperSlot] = {}  # in the order in which they were taken

    def allocate(self, request: int, *, is_prefill: bool) -> bool:
        # With nobody to decode, what was settled just now is tried at once.
        return not is_prefill or self.take(request) or (not self.running and self.take(request))

    def take(self, request: int) -> bool:
        num_aside = int(self.rules.sets_slot_aside and 0 < len(self.running) < self.limit)
        for slot in [slot for slot, each in self.held.items() if each.is_settled]:
            if len(self.free_slots) <= num_aside:
                del self.held[slot]
                self.free_slots.append(slot)
                self.evicted.append((slot, "request"))
        has_room = len(self.free_slots) > num_aside
        for each in self.held.values():
            each.is_settled = each.is_given_back
        if has_room:
            self.requests[request].slots = [self.free_slots.pop(0)]
        return has_room

    def look_up_blocks(self, state: OracleRequest) -> list[int]:
        del state
        return []

    def look_up_slots(self, hits: list[int]) -> tuple[list[int], list[int]]:
        del hits
        state = self.requests[self.waiting[0]]
        own = [each.prompt for each in self.held.values() if each.session == state.session]
        self.held[state.slots[0]] = PaperSlot(state.session, state.prompt_tokens)
        return [], [min(max(own, default=0), state.prompt_tokens - 1) // self.block_tokens * self.block_tokens]

    def dummy_slot(self) -> int:
        return -1

    def free(self, request: int, *, is_preemption: bool = False) -> None:
        del is_preemption
        for slot in self.requests[request].slots:
            self.held[slot].is_given_back = True
