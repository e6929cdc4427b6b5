"""A command under limits of its shell (memory, files, file size): done, or one line; no traceback, no half a run."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from harness.measure.records.store import RunStore

EXPERIMENT = """
name = "small"
base_seed = 1
replicates = 1
backend = "sim"

[workload]
num_sessions = 2
requests_per_session = 2

[[condition]]
name = "only"
"""
MEMORY, FILES, FILE_SIZE = resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE


@pytest.mark.parametrize(("limit", "value"), [(MEMORY, 300 << 20), (FILES, 5), (FILES, 7), (FILE_SIZE, 4096)])
def test_a_limit_of_the_shell_is_one_line(tmp_path: Path, limit: int, value: int) -> None:
    (tmp_path / "small.toml").write_text(EXPERIMENT)
    done = subprocess.run(
        [sys.executable, "-m", "harness", "run", "small.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(limit, (value, value)),
    )
    store = RunStore(tmp_path / "runs")
    if done.returncode == 0:
        assert len(store.sealed()) == store.verify() == 1
        return
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    # What ended after the run was sealed left it whole.
    assert store.verify() == len(store.sealed())


# Starts a command in an interpreter that may take no more than so much memory beyond what it has.
TIGHT = """
import resource, sys
import harness.cli
in_use = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize:")) << 10
resource.setrlimit(resource.RLIMIT_AS, (in_use + int(sys.argv[1]),) * 2)
sys.argv = ["harness", "run", "small.toml"]
harness.cli.main()
"""


@pytest.mark.parametrize("kib", [0, 1600, 6400, 51_200, 150_000])
def test_a_refusal_needs_no_memory_to_be_reported(tmp_path: Path, kib: int) -> None:
    (tmp_path / "small.toml").write_text(EXPERIMENT)
    done = subprocess.run(
        [sys.executable, "-c", TIGHT, str(kib << 10)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("harness: this machine or its limits")
    assert done.stderr.count("\n") == 1, done.stderr


def test_the_command_line_loads_no_heavy_package_before_a_command_does() -> None:
    """Where memory is limited, loading one may fail: only a command's errors become one line."""
    heavy = ("pyarrow", "numpy", "pydantic", "duckdb", "scipy", "matplotlib")
    listed = (
        "import sys, typer.main; from harness.cli.tree import app; list(typer.main.get_command(app).commands.values())"
    )
    # A table needs no figure: matplotlib alone takes as long as the command.
    tables = "import harness.present.report; print('matplotlib' in sys.modules)"
    code = f"{listed}; print([name for name in {heavy} if name in sys.modules]); {tables}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "False"]
