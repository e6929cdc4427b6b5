"""The stand-in device: tokens that betray a wrong reuse, modelled time, faults on request. Needs no installed twin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.extras.twin.backend import step_costs
from harness.extras.twin.inside.twin_device import (
    Device,
    DeviceError,
    DeviceShape,
    Settings,
    costs_from,
    now_ns,
    settings_from,
)
from harness.model.engine import load_cost_model
from tests.support.twin_runs import expected_tokens

LOW, HIGH = 300, 2000
PROMPT = [(7 * place + 1) % 1500 for place in range(300)]


def device(settings: Settings | None = None, slot_tokens: int = 1024) -> Device:
    return Device(settings or Settings(), DeviceShape(4, slot_tokens, chunk_tokens=128, low=LOW, high=HIGH))


def prefill(target: Device, table: list[int], prompt: list[int], cached: int = 0) -> int:
    token = -1
    for first in range(cached, len(prompt), 128):
        token = target.prefill_chunk(table, first, prompt[first : first + 128])
    return token


def generate(target: Device, table: list[int], prompt: list[int], count: int, cached: int = 0) -> list[int]:
    tokens = [prefill(target, table, prompt, cached)]
    while len(tokens) < count:
        position = len(prompt) + len(tokens) - 1
        tokens += target.decode([table], [position], [tokens[-1]])
    return tokens


def test_tokens_are_those_that_the_prompt_alone_decides() -> None:
    assert generate(device(), [2], PROMPT, 9) == expected_tokens(PROMPT, 9, LOW, HIGH)


def test_tokens_do_not_depend_on_how_a_sequence_is_spread_over_slots() -> None:
    assert generate(device(slot_tokens=128), [3, 0, 1], PROMPT, 9) == expected_tokens(PROMPT, 9, LOW, HIGH)


def test_a_right_reuse_gives_the_same_tokens() -> None:
    target = device()
    prefill(target, [0], PROMPT)
    target.copy(0, 1, 256)

    assert generate(target, [1], PROMPT, 9, cached=256) == expected_tokens(PROMPT, 9, LOW, HIGH)
    assert target.memory.unwritten_reads == 0


def test_reusing_another_prompts_head_gives_other_tokens() -> None:
    target = device()
    prefill(target, [0], [*PROMPT[:200], 4, *PROMPT[201:]])
    target.copy(0, 1, 256)

    assert generate(target, [1], PROMPT, 9, cached=256) != expected_tokens(PROMPT, 9, LOW, HIGH)


def test_reusing_what_was_never_computed_is_counted_and_gives_other_tokens() -> None:
    target = device()

    assert generate(target, [1], PROMPT, 9, cached=256) != expected_tokens(PROMPT, 9, LOW, HIGH)
    assert target.memory.unwritten_reads == 256 * 9


def test_a_hole_before_rightly_reused_positions_gives_other_tokens() -> None:
    target = device(slot_tokens=128)
    prefill(target, [0, 1, 2], PROMPT)
    target.copy(0, 3, 64)

    assert generate(target, [3, 1, 2], PROMPT, 9, cached=256) != expected_tokens(PROMPT, 9, LOW, HIGH)


def test_padding_rows_destroy_what_stands_at_the_head_of_their_slot() -> None:
    target = device()
    prefill(target, [0], PROMPT)
    prefill(target, [1], PROMPT)
    target.decode([[1], [0]], [300, 0], [5, 0])
    target.copy(0, 2, 256)

    assert generate(target, [2], PROMPT, 9, cached=256) != expected_tokens(PROMPT, 9, LOW, HIGH)


def test_a_slot_outside_the_memory_is_refused() -> None:
    with pytest.raises(IndexError, match="physical slot 4 of 4"):
        device().prefill_chunk([4], 0, PROMPT[:128])
    with pytest.raises(IndexError, match="physical slot -1"):
        device().copy(-1, 0, 128)


def test_the_trace_has_one_record_per_device_call(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    target = device(Settings(trace_path=str(path)))
    generate(target, [0], PROMPT, 3)
    target.copy(0, 1, 128)
    target.close()

    records = [json.loads(line) for line in path.read_text().splitlines()]

    assert [record["kind"] for record in records] == ["prefill"] * 3 + ["decode"] * 2 + ["copy"]
    assert [record["chunk"] for record in records[:3]] == [0, 1, 2]
    assert [record["num_tokens"] for record in records[:3]] == [128, 128, 44]
    assert (records[3]["n"], records[3]["b"], records[3]["positions"]) == (1, 1, [300])
    assert all(record["start_ns"] <= record["end_ns"] for record in records)


def test_step_costs_are_the_cost_models_to_the_nanosecond() -> None:
    for name in ("paper", "context-1-2-4-8"):
        model = load_cost_model(name)
        costs = costs_from(json.loads(json.dumps(step_costs(model, (1, 2, 4, 8)))))
        for bucket in (1, 2, 4, 8):
            for num_seqs in range(1, bucket + 1):
                assert costs.decode_ns(bucket, num_seqs, 1700 * num_seqs) == model.decode_step_ns(
                    bucket, num_seqs, 1700 * num_seqs
                )
        for computed, cached in ((1, 0), (128, 0), (129, 1920), (2000, 0), (8191, 128)):
            assert costs.prefill_ns(computed, cached) == model.prefill_ns(computed, cached)


def test_no_step_ends_before_its_modelled_time() -> None:
    costs = step_costs(load_cost_model("paper"), (1, 2))
    target = device(settings_from({"timing": "device", "costs": costs}))
    prefill(target, [0], PROMPT)

    before = now_ns()
    target.decode([[0]], [300], [5])

    assert now_ns() - before >= costs_from(costs).decode_ns(1, 1, 301)


def test_faults_strike_once_at_the_call_they_name() -> None:
    target = device(settings_from({"faults": [{"do": "error", "call": "decode", "at": 1}]}))
    prefill(target, [0], PROMPT)
    target.decode([[0]], [300], [5])

    with pytest.raises(DeviceError, match="decode call 1"):
        target.decode([[0]], [301], [5])
    assert target.decode([[0]], [301], [5])


def test_settings_with_an_unknown_key_or_timing_without_costs_are_refused() -> None:
    with pytest.raises(TypeError, match="speed"):
        settings_from({"speed": 2})
    with pytest.raises(ValueError, match="timing needs costs"):
        settings_from({"timing": "period"})
