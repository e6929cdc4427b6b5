"""Thirty secrets, written wherever a person can write one, stand in no file that the harness leaves."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.model.spec import ClientSpec, ConditionSpec, ExperimentSpec, LimitsSpec, ServerSpec, WorkloadSpec
from harness.model.spec.changes import KNOWN_KEYS, recorded_changes, recorded_command
from tests.support.command_line import harness

SECRETS = [f"hx7Q{number:02d}zz" for number in range(31)]
S = iter(SECRETS)
IN_ENV = ("HF_TOKEN", "MY_PASS", "PGPASS", "JWT", "COOKIE", "BEARER", "PIN", "VLLM_API_KEY", "UNHEARD_OF")
FILE = f"""
name = "secrets"
backend = "sim"
replicates = 1
base_seed = 77001
[workload]
num_sessions = 2
wait_cap_s = 1.0
prompt_tokens = {{distribution = "uniform", low = 200, high = 300}}
generate_tokens = {{distribution = "uniform", low = 8, high = 12}}
[server]
declared = true
url = "http://me:{next(S)}@127.0.0.1:8000/?token={next(S)}"
device_metrics_url = "http://127.0.0.1:9090/metrics?token={next(S)}"
extra_args = [
    "--token", "{next(S)}", "--api-key={next(S)}", "-H", "Authorization: Bearer {next(S)}", "-p{next(S)}",
    "--additional-config", '{{"api_key": "{next(S)}", "nested": ["{next(S)}"]}}', "{next(S)}",
    "--unheard-of", '{{"a": "{next(S)}"}}', "--model", "https://me:{next(S)}@hub/m?token={next(S)}",
]
[server.env]
HTTP_PROXY = "http://me:{next(S)}@proxy:3128"
VLLM_HEADERS = '{{"Authorization": "Bearer {next(S)}"}}'
VLLM_URL = "https://hub/?access={next(S)}"
{chr(10).join(f'{name} = "{next(S)}"' for name in IN_ENV)}
[[condition]]
name = "base"
"""
CHANGES = (
    f'server.env={{HF_TOKEN="{next(S)}", PIN="{next(S)}"}}',
    f'condition=[{{name="base", server={{env={{MY_PASS="{next(S)}"}}, extra_args=["--token", "{next(S)}"]}}}}]',
    f'server.extra_args=["--pin", "{next(S)}"]',
)


def _holding(folder: Path, source: Path) -> list[tuple[str, str]]:
    """Files below ``folder`` that hold a secret; the person's own file and git's copies of it are not the harness's."""
    files = [path for path in folder.rglob("*") if path.is_file() and path != source and ".git" not in path.parts]
    return [(str(path), one) for path in files for one in SECRETS if one.encode() in path.read_bytes()]


def test_thirty_planted_secrets_are_in_no_file_of_a_run_a_report_or_a_freeze(tmp_path: Path) -> None:
    source = tmp_path / "secrets.toml"
    source.write_text(FILE)
    planted = [one for one in SECRETS if one in FILE or any(one in change for change in CHANGES)]
    assert len(planted) >= 30
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    for runs, changes in (("plain", ()), ("changed", CHANGES)):
        words = [word for change in changes for word in ("--set", change)]
        ran = harness("run", str(source), "--runs", f"runs/{runs}", *words, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        told = harness("report", "secrets", "--runs", f"runs/{runs}", "-o", f"{runs}.html", cwd=tmp_path)
        assert told.returncode == 0, told.stderr
    refused = harness("prereg", "freeze", str(source), "--seed", "88123", "--allow-dirty", cwd=tmp_path)
    assert refused.returncode == 2
    assert "what may be a secret" in refused.stderr
    assert len(list(tmp_path.rglob("manifest.json"))) == 2
    assert _holding(tmp_path, source) == []


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ('server.env={HF_TOKEN="S"}', 'server.env={"HF_TOKEN": "redacted"}'),
        ("server.env.HF_TOKEN=S", "server.env.HF_TOKEN=redacted"),
        ("server.env={HF_TOKEN=S", "server.env=redacted"),
        ('server.extra_args=["--token","S"]', 'server.extra_args=["--token", "redacted"]'),
        ("server.url=http://me:S@h:1", "server.url=http://redacted@h:1"),
        ("unheard.of=S", "unheard.of=redacted"),
        ("S", "redacted"),
        ("server.kv_slots=16", "server.kv_slots=16"),
        ("condition=[{name='a', factors={N=6}}]", "condition=[{name='a', factors={N=6}}]"),
    ],
)
def test_a_change_is_recorded_by_its_parsed_value(change: str, kept: str) -> None:
    assert recorded_changes([change]) == (kept,)


def test_a_command_is_recorded_with_its_changes_redacted() -> None:
    words = ["run", "--resume", "a.toml", "--set", "server.env.PIN=1234", "--set=server.kv_slots=9", "--runs", "out"]
    assert recorded_command(words) == (
        *("run", "--resume", "a.toml", "--set", "server.env.PIN=redacted", "--set", "server.kv_slots=9", "--runs"),
        "out",
    )


def test_every_key_of_an_experiment_is_known_but_those_that_carry_secrets() -> None:
    specs = (ExperimentSpec, ConditionSpec, ServerSpec, WorkloadSpec, ClientSpec, LimitsSpec)
    assert {key for spec in specs for key in spec.model_fields} - KNOWN_KEYS == {"env", "extra_args"}
