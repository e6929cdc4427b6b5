"""Files of strangers: only regular files are opened, and what a file unpacks to has a limit."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import inputs
from harness.analysis.logs.glance import glance
from harness.errors import SpecError
from harness.extras.formats.waits import is_duckdb, rounds_of
from harness.measure.records import layout
from harness.model.traces.importing import import_trace
from tests.support.command_line import harness

CALL = {"timestamp": 0, "input_length": 6, "output_length": 2, "hash_ids": [1]}
LINE = json.dumps(CALL).encode() + b"\n"


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe.jsonl"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("kind", ["auto", "mooncake", "csv", "otel"])
def test_a_pipe_or_a_device_is_no_trace_file(pipe: Path, tmp_path: Path, kind: str) -> None:
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(SpecError, match="not a regular file; give a pipe as -"):
            import_trace([path], tmp_path / "out.jsonl", name="x", kind=kind)


def test_a_pipe_is_no_trace_release(pipe: Path) -> None:
    with pytest.raises(SpecError, match="not a regular file"):
        is_duckdb(pipe)


def test_a_trace_comes_through_a_pipe_as_a_dash(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "harness", "trace", "import", "-", "-o", str(tmp_path / "out.jsonl")]
    done = subprocess.run(command, input=gzip.compress(5 * LINE), capture_output=True, check=True)
    assert b"mooncake, 5 rows read" in done.stdout


def test_a_file_that_unpacks_to_more_than_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_UNPACKED_BYTES", 1 << 20)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(LINE + bytes(4 << 20)))
    with pytest.raises(SpecError, match="holds more than 1048576 bytes unpacked"):
        import_trace([path], tmp_path / "out.jsonl", name="x")


def test_a_release_that_unpacks_to_more_than_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_UNPACKED_BYTES", 1 << 10)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(LINE * 100))
    with pytest.raises(SpecError, match="holds more than 1024 bytes unpacked"):
        list(rounds_of(path))


def test_what_a_run_writes_is_watched_only_where_it_is_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "e" / "c" / f"0{layout.PARTIAL}"
    folder.mkdir(parents=True)
    for name in (layout.SERVER_LOG, layout.SCRAPES, layout.FLEET):
        os.mkfifo(folder / name)
    assert glance(folder).num_seqs is None
    watched = harness("watch", "--once", "--runs", str(tmp_path / "runs"))
    assert watched.returncode == 0, watched.stderr
