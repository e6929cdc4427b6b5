"""Work shared out to processes gives what one process gives, and says what went wrong in any of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from harness.errors import HarnessError, SpecError
from harness.processes import parallel_map

Tell = Callable[[int], None]


def squared(task: int, tell: Tell) -> tuple[int, int]:
    tell(task)
    return task**2, os.getpid()


def test_every_task_is_done_once_by_forked_processes_after_the_first() -> None:
    told: list[int] = []
    found = dict(parallel_map(squared, range(7), told.append, workers=2, min_parallel_s=0))
    assert [found[place][0] for place in range(7)] == [0, 1, 4, 9, 16, 25, 36]
    assert sorted(told) == list(range(7))
    assert found[0][1] == os.getpid()
    assert os.getpid() not in {found[place][1] for place in range(1, 7)}


def test_work_that_is_soon_done_stays_in_this_process() -> None:
    assert {pid for _, (_, pid) in parallel_map(squared, range(9), workers=2, min_parallel_s=600)} == {os.getpid()}


def test_an_error_of_a_task_is_raised_as_it_is() -> None:
    def refuse(task: int, _tell: Tell) -> None:
        if task:
            raise SpecError("cannot be done", where="here", hint="Do another")

    with pytest.raises(SpecError, match=r"^here: cannot be done\. Do another$"):
        list(parallel_map(refuse, range(3), workers=2, min_parallel_s=0))


def test_an_error_that_cannot_be_sent_is_told_in_words() -> None:
    def fail(task: int, _tell: Tell) -> None:
        if task:
            error = ValueError("odd")
            error.args = (lambda: None,)
            raise error

    with pytest.raises(HarnessError, match="ValueError"):
        list(parallel_map(fail, range(3), workers=2, min_parallel_s=0))


def test_a_process_that_is_killed_is_told_with_its_status() -> None:
    def die(task: int, _tell: Tell) -> None:
        if task:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(HarnessError, match="ended with status -9"):
        list(parallel_map(die, range(3), workers=2, min_parallel_s=0))


def test_nothing_to_do_is_done_at_once() -> None:
    assert list(parallel_map(squared, ())) == []
