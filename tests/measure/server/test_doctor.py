"""The doctor's list: complete, true of this machine, and with a next move for whatever is missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.measure.server import doctor
from harness.measure.server.doctor import Check, run_checks


def checks_at(runs: Path) -> dict[str, Check]:
    return {check.name: check for check in run_checks(runs)}


@pytest.fixture
def checks(tmp_path: Path) -> dict[str, Check]:
    return checks_at(tmp_path / "runs")


def test_every_line_says_what_was_found_what_is_needed_and_what_to_do(checks: dict[str, Check]) -> None:
    for check in checks.values():
        assert check.found
        assert check.need
        assert check.how
        assert check.how[0].isupper()
        assert "\n" not in check.found + check.need + check.how


def test_this_machine_which_runs_the_tests_can_run_the_emulator(checks: dict[str, Check]) -> None:
    assert checks["Python"].ok
    assert checks["libraries"].ok
    assert checks["timerfd"].ok


def test_looking_makes_no_folder(tmp_path: Path) -> None:
    check = checks_at(tmp_path / "runs" / "deep")["disk for runs"]
    assert check.ok
    assert f"at {tmp_path}" in check.found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_access_is_not_good_enough(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    check = checks_at(tmp_path / "runs")["disk for runs"]
    assert check.ok is False
    assert "not writable" in check.found


def test_a_command_that_is_absent_or_fails_is_none() -> None:
    assert doctor.first_line_of("no-such-command-here") is None
    assert doctor.first_line_of("false") is None
    assert doctor.first_line_of("true") == ""
    assert doctor.first_line_of("echo", "one\ntwo") == "one"
