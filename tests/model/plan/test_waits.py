"""Wait distributions: each tool through its published quantiles, and the shipped mixture against published facts."""

from __future__ import annotations

import math
import random
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import SpecError
from harness.model.plan.waits import ToolRow, WaitDistribution, load_waits, parse_waits


@pytest.fixture(scope="module")
def tracelab() -> WaitDistribution:
    return load_waits("tracelab-v0.0.2")


def draw(waits: WaitDistribution, rng: random.Random) -> int:
    """A wait in ns, uncapped."""
    return int(waits.waits_ns(np.array(rng.random()), np.array(rng.random())))


def distribution(**keys: object) -> WaitDistribution:
    return parse_waits({"name": "own", "waits": keys}, where="own.toml")


def test_the_shipped_mixture_has_its_tools_and_calls(tracelab: WaitDistribution) -> None:
    assert len(tracelab.tools) == 43
    assert tracelab.total_calls == 739_461
    assert tracelab.calls[36] < tracelab.calls[37], "ranks 37 and 38 stand as published, not sorted"


def test_every_tool_goes_exactly_through_its_quantiles(tracelab: WaitDistribution) -> None:
    for row in tracelab.distributions:
        assert row.quantile_ms(0.5) == row.p50_ms
        assert row.quantile_ms(0.9) == pytest.approx(row.p90_ms, rel=1e-12)
        assert row.quantile_ms(0.99) == row.quantile_ms(0.9999) == row.p99_ms


def test_between_its_quantiles_a_tool_is_log_linear_and_below_its_median_log_normal() -> None:
    row = ToolRow(name="a", calls=1, p50_ms=100, p90_ms=1600, p99_ms=6400)
    assert row.quantile_ms(0.7) == pytest.approx(400)
    assert row.quantile_ms(0.945) == pytest.approx(3200)
    assert row.quantile_ms(0.1) == pytest.approx(100 / 16, rel=2e-4)


def test_the_shipped_mixture_meets_the_published_facts(tracelab: WaitDistribution) -> None:
    """None of these was used to make the table. Where a range was published, it is widened by its rounding only."""
    assert 0.7055 <= tracelab.cdf(1000) <= 0.7075
    assert tracelab.mixture_quantile_ms(0.5) == pytest.approx(157, abs=1)
    assert tracelab.mixture_quantile_ms(0.9) == pytest.approx(11_100, abs=100)
    assert 0.0251 <= tracelab.capped_share(60) <= 0.0256
    edges_ms = [10, 200, 5000, 60_000]
    bands = [0.0] * 5
    for calls, distribution in zip(tracelab.calls, tracelab.distributions, strict=True):
        bands[sum(distribution.quantile_ms(0.5) >= edge for edge in edges_ms)] += calls / tracelab.total_calls
    assert bands == pytest.approx([0.025, 0.566, 0.279, 0.130, 0.0], abs=0.0006)


def test_the_shipped_mixture_integrates_to_the_published_moments(tracelab: WaitDistribution) -> None:
    assert tracelab.mixture_quantile_ms(0.25) == pytest.approx(17.9, abs=0.05)
    assert tracelab.mixture_quantile_ms(0.75) == pytest.approx(1748, abs=0.5)
    assert tracelab.mixture_quantile_ms(0.95) == pytest.approx(24_810, abs=5)
    mean_s, std_s = tracelab.moments_s(cap_s=60, nodes_per_tool=1024)
    assert mean_s == pytest.approx(4.19, abs=0.005)
    assert std_s == pytest.approx(11.27, abs=0.01)


def test_draws_follow_the_mixture(tracelab: WaitDistribution) -> None:
    rng = random.Random(7)
    draws_ms = [draw(tracelab, rng) / 1e6 for _ in range(6_000)]
    for latency_ms in (10, 157, 1000, 11_100, 60_000):
        share = fmean(draw_ms <= latency_ms for draw_ms in draws_ms)
        assert share == pytest.approx(tracelab.cdf(latency_ms), abs=0.02)


@given(
    p50=st.sampled_from([0.0, 0.5, 3.0, 1000.0]),
    factors=st.tuples(st.floats(1, 50), st.floats(1, 50)),
    u=st.floats(0.001, 0.989),
)
def test_the_cdf_undoes_the_quantile(p50: float, factors: tuple[float, float], u: float) -> None:
    median = p50 or 0.5
    row = ToolRow(name="a", calls=1, p50_ms=p50, p90_ms=median * factors[0], p99_ms=median * factors[0] * factors[1])
    latency_ms = row.quantile_ms(u)
    assert row.cdf(latency_ms * (1 + 1e-9)) >= u - 1e-6
    assert row.cdf(latency_ms * (1 - 1e-9)) <= u + 1e-6


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_longer_quantiles_never_are_shorter_waits(us: list[float]) -> None:
    shipped = load_waits("tracelab-v0.0.2")
    for tool in (0, 10, 11, 42):
        waits_ms = [shipped.distributions[tool].quantile_ms(u) for u in sorted(us)]
        assert waits_ms == sorted(waits_ms)


def test_simple_distributions() -> None:
    rng = random.Random(1)
    assert draw(distribution(distribution="none"), rng) == 0
    assert draw(distribution(distribution="constant", wait_s=2.5), rng) == 2_500_000_000
    assert distribution(distribution="exponential", mean_s=2.0).moments_s()[0] == pytest.approx(2.0, rel=0.01)
    assert distribution(distribution="exponential", mean_s=2.0).mixture_quantile_ms(0.5) == pytest.approx(
        2000 * math.log(2)
    )
    assert distribution(distribution="lognormal", median_s=2.0, sigma=1.0).mixture_quantile_ms(0.5) == pytest.approx(
        2000
    )
    listed = distribution(distribution="empirical", waits_s=[3.0, 1.0, 2.0])
    assert [listed.distributions[0].quantile_ms(u) for u in (0.0, 0.34, 0.99, 1.0)] == [1000, 2000, 3000, 3000]
    assert listed.cdf(2000) == pytest.approx(2 / 3)
    assert {draw(listed, rng) for _ in range(50)} == {1_000_000_000, 2_000_000_000, 3_000_000_000}


def test_a_tool_can_be_asked_by_name(tracelab: WaitDistribution) -> None:
    assert tracelab.distributions[tracelab.tools.index("rank-03")].quantile_ms(0.5) == 5001


def test_comments_and_provenance_do_not_change_the_content_hash() -> None:
    table = {"name": "a", "waits": {"distribution": "constant", "wait_s": 1.0}}
    more = {**table, "description": "other words", "provenance": {"anything": ["goes", 1]}}
    assert parse_waits(table, where="a").content_hash == parse_waits(more, where="a").content_hash


def mixture(*p50_ms: int) -> dict[str, object]:
    """Tools of one name with these medians."""
    tools = [{"name": "t", "calls": 1, "p50_ms": each, "p90_ms": 4, "p99_ms": 9} for each in p50_ms]
    return {"distribution": "mixture", "tool": tools}


@pytest.mark.parametrize(
    ("waits", "complaint"),
    [
        (None, "waits: "),
        ({"distribution": "constant", "wait_s": -1}, "wait_s: must be greater than or equal"),
        ({"distribution": "cauchy"}, "waits: "),
        ({"distribution": "empirical", "waits_s": []}, "waits_s: "),
        ({"distribution": "empirical", "waits_s": [1.0, -2.0]}, r"waits_s\[1\]: "),
        ({"distribution": "empirical", "waits_s": [float("nan")]}, r"waits_s\[0\]: "),
        (mixture(), "tool: "),
        (mixture(5), "do not ascend"),
        (mixture(1, 1), "tool names repeat"),
    ],
)
def test_a_wrong_distribution_is_refused_in_one_line(waits: dict[str, object] | None, complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint) as caught:
        parse_waits({"name": "a", "waits": waits}, where="a.toml")
    assert str(caught.value).startswith("a.toml: ")
    assert "\n" not in str(caught.value)


def test_keys_of_a_distribution_that_are_missing_or_unknown_are_named() -> None:
    with pytest.raises(SpecError, match=r"a\.toml: name: is missing; waits: is missing"):
        parse_waits({}, where="a.toml")
    with pytest.raises(SpecError, match="cap: unknown key"):
        parse_waits({"name": "a", "cap": 1, "waits": {"distribution": "none"}}, where="a.toml")


def test_a_distribution_is_found_by_path_and_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[waits]\ndistribution = "constant"\nwait_s = 1.0\n')
    assert draw(load_waits(str(path)), random.Random(1)) == 1_000_000_000
    path.write_text('name = "mine"\n[waits]\ndistribution = "constant"\nwait_s = 22.0\n')
    assert draw(load_waits(str(path)), random.Random(1)) == 22_000_000_000
    with pytest.raises(SpecError, match="no such wait distribution file"):
        load_waits(str(tmp_path / "absent.toml"))
    path.write_text("name = ")
    with pytest.raises(SpecError, match="is not valid TOML"):
        load_waits(str(path))
