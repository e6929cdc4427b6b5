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
from harness.measure.server.tokenizer import USUAL_RANGE, configured_vocabulary, range_within
from harness.model.spec import ExperimentSpec, ServerSpec
from harness.runner import run_experiment
from tests.measure.server.test_clean_start import null_experiment
from tests.support.emulated_vllm import emulated_vllm
from tests.support.emulator_process import Emulator, end, start_ready

pytestmark = pytest.mark.same_everywhere

SMALL = 2048


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


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    started = start_ready(tmp_path_factory.mktemp("small"), time_scale=1.0, vocab_size=SMALL)
    yield started
    end(started)


@pytest.mark.live
def test_an_attached_server_is_asked_for_the_first_id_that_it_does_not_have(small: Emulator, tmp_path: Path) -> None:
    answer = small.client.post("/v1/completions", json={"prompt": [SMALL], "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"Token id {SMALL} is out of vocabulary"
    run_experiment(null_experiment(small.address, 1), runs_root=tmp_path).require_valid()
    for run in RunStore(tmp_path).sealed("null"):
        assert run.manifest.client_audit["prompt_ids"]["token_id_range"] == [240, 1920]


@pytest.mark.live
def test_a_written_range_beyond_the_vocabulary_is_refused_with_its_size(small: Emulator, tmp_path: Path) -> None:
    spec = null_experiment(small.address, 1, token_id_range=[300, 4000])
    with pytest.raises(ServerError, match="the model knows the ids below 2,048"):
        run_experiment(spec, runs_root=tmp_path)


@pytest.mark.live
def test_the_doctor_says_which_ids_prompts_take(small: Emulator) -> None:
    done = CliRunner().invoke(app, ["doctor", "--url", small.address], env={"COLUMNS": "1000"})
    assert done.exit_code == 0, done.output
    assert "the model has 2,048 token ids: prompts take those from 240 to 1,919" in done.output


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
