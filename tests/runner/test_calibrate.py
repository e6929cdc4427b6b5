from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.analysis.calibration.cost_file import (
    DECODE,
    PREFILL,
    decode_residuals,
    extrapolated,
    fit_runs,
    write_cost_file,
)
from harness.analysis.figures import figures_at, run_figures
from harness.analysis.run_tables import MOVED_COUNTER, counter_increment
from harness.cli.tree import app
from harness.errors import SpecError
from harness.measure.records.run import SealedRun
from harness.model.engine import load_cost_model
from harness.model.engine.cost import attended_tokens
from harness.model.sim import simulate
from harness.model.sim.draws import perturbation_of
from harness.model.spec import PerturbationSpec, ServerSpec
from harness.present.report.calibration import write_calibration_report
from harness.runner import run_experiment
from harness.runner.backends import sim
from harness.runner.calibrate import (
    CalibrationSpec,
    calibration_experiment,
    compare_models,
    default_num_seqs,
)
from harness.stacks.vllm.step_log import COLUMNS
from tests.support.emulated_vllm import emulated_vllm
from tests.support.experiments import UNHURRIED

pytestmark = pytest.mark.same_everywhere
Sweeps = Callable[..., tuple[SealedRun, ...]]

# The servers' stamps are what is fitted, however late the client is.
READ_LATE = {"limits": UNHURRIED}


def little_sweep(cost_model: str, backend: str = "sim", **changes: Any) -> CalibrationSpec:
    """n = 1..4 on {1,2,4} at two contexts, four prefill lengths; seconds of model time."""
    server = ServerSpec(max_num_seqs=4, decode_buckets=(1, 2, 4), cost_model=cost_model)
    spec = CalibrationSpec(
        name="calibrate-test",
        backend=backend,
        server=server,
        base_seed=11,
        layout="joined",
        context_tokens=(300, 1200),
        generate_tokens=40,
        prefill_tokens=(128, 500, 1000, 2500),
        prefill_repeats=2,
        sections=READ_LATE,
    )
    return replace(spec, **changes)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Sweeps:
    """The sealed runs of a little sweep by cost model and layout, made once."""

    @cache
    def runs(cost_model: str, layout: str = "joined") -> tuple[SealedRun, ...]:
        spec = little_sweep(cost_model, layout=layout)
        return run_experiment(calibration_experiment(spec), runs_root=tmp_path_factory.mktemp("swept")).runs

    return runs


@pytest.mark.parametrize(
    ("cost_model", "layout"), [("paper", "joined"), ("context-1-2-4-8", "joined"), ("context-1-2-4-8", "separate")]
)
def test_a_known_model_comes_back_from_virtual_time(
    tmp_path: Path, swept: Sweeps, cost_model: str, layout: str
) -> None:
    spec, runs = little_sweep(cost_model, layout=layout), swept(cost_model, layout)
    assert [run.invalid_reasons for run in runs if not run.is_valid] == []
    calibration = fit_runs(runs, seed=1)
    fitted = load_cost_model(write_cost_file(calibration, tmp_path / "costs", "mine"))
    found = compare_models(fitted, load_cost_model(cost_model), spec)
    # The log's microseconds, over blocks of four steps.
    assert found.step_share < 1e-4
    assert found.prefill_share < 1e-4


def skip_where_the_emulator_was_late(run: SealedRun) -> None:
    """An emulator that its host held up says so in its metrics; its stamps are then not those of its cost model."""
    if moved_s := counter_increment(run.table("metrics"), MOVED_COUNTER):
        pytest.skip(f"the host stalled: the emulator's schedule moved by {moved_s:.3f} s of model time")


def test_the_file_says_where_its_numbers_come_from_and_is_never_written_over(tmp_path: Path, swept: Sweeps) -> None:
    calibration = fit_runs(swept("paper"), seed=1)
    paths = [write_cost_file(calibration, tmp_path / "costs", "mine") for _ in range(2)]
    assert [path.name for path in paths] == ["mine-1.toml", "mine-2.toml"]
    text = paths[0].read_text()
    for said in (
        "No accelerator was measured",
        "calibration.runs",
        "seed = 1",
        "percentile bootstrap",
        "fitted_tokens",
        "numpy",
    ):
        assert said in text
    model = load_cost_model(paths[0])
    assert "bucket_sd" not in perturbation_of(PerturbationSpec(), paths[0]).assumed
    assert 8 not in model.f_fs
    assert 4 in model.f_fs
    assert model.is_prefill_extrapolated(2600)
    assert model.is_context_extrapolated(1, 5000)


def test_the_report_shows_every_point_and_names_interpolated_buckets(tmp_path: Path, swept: Sweeps) -> None:
    calibration = fit_runs(swept("paper"), seed=1)
    model = load_cost_model(write_cost_file(calibration, tmp_path / "costs", "mine"))
    assert len(decode_residuals(calibration, model)) == len(calibration.step_points)
    assert max(abs(one.residual_ms) for one in decode_residuals(calibration, model)) < 0.01
    wider = replace(calibration, buckets=(*calibration.buckets, 32))
    assert any("f(32) was not measured" in line for line in extrapolated(wider, model))


def test_runs_of_two_configurations_are_not_fitted_together(tmp_path: Path, swept: Sweeps) -> None:
    wide = ServerSpec(max_num_seqs=4, decode_buckets=(1, 4), cost_model="paper")
    other = run_experiment(calibration_experiment(little_sweep("paper", server=wide)), runs_root=tmp_path).runs
    with pytest.raises(SpecError, match="2 configurations"):
        fit_runs([*swept("paper"), *other], seed=1)


def test_an_n_above_the_limit_is_refused_before_anything_starts() -> None:
    with pytest.raises(SpecError, match="cannot run at once"):
        calibration_experiment(little_sweep("paper", num_seqs=(1, 5)))


def test_every_bucket_is_swept_and_something_between() -> None:
    assert default_num_seqs((1, 2, 4, 8), 8) == tuple(range(1, 9))
    assert default_num_seqs((1, 4, 6, 8, 10, 16), 16) == (*range(1, 9), 9, 10, 11, 13, 16)


def test_the_command_measures_fits_and_says_how_near_it_came(tmp_path: Path) -> None:
    asked = ["server", "calibrate", "mine", "--backend", "sim", "--quick", "--set", "cost_model=context-1-2-4-8"]
    places = ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "costs")]
    done = CliRunner().invoke(app, [*asked, *places])
    assert done.exit_code == 0, done.output
    assert "steps within 0.00" in done.output
    assert (tmp_path / "costs" / "mine-1.toml").is_file()
    page = (tmp_path / "runs" / "mine-1.md").read_text()
    for said in (
        "No accelerator was measured",
        "held-out largest",
        "below 128 or above 4000 computed tokens",
        "n=8 in bucket 8",
    ):
        assert said in page
    assert "flagged as extrapolated: prefills below 128 or above 4000" in done.output
    assert (tmp_path / "runs" / "mine-1.png").read_bytes().startswith(b"\x89PNG")
    again = CliRunner().invoke(app, ["server", "calibrate", "mine", "--fit", "calibrate-mine", *places])
    assert again.exit_code == 0, again.output
    assert (tmp_path / "costs" / "mine-2.toml").is_file()


def gpu_sweep(server: dict[str, Any], backend: str = "sim") -> CalibrationSpec:
    """Every n up to six at one context, and four prompt lengths, on a server of vLLM's rules."""
    return CalibrationSpec(
        name="calibrate-gpu",
        backend=backend,
        server=ServerSpec.model_validate({"max_num_seqs": 6, "decode_buckets": [1, 2, 4], **server}),
        base_seed=11,
        context_tokens=(300,),
        generate_tokens=40,
        prefill_tokens=(128, 700, 1500, 2500),
        prefill_repeats=2,
        sections=READ_LATE,
    )


def gpu_costs(
    folder: Path,
    sizes_ms: dict[int, float],
    per_step_ms: float,
    per_token_us: float,
    eager_ns: int,
    context_us: float = 0.0,
    attended_ns: float = 0.0,
) -> str:
    """A cost file of a GPU server that nobody shipped."""
    sizes = "".join(f"{size} = {f_ms}\n" for size, f_ms in sizes_ms.items())
    path = folder / "truth.toml"
    path.write_text(
        f'name = "truth"\nsource = "a test"\n[decode]\nbeta_ms_per_request = 0.02\n'
        f"context_us_per_token = {context_us}\n[decode.f_ms]\n{sizes}"
        "[prefill]\nper_call_ms = 1\nper_call_us_per_token = 20\n"
        f"[chunked_prefill]\nper_step_ms = {per_step_ms}\nper_token_us = {per_token_us}\n"
        f"per_attended_token_ns = {attended_ns}\n"
        f"[eager]\nstep_ns = {eager_ns}\n[drafts]\nper_pass_ms = 0.35\n"
    )
    return str(path)


@pytest.mark.parametrize(
    ("f_ms", "per_step_ms", "per_token_us", "eager_ns"),
    [({1: 2.45, 2: 2.6, 4: 3.4}, 0.4, 20, 3_000_000), ({1: 8.0, 2: 8.0, 4: 15.5}, 0.0, 3.5, 0)],
    ids=["fast", "slow"],
)
def test_a_known_gpu_server_comes_back_within_the_intervals(
    tmp_path: Path, f_ms: dict[int, float], per_step_ms: float, per_token_us: float, eager_ns: int
) -> None:
    truth = gpu_costs(tmp_path, f_ms, per_step_ms, per_token_us, eager_ns)
    [run] = run_experiment(
        calibration_experiment(gpu_sweep({"rules": "vllm-paged", "cost_model": truth})), runs_root=tmp_path
    ).runs
    assert run.is_valid, run.invalid_reasons
    calibration = fit_runs([run], seed=1)
    known = {f"f({size})": ms for size, ms in f_ms.items()} | {
        "beta_ms_per_request": 0.02,
        "per_call_ms": per_step_ms,
        "per_call_us_per_token": per_token_us,
        "eager_ms": eager_ns / 1e6,
    }
    assert calibration.intervals.keys() == known.keys()
    for name, interval in calibration.intervals.items():
        # A step lasts whole nanoseconds.
        assert interval.low - 1e-5 <= known[name] <= interval.high + 1e-5, name
    fitted = load_cost_model(write_cost_file(calibration, tmp_path / "costs", "mine"))
    assert fitted.chunked_step_ns(4, 3, 0, 500) == pytest.approx(
        load_cost_model(truth).chunked_step_ns(4, 3, 0, 500), abs=50
    )


@pytest.mark.parametrize("method", [None, "eagle3"])
def test_the_costs_of_context_and_drafts_on_a_gpu_server_come_back(tmp_path: Path, method: str | None) -> None:
    truth = gpu_costs(tmp_path, {1: 2.45, 2: 2.6, 4: 3.4}, 0.4, 20, 3_000_000, context_us=0.15)
    drafts = {"speculative_method": method, "synthetic_acceptance_rates": [0.7, 0.5]} if method else {}
    sweep = gpu_sweep({"rules": "vllm-paged", "cost_model": truth, **drafts})
    sweep = replace(sweep, context_tokens=(300, 1500))
    runs = run_experiment(calibration_experiment(sweep), runs_root=tmp_path).runs
    calibration = fit_runs(runs, seed=1)
    assert calibration.fits[DECODE]["context_us_per_token"] == pytest.approx(0.15, rel=0.01)
    fitted, known = load_cost_model(write_cost_file(calibration, tmp_path / "costs", "mine")), load_cost_model(truth)
    assert fitted.draft_pass_ns == (pytest.approx(known.draft_pass_ns, rel=1e-3) if method else None)
    assert compare_models(fitted, known, sweep).step_share < 1e-3
    for run in runs:
        device_ns = simulate(run.plan, run.server, run.cost_model).device_ns
        # The end of the last block of each request is not in the log.
        assert run_figures(run).a_ns == pytest.approx(device_ns, rel=1e-3)
        assert figures_at(run, fitted).a_ns == pytest.approx(device_ns, rel=1e-3)
    if method:
        # One number of drafts does not tell the drafter from the size.
        with pytest.raises(SpecError, match=r"cannot tell .*per_pass_ms"):
            fit_runs([run for run in runs if run.condition == "drafts-2"], seed=1)


def test_sweeps_that_cannot_tell_the_drafter_from_the_sizes_are_refused_before_they_run(tmp_path: Path) -> None:
    truth = gpu_costs(tmp_path, {1: 2.45, 2: 2.6, 4: 3.4}, 0.4, 20, 3_000_000)
    drafts = {"speculative_method": "eagle3", "synthetic_acceptance_rates": [0.7, 0.5]}
    sweep = replace(gpu_sweep({"rules": "vllm-paged", "cost_model": truth, **drafts}), num_seqs=(1,))
    with pytest.raises(SpecError, match=r"3 points cannot tell .*per_pass_ms"):
        calibration_experiment(sweep)


def test_the_cost_of_what_parts_of_prompts_attend_to_comes_back(tmp_path: Path) -> None:
    truth = gpu_costs(tmp_path, {1: 2.45, 2: 2.6, 4: 3.4}, 0.4, 2, 3_000_000, attended_ns=7)
    sweep = gpu_sweep({"rules": "vllm-paged", "cost_model": truth, "slot_tokens": 16384})
    sweep = replace(sweep, num_seqs=(1, 2, 4), prefill_tokens=(500, 2000, 4000))
    [run] = run_experiment(calibration_experiment(sweep), runs_root=tmp_path).runs
    calibration = fit_runs([run], seed=1)
    assert calibration.fits[PREFILL]["per_attended_token_ns"] == pytest.approx(7, rel=1e-3)
    path = write_cost_file(calibration, tmp_path / "costs", "mine")
    fitted, known = load_cost_model(path), load_cost_model(truth)
    # The second part of a prompt of 4,000 tokens, and a prompt of 500: a straight line would miss both.
    for tokens, before in ((1953, 2047), (500, 0)):
        work = tokens, attended_tokens(before, tokens)
        assert fitted.chunked_step_ns(0, 0, 0, *work) == pytest.approx(known.chunked_step_ns(0, 0, 0, *work), rel=1e-3)
    device_ns = simulate(run.plan, run.server, run.cost_model).device_ns
    assert figures_at(run, fitted).a_ns == pytest.approx(device_ns, rel=1e-3)
    page, _ = write_calibration_report(calibration, path, tmp_path)
    assert "each token that one of these attends to, ns" in page.read_text()


def test_what_the_runs_of_a_gpu_server_do_not_show_is_named(tmp_path: Path) -> None:
    server = {"rules": "vllm-paged", "cost_model": "emulated-gpu", "decode_buckets": [1, 2, 4, 8], "max_num_seqs": 12}
    sweep = replace(gpu_sweep(server), num_seqs=(1, 2))
    [run] = run_experiment(calibration_experiment(sweep), runs_root=tmp_path).runs
    notes = " ".join(fit_runs([run], seed=1).notes)
    assert "Not fitted: f(4, 8), no stretch of steps of this size." in notes
    assert "Not fitted: the extra time of steps without a graph" in notes


@pytest.mark.live
def test_a_vllm_that_was_calibrated_has_modelled_device_time(tmp_path: Path) -> None:
    vllm = {"model": "some/model", "environment": str(emulated_vllm(tmp_path / "env")), "cost_model": "emulated-gpu"}
    sweep = replace(gpu_sweep(vllm, "vllm"), num_seqs=(1, 2, 4, 5), prefill_tokens=(2000,))
    [run] = run_experiment(calibration_experiment(sweep), runs_root=tmp_path / "runs").runs
    assert run.is_valid, run.invalid_reasons
    skip_where_the_emulator_was_late(run)
    calibration = fit_runs([run], seed=1)
    assert not any("No GPU was measured" in note for note in calibration.notes)
    fitted = load_cost_model(write_cost_file(calibration, tmp_path / "costs", "mine"))
    # The emulated server has the times of the cost model "emulated-gpu", however busy the machine is.
    assert figures_at(run, fitted).a_ns == pytest.approx(run_figures(run).a_ns, rel=0.002)


def test_a_server_that_reports_no_padding_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*arguments: Any) -> list[Any]:
        # The last columns are those of drafts, which a row without them has not.
        return [
            None if name == "padded_tokens" else value for name, value in zip(COLUMNS, row(*arguments), strict=False)
        ]

    row = sim.step_log_row
    monkeypatch.setattr(sim, "step_log_row", silent)
    sweep = replace(gpu_sweep({"rules": "vllm-paged", "cost_model": "emulated-gpu"}), num_seqs=(1,))
    runs = run_experiment(calibration_experiment(sweep), runs_root=tmp_path).runs
    with pytest.raises(SpecError) as refused:
        fit_runs(runs, seed=1)
    assert "this model runner does not report them" in str(refused.value.hint)
