"""What a predicted ratio rests on: sizes that were never measured, and how far their costs may be off."""

from __future__ import annotations

import pytest

from harness.judge.planning.deciding import BreakEven, break_even, deciding_sizes, unmeasured_in_words
from harness.judge.prereg.predict import planned_break_even
from harness.model.engine.cost import load_cost_model
from harness.model.experiment import PlannedRun, resolve
from harness.model.sim import simulate
from harness.model.spec import parse_experiment

PAPER = load_cost_model("paper")


def pair(
    server: dict[str, object] | None = None, base: dict[str, object] | None = None, draws: int = 1, **keys: object
) -> tuple[tuple[PlannedRun, ...], tuple[PlannedRun, ...]]:
    table = {
        "name": "turns",
        "backend": "sim",
        "base_seed": 7,
        "replicates": 2,
        "prediction": {"draws": draws},
        "workload": {"num_sessions": 6, "wait_cap_s": 5.0},
        "condition": [{"name": "base", "server": base or {}}, {"name": "changed", "server": (server or {}) | keys}],
    }
    planned = resolve(parse_experiment(table, where="test")).by_condition
    return planned["changed"], planned["base"]


def test_at_the_break_even_the_simulated_ratio_is_1() -> None:
    own, base = pair(decode_buckets=[1, 2, 4, 6, 8])
    found = planned_break_even(own, base, 1)
    assert found.sizes == (6,)
    costs = [
        sum(simulate(run.plan, run.server, PAPER.rescaled((6,), 1 + found.change)).device_ns for run in runs)
        for runs in (own, base)
    ]
    given = [sum(simulate(run.plan, run.server, PAPER).device_ns for run in runs) for runs in (own, base)]
    assert abs(costs[0] / costs[1] - 1) < 0.1 * abs(given[0] / given[1] - 1)
    assert str(found) == f"the answer turns where f(6) is {100 * found.change:.1f} % higher than given"


def test_paged_memory_has_a_break_even_by_a_few_draws() -> None:
    paged = {"rules": "vllm-paged", "cost_model": "emulated-gpu", "max_num_seqs": 8, "num_gpu_blocks": 1024}
    own, base = pair(paged | {"decode_buckets": [1, 2, 4, 6, 8]}, paged | {"decode_buckets": [1, 2, 4, 8]}, draws=6)
    found = planned_break_even(own, base, 6)
    assert (found.sizes, found.few_draws) == ((6,), 4)
    assert str(found).endswith(" (by 4 draws alone)")
    # Where f(6) is that of 8, its steps cost what they cost without it.
    assert 0 < found.change < 0.5


def test_servers_that_are_equal_have_no_break_even() -> None:
    assert planned_break_even(*pair(), 1) is None


def test_more_slots_turn_at_the_prefill_costs() -> None:
    found = planned_break_even(*pair(kv_slots=12), 1)
    assert found.sizes == ()
    assert "the prefill costs" in str(found)


def test_a_change_that_no_cost_turns_is_said_to_hold() -> None:
    assert break_even(lambda change: 0.5 + 0.001 * change) is None
    assert str(BreakEven((6, 10), None)) == (
        "the answer holds while f(6) and f(10) are between half and twice what is given"
    )


def test_a_straight_line_is_solved_whichever_way_it_falls() -> None:
    assert break_even(lambda change: 0.96 + 0.5 * change) == pytest.approx(0.08, abs=0.01)
    assert break_even(lambda change: 1.04 + 0.5 * change) == pytest.approx(-0.08, abs=0.01)


def test_only_added_sizes_decide_and_left_out_ones_where_none_is_added() -> None:
    assert deciding_sizes((1, 4, 6, 8), (1, 2, 4, 8)) == (6,)
    assert deciding_sizes((1, 4, 8), (1, 2, 4, 8)) == (2,)


def test_a_changed_size_moves_no_interpolated_neighbour() -> None:
    changed = PAPER.rescaled((8,), 1.1)
    assert changed.bucket_fs(8) == round(PAPER.bucket_fs(8) * 1.1)
    assert changed.bucket_fs(6) == PAPER.bucket_fs(6)


def test_sizes_that_were_never_measured_are_named_with_how_their_costs_came_about() -> None:
    assert unmeasured_in_words(PAPER, (1, 2, 4, 8)) == ""
    assert unmeasured_in_words(PAPER, (1, 6, 12, 16)) == (
        "f(6) was not measured, but interpolated; f(12) and f(16) were not measured, but extrapolated"
    )
