"""Decisions on a cost ratio against a margin: equivalence, superiority, and the verdict of a declared stopping rule.

Where the experiment was checked while it ran, the interval of its sequence decides, never a fixed-n interval.
Pure functions.
Definitions: docs/planning-method.md, "Equivalence" and "Superiority".
"""

from __future__ import annotations

import math

from harness.analysis.decisions.answer import cost_sentence
from harness.analysis.decisions.decide import Decision, Outcome, withheld
from harness.analysis.planning.stopping import LogRatios, SequentialStatus
from harness.analysis.stats import Estimate, Interval, of_blocks, t_tail
from harness.spec.rules import EquivalenceRule, SuperiorityRule

STOPPING = "stop"


def one_sided_p(distance: float, standard_error: float, degrees: int) -> float:
    """p of the one-sided t test that a mean, which lies ``distance`` within a limit, lies at or beyond it."""
    if standard_error == 0:
        return 0.0 if distance > 0 else 1.0
    tail = t_tail(distance / standard_error, degrees) / 2
    return tail if distance > 0 else 1 - tail


def tost_p(mean: float, standard_error: float, degrees: int, log_margin: float) -> float:
    """The larger p of the two one-sided t tests that a mean lies at or beyond either margin.

    Source: Schuirmann (1987), A comparison of the two one-sided tests procedure.
    """
    return one_sided_p(log_margin - abs(mean), standard_error, degrees)


def cheaper_p(estimate: Estimate, limit: float) -> float:
    """One-sided p of "the ratio is at least ``limit``", from the estimate of its log: a paired t test."""
    return one_sided_p(math.log(limit) - estimate.mean, estimate.error, estimate.degrees)


def decide_equivalence(rule: EquivalenceRule, ratios: LogRatios, looked: SequentialStatus | None = None) -> Decision:
    """PASS where the cost ratio is shown to lie within the margin, FAIL where it is not.

    looked: the experiment under its stopping rule, if it declared one, whose interval then decides.
    """
    tested = _tested(rule, ratios, looked)
    if isinstance(tested, Decision):
        return tested
    interval, estimate = tested
    limit = math.log1p(rule.margin)
    p = None if estimate is None else tost_p(estimate.mean, estimate.error, estimate.degrees, limit)
    least, most = math.exp(-limit), math.exp(limit)
    is_equivalent = least < interval.low and interval.high < most
    is_different = interval.low >= most or interval.high <= least
    method = "two one-sided t tests" if p is not None else interval.method
    return Decision(
        rule.name,
        f"{ratios.condition} vs {ratios.baseline}",
        Outcome.of(is_equivalent),
        f"cost ratio {interval.estimate:.4f} [{interval.low:.4f}, {interval.high:.4f}], margin {least:.4f} to "
        f"{most:.4f}, {_basis(ratios, rule)}, {method}" + ("" if p is None else f", p = {p:.2g}"),
        label="EQUIVALENT" if is_equivalent else "DIFFERENT" if is_different else "NOT SHOWN",
        numbers=_numbers(rule, ratios, interval) | {"p": p},
        intervals={"ratio": interval},
        sentence=cost_sentence(ratios.condition, ratios.baseline, interval),
    )


def decide_superiority(rule: SuperiorityRule, ratios: LogRatios, looked: SequentialStatus | None = None) -> Decision:
    """PASS where the cost ratio is shown to lie below 1 - margin, FAIL where it is not.

    looked: the experiment under its stopping rule, if it declared one, whose interval then decides.
    """
    tested = _tested(rule, ratios, looked)
    if isinstance(tested, Decision):
        return tested
    interval, estimate = tested
    p = None if estimate is None else cheaper_p(estimate, rule.limit)
    is_cheaper = interval.high < rule.limit if p is None else p < rule.alpha
    by = f" by at least {100 * rule.margin:g} %" if rule.margin else ""
    shown = "" if is_cheaper else "not "
    method = interval.method if p is None else f"one-sided p = {p:.2g} against a ratio of {rule.limit:g}"
    return Decision(
        rule.name,
        f"{ratios.condition} vs {ratios.baseline}",
        Outcome.of(is_cheaper),
        f"{shown}shown to be cheaper{by}: cost ratio {interval.estimate:.4f}, {_basis(ratios, rule)}, {method}",
        label="CHEAPER" if is_cheaper else "DEARER" if interval.low > 1 else "NOT SHOWN",
        numbers=_numbers(rule, ratios, interval) | {"limit": rule.limit, "p": p},
        intervals={"ratio": interval},
        sentence=cost_sentence(ratios.condition, ratios.baseline, interval),
    )


def _tested(
    rule: EquivalenceRule | SuperiorityRule, ratios: LogRatios, looked: SequentialStatus | None
) -> tuple[Interval, Estimate | None] | Decision:
    """The ratio's interval and the estimate to test, None of a declared sequence; WITHHELD where there is no interval.

    The interval has level 1 - 2 alpha, so that it says the same as a one-sided test at alpha.
    """
    subject = f"{ratios.condition} vs {ratios.baseline}"
    if looked is None:
        estimate = of_blocks(ratios.values) if ratios.devices is None else ratios.devices.estimate
        if estimate is None:
            few = f"{len(ratios.values)} blocks are too few for an interval over their devices"
            return withheld(rule.name, subject, few)
        return estimate.interval(level=1 - 2 * rule.alpha), estimate
    looks = looked.of(ratios.condition)
    # A sequence at alpha has two sides; the equivalence rule was defined with the whole of it on each.
    alpha = 2 * rule.alpha if isinstance(rule, SuperiorityRule) else rule.alpha
    if looked.stop.channel != rule.channel or looked.stop.alpha > alpha:
        return withheld(rule.name, subject, f"its runs were checked while they ran by another rule ({looked.stop})")
    last = looks.last
    if last is None or math.isnan(last.mean) or math.isinf(last.half_width):
        return withheld(rule.name, subject, f"no look of its stopping rule has an interval yet ({looks.description})")
    mean, low, high = (math.exp(value) for value in (last.mean, last.low, last.high))
    method = "interval of the declared sequence"
    return Interval(mean, low, high, 1 - looked.stop.alpha, method, "blocks", last.num_blocks, 0, 0), None


def _basis(ratios: LogRatios, rule: EquivalenceRule | SuperiorityRule) -> str:
    """How many blocks the ratio stands on, and on which channel."""
    num = len(ratios.values)
    blocks = f"{num} block{'s' * (num != 1)}"
    if ratios.devices is not None and ratios.devices.estimate is not None:
        blocks += f" on {ratios.devices.estimate.num_units} {ratios.devices.estimate.unit}"
    names = {"a": "modelled device time (A)", "b": "time in flight (B)"}
    if ratios.channel == rule.channel:
        return f"{blocks}, {names[ratios.channel]}"
    return (
        f"{blocks}, {names['b']}, as {names['a']} is not there (no step log, unknown reuse, or no costs of this server)"
    )


def _numbers(
    rule: EquivalenceRule | SuperiorityRule, ratios: LogRatios, interval: Interval
) -> dict[str, float | int | str | None]:
    return {
        "ratio": interval.estimate,
        "margin": rule.margin,
        "alpha": rule.alpha,
        "num_blocks": len(ratios.values),
        "channel": ratios.channel,
    }


def decide_stopped(status: SequentialStatus) -> list[Decision]:
    """The verdict of the stopping rule on every comparison: PASS once it has an answer, else WITHHELD."""
    note = f"; {status.channel_note}" if status.channel_note else ""
    return [
        Decision(
            STOPPING,
            f"{looks.condition} vs {looks.baseline}",
            Outcome.PASS if looks.verdict.is_answer else Outcome.WITHHELD,
            f"{looks.description}; declared: {status.stop}{note}",
            label=looks.verdict.value.upper(),
            numbers={"num_blocks": looks.num_blocks, "blocks_left": looks.blocks_left, "channel": looks.channel},
        )
        for looks in status.comparisons
    ]
