"""An answer in words: how much less or more, within what, on which runs."""

from __future__ import annotations

import pytest

from harness.analysis.compare.answer import Source, change, cost_sentence, interval_in_words, source_of
from harness.analysis.stats import GIVEN_COSTS, Interval


def interval(low: float, estimate: float, high: float, **changes: object) -> Interval:
    table = {"level": 0.95, "method": "t", "unit": "blocks", "num_units": 6, "resamples": 0, "seed": 0, **changes}
    return Interval(estimate, low, high, **table)


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (0.975, "2.5 % less than"),
        (1.25, "25.0 % more than"),
        (1.0, "the same as"),
        (1.0004, "the same as"),
        (0.9994, "0.1 % less than"),
        (2.0, "100.0 % more than"),
    ],
)
def test_a_ratio_is_a_change_in_percent(ratio: float, words: str) -> None:
    assert change(ratio) == words


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.955, 0.962, "95 % interval: 3.8 to 4.5 % less"),
        (1.02, 1.3, "95 % interval: 2.0 to 30.0 % more"),
        (0.9, 1.2, "95 % interval: 10.0 % less to 20.0 % more"),
        (0.95, 1.0, "95 % interval: 0.0 to 5.0 % less"),
        (1.0, 1.05, "95 % interval: 0.0 to 5.0 % more"),
    ],
)
def test_the_smaller_change_of_an_interval_comes_first(low: float, high: float, words: str) -> None:
    assert interval_in_words(interval(low, (low + high) / 2, high)) == words


def test_an_interval_names_its_comparisons_and_its_assumption() -> None:
    assert interval_in_words(interval(0.9, 0.95, 0.98, family=1)).startswith("95 % interval: ")
    assert interval_in_words(interval(0.9, 0.95, 0.98, family=2)).startswith("95 % interval over 2 comparisons: ")
    given = interval(0.9, 0.95, 0.98, method=f"t{GIVEN_COSTS}")
    assert interval_in_words(given).startswith(f"95 % interval{GIVEN_COSTS}: ")


def test_a_sentence_has_both_sides_and_the_interval() -> None:
    sentence = cost_sentence("twelve-slots", "base", interval(0.932, 0.96, 0.989))
    assert sentence == "twelve-slots costs 4.0 % less than base (1.1 to 6.8 % less)"


def test_what_was_simulated_or_emulated_is_never_called_measured() -> None:
    assert source_of("sim") is Source.SIMULATED
    assert source_of("emulator") is Source.EMULATED
    assert {source_of(name) for name in ("rbln", "vllm", "attached")} == {Source.MEASURED}
