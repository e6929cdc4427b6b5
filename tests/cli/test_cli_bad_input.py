"""Bad input gets one line: what is wrong, where, what to do; an exit code by kind; nothing half-written.

So does a limit of the shell (memory, files, file size). ``tests/fuzz`` draws mistakes; here are those that need words.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.cli.explain import explain
from harness.errors import SpecError
from harness.measure.records.store import RunStore
from harness.model.plan.waits import WaitFile
from harness.model.spec import ExperimentSpec
from harness.runner import run_experiment
from tests.support.command_line import harness
from tests.support.experiments import small_experiment

EXPERIMENT = """
name = "bad"
base_seed = 1
replicates = 1
{top}

[workload]
num_sessions = 2
{workload}

[server]
{server}

[[condition]]
name = "only"
{condition}
"""


def write(tmp_path: Path, *, top: str = "", workload: str = "", server: str = "", condition: str = "") -> Path:
    path = tmp_path / "bad.toml"
    path.write_text(EXPERIMENT.format(top=top, workload=workload, server=server, condition=condition))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top": "replicats = 3"}, ["replicats", "unknown key", "did you mean replicates?"]),
        ({"server": "decode_buckets = 3"}, ["decode_buckets: must be a list"]),
        ({"top": "time_scale = 0"}, ["time_scale"]),
        ({"workload": "requests_per_session = 0"}, ["requests_per_session"]),
        ({"server": "decode_buckets = [1, 2, 4]"}, ["decode_buckets", "max_num_seqs"]),
        ({"server": "decode_buckets = []"}, ["decode_buckets"]),
        ({"server": "slot_tokens = 512"}, ["slot"]),
        ({"condition": 'treatment = "fewer"'}, ["treatment", "no-waits"]),
        ({"condition": "server.max_num_seq = 4"}, ["max_num_seq", "unknown key"]),
        ({"condition": "workload.group = [5]"}, ["workload.group[0]: must be a table", "bad.toml: line"]),
        (
            {"server": "max_num_seqs = 4\ndecode_buckets = [1, 2, 4]\nmax_active_seqs = 2"},
            ["condition 'only': server: the rules", "do not support max_active_seqs"],
        ),
        (
            {"workload": 'source = "trace"\ntrace = "coding-agent"', "condition": "workload.num_sessions = 4000"},
            ["workload.num_sessions: is 4000, and the trace 'coding-agent' has"],
        ),
    ],
)
def test_a_wrong_experiment_file_is_one_line_that_names_the_key(
    tmp_path: Path, changes: dict[str, str], words: list[str]
):
    path = write(tmp_path, **changes)
    result = harness("run", str(path), "--runs", str(tmp_path / "runs"))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("harness: ")
    for word in words:
        assert word in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "demo", "--replicates", "abc"), "'--replicates': 'abc' must be a whole number"),
        (("table", "demo", "--format", "xml"), "'--format': 'xml' is not one of 'text', 'csv'"),
        (("table", "base.tml"), "base.tml: there is no such file or folder"),
        (("run", "no/such/file.toml"), "harness: no/such/file.toml: "),
        (("run", "two\nlines.toml"), "harness: two\\nlines.toml: cannot be read"),
        (("run", "broken.toml"), "broken.toml: is not valid TOML: Invalid value (at line 2, "),
        (("report", "some/where"), "some/where: there is no such file or folder"),
        (("report", "demo", "--runs", "."), "no sealed runs"),
        (("plan", "show", "demo"), "demo: is no plan file. Write those of an experiment: harness plan build demo"),
        (("run", "demo", "--set", "workload.num_sessions=two"), "--set workload.num_sessions: must be a whole number"),
        (
            ("run", "demo", "--set", "workload.num_sessions=0"),
            "--set workload.num_sessions: must be greater than or equal to",
        ),
        (("runs", "--runs", "notes.txt"), "is a file, not a folder of runs"),
        (("init", "broken.toml"), "broken.toml: is there already"),
        (("plan", "waits", "import", "broken.toml", "-o", "waits.toml"), "broken.toml"),
        (("run", "right.toml", "--devices", "a,b"), "--devices: 'a,b' is no list of numbers"),
        (("run", "right.toml", "--replicates", "0"), "--replicates: must be at least 1"),
        (("sweep", "right.toml", "--over", "kv_slots=8,12"), "Write --over server.kv_slots=8,12"),
        (("power", "right.toml", "--margin", "2"), "0.02 is 2 %"),
        (("power", "demo", "--comparison", "none", "--blocks", "3"), "There are bucket6-waits, bucket6-nowaits"),
        (("search", "paper", "--budget-s", "-1"), "--budget-s"),
        (("search", "papers"), "unknown search space 'papers'. Did you mean 'paper'? Use one of emulated-gpu, paper"),
        (("simulate", "--jsonl", "right.toml"), "none of its"),
        (("trace", "show", "n" * 5000), "the name is too long for a file"),
    ],
)
def test_what_was_mistyped_is_what_the_error_names(tmp_path: Path, words: tuple[str, ...], said: str):
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "broken.toml").write_text("name = 'x'\nbase_seed == 3\n")
    write(tmp_path).rename(tmp_path / "right.toml")
    done = harness(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "right.toml: line" not in done.stderr
    assert done.stderr.startswith("Usage: ") or done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.toml", "notes.txt", "right.toml"]


def test_the_line_of_a_key_that_the_file_has_wrong_is_still_named(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nreplicates = "three"\n[[condition]]\nname = "base"\n')
    done = harness("run", str(path), "--set", "workload.num_sessions=two")
    assert done.returncode == 2
    assert "line 2: replicates: must be a whole number" in done.stderr
    assert "--set workload.num_sessions" in done.stderr


def test_a_catalogue_that_is_there_already_is_refused_before_anything_is_performed(tmp_path: Path):
    performed = ("paper", "catalogue", "--run", "--replicates", "1", "--runs", str(tmp_path), "--only", "dispersion")
    first = harness(*performed)
    assert first.returncode == 0, first.stderr
    pages = {page.name: page.read_bytes() for page in tmp_path.glob("sim/*.md")}
    refused = harness(*performed, "--only", "alignment")
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    assert {page.name: page.read_bytes() for page in tmp_path.glob("sim/*.md")} == pages
    resumed = harness(*performed, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert {page.name: page.read_bytes() for page in tmp_path.glob("sim/*.md")} == pages


@pytest.mark.live
def test_a_busy_port_names_the_port_and_seals_nothing(tmp_path: Path):
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        path = write(tmp_path, server=f"port = {port}")
        result = harness("run", str(path), "--runs", str(tmp_path / "runs"))
    assert result.returncode == 1
    assert str(port) in result.stderr
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]


def test_one_key_is_explained_by_the_name_that_errors_give_it():
    named = harness("explain", "server.kv_slots").stdout
    assert "physical KV slots" in named
    assert "decode_buckets" not in named
    assert harness("explain", "kv_slots").stdout.startswith(named.rstrip()), "a search has a key of this name too"
    explained = harness("explain", "block_size").stdout
    assert "paged KV memory: tokens of a block; default: the server's (--block-size)" in explained
    assert "Did you mean 'server.kv_slots'?" in harness("explain", "server.kv_slot").stderr


def test_every_key_of_experiments_and_of_waits_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    schemas = [ExperimentSpec.model_json_schema(), WaitFile.model_json_schema()]
    parts = [*schemas, *(part for schema in schemas for part in schema["$defs"].values())]
    keys = {key for part in parts for key in part.get("properties", ())}
    assert {"median_s", "waits_s", "policy", "kv_slots"} < keys
    unknown: list[str] = []
    for key in sorted(keys):
        try:
            explain([f"waits.{key}" if key in ("sigma", "tool") else key])
        except SpecError:
            unknown.append(key)
        else:
            told = capsys.readouterr().out
            # A table of that name has its place and its keys.
            if not re.search(rf"^{key} = |^\[+([a-z]+\.)?{key}(\.[A-Z]+)?\]", told, re.MULTILINE):
                unknown.append(key)
    assert unknown == []
    explain(["distributions"])
    told = capsys.readouterr().out
    for words in ('distribution = "lognormal"\nmedian = required', 'distribution = "lognormal"\nmedian_s = required'):
        assert words in told


def test_a_shipped_experiment_is_run_by_its_name_and_an_unknown_name_lists_them(tmp_path: Path):
    shown = harness("run", "demo", "--dry-run", cwd=tmp_path)
    assert shown.returncode == 0
    assert "bucket6-nowaits/1" in shown.stdout
    assert "in all, servers started and stopped; a first estimate" in shown.stdout
    wrong = harness("run", "dmeo", cwd=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
    for words in ("unknown experiment 'dmeo'", "demo", "path of a .toml file"):
        assert words in wrong.stderr
    # A file of that name comes first.
    (tmp_path / "demo").write_text("")
    assert harness("run", "demo", cwd=tmp_path).stderr.startswith("harness: demo: name: is missing")


def started(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
    """What an interpreter of its own answers."""
    words = [sys.executable, *command]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=300, **settings)


def test_a_terminal_of_ascii_alone_gets_every_word(tmp_path: Path):
    run_experiment(small_experiment(backend="sim"), runs_root=tmp_path)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    result = started(["-m", "harness", "table", "small", "--runs", str(tmp_path)], env=environment)
    assert result.returncode == 0, result.stderr
    assert "TTFT" in result.stdout
    assert "?" not in result.stdout


def test_a_dry_run_refuses_what_the_run_would_and_leaves_no_folder(tmp_path: Path):
    missing = harness("run", "demo", "--backend", "attached", "--dry-run", cwd=tmp_path)
    assert (missing.returncode, "server.url" in missing.stderr) == (2, True)
    file = write(tmp_path)
    report = harness("run", str(file), "--dry-run", "--report", f"{file}/report.html", cwd=tmp_path)
    assert (report.returncode, "is no folder" in report.stderr) == (2, True)
    run_experiment(small_experiment(backend="sim", name="bad"), runs_root=tmp_path / "mine")
    there = harness("run", str(file), "--dry-run", "--runs", str(tmp_path / "mine"))
    assert (there.returncode, "exist already. Use --resume" in there.stderr) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.toml", "mine"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("[[condition]]", "[condition]"), "write [[condition]], in double brackets"),
        (("replicates = 1", "replicates = true"), "replicates: must be a whole number"),
    ],
)
def test_a_slip_of_a_file_is_named_with_its_line(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    file = write(tmp_path)
    file.write_text(file.read_text().replace(*change))
    result = harness("run", str(file), "--dry-run", cwd=tmp_path)
    assert result.returncode == 2
    assert words in result.stderr
    assert "bad.toml: line" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_folder_whose_runs_could_not_be_recorded_is_refused_before_the_first(tmp_path: Path) -> None:
    file = write(tmp_path)
    not_utf8 = os.fsdecode(b"runs-\xff")
    too_deep = "/".join(["x" * 200] * 20)
    for folder, words in ((not_utf8, "its name is not UTF-8"), (too_deep, "Name a folder with a shorter path")):
        result = harness("run", str(file), "--backend", "sim", "--runs", folder, cwd=tmp_path)
        assert result.returncode == 2
        assert words in result.stderr
        assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bad.toml"]


def test_a_locale_of_ascii_alone_refuses_a_folder_that_it_cannot_name(tmp_path: Path) -> None:
    file = write(tmp_path)
    command = ["-m", "harness", "run", str(file), "--backend", "sim", "--runs", "größe"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = started(command, cwd=tmp_path, env=environment)
    assert result.returncode == 2
    assert "LC_ALL=C.UTF-8" in result.stderr
    assert "Traceback" not in result.stderr


def test_output_that_the_shell_closed_is_not_missed(tmp_path: Path) -> None:
    run_experiment(small_experiment(backend="sim"), runs_root=tmp_path)
    command = f"{sys.executable} -m harness runs --runs {tmp_path} >&-"
    for closed in ("", " 2>&-"):
        result = subprocess.run(command + closed, shell=True, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("words", ["simulate", "server sizes"])
def test_input_that_the_shell_closed_is_empty(words: str) -> None:
    command = f"{sys.executable} -m harness {words} --jsonl - <&-"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_machine_without_proc_is_told_in_one_line(tmp_path: Path) -> None:
    hide = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    try:
        subprocess.run([*hide, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no mount of its own is permitted")
    command = [
        *hide,
        sys.executable,
        "-m",
        "harness",
        "run",
        str(write(tmp_path)),
        "--backend",
        "sim",
        "--runs",
        "runs",
    ]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "harness: /proc: is not mounted, where memory and processes are read. Mount it" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_report_replaces_a_report_and_no_other_file(tmp_path: Path) -> None:
    run_experiment(small_experiment(backend="sim"), runs_root=tmp_path / "runs")
    file = write(tmp_path)
    text = file.read_text()
    refused = harness("report", "small", "-o", str(file), cwd=tmp_path)
    assert (refused.returncode, "is no report of the harness" in refused.stderr) == (2, True)
    assert harness("run", str(file), "--report", str(file), "--dry-run", cwd=tmp_path).returncode == 2
    assert file.read_text() == text
    for _time in range(2):
        assert harness("report", "small", "-o", "page.html", cwd=tmp_path).returncode == 0
    assert harness("report", "small", "-o", str(file), "--force", cwd=tmp_path).returncode == 0
    assert file.read_text().startswith("<!doctype html>")


def test_an_interruption_while_the_program_loads_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
    )
    result = started(["-m", "harness", "--help"], env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (result.returncode, result.stderr) == (130, "harness: interrupted; nothing half-written counts as a run\n")


def test_an_experiment_by_its_name_is_refused_in_python_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="load_experiment"):
        run_experiment("demo", runs_root=tmp_path)


MEMORY, FILES, FILE_SIZE = resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE


@pytest.mark.parametrize(("limit", "value"), [(MEMORY, 300 << 20), (FILES, 5), (FILE_SIZE, 4096)])
def test_a_limit_of_the_shell_is_one_line(tmp_path: Path, limit: int, value: int) -> None:
    write(tmp_path, top='backend = "sim"')
    set_limit = partial(resource.setrlimit, limit, (value, value))
    done = started(["-m", "harness", "run", "bad.toml"], cwd=tmp_path, preexec_fn=set_limit)
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
sys.argv = ["harness", "run", "bad.toml"]
harness.cli.main()
"""


@pytest.mark.parametrize("kib", [0, 6400, 150_000])
def test_a_refusal_needs_no_memory_to_be_reported(tmp_path: Path, kib: int) -> None:
    write(tmp_path, top='backend = "sim"')
    done = started(["-c", TIGHT, str(kib << 10)], cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("harness: this machine or its limits")
    assert done.stderr.count("\n") == 1, done.stderr
