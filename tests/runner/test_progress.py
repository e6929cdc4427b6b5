"""A person's wish to stop, which arrives in signal handlers."""

from __future__ import annotations

import io
import sys
from types import FrameType
from typing import Any

import pytest
from rich.console import Console

from harness.cli.progress import TerminalProgress
from harness.clock import NS_PER_S
from harness.model.experiment import resolve
from harness.runner import StopFlag
from harness.runner import run as one_run
from harness.runner.progress import ProgressEvent, ServerStarting, alike_words
from tests.support.experiments import small_experiment
from tests.support.processes import VirtualClock


@pytest.mark.timeout(30)
def test_a_second_ctrl_c_while_the_first_one_is_handled_aborts_the_run_and_never_waits() -> None:
    stop = StopFlag()

    def interrupt(_frame: FrameType, event: str, _arg: object) -> Any:
        if event == "line":
            stop.request()  # a handler runs between two lines of the handler that it interrupts
        return interrupt

    sys.settrace(interrupt)
    stop.request()
    sys.settrace(None)
    assert stop.after_run
    assert stop.now.is_set()


def test_one_request_ends_after_the_run_and_an_abort_ends_it_now() -> None:
    asked, aborted = StopFlag(), StopFlag()
    asked.request()
    aborted.abort()
    assert (asked.after_run, asked.now.is_set()) == (True, False)
    assert (aborted.after_run, aborted.now.is_set()) == (True, True)


@pytest.mark.parametrize(("backend", "meaning"), [("sim", "one is enough"), ("emulator", "repeats itself")])
def test_replicates_that_replay_one_recording_whole_are_called_alike(backend: str, meaning: str) -> None:
    whole = {"source": "trace", "trace": "research-agent"}
    spec = small_experiment(backend=backend, time_scale=1.0, replicates=3, workload=whole)
    assert "the 3 replicates of base send the same sessions" in (words := alike_words(resolve(spec)))
    assert meaning in words
    drawn = spec.model_copy(update={"workload": spec.workload.model_copy(update={"num_sessions": 6})})
    assert not alike_words(resolve(drawn))


def test_a_wait_for_a_server_is_told_every_ten_seconds_with_what_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told, stop = VirtualClock(), list[ProgressEvent](), StopFlag()
    monkeypatch.setattr(one_run, "MonotonicClock", lambda: clock)
    is_stopped = one_run.waiting_for_server("base/0", 900.0, told.append, stop)
    for second in range(25):
        clock.sleep_until_ns(second * NS_PER_S)
        assert not is_stopped()
    assert told == [ServerStarting("base/0", 10.0, 900.0), ServerStarting("base/0", 20.0, 900.0)]
    stop.abort()
    assert is_stopped()
    written = io.StringIO()
    TerminalProgress(Console(file=written, width=200))(told[0])
    assert (
        "base/0: the server is starting, waited 10 s of 15 min 00 s; it ends when /health answers" in written.getvalue()
    )
