"""What a terminal shows of an experiment: a row per condition, costs first and then what its users felt.

No figure is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.analysis.compare.answer import main_answers
from harness.analysis.compare.channels import Comparison
from harness.analysis.compare.ratio import Verdict
from harness.analysis.compare.stopping import SequentialStatus
from harness.analysis.cost.agreement import Agreement
from harness.analysis.reuse_by_wait import HOW_REUSED, ReuseShare
from harness.analysis.serving import HOW_SURE, METRICS, Mean, Percentile, Rate, ServingFigures
from harness.analysis.sessions import HOW_TIMED, SessionFigures
from harness.analysis.stats import GIVEN_COSTS, MIN_BEYOND, Interval, NoInterval
from harness.analysis.summary import ConditionFigures, ExperimentSummary
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import escape_controls
from harness.model.spec import factors_text
from harness.present.report.answers import (
    DASH,
    Channel,
    answers,
    bound_words,
    channels_of,
    count,
    counted_words,
    fixed,
    interval_legend,
    short_ms,
)
from harness.table import Table, interval_ends, to_rich

if TYPE_CHECKING:
    from rich.console import RenderableType

VERDICT_STYLES = {"withheld": "red", "cannot tell": "yellow"}
STOP_COLORS = {Verdict.GO_ON: "cyan", Verdict.INCONCLUSIVE: "yellow", Verdict.WITHHELD: "yellow", Verdict.HIGHER: "red"}
AGREEMENTS = {
    Agreement.NO_CONFLICT: "No conflict: B would have noticed a contradiction as large as the effect",
    Agreement.SILENT: "Silent: the channels could not notice a contradiction as large as the effect",
    Agreement.S_ALONE: "S alone: B holds the steps, so it cannot confirm them",
}
LATE_LEGEND = "Below a figure, \u2265 and \u2264: what it can be, as the client read tokens late"
# (metric, percentile) of the short table.
SHOWN = (("ttft", 0.5), ("ttft", 0.99), ("itl", 0.5), ("itl", 0.99), ("e2e", 0.5), ("e2e", 0.99), ("queue", 0.99))


def answer_lines(summary: ExperimentSummary, question: str = "") -> list[str]:
    """The question and the answer, one sentence for each comparison, as markup for the terminal."""
    from rich.markup import escape

    def bold(name: str) -> str:
        return f"[bold]{escape(name)}[/]"

    first = [f"[dim]{escape(escape_controls(question))}[/]"] if question else []
    return [*first, *(line for one in answers(summary, bold) for line in (one.text, f"  {one.basis}") if line.strip())]


def conditions_table(summary: ExperimentSummary) -> Table:
    """A row per condition: costs in seconds of the run's clock, ratios to the baseline, padding and reuse."""
    unit = "s" if summary.time_scale == 1 else f"model s, \u00d7{summary.time_scale:g}"
    num_invalid = sum(not run.is_valid for run in summary.runs)
    counted = count(len(summary.runs), "run") + (f", {num_invalid} INVALID and not counted" if num_invalid else "")
    channels = channels_of(summary)
    what = f"{' and '.join(channel.meaning for channel in channels)} [{unit}]"
    notes = [
        f"{what[0].upper()}{what[1:]}. {counted_words(summary)}{_legend(summary)}",
        "Reused: returning requests whose prefix was still cached.",
        *([f"{summary.unknowns[0].upper()}{summary.unknowns[1:]}."] if summary.unknowns else []),
        *filter(None, [summary.prices]),
    ]
    headings = [channel.heading for channel in channels]
    columns = (
        *("condition", *headings, *(f"{heading}/base" for heading in headings)),
        *(["channels"] if len(channels) > 1 else []),
        *("steps", "padding", "reused"),
    )
    rows = tuple(_cells(summary, condition, channels) for condition in summary.conditions)
    return Table(f"{summary.title} ({counted})", " ".join(notes), columns, rows, summary.origin)


def _legend(summary: ExperimentSummary) -> str:
    """What the ratios are against, and the marks that stand beside them."""
    baselines: dict[str, list[str]] = {}
    for condition in summary.conditions:
        if condition.comparison is not None:
            baselines.setdefault(condition.baseline, []).append(condition.name)
    if not baselines:
        return ""
    against = " and ".join(f"{name} (for {', '.join(those)})" for name, those in baselines.items())
    if len(baselines) == 1:
        against = next(iter(baselines))
    elif len(baselines) > 2:
        against = "each its own baseline (--format csv names it)"
    compared = [each.comparison for each in summary.conditions if each.comparison is not None]
    main, channels = main_answers(summary.answers).values(), channels_of(summary)
    first = next((each.heading for each in channels if any(each.basis == one.channel for one in main)), "A")
    intervals = [one.interval for one in main if one.interval is not None]
    given = GIVEN_COSTS if any(interval.is_given_costs for interval in intervals) else ""
    verdicts, agreements = {one.verdict for one in main}, {each.agreement for each in compared}
    marks = {
        f"Below {first}/base: {interval_legend(summary)}{given}": bool(intervals),
        "No interval below three replicates": Verdict.TOO_FEW in verdicts,
        "No interval where nothing varied": Verdict.NOTHING_VARIED in verdicts,
        "\u2020: per generated token, as the work differs": not all(each.is_same_work for each in compared),
        f"Withheld: the ratios of {first} and {_asked(compared)} contradict each other": Agreement.DIFFER in agreements,
        f"Cannot tell: {first} does not explain B, or exceeds it": Agreement.CANNOT_TELL in agreements,
        **{words: kind in agreements for kind, words in AGREEMENTS.items()},
    }
    return "".join(f" {words}." for words, is_so in {f"Ratios are against {against}": True, **marks}.items() if is_so)


def _asked(compared: Sequence[Comparison]) -> str:
    """The letters of the channels that withhold an answer: B, or A where S or B answers."""
    differ = [each.asked for each in compared if each.agreement is Agreement.DIFFER]
    return " or ".join(dict.fromkeys(each.bases[1].upper() for each in differ if each is not None))


def status_lines(status: SequentialStatus) -> list[str]:
    """The verdicts of the stopping rule after a block, a line for each comparison, as markup for the terminal."""
    from rich.markup import escape

    lines = [f"[bold]block {status.num_blocks} of at most {status.stop.budget}[/]"]
    width = max((len(looks.condition) for looks in status.comparisons), default=0)
    for looks in status.comparisons:
        colour = STOP_COLORS.get(looks.verdict, "green")
        verdict = f"[{colour}]{looks.verdict.value:<12}[/]"
        lines.append(f"  {looks.condition:<{width}}  {verdict}  {escape(looks.description)}")
    return [*lines, f"  {status.channel_note}"] if status.channel_note else lines


def summary_tables(summary: ExperimentSummary) -> list[Table]:
    """Costs, what users felt, and where several devices made the runs, these."""
    parts = [table for table in (summary.parts, summary.energy) if table is not None]
    return [
        conditions_table(summary),
        *parts,
        serving_table(summary),
        *sessions_tables(summary),
        *summary.device_tables,
    ]


def on_terminal(table: Table, width: int) -> RenderableType:
    """A table of these for a terminal of so many characters."""
    return to_rich(table, width, VERDICT_STYLES)


def for_documents(table: Table) -> Table:
    """The same table with each cell on one line."""
    columns, *rows = (tuple(" ".join(str(cell).split()) for cell in row) for row in (table.columns, *table.rows))
    return replace(table, columns=columns, rows=tuple(rows))


def serving_table(summary: ExperimentSummary) -> Table:
    """What users of each condition felt, a row each: times in ms of the run's clock, rates per second of it."""
    fewest = min((figures.num_requests for figures in summary.serving), default=0)
    few = f"; p99 of {fewest} requests is uncertain: fewer than {MIN_BEYOND} lie beyond it"
    few = few if 0 < fewest < 100 * MIN_BEYOND else ""
    has_slo = any(figures.goodput_per_s is not None for figures in summary.serving)
    metrics = (f"{metric.upper() if metric != 'queue' else metric}\np{q * 100:.0f}" for metric, q in SHOWN)
    columns = ("condition", *metrics, "tokens\n/s", "req.\n/s", *(("good\n/s",) if has_slo else ()))
    rows = [
        (
            figures.condition,
            *(_percentile(figures, metric, q) for metric, q in SHOWN),
            f"{figures.tokens_per_s.mean:,.0f}",
            _rate(figures.requests_per_s),
            *((_rate(figures.goodput_per_s),) if has_slo else ()),
        )
        for figures in summary.serving
    ]
    caption = (
        "TTFT: to the first token; ITL: between tokens; E2E: the whole answer; queue: until the log admits the request"
        f"{f'; of the requests{summary.window}' if summary.window else ''}{few}; all of them: harness table --serving"
    )
    if any("\n" in cell for row in rows for cell in row[1:]):
        caption = f"{caption}. {LATE_LEGEND}"
    return Table(f"Serving figures [ms; per s{_model_time(summary)}]", caption, columns, tuple(rows), summary.origin)


def serving_tables(summary: ExperimentSummary) -> list[Table]:
    """All serving figures, a table per condition: every group of requests, intervals and bounds of a typical run."""
    return [*(_all_of(figures, summary) for figures in summary.serving), *sessions_tables(summary)]


def sessions_tables(summary: ExperimentSummary) -> list[Table]:
    """A row per condition: active times of sessions in s of the run's clock, and sessions within the target per hour.

    Empty where no session finished that began in the window.
    """
    if not summary.sessions:
        return []
    targets = sorted({one.target_s for one in summary.sessions if one.target_s is not None})
    within = ("within\n/h", "share\n[%]") if targets else ()
    rows = [
        (
            one.condition,
            f"{one.num_finished:,}" + (f"+{one.num_others:,}" if one.num_others else ""),
            *(_seconds(percentile) for percentile in one.percentiles),
            *(within_cells(one) if targets else ()),
        )
        for one in summary.sessions
    ]
    others = any(one.num_others for one in summary.sessions)
    notes = [
        f"{HOW_TIMED[0].upper()}{HOW_TIMED[1:]}; with its interval, or why there is none.",
        *(["+: sessions that failed, or whose last answer the client left."] if others else []),
        *(
            [f"Within: finished within {' or '.join(f'{target:g}' for target in targets)} s of active time."]
            if targets
            else []
        ),
    ]
    columns = ("condition", "sessions", *(f"p{one.q * 100:.0f}" for one in summary.sessions[0].percentiles), *within)
    return [Table(f"Sessions [s{_model_time(summary)}]", " ".join(notes), columns, tuple(rows), summary.origin)]


def within_cells(figures: SessionFigures) -> tuple[str, str]:
    """Sessions within the target per hour with their interval, and their share in per cent."""
    rate, share = figures.within_per_h, figures.share_within
    if rate is None or share is None:
        return DASH, DASH
    if rate.none_of:
        return f"0 of {rate.none_of:,}", none_words(rate)
    ends = () if rate.interval is None else interval_ends(rate.interval.low, rate.interval.high, 4, "g")
    return "\n".join((f"{rate.mean:,.4g}", *filter(None, ["\u2013".join(ends)]))), f"{100 * share:.1f}"


def none_words(rate: Rate) -> str:
    """The share that none of so many leave possible: "< 8.3 %"."""
    return f"< {100 * (rate.most_share or 0):.2g} %"


def _seconds(percentile: Percentile) -> str:
    """A percentile in s above its interval, or why there is none."""
    interval, below = percentile.interval, _WHY[percentile.why] if percentile.why else ""
    if interval is not None:
        below = "\u2013".join(interval_ends(interval.low / NS_PER_S, interval.high / NS_PER_S, 4, "g"))
    return f"{percentile.value / NS_PER_S:.4g}\n{below}"


def reuse_by_wait_table(summary: ExperimentSummary) -> Table:
    """A row per condition and bin of waits: shares of returns and of reusable tokens, with intervals."""
    rows = [
        (
            each.condition if not place else "",
            one.range_text,
            f"{one.num_returns:,}",
            *share_cells(one.reused),
            *share_cells(one.kept),
        )
        for each in summary.reuse_by_wait
        for place, one in enumerate(each.bins)
    ]
    caption = " ".join([HOW_REUSED, *([f"{summary.unknowns}."] if summary.unknowns else [])])
    columns = ("condition", "wait [s]", "returns", "reused\n[%]", "interval", "tokens\nkept [%]", "interval")
    if not rows:
        caption = "No session returns in the runs that count: nothing could be reused."
    return Table(f"Reuse by wait{_model_time(summary)}", caption, columns, tuple(rows), summary.origin)


def share_cells(share: ReuseShare | None) -> tuple[str, str]:
    """A share and its interval in per cent, or why there is none."""
    if share is None:
        return DASH, ""
    interval = share.interval
    shown = _WHY[share.why] if share.why else ""
    if interval is not None:
        shown = "\u2013".join(interval_ends(100 * interval.low, 100 * interval.high, 1))
    return f"{100 * share.value:.1f}", shown


def _model_time(summary: ExperimentSummary) -> str:
    return "" if summary.time_scale == 1 else f", model time, \u00d7{summary.time_scale:g}"


def _all_of(figures: ServingFigures, summary: ExperimentSummary) -> Table:
    prompts = f"{figures.input_tokens_per_s.mean:,.1f} of prompts, {figures.total_tokens_per_s.mean:,.1f} in all"
    rates = [f"{figures.tokens_per_s.mean:,.1f} tokens/s ({prompts})", f"{_rate(figures.requests_per_s)} requests/s"]
    if figures.goodput_per_s is not None:
        good = f"{100 * (figures.good_share or 0):.1f} % of the requests"
        rate = f"{_rate(figures.goodput_per_s)}/s"
        if figures.goodput_per_s.none_of:
            rate, good = (
                _rate(figures.goodput_per_s),
                f"{none_words(figures.goodput_per_s)} of the requests, each run one draw",
            )
        rates.append(f"goodput {rate} ({good})")
    by_metric = sorted(figures.distributions, key=lambda each: list(METRICS).index(each.metric))
    rows = (
        (
            METRICS[each.metric] if each.group == "all" else "",
            each.group,
            f"{each.num_values:,}",
            _with_bounds(each.mean),
            *(cell for percentile in each.percentiles for cell in _bounded(percentile)),
        )
        for each in by_metric
    )
    is_late = any(bound_words(one) for each in figures.distributions for one in each.percentiles)
    late = f" {LATE_LEGEND}." if is_late else ""
    return Table(
        f"{figures.condition}: {figures.num_requests} requests{summary.window} in {figures.num_runs} runs; "
        f"{', '.join(rates)} [ms{_model_time(summary)}]",
        f"below a percentile: its interval, or why there is none; \u2264: typical run. {HOW_SURE}{late}",
        ("metric", "requests", "values", "mean", "p50", "\u2264", "p90", "\u2264", "p99", "\u2264"),
        tuple(rows),
        summary.origin,
    )


# Short enough for a cell of the terminal.
_WHY = {
    NoInterval.RUNS: "few runs",
    NoInterval.VALUES: "few values",
    NoInterval.EACH: "few of one kind",
    NoInterval.SPREAD: "no spread",
    NoInterval.RARE: "rare cases",
}


def _bounded(percentile: Percentile) -> tuple[str, str]:
    interval, bound = percentile.interval, percentile.typical_bound
    below = "" if percentile.why is None else _WHY[percentile.why]
    if interval is not None:
        ends = short_ms(interval.low), short_ms(interval.high)
        if ends[0] == ends[1]:
            ends = interval_ends(interval.low / NS_PER_MS, interval.high / NS_PER_MS, 1)
        below = "\u2013".join(ends)
    lines = [short_ms(percentile.value), below, *filter(None, [bound_words(percentile)])]
    return "\n".join(lines), DASH if bound is None else short_ms(bound)


def _percentile(figures: ServingFigures, metric: str, q: float) -> str:
    distribution = figures.of(metric)
    if distribution is None:
        return DASH
    return _with_bounds(distribution.at(q))


def _with_bounds(figure: Percentile | Mean) -> str:
    return "\n".join([short_ms(figure.value), *filter(None, [bound_words(figure)])])


def _rate(rate: Rate | None) -> str:
    if rate is None:
        return DASH
    return f"0 of {rate.none_of:,}" if rate.none_of else f"{rate.mean:.2f}"


def _cells(summary: ExperimentSummary, condition: ConditionFigures, channels: Sequence[Channel]) -> tuple[str, ...]:
    """A row."""
    compared, reuse = condition.comparison, condition.reuse
    is_known = reuse.num_rearrivals and reuse.num_reused is not None
    ratios, verdict = [""] * len(channels), "baseline" if condition.is_baseline else DASH
    if compared is not None:
        mark = "" if compared.is_same_work else "\u2020"
        ratios = [
            _ratio(channel.ratio(summary, condition.name), mark, _shown(summary, condition, channel, place))
            for place, channel in enumerate(channels)
        ]
        verdict = compared.agreement.shown
    return (
        condition.name + (f"\n{factors_text(condition.factors)}" if condition.factors else ""),
        *(fixed(channel.cost_ns(condition), 2, NS_PER_S) for channel in channels),
        *ratios,
        *([verdict] if len(channels) > 1 else []),
        f"{condition.num_steps:,}" if condition.num_steps else DASH,
        DASH if condition.padding.ratio is None else f"{condition.padding.ratio:.4f}",
        reuse.share_text if is_known else DASH,
    )


def _shown(summary: ExperimentSummary, condition: ConditionFigures, channel: Channel, place: int) -> Interval | None:
    """The interval below a ratio: on the channel that answers, the first where none does."""
    main = main_answers(summary.answers).get(condition.name)
    is_main = not place if main is None else channel.basis == main.channel
    return channel.interval(summary, condition.name) if is_main else None


def _ratio(ratio: float | None, mark: str, interval: Interval | None) -> str:
    if ratio is None:
        return DASH
    ends = () if interval is None else interval_ends(interval.low, interval.high, 3)
    return "\n".join((f"{ratio:.4f}{mark}", *filter(None, ["\u2013".join(ends)])))
