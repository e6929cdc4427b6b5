"""The report of a calibration as Markdown, with a picture of its residuals. Nothing is fitted here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.analysis.calibration.cost_file import (
    DECODE,
    Calibration,
    Residual,
    decode_residuals,
    extrapolated,
    prefill_residuals,
)
from harness.analysis.calibration.fit import MAX_SHARE, FitError
from harness.analysis.stats import Interval
from harness.errors import RecordsError
from harness.model.engine import CostModel, load_cost_model
from harness.table import interval_text, markdown_rows

UNITS = {
    "alpha_ms": "alpha, ms",
    "beta_ms_per_request": "beta, ms/request",
    "context_us_per_token": "c, us/token",
    "per_call_ms": "prefill a, ms/call",
    "per_call_us_per_token": "prefill b, us/token/call",
    "eager_ms": "a step without a graph, ms more",
    "per_pass_ms": "a pass of the drafter, ms",
}
CHUNKED_UNITS = UNITS | {
    "per_call_ms": "a step with parts of prompts, ms",
    "per_call_us_per_token": "each token of the parts, us",
    "per_step_eager_ms": "a step of these without a graph, ms more",
    "per_attended_token_ns": "each token that one of these attends to, ns",
}
DOTS_PER_INCH = 120


def coefficients(calibration: Calibration) -> dict[str, Interval]:
    """The interval of every coefficient, by its name for people."""
    names = CHUNKED_UNITS if calibration.origin.is_chunked else UNITS
    return {names.get(name, f"{name}, ms"): interval for name, interval in calibration.intervals.items()}


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
    measured = f"Measured sizes: {', '.join(map(str, calibration.fits[DECODE].f_ms))}."
    for note in (f"{calibration.origin.artifact}; {calibration.origin.words}.", measured, *calibration.notes):
        yield f"- {note}"
    yield f"\n![measured and fitted]({plot})\n\n## Coefficients\n"
    rows = [
        (
            name,
            f"{each.estimate:.5f}",
            f"[{interval_text(each.low, each.high, 5, ', ')}] {100 * each.level:.0f} % {each.method}; "
            f"{each.num_units} {each.unit}, seed {each.seed}",
        )
        for name, each in coefficients(calibration).items()
    ]
    yield markdown_rows(("coefficient", "fitted", "interval"), rows)
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
