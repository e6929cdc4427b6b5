"""The signs of Tables I and II over many drawn plans: what belongs to the method, and what to three plans."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from harness.cli.tree import app
from harness.extras.paper.signs import (
    ALTERNATIVES,
    BASE_SEED,
    GRID,
    PUBLISHED_SEEDS,
    TABLE_I,
    WIDER_GRID,
    DrawnCounts,
    SignRow,
    draw,
    draw_published,
    reversal_share,
    share_by_decode_ratio,
)
from harness.measure.records.store import RunStore
from harness.model.spec import load_experiment, load_toml
from harness.runner import run_experiment
from harness.shipped import find_shipped, shipped_folder

NUM_PLANS = 600


@cache
def drawn(users: int, buckets: tuple[int, ...] = GRID) -> DrawnCounts:
    return draw(users, NUM_PLANS, buckets=buckets)


@pytest.mark.parametrize("users", [3, 5, 6, 8, 10, 12, 16])
def test_the_printed_sign_is_that_of_all_plans_together(users: int) -> None:
    # Where N is in the grid, waits take requests off it; where it is not, they bring them onto it (Table I).
    row = SignRow(users, drawn(users))
    assert np.sign(row.delta_p) == np.sign(TABLE_I[users].delta_p)
    assert row.is_clear
    assert row.share > 0.5


def test_at_7_sessions_there_is_no_direction() -> None:
    # Table I prints +0.022; the paper's own rule confirmed no difference there (S4).
    assert abs(SignRow(7, drawn(7)).delta_p) < 0.006


def test_at_4_sessions_all_plans_together_have_the_other_sign() -> None:
    # Table I prints +0.026, but 4 is in the grid. The printed sign is that of draws whose waits leave requests alone.
    row = SignRow(4, drawn(4))
    assert row.interval[1] < 0
    assert 0.2 < row.share < 0.4
    shares = [share for _least, _largest, share in share_by_decode_ratio(drawn(4).grouped(1))]
    assert shares[0] < 0.3 < shares[-1]


@pytest.mark.parametrize("users", sorted(TABLE_I))
def test_waiting_costs_decode_time_at_every_n(users: int) -> None:
    ratios = drawn(users).sums_decode_ratio()
    # One sum in some thousand is below 1, by a hundredth: where hardly anybody waits.
    assert np.mean(ratios > 1) >= 0.995
    assert ratios.min() > 0.97
    assert np.median(ratios) > 1.2


def test_bucket_6_turns_the_sign_at_6_sessions_and_not_at_8() -> None:
    assert drawn(6).delta_p > 0 > drawn(6, WIDER_GRID).delta_p
    assert drawn(8).delta_p < 0
    assert drawn(8, WIDER_GRID).delta_p < 0
    assert 0 < reversal_share(drawn(6), drawn(6, WIDER_GRID)) < 0.5


@pytest.mark.parametrize("variant", ALTERNATIVES, ids=lambda variant: variant.name)
def test_no_other_reading_gives_the_printed_sign_at_4_sessions(variant: object) -> None:
    assert draw(4, 150, variant).delta_p < 0


def test_the_first_plans_are_those_of_the_shipped_experiment(tmp_path: Path) -> None:
    spec = load_experiment(find_shipped("experiments", "alignment", what="experiment"))
    assert spec.base_seed == BASE_SEED
    kept = tuple(one for one in spec.condition if one.name in ("n5-waits", "n5-nowaits"))
    changes = {"backend": "sim", "replicates": 1, "condition": kept, "baseline": "n5-nowaits"}
    run_experiment(spec.model_copy(update=changes), runs_root=tmp_path)
    single = draw(5, 3).grouped(1)
    for run in RunStore(tmp_path).sealed():
        n, b = (run.table("steps").column(name).to_numpy() for name in ("n", "b"))
        place = 0 if run.condition == "n5-waits" else 1
        assert (int((b - n).sum()), int(b.sum())) == (single.padded[place, 0], single.slots[place, 0])
        assert run.spec.workload_of(kept[0]).num_sessions == 5


def test_the_published_seeds_are_those_that_no_confirmatory_plan_may_have() -> None:
    folder = shipped_folder("experiments")
    listed = load_toml(folder.parent / "published-seeds.toml")
    assert set(PUBLISHED_SEEDS) == {seed for seeds in listed.values() for seed in seeds}
    assert [len(draw_published(users)) for users in (6, 8, 10)] == [9, 8, 8]


def test_sums_are_ratios_of_sums() -> None:
    draws = DrawnCounts(np.array([[1, 3], [2, 2]]), np.array([[10, 10], [8, 4]]), np.array([[5, 7], [4, 4]]), 2)
    assert draws.sums_p().tolist() == [[0.2], [4 / 12]]
    assert draws.sums_decode_ratio().tolist() == [1.5]
    assert draws.grouped(1).sums_p().tolist() == [[0.1, 0.3], [0.25, 0.5]]


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["paper", "signs", "--sums", "8", "-o", str(tmp_path / "signs.md")])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "signs.md").read_text()
    assert text.count("\n| ") > 20
    assert "nothing is measured" in text
