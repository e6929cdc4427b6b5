"""Output goes to a new or a regular file; links, devices, pipes and folders are refused and stay what they are."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
from pathlib import Path

import pytest

from harness.errors import NOT_PRINTABLE, RecordsError, SpecError
from harness.model.traces.recording import RecordedRequest, Recording, TraceHead, write_trace
from harness.outputs import check_output, one_at_a_time, user_cache, write_atomic, write_text
from harness.present.report import write_report
from harness.shipped import find_shipped
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


EXPERIMENT = """
name = "small"
backend = "sim"
[[condition]]
name = "base"
"""
BUSY = {
    "run": ("small", "run small.toml --runs runs", "making runs of small"),
    "tune": ("small-tune", "tune small.toml --runs runs", "tuning small"),
    "calibrate": ("calibrate-mine", "server calibrate mine --backend sim --runs runs", "making runs of calibrate-mine"),
}


@pytest.mark.parametrize("command", BUSY)
def test_a_second_process_at_the_same_is_refused_and_names_the_first(tmp_path: Path, command: str) -> None:
    name, words, what = BUSY[command]
    (tmp_path / "small.toml").write_text(EXPERIMENT)
    with one_at_a_time(tmp_path / "runs", name, "the first"):
        done = harness(*words.split(), cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert f"runs: another harness process, pid {os.getpid()}, is {what}" in done.stderr
    assert not (tmp_path / "runs").exists(), "nothing is left of the lock"


def test_a_second_freeze_is_refused_and_the_lock_is_no_change_of_the_tree(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(EXPERIMENT)
    for words in ("init -q .", "add small.toml", "-c user.name=a -c user.email=a commit -qm small"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    with one_at_a_time(tmp_path / ".git", "freeze-small", "the first"):
        done = harness("prereg", "freeze", "small.toml", cwd=tmp_path)
        assert subprocess.check_output(["git", "status", "--porcelain"], cwd=tmp_path) == b""
    assert done.returncode == 1, done.stdout
    assert f"another harness process, pid {os.getpid()}, is freezing small" in done.stderr


def test_a_lock_ends_with_its_owner_though_a_child_of_it_lives(tmp_path: Path) -> None:
    told, tells = os.pipe()
    owner = os.fork()
    if not owner:
        with one_at_a_time(tmp_path, "small", "the first"):
            if not os.fork():
                # Only now has the child what a fork leaves it.
                os.write(tells, str(os.getpid()).encode())
            signal.pause()
    child = int(os.read(told, 20))
    try:
        with (
            pytest.raises(RecordsError, match=f"pid {owner}, is the second"),
            one_at_a_time(tmp_path, "small", "the second"),
        ):
            pass
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        with one_at_a_time(tmp_path, "small", "the second"):
            assert (tmp_path / ".small.lock").read_text() == str(os.getpid())
    finally:
        os.kill(child, signal.SIGKILL)
    assert not list(tmp_path.iterdir())


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


def test_a_user_without_a_home_folder_is_told_which_setting_gives_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nameless(_user: int) -> None:
        raise KeyError("the user has a number only, as in many containers")

    monkeypatch.setattr(pwd, "getpwuid", nameless)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "rbln-harness"
    monkeypatch.delenv("XDG_CACHE_HOME")
    with pytest.raises(SpecError, match=r"no home folder, where caches lie\. Set HOME or XDG_CACHE_HOME to a folder"):
        user_cache()
    with pytest.raises(SpecError, match="there is no such cost model file"):
        find_shipped("costs", "~/mine.toml", what="cost model")


def test_a_file_in_the_home_of_nobody_is_no_file() -> None:
    refused = harness("trace", "show", "~nobody-of-this-name/mine.jsonl")
    assert refused.returncode == 2
    assert "there is no such" in refused.stderr
