"""The answer of an experiment: for each comparison a sentence with its size, interval and verdict, then its basis.

The terminal and the page show the same sentences. No figure is computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from harness.analysis import RunFigures
from harness.analysis.compare.answer import (
    asked_in_words,
    change,
    change_alone,
    ends_in_words,
    interval_in_words,
    level_in_words,
    main_answers,
    source_of,
)
from harness.analysis.compare.channels import BASIS_NAMES, ChannelRatio, Comparison
from harness.analysis.compare.ratio import Verdict
from harness.analysis.compare.stopping import B_CANNOT_TELL
from harness.analysis.cost.agreement import MAX_EXCESS, MAX_TAU, Agreement, Cause
from harness.analysis.cost.step_parts import StepParts
from harness.analysis.figures import figure_at
from harness.analysis.serving import Mean, Percentile
from harness.analysis.stats import Interval
from harness.analysis.summary import ConditionFigures, ExperimentSummary
from harness.clock import NS_PER_MS, NS_PER_S
from harness.kinds import kind_of_run
from harness.model.spec.sections import Basis
from harness.table import interval_text

DASH = "\u2013"
# A change of padding below this share is not worth a clause.
PADDING_WORTH = 0.005
# Missing runs that are named; the rest is counted.
MAX_MISSING = 6


@dataclass(frozen=True, slots=True)
class ConditionSentence:
    """What is shown of a condition, what that rests on, and the place of the condition."""

    text: str
    basis: str = ""
    place: int = 0


@dataclass(frozen=True, slots=True)
class Channel:
    """One way in which device time is known: modelled, in steps or in flight; of simulated runs all are one."""

    heading: str
    meaning: str
    basis: Basis

    @property
    def is_a(self) -> bool:
        return self.basis == "a"

    def cost_ns(self, row: RunFigures | ConditionFigures) -> int | None:
        return row.cost_ns(self.basis)

    def figures(self, comparison: Comparison | None) -> ChannelRatio | None:
        """The comparison on this channel; None where nothing is compared on it."""
        return None if comparison is None else comparison.on(self.basis)

    def ratio(self, summary: ExperimentSummary, condition: str) -> float | None:
        return figure_at(summary.answer_on(condition, self.basis), "ratio")

    def interval(self, summary: ExperimentSummary, condition: str) -> Interval | None:
        return figure_at(summary.answer_on(condition, self.basis), "interval")

    def ratio_of(self, condition: ConditionFigures, replicate: int) -> float | None:
        """The ratio of one replicate; None where the baseline has no valid run of it."""
        comparison, figures = condition.comparison, self.figures(condition.comparison)
        if comparison is None or figures is None:
            return None
        found = dict(zip(comparison.replicates, figures.of_blocks, strict=True)).get(replicate)
        return None if found is None else found.ratio


def channels_of(summary: ExperimentSummary) -> tuple[Channel, ...]:
    """The channels that these runs have: one where they are simulated, or where no step is known."""
    if kind_of_run(summary.backend).is_virtual:
        return (Channel("cost", "cost: simulated device time", "a"),)
    is_there = {
        Channel("A", "A: modelled device time", "a"): any(run.a is not None for run in summary.runs),
        Channel("S", "S: time in steps", "s"): any(run.parts is not None for run in summary.runs),
        Channel("B", "B: time in flight", "b"): True,
    }
    return tuple(channel for channel, is_known in is_there.items() if is_known)


def fixed(value: float | None, decimals: int, unit: int = 1) -> str:
    """A number in a unit, with so many decimals and a true minus; a dash for None."""
    return DASH if value is None else f"{value / unit:,.{decimals}f}".replace("-", "\u2212")


def short_ms(duration_ns: float | None) -> str:
    """Milliseconds with a decimal, from 1,000 on without."""
    return fixed(duration_ns, int(duration_ns is None or duration_ns < 1000 * NS_PER_MS), NS_PER_MS)


def bound_words(figure: Percentile | Mean) -> str:
    """What such a figure can be, as its tokens were read late, in ms: its least and its most; "" where none shows."""
    ends = {"\u2265": figure.at_least, "\u2264": figure.at_most}
    shown = short_ms(figure.value)
    return " ".join(
        f"{sign}{short_ms(end)}"
        for sign, end in ends.items()
        if end is not None and (short_ms(end) != shown or end == figure.value)
    )


def count(number: int, noun: str) -> str:
    """A number with its noun in the right form: 1 run, 2 runs."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def answers(summary: ExperimentSummary, mark: Callable[[str], str]) -> list[ConditionSentence]:
    """The answer in plain words: an overload first; what each compared condition costs, or why that is not known.

    A sentence about a comparison has result, interval and verdict; its basis has the runs, the interval's level and
    assumption, what the channels say of each other, and doubts.

    mark: how a condition's name is written; everything else in a sentence is plain text without markup.
    """
    is_compared = any(condition.is_compared for condition in summary.conditions)
    say = _paired_sentence if is_compared else _unpaired_sentence
    overloaded = _overloaded(summary, mark)
    first = [ConditionSentence(overloaded, place=summary.place_of[next(iter(summary.overloads))])] if overloaded else []
    return first + [
        replace(say(summary, condition, mark), place=place)
        for place, condition in enumerate(summary.conditions)
        if condition.is_compared or not is_compared
    ]


def _overloaded(summary: ExperimentSummary, mark: Callable[[str], str]) -> str:
    """That sessions ask for more than their servers can do, before anything else; empty where none do."""
    if not summary.overloads:
        return ""
    factors = ", ".join(f"{factor:.1f} times what {mark(name)} can do" for name, factor in summary.overloads.items())
    return (
        f"Overloaded: until the last request arrives, the sessions ask for {factors}. Queues grow; what follows is of "
        "servers that cannot keep up."
    )


def _paired_sentence(
    summary: ExperimentSummary, condition: ConditionFigures, mark: Callable[[str], str]
) -> ConditionSentence:
    this, other = mark(condition.name), mark(condition.baseline)
    answer = main_answers(summary.answers).get(condition.name)
    if answer is None:
        return ConditionSentence(f"{this} cannot be compared with {other}: no replicate has a valid run of both.")
    comparison, interval = answer.comparison, answer.interval
    other_work = "" if comparison.is_same_work else f"{_other_work(comparison)}. "
    if comparison.agreement.is_missing:
        sentence = _not_said(comparison, this, other, summary.given_costs)
        return replace(sentence, basis=f"{other_work}{sentence.basis} {answer.basis}.")
    lead = "Predicted: " if comparison.is_predicted else ""
    work = " per generated token" if other_work else ""
    within = "" if interval is None else f" ({ends_in_words(interval)})"
    level = "" if interval is None else level_in_words(interval)
    rest = "; ".join(filter(None, (level, asked_in_words(comparison), answer.result.note, answer.doubt)))
    others = "".join(f"{changed}. " for changed in _other_changes(summary, condition))
    basis = f"{answer.basis}{f'; {rest}' * bool(rest)}."
    shown = B_CANNOT_TELL if answer.verdict is Verdict.WITHHELD else answer.label
    return ConditionSentence(
        f"{lead}{this} costs {change(answer.ratio)} {other}{work}{within}: {shown}.",
        f"{basis} {others}{other_work}{_never_measured(comparison.cause)}".rstrip(),
    )


def _never_measured(cause: Cause | None) -> str:
    """The sizes that tell the sides apart and whose f no measurement gave: "f(6) was never measured. "."""
    sizes = [size for size in cause.sizes if size in cause.unmeasured] if cause is not None else []
    if not sizes:
        return ""
    named = ", ".join(f"f({size})" for size in sizes)
    return f"{named} {'was' if len(sizes) == 1 else 'were'} never measured. "


def _not_said(comparison: Comparison, this: str, other: str, given_costs: str) -> ConditionSentence:
    """Why a comparison with both channels has no answer: both figures, and which costs are the likely reason."""
    channels = comparison.asked
    assert channels is not None, "an answer is withheld for what both channels say"
    (name, letter), (other_name, other_letter) = ((BASIS_NAMES[basis], basis.upper()) for basis in channels.bases)
    pair = ((letter, channels.answers), (other_letter, channels.asked))
    within = "; ".join(f"{one}: {interval_in_words(seen.interval)}" for one, seen in pair if seen.interval is not None)
    within += ". " if within else ""
    named = ((name, channels.answers), (other_name, channels.asked))
    figures = (f"{one} {change_alone(seen.ratio)}" for one, seen in named)
    lead = "Withheld" if comparison.agreement is Agreement.DIFFER else "Cannot tell"
    said = f"{lead}: {this} against {other}: {', '.join(figures)}."
    if comparison.agreement is Agreement.DIFFER:
        gap = channels.gap
        apart = "they contradict each other"
        if gap is None:
            apart = f"they differ by {channels.difference:.4f}, more than \u03c4 = {channels.tau:.4f}"
        elif not channels.are_opposed:
            apart = (
                f"{letter} / {other_letter} = {gap.estimate:.4f} ({100 * gap.level:g} % interval: "
                f"{interval_text(gap.low, gap.high)}), which is more than {channels.tolerance:.4f} apart"
            )
        return ConditionSentence(said, f"{within}{apart[0].upper()}{apart[1:]}.{_cause(comparison.cause)}")
    if given_costs:
        # The costs were chosen by whoever asked, so that they are the first thing to doubt.
        share = f"{abs(channels.residual_share):.4f} of B apart in the baseline's own runs"
        why = (
            f"The costs of {given_costs} (--costs) do not price these runs: {letter} and B lie {share}. They are of "
            "another device, model or stack; name those of this server, or leave --costs out."
        )
        return ConditionSentence(said, f"{within}{why}")
    if channels.is_overpriced:
        why = f"{letter} exceeds B by more than {MAX_EXCESS:g} of B and its noise, which no device time can"
    else:
        why = (
            f"In the baseline's own runs {letter} and B lie {channels.residual_share:.4f} of B apart, above "
            f"{MAX_TAU:g}, so that agreement would mean nothing"
        )
    return ConditionSentence(said, f"{within}{why}.{_cause(comparison.cause)}")


def _cause(cause: Cause | None) -> str:
    """Which costs tell the two sides apart, and from which fit they are; empty where nothing does."""
    if cause is None or not (cause.sizes or cause.has_prefill):
        return ""
    sizes = [f"{size} (not measured)" if size in cause.unmeasured else str(size) for size in cause.sizes]
    parts = [f"decode steps of size {', '.join(sizes)}"] if sizes else []
    parts += ["prefills"] if cause.has_prefill else []
    models = "; ".join(f"{name}: {source}" for name, source in cause.models)
    return f" Likely cause: the costs of {' and '.join(parts)} ({models})."


def _other_work(comparison: Comparison) -> str:
    this, base = comparison.work, comparison.baseline_work
    return (
        f"Other work: {this.num_requests:,} requests and {this.generated_tokens:,} generated tokens against "
        f"{base.num_requests:,} and {base.generated_tokens:,}; per request the ratio is "
        f"{comparison.main.request_ratio:.4f}"
    )


def _other_changes(summary: ExperimentSummary, condition: ConditionFigures) -> list[str]:
    """Padding and reuse over the replicates of the comparison, where they changed."""
    assert condition.comparison is not None, "only comparisons have changes"
    shown = condition.comparison.replicates
    this, base = (each.over(shown) for each in (condition, summary.condition(condition.baseline)))
    changes: list[str] = []
    before, after = base.padding.ratio, this.padding.ratio
    if before is not None and after is not None and abs(after - before) >= PADDING_WORTH:
        changes.append(f"Padding {100 * before:.1f} % \u2192 {100 * after:.1f} %")
    had, has = base.reuse.num_reused, this.reuse.num_reused
    if had is not None and has is not None and had != has:
        changes.append(f"Reused re-arrivals {base.reuse.share_text} \u2192 {this.reuse.share_text}")
    return changes


def counted_words(summary: ExperimentSummary) -> str:
    """Which runs the sums of a table count, and what is missing; one or two sentences."""
    common, seen = summary.replicates, sorted({run.replicate for run in summary.runs})
    valid = {(run.condition, run.replicate) for run in summary.runs if run.is_valid}
    # Without these a replicate of another condition stands alone.
    missing = [f"{each.name}/{k}" for k in seen for each in summary.conditions if (each.name, k) not in valid]
    plan = f" {summary.one_plan.capitalize()}." if summary.one_plan else ""
    if not missing:
        return f"Costs and counts are sums over {count(len(common), 'replicate')}.{plan}"
    more = f" and {len(missing) - MAX_MISSING} more" if missing[MAX_MISSING:] else ""
    named = ", ".join(missing[:MAX_MISSING]) + more
    if not common:
        return f"No replicate has a valid run of every condition, so sums are not shown. Missing or INVALID: {named}."
    which = f"{'replicates' if len(common) > 1 else 'replicate'} {', '.join(map(str, common))}"
    return f"Costs and counts are sums over {which}, which every condition has. Missing or INVALID: {named}.{plan}"


def interval_legend(summary: ExperimentSummary) -> str:
    """What the interval below a ratio is: its 95 % interval over 2 comparisons."""
    results = [answer.result for answer in summary.answers]
    family = max((result.family for result in results), default=1)
    words = "its 95 % interval" + (f" over {family} comparisons" if family > 1 else "")
    if summary.status is not None:
        words += ", valid at every look of the stopping rule"
    return words + (", over the machine's noise alone" if summary.one_plan else "")


def _unpaired_sentence(
    summary: ExperimentSummary, condition: ConditionFigures, mark: Callable[[str], str]
) -> ConditionSentence:
    """What a condition costs that is compared with none, and what its users felt."""
    name, unit = mark(condition.name), "model s" if summary.time_scale != 1 else "s"
    runs = f"{count(len(condition.counted), 'valid run')}, {summary.one_plan or source_of(summary.backend).value}"
    if not condition.valid_runs:
        return ConditionSentence(f"{name} has no valid run, so its cost is not known.")
    if condition.b_ns is None:
        return ConditionSentence(
            f"{name} has no valid run of a replicate that every condition has, so its cost is not shown."
        )
    felt = _felt(summary, condition)
    in_flight = f"{fixed(condition.b_ns, 3, NS_PER_S)} {unit}"
    if condition.a_ns is None:
        return ConditionSentence(f"{name} kept requests in flight for {in_flight} (B).", f"{runs}.{felt}")
    what, apart = "of device time", ""
    if not kind_of_run(summary.backend).is_virtual:
        what = f"of modelled device time (A) and {in_flight} in flight (B)"
        apart = f" {_apart(condition.a_ns, condition.b_ns, condition.parts)}"
    cost = f"{name} costs {fixed(condition.a_ns, 3, NS_PER_S)} {unit} {what}"
    return ConditionSentence(f"{cost}; it has no baseline.", f"{runs}.{apart}{felt}")


def _apart(a_ns: int, b_ns: int, parts: StepParts | None) -> str:
    """That the channels of one condition do not agree, and by which kind of step; empty where they lie near enough."""
    share = (b_ns - a_ns) / b_ns if b_ns else 0.0
    if abs(share) <= MAX_TAU:
        return ""
    apart_ns = {} if parts is None else parts.apart_ns
    most = max(apart_ns, key=lambda name: apart_ns[name] * share, default="")
    named = f"; {most}: {abs(apart_ns[most]) / b_ns:.2f}" if most else ""
    return f"The channels do not agree: A lies {abs(share):.2f} of B {'below' if share > 0 else 'above'} it{named}."


def _felt(summary: ExperimentSummary, condition: ConditionFigures) -> str:
    """What its users felt, in one sentence; empty where nothing was answered."""
    figures = summary.serving_of(condition.name)
    if figures is None:
        return ""
    ms, first = "model ms" if summary.time_scale != 1 else "ms", figures.of("ttft")
    to_first = ""
    if first is not None:
        p50, p99 = (f"{first.at(q).value / NS_PER_MS:,.1f} {ms}" for q in (0.5, 0.99))
        to_first = f" First token after {p50} (median), {p99} (p99)."
    return f"{to_first} {figures.tokens_per_s.mean:,.1f} tokens/s, {figures.requests_per_s.mean:.2f} requests/s."
