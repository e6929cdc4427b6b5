"""Tokens and passwords reach the server and no file that somebody might publish."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness.errors import SpecError
from harness.measure.server.life import LaunchPlan
from harness.measure.server.provenance import capture
from harness.model.spec import ServerSpec
from harness.redact import filled_env, is_secret, redacted_arguments, redacted_env
from harness.runner import run_experiment
from tests.support.experiments import one_condition

SECRET = "hf_0123456789abcdef"


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "http_proxy_auth", "API_KEY", "MY_PASS", "PGPASS"),
        *("JWT", "SESSION_COOKIE", "BEARER", "PIN", "DOOR-PIN", "VLLM_API_KEY", "AUTHORIZATION"),
    ],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret(name)
    assert redacted_env({name: SECRET}) == {name: "redacted"}


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "VLLM_LOGGING_LEVEL", "RBLN_DEVICES", "OMP_NUM_THREADS"])
def test_values_of_known_harmless_names_are_recorded(name: str) -> None:
    assert redacted_env({name: "1"}) == {name: "1"}


def test_the_user_of_a_url_is_left_out_wherever_it_stands() -> None:
    assert redacted_env({"HTTP_PROXY": "http://me:pw@proxy:3128/"}) == {"HTTP_PROXY": "http://redacted@proxy:3128/"}
    assert redacted_arguments(["--model=https://me:pw@host/simple?token=x"]) == (
        "--model=https://redacted@host/simple?token=redacted",
    )


def test_what_is_not_known_to_be_harmless_is_not_recorded() -> None:
    assert redacted_env({"MINE": "1"}) == {"MINE": "redacted"}
    words = ["serve", "--mine", "1", "-p1234", "-H", "Authorization: Bearer x", "Hunter2", "/data/model", "--seed=3"]
    said = "serve --mine redacted -predacted -H redacted redacted /data/model --seed=3"
    assert " ".join(redacted_arguments(words)) == said
    assert redacted_arguments(redacted_arguments(words)) == redacted_arguments(words)


def test_secrets_among_command_words_are_left_out() -> None:
    words = ["serve", "--api-key", SECRET, f"--hf-token={SECRET}", "--max-tokens", "5", f"server.env.HF_TOKEN={SECRET}"]
    said = "serve --api-key redacted --hf-token=redacted --max-tokens 5 redacted"
    assert " ".join(redacted_arguments(words)) == said


def test_a_spec_is_recorded_without_secrets_and_used_with_them() -> None:
    server = ServerSpec(env={"HF_TOKEN": SECRET, "VLLM_A": "1"}, extra_args=("--api-key", SECRET))
    assert server.env["HF_TOKEN"] == SECRET
    assert SECRET not in json.dumps(server.model_dump(mode="json"))
    again = ServerSpec.model_validate(server.model_dump(mode="json"))
    assert filled_env(again.env, {"HF_TOKEN": SECRET}) == {"HF_TOKEN": SECRET, "VLLM_A": "1"}


def test_a_recorded_spec_does_not_start_a_server_without_its_secret() -> None:
    with pytest.raises(SpecError, match=r"^server.env.HF_TOKEN: was redacted .* export HF_TOKEN and run again$"):
        filled_env({"HF_TOKEN": "redacted"}, {})


def test_a_launch_plan_gives_the_server_the_secret_and_the_manifest_none() -> None:
    plan = LaunchPlan("rbln", ("vllm", "--api-key", SECRET), "127.0.0.1", 1, "m", env={"HF_TOKEN": SECRET})
    assert plan.env["HF_TOKEN"] == SECRET
    assert SECRET not in json.dumps(plan.to_json())


def test_the_harness_own_command_is_recorded_without_secrets() -> None:
    assert SECRET not in json.dumps(capture(["harness", "run", "x.toml", "--set", f'server.env.HF_TOKEN="{SECRET}"']))


@pytest.mark.live
def test_no_file_of_a_sealed_run_holds_a_secret_of_its_experiment(tmp_path: Path) -> None:
    spec = one_condition(
        "secret",
        time_scale=8.0,
        workload={"source": "sequential", "num_background": 0},
        server={"env": {"HF_TOKEN": SECRET}, "declared": True},
        condition=[{"name": "only", "server": {"env": {"HF_TOKEN": SECRET, "VLLM_OTHER": "kept"}}}],
    )
    (run,) = run_experiment(spec, runs_root=tmp_path).runs
    holding = [path for path in run.path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert holding == []
    assert run.manifest.requested_server["env"] == {"HF_TOKEN": "redacted", "VLLM_OTHER": "kept"}
    assert sys.executable in run.manifest.server.argv[0]
