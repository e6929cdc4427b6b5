"""A vLLM that the harness starts: its settings, its steps, and what nothing of it shows."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.analysis.compare.pairs import without_a
from harness.analysis.figures import figures_at, run_figures
from harness.analysis.logs.derive import rebuild
from harness.analysis.logs.engine_steps import step_log_of
from harness.analysis.summary import summarise
from harness.cli.tree import app
from harness.errors import ServerError, SpecError
from harness.judge.prereg.predict import predict_run
from harness.measure.records import layout
from harness.measure.records.run import SealedRun
from harness.measure.records.store import RunStore
from harness.measure.server.life import LaunchPlan
from harness.model.engine import load_cost_model
from harness.model.experiment import resolve
from harness.model.spec import ExperimentSpec, ServerSpec
from harness.runner import run_experiment
from harness.runner.backends import backend_named
from harness.runner.experiment import checked
from harness.runner.progress import Forecast
from harness.runner.run import LaunchOptions
from harness.stacks.vllm.launch import STEP_LOG, check_serving, key_arguments
from harness.stacks.vllm.step_log import INSIDE, load_step_log
from harness.tune.diagnose import diagnose
from tests.support.emulated_vllm import emulated_vllm
from tests.support.experiments import UNHURRIED
from tests.support.stacks import write_environment

pytestmark = pytest.mark.same_everywhere


def experiment(environment: Path, *conditions: dict[str, Any], **server: Any) -> ExperimentSpec:
    """Conditions "c0", "c1", ... of six sessions with two requests each on a server of at most six requests."""
    return ExperimentSpec.model_validate(
        {
            "name": "steps",
            "backend": "vllm",
            "replicates": 1,
            "base_seed": 1,
            "workload": {
                "num_sessions": 6,
                "waits": "none",
                "prompt_tokens": {"distribution": "uniform", "low": 200, "high": 400},
                "generate_tokens": {"distribution": "uniform", "low": 8, "high": 24},
            },
            "server": {
                "model": "some/model",
                "max_num_seqs": 6,
                "decode_buckets": [1, 2, 4],
                "environment": str(environment),
                **server,
            },
            "limits": UNHURRIED,
            "condition": [{"name": f"c{place}", "server": changes} for place, changes in enumerate(conditions)],
        }
    )


def finding(run: SealedRun, code: str) -> str:
    (found,) = [str(one) for one in run.manifest.findings if one.code == code]
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the experiment ``steps``, run once for all tests that only read it, and its cost model.

    Conditions: sizes that leave n = 5 and 6 out, with costs; sizes that cover every n, with settings.
    """
    folder = tmp_path_factory.mktemp("steps")
    (folder / "gpu.toml").write_text(COSTS)
    priced = {"cost_model": str(folder / "gpu.toml")}
    conditions = (priced, {"decode_buckets": [1, 2, 4, 6], "num_gpu_blocks": 512, "block_size": 128})
    spec = experiment(emulated_vllm(folder / "env"), *conditions, extra_args=["--seed", "1"])
    run_experiment(spec, runs_root=folder / "runs")
    return folder


@pytest.fixture(scope="module")
def runs(root: Path) -> list[SealedRun]:
    return RunStore(root / "runs").sealed("steps")


@pytest.mark.live
def test_each_run_is_a_server_whose_settings_and_steps_are_read_from_its_step_log(runs: list[SealedRun]) -> None:
    without, covered = runs
    assert (without.invalid_reasons, covered.invalid_reasons) == ((), ())
    in_force = covered.manifest.effective["server"]
    assert in_force["decode_buckets"] == [1, 2, 4, 6]
    assert in_force["num_gpu_blocks"] == 512
    assert in_force["max_num_batched_tokens"] == 2048
    assert not {"usable_kv_slots", "kv_slots", "rules"} & in_force.keys()
    assert covered.manifest.server.facts["launch"]["requested"]["versions"]["vllm"] == "0.30.0"
    figures = run_figures(covered)
    assert {b for _, b in figures.steps_by_n_b} <= {1, 2, 4, 6}
    # Warmed up, and none of that is in its steps.
    warmed = covered.manifest.client_audit["warm_up"]
    assert warmed == {"requests": 2 * min(6, covered.plan.num_sessions), "failed": 0}
    log, whole = step_log_of(covered), load_step_log(covered.file(layout.STEP_LOG))
    assert log.steps.num_rows < whole.steps.num_rows
    assert covered.table("steps").num_rows == log.decode_steps.num_rows
    assert figures.padding.ratio is not None
    assert figures.evictions is None


@pytest.mark.live
def test_batches_that_no_captured_size_covers_are_named_with_the_sizes_that_would(runs: list[SealedRun]) -> None:
    eager = finding(runs[0], "steps-eager")
    assert "no captured size of [1, 2, 4] covers n = 5 (" in eager
    assert "server.decode_buckets = [1, 2, 4, 5, 6]; or lower server.max_num_seqs to 4" in eager
    apart = finding(runs[0], "steps-apart")
    assert "pure decode steps; beside them" in apart
    assert re.search(r" \d+ prefill", apart)


@pytest.mark.live
def test_a_server_without_graphs_pads_nothing_and_has_no_sizes_to_vary(tmp_path: Path) -> None:
    def graphless(*conditions: dict[str, Any]) -> ExperimentSpec:
        table = experiment(tmp_path / "env", *conditions, extra_args=["--enforce-eager"]).model_dump()
        del table["server"]["decode_buckets"]
        for condition in table["condition"]:
            condition["server"].pop("decode_buckets", None)
        return ExperimentSpec.model_validate(table)

    emulated_vllm(tmp_path / "env")
    assert graphless({}, {"max_num_seqs": 3}).varied_settings == {"max_num_seqs"}
    (run,) = run_experiment(graphless({"max_num_seqs": 3}), runs_root=tmp_path / "runs").runs
    assert run.is_valid, run.invalid_reasons
    assert "decode_buckets" not in run.manifest.effective["server"]
    assert all(n == b for n, b in run_figures(run).steps_by_n_b)
    codes = {one.code for one in run.manifest.findings}
    assert not codes & {"steps-eager", "setting-unknown", "setting-unshown"}


@pytest.mark.parametrize("word", ["--enforce-eager", "-O0", '--compilation-config={"cudagraph_mode": "NONE"}'])
def test_sizes_of_a_server_without_graphs_are_refused_before_the_first_run(tmp_path: Path, word: str) -> None:
    sizes = ({"decode_buckets": [1, 2, 4]}, {"decode_buckets": [1, 2, 4, 6]})
    varied = experiment(emulated_vllm(tmp_path / "env"), *sizes, extra_args=[word])
    with pytest.raises(SpecError, match="captures no graphs, so that there are no sizes to set"):
        run_experiment(varied, runs_root=tmp_path / "runs")


def test_sizes_on_a_cpu_build_are_refused_before_the_first_run(tmp_path: Path) -> None:
    env = emulated_vllm(tmp_path / "env")
    (info,) = (tmp_path / "env").rglob("vllm-*.dist-info")
    metadata = info / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 0.30.0", "Version: 0.30.0+cpu"))
    with pytest.raises(SpecError, match=r"vllm 0\.30\.0\+cpu: captures no graphs"):
        backend_named("vllm").check_host(ServerSpec(model="m", environment=str(env), decode_buckets=(1, 8)))
    backend_named("vllm").check_host(ServerSpec(model="m", environment=str(env)))


@pytest.mark.live
def test_steps_of_a_server_that_drafts_are_in_tokens_and_it_has_no_prediction_without_rates(tmp_path: Path) -> None:
    drafts = '{"method": "ngram", "num_speculative_tokens": 2}'
    spec = experiment(emulated_vllm(tmp_path / "env"), {}, extra_args=["--speculative-config", drafts])
    (run,) = run_experiment(spec, runs_root=tmp_path / "runs").runs
    figures = run_figures(run)
    assert (figures.num_steps, figures.a, figures.drafts) == (run.table("steps").num_rows, None, "real")
    assert without_a([figures]) == "no price of drafts in its costs"
    assert "a real drafter on random tokens" in summarise([run]).origin
    assert "decodes speculatively" in diagnose([run]).unknown
    with pytest.raises(SpecError, match="speculative decoding"):
        predict_run(run)


def test_keys_of_drafts_become_a_synthetic_speculative_config(tmp_path: Path) -> None:
    drafts = {"num_speculative_tokens": 2, "speculative_method": "eagle3", "speculative_model": "some/drafter"}
    server = ServerSpec.model_validate({"model": "m", **drafts, "synthetic_acceptance_rates": (0.8, 0.6, 0.4)})
    words = key_arguments(server)
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "method": "eagle3",
        "model": "some/drafter",
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.8, 0.6],
    }
    assert "--speculative-config" not in key_arguments(server.model_copy(update={"num_speculative_tokens": 0}))
    conditions = ({**drafts, "num_speculative_tokens": number} for number in (0, 1, 2))
    rates = [0.8, 0.6]
    checked(resolve(experiment(emulated_vllm(tmp_path / "env"), *conditions, synthetic_acceptance_rates=rates)))
    with pytest.raises(SpecError, match="asks for speculative decoding a second time"):
        check_serving(server.model_copy(update={"extra_args": ("-sc.method=ngram",)}))


def test_numbers_of_drafts_are_compared_only_where_their_acceptance_is_set(tmp_path: Path) -> None:
    environment = emulated_vllm(tmp_path / "env")
    eagle = {"method": "eagle3", "model": "some/drafter", "num_speculative_tokens": 3}
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.6, 0.4]}
    real, synthetic = (["--speculative-config", json.dumps(config)] for config in (eagle, eagle | rates))
    for conditions in ([{}, {"extra_args": real}], [{"extra_args": synthetic}, {"extra_args": ["-sc.method=ngram"]}]):
        with pytest.raises(SpecError, match="prompts are random tokens") as refused:
            checked(resolve(experiment(environment, *conditions)))
        assert "condition 'c1': server.extra_args" in str(refused.value)
    for conditions in (
        [{}, {"extra_args": synthetic}],
        [{"extra_args": real}, {"extra_args": real, "max_num_seqs": 4}],
    ):
        checked(resolve(experiment(environment, *conditions)))


@pytest.mark.live
def test_a_server_without_its_step_log_makes_the_run_invalid(tmp_path: Path) -> None:
    spec = experiment(emulated_vllm(tmp_path / "env"), {})
    serve = tmp_path / "env/serve.py"
    serve.write_text(serve.read_text().replace('"step-log": os.environ["VLLM_STEP_LOG_FILE"],', ""))
    (run,) = run_experiment(spec, runs_root=tmp_path / "runs").runs
    assert any("the step log that was declared was not written" in reason for reason in run.invalid_reasons)


def test_a_step_log_that_is_not_there_is_refused_before_the_first_run(tmp_path: Path) -> None:
    server = ServerSpec(url="http://127.0.0.1:1", step_log=str(tmp_path / "steps.jsonl"))
    with pytest.raises(ServerError, match=r"steps\.jsonl: cannot be read"):
        backend_named("attached").check_host(server)


@pytest.mark.live
def test_a_sealed_run_rebuilds_its_steps_from_the_step_log(runs: list[SealedRun]) -> None:
    assert rebuild(runs[0]).steps_source == "step-log"
    assert runs[0].file(layout.STEP_LOG).stat().st_size


@pytest.mark.live
def test_runs_of_two_stacks_are_compared_on_the_same_plans(root: Path, tmp_path: Path) -> None:
    plain = {"max_num_seqs": 6, "decode_buckets": (1, 2, 4, 6)}
    other = {"name": "simulated", "backend": "sim", "server": ServerSpec.model_validate(plain)}
    run_experiment(experiment(root / "env", {}).model_copy(update=other), runs_root=tmp_path)
    measured, simulated = (str(place) for place in (root / "runs" / "steps" / "c0", tmp_path / "simulated"))
    done = CliRunner().invoke(app, ["compare", measured, "--baseline", simulated], env={"COLUMNS": "1000"})
    assert done.exit_code == 0, done.output
    assert "paired by plan, 1:1 runs" in done.output
    assert "Served by vllm 0.30.0." in done.output


def launched(tmp_path: Path, **server: Any) -> LaunchPlan:
    spec = ServerSpec.model_validate({"model": "m", "environment": str(tmp_path / "env"), **server})
    backend: Any = backend_named("vllm")
    backend.check_server(spec)
    return backend.launch(spec, LaunchOptions(0, tmp_path))


def test_keys_become_the_options_of_vllm_serve_and_what_is_left_out_is_the_servers_choice(tmp_path: Path) -> None:
    emulated_vllm(tmp_path / "env")
    env = launched(tmp_path).env
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(INSIDE)
    assert STEP_LOG.variables(Path(env["VLLM_STEP_LOG_FILE"])).items() <= env.items()
    plain = " ".join(launched(tmp_path).argv)
    assert "serve m --host 127.0.0.1" in plain
    assert "--max-num-seqs 8 --max-model-len 8192 --enable-prefix-caching" in plain
    assert "--cudagraph-capture-sizes 1 2 6" in " ".join(launched(tmp_path, decode_buckets=[1, 2, 6]).argv)
    assert "--num-gpu-blocks-override" not in plain
    assert "async-scheduling" not in plain
    given = launched(tmp_path, num_gpu_blocks=64, block_size=16, max_num_batched_tokens=2048, prefix_caching=False)
    assert "--num-gpu-blocks-override 64 --block-size 16 --max-num-batched-tokens 2048" in " ".join(given.argv)
    assert "--no-enable-prefix-caching" in given.argv
    assert "--async-scheduling" in launched(tmp_path, async_scheduling=True).argv
    assert "--no-async-scheduling" in launched(tmp_path, async_scheduling=False).argv


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        ({"model": ""}, "server.model: is missing"),
        ({"extra_args": ["--max-num-seqs=4"]}, "--max-num-seqs=4: repeats server.max_num_seqs"),
        ({"extra_args": ["--no-enable-prefix-caching"]}, "repeats server.prefix_caching"),
        ({"extra_args": ["--disable-log-stats"]}, "set by the harness for the step log"),
        ({"kv_slots": 12}, "server.kv_slots: vLLM itself does not have it"),
        ({"patch": "none"}, "server.patch: vLLM itself does not have it"),
    ],
)
def test_what_vllm_cannot_be_started_with_is_refused(tmp_path: Path, server: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        launched(tmp_path, **server)


COSTS = """
name = "gpu"
source = "constructed"
[decode]
f_ms = { 1 = 8.0, 2 = 8.5, 4 = 9.0, 6 = 10.0 }
[prefill]
chunk_tokens = 8192
per_call_ms = 5.0
[chunked_prefill]
per_step_ms = 5.0
per_token_us = 20.0
"""


@pytest.mark.live
def test_device_time_is_absent_until_the_cost_model_states_what_prompts_cost_on_that_server(
    root: Path, runs: list[SealedRun]
) -> None:
    run = runs[-1]
    figures = run_figures(run)
    assert (figures.a, figures.a_ns) == (None, None)
    assert figures.b_ns > 0
    priced = figures_at(run, load_cost_model(root / "gpu.toml")).a
    # Steps with parts of prompts, with the decodes that run beside them.
    of_decodes = {0: 0, 1: 8_000_000, 2: 8_500_000, 3: 8_750_000, 4: 9_000_000, 5: 9_500_000}
    steps = [step for step in step_log_of(run).steps.to_pylist() if step["context_tokens"]]
    beside_ns = sum(of_decodes[step["generation_requests"]] for step in steps)
    assert priced.prefill_ns == len(steps) * 5_000_000 + 20_000 * figures.computed_prefill_tokens + beside_ns
    assert priced.decode_ns == sum(
        count * {1: 8_000_000, 2: 8_500_000, 4: 9_000_000, 6: 10_000_000}[b]
        for (_, b), count in figures.steps_by_n_b.items()
    )


def test_a_vllm_is_predicted_by_its_own_rules_once_its_cost_model_prices_parts_of_prompts(tmp_path: Path) -> None:
    (tmp_path / "gpu.toml").write_text(COSTS)
    priced = {"cost_model": str(tmp_path / "gpu.toml")}
    planned = resolve(experiment(tmp_path, {}, priced))
    unpriced, run = planned
    assert run.server.rule_set().name == "vllm-paged"
    assert predict_run(run).device_ns > 0
    with pytest.raises(SpecError, match=r"cost model paper.*has no \[chunked_prefill\]"):
        predict_run(unpriced)
    # The time left is forecast all the same.
    assert Forecast([unpriced]).left_s() == pytest.approx(Forecast([run]).left_s(), rel=0.5)


@pytest.mark.live
def test_every_report_shows_such_runs_and_leaves_out_what_they_do_not_have(root: Path, tmp_path: Path) -> None:
    def harness(*words: str) -> str:
        done = CliRunner().invoke(app, [*words], env={"COLUMNS": "1000"})
        assert done.exit_code == 0, done.output
        return done.output

    where = ("steps", "--runs", str(root / "runs"))
    assert "Served by vllm 0.30.0." in harness("table", *where)
    assert "Served by vllm 0.30.0." in harness("table", *where, "--serving")
    assert "Served by vllm 0.30.0." in harness("compare", *where)
    assert "lost_part_of_a_block_tokens" in harness("paper", "analyse", *where)
    harness("report", *where, "-o", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert "backend vllm" in page
    assert "Served by vllm 0.30.0" in page
    assert "steps-eager" in page


def test_the_doctor_says_what_the_stack_on_path_shows_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_environment(tmp_path, versions={"vllm": "0.30.0", "tpu-inference": "0.32.0"})
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    found = backend_named("vllm").readiness().found
    assert "vllm 0.30.0, tpu-inference 0.32.0; every engine step, stamped in the engine core" in found
