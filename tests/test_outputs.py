"""Output goes to a new or a regular file; links, devices, pipes and folders are refused and stay what they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.errors import SpecError
from harness.outputs import check_output, write_text
from harness.plan.files import write_atomic
from harness.report import write_report


def _others(folder: Path) -> dict[str, Path]:
    (folder / "target").write_text("kept")
    (folder / "a link").symlink_to(folder / "target")
    os.mkfifo(folder / "a device or a pipe")
    (folder / "a folder").mkdir()
    return {name: folder / name for name in ("a link", "a device or a pipe", "a folder")}


@pytest.mark.parametrize("what", ["a link", "a device or a pipe", "a folder"])
def test_what_is_no_regular_file_is_refused_and_left_as_it_is(tmp_path: Path, what: str) -> None:
    path = _others(tmp_path)[what]
    kind = path.lstat().st_mode
    with pytest.raises(SpecError, match=what):
        write_text(path, "new")
    with pytest.raises(SpecError, match=what):
        write_atomic(path, iter([b"new"]), what="the plan")
    with pytest.raises(SpecError, match=what):
        write_report([], path)
    assert path.lstat().st_mode == kind
    assert (tmp_path / "target").read_text() == "kept"


def test_a_device_is_refused() -> None:
    with pytest.raises(SpecError, match="a device"):
        write_text(Path("/dev/null"), "new")


def test_a_new_file_and_a_regular_one_are_written(tmp_path: Path) -> None:
    for text in ("first", "second"):
        write_text(tmp_path / "new" / "file.md", text)
        assert (tmp_path / "new" / "file.md").read_text() == text


def test_a_folder_that_takes_no_file_is_refused_beforehand_to_root_too() -> None:
    with pytest.raises(SpecError, match="nothing may be written in /proc"):
        check_output(Path("/proc/page.html"))
