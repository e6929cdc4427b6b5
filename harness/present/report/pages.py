"""Pages beside the report: power against blocks, what a calibration gave, and a trace's picture.

Nothing is computed, fitted or measured here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from harness.analysis.calibration.fit import MAX_SHARE
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import RecordsError, SpecError, escape_controls
from harness.html import plain_page
from harness.model.engine import CostModel, load_cost_model
from harness.model.engine.cost import attended_tokens
from harness.model.plan.model import WAIT_KINDS
from harness.outputs import check_output, write_text
from harness.present.report.svg import INK, MUTED, PAGE_WIDTH_IN, Sheet, condition_color
from harness.table import interval_text, markdown_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from harness.analysis.calibration.fit import FitError
    from harness.analysis.stats import Interval
    from harness.judge.planning.needed import Goal, Needed
    from harness.model.traces.recording import Recording, TraceFile
    from harness.runner.calibrate import Calibration

MOST_SHOWN = 120
POWER_POINTS = 24


def write_power_page(path: Path, title: str, needs: Sequence[Needed], goal: Goal, text: str) -> Path:
    """Write the page; text: the table and the lines to paste, as the terminal shows them."""
    path = check_output(path)
    with Sheet() as sheet:
        picture = power_plot(sheet, needs, goal)
    num_together = max(len(need.case.found) for need in needs)
    judged = f"each with alpha / {num_together}" if num_together > 1 else "for Gaussian log ratios"
    caption = f"Probability of the verdict by the number of blocks, {judged}; dotted: what is wanted."
    main = f"<figure>{picture}<figcaption>{caption}</figcaption></figure><pre>{escape(text)}</pre>"
    write_text(path, plain_page(title, main))
    return path


def power_plot(sheet: Sheet, needs: Sequence[Needed], goal: Goal) -> str:
    """Two panels: power to show equivalence when there is no difference, and to show one as large as the margin."""
    figure = sheet.figure(PAGE_WIDTH_IN, 3.4)
    equal, different = figure.subplots(1, 2, sharey=True)
    widest = max((need.proposed or MOST_SHOWN for need in needs), default=MOST_SHOWN)
    last = min(MOST_SHOWN, max(8, round(1.4 * widest)))
    blocks = sorted({round(number) for number in np.geomspace(2, last, num=POWER_POINTS)})
    for place, need in enumerate(needs, 1):
        case = need.case
        curves = (
            (equal, [case.power(n, case.none, "equivalence") for n in blocks]),
            (different, [case.power(n, case.at_margin, "difference") for n in blocks]),
        )
        for axes, curve in curves:
            axes.plot(blocks, curve, color=condition_color(place), label=need.components.condition)
    equal.set_title(f"true ratio 1: shown to be equal within {100 * goal.margin:.1f} %")
    different.set_title(f"true ratio {1 + goal.margin:.3f}: shown to differ")
    for axes in (equal, different):
        axes.axhline(goal.power, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)))
        axes.set(xlabel="blocks", xlim=(0, blocks[-1]), ylim=(0, 1.02))
        axes.grid(visible=True)
        axes.xaxis.get_major_locator().set_params(integer=True)
    equal.set_ylabel("power")
    equal.legend(loc="lower right", labelcolor=INK)
    names = ", ".join(f"{need.components.condition}: {need.proposed or 'more than can be had'}" for need in needs)
    return sheet.render(figure, name="power", label=f"Power against blocks. Blocks proposed: {names}.")


UNITS = {
    "alpha_ms": "alpha, ms",
    "beta_ms_per_request": "beta, ms/request",
    "context_us_per_token": "c, us/token",
    "per_call_ms": "prefill a, ms/call",
    "per_call_us_per_token": "prefill b, us/token/call",
    "eager_ms": "a step without a graph, ms more",
}
CHUNKED_UNITS = UNITS | {
    "per_call_ms": "a step with parts of prompts, ms",
    "per_call_us_per_token": "each token of the parts, us",
    "per_step_eager_ms": "a step of these without a graph, ms more",
    "per_attended_token_ns": "each token that one of these attends to, ns",
}
DOTS_PER_INCH = 120


class Residual(NamedTuple):
    """One point of a fit. what: "n=3 in bucket 4, 512 tokens each" or "q=500"; x: n or q. Times in ms."""

    what: str
    x: float
    measured_ms: float
    fitted_ms: float

    @property
    def residual_ms(self) -> float:
        return self.measured_ms - self.fitted_ms


def coefficients(calibration: Calibration) -> dict[str, Interval]:
    """The interval of every coefficient, by its name for people."""
    names = CHUNKED_UNITS if calibration.is_chunked else UNITS
    return {names.get(name, f"{name}, ms"): interval for name, interval in calibration.intervals.items()}


def decode_residuals(calibration: Calibration, model: CostModel) -> list[Residual]:
    """Every stretch of constant n against the written model, by n and context."""
    residuals: list[Residual] = []
    for point in sorted(calibration.step_points, key=lambda point: (point.num_seqs, point.context_tokens or 0.0)):
        context = 0 if point.context_tokens is None else round(point.context_tokens)
        each = "" if point.context_tokens is None else f", {round(context / point.num_seqs)} tokens each"
        fitted_ms = model.decode_step_ns(point.bucket, point.num_seqs, context) / NS_PER_MS
        what = f"n={point.num_seqs} in bucket {point.bucket}{each}"
        residuals.append(Residual(what, point.num_seqs, point.period_ms, fitted_ms))
    return residuals


def prefill_residuals(calibration: Calibration, model: CostModel) -> list[Residual]:
    """The median time of every prompt length against the written model."""
    by_work: dict[tuple[int, int, bool], list[float]] = {}
    for point in calibration.prefill_points:
        by_work.setdefault(point.work, []).append(point.elapsed_ms)
    residuals: list[Residual] = []
    for (length, attended, is_eager), times in sorted(by_work.items()):
        is_whole = attended in (0, attended_tokens(0, length))
        what = f"q={length}" if is_whole else f"q={length}, {attended:,} tokens attended to"
        fitted_ns = (
            model.chunked_step_ns(0, 0, 0, length, attended) if calibration.is_chunked else model.prefill_ns(length)
        )
        fitted_ns += model.chunk_eager_ns * is_eager
        residuals.append(Residual(what, length, float(np.median(times)), fitted_ns / NS_PER_MS))
    return residuals


def extrapolated(calibration: Calibration, model: CostModel) -> Iterator[str]:
    """What the model gives without having seen it, one line each."""
    filled = model.interpolated_buckets(calibration.buckets)
    if filled:
        yield (
            f"f({', '.join(map(str, filled))}) was not measured: filled in on the line between measured buckets, or "
            "through the two largest"
        )
    low, high = model.fitted_prefill_tokens or (0, 0)
    yield (
        f"steps with fewer than {low} or more than {high} tokens of prompts"
        if calibration.is_chunked
        else f"prefills below {low} or above {high} computed tokens"
    )
    if model.fitted_context_tokens is not None:
        low, high = model.fitted_context_tokens
        yield f"decode steps with a mean sequence length below {low} or above {high} tokens"


def write_calibration_report(calibration: Calibration, cost_file: Path, folder: Path) -> tuple[Path, Path]:
    """Write ``<folder>/<name>.md`` and ``.png`` for a cost-model file; returns both paths.

    Raises RecordsError when they cannot be written.
    """
    model = load_cost_model(cost_file)
    decode, prefill = decode_residuals(calibration, model), prefill_residuals(calibration, model)
    page, plot = (folder / f"{cost_file.stem}{suffix}" for suffix in (".md", ".png"))
    with RecordsError.on_os_error("cannot be written", where=folder):
        folder.mkdir(parents=True, exist_ok=True)
        page.write_text(
            "\n".join(_calibration_page(calibration, model, decode, prefill, plot.name)) + "\n", encoding="utf-8"
        )
        _plot_residuals(decode, prefill, model, plot)
    return page, plot


def _calibration_page(
    calibration: Calibration,
    model: CostModel,
    decode: Sequence[Residual],
    prefill: Sequence[Residual],
    plot: str,
) -> Iterator[str]:
    yield f"# Cost model {model.name}\n"
    measured = f"Measured sizes: {', '.join(map(str, calibration.decode.f_ms))}."
    for note in (f"{calibration.artifact}; {calibration.source}.", measured, *calibration.notes):
        yield f"- {note}"
    yield f"\n![measured and fitted]({plot})\n\n## Coefficients\n"
    yield markdown_rows(
        ("coefficient", "fitted", "interval"), starmap(_coefficient_row, coefficients(calibration).items())
    )
    yield "\n## Errors\n"
    yield markdown_rows(
        ("", "residual rms", "largest", "held-out rms", "held-out largest", "largest share, and where", "good"),
        [
            (what, *_error_cells(error), error.worst_in_words, "yes" if error.is_good else "no")
            for what, error in calibration.errors.items()
        ],
    )
    yield "\nHeld out: each (n, context), or each length, is predicted by a fit without it."
    yield f"Good: the largest share is at most {100 * MAX_SHARE:.0f} %."
    yield "\n## Flagged as extrapolated\n"
    yield from (f"- {line}" for line in extrapolated(calibration, model))
    for title, residuals in (("Decode steps", decode), ("Prefills", prefill)):
        yield f"\n## {title}\n"
        yield markdown_rows(
            ("point", "measured, ms", "fitted, ms", "residual, ms", "share"),
            [
                (
                    point.what,
                    f"{point.measured_ms:.4f}",
                    f"{point.fitted_ms:.4f}",
                    f"{point.residual_ms:+.4f}",
                    f"{100 * point.residual_ms / point.fitted_ms:+.3f} %",
                )
                for point in residuals
            ],
        )


def _coefficient_row(name: str, interval: Interval) -> tuple[str, str, str]:
    how = f"{100 * interval.level:.0f} % {interval.method}; {interval.num_units} {interval.unit}, seed {interval.seed}"
    ends = interval_text(interval.low, interval.high, 5, ", ")
    return name, f"{interval.estimate:.5f}", f"[{ends}] {how}"


def _error_cells(error: FitError) -> list[str]:
    values = (error.rms_ms, error.max_ms, error.held_out_rms_ms, error.held_out_max_ms)
    return ["-" if value is None else f"{value:.4f} ms" for value in values]


def _plot_residuals(decode: Sequence[Residual], prefill: Sequence[Residual], model: CostModel, path: Path) -> None:
    """Measured against fitted above, residuals below; decode left, prefill right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    axes = figure.subplots(2, 2, sharex="col", height_ratios=(2, 1))
    figure.suptitle(f"Cost model {model.name}", x=0.01, ha="left", fontsize=10)
    axes[0, 0].set_title("decode step; one point per n and context", loc="left", fontsize=9)
    axes[0, 1].set_title("prefill; median per length", loc="left", fontsize=9)
    for column, (residuals, label) in enumerate(((decode, "requests in the step, n"), (prefill, "computed tokens, q"))):
        above, below = axes[:, column]
        x = [point.x for point in residuals]
        fitted, measured = [point.fitted_ms for point in residuals], [point.measured_ms for point in residuals]
        above.plot(x, fitted, "_", color="#b5541c", markersize=16, label="fitted")
        above.plot(x, measured, ".", color="#1f4e79", markersize=6, label="measured")
        above.legend(frameon=False, fontsize=8)
        below.axhline(0.0, color="#555555", linewidth=0.8)
        shares = [100 * point.residual_ms / point.fitted_ms for point in residuals]
        below.plot(x, shares, ".", color="#1f4e79", markersize=6)
        below.set_xlabel(label, fontsize=9)
        for panel, unit in ((above, "ms"), (below, "residual, %")):
            panel.set_ylabel(unit, fontsize=9)
            panel.tick_params(labelsize=8)
            panel.grid(alpha=0.3)
    figure.savefig(path, dpi=DOTS_PER_INCH)


SUFFIXES = (".svg", ".png", ".pdf")
MOST_RECORDINGS = 24
SECONDS_PER_TOKEN = 0.02  # only to give a bar its length: about one decode step a token


def draw_trace(trace: TraceFile, path: Path) -> None:
    """Write the picture to ``path``; raises SpecError for another suffix, RecordsError when the disk refuses."""
    if path.suffix not in SUFFIXES:
        raise SpecError("is no picture's name", where=str(path), hint=f"End it with one of {', '.join(SUFFIXES)}")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 6.4), layout="constrained")
    lengths, waits, lanes = figure.subplot_mosaic([["lengths", "waits"], ["lanes", "lanes"]]).values()
    requests = [request for recording in trace.recordings for request in recording.requests]
    _distribution(lengths, [request.prompt_tokens for request in requests], "prompt")
    _distribution(lengths, [request.generate_tokens for request in requests], "generated")
    lengths.set(xlabel="tokens", ylabel="share of requests", title="Lengths")
    lengths.legend(frameon=False)
    for kind in WAIT_KINDS[1:]:
        waits_s = [
            max(request.wait_ns / NS_PER_S, 1e-3)
            for request in requests
            if request.wait_kind == kind and not request.is_drawn
        ]
        if waits_s:
            _distribution(waits, waits_s, f"{kind} ({len(waits_s)})")
    waits.set(xlabel="seconds", ylabel="share of waits", title="Waits, by what is waited for")
    if waits.lines:
        waits.legend(frameon=False)
    else:
        waits.text(0.5, 0.5, "no waits: replayed by arrivals", ha="center", transform=waits.transAxes)
    shown = trace.recordings[:MOST_RECORDINGS]
    for row, recording in enumerate(shown):
        _recording(lanes, row, recording)
    lanes.set(xlabel=f"seconds of the recording, answers drawn at {SECONDS_PER_TOKEN * 1000:g} ms a token")
    lanes.set_title(f"{escape_controls(trace.head.name)}: the first {len(shown)} of {len(trace.recordings)} recordings")
    lanes.set_yticks([])
    lanes.invert_yaxis()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except OSError as error:
        hint = "Make room or choose a folder that can be written"
        raise RecordsError(f"cannot be written ({error.strerror})", where=str(path), hint=hint) from error


def _distribution(axes: Axes, values: Sequence[float], label: str) -> None:
    ordered = sorted(values)
    axes.step(ordered, [(place + 1) / len(ordered) for place in range(len(ordered))], where="post", label=label)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.grid(visible=True, alpha=0.3)


def _recording(axes: Axes, row: int, recording: Recording) -> None:
    """One recording: a bar a request; what runs beside another has a row of its own within the lane."""
    ends: list[float] = []
    spans: list[tuple[float, float, int]] = []
    free_at: list[float] = []
    for request in recording.requests:
        began = max((ends[before] for before in request.after), default=recording.start_ns / NS_PER_S)
        start = began + request.wait_ns / NS_PER_S
        ends.append(start + request.generate_tokens * SECONDS_PER_TOKEN)
        place = next((place for place, free in enumerate(free_at) if free <= start), len(free_at))
        free_at[place : place + 1] = [ends[-1]]
        spans.append((start, ends[-1], place))
    height = 0.8 / len(free_at)
    for start, end, place in spans:
        axes.barh(
            row - 0.4 + (place + 0.5) * height, end - start, left=start, height=height * 0.9, color=f"C{place % 10}"
        )
