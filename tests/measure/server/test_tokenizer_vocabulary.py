"""Prompts of token ids take ids that the server's model has: from its configuration, or by asking."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.tree import app
from harness.errors import ServerError
from harness.measure.records.store import RunStore
from harness.measure.server.probe import Needs
from harness.measure.server.tokenizer import USUAL_RANGE, configured_vocabulary, range_within
from harness.model.plan.build import draw_plan
from harness.model.plan.tokens import PromptIds, TokenStreams
from harness.model.spec import ExperimentSpec, ServerSpec
from harness.model.traces.importing import import_trace
from harness.model.traces.recording import read_trace
from harness.runner import run_experiment
from tests.measure.server.test_clean_start import null_experiment
from tests.support.emulated_vllm import emulated_vllm
from tests.support.emulator_process import Emulator, end, start_ready

pytestmark = pytest.mark.same_everywhere

SMALL = 2048
# Of steps down by a tenth from 150,000 the first that the server takes.
IDS = [233, 1867]


def test_a_small_vocabulary_gives_ids_from_its_middle_and_a_large_one_changes_nothing() -> None:
    assert range_within(SMALL, USUAL_RANGE) == (240, 1920)
    assert range_within(128_256, USUAL_RANGE) == (1000, 127_232)
    assert range_within(151_936, USUAL_RANGE) is None
    assert range_within(None, USUAL_RANGE) is None
    assert range_within(SMALL, (300, 4000)) is None, "a range that a person wrote is taken as it is"


def test_the_vocabulary_is_read_from_the_model_and_from_the_cache_of_the_hub(tmp_path: Path) -> None:
    model, hub = tmp_path / "tiny", tmp_path / "hub" / "models--a--tiny" / "snapshots" / "1"
    for folder, config in ((model, {"vocab_size": SMALL}), (hub, {"text_config": {"vocab_size": 32_000}})):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
    assert configured_vocabulary(ServerSpec(model=str(model))) == SMALL
    assert configured_vocabulary(ServerSpec(model="a/tiny", env={"HF_HOME": str(tmp_path)})) == 32_000
    assert configured_vocabulary(ServerSpec(model="a/other", env={"HF_HOME": str(tmp_path)})) is None
    (model / "config.json").write_text("{")
    assert configured_vocabulary(ServerSpec(model=str(model))) is None


def test_a_short_request_shows_a_range_of_ids_that_ends_a_little_too_high() -> None:
    plan = draw_plan(null_experiment("http://127.0.0.1:1", 1).workload, 1, 0)
    ids = Needs(token_id_range=(259, SMALL + 27)).highest_ids
    prompts = [TokenStreams(plan, ids=PromptIds(seed, ids)).prompt(0, 0, {})[:32] for seed in range(300)]
    assert all(max(prompt) >= SMALL for prompt in prompts)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    folder = tmp_path_factory.mktemp("small")
    server = {"rules": "vllm-paged", "cost_model": "emulated-gpu", "num_gpu_blocks": 4096}
    sessions = str(folder / "sessions.jsonl")
    started = start_ready(folder, time_scale=1.0, vocab_size=SMALL, server=server, sessions_path=sessions)
    yield started
    end(started)


@pytest.mark.live
def test_an_attached_server_is_asked_for_lower_ids_until_it_has_them(small: Emulator, tmp_path: Path) -> None:
    answer = small.client.post("/v1/completions", json={"prompt": [SMALL], "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"Token id {SMALL} is out of vocabulary"
    run_experiment(null_experiment(small.address, 1), runs_root=tmp_path).require_valid()
    for run in RunStore(tmp_path).sealed("null"):
        assert run.manifest.client_audit["prompt_ids"]["token_id_range"] == IDS


@pytest.mark.live
def test_a_written_range_beyond_the_vocabulary_is_refused(small: Emulator, tmp_path: Path) -> None:
    spec = null_experiment(small.address, 1, token_id_range=[300, 4000])
    with pytest.raises(ServerError, match="the model knows fewer tokens"):
        run_experiment(spec, runs_root=tmp_path)


@pytest.mark.live
def test_the_doctor_says_which_ids_prompts_take(small: Emulator) -> None:
    done = CliRunner().invoke(app, ["doctor", "--url", small.address], env={"COLUMNS": "1000"})
    assert done.exit_code == 0, done.output
    low, high = IDS
    assert f"the model has fewer token ids than usual: prompts take those from {low} to {high - 1:,}" in done.output


@pytest.mark.live
def test_a_command_computes_one_short_answer_and_a_recording_leaves_the_answers_of_the_harness_out(
    small: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded, nums_asked = small.log_path.with_name("sessions.jsonl"), list[int]()
    prompt = list(range(300, 400))
    small.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 20, "stream": False})
    for command in (["doctor", "--url"], ["init", "--for"], ["tune", "--dry-run", "--for"]):
        before = recorded.read_text().count('"harness":1')
        done = CliRunner().invoke(app, [*command, small.address])
        assert done.exit_code == 0, done.output
        nums_asked.append(recorded.read_text().count('"harness":1') - before)
    assert nums_asked == [1, 1, 1]

    import_trace([recorded], tmp_path / "trace.jsonl", name="recorded")
    trace = read_trace(tmp_path / "trace.jsonl")
    assert [request.prompt_tokens for each in trace.recordings for request in each.requests] == [100]
    assert trace.head.dropped["requests that the harness sent itself"] >= 3


@pytest.mark.live
def test_a_server_of_ours_takes_ids_from_the_configuration_of_its_model(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": SMALL}))
    spec = ExperimentSpec.model_validate(
        {
            **null_experiment("", 1).model_dump(exclude={"server", "condition"}),
            "backend": "vllm",
            "server": {
                "model": str(model),
                "environment": str(emulated_vllm(tmp_path / "environment")),
                "cost_model": "emulated-gpu",
                "max_num_seqs": 4,
            },
            "condition": [{"name": "one"}],
        }
    )
    run_experiment(spec, runs_root=tmp_path / "runs").require_valid()
    (run,) = RunStore(tmp_path / "runs").sealed("null")
    assert run.manifest.client_audit["prompt_ids"] == {"token_id_range": [240, 1920]}
