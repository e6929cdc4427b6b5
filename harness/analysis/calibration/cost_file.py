"""A cost model fitted to sealed runs, and its file, which names each run by hash and is never overwritten."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tomli_w

from harness.analysis.calibration.fit import (
    ATTENDED,
    EAGER,
    MAX_SHARE,
    PASS,
    Fit,
    FitError,
    fit_decode,
    fit_decode_with_report,
    fit_eager,
    fit_prefill,
)
from harness.analysis.calibration.fit_points import (
    BLOCK_STEPS,
    PrefillPoint,
    StepPoint,
    chunk_points,
    prefill_points,
    recorded_chunk_points,
    recorded_step_points,
    reported_f_ms,
    step_points,
)
from harness.analysis.calibration.scatter import artifact_of
from harness.analysis.stats import Interval, grouped
from harness.clock import NS_PER_MS, utc_now
from harness.errors import RecordsError, RunInvalidError, SpecError
from harness.measure.records import layout
from harness.measure.records.run import SealedRun, kind_of
from harness.model.engine import CostModel, load_cost_model
from harness.model.engine.config import PREFILL_CHUNK_TOKENS
from harness.model.engine.cost import FS_PER_MS, FS_PER_US, attended_tokens, to_fs
from harness.model.spec import ServerSpec
from harness.model.spec.server import DEFAULTS
from harness.stacks.vllm.step_log import load_step_log

DECODE, PREFILL, WITHOUT_GRAPH = "decode", "prefill", "steps without a graph"
FILE_FORMAT = 3
LEAST_BATCHES = 2
"""Fewest numbers of requests at once in a record that is fitted: one number determines no slope."""
# A nanosecond of a step, and 1e-6 us (with 100,000 tokens of context: 0.1 us).
DECIMALS = 6
# The names of a chunked prefill's coefficients in its table of the file.
CHUNKED = {"per_call_ms": "per_step_ms", "per_call_us_per_token": "per_token_us"}


@dataclass(frozen=True, slots=True)
class FitSource:
    """What was fitted: sealed runs, or the recorded steps of a server.

    is_chunked: whether prompts are computed in parts beside decodes. slot_tokens: of the longest request. backend: as
    the file names it. hashes: SHA-256 of each record, by its name.
    """

    words: str
    artifact: str
    backend: str
    is_chunked: bool
    slot_tokens: int
    is_npu_measured: bool = False
    packages: Mapping[str, str] = field(default_factory=dict[str, str])
    hashes: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fits of one compiled configuration."""

    origin: FitSource
    fits: Mapping[str, Fit]
    """By DECODE, PREFILL and WITHOUT_GRAPH; the last only where it was fitted."""
    notes: tuple[str, ...]
    seed: int
    point_source: Literal["log", "recorded"]
    """Whose stamps the times are of: the server's log, or a recording of its steps."""
    buckets: tuple[int, ...]
    """The compiled decode buckets."""
    step_points: tuple[StepPoint, ...] = field(default=(), repr=False)
    prefill_points: tuple[PrefillPoint, ...] = field(default=(), repr=False)

    @property
    def intervals(self) -> dict[str, Interval]:
        """Of every coefficient, by its name."""
        return {name: interval for fit in self.fits.values() for name, interval in fit.intervals.items()}

    @property
    def errors(self) -> dict[str, FitError]:
        """Of every fit."""
        return {what: fit.error for what, fit in self.fits.items()}


def fit_runs(runs: Sequence[SealedRun], *, seed: int, with_context: bool | None = None) -> Calibration:
    """A cost model from sealed runs of ``harness server calibrate``, or of constant n and single prefills.

    with_context: None keeps the context term only where its interval excludes 0. Where the server reported its times
    (VLLM_RBLN_METRICS) and no context term is wanted, f(b) comes from the report. INVALID runs are left out. Raises
    RunInvalidError where all are, SpecError when the runs are of several configurations or do not determine a
    coefficient.
    """
    valid = [run for run in runs if run.is_valid]
    if not valid:
        raise RunInvalidError(
            "no valid sealed run to fit" + "".join(f"; {run.label}: {run.invalid_reasons[0]}" for run in runs[:1]),
            where="calibration",
            hint="`tune`: the same command makes them again; `harness server calibrate`: --resume --retry-invalid",
        )
    artifact, server, kind = _one_artifact(valid), valid[0].server, kind_of(valid)
    every_point = step_points(valid)
    points = tuple(point for point in every_point if not point.is_eager)
    if not points:
        raise SpecError("no decode step ran as a graph", where="calibration", hint="Read server.log")
    reported = reported_f_ms(valid)
    if reported and with_context is not True:
        decode = fit_decode_with_report(points, reported, seed=seed)
    else:
        decode = fit_decode(points, with_context=with_context, seed=seed)
    fits = {DECODE: decode}
    if server.is_paged:
        costs = _decode_model(decode)
        prefills = chunk_points(valid, costs)
        fits |= _fits_beside(decode, every_point, prefills, server.slot_tokens, seed)
    else:
        prefills = tuple(point for run in valid for point in prefill_points(run) if not point.cached_tokens)
        fits[PREFILL] = fit_prefill(prefills, seed=seed)
    notes = (
        f"Fitted by harness server calibrate, {utc_now():%Y-%m-%d}.",
        "" if kind.has_device else f"No accelerator was measured: the backend was {kind.name}.",
        f"{len(runs) - len(valid)} invalid runs were left out." if len(runs) > len(valid) else "",
        *(_not_fitted(fits, [run.server for run in valid]) if server.is_paged else ()),
        *_notes_of(fits),
    )
    return Calibration(
        origin=FitSource(
            words=f"{len(valid)} sealed runs of experiment {valid[0].experiment} on backend {kind.name}",
            artifact=artifact,
            backend=kind.name,
            is_chunked=server.is_paged,
            slot_tokens=server.slot_tokens,
            is_npu_measured=bool(kind.has_device) and not server.is_paged,
            packages=valid[0].manifest.packages,
            # A manifest names every other file of its run by hash.
            hashes={run.label: _sha256(run.file(layout.MANIFEST)) for run in valid},
        ),
        fits=fits,
        notes=tuple(filter(None, notes)),
        seed=seed,
        point_source="log",
        buckets=valid[0].manifest.decode_buckets,
        step_points=points,
        prefill_points=prefills,
    )


def fit_recorded(path: Path, *, seed: int) -> Calibration:
    """A cost model from the timed steps that a vLLM wrote while it served (VLLM_CORE_STEPS_FILE).

    Raises RecordsError where they cannot be read, SpecError where they do not determine a coefficient: steps of one
    number of requests price no other.
    """
    log = load_step_log(path)
    every_point = recorded_step_points(log)
    points = tuple(point for point in every_point if not point.is_eager)
    seen = sorted({point.num_seqs for point in points})
    if len(seen) < LEAST_BATCHES:
        what = f"of {log.steps.num_rows:,} steps only those of {seen or 'no'} requests were often enough to be timed"
        raise SpecError(what, where=str(path), hint="Record for longer, or calibrate: harness server calibrate")
    decode = fit_decode(points, seed=seed)
    prefills = recorded_chunk_points(log, _decode_model(decode))
    slot_tokens = log.settings.get("slot_tokens", DEFAULTS["slot_tokens"])
    fits = {DECODE: decode, **_fits_beside(decode, every_point, prefills, slot_tokens, seed)}
    return Calibration(
        origin=FitSource(
            words=f"{log.steps.num_rows:,} steps of {path.name}, of up to {seen[-1]} requests at once",
            artifact=f"vLLM {log.vllm}",
            backend="attached",
            is_chunked=True,
            slot_tokens=slot_tokens,
            packages={"vllm": log.vllm},
            hashes={path.name: _sha256(path)},
        ),
        fits=fits,
        notes=(f"Fitted to recorded steps, {utc_now():%Y-%m-%d}.", *_notes_of(fits)),
        seed=seed,
        point_source="recorded",
        buckets=tuple(log.settings.get("decode_buckets") or seen),
        step_points=points,
        prefill_points=prefills,
    )


def _fits_beside(
    decode: Fit, points: Sequence[StepPoint], prefills: Sequence[PrefillPoint], slot_tokens: int, seed: int
) -> dict[str, Fit]:
    """The fits of a vLLM beside that of its decode steps: parts of prompts, and steps without a graph."""
    costs = _decode_model(decode)
    fits = {PREFILL: fit_prefill(prefills, seed=seed, chunk_tokens=slot_tokens, is_relative=True)}
    eager_points = [point for point in points if point.is_eager]
    eager = fit_eager(eager_points, lambda point: _step_ms(point, costs), seed=seed) if eager_points else None
    # Where none takes longer nothing is known.
    if eager is not None and eager["eager_ms"] >= 0:
        fits[WITHOUT_GRAPH] = eager
    return fits


def _notes_of(fits: Mapping[str, Fit]) -> Iterator[str]:
    """What the fits say of themselves."""
    yield from (*fits[DECODE].notes, *fits[PREFILL].notes)
    for what, fit in fits.items():
        if not fit.error.is_good:
            limit = f"more than {100 * MAX_SHARE:.0f} % is not good"
            yield f"NOT A GOOD FIT of {what}: it errs by {fit.error.worst_in_words}, and {limit}."


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _decode_model(decode: Fit) -> CostModel:
    """The fitted decode steps as a cost model, which fills in the sizes that were not measured."""
    return CostModel(
        name="calibration",
        source="fit",
        f_fs={bucket: to_fs(f_ms, FS_PER_MS) for bucket, f_ms in decode.f_ms.items()},
        alpha_fs=to_fs(decode["alpha_ms"], FS_PER_MS),
        beta_fs=to_fs(decode["beta_ms_per_request"], FS_PER_MS),
        context_fs=to_fs(decode["context_us_per_token"], FS_PER_US),
        draft_pass_ns=round(decode[PASS] * NS_PER_MS),
    )


def _step_ms(point: StepPoint, costs: CostModel) -> float:
    """What a step of the point costs as a graph."""
    step_ns = costs.decode_step_ns(point.bucket, point.num_seqs, round(point.context_tokens or 0))
    return (step_ns + point.passes * (costs.draft_pass_ns or 0)) / NS_PER_MS


def _not_fitted(fits: Mapping[str, Fit], servers: Sequence[ServerSpec]) -> Iterator[str]:
    """What the runs of a vLLM did not show."""
    sizes = servers[0].decode_buckets
    if missing := [size for size in sizes if size not in fits[DECODE].f_ms]:
        yield f"Not fitted: f({', '.join(map(str, missing))}), no stretch of steps of this size."
    most_tokens = max(server.max_num_seqs * (1 + (server.num_speculative_tokens or 0)) for server in servers)
    if sizes and most_tokens > sizes[-1] and WITHOUT_GRAPH not in fits:
        yield "Not fitted: the extra time of steps without a graph, no stretch of them or none that takes longer."


def _one_artifact(runs: Sequence[SealedRun]) -> str:
    """The compiled configuration of the runs' server; SpecError when they differ."""
    by_server = {(run.manifest.backend, artifact_of(run), run.server.speculative_method): run for run in runs}
    if len(by_server) > 1:
        conditions = ", ".join(sorted(run.condition for run in by_server.values()))
        raise SpecError(
            f"the runs are of {len(by_server)} configurations: {conditions}",
            where="calibration",
            hint="Fit each compiled artifact separately",
        )
    server = runs[0].server
    buckets = ",".join(map(str, server.decode_buckets))
    name = server.artifact or runs[0].manifest.backend
    return f"{name}, buckets {{{buckets}}}, limit {server.max_num_seqs}, {server.slot_tokens} tokens"


class Residual(NamedTuple):
    """One point of a fit. what: "n=3 in bucket 4, 512 tokens each" or "q=500"; x: n or q. Times in ms."""

    what: str
    x: float
    measured_ms: float
    fitted_ms: float

    @property
    def residual_ms(self) -> float:
        return self.measured_ms - self.fitted_ms


def decode_residuals(calibration: Calibration, model: CostModel) -> list[Residual]:
    """Every stretch of constant n against the written model, by n and context."""
    residuals: list[Residual] = []
    for point in sorted(calibration.step_points, key=lambda point: (point.num_seqs, point.context_tokens or 0.0)):
        context = point.context_tokens
        each = "" if context is None else f", {round(round(context) / point.num_seqs)} tokens each"
        drafted = f", {point.passes} passes of the drafter" if point.passes else ""
        what = f"n={point.num_seqs} in bucket {point.bucket}{drafted}{each}"
        residuals.append(Residual(what, point.num_seqs, point.period_ms, _step_ms(point, model)))
    return residuals


def prefill_residuals(calibration: Calibration, model: CostModel) -> list[Residual]:
    """The median time of every prompt length against the written model."""
    residuals: list[Residual] = []
    by_work = grouped(calibration.prefill_points, lambda point: point.work)
    for (length, attended, is_eager), points in sorted(by_work.items()):
        is_whole = attended in (0, attended_tokens(0, length))
        what = f"q={length}" if is_whole else f"q={length}, {attended:,} tokens attended to"
        fitted_ns = (
            model.chunked_step_ns(0, 0, 0, length, attended)
            if calibration.origin.is_chunked
            else model.prefill_ns(length)
        )
        fitted_ns += model.chunk_eager_ns * is_eager
        measured_ms = float(np.median([point.elapsed_ms for point in points]))
        residuals.append(Residual(what, length, measured_ms, fitted_ns / NS_PER_MS))
    return residuals


def extrapolated(calibration: Calibration, model: CostModel) -> Iterator[str]:
    """What the model gives without having seen it, one line each."""
    if filled := model.interpolated_buckets(calibration.buckets):
        yield (
            f"f({', '.join(map(str, filled))}) was not measured: filled in on the line between measured buckets, or "
            "through the two largest"
        )
    low, high = model.fitted_prefill_tokens or (0, 0)
    yield (
        f"steps with fewer than {low} or more than {high} tokens of prompts"
        if calibration.origin.is_chunked
        else f"prefills below {low} or above {high} computed tokens"
    )
    if model.fitted_context_tokens is not None:
        low, high = model.fitted_context_tokens
        yield f"decode steps with a mean sequence length below {low} or above {high} tokens"


def write_cost_file(calibration: Calibration, folder: Path, name: str) -> Path:
    """Write ``<folder>/<name>-<k>.toml`` with the lowest number k that is free, and read it back.

    Raises SpecError when the fitted coefficients make no cost model, RecordsError when it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = folder / f"{name}-{number}.toml"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(cost_file_text(calibration, path.stem))
            break
        except FileExistsError:
            number += 1
        except OSError as error:
            raise RecordsError(f"cannot be written ({error.strerror})", where=str(path)) from error
    try:
        load_cost_model(path)
    except SpecError as error:
        path.rename(path.with_suffix(".rejected"))
        raise SpecError(
            f"the fitted coefficients make no cost model: {error.what}",
            where=str(path.with_suffix(".rejected")),
            hint="Look at its residuals: a step or prefill may be attributed wrongly",
        ) from error
    return path


def cost_file_text(calibration: Calibration, name: str) -> str:
    """The text of a cost-model file."""
    origin = calibration.origin
    decode, prefill = calibration.fits[DECODE], calibration.fits[PREFILL]
    names = CHUNKED if origin.is_chunked else {}
    origins = {what: {"method": fit.method, **_origin(fit)} for what, fit in calibration.fits.items()}
    table: dict[str, Any] = {
        "name": name,
        "artifact": origin.artifact,
        "source": origin.words,
        "note": " ".join(calibration.notes),
        "decode": {
            **{each: decode[each] for each in ("alpha_ms", "beta_ms_per_request", "context_us_per_token")},
            "fitted_context_tokens": decode.fitted_tokens,
            "f_ms": decode.f_ms,
        },
        "prefill": {
            "chunk_tokens": origin.slot_tokens if origin.is_chunked else PREFILL_CHUNK_TOKENS,
            **{each: prefill[each] for each in CHUNKED},
            "fitted_tokens": prefill.fitted_tokens,
        },
        "calibration": {
            "format": FILE_FORMAT,
            "date_utc": utc_now().isoformat(timespec="seconds"),
            "backend": origin.backend,
            "is_npu_measured": origin.is_npu_measured,
            "step_source": calibration.point_source,
            "prefill_source": calibration.point_source,
            "block_steps": BLOCK_STEPS,
            "seed": calibration.seed,
            "packages": origin.packages,
            DECODE: origins[DECODE],
            PREFILL: origins[PREFILL],
            "runs": origin.hashes,
        },
    }
    if origin.is_chunked:
        # Files of servers without the last two stay as they were.
        kept = {each: value for each in (ATTENDED, EAGER) if (value := prefill[each])}
        table["chunked_prefill"] = {named: prefill[each] for each, named in CHUNKED.items()} | kept
    if (eager := calibration.fits.get(WITHOUT_GRAPH)) is not None:
        table["eager"] = {"step_ns": round(eager["eager_ms"] * NS_PER_MS)}
        table["calibration"]["eager"] = origins[WITHOUT_GRAPH]
    if any(point.passes for point in calibration.step_points):
        table["drafts"] = {PASS: decode[PASS]}
    # Rounding to the digits of a coefficient would take away what they are known to.
    errors = [
        {
            "coefficients": [names.get(each, each) for each in fit.errors.names],
            "standard_errors": [float(f"{error:.6g}") for error in fit.errors.standard_errors],
            "correlations": [[round(value, 9) + 0.0 for value in row] for row in fit.errors.correlations],
            "degrees": fit.errors.degrees,
        }
        for fit in calibration.fits.values()
    ]
    return tomli_w.dumps({**_rounded(table), "errors": errors})


def _rounded(value: Any) -> Any:
    """The same value with every float rounded to DECIMALS, and without what is absent."""
    if isinstance(value, float):
        # A negative zero is a zero.
        return round(value, DECIMALS) + 0.0
    if isinstance(value, Mapping):
        members: Mapping[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
        return {str(key): _rounded(member) for key, member in members.items() if member is not None and member != ""}
    if isinstance(value, list | tuple):
        return [_rounded(member) for member in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _origin(fit: Fit) -> dict[str, Any]:
    """Points, errors and intervals of a fit; without the estimates, which are the coefficients themselves."""
    intervals = {
        name: {key: value for key, value in asdict(interval).items() if key != "estimate"}
        for name, interval in fit.intervals.items()
    }
    return {"points": fit.num_points, **asdict(fit.error), "intervals": intervals}
