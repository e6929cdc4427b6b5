"""An attached server is what its own records show: an emulator is called one, and no other server takes its place."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import csv
from typer.testing import CliRunner

from harness.analysis.figures import run_figures
from harness.cli.tree import app
from harness.clock import NS_PER_S, monotonic_ns
from harness.errors import ServerError, SpecError
from harness.measure.client.target import endpoint_at
from harness.measure.records import layout
from harness.measure.records.run import SealedRun
from harness.measure.records.store import RunStore
from harness.measure.server.life import AttachedServer, LaunchPlan
from harness.model.spec import ExperimentSpec, ServerSpec
from harness.runner import run_experiment
from harness.runner.backends.attached import AttachedBackend
from harness.runner.progress import RunSealed
from harness.secrets import note_secrets
from harness.stacks.vllm.step_log import load_step_log
from tests.support.emulator_process import Emulator, end, start_ready
from tests.support.experiments import one_condition
from tests.support.plain_server import PlainServer, plain_server

pytestmark = pytest.mark.live


@pytest.mark.parametrize("url", ["http://me:hidden@127.0.0.1:1", "ftp://127.0.0.1", "http://127.0.0.1:1/?key=hidden"])
def test_addresses_of_replicas_are_held_to_what_that_of_a_server_is(url: str) -> None:
    server = ServerSpec(url="http://127.0.0.1:1", replica_urls=("http://127.0.0.1:2", url))
    with pytest.raises(SpecError, match=r"^server\.replica_urls: is '.*', not http://HOST:PORT") as refused:
        AttachedBackend().check_server(server)
    assert "hidden" not in str(refused.value) + server.model_dump_json()


def test_what_a_server_appends_to_its_log_is_kept_without_the_key(tmp_path: Path) -> None:
    note_secrets(["sk-of-the-client"])
    source, kept = tmp_path / "source", tmp_path / "kept"
    source.write_text("first line with sk-of-the-client\nbefore the run\n")
    server = AttachedServer(LaunchPlan("attached", (), "127.0.0.1", 1, "", appended=((source, kept),)))
    with source.open("a") as log:
        log.write("key: sk-of-the-client\n")
    server.stop()
    assert kept.read_text() == "first line with redacted\nkey: redacted\n"


def attached(url: str, **keys: Any) -> ExperimentSpec:
    """Two conditions of two short sessions each on the server at ``url``."""
    conditions = [{"name": "base"}, {"name": "no-waits", "treatment": "no-waits"}]
    server = {"url": url, **keys.pop("server", {})}
    return one_condition("attached", "attached", **{"condition": conditions, "server": server, **keys})


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    started = start_ready(tmp_path_factory.mktemp("server"), time_scale=10.0)
    yield started
    end(started)


@pytest.fixture(scope="module")
def on_the_emulator(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> list[SealedRun]:
    root = tmp_path_factory.mktemp("runs")
    run_experiment(attached(emulator.address), runs_root=root).require_valid()
    return list(RunStore(root).sealed("attached"))


def harness(*words: str) -> str:
    done = CliRunner().invoke(app, [*words], env={"COLUMNS": "1000"})
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_an_attached_emulator_is_called_one_and_nothing_is_called_measured(
    on_the_emulator: list[SealedRun], tmp_path: Path
) -> None:
    note = "Emulated with modelled step times; no accelerator was measured."
    assert {run.manifest.backend for run in on_the_emulator} == {"attached"}
    assert {run.manifest.kind.has_device for run in on_the_emulator} == {False}
    runs, out = ("--runs", str(on_the_emulator[0].path.parents[2])), tmp_path / "out"
    for words in (("table", "attached"), ("table", "attached", "--serving"), ("compare", "attached")):
        page = harness(*words, *runs)
        assert note in page
        assert "measured" not in page.replace(note, "")
    harness("records", "export", "attached", *runs, "--format", "csv", "-o", str(out))
    tables = [csv.read_csv(path) for path in out.rglob("*.csv")]
    assert tables
    for table in tables:
        assert set(table["origin"].to_pylist()) == {note}


def test_an_attached_server_is_left_running_and_each_run_says_that_it_was_attached(
    emulator: Emulator, on_the_emulator: list[SealedRun]
) -> None:
    for run in on_the_emulator:
        assert run.table("requests")["status"].to_pylist() == ["ok"] * 4
        (finding,) = [one for one in run.manifest.findings if one.code == "server-attached"]
        assert finding.evidence == "the server was started by somebody else and not restarted for this run"
        assert run.manifest.server.argv == ()
        assert run.manifest.observation.steps == "none"
        assert run_figures(run).a is None, "nothing shows its steps"
    assert emulator.process.poll() is None, "the attached server was ended"


def start_body(started_s: float, tokens: int, model: str = "plain") -> str:
    return (
        "# TYPE process_start_time_seconds gauge\n"
        f"process_start_time_seconds {started_s}\n"
        "# TYPE vllm:generation_tokens_total counter\n"
        f'vllm:generation_tokens_total{{model_name="{model}"}} {tokens}\n'
    )


def replaced_by(root: Path, change: Callable[[PlainServer], object], **limits: Any) -> list[str]:
    """Reasons of a run whose server is changed at its third answer: the probe's, then two of the run's four."""
    body = start_body(1.8e9, 4000)
    server = PlainServer(has_metrics=True, health=200, version="0.30.0", metrics=body, tokenizes=True)

    def at_the_third(asked: PlainServer) -> None:
        if len(asked.asked) == 3:
            change(asked)

    server.on_answer = at_the_third
    keys: dict[str, Any] = {"workload": {"prompt_form": "text"}, "condition": [{"name": "base"}]}
    with plain_server(server) as there:
        (run,) = run_experiment(attached(there.url, **keys, limits=limits), runs_root=root).runs
    return list(run.invalid_reasons)


def becomes(**facts: Any) -> Callable[[PlainServer], object]:
    return lambda server: [setattr(server, name, value) for name, value in facts.items()]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (becomes(metrics=start_body(1.8e9 + 60, 4016)), "server-replaced: process_start_time_seconds changed from"),
        (becomes(version="0.31.0"), "server-replaced: the version changed during the run, from 0.30.0 to 0.31.0"),
        (becomes(model="other"), "server-replaced: the list of models changed during the run, from plain to other"),
        (becomes(health=503), "server-unhealthy: after the replay GET /health gives status 503"),
        (becomes(has_metrics=False), "scrape-failed: "),
        (becomes(metrics=start_body(1.8e9, 16)), "fell from 4000 to 16"),
    ],
)
def test_a_server_that_is_replaced_or_fails_during_the_run_makes_it_invalid(
    tmp_path: Path, change: Callable[[PlainServer], object], reason: str
) -> None:
    found = replaced_by(tmp_path, change)
    assert any(reason in each for each in found), found


def test_metrics_that_fail_from_then_on_are_a_warning_where_none_are_needed(tmp_path: Path) -> None:
    assert replaced_by(tmp_path, becomes(has_metrics=False), needs_metrics=False) == []


def test_metrics_at_another_address_are_read_there_and_the_other_model_in_them_is_named(tmp_path: Path) -> None:
    body = start_body(1.8e9, 4000) + start_body(1.8e9, 7, model="other").splitlines()[-1] + "\n"
    server = PlainServer(has_metrics=True, health=200, metrics=body, metrics_path="/stats", gives_token_ids=True)
    with plain_server(server) as there:
        with pytest.raises(ServerError, match=r"GET /metrics gives status 404.*Set server\.metrics_url where"):
            run_experiment(attached(there.url), runs_root=tmp_path)
        elsewhere = {"metrics_url": f"{there.url}/stats"}
        assert "missing" not in harness("doctor", "--url", there.url, "--metrics-url", f"{there.url}/stats")
        run, *_ = run_experiment(attached(there.url, server=elsewhere), runs_root=tmp_path).runs
    found = [each.evidence for each in run.manifest.findings if each.code == "other-models"]
    assert found == ["the metrics count other models too, which are left out: other"]


def test_a_server_that_says_it_is_unhealthy_is_refused_before_the_first_run(tmp_path: Path) -> None:
    server = PlainServer(has_metrics=True, health=503)
    with plain_server(server) as there, pytest.raises(ServerError, match="GET /health gives status 503"):
        run_experiment(attached(there.url, workload={"prompt_form": "text"}), runs_root=tmp_path)


def test_the_check_before_the_first_run_waits_as_long_as_a_request_may_take(tmp_path: Path) -> None:
    is_refused = threading.Event()
    server = PlainServer(has_metrics=True, on_answer=lambda _server: is_refused.wait())
    keys: dict[str, Any] = {"workload": {"prompt_form": "text"}, "limits": {"request_timeout_s": 0.5}}
    with plain_server(server) as there, pytest.raises(ServerError, match="a request of 32 tokens failed"):
        run_experiment(attached(there.url, **keys), runs_root=tmp_path)
    is_refused.set()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_server_that_takes_connections_and_says_nothing_is_refused_at_the_limit(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = endpoint_at(f"{scheme}://127.0.0.1:{silent.getsockname()[1]}", "", "url")
        server = AttachedServer(LaunchPlan("attached", (), endpoint.host, endpoint.port, "", reached_at=endpoint))
        began_ns = monotonic_ns()
        with pytest.raises(ServerError, match=r"does not answer GET /v1/models with 200 within 0\.5 s"):
            server.wait_healthy(endpoint.host, endpoint.port, deadline_s=0.5)
    # One question alone may take a minute in these tests.
    assert monotonic_ns() - began_ns < 30 * NS_PER_S


def test_the_step_log_of_a_run_is_that_of_the_server_that_ran_it(tmp_path: Path) -> None:
    """A header says what its server was started with: the last one holds, and the metrics are asked too."""
    step_log, stale = tmp_path / "steps.jsonl", tmp_path / "stale.jsonl"
    paged = {"rules": "vllm-paged", "cost_model": "emulated-gpu", "num_gpu_blocks": 900, "block_size": 128}
    emulator = start_ready(tmp_path / "server", server=paged, step_log_path=str(step_log), time_scale=10.0)

    def spec(log: Path, **changes: Any) -> ExperimentSpec:
        server = {"rules": "vllm-paged", "num_gpu_blocks": 900, "block_size": 128, "step_log": str(log), **changes}
        return one_condition("attached", "attached", replicates=2, server={"url": emulator.address, **server})

    def restarted(event: object) -> None:
        if isinstance(event, RunSealed):
            with step_log.open("ab") as file:
                file.write(header.replace(b'"block_size":128', b'"block_size":64'))

    try:
        header = step_log.read_bytes().splitlines(keepends=True)[0]
        first, second = run_experiment(spec(step_log), runs_root=tmp_path / "runs", on_progress=restarted).runs
        assert first.is_valid
        # Before the first run, the server is asked whether it can be measured.
        rows = [load_step_log(run.file(layout.STEP_LOG)).steps.num_rows for run in (first, second)]
        assert 0 < sum(rows) < sum(line.startswith(b"[") for line in step_log.read_bytes().splitlines())
        both = "setting-differs: block_size: 64 in its step log, 128 in its metrics"
        assert {"setting-differs: block_size: requested 128, in force 64", both} <= set(second.invalid_reasons)
        with pytest.raises(ServerError, match="block_size: 64 in its step log, 128 in its metrics"):
            run_experiment(spec(step_log), runs_root=tmp_path / "again")
        longer = json.loads(header)["effective"]["max_model_len"]
        stale.write_bytes(header.replace(b'"max_model_len":%d' % longer, b'"max_model_len":%d' % (2 * longer)))
        both = f"slot_tokens: {2 * longer} in its step log, {longer} in its list of models"
        with pytest.raises(ServerError, match=both):
            run_experiment(spec(stale), runs_root=tmp_path / "longer")
        stale.write_bytes(header)
        runs = run_experiment(spec(stale), runs_root=tmp_path / "stale").runs
        assert {run.invalid_reasons for run in runs} == {("steps-missing: the step log has no step of this run",)}
    finally:
        end(emulator)
