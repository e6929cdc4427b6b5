"""Output goes to a new or a regular file; links, devices, pipes and folders are refused and stay what they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.errors import NOT_PRINTABLE, SpecError
from harness.model.traces.recording import RecordedRequest, Recording, TraceHead, write_trace
from harness.outputs import check_output, write_atomic, write_text
from harness.present.report import write_report
from tests.support.command_line import harness


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
        write_atomic(path, [b"new"], what="the plan")
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


def test_a_trace_name_that_reorders_its_letters_is_spelled_out_on_a_terminal_and_in_a_picture(tmp_path: Path) -> None:
    head = TraceHead("agents \u202e8 x\u200f", "csv", "recorded", 0, {}, {}, ())
    recording = Recording("r", 0, (RecordedRequest(None, (), 0, "none", 100, 0, 10),))
    trace = write_trace(tmp_path / "mine.jsonl", head, [recording])
    shown = harness("trace", "show", str(trace), "--picture", str(tmp_path / "mine.svg"))
    assert shown.returncode == 0, shown.stderr
    picture = (tmp_path / "mine.svg").read_text(encoding="utf-8")
    for text in (shown.stdout, picture):
        assert not NOT_PRINTABLE.search(text.replace("\n", ""))
    assert r"agents \u202e8 x\u200f" in shown.stdout
