"""Decisions: a rule applied to numbers gives PASS, FAIL, WITHHELD or NOT SUBJECT, with every number that was used.

Pure functions; the limits come from the rule, the numbers from sealed valid runs. A precondition that does not hold
withholds, it never fails. Where the experiment was checked while it ran, the interval of its sequence decides, never a
fixed-n interval.
Definitions: docs/reference/method-comparisons.md, "Decisions"; docs/reference/method-planning.md, "Equivalence" and
"Superiority".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, get_args

from harness.analysis import stats
from harness.analysis.compare.answer import ChannelWords, cost_sentence, level_in_words, why_no_interval
from harness.analysis.compare.channels import BASIS_NAMES
from harness.analysis.compare.rare import shape_in_words, unseen_in_words
from harness.analysis.compare.stopping import ComparedBlocks, SequentialStatus
from harness.analysis.cost.reconstruct import ROUNDING, ChannelAgreement, ToleranceRule, agreement_tolerance
from harness.model.spec.rules import CostRule, EquivalenceRule, SuperiorityRule
from harness.table import interval_text

# Source: docs/evidence/error-rates.md, "Planning".
FALSE_SUPERIORITY = "simulated, .031 of equal conditions pass at alpha .025"
Number = float | int | str | bool | None
MarginRule = EquivalenceRule | SuperiorityRule


class Outcome(str, Enum):
    """What a rule can say."""

    PASS = "PASS"
    FAIL = "FAIL"
    WITHHELD = "WITHHELD"
    NOT_SUBJECT = "NOT SUBJECT"

    @classmethod
    def of(cls, is_met: bool) -> Outcome:
        """PASS or FAIL."""
        return cls.PASS if is_met else cls.FAIL


@dataclass(frozen=True, slots=True)
class Decision:
    """One application of a rule. label: the rule's own word (WITHIN, SATURATED ...); reason: one line.

    numbers: everything that was used, by name, times in seconds. would_be: what the rule would have said of something
    that is not subject to it. intervals: with method, unit and seed. sentence: the answer in words, without its
    outcome. num_blocks: replicates that it was applied to; None where that was not counted.
    """

    rule: str
    subject: str
    outcome: Outcome
    reason: str
    label: str = ""
    numbers: Mapping[str, Number] = field(default_factory=dict[str, Number])
    intervals: Mapping[str, stats.Interval] = field(default_factory=dict[str, stats.Interval])
    would_be: Outcome | None = None
    sentence: str = ""
    num_blocks: int | None = None

    @property
    def answer(self) -> str:
        """The sentence with its verdict: "Yes: twelve-slots costs 4.0 % less than base (...): PASS"; "" without one."""
        would_be = f" (would be {self.would_be.value})" if self.would_be is not None else ""
        return f"{self.sentence}: {self.outcome.value}{would_be}" if self.sentence else ""

    def not_subject(self, why: str) -> Decision:
        """The same computation, without the standing of a decision."""
        return replace(self, outcome=Outcome.NOT_SUBJECT, would_be=self.outcome, reason=f"{why}; {self.reason}")


def withheld(rule: str, subject: str, reason: str, **numbers: Number) -> Decision:
    """A decision that cannot be made."""
    return Decision(rule, subject, Outcome.WITHHELD, reason, numbers=numbers)


def as_asked(decision: Decision, asked: ChannelWords) -> Decision:
    """The decision with what the other channel says of it; WITHHELD where the answer of the same runs is."""
    if asked.apart and decision.outcome is not Outcome.WITHHELD:
        reason = f"{asked.apart}; {decision.reason}"
        return replace(decision, outcome=Outcome.WITHHELD, reason=reason, label="", sentence="")
    has_more = asked.reason and not asked.apart and decision.outcome is Outcome.PASS
    return replace(decision, reason=f"{decision.reason}; {asked.reason}") if has_more else decision


class Costs(NamedTuple):
    """Sums over the same replicates, seconds: both channels of a condition and of its baseline; predictions of both.

    predicted_interval: of the predicted ratio over its draws; None where nothing was drawn.
    """

    a_s: float
    b_s: float
    baseline_a_s: float
    baseline_b_s: float
    predicted_s: float
    baseline_predicted_s: float
    predicted_interval: stats.Interval | None = None

    @property
    def ratio_a(self) -> float:
        return self.a_s / self.baseline_a_s

    @property
    def ratio_b(self) -> float:
        return self.b_s / self.baseline_b_s

    @property
    def predicted_ratio(self) -> float:
        return self.predicted_s / self.baseline_predicted_s

    def agreement(self, tau0: float, rule: ToleranceRule = "revised") -> ChannelAgreement:
        """Of both channels, by the tolerance of this baseline."""
        tau = agreement_tolerance_s(self.baseline_a_s, self.baseline_b_s, tau0, rule)
        return ChannelAgreement(abs(self.ratio_a - self.ratio_b), tau)


def decide_cost(rule: CostRule, subject: str, costs: Costs) -> Decision:
    """Cost validation: channels agree; |e| <= max_error; prediction and observation on the same side of 1.

    e = R_A - R_hat: positive, the prediction promised too much. Both tolerance rules are always reported.
    """
    ratio_a, predicted = costs.ratio_a, costs.predicted_ratio
    error = ratio_a - predicted
    agreed = {name: costs.agreement(rule.tau0, name) for name in get_args(ToleranceRule)}
    difference = agreed["revised"].difference
    is_same_side = same_side(predicted, ratio_a, rule.equivalence_band)
    numbers: dict[str, Number] = {
        **{name: value for name, value in costs._asdict().items() if name != "predicted_interval"},
        "ratio_a": ratio_a,
        "ratio_b": costs.ratio_b,
        "predicted_ratio": predicted,
        "error": error,
        "max_error": rule.max_error,
        "channel_difference": difference,
        "tau_revised": agreed["revised"].tau,
        "tau_initial": agreed["initial"].tau,
        "is_agreed_revised": agreed["revised"].is_agreed,
        "is_agreed_initial": agreed["initial"].is_agreed,
        "is_same_side": is_same_side,
    }
    intervals = {} if costs.predicted_interval is None else {"predicted_ratio": costs.predicted_interval}
    by_other = "initial" if rule.tolerance == "revised" else "revised"
    tolerances = f"{rule.tolerance} tolerance {agreed[rule.tolerance].tau:.4f}, {by_other} {agreed[by_other].tau:.4f}"
    apart = f"channels differ by {difference:.4f} ({tolerances})"
    problems: list[str] = []
    if abs(error) > rule.max_error + ROUNDING:
        problems.append(f"|e| = {abs(error):.4f} is above {rule.max_error:g}")
    if not is_same_side:
        problems.append(f"predicted {predicted:.4f} and observed {ratio_a:.4f} lie on different sides of 1")
    shown = "; ".join(problems) or f"e = {error:+.4f}, predicted {predicted:.4f}, observed {ratio_a:.4f}"
    outcome, reason = Outcome.of(not problems), f"{shown}; {apart}"
    sentence = of_prediction(subject, f"cost ratio {predicted:.4f}, measured {ratio_a:.4f}", "costs less")
    if not agreed[rule.tolerance].is_agreed:
        outcome, reason, sentence = Outcome.WITHHELD, f"the {apart}", ""
    return Decision(rule.name, subject, outcome, reason, numbers=numbers, intervals=intervals, sentence=sentence)


def of_prediction(subject: str, figures: str, is_better: str) -> str:
    """What a rule about a prediction decides: a PASS of it is no answer to the experiment's question."""
    return f"whether the prediction for {subject} holds ({figures}), not whether it {is_better}"


def agreement_tolerance_s(a_s: float, b_s: float, tau0: float, rule: ToleranceRule = "revised") -> float:
    """tau of a baseline's channels in seconds, as they are printed."""
    return agreement_tolerance(round(a_s * 1e9), round(b_s * 1e9), tau0=tau0, rule=rule)


def same_side(predicted: float, observed: float, band: tuple[float, float]) -> bool:
    """Both below 1, both above 1, or both inside the equivalence band."""
    both_inside = all(band[0] - ROUNDING <= ratio <= band[1] + ROUNDING for ratio in (predicted, observed))
    return both_inside or (predicted - 1) * (observed - 1) > 0


def tost_p(estimate: stats.Estimate, log_margin: float) -> float:
    """The larger p of the two one-sided t tests that a log ratio lies at or beyond either margin.

    Source: Schuirmann (1987), A comparison of the two one-sided tests procedure.
    """
    return max(estimate.p_below(log_margin), 1 - estimate.p_below(-log_margin))


def decide_margin(rule: MarginRule, ratios: ComparedBlocks, status: SequentialStatus | None = None) -> Decision:
    """PASS where the cost ratio is shown to lie within the margin, or below 1 - margin, as the rule asks; else FAIL.

    status: of the experiment under its stopping rule, if it declared one, whose interval then decides.
    """
    subject, tested = f"{ratios.condition} vs {ratios.baseline}", _tested(rule, ratios, status)
    if isinstance(tested, str):
        return withheld(rule.name, subject, "; ".join(filter(None, (tested, ratios.prices))))
    interval, estimate = tested
    if isinstance(rule, EquivalenceRule):
        what, (is_shown, label, reason, of_rule) = "equal", _equivalence(rule, ratios, interval, estimate)
    else:
        what, (is_shown, label, reason, of_rule) = "cheaper", _superiority(rule, ratios, interval, estimate)
    numbers: dict[str, Number] = {
        "ratio": interval.estimate,
        "margin": rule.margin,
        "alpha": rule.alpha,
        "comparisons": ratios.family,
        "num_blocks": len(ratios.values),
        "channel": ratios.channel,
        **of_rule,
    }
    shape = shape_in_words(ratios.blocks, ratios.replicates, is_repeated=ratios.is_repeated)
    word = f"Not shown to be {what}" if label == "NOT SHOWN" else "Yes" if is_shown else "No"
    return Decision(
        rule.name,
        subject,
        Outcome.of(is_shown),
        f"{reason}; {level_in_words(interval)}; {shape}",
        label,
        numbers,
        intervals={"ratio": interval},
        sentence=f"{word}: {cost_sentence(ratios.condition, ratios.baseline, interval)}",
    )


_Shown = tuple[bool, str, str, dict[str, Number]]
"""(whether it is shown, label, reason, numbers of the rule alone)."""


def _equivalence(
    rule: EquivalenceRule, ratios: ComparedBlocks, interval: stats.Interval, estimate: stats.Estimate | None
) -> _Shown:
    limit = math.log1p(rule.margin)
    p = None if estimate is None else tost_p(estimate, limit)
    least, most = math.exp(-limit), math.exp(limit)
    is_equivalent = least < interval.low and interval.high < most
    is_different = interval.low >= most or interval.high <= least
    method = "two one-sided t tests" if p is not None else interval.method
    side = "below" if is_equivalent else "not below"
    tested_at = "" if p is None else f", p = {p:.2g}, {side} {rule.alpha / ratios.family:.3g}"
    ends = interval_text(interval.low, interval.high, between=", ")
    reason = (
        f"cost ratio {interval.estimate:.4f} [{ends}], margin {least:.4f} to "
        f"{most:.4f}, {_basis(ratios, rule)}, {method}{tested_at}"
    )
    label = "EQUIVALENT" if is_equivalent else "DIFFERENT" if is_different else "NOT SHOWN"
    return is_equivalent, label, reason, {"p": p}


def _superiority(
    rule: SuperiorityRule, ratios: ComparedBlocks, interval: stats.Interval, estimate: stats.Estimate | None
) -> _Shown:
    p = None if estimate is None else estimate.p_below(math.log(rule.limit))
    is_cheaper = interval.high < rule.limit if p is None else p < rule.alpha / ratios.family
    by = f" by at least {100 * rule.margin:g} %" if rule.margin else ""
    shown = "" if is_cheaper else "not "
    method = interval.method
    if p is not None:
        side = "below" if is_cheaper else "not below"
        method = f"one-sided p = {p:.2g}, {side} {rule.alpha / ratios.family:.3g}, against a ratio of {rule.limit:g}"
        method += f" ({FALSE_SUPERIORITY})" if is_cheaper else ""
    reason = f"{shown}shown to be cheaper{by}: cost ratio {interval.estimate:.4f}, {_basis(ratios, rule)}, {method}"
    label = "CHEAPER" if is_cheaper else "MORE EXPENSIVE" if interval.low > 1 else "NOT SHOWN"
    return is_cheaper, label, reason, {"limit": rule.limit, "p": p}


def _tested(
    rule: MarginRule, ratios: ComparedBlocks, status: SequentialStatus | None
) -> tuple[stats.Interval, stats.Estimate | None] | str:
    """The ratio's interval and the estimate to test, None of a declared sequence; or, in words, why there is neither.

    The interval has level 1 - 2 alpha, so that it says the same as a one-sided test at alpha. The comparisons that the
    rule decides share alpha.
    """
    num_blocks = len(ratios.values)
    if why_not := why_no_interval(ratios.values, ratios.num_plans):
        return f"{why_not}{_equal_in_words(ratios.values)}"
    if status is None:
        estimate = ratios.estimate
        if estimate is None:
            return f"{num_blocks} blocks are too few for an interval over their devices"
        interval = estimate.interval(level=1 - 2 * rule.alpha, family=ratios.family)
        scatters = f"{num_blocks} blocks are too few: the baseline's own cost scatters too far"
        return scatters if math.isinf(interval.high) else (interval, estimate)
    looks = status.of(ratios.condition)
    # A sequence at alpha has two sides; the equivalence rule was defined with the whole of it on each.
    alpha = 2 * rule.alpha if isinstance(rule, SuperiorityRule) else rule.alpha
    if status.stop.channel != rule.channel or status.stop.alpha > alpha:
        return f"its runs were checked while they ran by another rule ({status.stop})"
    if looks.interval is None:
        return f"no look of its stopping rule has an interval yet ({looks.description})"
    return looks.interval, None


def _equal_in_words(values: Sequence[float]) -> str:
    """What ratios of exactly 1 mean, and what to do: the log ratios of conditions whose difference was never used."""
    if len(values) < 2 or any(abs(value) > stats.NO_SCATTER for value in values):
        return ""
    return (
        ". The ratio is exactly 1: no run used what the conditions differ in (a compiled size, a slot). Ask again with "
        "a workload that does, as with more sessions at once (workload.num_sessions)"
    )


def _basis(ratios: ComparedBlocks, rule: MarginRule) -> str:
    """How many blocks the ratio stands on, and on which channel."""
    num = len(ratios.values)
    blocks = f"{num} block{'s' * (num != 1)}"
    if ratios.devices is not None and ratios.devices.estimate is not None:
        blocks += f" on {ratios.devices.estimate.num_units} {ratios.devices.estimate.unit}"
    blocks += f", {ratios.prices}" if ratios.prices else ""
    if ratios.channel == rule.channel:
        return f"{blocks}, {BASIS_NAMES[ratios.channel]}"
    return f"{blocks}, {BASIS_NAMES[ratios.channel]}, as {BASIS_NAMES[rule.channel]} is not there ({ratios.without})"


def decide_stopped(status: SequentialStatus, asked: Mapping[str, ChannelWords]) -> list[Decision]:
    """The verdict of the stopping rule on every comparison: PASS once it has an answer, else WITHHELD.

    asked: by condition, what the channels of its runs say.
    """
    note = f"; {status.channel_note}" if status.channel_note else ""
    decisions: list[Decision] = []
    for looks in status.comparisons:
        unseen = unseen_in_words(looks.num_seen, is_repeated=looks.is_repeated)
        reasons = (looks.description, unseen, f"declared: {status.stop}{note}")
        decision = Decision(
            "stop",
            f"{looks.condition} vs {looks.baseline}",
            Outcome.PASS if looks.verdict.is_answer else Outcome.WITHHELD,
            "; ".join(filter(None, reasons)),
            label=looks.verdict.label().upper(),
            numbers={"num_blocks": looks.num_blocks, "blocks_left": looks.blocks_left, "channel": looks.channel},
            num_blocks=looks.num_blocks,
        )
        decisions.append(as_asked(decision, asked[looks.condition]))
    return decisions
