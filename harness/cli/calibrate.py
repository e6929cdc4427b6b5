"""``harness server calibrate``: measure what steps and prefills cost, and write a cost-model file.

Plans and runs nothing itself; a file once written is never changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.addresses import ResumeOption, RetryInvalidOption, RunsOption, output_option, sealed_runs
from harness.cli.run import ensure_machine_code
from harness.cli.terminal import escape_markup, say, show, terminal
from harness.errors import ExitCode, SpecError
from harness.kinds import DEFAULT_BACKEND, KINDS, kind_named
from harness.table import Table, interval_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from harness.analysis.calibration.cost_file import Calibration
    from harness.measure.records.run import SealedRun
    from harness.model.spec import ServerSpec
    from harness.runner.calibrate import CalibrationSpec

DEFAULT_SEED = 20261117
# Predicts how long the sweeps of a vLLM last, where no other cost model is named.
PACE_OF_VLLM = "emulated-gpu"


def calibrate(
    name: Annotated[str, typer.Argument(help="Name of the cost model; the file becomes `NAME-NUMBER.toml`.")],
    backend: Annotated[str, typer.Option(help=f"One of {', '.join(KINDS)}.")] = DEFAULT_BACKEND,
    runs: RunsOption = Path("runs"),
    output: Annotated[Path, output_option("Folder of cost models.")] = Path("plans/costs"),
    experiment: Annotated[
        Path | None, typer.Option(help="Take [server] and time_scale from this experiment file.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change one key of [server]: `--set max_num_seqs=16`; of another table by its name: "
            "`--set limits.stall_ms=20`. Repeatable.",
        ),
    ] = None,
    time_scale: Annotated[
        float | None, typer.Option(min=0.1, max=100, help="Model time / wall time (emulator).")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer lengths, one server start: rough and soon done.")
    ] = False,
    joined: Annotated[
        bool, typer.Option("--joined", help="One server start a replicate instead of one a point.")
    ] = False,
    replicates: Annotated[int, typer.Option(min=1, max=1000, help="Server restarts of every point.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and of intervals.")] = DEFAULT_SEED,
    context: Annotated[
        bool | None,
        typer.Option("--context/--no-context", help="Context term. Default: where its interval excludes 0."),
    ] = None,
    resume: ResumeOption = False,
    retry_invalid: RetryInvalidOption = False,
    fit_only: Annotated[str, typer.Option("--fit", help="Start nothing: fit the sealed runs of this experiment.")] = "",
) -> None:
    """Measure step and prefill costs, and write a cost-model file.

    Sweeps constant batches and prefill lengths.

    Example: `harness server calibrate my-npu --backend rbln --set artifact=/models/qwen3-4b-8 --runs runs/calibration`
    """
    from harness.analysis.calibration.cost_file import fit_runs, write_cost_file
    from harness.model.spec import check_name
    from harness.runner.calibrate import QUICK_SWEEPS, CalibrationSpec

    console = terminal()
    if output.exists() and not output.is_dir():
        raise SpecError("is not a folder", where=str(output), hint="Give a folder for cost-model files")
    try:
        check_name(f"calibrate-{name}")
    except ValueError as error:
        raise SpecError(str(error), where="calibrate") from error
    if retry_invalid and not resume:
        hint = f"Say: harness server calibrate {name} ... --resume --retry-invalid"
        raise SpecError("goes with --resume", where="--retry-invalid", hint=hint)
    layout: dict[str, Any] = QUICK_SWEEPS if quick else {"layout": "joined"} if joined else {}
    server, sections, scale = _tables(experiment, changes or [])
    spec = CalibrationSpec(
        name=f"calibrate-{name}",
        backend=backend,
        server=server.replica,
        base_seed=seed,
        time_scale=scale if time_scale is None else time_scale,
        replicates=replicates,
        sections=sections,
        **layout,
    )
    if fit_only:
        sealed = sealed_runs(runs, fit_only)
    else:
        sealed = _measure(console, spec, runs, resume=resume, retry_invalid=retry_invalid)
    calibration = fit_runs(sealed, seed=seed, with_context=context)
    path = write_cost_file(calibration, output, name)
    _show(console, calibration, path, runs)
    if not fit_only and not kind_named(backend).has_device:
        _show_recovery(console, path, spec)


def _tables(experiment: Path | None, changes: Sequence[str]) -> tuple[ServerSpec, dict[str, Any], float]:
    """The server to calibrate, further tables of the sweeps' experiment, and the time scale of the given one."""
    from harness.model.spec import ServerSpec, load_toml
    from harness.model.spec.changes import override_table
    from harness.runner.calibrate import SECTIONS

    table = {} if experiment is None else load_toml(experiment)
    named = [change if change.startswith(("server.", *SECTIONS)) else f"server.{change}" for change in changes]
    given = override_table({"server": table.get("server", {})}, named)
    hint = "See `harness explain experiment` for every key"
    server = ServerSpec.from_table(given.pop("server"), where="server", hint=hint)
    if server.is_paged and "cost_model" not in server.model_fields_set:
        server = server.model_copy(update={"cost_model": PACE_OF_VLLM})
    return server, given, float(table.get("time_scale", 1.0))


def _measure(
    console: Console, spec: CalibrationSpec, runs: Path, *, resume: bool, retry_invalid: bool
) -> Sequence[SealedRun]:
    from harness.cli.progress import watched
    from harness.runner import run_experiment
    from harness.runner.calibrate import calibration_experiment

    planned = calibration_experiment(spec)
    ensure_machine_code(planned)
    with watched(console) as (progress, stop):
        outcome = run_experiment(
            planned,
            runs_root=runs,
            resume=resume,
            retry_invalid=retry_invalid,
            on_progress=progress,
            stop=stop,
            spec_source="harness server calibrate",
        )
    for invalid in outcome.invalid_runs:
        say(console, f"[red]INVALID[/] {invalid.condition}: {escape_markup('; '.join(invalid.invalid_reasons))}")
    if not outcome.num_performed:
        again = "; --resume --retry-invalid measures the INVALID ones again" if outcome.invalid_runs else ""
        say(console, f"nothing was measured now: {len(outcome.runs)} runs were sealed before{again}")
    if not outcome.is_complete:
        say(console, f"{len(outcome.runs)} of {outcome.num_planned} runs are sealed; continue with --resume")
        raise typer.Exit(int(ExitCode.INTERRUPTED))
    return outcome.runs


def _show(console: Console, calibration: Calibration, path: Path, runs: Path) -> None:
    from harness.analysis.calibration.cost_file import DECODE, extrapolated
    from harness.model.engine import load_cost_model
    from harness.present.report.calibration import coefficients, write_calibration_report

    rows = [
        (name, f"{interval.estimate:.5f}", f"[{interval_text(interval.low, interval.high, 5, ', ')}]")
        for name, interval in coefficients(calibration).items()
    ]
    show(console, Table("", "", ("coefficient", "fitted", "95 % interval"), tuple(rows)))
    for what, error in calibration.errors.items():
        held_out = "nothing held out; residual" if error.held_out_max_ms is None else "held out"
        say(console, f"{what}: residual rms {error.rms_ms:.4f} ms; {held_out}: at most {error.worst_in_words}")
    say(console, f"measured sizes: {', '.join(map(str, calibration.fits[DECODE].f_ms))}")
    for note in calibration.notes:
        say(console, note)
    for line in extrapolated(calibration, load_cost_model(path)):
        say(console, f"flagged as extrapolated: {line}")
    page, plot = write_calibration_report(calibration, path, runs)
    say(console, f"cost model: {path}")
    say(console, f"report: {page}, {plot.name}")


def _show_recovery(console: Console, path: Path, spec: CalibrationSpec) -> None:
    from harness.model.engine import load_cost_model
    from harness.runner.calibrate import compare_models

    found = compare_models(load_cost_model(path), load_cost_model(spec.server.cost_model), spec)
    say(
        console,
        f"against the configured model {spec.server.cost_model!r}: steps within {100 * found.step_share:.3f} % "
        f"({found.step_ms:.4f} ms), prefills within {100 * found.prefill_share:.3f} % ({found.prefill_ms:.3f} ms)",
    )
