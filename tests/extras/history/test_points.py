"""A figure over releases: points by date, each with its interval and release."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.analysis.compare.measures import Bounds, Value
from harness.errors import SpecError
from harness.extras.history.points import PlacedRuns, histories, release_of
from harness.judge.decisions.gate import GateRun
from harness.measure.records.manifest import Manifest


def a_place(
    name: str, day: int, factor: float = 1.0, plans: str = "abcd", backend: str = "sim", **manifest: Any
) -> PlacedRuns:
    """Runs of these plans, whose costs differ by plan and are ``factor`` times as high."""
    runs = [
        GateRun(
            Manifest(
                experiment="small",
                condition="base",
                replicate=place,
                plan_hash=plan,
                planned_requests=1,
                backend=backend,
                provenance={"captured_at_utc": f"2026-05-{day:02d}T08:00:00+00:00"},
                **manifest,
            ),
            "",
            place,
            10,
            {"cost": Value(factor * (2.0 + ord(plan)), 100.0), "padding": None},
        )
        for place, plan in enumerate(plans)
    ]
    return PlacedRuns(name, tuple(runs))


def test_points_stand_by_date() -> None:
    (history,) = histories([a_place(f"r{day}", day) for day in (7, 1, 5, 3)], ["cost"])
    assert [point.place for point in history.points] == ["r1", "r3", "r5", "r7"]
    assert all(point.low is not None for point in history.points)
    assert "no accelerator was measured" in history.origin


def test_a_point_whose_tokens_were_read_late_is_as_wide_as_they_leave_it() -> None:
    exact = a_place("r1", 1)
    runs = tuple(
        replace(run, bounds={"cost": Bounds(0.95 * value.amount / value.units, value.amount / value.units)})
        for run in exact.runs
        if (value := run.values["cost"]) is not None
    )
    (known,) = histories([exact, a_place("r2", 2)], ["cost"])
    (late,) = histories([PlacedRuns("r1", runs), a_place("r2", 2)], ["cost"])
    one, other = known.points[0], late.points[0]
    assert (other.low, other.high) == (pytest.approx(0.95 * one.low), pytest.approx(one.high))


def test_only_the_plans_that_every_point_has_are_taken() -> None:
    (history,) = histories([a_place("all", 1), a_place("three", 2, plans="abc")], ["cost"])
    assert [point.runs for point in history.points] == [3, 3]
    assert history.points[0].value == pytest.approx(history.points[1].value)
    assert history.notes[0] == "base, cost: 1 runs of plans that not every point has were left out"
    (other,) = histories([a_place("abc", 1, plans="abc"), a_place("xyz", 2, plans="xyz")], ["cost"])
    assert other.notes[0] == "base, cost: the points are of different plans, which scatter too"


def test_servers_of_several_kinds_are_named() -> None:
    (history,) = histories([a_place("one", 1), a_place("two", 2, backend="emulator")], ["cost"])
    assert any("several kinds of server: emulator, sim" in note for note in history.notes)


def test_what_is_no_figure_or_was_not_observed_twice_is_refused() -> None:
    both = [a_place("one", 1), a_place("two", 2)]
    for figures, places in ((["speed"], both), (["padding"], both), (["cost"], both[:1])):
        with pytest.raises(SpecError, match=r"is no figure|more than one place"):
            histories(places, figures)


def test_a_point_carries_the_release_of_the_server_and_never_that_of_the_harness() -> None:
    started = {"facts": {"launch": {"requested": {"versions": {"vllm-rbln": "0.12.0"}}}}}
    places = [
        a_place("a", 1, backend="rbln", server=started),
        a_place("b", 2, backend="attached", effective={"launch": {"vllm": "0.30.0"}}),
        a_place("c", 3, requested={"server": {"rules": "vendor-0.12.0"}}),
    ]
    assert [release_of(place.runs[0].manifest) for place in places] == [
        "vllm-rbln 0.12.0",
        "vllm 0.30.0",
        "sim, rules vendor-0.12.0",
    ]
