"""What a step costs: decode by bucket, batch and context; prefill by computed tokens. Integer ns, rounded once.

Coefficients are kept as integer femtoseconds, exact decimals of their file; a value outside the range its file was
fitted on is given all the same and flagged. And what a device costs beside its steps: memory, compiling, artifacts.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from harness.compiled.records import IntArray
from harness.errors import SpecError
from harness.model.engine.config import PAGED_BLOCK_TOKENS, PREFILL_CHUNK_TOKENS, EngineConfig
from harness.model.engine.state import FS_PER_NS
from harness.model.spec import ServerShape, Spec, load_toml
from harness.shipped import find_shipped

FS_PER_US = 1_000 * FS_PER_NS
FS_PER_MS = 1_000 * FS_PER_US
FS_PER_S = 1_000 * FS_PER_MS
US_PER_MS = 1000.0
LARGEST_FS = 10**15
"""A coefficient above one second is a slip of units; it also keeps every sum far inside int64."""
LARGEST_EXPONENT = 60
"""No duration in any unit has more digits before or behind the point."""

# Coefficients of a cost file but its sizes: the field of ``CostModel``, and how much of it is one of their unit. First
# those of decode steps, then those of prompts.
OF_DECODES: Mapping[str, tuple[str, int]] = {
    "alpha_ms": ("alpha_fs", FS_PER_MS),
    "beta_ms_per_request": ("beta_fs", FS_PER_MS),
    "context_us_per_token": ("context_fs", FS_PER_US),
    "eager_ms": ("eager_ns", FS_PER_MS // FS_PER_NS),
    "per_pass_ms": ("draft_pass_ns", FS_PER_MS // FS_PER_NS),
}
OF_PROMPTS: Mapping[str, tuple[str, int]] = {
    "per_call_ms": ("call_fs", FS_PER_MS),
    "per_call_us_per_token": ("token_fs", FS_PER_US),
    "per_call_us_per_position": ("position_fs", FS_PER_US),
    "per_step_ms": ("chunk_step_fs", FS_PER_MS),
    "per_token_us": ("chunk_token_fs", FS_PER_US),
    "per_attended_token_ns": ("attended_fs", FS_PER_NS),
    "per_step_eager_ms": ("chunk_eager_ns", FS_PER_MS // FS_PER_NS),
}
COEFFICIENTS = {**OF_DECODES, **OF_PROMPTS}

# Of a log ratio: a cost without an error that moves it by less does not matter.
NEGLIGIBLE_CHANGE = 1e-6


def to_fs(value: Decimal | float | int | str, unit_fs: int) -> int:
    """``value`` units as whole femtoseconds; a float counts as the decimal it prints as.

    Raises ValueError for an exponent that no duration has: all its digits would be written out.
    """
    return round(Fraction(_bounded(Decimal(repr(value)) if isinstance(value, float) else Decimal(value))) * unit_fs)


def _exact(text: str) -> Decimal:
    try:
        return _bounded(Decimal(text))
    except InvalidOperation as error:
        raise ValueError(f"{text:.40} is no number that can be held") from error


def _bounded(exact: Decimal) -> Decimal:
    if exact and abs(exact.adjusted()) > LARGEST_EXPONENT:
        raise ValueError(f"{exact:.3e} is no duration and no number of tokens")
    return exact


def size_name(size: int) -> str:
    """The name of a size's cost among the coefficients of a cost file: f(8)."""
    return f"f({size})"


def fs_to_ns(femtoseconds: int) -> int:
    """Nearest nanosecond, halves up: the one rounding of a step's duration."""
    return (femtoseconds + FS_PER_NS // 2) // FS_PER_NS


@dataclass(frozen=True, slots=True)
class FitErrors:
    """How well coefficients that were fitted together are known.

    names, standard_errors: shape (k,), units as in the cost file. correlations: shape (k, k). degrees: of freedom of
    the residuals behind them.
    """

    names: tuple[str, ...]
    standard_errors: tuple[float, ...]
    correlations: tuple[tuple[float, ...], ...]
    degrees: int

    def variance(self, weights: Mapping[str, float]) -> float:
        """Of a figure that changes by ``weights`` for a unit of each coefficient."""
        moved = np.array([weights.get(name, 0.0) for name in self.names]) * np.array(self.standard_errors)
        return max(0.0, float(moved @ np.array(self.correlations) @ moved))


class CostError(NamedTuple):
    """What the costs leave unknown of a figure. parts: independent (variance, degrees of freedom; inf: of no sample).

    given: coefficients that matter and have no error, so that the figure holds only given them.
    """

    parts: tuple[tuple[float, float], ...]
    given: tuple[str, ...]


@dataclass(frozen=True)
class CostModel:
    """Durations of engine steps.

    Decode: f(b) + alpha + beta n + context * (sum of the batch's sequence lengths), in femtoseconds; ``f_fs`` maps a
    measured bucket to f. Prefill of q computed tokens after C cached ones: the sum over its ceil(q/chunk) device calls
    j of ``call_fs + token_fs q + position_fs (C + chunk j)``.
    A step that computes parts of prompts beside its decodes: the decode's time, if it has any, and
    ``chunk_step_fs + chunk_token_fs`` for each token of the parts, and ``attended_fs`` for each token that one of them
    attends to (see ``attended_tokens``). None: not stated, as for a device that cannot.
    eager_ns: what a decode step without a graph takes more than a step with a graph of its size; chunk_eager_ns: what a
    step with parts of prompts takes more. draft_pass_ns: of the drafter, after a step; f(b) is then of b tokens; None:
    not stated. query_fs: of vllm-rbln's native path, f of each bucket by the tokens that each request computes, where
    these are several. errors: of the fits.
    Source of the forms: the paper, eq. of t_step and T(q); vllm-rbln 0.11.1 calls the device once per 128 tokens.
    """

    name: str
    source: str
    f_fs: Mapping[int, int]
    alpha_fs: int = 0
    beta_fs: int = 0
    context_fs: int = 0
    chunk_tokens: int = PREFILL_CHUNK_TOKENS
    call_fs: int = 0
    token_fs: int = 0
    position_fs: int = 0
    fitted_context_tokens: tuple[int, int] | None = None
    fitted_prefill_tokens: tuple[int, int] | None = None
    chunk_step_fs: int | None = None
    chunk_token_fs: int = 0
    attended_fs: int = 0
    eager_ns: int = 0
    chunk_eager_ns: int = 0
    draft_pass_ns: int | None = None
    query_fs: Mapping[int, Mapping[int, int]] = field(default_factory=dict[int, Mapping[int, int]])
    errors: tuple[FitErrors, ...] = field(default=(), repr=False)
    _filled_fs: dict[int, int] = field(default_factory=dict[int, int], compare=False, repr=False)

    def scaled(self, decode: float, prefill: float | None = None) -> CostModel:
        """The model of a device whose steps last so many times as long. prefill: of prefills; default: the same."""
        prefill = decode if prefill is None else prefill
        if decode == prefill == 1:
            return self
        factors = [(field, decode) for field, _ in OF_DECODES.values()]
        factors += [(field, prefill) for field, _ in OF_PROMPTS.values()]
        stated = [(field, value, factor) for field, factor in factors if (value := getattr(self, field)) is not None]
        return replace(
            self,
            f_fs={bucket: round(value * decode) for bucket, value in self.f_fs.items()},
            query_fs={
                query: {bucket: round(value * decode) for bucket, value in f_fs.items()}
                for query, f_fs in self.query_fs.items()
            },
            errors=(),
            _filled_fs={},
            **{field: round(value * factor) for field, value, factor in stated},
        )

    def rescaled(self, sizes: Iterable[int], factor: float) -> CostModel:
        """The same costs with f of these sizes ``factor`` times as high; no other size moves, filled in or not."""
        return replace(self, _filled_fs={size: round(self.bucket_fs(size) * factor) for size in sizes})

    @property
    def coefficients(self) -> dict[str, float]:
        """What the file states, by name, in its own units (ms, us per token, ns); sizes as f(8)."""
        sizes = {size_name(size): value / FS_PER_MS for size, value in self.f_fs.items()}
        return sizes | {name: (getattr(self, field) or 0) / unit for name, (field, unit) in COEFFICIENTS.items()}

    def moved(self, changes: Mapping[str, float], least: float) -> CostModel:
        """The costs with these changes of coefficients, in their units; none falls below ``least`` times its value.

        Sizes stay: see ``change_ms``.
        """
        found: dict[str, int] = {}
        for name in changes.keys() & COEFFICIENTS.keys():
            field, unit = COEFFICIENTS[name]
            value = getattr(self, field) or 0
            changed = value + changes[name] * unit
            found[field] = round(max(changed, least * value) if value > 0 else changed)
        return replace(self, **found, _filled_fs={})

    def change_ms(self, size: int, changes: Mapping[str, float], place_of: Callable[[tuple[int, int]], float]) -> float:
        """How f of a size changes where coefficients do; see ``error_of`` for a size that was not measured.

        place_of: where in its spread a gap between measured sizes lies, -1 to 1.
        """
        on_measured, spreads = self._on_measured({size_name(size): 1.0})
        moved = sum(weight * changes.get(name, 0.0) for name, weight in on_measured.items())
        return moved + sum(spread * place_of(gap) for gap, spread in spreads.items())

    @property
    def measured_sizes(self) -> tuple[int, ...]:
        """Sizes whose f the file states; those of ``interpolated_buckets`` are not among them."""
        return tuple(sorted(self.f_fs))

    def error_of(self, weights: Mapping[str, float]) -> CostError:
        """What the errors of the costs leave unknown of a figure.

        weights: its change for a unit of each coefficient, by the names of ``coefficients``; a size that was not
        measured is among them too. The cost of such a size is a weighted sum of two measured ones, and may lie anywhere
        between what models say that fit the measured ones: the line, and steps that are flat up to either of them.
        """
        on_measured, spreads = self._on_measured(weights)
        named = {name for fit in self.errors for name in fit.names}
        stated = self.coefficients
        given = [
            name
            for name, weight in on_measured.items()
            if name not in named and abs(weight * stated.get(name, 1.0)) > NEGLIGIBLE_CHANGE
        ]
        parts = [(fit.variance(on_measured), float(fit.degrees)) for fit in self.errors]
        if self.errors:
            parts += [(spread**2 / 3, math.inf) for spread in spreads.values()]
        return CostError(tuple(part for part in parts if part[0]), tuple(given))

    def _on_measured(self, weights: Mapping[str, float]) -> tuple[dict[str, float], dict[tuple[int, int], float]]:
        """Weights of stated coefficients alone, and for each gap between measured sizes how far the figure may move.

        Sizes in one gap move together. A size stays among the weights where a single one was measured.
        """
        of_stated, spreads = dict(weights), dict[tuple[int, int], float]()
        measured = self.measured_sizes
        for size in [int(name[2:-1]) for name in weights if name.startswith("f(") and int(name[2:-1]) not in measured]:
            if len(measured) > 1:
                weight = of_stated.pop(size_name(size))
                low, high = _neighbours(measured, size)
                for name, share in ((low, (high - size) / (high - low)), (high, (size - low) / (high - low))):
                    of_stated[size_name(name)] = of_stated.get(size_name(name), 0.0) + weight * share
                gap = (low, high) if low < size < high else (low, low) if size < low else (high, high)
                reach_fs = max(abs(self.bucket_fs(size) - self.bucket_fs(end)) for end in gap)
                spreads[gap] = spreads.get(gap, 0.0) + weight * reach_fs / FS_PER_MS
        return of_stated, spreads

    def bucket_fs(self, bucket: int) -> int:
        """f(b): measured, or filled in on the straight line between its measured neighbours.

        Above the largest (below the smallest) measured bucket: the line through the two largest (smallest). A
        filled-in value is never a reference for another.
        """
        if bucket not in self._filled_fs:
            self._filled_fs[bucket] = _fill_in(self.f_fs, bucket)
        return self._filled_fs[bucket]

    def decode_step_ns(self, bucket: int, num_seqs: int, context_tokens: int = 0) -> int:
        """Duration of a decode step of ``num_seqs`` requests whose sequences have ``context_tokens`` in sum."""
        return fs_to_ns(
            self.bucket_fs(bucket) + self.alpha_fs + self.beta_fs * num_seqs + self.context_fs * context_tokens
        )

    def chunked_step_ns(
        self, bucket: int, num_seqs: int, context_tokens: int, chunk_tokens: int, attended: int = 0
    ) -> int:
        """Duration of a step of ``num_seqs`` decodes, run with the size ``bucket``, and of parts of prompts.

        attended: ``attended_tokens`` of the parts, summed.
        """
        decode_fs = 0
        if num_seqs:
            decode_fs = self.bucket_fs(bucket) + self.alpha_fs + self.beta_fs * num_seqs
            decode_fs += self.context_fs * context_tokens
        chunk_fs = (self.chunk_step_fs or 0) + self.chunk_token_fs * chunk_tokens if chunk_tokens else 0
        return fs_to_ns(decode_fs + chunk_fs + self.attended_fs * attended)

    def of_query(self, query: int) -> CostModel:
        """The model in which f(b) is of a step of so many tokens a request, on vllm-rbln's native path."""
        return self if query == 1 else replace(self, f_fs=self.query_fs[query], _filled_fs={})

    def check_paged(self, config: EngineConfig) -> None:
        """Raise SpecError where it states no price of parts of prompts, or of drafts, where a step has some."""
        if config.rule_set.never_mixes and config.drafts.num_drafts:
            self._check_queries(config.queries)
        for key, price, needed in (
            ("chunked_prefill", self.chunk_step_fs, 1),
            ("drafts", self.draft_pass_ns, len(config.drafts.rates)),
        ):
            if needed and price is None:
                raise SpecError(
                    f"has no [{key}], which these rules need",
                    where=f"cost model {self.name}",
                    hint="Fit one with `harness server calibrate`, or try `emulated-gpu`: step times by arithmetic",
                )

    def _check_queries(self, queries: Sequence[int]) -> None:
        """SpecError where f of so many tokens a request is not stated, or less is known of it than of the rest."""
        where = f"cost model {self.name}"
        if missing := [query for query in queries if query > 1 and query not in self.query_fs]:
            raise SpecError(
                f"has no [decode.f_ms_by_query.{missing[0]}], which these rules need",
                where=where,
                hint="Write what a step takes in which each request computes so many tokens, by bucket, as measured",
            )
        if self.errors:
            raise SpecError(
                "states errors of its coefficients, and none of decode.f_ms_by_query",
                where=where,
                hint="Leave [[errors]] out: intervals are then of the workload alone",
            )

    def prefill_ns(self, computed_tokens: int, cached_tokens: int = 0) -> int:
        """Duration of a prefill that computes ``computed_tokens`` after ``cached_tokens`` reused ones; T(0) = 0."""
        calls = -(-computed_tokens // self.chunk_tokens)
        positions = calls * cached_tokens + self.chunk_tokens * (calls * (calls - 1) // 2)
        return fs_to_ns(calls * (self.call_fs + self.token_fs * computed_tokens) + self.position_fs * positions)

    def is_prefill_extrapolated(self, computed_tokens: int) -> bool:
        """Whether T(q) lies outside the fitted prompt lengths; also True where their range is not stated."""
        if computed_tokens == 0:
            return False
        fitted = self.fitted_prefill_tokens
        return fitted is None or not fitted[0] <= computed_tokens <= fitted[1]

    def is_context_extrapolated(self, num_seqs: int, context_tokens: int) -> bool:
        """Whether the mean sequence length of the batch lies outside the fitted ones."""
        fitted = self.fitted_context_tokens
        return fitted is not None and not fitted[0] * num_seqs <= context_tokens <= fitted[1] * num_seqs

    def interpolated_buckets(self, buckets: Sequence[int]) -> tuple[int, ...]:
        """Those of ``buckets`` whose cost was not measured."""
        return tuple(bucket for bucket in buckets if bucket not in self.f_fs)

    def unmeasured_of(self, config: EngineConfig) -> tuple[int, ...]:
        """Those buckets of a server whose cost was not measured, at any number of tokens a request."""
        queries = set(config.queries) if config.rule_set.never_mixes else {1}
        missing = {
            bucket for query in queries for bucket in self.of_query(query).interpolated_buckets(config.decode_buckets)
        }
        return tuple(sorted(missing))

    def decode_base_fs(self, config: EngineConfig) -> IntArray:
        """Shape (limit + 1,): f + alpha + beta n of a step of n requests, fs; place 0 is not used."""
        sizes = np.arange(config.max_num_seqs + 1, dtype=np.int64)
        bucket_fs = np.array([self.bucket_fs(bucket) for bucket in config.decode_buckets], dtype=np.int64)
        base_fs = bucket_fs[np.searchsorted(config.decode_buckets, sizes)] + self.alpha_fs + self.beta_fs * sizes
        base_fs[0] = 0
        return base_fs


def attended_tokens(before: int, computed: int) -> int:
    """Over the ``computed`` tokens of a part, the tokens that each attends to: itself and all before it in its prompt.

    before: tokens of the prompt whose KV is there already, cached or computed.
    """
    return computed * before + computed * (computed + 1) // 2


def _fill_in(measured: Mapping[int, int], bucket: int) -> int:
    if bucket in measured:
        return measured[bucket]
    if len(measured) == 1:
        return next(iter(measured.values()))
    low, high = _neighbours(measured, bucket)
    slope = Fraction(measured[high] - measured[low], high - low)
    return round(measured[low] + slope * (bucket - low))


def _neighbours(measured: Iterable[int], bucket: int) -> tuple[int, int]:
    """The two measured buckets on whose line one lies that was not measured."""
    known = sorted(measured)
    place = min(max(bisect(known, bucket), 1), len(known) - 1)
    return known[place - 1], known[place]


def _decimal(value: Any) -> Any:
    """Numbers as written: a float that slipped past the TOML reader counts as the decimal it prints as."""
    return Decimal(repr(value)) if isinstance(value, float) else value


Number = Annotated[Decimal, BeforeValidator(_decimal)]


class _Decode(Spec):
    """A decode step of n requests in a batch of size b: f(b) + alpha + beta n, and so much for each token read."""

    f_ms: dict[int, Annotated[Number, Field(gt=0)]] = Field(min_length=1)
    alpha_ms: Number = Decimal(0)
    beta_ms_per_request: Number = Decimal(0)
    context_us_per_token: Number = Decimal(0)
    fitted_context_tokens: tuple[int, int] | None = None
    f_ms_by_query: dict[Annotated[int, Field(ge=2)], dict[int, Annotated[Number, Field(gt=0)]]] = Field(
        default_factory=dict[int, dict[int, Decimal]],
        description="f of a step in which each request computes so many tokens (vllm-rbln's native path with drafts)",
    )


class _Prefill(Spec):
    """A prefill, by device calls of ``chunk_tokens``: each so long, and so much for each token and each place."""

    chunk_tokens: int = Field(default=PREFILL_CHUNK_TOKENS, ge=1)
    per_call_ms: Annotated[Number, Field(ge=0)]
    per_call_us_per_token: Number = Decimal(0)
    per_call_us_per_position: Number = Decimal(0)
    fitted_tokens: tuple[int, int] | None = None


class _ChunkedPrefill(Spec):
    """Prompts computed in parts, beside decodes (rules ``vllm-paged``)."""

    per_step_ms: Annotated[Number, Field(ge=0)]
    per_token_us: Annotated[Number, Field(ge=0)]
    per_attended_token_ns: Annotated[Number, Field(ge=0)] = Decimal(0)
    per_step_eager_ms: Annotated[Number, Field(ge=0)] = Decimal(0)

    @model_validator(mode="after")
    def _takes_time(self) -> _ChunkedPrefill:
        if not self.per_token_us and not self.per_attended_token_ns:
            raise ValueError("per_token_us must be above 0: a token of a prompt takes time")
        return self


class _Eager(Spec):
    """Decode steps that run without a graph although graphs are on (rules ``vllm-paged``)."""

    step_ns: int = Field(ge=0, le=LARGEST_FS // FS_PER_NS)


class _Drafts(Spec):
    """Speculative decoding: a pass of the drafter, of which a step has N, or one where it drafts all at once."""

    per_pass_ms: Annotated[Number, Field(ge=0)]


class _Errors(Spec):
    """Coefficients that were fitted together, how well they are known, and from how many degrees of freedom."""

    coefficients: list[str] = Field(min_length=1)
    standard_errors: list[Annotated[Number, Field(ge=0)]]
    correlations: list[list[Annotated[Number, Field(ge=-1, le=1)]]]
    degrees: int = Field(ge=1)


class CostFile(Spec):
    """What device steps take: a file of costs, as `harness server calibrate` writes it."""

    name: str
    source: str
    artifact: str = ""
    note: str = ""
    decode: _Decode
    prefill: _Prefill
    chunked_prefill: _ChunkedPrefill | None = None
    eager: _Eager = _Eager(step_ns=0)
    drafts: _Drafts | None = None
    errors: list[_Errors] = Field(default_factory=list[_Errors], description="of the fits; none: the costs are given")
    calibration: dict[str, Any] = Field(default_factory=dict, description="where the numbers come from, for readers")


def find_cost_file(name_or_path: str | Path) -> Path:
    """The file of a shipped cost model, or of a user's own; SpecError lists the known names."""
    return find_shipped("costs", str(name_or_path), what="cost model")


def load_cost_model(name_or_path: str | Path) -> CostModel:
    """The cost model in a file; raises SpecError naming the file and every key that is wrong."""
    path = find_cost_file(name_or_path)
    file = CostFile.from_table(
        load_toml(path, parse_float=_exact), where=str(path), hint="Compare with plans/costs/paper.toml"
    )
    try:
        return cost_model_from(file)
    except ValueError as error:
        raise SpecError(str(error), where=str(path), hint="Check the units in the key names") from error


def cost_model_from(table: CostFile) -> CostModel:
    """A checked cost file's values as exact integers."""
    decode, prefill = table.decode, table.prefill
    parts = [part for part in (decode, prefill, table.chunked_prefill, table.drafts) if part is not None]
    stated = {name: value for part in parts for name, value in part if name in COEFFICIENTS}
    in_units: dict[str, Any] = {
        # Of ns, what is less than one is cut off.
        field: to_fs(value, unit) if field.endswith("_fs") else to_fs(value, unit * FS_PER_NS) // FS_PER_NS
        for name, (field, unit) in COEFFICIENTS.items()
        if (value := stated.get(name)) is not None
    }
    model = CostModel(
        name=table.name,
        source=table.source,
        f_fs={bucket: to_fs(value, FS_PER_MS) for bucket, value in sorted(decode.f_ms.items())},
        chunk_tokens=prefill.chunk_tokens,
        fitted_context_tokens=decode.fitted_context_tokens,
        fitted_prefill_tokens=prefill.fitted_tokens,
        eager_ns=table.eager.step_ns,
        query_fs={
            query: {bucket: to_fs(value, FS_PER_MS) for bucket, value in sorted(f_ms.items())}
            for query, f_ms in decode.f_ms_by_query.items()
        },
        **in_units,
    )
    model = replace(model, errors=tuple(_errors(each, model) for each in table.errors), _filled_fs={})
    check_magnitudes(model)
    return model


def _errors(table: _Errors, model: CostModel) -> FitErrors:
    """The errors of a fit; ValueError where they are of other coefficients than the file states, or have no shape."""
    names, size = tuple(table.coefficients), len(table.coefficients)
    if unknown := [name for name in names if name not in model.coefficients]:
        raise ValueError(f"errors of {', '.join(unknown)}, which this file does not state")
    rows = [len(row) for row in table.correlations]
    if len(table.standard_errors) != size or rows != [size] * size:
        raise ValueError(f"errors of {size} coefficients need {size} standard errors and {size} x {size} correlations")
    correlations = tuple(tuple(map(float, row)) for row in table.correlations)
    return FitErrors(names, tuple(map(float, table.standard_errors)), correlations, table.degrees)


def check_magnitudes(model: CostModel) -> None:
    """Raise ValueError when a coefficient is so large that it must be a slip of units, or steps could take no time."""
    if any(bucket < 1 for f_fs in (model.f_fs, *model.query_fs.values()) for bucket in f_fs):
        raise ValueError("a bucket below 1 has no cost")
    if not all(model.query_fs.values()):
        raise ValueError("a table of f_ms_by_query has no bucket")
    each_fs = {
        **{size_name(size): value for size, value in model.f_fs.items()},
        "f_ms_by_query": max((value for f_fs in model.query_fs.values() for value in f_fs.values()), default=0),
        "alpha_ms": abs(model.alpha_fs),
        "beta_ms_per_request": abs(model.beta_fs),
        "per_call_ms": model.call_fs,
        "per_step_ms": model.chunk_step_fs or 0,
    }
    name, largest = max(each_fs.items(), key=lambda pair: pair[1])
    if largest > LARGEST_FS:
        raise ValueError(f"{name}: {largest / FS_PER_S:g} s is more than one second")
    of_token = ("context_us_per_token", "per_call_us_per_token", "per_call_us_per_position", "per_token_us")
    name = max(of_token, key=lambda name: abs(model.coefficients[name]))
    # A prompt took 3 ms a token on a CPU that others used too.
    if abs(model.coefficients[name]) * FS_PER_US > LARGEST_FS // 100:
        raise ValueError(f"{name}: more than ten milliseconds for each token")
    # A small model on one core of a CPU took 1.1 us.
    if model.attended_fs > LARGEST_FS // 10_000:
        raise ValueError("per_attended_token_ns is more than 100 microseconds")


GIB = 1 << 30


class DeviceSpec(Spec):
    """Memory and compile arithmetic. Defaults: Qwen3-4B, 4 devices; docs/reference/method-planning.md,
    "Search".

    Compile: compile_base_s + compile_call_s (buckets + 1) fits the observed 349-486 s. Overhead: memory of a device
    beside the KV slots after loading, the largest measured value (6.6-7.0 GiB with 4.5 GiB of KV).
    """

    devices: int = Field(default=4, ge=1)
    kv_bytes_per_token: int = Field(default=147_456, ge=1, description="all layers, keys and values, all devices")
    overhead_gib: float = Field(default=2.6, ge=0, description="per device, beside the KV slots")
    compile_base_s: float = Field(default=42.3, ge=0)
    compile_call_s: float = Field(default=61.33, ge=0)
    artifact_base_gib: float = Field(default=8.276, ge=0)
    artifact_bucket_gib: float = Field(default=0.806, ge=0)

    def memory_gib(self, candidate: ServerShape) -> float:
        """Memory of one device after loading, GiB."""
        kv_tokens = candidate.kv_slots * candidate.slot_tokens
        if candidate.num_gpu_blocks is not None:
            kv_tokens = candidate.num_gpu_blocks * PAGED_BLOCK_TOKENS
        kv_bytes = kv_tokens * self.kv_bytes_per_token
        return kv_bytes / self.devices / GIB + self.overhead_gib

    def compile_s(self, candidate: ServerShape) -> float:
        return self.compile_base_s + self.compile_call_s * (len(candidate.decode_buckets) + 1)

    def artifact_gib(self, candidate: ServerShape) -> float:
        return self.artifact_base_gib + self.artifact_bucket_gib * len(candidate.decode_buckets)
