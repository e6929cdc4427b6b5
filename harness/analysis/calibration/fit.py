"""Cost models fitted to step periods and prefill times: straight lines by least squares, with what they leave over.

Every coefficient comes with an interval that names its method, unit and seed; every fit with its residuals and its
error on points it did not see. Nothing is tuned to a result.
Forms: docs/reference/method.md, "Step time", "Prefill time".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.analysis.calibration.fit_points import BLOCK_STEPS, PrefillPoint, StepPoint
from harness.analysis.cost.reconstruct import DEFAULT_TAU
from harness.analysis.stats import DEFAULT_LEVEL, QUANTILE_METHOD, FloatArray, Interval, grouped
from harness.clock import NS_PER_MS
from harness.errors import SpecError
from harness.model.engine.config import PREFILL_CHUNK_TOKENS
from harness.model.engine.cost import US_PER_MS, FitErrors, size_name
from harness.table import interval_text

RESAMPLES = 2000
# A fit that errs on a step by more, held out, is not called good: the paper's tolerance of the channels.
MAX_SHARE = DEFAULT_TAU
# A cost file would write a smaller coefficient as 0.
NEGLIGIBLE_US = 1e-6
# Below it a part of 4,000 tokens differs by less than 0.1 us.
NEGLIGIBLE_NS = 1e-5
NEGLIGIBLE_MS = 1e-5
ATTENDED = "per_attended_token_ns"
EAGER = "per_step_eager_ms"
PASS = "per_pass_ms"
BLOCKS = f"blocks of {BLOCK_STEPS} steps"


@dataclass(frozen=True, slots=True)
class FitError:
    """What a fit leaves over, model ms and as a share of what was measured; over points, largest in magnitude.

    held_out: each group of points predicted by a fit without it. num_not_held_out: groups without which a coefficient
    is not determined. worst: the point with the largest share, held out where points are: how far off, of what, which.
    """

    rms_ms: float
    max_ms: float
    max_share: float
    held_out_rms_ms: float | None
    held_out_max_ms: float | None
    held_out_max_share: float | None
    num_not_held_out: int
    worst: str = ""
    worst_ms: float = 0.0
    worst_of_ms: float = 0.0

    @property
    def largest_share(self) -> float:
        """Held out, or of the residuals where nothing could be held out."""
        return self.max_share if self.held_out_max_share is None else self.held_out_max_share

    @property
    def is_good(self) -> bool:
        return self.largest_share <= MAX_SHARE

    @property
    def worst_in_words(self) -> str:
        """1.650 ms of 3.600 ms (45.8 %) at 4 requests of 512 tokens."""
        return f"{self.worst_ms:.3f} ms of {self.worst_of_ms:.3f} ms ({100 * self.largest_share:.1f} %) at {self.worst}"


@dataclass(frozen=True, slots=True)
class Fit:
    """A linear form fitted to points; ``fit[name]`` is a coefficient, 0.0 where it was left out or held at 0."""

    coefficients: Mapping[str, float]
    """By the name in a cost file, in its unit; f(b) by ``size_name``."""
    intervals: Mapping[str, Interval]
    error: FitError
    errors: FitErrors
    num_points: int
    method: str = ""
    fitted_tokens: tuple[int, int] | None = None
    """Fewest and most tokens of a point: of its sequences on the mean, or of its prompts. None: unknown."""
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> float:
        return self.coefficients.get(name, 0.0)

    @property
    def f_ms(self) -> dict[int, float]:
        """f(b) of the measured sizes, ms."""
        sizes = (name for name in self.coefficients if name.startswith("f("))
        return {int(name[2:-1]): self.coefficients[name] for name in sizes}


def fit_decode(points: Sequence[StepPoint], *, with_context: bool | None = None, seed: int) -> Fit:
    """The decode form fitted to whole step periods: one level per bucket, beta and c common to all, least squares.

    with_context: None keeps c only where its interval excludes 0. A whole step cannot tell f from alpha: their sum is
    given as f, alpha is 0. A context cost that is shown to be below 0 makes no sense and is held at 0. Raises SpecError
    when the points cannot tell a coefficient.
    """
    has_contexts = all(point.context_tokens is not None for point in points)
    if with_context and not has_contexts:
        raise SpecError(
            "contexts of the steps are unknown", where="calibration", hint="Turn the [PFX] log on, or use --no-context"
        )
    left_out = ()
    is_tried = has_contexts and _is_determined(_decode_form(points, with_context=True).columns)
    if with_context or (with_context is None and is_tried):
        fit = _fit_decode(points, seed, with_context=True)
        interval = fit.intervals["context_us_per_token"]
        ends = interval_text(interval.low, interval.high, 6, ", ")
        ends = f"its {100 * DEFAULT_LEVEL:.0f} % interval is [{ends}] us/token"
        if interval.high < -NEGLIGIBLE_US:
            left_out = (
                f"The context term is held at 0: a longer context cannot make a step shorter, and {ends}. Something "
                "else changed with the context: look at the points.",
            )
        elif with_context or interval.low > NEGLIGIBLE_US:
            return _with_odd_signs(fit)
        else:
            left_out = (f"The context term is left out: {ends}, which contains 0.",)
    plain = _fit_decode(points, seed, with_context=False)
    return _with_odd_signs(replace(plain, notes=(*plain.notes, *left_out)))


def _with_odd_signs(fit: Fit) -> Fit:
    """The fit, with a note where a request more in the same size would make a step shorter."""
    interval = fit.intervals.get("beta_ms_per_request")
    if interval is None or interval.high >= 0:
        return fit
    ends = f"[{interval_text(interval.low, interval.high, 6, ', ')}] ms"
    note = (
        f"A request more in the same size makes a step shorter by this fit (beta's {100 * DEFAULT_LEVEL:.0f} % "
        f"interval is {ends}): read beta and the sizes together, not as the cost of a request."
    )
    return replace(fit, notes=(*fit.notes, note))


def check_points(points: Sequence[StepPoint], *, with_context: bool) -> _Form:
    """The form that these points fit, whatever was measured at them; SpecError where they cannot tell a coefficient."""
    form = _decode_form(points, with_context=with_context)
    if not _is_determined(form.columns):
        raise SpecError(
            f"{len(points)} points cannot tell {', '.join(form.names)} apart",
            where="calibration",
            hint="Measure some bucket at two numbers of requests (and with drafts, of drafts), and each number at two "
            "context lengths (or use --no-context)",
        )
    return form


def _fit_decode(points: Sequence[StepPoint], seed: int, *, with_context: bool) -> Fit:
    form = check_points(points, with_context=with_context)
    rough = form.solve(np.array([point.period_ms for point in points]))
    # The growth of context inside a stretch is no noise: it is taken out of the blocks before their median.
    context = float(rough[-1]) if with_context else 0.0
    blocks = [point.periods_at_one_context_ms(context) for point in points]
    fitted = _fit(form, blocks, [point.group for point in points], seed)
    if fitted[PASS] < 0:
        without = _fit_decode([replace(point, passes=0) for point in points], seed, with_context=with_context)
        note = f"{PASS} is held at 0: {fitted[PASS]:.6f} came out, and no pass of a drafter takes less than 0."
        return replace(without, notes=(*without.notes, note))
    return replace(
        fitted,
        method="least squares on whole step periods, one level per bucket",
        fitted_tokens=_context_range(points),
        notes=("Alpha is inside f: whole steps do not tell them apart.",),
    )


def fit_decode_with_report(points: Sequence[StepPoint], f_ms: Mapping[int, float], *, seed: int) -> Fit:
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
    line = _Form(("alpha_ms", "beta_ms_per_request"), np.array([[1.0, point.num_seqs] for point in used]))
    reported_ms = np.array([f_ms[point.bucket] for point in used])
    rest = [point.block_periods_ms - f_ms[point.bucket] for point in used]
    fitted = _fit(line, rest, [point.group for point in used], seed, reported_ms)
    return replace(
        fitted,
        coefficients={**{size_name(size): f_ms[size] for size in sorted(f_ms)}, **fitted.coefficients},
        errors=_with_reported(fitted.errors, sorted(f_ms), fitted.error.rms_ms * math.sqrt(len(used))),
        method="f(b) reported by the server (model p50 + sampler p50); straight line through the rest of the step by n",
        fitted_tokens=_context_range(used),
    )


def fit_prefill(
    points: Sequence[PrefillPoint],
    *,
    seed: int,
    chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    is_relative: bool = False,
) -> Fit:
    """T(q) by least squares on the median time of each q.

    chunk_tokens: most tokens of a device call. is_relative: of shares of the whole steps, their decodes with them, so
    that a short step counts as much as a long one; else of times. Where points say what parts of prompts attend to,
    each such token has a cost too; it is kept where its interval excludes 0. A coefficient that comes out below 0 makes
    no sense and is held at 0. Raises SpecError with fewer than two lengths.
    """
    by_work = grouped((point for point in points if point.computed_tokens > 0), lambda point: point.work)
    works = sorted(by_work)
    lengths = sorted({length for length, _attended, _is_eager in works})
    if len(lengths) < 2:
        raise SpecError(
            f"T(q) needs prefills of two lengths, got {lengths}",
            where="calibration",
            hint="Run a prefill sweep: `harness server calibrate`",
        )
    calls = np.array([-(-length // chunk_tokens) for length, _attended, _is_eager in works], dtype=np.float64)
    columns = {
        "per_call_ms": calls,
        "per_call_us_per_token": calls * np.array([length for length, _attended, _is_eager in works]) / US_PER_MS,
    }
    times = [np.array([point.elapsed_ms for point in by_work[work]]) for work in works]
    groups = [f"{length} tokens" for length, _attended, _is_eager in works]
    decodes_ms = np.array([float(np.median([point.decodes_ms for point in by_work[work]])) for work in works])
    steps_ms = np.array([float(np.median(each)) for each in times]) + decodes_ms
    # A step of no time has no shares.
    weights = 1 / np.maximum(steps_ms, NEGLIGIBLE_MS) if is_relative else None

    def fitted_by(names: Sequence[str]) -> Fit:
        form = np.stack([columns[name] for name in names], axis=1)
        return _fit(_Form(tuple(names), form, "prefills of a length", weights), times, groups, seed, decodes_ms)

    names, notes, left_out = list(columns), list[str](), ""
    columns[EAGER] = np.array([is_eager for _length, _attended, is_eager in works], dtype=np.float64)
    if _tells_apart((columns[name] for name in names), columns[EAGER]):
        # Without a graph the host launches every part of a step, however short.
        interval = fitted_by([*names, EAGER]).intervals[EAGER]
        if interval.low > NEGLIGIBLE_MS:
            names.append(EAGER)
    columns[ATTENDED] = np.array([attended for _length, attended, _is_eager in works], dtype=np.float64) / NS_PER_MS
    if _tells_apart((columns[name] for name in names), columns[ATTENDED]):
        interval = fitted_by([*names, ATTENDED]).intervals[ATTENDED]
        if interval.low > NEGLIGIBLE_NS:
            names.append(ATTENDED)
        elif max(abs(interval.low), abs(interval.high)) > NEGLIGIBLE_NS:
            held = "is held at 0: no token costs less than 0" if interval.high < 0 else "is left out"
            ends = f"[{interval_text(interval.low, interval.high, 6, ', ')}] ns"
            left_out = f"The cost of a token that parts of prompts attend to {held}; its 95 % interval is {ends}."
    fitted = fitted_by(names)
    # A step lasts whole nanoseconds, which leave less than NEGLIGIBLE_MS of a coefficient.
    while len(names) > 1 and (least := min(fitted.coefficients.items(), key=itemgetter(1)))[1] < -NEGLIGIBLE_MS:
        below = least[0]
        notes.append(
            f"{below} is held at 0: {fitted.coefficients[below]:.6f} came out, and no prefill costs less than 0."
        )
        names.remove(below)
        fitted = fitted_by(names)
    return replace(
        fitted,
        coefficients={name: max(0.0, value) for name, value in fitted.coefficients.items()},
        method="least squares on the median time of each length",
        fitted_tokens=(lengths[0], lengths[-1]),
        notes=(*notes, *filter(None, [left_out])),
    )


def _tells_apart(known: Iterable[FloatArray], column: FloatArray) -> bool:
    """Whether the points tell a further coefficient from those of the known columns."""
    return _is_determined(np.stack([*known, column], axis=1))


def fit_eager(points: Sequence[StepPoint], with_graph_ms: Callable[[StepPoint], float], *, seed: int) -> Fit:
    """What a step without a graph takes more: one time for all numbers of requests, the mean over the points.

    with_graph_ms: the price of a step with a graph of its size.
    """
    prices_ms = np.array([with_graph_ms(point) for point in points])
    extra = [point.block_periods_ms - price_ms for point, price_ms in zip(points, prices_ms, strict=True)]
    form = _Form(("eager_ms",), np.ones((len(points), 1)))
    return _fit(form, extra, [point.group for point in points], seed, prices_ms)


class _Form(NamedTuple):
    """The linear form of a fit: names of its coefficients, and columns of shape (points, coefficients).

    unit: of the samples behind each point. weights: of the points' errors, shape (points,); None: equal.
    """

    names: tuple[str, ...]
    columns: FloatArray
    unit: str = BLOCKS
    weights: FloatArray | None = None

    def weighted(self, values: FloatArray) -> FloatArray:
        """Rows times the weights of their points. values: shape (points, ...)."""
        return values if self.weights is None else (values.T * self.weights).T

    def solve(self, measured: FloatArray, rows: NDArray[np.bool_] | slice = slice(None)) -> FloatArray:
        """Coefficients by the points of ``rows``. measured: shape (points,), or (points, fits) of several at once."""
        columns = self.weighted(self.columns)[rows]
        norms = np.linalg.norm(columns, axis=0)
        solved = np.linalg.lstsq(columns / norms, self.weighted(measured)[rows], rcond=None)[0]
        return np.asarray((solved.T / norms).T, dtype=np.float64)


def _decode_form(points: Sequence[StepPoint], *, with_context: bool) -> _Form:
    """The form of a decode step. beta only where some bucket is seen at two n."""
    buckets = sorted({point.bucket for point in points})
    columns = {size_name(bucket): [float(point.bucket == bucket) for point in points] for bucket in buckets}
    if len({(point.bucket, point.num_seqs) for point in points}) > len(buckets):
        columns["beta_ms_per_request"] = [float(point.num_seqs) for point in points]
    if any(point.passes for point in points):
        columns[PASS] = [float(point.passes) for point in points]
    if with_context:
        columns["context_us_per_token"] = [(point.context_tokens or 0.0) / US_PER_MS for point in points]
    return _Form(tuple(columns), np.array(list(columns.values())).T)


def _fit(
    form: _Form, samples: Sequence[FloatArray], groups: Sequence[str], seed: int, known_ms: FloatArray | float = 0.0
) -> Fit:
    """Least squares on the median of each point's samples.

    groups: in words, which points are held out together. known_ms: a part of each point's time that the form does not
    describe; shares are of the whole time.
    """
    medians = np.array([float(np.median(values)) for values in samples])
    coefficients = dict(zip(form.names, form.solve(medians).tolist(), strict=True))
    drawn = _drawn_medians(samples, seed)
    return Fit(
        coefficients,
        _bootstrap(form, samples, drawn, coefficients, seed),
        _errors(form, medians, medians + known_ms, groups),
        _fit_errors(form, medians, drawn, sum(len(values) - 1 for values in samples)),
        len(samples),
    )


def _fit_errors(form: _Form, medians: FloatArray, drawn: FloatArray, degrees_inside: int) -> FitErrors:
    """The covariance of a least-squares fit: residual variance of the points, or what scatters inside them if more.

    Residuals hold what a restart between the points changes, and what the form leaves out. drawn: shape (points,
    resamples). degrees_inside: of the samples, which count where no degree of freedom is left between the points.
    """
    num_points, size = form.columns.shape
    columns = form.weighted(form.columns)
    norms = np.linalg.norm(columns, axis=0)
    inverse = np.linalg.inv((columns / norms).T @ (columns / norms))
    residuals = form.weighted(medians - form.columns @ form.solve(medians))
    degrees = num_points - size
    between = float(residuals @ residuals) / degrees if degrees else 0.0
    inside = float(np.mean(form.weighted(drawn).var(axis=1)))
    roots = np.sqrt(np.diag(inverse))
    return FitErrors(
        form.names,
        tuple((math.sqrt(max(between, inside)) * roots / norms).tolist()),
        tuple(map(tuple, (inverse / np.outer(roots, roots)).tolist())),
        max(1, degrees or degrees_inside),
    )


def _with_reported(line: FitErrors, sizes: Sequence[int], root_of_squares_ms: float) -> FitErrors:
    """The errors of a line through what reported f(b) leave, and of these: each may be off by the residual deviation.

    root_of_squares_ms: of the residuals of the line.
    """
    names = (*map(size_name, sizes), *line.names)
    correlations = np.eye(len(names))
    correlations[len(sizes) :, len(sizes) :] = line.correlations
    of_sizes = [max(root_of_squares_ms / math.sqrt(line.degrees), line.standard_errors[0])] * len(sizes)
    return FitErrors(names, (*of_sizes, *line.standard_errors), tuple(map(tuple, correlations.tolist())), line.degrees)


def _is_determined(columns: FloatArray) -> bool:
    # Columns differ by orders of magnitude: the rank is that of directions, not of sizes.
    norms = np.linalg.norm(columns, axis=0)
    return bool(np.all(norms > 0)) and int(np.linalg.matrix_rank(columns / norms)) == columns.shape[1]


def _drawn_medians(samples: Sequence[FloatArray], seed: int) -> FloatArray:
    """Medians of samples that are drawn again within each point, shape (points, RESAMPLES)."""
    rng = np.random.default_rng(seed)
    drawn = np.empty((len(samples), RESAMPLES))
    for place, values in enumerate(samples):
        picked = rng.integers(0, len(values), size=(RESAMPLES, len(values)))
        drawn[place] = np.median(values[picked], axis=1)
    return drawn


def _bootstrap(
    form: _Form, samples: Sequence[FloatArray], drawn: FloatArray, fitted: Mapping[str, float], seed: int
) -> dict[str, Interval]:
    """Percentile intervals of every coefficient: all points refitted to each draw of their medians."""
    tail = (1 - DEFAULT_LEVEL) / 2
    coefficients = form.solve(drawn)
    ends = np.quantile(coefficients, [tail, 1 - tail], axis=1, method=QUANTILE_METHOD)
    return {
        name: Interval(
            fitted[name],
            float(low),
            float(high),
            DEFAULT_LEVEL,
            "percentile bootstrap of the least-squares coefficient, stratified by point",
            form.unit,
            sum(map(len, samples)),
            RESAMPLES,
            seed,
        )
        for name, low, high in zip(form.names, *ends, strict=True)
    }


def _errors(form: _Form, target: FloatArray, whole: FloatArray, groups: Sequence[str]) -> FitError:
    """Residuals, and the errors on each group of points under a fit without it. whole: what shares are of."""
    labels, columns = np.array(groups), form.columns
    is_held_out = np.zeros(len(target), dtype=np.bool_)
    predicted = np.array(target)
    num_needed = 0
    for label in np.unique(labels):
        is_out = labels == label
        if _is_determined(columns[~is_out]):
            predicted[is_out] = columns[is_out] @ form.solve(target, ~is_out)
            is_held_out |= is_out
        else:
            num_needed += 1
    residual = columns @ form.solve(target) - target
    error = FitError(*_sizes(residual, whole), None, None, None, num_needed)
    off = np.where(is_held_out, predicted - target, 0.0) if is_held_out.any() else residual
    worst = int(np.argmax(np.abs(off / whole)))
    error = replace(error, worst=groups[worst], worst_ms=float(abs(off[worst])), worst_of_ms=float(whole[worst]))
    if not is_held_out.any():
        return error
    rms_ms, max_ms, max_share = _sizes((predicted - target)[is_held_out], whole[is_held_out])
    return replace(error, held_out_rms_ms=rms_ms, held_out_max_ms=max_ms, held_out_max_share=max_share)


def _sizes(errors: FloatArray, whole: FloatArray) -> tuple[float, float, float]:
    """Root mean square, largest, and largest share of the whole."""
    return float(np.sqrt(np.mean(errors**2))), float(np.abs(errors).max()), float(np.abs(errors / whole).max())


def _context_range(points: Sequence[StepPoint]) -> tuple[int, int] | None:
    means = [point.context_tokens / point.num_seqs for point in points if point.context_tokens is not None]
    return (int(min(means)), -int(-max(means) // 1)) if means else None
