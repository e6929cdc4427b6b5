"""The HTML page of a report: words, units, formats and the template; one file that needs no network.

Everything shown comes from a ReportView, in ns; the template's filters write seconds.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemBytecodeCache, PackageLoader, StrictUndefined
from markupsafe import Markup

from harness.analysis.reuse_by_wait import HOW_REUSED
from harness.analysis.serving import HOW_SURE, METRICS
from harness.analysis.stats import Interval, grouped
from harness.analysis.summary import ExperimentSummary
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import SpecError, escape_controls
from harness.html import content_security_policy, style
from harness.kinds import kind_of_run
from harness.measure.records.run import SealedRun
from harness.model.spec import factors_text
from harness.outputs import check_output, write_atomic
from harness.present.report import glossary, plots
from harness.present.report.answers import DASH, answers, bound_words, count, fixed, interval_legend, short_ms
from harness.present.report.latency_plots import lateness_plot, serving_plot, sweep_plot
from harness.present.report.svg import Sheet
from harness.present.report.terminal import for_documents, sessions_tables, share_cells
from harness.present.report.timeline import (
    NUM_REPLICA_LINES,
    Frame,
    TimelineView,
    drawn_lanes,
    step_segments,
    timeline_svg,
)
from harness.present.report.view import LAG_P99, START_SPREAD, FigureCheck, ReportView, Results, gather, routing_of
from harness.processes import parallel_map
from harness.table import cell_text, interval_ends, interval_text, table_of, to_csv

# By the first figure, which also loads fonts: less is drawn sooner, and at less cost, in one process.
MIN_PARALLEL_S = 1.2


def plots_of(view: ReportView) -> dict[str, str]:
    """Each plot as SVG by its name; "" where there is nothing to draw."""
    limits = (_limit(view, LAG_P99), _limit(view, START_SPREAD))
    draw: dict[str, Callable[[Sheet], str]] = {
        "cost": lambda sheet: plots.cost_plot(sheet, view),
        "cost_narrow": lambda sheet: plots.cost_plot(sheet, view, is_narrow=True),
        "steps": lambda sheet: plots.step_histograms(sheet, view),
        "serving": lambda sheet: serving_plot(sheet, view),
        "reuse_by_wait": lambda sheet: plots.reuse_by_wait_plot(sheet, view),
        "reuse_by_wait_narrow": lambda sheet: plots.reuse_by_wait_plot(sheet, view, is_narrow=True),
        "reuse": lambda sheet: plots.reuse_plot(sheet, view),
        "lateness": lambda sheet: lateness_plot(sheet, view, limits),
        "sweep": lambda sheet: sweep_plot(sheet, view),
        "sequence": lambda sheet: plots.sequence_plot(sheet, view.status, view.summary.place_of),
        "devices": lambda sheet: plots.device_plot(sheet, view.summary),
    }
    names = list(draw)
    with Sheet() as sheet:
        drawn = parallel_map(lambda name, _progress: draw[name](sheet), names, min_parallel_s=MIN_PARALLEL_S)
        return {names[place]: plot for place, plot in drawn}


def _limit(view: ReportView, name: str) -> float | None:
    limits = {check.limit for checks in view.checks.values() for check in checks if check.name == name}
    return limits.pop() if len(limits) == 1 else None  # runs held to different limits share no line


def csv_links(summary: ExperimentSummary) -> list[tuple[str, str]]:
    """(name, data address) of the report's tables as CSV, which lie in the page itself."""
    tables = {
        "conditions": summary.to_arrow(),
        "runs": summary.runs_to_arrow(),
        "serving": summary.serving_to_arrow(),
        "reuse-by-wait": summary.reuse_by_wait_to_arrow(),
    }
    texts = {name: to_csv(table_of("", "", table.to_pylist())) for name, table in tables.items() if table.num_rows}
    return [(name, f"data:text/csv;base64,{base64.b64encode(text.encode()).decode()}") for name, text in texts.items()]


# Meaning of each symbol, and its entry of the glossary.
SYMBOLS = {
    "A": ("Modelled device time: the cost models applied to the step log.", "a"),
    "B": ("Time in flight: how long the client had any request open.", "b"),
    "p": ("Padding ratio: share of the positions of all decode steps that held no request.", "padding"),
    "n": ("Requests really in a decode step.", "steps"),
    "b": ("Bucket of a step: the smallest compiled batch size that holds its n requests.", "steps"),
    "h(n)": ("Number of decode steps with n requests.", "steps"),
    "C": ("Tokens of a returning prompt that could be reused, in whole blocks of 128.", "reusable"),
    "W": ("Session seconds that others, ready to decode, waited for prefills; never part of cost.", "waiting"),
    "τ": ("Largest difference of the two ratios that counts as agreement below three replicates.", "agreement"),
}
SHOWN_CASES = 4
# Last words of a column's name that are its unit.
UNITS = {"ns", "ms", "s", "h", "bytes", "tokens", "percent"}
# Where the glossary goes once the words of the page are known.
GLOSSARY_PLACE = "<!-- glossary -->"


def check_report_page(path: Path) -> Path:
    """``path`` again when a report can go there: a new file, an empty one, or an earlier report of the harness."""
    if check_output(path).is_file() and (there := path.read_bytes()):
        is_report = there[:15].lower() == b"<!doctype html>" and b"rbln-harness" in there
        if not is_report:
            hint = "Name another file; `harness report --force` replaces it"
            raise SpecError("is there already and is no report of the harness", where=str(path), hint=hint)
    return path


def write_report(  # noqa: PLR0913  # an option each
    runs: Sequence[SealedRun],
    path: Path,
    *,
    title: str | None = None,
    timelines: Sequence[str] | None = None,
    results: Results | None = None,
    summary: ExperimentSummary | None = None,
) -> Path:
    """Write a self-contained HTML file about an experiment, and return its path; arguments as of ``gather``.

    Raises SpecError when there is nothing to report or a label is unknown, RecordsError when the disk refuses.
    """
    path = check_report_page(Path(path))
    page = render_page(gather(runs, title=title, timelines=timelines, results=results, page=path, summary=summary))
    return write_atomic(path, [page.encode()], what="the report")


def render_page(view: ReportView) -> str:
    """The whole page as HTML text."""
    template = _environment().get_template("page.html.j2")
    script = files("harness.present.report").joinpath("script.js").read_text(encoding="utf-8")
    page = template.render(
        view=view,
        devices=view.device_tables,
        style=style(),
        script=script,
        policy=content_security_policy(script),
        headline=headline(view),
        interval_legend=interval_legend(view.summary),
        answers=answers(view.summary, lambda name: f"<b>{escape(name)}</b>"),
        symbol=symbol,
        linked=linker(view),
        drawn={timeline.label: anchor_of(timeline.label) for timeline in view.timelines},
        has_slo=any(figures.goodput_per_s is not None for figures in view.summary.serving),
        cell=cell_text,
        metrics=METRICS,
        how_sure=HOW_SURE,
        routing=routing_of(view.sealed.values()),
        num_replicas=min(NUM_REPLICA_LINES, max((len(one.servers) for one in view.timelines), default=0)),
        how_reused=HOW_REUSED,
        share_cells=share_cells,
        sessions=list(map(for_documents, sessions_tables(view.summary))),
        csv_links=csv_links(view.summary),
        color_of=view.summary.place_of,
        kind=kind_of_run(view.backend),
        has_factors=any(condition.factors for condition in view.summary.conditions),
        has_audit=any(run.audit.floor_lag_ms for run in view.sealed.values()),
        scale=f"{view.summary.time_scale:g}",
        s=view.seconds_unit,
        ms="model ms" if view.is_scaled else "ms",
        plots=plots_of(view),
        timelines=timeline_groups(view),
        callers=_callers(view),
        has_slots=any(not run.server.is_paged for run in view.sealed.values()),
        causes=list(
            dict.fromkeys(cause for c in view.summary.conditions if c.ceilings for cause in sorted(c.ceilings.lost))
        ),
        check_names=_check_names(view),
        verdict_of=_verdict,
        shown_cases=SHOWN_CASES,
        glossary=GLOSSARY_PLACE,
        section_notes=section_notes(view),
        planned_blocks=next(iter(view.sealed.values())).manifest.requested_experiment.get("replicates"),
    )
    page = glossary.with_first_places(page)
    return escape_controls(page.replace(GLOSSARY_PLACE, glossary.definitions(page)))


def symbol(text: str) -> Markup:
    """A symbol with its meaning on hover and focus, as a link to the glossary; other text, escaped."""
    if text not in SYMBOLS:
        return Markup(escape(text))
    meaning, entry = SYMBOLS[text]
    return Markup(f'<a class="sym" href="#g-{entry}" data-tip="{escape(meaning)}">{escape(text)}</a>')


def section_notes(view: ReportView) -> dict[str, str]:
    """What the heading of a folded section says of its content."""
    severities = Counter(finding.severity for finding in view.findings)
    outcomes = Counter(decision.outcome.value for decision in view.results.decisions)
    broken = sorted({check.name for checks in view.checks.values() for check in checks if check.is_met is False})
    return {
        "findings": ", ".join(
            count(number, severity) if severity == "warning" else f"{number} {severity}"
            for severity, number in severities.items()
        )
        or "none",
        "results": ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items()),
        "harness": f"broken: {', '.join(broken)}" if broken else "",
    }


def headline(view: ReportView) -> list[str]:
    """What was run, where and how much of it counts, as short clauses."""
    num_invalid = len(view.invalid_runs)
    noun = "predicted run" if kind_of_run(view.backend).is_virtual else "run"
    validity = "all valid" if not num_invalid else f"{num_invalid} invalid"
    if repeated := len(view.repeated_runs):
        validity += f", {repeated} repeated"
    replicates = len({run.replicate for run in view.runs})
    planned = f" of {view.num_planned} planned" if len(view.runs) < view.num_planned else ""
    parts = [
        view.summary.experiment,
        f"backend {view.backend or 'not named'}"
        + (" (no accelerator)" if kind_of_run(view.backend).has_device is False else ""),
        f"{count(len(view.summary.conditions), 'condition')} \u00d7 {count(replicates, 'replicate')}",
        f"{count(len(view.runs), noun)}{planned}, {validity}",
    ]
    return [*parts, *filter(None, [view.time_note, view.summary.served.rstrip("."), view.summary.declared])]


def timeline_groups(view: ReportView) -> list[list[dict[str, Any]]]:
    """Timelines by condition, the one that is shown first leading each group."""
    groups = grouped(enumerate(view.timelines), lambda each: each[1].condition).values()
    return [[_timeline(view, timeline, index) for index, timeline in group] for group in groups]


def anchor_of(label: str) -> str:
    """The id of a run's timeline; its label "condition/replicate" without the slash."""
    return f"timeline-{label.replace('/', '-')}"


def linker(view: ReportView) -> Callable[[str], Markup]:
    """Turns text into HTML in which the labels of drawn runs lead to their timelines."""
    drawn = sorted((escape(timeline.label) for timeline in view.timelines), key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, drawn))})(?![\w/-])") if drawn else None

    def linked(text: str) -> Markup:
        escaped = escape(text)
        if pattern is None:
            return Markup(escaped)
        return Markup(pattern.sub(lambda label: f'<a href="#{anchor_of(label[1])}">{label[1]}</a>', escaped))

    return linked


def _timeline(view: ReportView, timeline: TimelineView, index: int) -> dict[str, Any]:
    unit = "model s" if view.is_scaled else "s"
    steps = [
        [[round(s.start_s, 4), round(s.end_s, 4), s.n, s.b] for s in step_segments(one)] for one in timeline.servers
    ]
    bars = [
        [bar.session, round(bar.sent_s, 4), round(bar.done_s, 4)]
        for bar in timeline.bars
        if bar.sent_s is not None and bar.done_s is not None
    ]
    resting = f"{timeline.num_sessions} sessions, {len(timeline.bars)} requests, {timeline.end_s:.1f} {unit}"
    if view.is_scaled:
        resting += f" (\u00d7{view.summary.time_scale:g})"
    lanes = drawn_lanes(timeline, len(view.timelines))
    if timeline.num_sessions > lanes:
        resting += f"; the first {lanes} sessions are drawn"
    if len(timeline.servers) > 1:
        resting += f"; {len(timeline.servers)} replicas, each with its line below the requests that it served"
    if not any(steps):
        resting += "; the log carries no usable step times, so n and bucket are not drawn"
    # Runs under one treatment share a time axis, so that their lengths compare by eye.
    treatment = {condition.name: condition.treatment for condition in view.summary.conditions}
    mine = treatment.get(timeline.condition)
    end_s = max(other.end_s for other in view.timelines if treatment.get(other.condition) == mine)
    frame = Frame(f"tl{index}", view.seconds_unit, end_s, view.buckets, lanes)
    return {
        "svg": timeline_svg(timeline, frame),
        "json": json.dumps({"unit": unit, "steps": steps, "bars": bars}, separators=(",", ":")),
        "anchor": anchor_of(timeline.label),
        "condition": timeline.condition,
        "replicate": timeline.label.rpartition("/")[2],
        "resting": resting,
    }


def _callers(view: ReportView) -> list[str]:
    callers = {caller for condition in view.summary.conditions for caller in condition.evictions or ()}
    order = {"request": 0, "dummy": 1, "preempt": 2}
    return sorted(callers, key=lambda caller: (order.get(caller, 3), caller))


def _check_names(view: ReportView) -> list[dict[str, str]]:
    """Columns of the harness table, in order of first appearance; checks no run has a value for are left out."""
    columns: dict[str, dict[str, str]] = {}
    for checks in view.checks.values():
        for check in checks:
            if check.value is None and check.limit is None:
                continue
            limit = "" if check.limit is None else f"\u2264 {check.limit:g}"
            columns.setdefault(check.name, {"name": check.name, "unit": check.unit, "limit": limit})
    return list(columns.values())


def _verdict(checks: Iterable[FigureCheck]) -> str:
    broken = [check.name for check in checks if check.is_met is False]
    if broken:
        return f'<span class="bad">broken: {escape(", ".join(broken))}</span>'
    held = any(check.is_met for check in checks)
    return '<span class="yes">met</span>' if held else '<span class="dim">none set</span>'


def _words(column: str) -> str:
    """A column's name as a heading: its words, and its unit in brackets."""
    name, _, unit = column.rpartition("_")
    return f"{name} [{unit}]".replace("_", " ") if name and unit in UNITS else column.replace("_", " ")


def _check_value(check: FigureCheck | None) -> str:
    if check is None or check.value is None:
        return DASH
    return f"{check.value:,.0f}" if check.unit == "" else f"{check.value:.3f}"


def _share(part: int | None, whole: int | None) -> str:
    return DASH if not whole or part is None else f"{part:,} of {whole:,}"


def _interval(shown: Interval) -> str:
    return interval_text(shown.low, shown.high, 3, "\u2013")


def _ms_interval(shown: Interval) -> str:
    """As ``short_ms`` writes each end."""
    low, high = shown.low / NS_PER_MS, shown.high / NS_PER_MS
    return "\u2013".join(interval_ends(low, high, int(low < 1000)))


@lru_cache
def _environment() -> Environment:
    kept = Path(__file__).parent / "__pycache__"  # making code of the template is a twentieth of a report's time
    cache = FileSystemBytecodeCache(str(kept)) if os.access(kept, os.W_OK) and not sys.dont_write_bytecode else None
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.loader, environment.bytecode_cache = PackageLoader("harness.present.report", ""), cache
    filters: dict[str, Callable[..., str]] = {
        "fixed": fixed,
        "whole": partial(fixed, decimals=0),
        "share": _share,
        "factors": factors_text,
        "interval": _interval,
        "words": _words,
        "seconds": partial(fixed, decimals=3, unit=NS_PER_S),
        "milliseconds": partial(fixed, decimals=3, unit=NS_PER_MS),
        "check_value": _check_value,
        "ms": short_ms,
        "ms_interval": _ms_interval,
        "bounds": bound_words,
    }
    environment.filters.update(filters)
    return environment
