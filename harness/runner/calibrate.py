"""Calibration: sweeps as an experiment, fits of its sealed runs, and the cost-model file.

Every coefficient comes from sealed runs that the file names by hash. An interrupted calibration continues. A file is
never overwritten.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tomli_w

from harness.analysis.calibration.fit import (
    ATTENDED,
    EAGER,
    MAX_SHARE,
    DecodeFit,
    EagerFit,
    FitError,
    PrefillFit,
    fit_decode,
    fit_decode_with_report,
    fit_eager,
    fit_prefill,
)
from harness.analysis.calibration.fit_points import (
    BLOCK_STEPS,
    PointSource,
    PrefillPoint,
    StepPoint,
    chunk_points,
    prefill_points,
    reported_f_ms,
    step_points,
)
from harness.analysis.stats import Interval
from harness.clock import NS_PER_MS, NS_PER_S, utc_now
from harness.errors import RecordsError, SpecError
from harness.measure.records import layout
from harness.measure.records.run import SealedRun, kind_of
from harness.model.engine import CostModel, load_cost_model
from harness.model.engine.config import PAGED_STEP_TOKENS
from harness.model.engine.cost import FS_PER_MS, FS_PER_US, FitErrors, attended_tokens, to_fs
from harness.model.spec import ExperimentSpec, ServerSpec, parse_experiment

Layout = Literal["separate", "joined"]
CONTEXT_TOKENS = (512, 1500, 3000)
PREFILL_TOKENS = (128, 256, 384, 500, 512, 1000, 2000, 3000, 4000, 6000)
# Beside them on a vLLM, where a return computes the end of its last block only.
SHORT_PREFILL_TOKENS = (8, 16, 32, 64)
QUICK_SWEEPS: dict[str, Any] = {
    "layout": "joined",
    "context_tokens": (512, 1500),
    "generate_tokens": 70,
    "prefill_tokens": (128, 500, 2000, 4000),
    "prefill_repeats": 3,
}
"""Fields of a CalibrationSpec for fewer lengths and one server start: rough and soon done."""
# A group must end before the next begins: predicted duration times this, and a pause.
MARGIN, PAUSE_S = 1.6, 0.3
# On a vLLM prompts arrive while another request decodes. It begins so much earlier, and lasts so much longer than
# predicted.
LEAD_S, RESERVE = 0.05, 2
# Up to this limit every n is measured; above it each bucket, the n that first needs it, and one between.
EVERY_N_UP_TO = 8
SECTIONS = ("workload.", "limits.", "client.")
"""How keys of the experiment begin that a calibration may set beside those of the server."""
# There are no re-arrivals, and late sends do not change the stamps of steps. The cost model here is a guess that paces
# the sweeps, so it does not say how long a step may take.
LOOSE_LIMITS = {"rearrival_lag_p99_ms": 2000.0, "start_spread_ms": 2000.0, "server_stall_ms": 60_000.0}


@dataclass(frozen=True, slots=True)
class CalibrationSpec:
    """The sweeps. num_seqs: constant numbers of decoding requests; default: every bucket and values between.

    context_tokens: prompt lengths of the constant-n runs; prefill_tokens: of the sweep. layout "separate": a server
    start for each n and context, which the server's own report needs; "joined": all in one run, one after another, as
    on every vLLM, whose step log tells them apart. sections: keys of the experiment's other tables, by table.
    """

    name: str
    backend: str
    server: ServerSpec
    base_seed: int
    time_scale: float = 1.0
    layout: Layout = "separate"
    replicates: int = 1
    num_seqs: tuple[int, ...] = ()
    context_tokens: tuple[int, ...] = CONTEXT_TOKENS
    generate_tokens: int = 160
    prefill_tokens: tuple[int, ...] = PREFILL_TOKENS
    prefill_repeats: int = 5
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    @property
    def swept_num_seqs(self) -> tuple[int, ...]:
        return self.num_seqs or default_num_seqs(self.server.decode_buckets, self.server.max_num_seqs)

    @property
    def swept_prefill_tokens(self) -> tuple[int, ...]:
        return (*SHORT_PREFILL_TOKENS, *self.prefill_tokens) if self.server.is_paged else self.prefill_tokens

    def bucket_of(self, num_seqs: int) -> int:
        """The compiled size of a decode step; ``num_seqs`` itself above the largest captured size."""
        return next((bucket for bucket in self.server.decode_buckets if bucket >= num_seqs), num_seqs)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fits and their origin. run_hashes: run -> SHA-256 of its manifest. buckets: the compiled decode buckets.

    step_points, prefill_points: the data of the fits. is_chunked: prompts are computed in parts beside decodes.
    eager: None: not fitted.
    """

    decode: DecodeFit
    prefill: PrefillFit
    artifact: str
    source: str
    notes: tuple[str, ...]
    provenance: Mapping[str, Any]
    packages: Mapping[str, str]
    run_hashes: Mapping[str, str] = field(repr=False)
    buckets: tuple[int, ...] = ()
    is_chunked: bool = False
    eager: EagerFit | None = None
    step_points: tuple[StepPoint, ...] = field(default=(), repr=False)
    prefill_points: tuple[PrefillPoint, ...] = field(default=(), repr=False)

    @property
    def intervals(self) -> dict[str, Interval]:
        """Of every coefficient, by its name."""
        eager = {} if self.eager is None else self.eager.intervals
        return {**self.decode.intervals, **self.prefill.intervals, **eager}

    @property
    def fit_errors(self) -> list[tuple[tuple[str, ...], FitErrors]]:
        """The errors of each fit, with the names of its coefficients in the cost file."""
        in_chunks = {"per_call_ms": "per_step_ms", "per_call_us_per_token": "per_token_us"} if self.is_chunked else {}
        fits = [self.decode, self.prefill, *([] if self.eager is None else [self.eager])]
        return [(tuple(in_chunks.get(name, name) for name in fit.errors.names), fit.errors) for fit in fits]

    @property
    def faults(self) -> tuple[str, ...]:
        """Why a fit is not called good: the step that it errs on most."""
        return tuple(
            f"NOT A GOOD FIT of {what}: it errs by {error.worst_in_words}, and more than {100 * MAX_SHARE:.0f} % is "
            "not good."
            for what, error in self.errors.items()
            if not error.is_good
        )

    @property
    def errors(self) -> dict[str, FitError]:
        """Of every fit."""
        eager = {} if self.eager is None else {"steps without a graph": self.eager.error}
        return {"decode": self.decode.error, "prefill": self.prefill.error, **eager}


def default_num_seqs(buckets: Sequence[int], limit: int) -> tuple[int, ...]:
    """Every n up to 8; above, for each bucket: the n that first needs it, one in the middle, and itself full.

    Captured sizes may end below the limit, or above it.
    """
    wanted = set(range(1, min(limit, EVERY_N_UP_TO) + 1))
    ends = sorted({limit, *(min(bucket, limit) for bucket in buckets)})
    for below, end in zip((0, *ends[:-1]), ends, strict=True):
        wanted |= {below + 1, (below + 1 + end) // 2, end}
    return tuple(sorted(wanted))


def calibration_experiment(spec: CalibrationSpec) -> ExperimentSpec:
    """The sweeps as an experiment, which is planned, run, resumed and sealed like any other.

    Raises SpecError when a length does not fit a slot or an n lies above the limit.
    """
    limit = spec.server.max_num_seqs
    if wrong := [n for n in spec.swept_num_seqs if not 1 <= n <= limit]:
        raise SpecError(f"n = {wrong} cannot run at once", where="num_seqs", hint=f"The limit is {limit}")
    points = {f"n{n}-c{context}": (n, context) for context in spec.context_tokens for n in spec.swept_num_seqs}
    if spec.layout == "joined" or spec.server.is_paged:
        decode, end_s = _decode_groups(spec, points)
        prefill = _beside_decodes(spec, end_s) if spec.server.is_paged else _prefill_groups(spec, end_s)
        conditions = [{"name": "all", "workload": {"group": [*decode, *prefill]}}]
    else:
        conditions: list[dict[str, Any]] = [
            {"name": name, "workload": {"num_sessions": n, "prompt_tokens": _fixed(context)}}
            for name, (n, context) in points.items()
        ]
        conditions.append({"name": "prefill", "workload": {"group": _prefill_groups(spec, 0.0)}})
    sweeps: dict[str, Any] = {
        "num_sessions": 1,
        "requests_per_session": 1,
        "waits": "none",
        "generate_tokens": _fixed(spec.generate_tokens),
    }
    given = {name: dict(table) for name, table in spec.sections.items()}
    if taken := sorted(given.get("workload", {}).keys() & {*sweeps, "prompt_tokens", "group", "source"}):
        raise SpecError(
            "is set by the sweeps", where=", ".join(f"workload.{key}" for key in taken), hint="Leave the key out"
        )
    return parse_experiment(
        {
            "name": spec.name,
            "title": f"Calibration of {{{','.join(map(str, spec.server.decode_buckets)) or 'its own sizes'}}}/{limit}",
            "question": "What does a decode step cost by bucket, requests and context, and a prefill by its tokens?",
            "backend": spec.backend,
            "time_scale": spec.time_scale,
            "replicates": spec.replicates,
            "base_seed": spec.base_seed,
            "workload": {**given.get("workload", {}), **sweeps},
            "client": given.get("client", {}),
            "server": spec.server.model_dump(mode="json", exclude_unset=True),
            "limits": {**LOOSE_LIMITS, **given.get("limits", {})},
            "condition": conditions,
        },
        where="calibration",
    )


def _decode_groups(spec: CalibrationSpec, points: Mapping[str, tuple[int, int]]) -> tuple[list[dict[str, Any]], float]:
    """Groups one after another, each after the predicted end of the one before and a margin; the last one's end, s."""
    model = load_cost_model(spec.server.cost_model)
    groups: list[dict[str, Any]] = []
    start_s = 0.0
    for name, (n, context) in points.items():
        generate = spec.generate_tokens
        if spec.server.is_paged:
            # The first request decodes while parts of the last prompt are computed.
            generate += n * context // (spec.server.max_num_batched_tokens or PAGED_STEP_TOKENS)
        groups.append(_group(name, n, context, generate, start_s=start_s))
        step_ns = model.decode_step_ns(spec.bucket_of(n), n, n * (context + generate))
        start_s += _paused_s(n * model.prefill_ns(context) + generate * step_ns)
    return groups, start_s


def _beside_decodes(spec: CalibrationSpec, start_s: float) -> list[dict[str, Any]]:
    """For each length its prompts one after another, while another request decodes: the engine is never idle."""
    model = load_cost_model(spec.server.cost_model)
    step_ns = model.decode_step_ns(spec.bucket_of(1), 1)
    groups: list[dict[str, Any]] = []
    # Prompts that arrive in the same step count for another length.
    repeats = 2 * spec.prefill_repeats
    for length in spec.swept_prefill_tokens:
        apart_s = round(MARGIN * (model.prefill_ns(length) + 2 * step_ns) / NS_PER_S, 3)
        sweep_s = LEAD_S + repeats * apart_s
        num_steps = round(RESERVE * sweep_s * NS_PER_S / step_ns)
        groups += [
            _group(f"d{length}", 1, PREFILL_TOKENS[0], num_steps, start_s=start_s),
            _group(f"q{length}", repeats, length, 2, start_s=start_s + LEAD_S, start_offset_s=apart_s),
        ]
        start_s += _paused_s(round(RESERVE * sweep_s * NS_PER_S))
    return groups


def _prefill_groups(spec: CalibrationSpec, start_s: float) -> list[dict[str, Any]]:
    """A group for each length, one prompt at a time; of two tokens, so that a decode step marks the prefill end."""
    model = load_cost_model(spec.server.cost_model)
    groups: list[dict[str, Any]] = []
    for length in spec.prefill_tokens:
        apart_s = _paused_s(model.prefill_ns(length) + model.decode_step_ns(1, 1, length))
        groups.append(_group(f"q{length}", spec.prefill_repeats, length, 2, start_s=start_s, start_offset_s=apart_s))
        start_s += spec.prefill_repeats * apart_s
    return groups


def _group(name: str, num_sessions: int, prompt_tokens: int, generate_tokens: int, **starts_s: float) -> dict[str, Any]:
    lengths = {"prompt_tokens": _fixed(prompt_tokens), "generate_tokens": _fixed(generate_tokens)}
    return {"name": name, "num_sessions": num_sessions, **lengths, **starts_s}


def _paused_s(predicted_ns: int) -> float:
    return round(MARGIN * predicted_ns / NS_PER_S + PAUSE_S, 3)


def _fixed(value: int) -> dict[str, Any]:
    return {"distribution": "fixed", "value": value}


def fit_runs(
    runs: Sequence[SealedRun],
    *,
    seed: int,
    with_context: bool | None = None,
    source: PointSource = "log",
) -> Calibration:
    """A cost model from sealed runs of ``harness server calibrate``, or of constant n and single prefills.

    with_context: None keeps the context term only where its interval excludes 0. source: of the times of steps and
    prefills. Where the server reported its times (VLLM_RBLN_METRICS) and no context term is wanted, f(b) comes from the
    report. INVALID runs are left out. Raises SpecError when the runs are of several configurations or do not determine
    a coefficient.
    """
    valid = [run for run in runs if run.is_valid]
    if not valid:
        raise SpecError(
            "no valid sealed run to fit" + "".join(f"; {run.label}: {run.invalid_reasons[0]}" for run in runs[:1]),
            where="calibration",
            hint="`harness runs` lists them; --resume --retry-invalid measures them again",
        )
    artifact = _one_artifact(valid)
    server = valid[0].server
    if server.is_paged and source != "log":
        raise SpecError("a vLLM is calibrated from its step log", where="--stamps", hint="Leave --stamps out")
    every_point = step_points(valid, source)
    points = tuple(point for point in every_point if not point.is_eager)
    if not points:
        raise SpecError("no decode step ran as a graph", where="calibration", hint="Read server.log")
    reported = reported_f_ms(valid)
    if reported and with_context is not True:
        decode = fit_decode_with_report(points, reported, seed=seed)
    else:
        decode = fit_decode(points, with_context=with_context, seed=seed)
    eager = None
    if server.is_paged:
        costs = _decode_model(decode)
        eager = _eager([point for point in every_point if point.is_eager], costs, seed)
        prefills = chunk_points(valid, costs)
        prefill = fit_prefill(prefills, seed=seed, chunk_tokens=server.slot_tokens, is_relative=True)
    else:
        prefills = tuple(point for point in prefill_points(valid, source) if not point.cached_tokens)
        prefill = fit_prefill(prefills, seed=seed)
    kind = kind_of(valid)
    backend, is_measured = kind.name, kind.has_device
    notes = (
        f"Fitted by harness server calibrate, {utc_now():%Y-%m-%d}.",
        "" if is_measured else f"No accelerator was measured: the backend was {backend}.",
        f"{len(runs) - len(valid)} invalid runs were left out." if len(runs) > len(valid) else "",
        *(_not_fitted(decode, eager, server) if server.is_paged else ()),
        *decode.notes,
        *prefill.notes,
    )
    calibration = Calibration(
        decode=decode,
        prefill=prefill,
        artifact=artifact,
        source=f"{len(valid)} sealed runs of experiment {valid[0].experiment} on backend {backend}",
        notes=tuple(note for note in notes if note),
        provenance={
            "date_utc": utc_now().isoformat(timespec="seconds"),
            "backend": backend,
            "is_npu_measured": is_measured and not server.is_paged,
            "step_source": source,
            "prefill_source": source,
            "block_steps": BLOCK_STEPS,
            "seed": seed,
        },
        packages=valid[0].manifest.packages,
        run_hashes={f"{run.condition}/{run.replicate}": manifest_sha256(run) for run in valid},
        buckets=valid[0].manifest.decode_buckets,
        step_points=points,
        prefill_points=prefills,
        is_chunked=server.is_paged,
        eager=eager,
    )
    return replace(calibration, notes=(*calibration.notes, *calibration.faults))


def _decode_model(decode: DecodeFit) -> CostModel:
    """The fitted decode steps as a cost model, which fills in the sizes that were not measured."""
    return CostModel(
        name="calibration",
        source="fit",
        f_fs={bucket: to_fs(f_ms, FS_PER_MS) for bucket, f_ms in decode.f_ms.items()},
        alpha_fs=to_fs(decode.alpha_ms, FS_PER_MS),
        beta_fs=to_fs(decode.beta_ms_per_request, FS_PER_MS),
        context_fs=to_fs(decode.context_us_per_token, FS_PER_US),
    )


def _eager(points: Sequence[StepPoint], costs: CostModel, seed: int) -> EagerFit | None:
    """The extra time of a step without a graph; None where no such step ran, or none takes longer."""
    if not points:
        return None

    def with_graph_ms(point: StepPoint) -> float:
        return costs.decode_step_ns(point.bucket, point.num_seqs, round(point.context_tokens or 0)) / NS_PER_MS

    fit = fit_eager(points, with_graph_ms, seed=seed)
    return fit if fit.step_ms >= 0 else None


def _not_fitted(decode: DecodeFit, eager: EagerFit | None, server: ServerSpec) -> Iterator[str]:
    """What the runs of a vLLM did not show."""
    if missing := [size for size in server.decode_buckets if size not in decode.f_ms]:
        yield f"Not fitted: f({', '.join(map(str, missing))}), no stretch of steps of this size."
    if server.decode_buckets and server.max_num_seqs > server.decode_buckets[-1] and eager is None:
        yield "Not fitted: the extra time of steps without a graph, no stretch of them or none that takes longer."


def manifest_sha256(run: SealedRun) -> str:
    """SHA-256 of a run's manifest, which names every other file of the run by its own."""
    return hashlib.sha256(run.file(layout.MANIFEST).read_bytes()).hexdigest()


def _compiled(run: SealedRun) -> tuple[object, ...]:
    server = run.server
    sizes = (server.max_num_seqs, server.kv_slots, server.slot_tokens)
    return (run.manifest.backend, server.decode_buckets, *sizes, server.artifact)


def _one_artifact(runs: Sequence[SealedRun]) -> str:
    """The compiled configuration of the runs' server; SpecError when they differ."""
    by_server = {_compiled(run): run for run in runs}
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


@dataclass(frozen=True, slots=True)
class Recovery:
    """Largest differences between two cost models over a grid, as shares of the second one's times."""

    step_share: float
    prefill_share: float
    step_ms: float
    prefill_ms: float


def compare_models(model: CostModel, known: CostModel, spec: CalibrationSpec) -> Recovery:
    """Differences of a model from a known one, over every n, context and prefill length of the sweeps."""
    largest, is_paged = max(spec.server.decode_buckets, default=spec.server.max_num_seqs), spec.server.is_paged
    steps = [
        tuple(
            each.decode_step_ns(spec.bucket_of(n), n, n * context) + each.eager_ns * (n > largest)
            for each in (model, known)
        )
        for n in range(1, spec.server.max_num_seqs + 1)
        for context in spec.context_tokens
    ]
    prefills = [
        tuple(
            each.chunked_step_ns(0, 0, 0, q, attended_tokens(0, q)) if is_paged else each.prefill_ns(q)
            for each in (model, known)
        )
        for q in spec.swept_prefill_tokens
    ]
    return Recovery(
        step_share=max(abs(fitted / true - 1) for fitted, true in steps),
        prefill_share=max(abs(fitted / true - 1) for fitted, true in prefills),
        step_ms=max(abs(fitted - true) for fitted, true in steps) / NS_PER_MS,
        prefill_ms=max(abs(fitted - true) for fitted, true in prefills) / NS_PER_MS,
    )


def check_folder(folder: Path) -> None:
    """Refuse a path that cannot hold cost files, before anything is measured."""
    if folder.exists() and not folder.is_dir():
        raise SpecError("is not a folder", where=str(folder), hint="Give a folder for cost-model files")


FILE_FORMAT = 3
# A nanosecond of a step, and 1e-6 us (with 100,000 tokens of context: 0.1 us).
DECIMALS = 6


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
    decode, prefill = calibration.decode, calibration.prefill
    table: dict[str, Any] = {
        "name": name,
        "artifact": calibration.artifact,
        "source": calibration.source,
        "note": " ".join(calibration.notes),
        "decode": {
            "alpha_ms": decode.alpha_ms,
            "beta_ms_per_request": decode.beta_ms_per_request,
            "context_us_per_token": decode.context_us_per_token,
            "fitted_context_tokens": decode.fitted_context_tokens,
            "f_ms": {str(bucket): f_ms for bucket, f_ms in decode.f_ms.items()},
        },
        "prefill": {
            "chunk_tokens": prefill.chunk_tokens,
            "per_call_ms": prefill.per_call_ms,
            "per_call_us_per_token": prefill.per_call_us_per_token,
            "fitted_tokens": prefill.fitted_tokens,
        },
        "calibration": {
            "format": FILE_FORMAT,
            **calibration.provenance,
            "packages": calibration.packages,
            "decode": {"method": decode.method, **_origin(decode)},
            "prefill": {"method": "least squares on the median time of each length", **_origin(prefill)},
            "runs": calibration.run_hashes,
        },
    }
    if calibration.is_chunked:
        table["chunked_prefill"] = {
            "per_step_ms": prefill.per_call_ms,
            "per_token_us": prefill.per_call_us_per_token,
            # Files of servers without it stay as they were.
            **({ATTENDED: prefill.per_attended_token_ns} if prefill.per_attended_token_ns else {}),
            **({EAGER: prefill.per_step_eager_ms} if prefill.per_step_eager_ms else {}),
        }
    if (eager := calibration.eager) is not None:
        table["eager"] = {"step_ns": round(eager.step_ms * NS_PER_MS)}
        table["calibration"]["eager"] = _origin(eager)
    # Rounding to the digits of a coefficient would take away what they are known to.
    return tomli_w.dumps({**_rounded(table), "errors": [_error_table(*each) for each in calibration.fit_errors]})


def _error_table(names: Sequence[str], errors: FitErrors) -> dict[str, Any]:
    """An entry of [[errors]]. names: of the coefficients in the file."""
    return {
        "coefficients": list(names),
        "standard_errors": [float(f"{error:.6g}") for error in errors.standard_errors],
        "correlations": [[round(value, 9) + 0.0 for value in row] for row in errors.correlations],
        "degrees": errors.degrees,
    }


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


def _origin(fit: DecodeFit | PrefillFit | EagerFit) -> dict[str, Any]:
    """Points, errors and intervals of a fit; without the estimates, which are the coefficients themselves."""
    intervals = {
        name: {key: value for key, value in asdict(interval).items() if key != "estimate"}
        for name, interval in fit.intervals.items()
    }
    return {"points": fit.num_points, **asdict(fit.error), "intervals": intervals}
