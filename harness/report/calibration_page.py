"""What a calibration found, for a person: coefficients with intervals, every residual, what is extrapolated, two plots.

One Markdown page and one PNG beside the runs, named like the cost-model file. Nothing is fitted or measured here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import starmap
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness.analysis.calibration.fit import FitError
from harness.analysis.stats import Interval
from harness.clock import NS_PER_MS
from harness.engine import CostModel, load_cost_model
from harness.errors import RecordsError
from harness.runner.calibrate import Calibration
from harness.table import markdown_rows

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
    by_length: dict[int, list[float]] = {}
    for point in calibration.prefill_points:
        by_length.setdefault(point.computed_tokens, []).append(point.elapsed_ms)
    return [
        Residual(f"q={length}", length, float(np.median(times)), model.prefill_ns(length) / NS_PER_MS)
        for length, times in sorted(by_length.items())
    ]


def extrapolated(calibration: Calibration, model: CostModel) -> Iterator[str]:
    """What the model gives without having seen it, one line each."""
    filled = model.filled_in_buckets(calibration.buckets)
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
        page.write_text("\n".join(_page(calibration, model, decode, prefill, plot.name)) + "\n", encoding="utf-8")
        _plot(decode, prefill, model, plot)
    return page, plot


def _page(
    calibration: Calibration,
    model: CostModel,
    decode: Sequence[Residual],
    prefill: Sequence[Residual],
    plot: str,
) -> Iterator[str]:
    yield f"# Cost model {model.name}\n"
    for note in (f"{calibration.artifact}; {calibration.source}.", *calibration.notes, *calibration.decode.notes):
        yield f"- {note}"
    yield f"\n![measured and fitted]({plot})\n\n## Coefficients\n"
    yield markdown_rows(
        ("coefficient", "fitted", "interval"), starmap(_coefficient_row, coefficients(calibration).items())
    )
    yield "\n## Errors\n"
    yield markdown_rows(
        ("", "residual rms", "largest", "held-out rms", "held-out largest"),
        [(what, *_error_cells(error)) for what, error in calibration.errors.items()],
    )
    yield "\nHeld out: each (n, context), or each length, is predicted by a fit without it."
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
                    f"{point.residual_ms / point.fitted_ms:+.3%}",
                )
                for point in residuals
            ],
        )


def _coefficient_row(name: str, interval: Interval) -> tuple[str, str, str]:
    how = f"{interval.level:.0%} {interval.method}; {interval.num_units} {interval.unit}, seed {interval.seed}"
    ends = f"[{interval.low:.5f}, {interval.high:.5f}] {how}"
    return name, f"{interval.estimate:.5f}", ends


def _error_cells(error: FitError) -> list[str]:
    values = (error.rms_ms, error.max_ms, error.held_out_rms_ms, error.held_out_max_ms)
    return ["-" if value is None else f"{value:.4f} ms" for value in values]


def _plot(decode: Sequence[Residual], prefill: Sequence[Residual], model: CostModel, path: Path) -> None:
    """Measured against fitted above, residuals below; decode left, prefill right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
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
