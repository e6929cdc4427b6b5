"""Cost models fitted to step periods and prefill times: straight lines by least squares, with what they leave over.

Every coefficient comes with an interval that names its method, unit and seed; every fit with its residuals and its
error on points it did not see. Nothing is tuned to a result.
Forms: docs/method.md, "Step time", "Prefill time".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from harness.analysis.calibration.fit_points import FloatArray, PrefillPoint, StepPoint
from harness.analysis.stats import DEFAULT_LEVEL, QUANTILE_METHOD, Interval
from harness.engine.config import PREFILL_CHUNK_TOKENS
from harness.errors import SpecError

RESAMPLES = 2000
US_PER_MS = 1000.0
NEGLIGIBLE_US = 1e-6


@dataclass(frozen=True, slots=True)
class FitError:
    """What a fit leaves over, model ms and as a share of what was measured; over points, largest in magnitude.

    held_out: each group of points predicted by a fit without it; num_not_held_out counts the groups that are needed
    to tell a coefficient at all.
    """

    rms_ms: float
    max_ms: float
    max_share: float
    held_out_rms_ms: float | None
    held_out_max_ms: float | None
    held_out_max_share: float | None
    num_not_held_out: int


@dataclass(frozen=True, slots=True)
class DecodeFit:
    """f(b) + alpha + beta n + c (sum of contexts). ms, ms, ms per request, us per token.

    alpha_ms is 0 where nothing but whole steps was measured: it is then inside f. intervals: by the coefficient's
    name. fitted_context_tokens: smallest and largest mean sequence length of a point.
    """

    f_ms: Mapping[int, float]
    alpha_ms: float
    beta_ms_per_request: float
    context_us_per_token: float
    intervals: Mapping[str, Interval]
    error: FitError
    num_points: int
    num_steps_per_block: int
    fitted_context_tokens: tuple[int, int] | None
    method: str
    notes: tuple[str, ...] = field(default=())

    def step_ms(self, bucket: int, num_seqs: int, context_tokens: float = 0.0) -> float:
        """Duration of a step in a measured bucket."""
        context_ms = self.context_us_per_token / US_PER_MS * context_tokens
        return self.f_ms[bucket] + self.alpha_ms + self.beta_ms_per_request * num_seqs + context_ms


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """T(q) = ceil(q / chunk_tokens) (a + b q). ms, us per token; fitted_tokens: smallest and largest q."""

    per_call_ms: float
    per_call_us_per_token: float
    intervals: Mapping[str, Interval]
    error: FitError
    num_points: int
    fitted_tokens: tuple[int, int]
    chunk_tokens: int

    def prefill_ms(self, computed_tokens: int) -> float:
        calls = -(-computed_tokens // self.chunk_tokens)
        return calls * (self.per_call_ms + self.per_call_us_per_token / US_PER_MS * computed_tokens)


def fit_decode(
    points: Sequence[StepPoint],
    *,
    with_context: bool | None = None,
    seed: int,
    block_steps: int,
) -> DecodeFit:
    """The decode form fitted to whole step periods: one level per bucket, beta and c common to all, least squares.

    with_context: None keeps c only where its interval excludes 0. A whole step cannot tell f from alpha: their sum is
    given as f, alpha is 0. Raises SpecError when the points cannot tell a coefficient.
    """
    has_contexts = all(point.context_tokens is not None for point in points)
    if with_context and not has_contexts:
        raise SpecError(
            "contexts of the steps are unknown", where="calibration", hint="Turn the [PFX] log on, or use --no-context"
        )
    is_fitted = has_contexts if with_context is None else with_context
    if with_context is None and is_fitted and not _is_determined(_design(points, with_context=True).columns):
        is_fitted = False
    fit = _fit_decode(points, seed, block_steps, with_context=is_fitted)
    if with_context is None and is_fitted and _is_nothing(fit.intervals["context_us_per_token"]):
        plain = _fit_decode(points, seed, block_steps, with_context=False)
        interval = fit.intervals["context_us_per_token"]
        ends = f"[{interval.low:.6f}, {interval.high:.6f}] us/token"
        left_out = f"The context term is left out: its {DEFAULT_LEVEL:.0%} interval {ends} contains 0."
        return replace(plain, notes=(*plain.notes, left_out))
    return fit


def _is_nothing(interval: Interval) -> bool:
    """Whether it contains 0, or a value that a cost file would write as 0."""
    return interval.low <= NEGLIGIBLE_US and interval.high >= -NEGLIGIBLE_US


def _fit_decode(points: Sequence[StepPoint], seed: int, block_steps: int, *, with_context: bool) -> DecodeFit:
    design = names, columns = _design(points, with_context=with_context)
    if not _is_determined(columns):
        raise SpecError(
            f"{len(points)} points cannot tell {', '.join(names)} apart",
            where="calibration",
            hint="Measure some bucket at two numbers of requests, and each number at two context lengths (or use "
            "--no-context)",
        )
    strata = [point.stratum for point in points]
    rough = _least_squares(columns, np.array([point.period_ms for point in points]))
    # The growth of context inside a stretch is no noise: it is taken out of the blocks before their median.
    context = float(rough[-1]) if with_context else 0.0
    blocks = [point.periods_at_one_context_ms(context) for point in points]
    measured = np.array([float(np.median(periods)) for periods in blocks])
    fitted = _least_squares(columns, measured)
    by_name = dict(zip(names, fitted.tolist(), strict=True))
    return DecodeFit(
        f_ms={point.bucket: by_name[f"f({point.bucket})"] for point in sorted(points, key=lambda point: point.bucket)},
        alpha_ms=0.0,
        beta_ms_per_request=by_name.get("beta_ms_per_request", 0.0),
        context_us_per_token=by_name.get("context_us_per_token", 0.0),
        intervals=_bootstrap(design, blocks, fitted, seed=seed, unit=f"blocks of {block_steps} steps"),
        error=_errors(columns, measured, strata),
        num_points=len(points),
        num_steps_per_block=block_steps,
        fitted_context_tokens=_context_range(points),
        method="least squares on whole step periods, one level per bucket",
        notes=("Alpha is inside f: whole steps do not tell them apart.",),
    )


def fit_decode_with_report(
    points: Sequence[StepPoint],
    f_ms: Mapping[int, float],
    *,
    seed: int,
    block_steps: int,
) -> DecodeFit:
    """The paper's way: f(b) from the server's own report, alpha and beta a straight line through (step - f(b)) by n.

    f_ms: median model time plus median sampler time with the bucket exactly full. Points in other buckets are not used.
    Raises SpecError with fewer than two numbers of requests.
    """
    used = [point for point in points if point.bucket in f_ms]
    if len({point.num_seqs for point in used}) < 2:
        raise SpecError(
            "a straight line in n needs two numbers of requests in reported buckets",
            where="calibration",
            hint="Measure more numbers of requests",
        )
    names = ("alpha_ms", "beta_ms_per_request")
    columns = np.array([[1.0, point.num_seqs] for point in used])
    reported = np.array([f_ms[point.bucket] for point in used])
    rest = np.array([point.period_ms for point in used]) - reported
    fitted = _least_squares(columns, rest)
    blocks = [point.block_periods_ms - f_ms[point.bucket] for point in used]
    unit = f"blocks of {block_steps} steps"
    return DecodeFit(
        f_ms=dict(sorted(f_ms.items())),
        alpha_ms=float(fitted[0]),
        beta_ms_per_request=float(fitted[1]),
        context_us_per_token=0.0,
        intervals=_bootstrap(_Design(names, columns), blocks, fitted, seed=seed, unit=unit),
        error=_errors(columns, rest, [point.stratum for point in used], measured=rest + reported),
        num_points=len(used),
        num_steps_per_block=block_steps,
        fitted_context_tokens=_context_range(used),
        method="f(b) reported by the server (model p50 + sampler p50); straight line through the rest of the step by n",
    )


def fit_prefill(
    points: Sequence[PrefillPoint],
    *,
    seed: int,
    chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    with_constant: bool = True,
) -> PrefillFit:
    """T(q) by least squares on the median time of each q.

    chunk_tokens: most tokens of a device call. with_constant: False: a is 0. Raises SpecError with fewer than two
    lengths.
    """
    by_length: dict[int, list[float]] = {}
    for point in points:
        if point.computed_tokens > 0:
            by_length.setdefault(point.computed_tokens, []).append(point.elapsed_ms)
    if len(by_length) < 2:
        raise SpecError(
            f"T(q) needs prefills of two lengths, got {sorted(by_length)}",
            where="calibration",
            hint="Run a prefill sweep: `harness server calibrate`",
        )
    lengths = sorted(by_length)
    times = [np.array(by_length[length]) for length in lengths]
    calls = np.array([-(-length // chunk_tokens) for length in lengths], dtype=np.float64)
    columns = np.stack([calls, calls * np.array(lengths) / US_PER_MS], axis=1)
    names = ("per_call_ms", "per_call_us_per_token")
    if not with_constant:
        columns, names = columns[:, 1:], names[1:]
    measured = np.array([float(np.median(values)) for values in times])
    fitted = _least_squares(columns, measured)
    return PrefillFit(
        per_call_ms=float(fitted[0]) if with_constant else 0.0,
        per_call_us_per_token=float(fitted[-1]),
        intervals=_bootstrap(_Design(names, columns), times, fitted, seed=seed, unit="prefills of a length"),
        error=_errors(columns, measured, lengths),
        num_points=len(lengths),
        fitted_tokens=(lengths[0], lengths[-1]),
        chunk_tokens=chunk_tokens,
    )


@dataclass(frozen=True, slots=True)
class EagerFit:
    """What a decode step without a graph takes more than the cost model's step with a graph of its size, ms."""

    step_ms: float
    interval: Interval
    error: FitError
    num_points: int


def fit_eager(
    points: Sequence[StepPoint], with_graph_ms: Callable[[StepPoint], float], *, seed: int, block_steps: int
) -> EagerFit:
    """One extra time for all numbers of requests: the mean over the points. with_graph_ms: the price without it."""
    blocks = [point.block_periods_ms - with_graph_ms(point) for point in points]
    extra = np.array([float(np.median(values)) for values in blocks])
    design = _Design(("eager_ms",), np.ones((len(points), 1)))
    fitted = _least_squares(design.columns, extra)
    unit = f"blocks of {block_steps} steps"
    return EagerFit(
        step_ms=float(fitted[0]),
        interval=_bootstrap(design, blocks, fitted, seed=seed, unit=unit)["eager_ms"],
        error=_errors(
            design.columns,
            extra,
            [point.stratum for point in points],
            measured=np.array([point.period_ms for point in points]),
        ),
        num_points=len(points),
    )


class _Design(NamedTuple):
    """The linear form of a fit: names of its coefficients, and columns of shape (points, coefficients)."""

    names: tuple[str, ...]
    columns: FloatArray


def _design(points: Sequence[StepPoint], *, with_context: bool) -> _Design:
    """The form of a decode step. beta only where some bucket is seen at two n."""
    buckets = sorted({point.bucket for point in points})
    columns = [np.array([float(point.bucket == bucket) for point in points]) for bucket in buckets]
    names = [f"f({bucket})" for bucket in buckets]
    if len({(point.bucket, point.num_seqs) for point in points}) > len(buckets):
        names.append("beta_ms_per_request")
        columns.append(np.array([float(point.num_seqs) for point in points]))
    if with_context:
        names.append("context_us_per_token")
        columns.append(np.array([point.context_tokens or 0.0 for point in points]) / US_PER_MS)
    return _Design(tuple(names), np.stack(columns, axis=1))


def _is_determined(columns: FloatArray) -> bool:
    # Columns differ by orders of magnitude: the rank is that of directions, not of sizes.
    norms = np.linalg.norm(columns, axis=0)
    return bool(np.all(norms > 0)) and int(np.linalg.matrix_rank(columns / norms)) == columns.shape[1]


def _least_squares(columns: FloatArray, measured: FloatArray) -> FloatArray:
    norms = np.linalg.norm(columns, axis=0)
    solved = np.linalg.lstsq(columns / norms, measured, rcond=None)[0]
    return np.asarray(solved / norms, dtype=np.float64)


def _bootstrap(
    design: _Design, groups: Sequence[FloatArray], fitted: FloatArray, *, seed: int, unit: str
) -> dict[str, Interval]:
    """Percentile intervals of every coefficient: values are drawn again within each point, then all points refitted.

    groups: the values behind each point, whose median it is.
    """
    rng = np.random.default_rng(seed)
    drawn = np.empty((len(groups), RESAMPLES))
    for place, values in enumerate(groups):
        picked = rng.integers(0, len(values), size=(RESAMPLES, len(values)))
        drawn[place] = np.median(values[picked], axis=1)
    coefficients = _least_squares_many(design.columns, drawn)
    tail = (1 - DEFAULT_LEVEL) / 2
    lows, highs = np.quantile(coefficients, [tail, 1 - tail], axis=1, method=QUANTILE_METHOD)
    num_units = sum(map(len, groups))
    return {
        name: Interval(
            float(fitted[place]),
            float(lows[place]),
            float(highs[place]),
            DEFAULT_LEVEL,
            "percentile bootstrap of the least-squares coefficient, stratified by point",
            unit,
            num_units,
            RESAMPLES,
            seed,
        )
        for place, name in enumerate(design.names)
    }


def _least_squares_many(columns: FloatArray, measured: FloatArray) -> FloatArray:
    """Shape (coefficients, fits) of many right-hand sides, shape (points, fits)."""
    norms = np.linalg.norm(columns, axis=0)
    return np.asarray(np.linalg.pinv(columns / norms) @ measured / norms[:, None], dtype=np.float64)


def _errors(
    columns: FloatArray, target: FloatArray, groups: Sequence[object], measured: FloatArray | None = None
) -> FitError:
    """Residuals, and the errors on each group of points under a fit without it.

    measured: what shares are of; default: the target itself.
    """
    whole = target if measured is None else measured
    residual = columns @ _least_squares(columns, target) - target
    held_out: list[FloatArray] = []
    shares: list[FloatArray] = []
    num_needed = 0
    for group in sorted(set(map(repr, groups))):
        is_out = np.array([repr(of_point) == group for of_point in groups])
        kept = columns[~is_out]
        if len(kept) == 0 or not _is_determined(kept):
            num_needed += 1
            continue
        error = columns[is_out] @ _least_squares(kept, target[~is_out]) - target[is_out]
        held_out.append(error)
        shares.append(error / whole[is_out])
    return FitError(
        rms_ms=_rms(residual),
        max_ms=float(np.abs(residual).max()),
        max_share=float(np.abs(residual / whole).max()),
        held_out_rms_ms=_over(held_out, _rms),
        held_out_max_ms=_over(held_out, _largest),
        held_out_max_share=_over(shares, _largest),
        num_not_held_out=num_needed,
    )


def _rms(values: FloatArray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _largest(values: FloatArray) -> float:
    return float(np.abs(values).max())


def _over(parts: Sequence[FloatArray], reduce: Callable[[FloatArray], float]) -> float | None:
    return reduce(np.concatenate(parts)) if parts else None


def _context_range(points: Sequence[StepPoint]) -> tuple[int, int] | None:
    means = [point.context_tokens / point.num_seqs for point in points if point.context_tokens is not None]
    return (int(min(means)), -int(-max(means) // 1)) if means else None
