"""Every refusal on the real stack, as a person meets it: one clear line, the right exit code, nothing left behind.

``harness run`` of an experiment file, backend ``rbln``, on a copy of the twin's environment. Skipped where the twin is
not installed.
"""

from __future__ import annotations

import re
import shutil
import socket
from pathlib import Path

import pytest

from harness.extras.twin.backend import cached_artifact, twin_spec
from harness.extras.twin.environment import TwinEnvironment
from harness.measure.records.store import RunStore
from tests.support.places import Place
from tests.support.stack_servers import TESTS
from tests.support.stacks import TARGET, linked_environment

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
WORKLOAD = 'source = "sequential"\nnum_background = 2'


@pytest.fixture(autouse=True)
def servers_load(twin: TwinEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is started by its command: what is left behind is found by what a process was started with."""
    del twin
    monkeypatch.delenv(TESTS)


@pytest.fixture(scope="module")
def environment(twin: TwinEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For all tests that leave it as it is."""
    return linked_environment(twin, tmp_path_factory.mktemp("environment"))


@pytest.fixture
def place(twin: TwinEnvironment, environment: Path, tmp_path: Path) -> Place:
    return Place(twin, environment, tmp_path)


@pytest.fixture
def changed(twin: TwinEnvironment, tmp_path: Path) -> Place:
    """A place whose environment the test may change."""
    return Place(twin, linked_environment(twin, tmp_path / "stack"), tmp_path)


def refusal(place: Place, code: int, **server: object) -> str:
    """What ``harness run`` says, a line for each fault; nothing may have started, and nothing may be left."""
    file = place.write("refused", WORKLOAD, {"only": dict(server)})
    done = place.harness("run", file, "--runs", "runs")
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("harness: ")
    assert done.stdout == ""
    assert place.left_behind() == []
    assert not [path for path in (place.folder / "runs").rglob("*") if path.is_file()]
    return done.stderr.strip()


def test_a_version_that_nobody_has_read(changed: Place) -> None:
    version = changed.twin.version
    installed = changed.site / f"vllm_rbln-{version}.dist-info"
    newer = changed.site / "vllm_rbln-0.13.0.dist-info"
    newer.mkdir()
    text = (installed / "METADATA").read_text().replace(f"Version: {version}", "Version: 0.13.0", 1)
    (newer / "METADATA").write_text(text)
    installed.unlink()
    target = changed.site / TARGET
    target.write_text(target.read_text() + "# of 0.13.0\n")
    assert re.fullmatch(
        rf"harness: {re.escape(str(target))}: is unknown, not pristine: vllm-rbln 0\.13\.0, SHA-256 [0-9a-f]{{16}}\. "
        r'Patches exist for vllm-rbln 0\.11\.0, .*0\.12\.0; install one of these, or run with patch = "none"',
        refusal(changed, 2),
    )


def test_a_target_that_somebody_changed(changed: Place) -> None:
    target = changed.site / TARGET
    target.write_text(target.read_text() + "# changed\n")
    assert refusal(changed, 2).endswith(
        f"The file was changed; reinstall: pip install --force-reinstall --no-deps vllm-rbln=={changed.twin.version}"
    )


def test_a_package_that_somebody_patched(changed: Place) -> None:
    (changed.site / TARGET).write_text(
        (changed.site / TARGET).read_text() + '# logger.debug("[BUCKET] request_nums=%d\n'
    )
    for declared in ("overlay", "none"):
        assert "is patched, not pristine" in (message := refusal(changed, 2, patch=declared))
        reinstall = f"pip install --force-reinstall --no-deps vllm-rbln=={changed.twin.version}"
        assert message.endswith(f"It was patched by hand; reinstall: {reinstall}")


def test_a_port_that_is_taken(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert re.fullmatch(
            rf"harness: 127\.0\.0\.1:{port}: port {port} is in use by pid \d+ \(.*\)\. End that process, or set "
            "port = 0 for any free port",
            refusal(place, 1, port=port),
        )


def test_an_artifact_that_is_not_there_or_only_in_part(place: Place) -> None:
    assert refusal(place, 2, artifact="/data/none").startswith(
        "harness: condition 'only': /data/none: no such artifact. Compile it, and name the folder that this prints: "
    )
    part = place.folder / "part"
    shutil.copytree(cached_artifact(place.twin, twin_spec()), part)
    (part / "decoder_batch_4.rbln").unlink()
    assert (f"condition 'only': {part}: lacks decoder_batch_4.rbln. It was copied in part; copy it again") in refusal(
        place, 2, artifact=str(part)
    )


def test_an_artifact_that_is_not_what_the_experiment_says(place: Place) -> None:
    assert refusal(place, 2, decode_buckets=[1, 2, 4, 6, 8], kv_slots=12).endswith(
        "does not fit the experiment: decode_buckets is [1, 2, 4, 6, 8], compiled [1, 2, 4, 8]; kv_slots is 12, "
        "compiled 8. Name another artifact, compile the model again (harness server compile), or change [server]"
    )


def test_an_engine_that_dies_during_the_run(place: Place) -> None:
    fault = {"do": "error", "call": "decode", "at": 9}
    file = place.write("dying", WORKLOAD, {"only": {"faults": [fault]}})
    done = place.harness("run", file, "--runs", "runs")
    assert done.returncode == 3, done.stdout + done.stderr
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("INVALID")]
    assert re.match(r"INVALID only/0: engine-died: \(EngineCore pid=\d+\) .*device error at decode call 9; ", line)
    assert place.left_behind() == []
    (run,) = RunStore(place.folder / "runs").sealed("dying")
    assert not run.is_valid
    statuses = run.table("requests")["status"].to_pylist()
    assert statuses[0] == "ok"
    assert len(statuses) == 4
    assert all(status != "ok" for status in statuses[1:])
    # The report says it too, as the first reason.
    assert "engine-died" in (place.folder / "runs" / "dying.html").read_text(encoding="utf-8")


def test_a_server_that_dies_while_it_starts(place: Place) -> None:
    fault = {"do": "crash", "call": "start"}
    file = place.write("dying", WORKLOAD, {"only": {"faults": [fault]}})
    done = place.harness("run", file, "--runs", "runs")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.match(
        r"harness: server \(pid \d+\): ended by itself with exit code 1: RuntimeError: Engine core initialization "
        r"failed.*\. server\.log, which is kept, ends with:\n",
        done.stderr,
    )
    assert place.left_behind() == []
    assert (place.folder / "runs" / "dying" / "only" / "0.aborted-1" / "server.log").is_file()
    assert RunStore(place.folder / "runs").sealed() == []
