"""Real processes: two emulated servers and a router before them, as one server of a run."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from harness.analysis import run_figures
from harness.analysis.logs.derive import rebuild
from harness.analysis.logs.replicas import engines_of, servers_in
from harness.analysis.run_tables import MOVED_COUNTER, counter_increment
from harness.errors import ServerError
from harness.extras.replicas.figures import figures_of_sealed
from harness.measure.records import layout
from harness.measure.records.run import SealedRun
from harness.measure.records.schema import values_of
from harness.present.report.timeline import timeline
from harness.runner import run_experiment
from harness.runner.progress import ProgressEvent, RequestFinished
from tests.runner.backends.test_vllm import experiment
from tests.support.as_simulated import held_to_the_simulator, other_decisions
from tests.support.emulated_vllm import emulated_vllm
from tests.support.experiments import UNHURRIED, small_experiment
from tests.support.processes import is_alive, servers_of_ours

# What another Python can change of a router is in test_router.
pytestmark = [pytest.mark.live, pytest.mark.same_everywhere]

SESSIONS = {"num_sessions": 6}
ONE = [{"name": "base"}]
SUPPORT = Path(__file__).parents[2] / "support"


def routed(runs_root: Path, policy: str = "session-affinity", **router: object) -> SealedRun:
    """One run of two replicas behind a router."""
    server = {"replicas": 2, "router": {"policy": policy, **router}}
    spec = small_experiment(server=server, workload=SESSIONS, condition=ONE)
    return run_experiment(spec, runs_root=runs_root).runs[0]


@pytest.fixture(scope="module")
def by_prefixes(tmp_path_factory: pytest.TempPathFactory) -> SealedRun:
    """The valid run of a router that knows prefixes."""
    run = routed(tmp_path_factory.mktemp("prefix-aware"), "prefix-aware")
    assert run.is_valid, run.invalid_reasons
    return run


def test_the_router_decides_as_its_policy_does_for_the_same_arrivals(by_prefixes: SealedRun) -> None:
    run = by_prefixes
    named = {
        name: (session, request)
        for name, session, request in values_of(run.table("requests"), "request_id", "session", "request")
    }
    assert other_decisions(run) == (len(named), 0)
    served = engines_of(run)
    routed_lines = map(json.loads, run.file(layout.ROUTED).read_text().splitlines())
    logged = {named[name]: rest[1] for _at, what, name, *rest in routed_lines if what == "route"}
    assert served == logged
    homes = {session: {served[key] for key in served if key[0] == session} for session, _ in served}
    assert all(len(replicas) == 1 for replicas in homes.values())


def test_live_replicas_make_the_steps_of_the_simulator(by_prefixes: SealedRun) -> None:
    run = by_prefixes
    held = [held_to_the_simulator(run, replica) for replica in range(2)]
    assert [each.differing for each in held] == [[], []]
    assert sum(each.requests for each in held) == run.table("requests").num_rows
    assert all(each.steps for each in held)
    if not counter_increment(run.table("metrics"), MOVED_COUNTER):
        assert [each.late for each in held] == [0, 0]


def test_the_sums_of_replicas_are_what_the_door_saw(by_prefixes: SealedRun) -> None:
    run = by_prefixes
    servers, figures = servers_in(run), figures_of_sealed(run)
    own = run_figures(run)
    assert sum(server.steps.num_rows for server in servers) == own.num_steps == run.table("steps").num_rows
    assert sum(figures.num_requests) == own.num_requests
    assert own.a_ns == round(sum(figures.device_s) * 1e9)
    assert own.b_ns == round(sum(figures.in_flight_s) * 1e9)
    assert figures.router_in_flight_s <= sum(figures.in_flight_s)
    counted = Counter(engines_of(run).values())
    metrics = run.table("metrics")
    success = "vllm:request_success_total"
    after = [row for row in metrics.to_pylist() if row["name"] == success and row["reason"] == "after"]
    by_replica = {
        replica: sum(row["value"] for row in after if f'replica="{replica}"' in row["labels"]) for replica in (0, 1)
    }
    assert by_replica == dict(counted)
    view = timeline(run, 0)
    assert [len(steps.step_s) for steps in view.servers] == [server.steps.num_rows for server in servers]
    assert {bar.replica for bar in view.bars} == {0, 1}
    rebuild(run)


def test_what_a_router_does_to_requests_and_answers_is_seen(tmp_path: Path) -> None:
    """One router that does all of it: each is named, and nothing else."""
    evidence = {
        "first-token-held": "the first token came together with later ones",
        "cache-not-clean": "where the plan explains 0",
        "replicas-disagree": "names another replica than the logs",
    }
    command = [sys.executable, str(SUPPORT / "lying_router.py"), "{port}", "{urls}"]
    router = {"kind": "command", "policy": "own", "command": command, "health": "/health"}
    server = {"replicas": 2, "router": router, "replica_header": "X-Replica"}
    spec = small_experiment(
        server=server,
        workload=SESSIONS,
        time_scale=2.0,
        condition=ONE,
        limits={**UNHURRIED, "first_token_held_ms": 20.0},
    )
    (run,) = run_experiment(spec, runs_root=tmp_path).runs
    reasons = {reason.partition(":")[0]: reason for reason in run.invalid_reasons}
    assert reasons.keys() == evidence.keys()
    assert [code for code, words in evidence.items() if words not in reasons[code]] == []


def kill_when_half_is_done(runs_root: Path, place: str) -> tuple[SealedRun, list[psutil.Process]]:
    """A run in which the server that has a file of this path open is killed. Also all servers that it had."""
    seen: dict[int, psutil.Process] = {}
    killed: list[int] = []

    def look(event: ProgressEvent) -> None:
        if killed or not isinstance(event, RequestFinished):
            return
        seen.update((child.pid, child) for child in servers_of_ours())
        for child in seen.values():
            if not killed and any(place in file.path for file in child.open_files()):
                killed.append(child.pid)
                child.kill()

    server = {"replicas": 2, "router": {"policy": "round-robin"}}
    # Others still run, for seconds, when it is heard that the first request has ended.
    lengths = {"distribution": "uniform", "low": 9, "high": 2000}
    workload = {**SESSIONS, "waits": "none", "generate_tokens": lengths}
    spec = small_experiment(server=server, workload=workload, time_scale=5.0, condition=ONE)
    run = run_experiment(spec, runs_root=runs_root, on_progress=look).runs[0]
    assert killed
    return run, list(seen.values())


@pytest.mark.parametrize(
    ("place", "code", "evidence"),
    [
        ("replicas/1/", "replica-died", "replica 1 ended during the run with signal SIGKILL"),
        ("routed", "router-died", "the router ended during the run with signal SIGKILL"),
    ],
)
def test_a_killed_process_is_one_clear_finding_and_nothing_is_left(
    tmp_path: Path, place: str, code: str, evidence: str
) -> None:
    run, processes = kill_when_half_is_done(tmp_path, place)
    assert not run.is_valid
    found = [finding for finding in run.manifest.findings if finding.code in ("replica-died", "router-died")]
    assert [(finding.code, finding.evidence) for finding in found] == [(code, evidence)]
    assert len(processes) == 3
    assert not [process for process in processes if is_alive(process.pid)]


def test_a_router_that_is_not_installed_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"the router vllm-router is not in .*/nowhere/bin") as caught:
        routed(tmp_path, kind="vllm-router", environment="/nowhere")
    assert "pip install vllm-router" in caught.value.hint
    assert not list(tmp_path.rglob("*.partial"))


def test_a_router_that_ends_at_once_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="the router: ended by itself with exit code 3"):
        routed(tmp_path, kind="command", command=("sh", "-c", "exit 3", "{port}", "{urls}"))


@pytest.mark.parametrize("kind", ["haproxy", "nginx"])
def test_a_real_router_keeps_sessions_at_home_and_every_request_is_told_to_its_replica(
    tmp_path: Path, kind: str
) -> None:
    if not (shutil.which(kind) or shutil.which(kind, path="/usr/sbin")):
        pytest.skip(f"{kind} is not installed")
    run = routed(tmp_path, kind=kind)
    assert run.is_valid, run.invalid_reasons
    served = engines_of(run)
    assert len(served) == run.table("requests").num_rows
    assert len({(session, replica) for (session, _), replica in served.items()}) == 6


def test_a_port_of_one_server_is_refused_for_several() -> None:
    with pytest.raises(ValueError, match="port is of one server"):
        small_experiment(server={"replicas": 2, "port": 8000})


def test_the_number_of_each_replica_of_a_vllm_is_in_its_environment_and_arguments(tmp_path: Path) -> None:
    numbered = {"env": {"MINE": "{replica}"}, "extra_args": ["--seed", "{replica}"]}
    routed_vllm = {"replicas": 2, "router": {"policy": "least-requests"}, **numbered}
    spec = experiment(emulated_vllm(tmp_path / "env"), {}, **routed_vllm)
    (run,) = run_experiment(spec, runs_root=tmp_path / "runs").runs
    assert "setting-differs" not in {finding.code for finding in run.manifest.findings}
    assert other_decisions(run) == (run.table("requests").num_rows, 0)
    launched = run.manifest.server.facts["launch"]["replicas"]
    assert [each["argv"][each["argv"].index("--seed") + 1] for each in launched] == ["0", "1"]
    assert run.is_valid, run.invalid_reasons
