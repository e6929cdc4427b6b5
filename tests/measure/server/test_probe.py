"""A server that somebody else started is asked before the first run, and one error says all that it lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.analysis.serving import latencies
from harness.cli.tree import app
from harness.errors import ServerError, SpecError
from harness.measure.records.store import RunStore
from harness.measure.server.ask import Reply as ServerReply
from harness.measure.server.life import model_entry
from harness.model.spec import ExperimentSpec
from harness.runner import run_experiment
from harness.runner.experiment import ExperimentOutcome, will_fail_again
from tests.support.command_line import harness
from tests.support.experiments import UNHURRIED_TOML, one_condition
from tests.support.plain_server import PlainServer, plain_server
from tests.support.raw_server import RawServer, Reply, whole
from tests.support.tls import certificate

pytestmark = pytest.mark.live
KEY = "NAME_OF_A_KEY"


def experiment(plain: PlainServer, **keys: Any) -> ExperimentSpec:
    return one_condition("asked", "attached", server={"url": plain.url, **keys.pop("server", {})}, **keys)


def run(root: Path, plain: PlainServer, *, keep_going: bool = False, **keys: Any) -> ExperimentOutcome:
    return run_experiment(experiment(plain, **keys), runs_root=root, keep_going=keep_going)


def test_everything_that_a_plain_server_lacks_is_in_one_error_with_remedies(tmp_path: Path) -> None:
    with plain_server(PlainServer()) as server, pytest.raises(ServerError) as refused:
        run(tmp_path, server)
    for words in (
        "the server ignored return_token_ids: answers cannot continue a session. Use vLLM 0.10 or newer",
        'set workload.prompt_form = "text"',
        "GET /metrics gives status 404: load and the server's count of reuse cannot be checked",
        "Set server.metrics_url where they have another address, or set limits.needs_metrics = false",
        "Nothing was performed",
    ):
        assert words in str(refused.value)
    assert len(server.asked) == 1
    assert list(RunStore(tmp_path).sealed("asked")) == []


def test_a_model_with_fewer_tokens_is_asked_with_the_ids_of_the_plan(tmp_path: Path) -> None:
    small = PlainServer(fails="Token id 1900 is out of vocabulary:")
    with (
        plain_server(small) as server,
        pytest.raises(ServerError, match=r"Set workload\.token_id_range to ids that it"),
    ):
        run(tmp_path, server, workload={"token_id_range": [300, 2000]})
    assert all(300 <= token < 2000 for token in server.asked[0]["prompt"])


def test_the_cures_that_the_error_names_cure(tmp_path: Path) -> None:
    with plain_server(PlainServer()) as server:
        outcome = run(tmp_path, server, workload={"prompt_form": "text"}, limits={"needs_metrics": False})
    assert [run.invalid_reasons for run in outcome.runs] == [()]
    (found,) = [one for one in outcome.runs[0].manifest.findings if one.code == "metrics-missing"]
    assert found.severity == "warning"


def test_a_declared_limit_that_more_requests_exceed_is_invalid_and_ends_the_experiment(tmp_path: Path) -> None:
    running = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0",model_name="plain"} 6.0\n'
    served = PlainServer(has_metrics=True, gives_token_ids=True, metrics=running)
    with plain_server(served) as server:
        limit = {"declared": True, "max_num_seqs": 3}
        outcome = run(tmp_path, server, server=limit, replicates=2)
        found = [one.evidence for one in outcome.runs[0].manifest.findings if one.code == "setting-differs"]
        all_the_same = run(tmp_path / "all", server, server=limit, replicates=2, keep_going=True)
    assert found == ["max_num_seqs: declared 3, and 6 requests ran at once in one engine"]
    assert not outcome.runs[0].is_valid
    assert (outcome.num_performed, outcome.ended_by.startswith(f"setting-differs: {found[0]}. Change")) == (1, True)
    assert (all_the_same.num_performed, all_the_same.ended_by) == (2, "")


CHAT_ALONE = ("/v1/chat/completions",)
SAYS_CHAT = 'The server knows /v1/chat/completions alone: workload.prompt_form = "chat"'


OTHER_NAME = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."


@pytest.mark.parametrize(
    ("served", "workload", "words"),
    [
        ({"paths": CHAT_ALONE}, {"prompt_form": "token-ids"}, (SAYS_CHAT, "status 404")),
        ({"paths": CHAT_ALONE}, {"prompt_form": "text"}, (SAYS_CHAT, "status 404")),
        ({}, {"prompt_form": "chat"}, ('with text prompts: workload.prompt_form = "text"',)),
        ({"takes_ids": False}, {}, ('workload.prompt_form = "text"',)),
        ({"fails": OTHER_NAME}, {}, ("Set workload.request.max_completion_tokens = true",)),
    ],
    ids=["ids where chats alone are known", "text where chats are", "a chat where text is", "no ids", "another length"],
)
def test_a_refusal_names_the_form_or_the_key_that_works(
    tmp_path: Path, served: dict[str, Any], workload: dict[str, Any], words: tuple[str, ...]
) -> None:
    with plain_server(PlainServer(has_metrics=True, **served)) as server, pytest.raises(ServerError) as refused:
        run(tmp_path, server, workload=workload)
    assert [each for each in words if each not in str(refused.value)] == []


def test_a_server_that_knows_chats_alone_is_measured_as_a_whole(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"workload": {"prompt_form": "chat"}}
    with plain_server(PlainServer(paths=CHAT_ALONE, has_metrics=True)) as server:
        outcome = run(tmp_path, server, **keys)
    assert [run.invalid_reasons for run in outcome.runs] == [()]
    turns = [[message["role"] for message in body["messages"]] for body in server.asked]
    assert ["user", "assistant", "user"] in turns
    (sealed,) = RunStore(tmp_path).sealed("asked")
    assert latencies(sealed).ttft_ns.min() > 0, "each chunk of text is one token, as usage says"


def test_another_kind_of_authorization_is_named() -> None:
    refusal = Reply([whole("", b'WWW-Authenticate: Basic realm="x"', status=401)])
    with RawServer(lambda _asked: refusal) as server:
        done = harness("doctor", "--url", server.url)
    assert (
        "the server asks for Basic authorization, and the harness sends a bearer key only" in done.stdout + done.stderr
    )
    refused = harness("doctor", "--url", "http://me:word@127.0.0.1:1")
    assert "A user and a password are not sent" in refused.stdout + refused.stderr


def test_an_adapter_that_stands_first_is_not_the_model_and_is_as_long_as_its_base() -> None:
    models = [{"id": "adapter", "parent": "base", "max_model_len": None}, {"id": "base", "max_model_len": 4096}]
    reply = ServerReply(200, json.dumps({"data": models}).encode())
    assert model_entry(reply)["id"] == "base"
    assert (model_entry(reply, "adapter")["id"], model_entry(reply, "adapter")["max_model_len"]) == ("adapter", 4096)


def test_a_key_and_a_url_that_ends_in_v1_are_taken_and_the_key_is_in_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knows = PlainServer(gives_token_ids=True, has_metrics=True, key="sk-secret", prefix="/models/a")
    with plain_server(knows) as server:
        with pytest.raises(ServerError, match=r'the server requires an API key\. .* server\.api_key_env = "NAME"'):
            run(tmp_path, server)
        keys = {"url": f"{server.url}/v1", "api_key_env": KEY}
        with pytest.raises(SpecError, match=f"the environment has no key in {KEY}"):
            run(tmp_path, server, server=keys)
        monkeypatch.setenv(KEY, "sk-wrong")
        with pytest.raises(ServerError, match=f"the server refuses the key in {KEY}"):
            run(tmp_path, server, server=keys)
        monkeypatch.setenv(KEY, "sk-secret")
        outcome = run(tmp_path, server, server=keys)
    assert [run.invalid_reasons for run in outcome.runs] == [()]
    held = [path for path in tmp_path.rglob("*") if path.is_file() and b"sk-secret" in path.read_bytes()]
    assert held == []


def test_a_key_that_a_server_repeats_is_in_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knows = PlainServer(
        gives_token_ids=True, has_metrics=True, key="sk-secret", fails="key sk-secret is spent, request", num_good=1
    )
    monkeypatch.setenv(KEY, "sk-secret")
    with plain_server(knows) as server:
        outcome = run(tmp_path, server, server={"url": server.url, "api_key_env": KEY})
    assert "key redacted is spent" in outcome.runs[0].invalid_reasons[0]
    held = [path for path in tmp_path.rglob("*") if path.is_file() and b"sk-secret" in path.read_bytes()]
    assert held == []


def test_an_experiment_whose_first_run_fails_alike_ends_there_in_the_servers_words(tmp_path: Path) -> None:
    # The first completion answers the question before the first run.
    knows = PlainServer(gives_token_ids=True, has_metrics=True, fails="no more quota for request", num_good=1)
    with plain_server(knows) as server:
        outcome = run(tmp_path, server, replicates=2)
    assert (outcome.num_performed, outcome.num_planned) == (1, 2)
    assert outcome.ended_by.startswith("http_error: no more quota for request")
    assert 'the first says "no more quota for request' in outcome.runs[0].invalid_reasons[0]
    assert will_fail_again(outcome.runs[0])


OVER_HTTPS = """\
name = "asked"
backend = "attached"
replicates = 1
base_seed = 1
[client]
name = "aiohttp"
[workload]
num_sessions = 2
waits = "none"
generate_tokens = {{distribution = "fixed", value = 4}}
[server]
url = "{url}"
[[condition]]
name = "only"
"""


def over_https() -> PlainServer:
    return PlainServer(gives_token_ids=True, has_metrics=True, health=200, version="0.30.0", certificate=certificate())


@pytest.mark.parametrize(("later", "is_said"), [(16, False), (0, True)])
def test_the_doctor_asks_one_prompt_twice_before_it_says_that_reuse_is_unknown(later: int, is_said: bool) -> None:
    def where_it_was_asked_before(server: PlainServer) -> None:
        *before, now = (asked["prompt"] for asked in server.asked)
        server.cached_tokens = later if now in before else 0

    served = PlainServer(has_metrics=True, gives_token_ids=True, on_answer=where_it_was_asked_before)
    with plain_server(served) as server:
        done = CliRunner().invoke(app, ["doctor", "--url", server.url], env={"COLUMNS": "1000"})
    assert ("usage does not state cached tokens, nor when a prompt is asked again" in done.output) == is_said
    assert len(served.asked) == 2


def test_the_doctor_asks_a_server_over_https() -> None:
    trusting_it = {"SSL_CERT_FILE": str(certificate()), "COLUMNS": "1000"}
    with plain_server(over_https()) as server:
        asked = harness("doctor", "--url", server.url, environment=trusting_it)
        assert asked.returncode == 0, asked.stdout + asked.stderr
        assert "model: plain" in asked.stdout
        assert "version: 0.30.0" in asked.stdout
        assert "usage does not state cached tokens" in asked.stdout
        untrusted = harness("doctor", "--url", server.url, environment={"COLUMNS": "1000"})
    assert untrusted.returncode == 1
    assert "its certificate is not trusted" in untrusted.stdout
    assert "SSL_CERT_FILE=FILE" in untrusted.stdout


def test_a_server_over_https_is_measured_as_any_whatever_client_a_former_file_names(tmp_path: Path) -> None:
    with plain_server(over_https()) as server:
        (tmp_path / "asked.toml").write_text(OVER_HTTPS.format(url=server.url) + UNHURRIED_TOML)
        words = ("run", str(tmp_path / "asked.toml"), "--runs", str(tmp_path / "runs"))
        trusting_it = {"SSL_CERT_FILE": str(certificate())}
        done = harness(*words, "--set", "client.processes=2", environment=trusting_it)
        assert done.returncode == 0, done.stdout + done.stderr
    (sealed,) = RunStore(tmp_path / "runs").sealed("asked")
    assert len(sealed.manifest.client_audit["processes"]) == 2
    assert None not in sealed.table("chunks")["kernel_ns"].to_pylist(), "each has the stamp of its last segment"
    scrapes = [json.loads(line) for line in (sealed.path / "scrapes.jsonl").read_text().splitlines()]
    assert {line["status"] for line in scrapes} == {200}
    assert {line["reason"] for line in scrapes} >= {"before", "after"}


def test_the_doctor_says_what_a_server_lacks() -> None:
    with plain_server(PlainServer()) as server:
        done = CliRunner().invoke(app, ["doctor", "--url", server.url], env={"COLUMNS": "1000"})
    assert done.exit_code == 1
    assert done.output.count("missing  ") == 2


def test_what_a_server_answers_otherwise_is_a_finding_of_each_run(tmp_path: Path) -> None:
    other = PlainServer(gives_token_ids=True, has_metrics=True, is_other=True)
    with plain_server(other) as server:
        outcome = run(tmp_path, server)
        done = CliRunner().invoke(app, ["doctor", "--url", server.url], env={"COLUMNS": "1000"})
    assert [run.invalid_reasons for run in outcome.runs] == [()]
    found = [one for one in outcome.runs[0].manifest.findings if one.code.startswith("tolerated-")]
    assert [one.code for one in found] == ["tolerated-done-missing", "tolerated-error-null", "tolerated-id-changes"]
    assert all("(4 answers)" in one.evidence for one in found)
    assert done.exit_code == 0
    assert "tolerated: the id changes within an answer; the first is taken" in done.output


def test_a_plan_longer_than_the_servers_context_is_refused_before_the_first_run(tmp_path: Path) -> None:
    short = PlainServer(gives_token_ids=True, has_metrics=True, max_model_len=1200)
    long_prompts = {"prompt_tokens": {"distribution": "fixed", "value": 1190}}
    with plain_server(short) as server:
        with pytest.raises(
            ServerError, match=r"takes 1206 tokens with its answer, and /v1/models states a limit of 1200"
        ):
            run(tmp_path, server, workload=long_prompts)
        assert len(server.asked) == 1
        outcome = run(tmp_path, server, workload={"prompt_tokens": {"distribution": "fixed", "value": 1180}})
    assert [run.invalid_reasons for run in outcome.runs] == [()]


def test_conditions_that_differ_in_what_requests_carry_share_their_plans(tmp_path: Path) -> None:
    table: dict[str, Any] = {
        "condition": [
            {"name": "plain"},
            {"name": "hinted", "workload": {"request": {"extra_body": {"hold_s": "{expected_wait_s}"}}}},
        ]
    }
    with plain_server(PlainServer(gives_token_ids=True, has_metrics=True)) as server:
        spec = experiment(server)
        spec = ExperimentSpec.model_validate({**spec.model_dump(mode="json"), **table})
        outcome = run_experiment(spec, runs_root=tmp_path)
        hinted = [body for body in server.asked if "hold_s" in body]
        # The same again performs nothing; another hint is another run.
        assert run_experiment(spec, runs_root=tmp_path, resume=True).num_performed == 0
    assert [run.invalid_reasons for run in outcome.runs] == [()] * 2
    assert len({run.manifest.plan_hash for run in outcome.runs}) == 1
    assert len(hinted) == 4
