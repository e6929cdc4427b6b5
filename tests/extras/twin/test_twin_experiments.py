"""The bucket intervention and agents of a trace from files, on the real stack: overlay, in place, observed.

``harness run`` as a person runs it, backend ``rbln``, with the stand-in device in place of the NPUs. Skipped where the
twin is not installed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.extras.twin.backend import cached_artifact, twin_spec
from harness.extras.twin.environment import TwinEnvironment
from harness.measure.records.run import SealedRun
from harness.runner.paired import compare_pair
from harness.stacks.rbln.launch.patches import tree_sha256
from tests.support.places import Place
from tests.support.sshd import running_sshd, short_folder, write_command
from tests.support.stacks import linked_environment
from tests.support.twin_runs import bucket_lines, check_observed

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

OBSERVED: dict[str, Any] = {}
PLAIN: dict[str, Any] = {"patch": "none", "observer": False}


@pytest.fixture(scope="module")
def environment(twin: TwinEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linked_environment(twin, tmp_path_factory.mktemp("environment"))


@pytest.fixture
def place(twin: TwinEnvironment, environment: Path, tmp_path: Path) -> Place:
    return Place(twin, environment, tmp_path)


def _check(place: Place, name: str, runs: Mapping[str, SealedRun]) -> None:
    for condition, run in runs.items():
        if run.manifest.observation.patch["mode"] != "none":
            print(f"{name}/{condition}: {check_observed(run, place.trace(name, condition))}")


def test_the_bucket_intervention(place: Place) -> None:
    pristine = tree_sha256(place.site / "vllm_rbln")
    workload = 'num_sessions = 6\nwaits = "none"\ngenerate_tokens = {distribution = "uniform", low = 16, high = 60}'
    six = {
        "decode_buckets": [1, 2, 4, 6, 8],
        "artifact": str(cached_artifact(place.twin, twin_spec(decoder_batch_sizes=(1, 2, 4, 6, 8)))),
    }
    conditions = {"plain": PLAIN, "base": OBSERVED, "bucket-6": six}
    overlaid = place.run("buckets", place.write("buckets", workload, conditions))
    assert tree_sha256(place.site / "vllm_rbln") == pristine
    assert "agrees in all three hashes and adds only logging" in place.patched("verify")

    _check(place, "buckets", overlaid)
    assert {b for n, b in bucket_lines(overlaid["base"]) if n in (5, 6)} == {8}
    assert compare_pair(overlaid["plain"], overlaid["base"]).is_same
    assert {b for n, b in bucket_lines(overlaid["bucket-6"]) if n in (5, 6)} == {6}
    assert not bucket_lines(overlaid["plain"])


def test_agents_that_fork_join_and_leave_answers(place: Place) -> None:
    head = {"format": "harness-trace/1", "name": "leaving", "source_format": "made", "arrivals": "together"}
    head |= {"block_tokens": 0, "dropped": {}, "broken": {}, "labels": []}
    head["requests"] = ["base", "after", "wait_ns", "wait_kind", "prompt_tokens", "keep_tokens", "generate_tokens"]
    # A parent, two sub-agents that its context goes on in, a join; each recording leaves two answers.
    asked = [[-1, [], 0, 0, 400, 0, 30], [-1, [0], 50_000_000, 1, 273, 0, 60], [-1, [0], 50_000_000, 1, 301, 0, 60]]
    asked.append([0, [1, 2], 500_000_000, 1, 520, 400, 40])
    left = [[1, 300_000_000, 0], [2, 0, 20]]
    recordings = [{"recording": f"r{at}", "start_ns": 0, "requests": asked, "aborts": left} for at in range(2)]
    trace = place.folder / "leaving.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in (head, *recordings)))
    runs = place.run("leaving", place.write("leaving", f'source = "trace"\ntrace = "{trace}"', {"base": OBSERVED}))

    _check(place, "leaving", runs)
    rows = runs["base"].table("requests").to_pylist()
    statuses = [(row["session"], row["request"], row["status"]) for row in rows]
    assert sum(status == "aborted" for *_, status in statuses) == 4, statuses
    assert sum(status == "ok" for *_, status in statuses) == 4, statuses


def test_the_same_server_on_another_host_over_ssh(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with (
        short_folder(tmp_path / "laid-out") as temporary,
        running_sshd(tmp_path / "sshd", {"TMPDIR": str(temporary)}) as config,
    ):
        write_command(tmp_path / "bin" / "ssh", f'exec /usr/bin/ssh -F "{config}" "$@"')
        workload = 'num_sessions = 4\nwaits = "none"\ngenerate_tokens = {distribution = "uniform", low = 16, high = 30}'
        file = place.write("remote", workload, {"base": OBSERVED}, server='ssh = "npu1"')
        runs = place.run("remote", file)
        assert not list(temporary.glob("rbln-harness-*"))
    # Every step's line has come, whole and in its place, though it went through the connection.
    _check(place, "remote", runs)
    assert "open failed" not in runs["base"].file("server.log").read_text()
    assert [one.code for one in runs["base"].manifest.findings if one.code == "clock-remote"]
