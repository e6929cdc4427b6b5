"""The compiled engine decides exactly as the naive oracle, on random histories of every kind of configuration."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.model.engine import CostModel, EngineConfig, Scheduler, load_cost_model
from harness.stacks.rbln.rules.kv_rules import RULE_SETS
from tests.differential.engine_side import config_of
from tests.differential.histories import Geometry
from tests.support.oracle import Oracle

BLOCK = 128


@dataclass(frozen=True)
class Setting:
    """A server and the requests it gets. Lengths in tokens."""

    limit: int
    slots: int
    slot_tokens: int
    partition_tokens: int | None = None
    prefix_caching: bool = True
    shortest: int = 1
    longest: int = 1000
    longest_output: int = 300
    rules: str = "vendor-0.11.1"
    active: int | None = None

    @property
    def config(self) -> EngineConfig:
        shape = self.limit, self.slots, self.slot_tokens, self.partition_tokens, self.prefix_caching
        return config_of(Geometry(*shape, max_active_seqs=self.active), self.rules)


SETTINGS = {
    "slots equal the limit": Setting(4, 4, 2048, shortest=300, longest=1500),
    "more slots than the limit": Setting(4, 9, 2048, shortest=300, longest=1500),
    "fewer slots than the limit": Setting(6, 4, 2048, shortest=300, longest=1500),
    "two slots for eight": Setting(8, 2, 1024, longest=600),
    "limit of one": Setting(1, 1, 1024, longest=900),
    "prompts that fill slots": Setting(4, 4, 1024, shortest=500, longest=1023),
    "tiny prompts": Setting(5, 5, 1024, longest=130, longest_output=20),
    "several partitions, full": Setting(3, 12, 2048, partition_tokens=512, shortest=100, longest=1900),
    "several partitions, few": Setting(6, 9, 2048, partition_tokens=512, shortest=100, longest=1500),
    "several partitions, very few": Setting(8, 6, 1024, partition_tokens=256, longest=700),
    "prefix caching off": Setting(4, 4, 1024, prefix_caching=False, longest=900),
    "prefix caching off, fewer slots": Setting(6, 4, 1024, prefix_caching=False, longest=900),
}


@dataclass
class History:
    """Draws requests that share, extend, truncate and repeat one another's streams; ids of blocks stand for text."""

    setting: Setting
    rng: random.Random
    streams: list[list[int]] = field(default_factory=list)
    fresh: int = 0

    def request(self) -> tuple[int, int, int, list[int]]:
        """prompt_tokens, max_tokens, stop_tokens and the keys of its whole possible stream, in blocks."""
        rng, setting = self.rng, self.setting
        blocks = setting.slot_tokens // BLOCK
        prompt = rng.randint(setting.shortest, min(setting.longest, setting.slot_tokens - 1))
        base = list(rng.choice(self.streams)) if self.streams and rng.random() < 0.6 else []
        if base and rng.random() < 0.3:
            prompt = min(len(base) * BLOCK + rng.choice([0, 1, 8]), setting.slot_tokens - 1)
        stream = base[: rng.choice([len(base), rng.randint(0, len(base))])]
        while len(stream) < blocks:
            self.fresh += 1
            stream.append(self.fresh)
        max_tokens = rng.randint(1, setting.longest_output)
        stop_tokens = max_tokens if rng.random() < 0.8 else rng.randint(1, max_tokens)
        self.streams.append(stream[: max(1, prompt // BLOCK + rng.randint(0, 2))])
        self.streams = self.streams[-12:]
        return prompt, max_tokens, stop_tokens, stream


@pytest.fixture(scope="session")
def cost_model() -> CostModel:
    return load_cost_model("paper")


def compare(setting: Setting, seed: int, steps: int, cost_model: CostModel) -> None:
    """Drive both engines with one random history."""
    rng = random.Random(seed)
    history = History(setting, rng)
    engine = Scheduler(setting.config, cost_model)
    oracle = Oracle(
        setting.limit,
        setting.slots,
        setting.slot_tokens,
        slot_tokens=setting.partition_tokens,
        prefix_caching=setting.prefix_caching,
        active_limit=setting.active,
        rules=RULE_SETS[setting.rules],
    )
    next_request, arrivals = 0, rng.choice([0.02, 0.1, 0.5])
    alive: set[int] = set()
    for step_index in range(steps):
        while rng.random() < arrivals and len(alive) < 3 * setting.limit:
            prompt, max_tokens, stop, keys = history.request()
            engine.submit(next_request, prompt, max_tokens, keys, stop)
            oracle.submit(next_request, prompt, max_tokens, keys, stop)
            alive.add(next_request)
            next_request += 1
        abort_anyone(rng, alive, engine, oracle)
        check_step(setting, engine, oracle, f"seed {seed}, step {step_index}")
        abort_anyone(rng, alive, engine, oracle)
        finished = engine.finish_step()
        assert finished == oracle.finish_step()
        alive.difference_update(finished)
        check_state(engine, oracle)


def abort_anyone(rng: random.Random, alive: set[int], engine: Scheduler, oracle: Oracle) -> None:
    if alive and rng.random() < 0.01:
        victim = rng.choice(sorted(alive))
        engine.abort(victim)
        oracle.abort(victim)
        alive.discard(victim)


def check_step(setting: Setting, engine: Scheduler, oracle: Oracle, where: str) -> None:
    mine, theirs = engine.schedule(), oracle.schedule()
    assert mine.kind == theirs.kind, where
    assert mine.requests == theirs.requests, where
    assert mine.preempted == theirs.preempted, where
    assert mine.cached_slots == theirs.cached_slots, where
    assert mine.cached_lengths == theirs.cached_lengths, where
    assert mine.cached_tokens == sum(theirs.cached_lengths), where
    assert mine.hash_hit_tokens == theirs.hash_hit_tokens, where
    assert mine.computed_tokens == theirs.computed_tokens, where
    assert mine.context_tokens == theirs.context_tokens, where
    assert mine.dummy_slot == theirs.dummy_slot, where
    evictions = tuple((event.slots[0], event.caller) for event in mine.kv_events if event.kind == "EVICTION")
    assert evictions == theirs.evicted, where
    assert mine.evicted_slots == tuple(slot for slot, _ in theirs.evicted), where
    for request in mine.requests:
        state = oracle.requests[request]
        assert engine.inner_blocks(request) == tuple(state.blocks), where
        if setting.prefix_caching:
            assert engine.block_table(request) == tuple(state.slots), where


def check_state(engine: Scheduler, oracle: Oracle) -> None:
    """Queues agree, and no slot or block is lost or given twice."""
    assert engine.running == tuple(oracle.running)
    assert engine.waiting == tuple(oracle.waiting)
    assert engine.free_slots == len(oracle.free_slots)
    assert engine.free_blocks == len(oracle.free_blocks)
    held = [block for request in engine.running for block in engine.inner_blocks(request)]
    assert len(set(held)) == len(held)
    assert len(held) + engine.free_blocks == engine.num_blocks


VENDOR_RULES = [name for name, rules in RULE_SETS.items() if rules.has_inner_blocks]


@pytest.mark.parametrize("rules", VENDOR_RULES)
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_engine_decides_as_the_oracle(name: str, rules: str, cost_model: CostModel) -> None:
    compare(replace(SETTINGS[name], rules=rules), seed=0, steps=500, cost_model=cost_model)


@settings(max_examples=30)
@given(
    limit=st.integers(1, 6),
    slots=st.integers(2, 10),
    blocks_per_slot=st.integers(2, 8),
    partitions=st.integers(1, 4),
    longest_output=st.sampled_from([1, 3, 40, 300]),
    rules=st.sampled_from(VENDOR_RULES),
    active=st.integers(1, 6) | st.none(),
    seed=st.integers(0, 2**32),
)
def test_engine_decides_as_the_oracle_on_any_configuration(
    limit: int,
    slots: int,
    blocks_per_slot: int,
    partitions: int,
    longest_output: int,
    rules: str,
    active: int | None,
    seed: int,
) -> None:
    slot_tokens = blocks_per_slot * partitions * BLOCK
    setting = Setting(
        limit,
        slots,
        slot_tokens,
        partition_tokens=blocks_per_slot * BLOCK if partitions > 1 else None,
        longest=slot_tokens - 1,
        longest_output=longest_output,
        rules=rules,
        active=min(active, limit) if active is not None and RULE_SETS[rules].has_active_limit else None,
    )
    compare(setting, seed, 120, load_cost_model("paper"))
