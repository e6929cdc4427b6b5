"""Known answers of the vendor's scheduler: reuse and eviction, one request at a time, seen through Scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest

from harness.errors import PlanError, SpecError
from harness.model.engine import DECODE, PREFILL, EngineConfig, Scheduler, Step, load_cost_model
from harness.model.engine.scheduler import KvCopyError

COST = load_cost_model("paper")
MODEL_LEN = 8192


def server(limit: int = 8, slots: int | None = None, **others: int) -> Scheduler:
    buckets = tuple(sorted({bucket for bucket in (1, 2, 4, 8) if bucket < limit} | {limit}))
    return Scheduler(EngineConfig(limit, buckets, limit if slots is None else slots, **others), COST)


def text(seed: int, tokens: int) -> list[int]:
    """Keys of the full blocks of a prompt that no other seed shares."""
    return [seed * 1000 + block for block in range(tokens // 128)]


def prefill(engine: Scheduler, request: int, prompt: int, keys: list[int], generate: int = 8) -> Step:
    """Submit one request and take its prefill step."""
    engine.submit(request, prompt, generate, keys)
    step = engine.schedule()
    assert step.kind == PREFILL
    engine.finish_step()
    return step


def drain(engine: Scheduler) -> list[Step]:
    """Decode until nobody is left."""
    steps: list[Step] = []
    while engine.has_work:
        steps.append(engine.schedule())
        engine.finish_step()
    return steps


def evictions(steps: Iterable[Step]) -> dict[str, int]:
    """Slots evicted in these steps, by cause."""
    events = [event for step in steps for event in step.kv_events if event.kind == "EVICTION"]
    return Counter(event.caller for event in events)


def survival(engine: Scheduler, num_background: int, generate: int = 8) -> tuple[int, list[Step]]:
    """A target, so many background requests, and the target's re-arrival, one after another: its reuse, all steps."""
    steps: list[Step] = []
    cached = 0
    for request in range(num_background + 2):
        is_return = request == num_background + 1
        seed = 0 if is_return else request
        prompt = 2008 if is_return else 2000
        step = prefill(engine, request, prompt, text(seed, prompt), generate)
        cached = step.cached_tokens
        steps += [step, *drain(engine)]
    return cached, steps


@pytest.mark.parametrize("num_background", range(13))
def test_sequential_survival_on_eight_slots(num_background: int) -> None:
    cached, steps = survival(server(), num_background)
    decode_steps = [step for step in steps if step.kind == DECODE]
    assert cached == (1920 if num_background <= 6 else 0)
    assert evictions(steps) == +Counter(dummy=num_background - 5)
    assert len(decode_steps) == 7 * (num_background + 2)
    assert all(step.dummy_slot >= 0 for step in decode_steps)


def test_the_last_free_slot_spares_the_target_until_after_its_look_up() -> None:
    cached, steps = survival(server(), 6)
    assert cached == 1920
    admission = [step for step in steps if step.kind == PREFILL][-1]
    assert admission.evicted_slots == ()
    assert admission.cached_slots == (0,)
    assert steps[steps.index(admission) + 1].evicted_slots == (0,)


@pytest.mark.parametrize(("limit", "slots"), [(4, 4), (16, 16), (8, 12)])
@pytest.mark.parametrize("generate", [1, 2, 8])
def test_survival_threshold_follows_the_slots(limit: int, slots: int, generate: int) -> None:
    for background in range(slots + 2):
        cached, steps = survival(server(limit, slots), background, generate)
        spared = slots if generate == 1 else slots - 1
        assert (cached == 1920) == (background <= slots - 2)
        assert sum(evictions(steps).values()) == max(0, background + 2 - spared)


def test_fewer_slots_than_the_limit_keep_one_for_padding() -> None:
    for background in range(8):
        cached, steps = survival(server(8, 6), background)
        assert (cached == 1920) == (background <= 3)
        assert evictions(steps) == +Counter(request=background + 2 - 5)
        assert {step.dummy_slot for step in steps if step.kind == DECODE} == {5}


@pytest.mark.parametrize(("prompt", "cached"), [(1280, 1152), (1281, 1280), (127, 0), (128, 0), (129, 128)])
def test_the_last_token_of_a_repeated_prompt_is_always_computed(prompt: int, cached: int) -> None:
    engine = server()
    prefill(engine, 0, prompt, text(0, prompt))
    drain(engine)
    step = prefill(engine, 1, prompt, text(0, prompt))
    assert (step.cached_tokens, step.computed_tokens) == (cached, prompt - cached)


def test_generated_text_is_never_reused_until_it_is_prefilled() -> None:
    engine = server()
    prefill(engine, 0, 1000, text(0, 1000), generate=300)
    drain(engine)
    stream = text(0, 4096)
    assert prefill(engine, 1, 1308, stream, generate=300).cached_tokens == 896
    drain(engine)
    # Turn 3 reuses all of turn 2's prompt, turn 1's answer included.
    assert prefill(engine, 2, 1616, stream, generate=2).cached_tokens == 1280


def test_a_shared_prefix_prefilled_by_another_hides_the_sessions_own_slot() -> None:
    engine = server()
    shared = text(9, 512)
    mine = shared + text(0, 800)
    prefill(engine, 0, 1312, mine)
    prefill(engine, 1, 1312, shared + text(1, 800))
    drain(engine)
    step = prefill(engine, 2, 1312, mine)
    assert step.cached_tokens == 512
    assert step.hash_hit_tokens == 1280
    assert step.cached_slots == (1,)


def test_hash_hits_outlive_the_slot_as_false_hits() -> None:
    engine = server()
    survival(engine, 7)
    assert survival(server(), 7)[0] == 0
    engine = server(2, 2)
    for request in range(3):
        prefill(engine, request, 1000, text(request, 1000))
        drain(engine)
    step = prefill(engine, 3, 1000, text(0, 1000))
    assert (step.hash_hit_tokens, step.cached_tokens) == (896, 0)
    kinds = [event.kind for event in step.kv_events]
    assert "CACHE_PARTIAL" in kinds
    assert "CACHE_HIT" not in kinds


def test_a_copy_that_fails_makes_a_full_prefill_and_leaves_the_counted_hit() -> None:
    engine = server()
    engine.submit(0, 1000, 1, text(0, 1000))
    engine.schedule()
    engine.finish_step()
    engine.submit(1, 1000, 1, text(0, 1000))
    hit = engine.schedule()
    assert (hit.cached_tokens, hit.computed_tokens) == (896, 104)
    full = engine.recomputed(hit, 0)
    assert (full.cached_tokens, full.hash_hit_tokens, full.computed_tokens) == (896, 896, 1000)
    assert full.duration_ns == COST.prefill_ns(1000) > hit.duration_ns


@pytest.mark.parametrize("rules", ["vendor-0.11.1", "vendor-0.11.2"])
def test_before_0_12_a_copy_that_fails_ends_the_engine(rules: str) -> None:
    engine = Scheduler(EngineConfig(8, (1, 2, 4, 8), 8, rules=rules), COST)
    with pytest.raises(KvCopyError, match="KV of slot 3 could not be copied"):
        engine.recomputed(Step(PREFILL, cached_tokens=128, context_tokens=200, cached_slots=(3,)), 0)


def test_a_preempted_request_loses_its_memory_and_returns_to_the_head() -> None:
    engine = Scheduler(EngineConfig(3, (1, 2, 3), 5, slot_tokens=1024, partition_tokens=256), COST)
    for request in range(3):
        engine.submit(request, 250, 400, [*text(request, 250), *range(50 * request, 50 * request + 8)])
    engine.submit(3, 100, 10, [])
    preempting: list[Step] = []
    while not preempting and engine.has_work:
        step = engine.schedule()
        if step.preempted:
            preempting.append(step)
        else:
            engine.finish_step()
    (step,) = preempting
    assert step.preempted == (2,)
    assert engine.waiting == (2, 3)
    kinds = [event.kind for event in step.kv_events]
    assert kinds == ["ALLOC", "FREE_REQUEST", "MAPPING_REMOVE", "EVICTION", "PREEMPT", "ALLOC"]
    assert evictions([step]) == {"preempt": 1}


def test_prefix_caching_off_recomputes_every_prompt() -> None:
    engine = Scheduler(EngineConfig(2, (1, 2), 2, slot_tokens=2048, prefix_caching=False, rules="vendor-0.11.1"), COST)
    for request in range(3):
        step = prefill(engine, request, 1000, [])
        assert (step.cached_tokens, step.computed_tokens) == (0, 1000)
        assert engine.block_table(request) == (request % 2,)
        assert all(later.dummy_slot == -1 for later in drain(engine))


def test_events_carry_what_the_log_lines_say() -> None:
    engine = server()
    step = prefill(engine, 5, 300, text(0, 300), generate=2)
    (alloc,) = step.kv_events
    assert (alloc.kind, alloc.request, alloc.slots, alloc.blocks) == ("ALLOC", 5, (0,), (1, 2, 3))
    drain(engine)
    (freed,) = engine.take_kv_events()
    assert (freed.kind, freed.request, freed.slots, freed.is_preemption) == ("FREE_REQUEST", 5, (0,), False)
    step = prefill(engine, 6, 308, text(0, 308), generate=2)
    hit = step.kv_events[-1]
    assert (hit.kind, hit.slots, hit.num_blocks, hit.block_counts) == ("CACHE_HIT", (0,), 2, (2,))
    assert hit.reused_tokens == 256


def test_what_cannot_run_is_refused_with_its_name() -> None:
    engine = server()
    with pytest.raises(PlanError, match="request 3"):
        engine.submit(3, MODEL_LEN, 1, text(0, MODEL_LEN))
    with pytest.raises(PlanError, match="block keys"):
        engine.submit(3, 300, 1, [])
    engine.submit(3, 100, 1, np.zeros(0, dtype=np.int64))
    with pytest.raises(PlanError, match="in use"):
        engine.submit(3, 100, 1, [])
    with pytest.raises(SpecError, match="usable slot"):
        server(8, 1)
    with pytest.raises(SpecError, match="limit"):
        EngineConfig(8, (1, 2, 4), 8)
