"""Plan files: what is saved comes back, and a file that a person changed does not."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from harness.errors import PlanError, RecordsError, SpecError
from harness.model.experiment import build_plan
from harness.model.plan.files import read_plan, save_plan, write_plan
from harness.model.plan.model import Plan
from harness.model.spec import WorkloadSpec


@pytest.fixture
def plan() -> Plan:
    return build_plan(WorkloadSpec(num_sessions=5, requests_per_session=3), 1, 2)


def test_a_saved_plan_comes_back_the_same(plan: Plan, tmp_path: Path) -> None:
    for treated in (plan, plan.with_treatment("no-waits"), plan.with_treatment("equal-waits")):
        path = save_plan(treated, tmp_path)
        assert path == tmp_path / f"{treated.hash}.jsonl"
        loaded = read_plan(path)
        assert loaded == treated
        assert loaded.sessions == treated.sessions
        assert loaded.drawn_hash == plan.hash


def test_saving_twice_gives_the_same_bytes(plan: Plan, tmp_path: Path) -> None:
    assert save_plan(plan, tmp_path / "a").read_bytes() == save_plan(plan, tmp_path / "b").read_bytes()


def test_a_file_has_a_header_and_one_line_per_session(plan: Plan, tmp_path: Path) -> None:
    lines = save_plan(plan, tmp_path).read_text().splitlines()
    header = json.loads(lines[0])
    assert header["hash"] == plan.hash
    assert header["requests"] == ["keep_tokens", "new_tokens", "generate_tokens", "wait_after_ns"]
    assert [json.loads(line)["session"] for line in lines[1:]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("line", range(6))
def test_a_changed_digit_is_noticed_in_every_line(plan: Plan, tmp_path: Path, line: int) -> None:
    path = save_plan(plan, tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    digit = max(position for position, letter in enumerate(lines[line]) if letter in "12345678")
    lines[line] = lines[line][:digit] + str(int(lines[line][digit]) + 1) + lines[line][digit + 1 :]
    path.write_text("".join(lines))
    with pytest.raises(PlanError, match="was edited"):
        read_plan(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"session":2,', '"session": 2,'),
        ('"session":2,', '"session":null,'),
        ('"session":2,', ""),
        ('"session":2,', '"session":2,"session":3,'),
        ('{"session":2', "[2"),
        ('"token_id_range":[1000,150000]', '"token_id_range":7'),
        ('"treatment":"as-drawn"', '"treatment":"no-waits"'),
    ],
)
def test_a_changed_space_and_a_broken_line_are_one_clear_error(plan: Plan, tmp_path: Path, old: str, new: str) -> None:
    path = save_plan(plan, tmp_path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(PlanError, match="was edited") as caught:
        read_plan(path)
    assert "\n" not in str(caught.value)


def test_a_file_cut_anywhere_is_refused(plan: Plan, tmp_path: Path) -> None:
    path = save_plan(plan, tmp_path)
    content = path.read_bytes()
    for length in (*range(0, len(content), 7), len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(PlanError, match=r"cut off|is not a plan file"):
            read_plan(path)


def test_a_file_named_after_another_plan_is_refused(plan: Plan, tmp_path: Path) -> None:
    path = save_plan(plan, tmp_path)
    wrong = path.rename(tmp_path / f"{'0' * 64}.jsonl")
    with pytest.raises(PlanError, match="named after another plan"):
        read_plan(wrong)
    assert read_plan(wrong.rename(tmp_path / "plan.jsonl")) == plan


@pytest.mark.parametrize("content", [b"", b"\n", b"\x00\xff", b"[]\n", b'{"format":"other"}\n', b'{"a":1}\n'])
def test_a_foreign_file_is_not_a_plan(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign.jsonl"
    path.write_bytes(content)
    with pytest.raises(PlanError, match="is not a plan file"):
        read_plan(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file"):
        read_plan(tmp_path / "absent.jsonl")
    with pytest.raises(PlanError, match="Is a directory"):
        read_plan(tmp_path)


def test_a_full_disk_leaves_nothing_behind(plan: Plan, tmp_path: Path) -> None:
    """A file size limit refuses the bytes as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(RecordsError, match="the plan cannot be written"):
            save_plan(plan, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_keeps_the_file_that_was_there(plan: Plan, tmp_path: Path) -> None:
    path = save_plan(plan, tmp_path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(RecordsError):
            write_plan(plan.with_treatment("no-waits"), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_made_is_named(plan: Plan, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(SpecError, match=r"cannot be written: .*file is no folder"):
        save_plan(plan, blocker / "plans")
