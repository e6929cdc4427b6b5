"""A server on another host starts, is observed, ends in good order, and leaves nothing there, whoever dies first.

Everything is tried through a stand-in for the ssh client, and through the real one where there is an sshd to start.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from harness.clock import NS_PER_MS, realtime_minus_monotonic_ns
from harness.errors import HarnessError, ServerError, SpecError
from harness.extras.remote.ssh import RemoteHost
from harness.measure.records import layout
from harness.measure.server.life import LaunchPlan
from harness.measure.server.process import ServerProcess
from harness.model.spec import ServerSpec
from harness.runner.backends.rbln import RblnBackend
from harness.runner.run import LaunchOptions
from tests.support import stand_in_ssh
from tests.support.processes import WITHIN_S, comes_true, ends, is_alive, start_launched
from tests.support.sshd import running_sshd, short_folder, write_command
from tests.support.stacks import BEFORE, TARGET, write_artifact, write_patched_stack
from tests.support.strangers import Strangers

# A server with the words of ``vllm serve``: says its pid and what it sees, and ends in good order on SIGTERM.
VLLM = f"""
import os, signal, sys, threading
from pathlib import Path
sys.path.insert(0, {str(Path(stand_in_ssh.__file__).parent)!r})
from raw_server import RawServer, Reply, whole
print("serving", sys.argv[2], "pid", os.getpid(), flush=True)
for number in range(100):
    print(number, file=(sys.stdout, sys.stderr)[number % 2], flush=True)
if "--start-at" in sys.argv:
    open(sys.argv[sys.argv.index("--start-at") + 1]).close()
for part in os.environ["PYTHONPATH"].split(":"):
    print("path", part, sorted(one.name for one in Path(part).iterdir()), flush=True)
Path(os.environ["VLLM_CORE_STEPS_FILE"]).write_text("observed\\n")
is_ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: is_ended.set())
with RawServer(lambda _asked: Reply([whole("")]), int(sys.argv[sys.argv.index("--port") + 1])):
    is_ended.wait()
print("Shutdown complete", flush=True)
"""


@pytest.fixture(params=["stand-in", "openssh"])
def ssh(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An ``ssh`` command that knows the host npu1, whose temporary files lie in "laid-out"."""
    command = tmp_path / "bin" / "ssh"
    command.parent.mkdir()
    monkeypatch.setenv("PATH", f"{command.parent}:/usr/bin:/bin")
    with short_folder(tmp_path / "laid-out") as temporary:
        if request.param == "openssh":
            with running_sshd(tmp_path / "sshd", {"TMPDIR": str(temporary)}) as config:
                write_command(command, f'exec /usr/bin/ssh -F "{config}" "$@"')
                yield command
            return
        # Of the other host, not of this process, which would keep to it when it is gone.
        monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
        monkeypatch.setenv("TMPDIR", str(temporary))
        monkeypatch.setenv("GREETING", "1")
        write_command(command, f'exec "{sys.executable}" "{stand_in_ssh.__file__}" "$@"')
        yield command


@pytest.fixture
def other_host(tmp_path: Path, ssh: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that stands for another host's disk, to which ``ssh`` on PATH leads."""
    del ssh
    root = write_patched_stack(tmp_path, monkeypatch)
    (root / "vllm.py").write_text(VLLM)
    (root / "bin" / "vllm").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{root / "vllm.py"}" "$@"\n')
    write_artifact(root / "artifact")
    (tmp_path / "run").mkdir()
    return root


def _launch(tmp_path: Path, root: Path, **server: Any) -> LaunchPlan:
    table = {"ssh": "npu1", "environment": str(root), "artifact": str(root / "artifact"), **server}
    return RblnBackend().launch(
        ServerSpec.model_validate(table),
        LaunchOptions(0, tmp_path / "run", log_format="precise"),
    )


def _laid_out(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "laid-out").glob("rbln-harness-*"))


def _begun(tmp_path: Path, plan: LaunchPlan) -> ServerProcess:
    return start_launched(plan, tmp_path / "run")


@contextmanager
def _started(tmp_path: Path, plan: LaunchPlan) -> Generator[ServerProcess]:
    with _begun(tmp_path, plan) as process:
        process.wait_healthy(plan.host, plan.port, deadline_s=WITHIN_S)
        yield process


@pytest.fixture
def served(tmp_path: Path, other_host: Path) -> Iterator[tuple[LaunchPlan, ServerProcess]]:
    plan = _launch(tmp_path, other_host)
    with _started(tmp_path, plan) as process:
        yield plan, process


def _pid_there(process: ServerProcess) -> int:
    (line,) = [line for line in process.log_tail(200) if line.startswith("serving")]
    return int(line.split()[-1])


@pytest.mark.live
def test_it_serves_through_the_forwarded_port_and_ends_in_good_order(
    tmp_path: Path, served: tuple[LaunchPlan, ServerProcess]
) -> None:
    plan, process = served
    assert httpx.get(f"http://{plan.host}:{plan.port}/health", trust_env=False, timeout=WITHIN_S).status_code == 200
    overlay, observer = [line for line in process.log_tail(200) if line.startswith("path")]
    assert "'vllm_rbln'" in overlay
    assert "'vllm_step_log'" in observer
    # The environment of the server does not lie on the other disk while it runs.
    (folder,) = _laid_out(tmp_path)
    assert not (folder / "job.json").exists()
    pid = _pid_there(process)
    report = process.stop(grace_s=30.0)
    assert report.returncode == 0
    assert process.log_tail(1) == ["Shutdown complete"]
    assert not is_alive(pid)
    assert (tmp_path / "run" / "observer.jsonl").read_text() == "observed\n"
    assert _laid_out(tmp_path) == []
    assert plan.observation.patch["mode"] == "overlay"
    assert plan.requested["artifact"]["config"]["batch_size"] == 8


@pytest.mark.live
def test_its_log_holds_its_own_lines_alone_whole_and_in_order(tmp_path: Path, other_host: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    plan = _launch(tmp_path, other_host, extra_args=["--start-at", str(gate)])
    said = tmp_path / "run" / layout.SSH_LOG

    def is_refused() -> bool:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://{plan.host}:{plan.port}/health", trust_env=False, timeout=WITHIN_S)
        # While the server does not listen yet, ssh cannot forward the probes of its health, and says so.
        return "open failed" in said.read_text() or not (tmp_path / "sshd").is_dir()

    with _begun(tmp_path, plan) as process:
        assert comes_true(said.exists)
        assert comes_true(is_refused)
        gate.write_text("")
        process.wait_healthy(plan.host, plan.port, deadline_s=WITHIN_S)
        lines = process.log_tail(200)
        (first,) = [number for number, line in enumerate(lines) if line.startswith("serving")]
        assert lines[first + 1 : first + 101] == [str(number) for number in range(100)]
        assert not [line for line in lines if "channel" in line]


@pytest.mark.live
def test_what_ssh_said_last_of_a_server_that_ended_ill_stands_in_its_log(tmp_path: Path, other_host: Path) -> None:
    plan = _launch(tmp_path, other_host)
    job = json.loads(plan.files["remote"].read_text())
    plan.files["remote"].write_text(json.dumps({**job, "host": "nowhere"}))
    with pytest.raises(ServerError, match=r"ssh: connect to host .* port"), _started(tmp_path, plan):
        pass


@pytest.mark.live
def test_a_local_end_that_is_killed_takes_the_server_and_its_folder_there_with_it(
    tmp_path: Path, served: tuple[LaunchPlan, ServerProcess]
) -> None:
    _, process = served
    pid = _pid_there(process)
    os.killpg(process.pid, signal.SIGKILL)
    assert ends(pid)
    # The stand-in's other host is this one, where the supervisor kills what the killed end has left.
    is_another_host = (tmp_path / "sshd").is_dir()
    assert not is_another_host or comes_true(lambda: not _laid_out(tmp_path))


@pytest.mark.live
def test_a_path_that_dies_without_a_word_takes_the_server_and_its_folder_with_it(
    tmp_path: Path, other_host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.extras.remote.ssh.SILENCE_S", 3.0)
    with _started(tmp_path, _launch(tmp_path, other_host)) as process:
        pid = _pid_there(process)
        # For longer than the silence that is allowed, the other side hears of us.
        assert not comes_true(lambda: not is_alive(pid), 4)
        # A machine that stands still is no silence, though its far end wakes first.
        there = psutil.Process(pid).parent()
        os.killpg(process.pid, signal.SIGSTOP)
        there.suspend()
        assert not comes_true(lambda: not is_alive(pid), 4)
        there.resume()
        os.killpg(process.pid, signal.SIGCONT)
        assert not comes_true(lambda: not is_alive(pid), 1)
        os.killpg(process.pid, signal.SIGSTOP)
        try:
            assert comes_true(lambda: not is_alive(pid) and not _laid_out(tmp_path))
        finally:
            os.killpg(process.pid, signal.SIGCONT)


@pytest.mark.live
def test_a_server_that_dies_there_is_an_error_here(tmp_path: Path, served: tuple[LaunchPlan, ServerProcess]) -> None:
    _, process = served
    os.kill(_pid_there(process), signal.SIGKILL)
    assert comes_true(lambda: process.has_exited)
    with pytest.raises(ServerError, match="ended by itself with exit code 137"):
        process.check()
    assert _laid_out(tmp_path) == []


def test_its_clock_is_placed_on_ours_with_an_honest_uncertainty(other_host: Path) -> None:
    del other_host
    offset = RemoteHost("npu1", sys.executable).read_clock(rounds=10)
    # The greeting of the login shell is no time.
    assert 0 < offset.uncertainty_ns < 1000 * NS_PER_MS
    assert abs(offset.offset_ns - realtime_minus_monotonic_ns()) <= offset.uncertainty_ns + NS_PER_MS


def test_nothing_of_the_folder_there_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_command(tmp_path / "ssh", f'exec "{sys.executable}" "{stand_in_ssh.__file__}" "$@"')
    home = tmp_path / "home"
    home.mkdir()
    strangers = Strangers(home)
    monkeypatch.chdir(home)
    host = RemoteHost("npu1", sys.executable, (str(tmp_path / "ssh"),))
    host.call("write", {"path": str(tmp_path / "written"), "text": "x"})
    assert host.read_clock(rounds=2).uncertainty_ns > 0
    assert ((tmp_path / "written").read_text(), strangers.loaded) == ("x", "")


@pytest.mark.parametrize(
    ("server", "kind", "message"),
    [
        ({"ssh": "nowhere"}, ServerError, "nowhere: cannot be used: ssh: connect to host .* port"),
        ({"environment": "/none"}, ServerError, "npu1: cannot be used: .*(not found|No such).* Check server.ssh"),
        (
            {"environment": ""},
            SpecError,
            "server.environment: is missing. Name the virtual environment of vllm on that",
        ),
        ({"artifact": "/none"}, SpecError, "npu1:/none: no such artifact. Compile it there"),
        ({"slot_tokens": 4096}, SpecError, "npu1:.*artifact: does not fit the experiment: slot_tokens is 4096"),
    ],
)
def test_what_is_wrong_there_is_refused_before_anything_is_laid_out(
    tmp_path: Path, other_host: Path, server: dict[str, Any], kind: type[HarnessError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        _launch(tmp_path, other_host, **server)
    assert _laid_out(tmp_path) == []


def test_a_file_that_was_changed_there_is_refused(tmp_path: Path, other_host: Path) -> None:
    (other_host / "site" / TARGET).write_text(BEFORE + "\n")
    with pytest.raises(SpecError, match=r"^npu1:/.* is unknown, not pristine: vllm-rbln 0\.11\.1"):
        _launch(tmp_path, other_host)


def test_only_a_folder_of_ours_is_ever_removed_there(tmp_path: Path, other_host: Path) -> None:
    host = RemoteHost("npu1", str(other_host / "bin" / "python"))
    mine = tmp_path / "mine"
    mine.mkdir()
    with pytest.raises(ServerError, match="was not made by the harness"):
        host.call("clear", {"folder": str(mine), "observer": "x"})
    assert mine.is_dir()


def test_the_job_there_is_readable_by_its_user_alone(tmp_path: Path, other_host: Path) -> None:
    plan = _launch(tmp_path, other_host, env={"HF_TOKEN": "secret"})
    (folder,) = _laid_out(tmp_path)
    assert stat.S_IMODE((folder / "job.json").stat().st_mode) == 0o600
    job = json.loads((folder / "job.json").read_text())
    assert job["env"]["HF_TOKEN"] == "secret"
    assert "HF_TOKEN" not in json.dumps(json.loads(plan.files["remote"].read_text()))


def test_the_host_is_never_read_as_an_option_of_ssh() -> None:
    words = RemoteHost("-oProxyCommand=x", "python").command("true")
    assert words[words.index("-oProxyCommand=x") - 1] == "--"
