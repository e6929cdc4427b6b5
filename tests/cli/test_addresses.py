"""One address in every command: an experiment's file, its name, or a folder of its runs; completion and ``--set``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import harness
from harness.cli.addresses import asked_again
from harness.errors import SpecError
from harness.measure.records.store import experiment_at
from harness.model.spec.changes import override_table
from harness.table import Table
from tests.support.command_line import harness as command
from tests.support.report_runs import Shape, seal_run

pytestmark = pytest.mark.same_everywhere

WRITTEN = """\
name = "asked"
backend = "sim"
replicates = 3
base_seed = 3
[workload]
num_sessions = 4
[server]
kv_slots = 4
max_num_seqs = 4
decode_buckets = [1, 2, 4]
[[condition]]
name = "base"
[[condition]]
name = "more"
server.kv_slots = 12
"""
FORMS = ("asked", "asked.toml", "runs", "runs/asked")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("addresses")
    (place / "asked.toml").write_text(WRITTEN)
    made = command("run", "asked.toml", "--runs", "runs", cwd=place)
    assert made.returncode == 0, made.stderr
    return place


@pytest.mark.parametrize(
    ("verb", "forms"),
    [
        (("table",), FORMS),
        # One function reads addresses, for every command: the others show that they ask it.
        (("report",), FORMS[1:3]),
        (("decide", "--rule", "equivalence"), FORMS[1:3]),
        (("compare",), FORMS[1:3]),
    ],
)
def test_every_form_of_an_address_leads_to_the_same_runs(
    folder: Path, verb: tuple[str, ...], forms: tuple[str, ...]
) -> None:
    printed = {command(verb[0], form, *verb[1:], cwd=folder).stdout.replace(str(folder) + "/", "") for form in forms}
    assert len(printed) == 1
    assert "more" in printed.pop()


def test_an_experiment_is_simulated_and_planned_from_the_folder_of_its_runs(folder: Path) -> None:
    for draws in ("1", "2"):
        assert "more / base" in command("simulate", "runs/asked", "--draws", draws, cwd=folder).stdout
    assert "sealed blocks under" in command("power", "runs/asked", "--blocks", "3", cwd=folder).stdout
    again = command("run", "runs/asked", "--runs", "again", "--dry-run", cwd=folder)
    assert "more/2" in again.stdout


# Figures of every view of the same runs: tests/analysis/compare/test_ratio_everywhere.
def test_run_table_and_decide_say_the_cost_in_one_sentence(folder: Path) -> None:
    said: set[tuple[str, ...]] = set()
    run, decide = ("run", "asked.toml", "--runs", "runs", "--resume"), ("decide", "asked", "--rule", "superiority")
    for words, code in ((run, 0), (("table", "asked"), 0), (decide, 5)):
        done = command(*words, cwd=folder)
        assert done.returncode == code, done.stderr
        said.add(tuple(re.findall(r"more costs [^(]* base \([^)]*\)", " ".join(done.stdout.split()))))
    (sentences,) = said
    assert len(sentences) == 1
    assert "NOT SUBJECT" in done.stdout


def test_runs_and_verify_take_the_name_of_an_experiment(folder: Path) -> None:
    verified = command("verify", "asked", cwd=folder)
    assert (verified.returncode, verified.stdout) == (0, "6 sealed runs are as they were sealed\n")
    listed = command("runs", "asked", cwd=folder)
    assert (listed.returncode, len(listed.stdout.splitlines())) == (0, 6)
    assert command("verify", "other", cwd=folder).returncode == 2


def test_a_folder_of_several_experiments_is_asked_about(tmp_path: Path) -> None:
    for name in ("one", "two"):
        seal_run(tmp_path, Shape(experiment=name))
    with pytest.raises(SpecError, match=r"holds runs of 2 experiments: one, two.*/one"):
        harness.open_runs(tmp_path)


def test_python_opens_compares_sweeps_and_plans(folder: Path) -> None:
    runs = harness.open_runs(folder / "runs")
    assert len(runs) == 6
    compared = harness.compare(folder / "runs")
    assert {row["condition"] for row in compared.records()} == {f"{folder}/runs/asked/more"}
    swept = harness.sweep(folder / "asked.toml", "workload.num_sessions=2,4", replicates=1)
    assert [one.name for one in swept.condition] == ["num-sessions-2", "num-sessions-4"]
    assert swept.question == "How do cost and latency change with workload.num_sessions?"
    (needed,) = harness.power(folder / "asked.toml", runs=runs).records()
    assert needed["condition"] == "more"
    assert experiment_at(folder / "runs").table["name"] == "asked"


def test_a_table_shows_itself_in_a_notebook_without_names_that_reorder_it() -> None:
    shown = Table("T", "", ("name",), (("8 slots \u202ewin <b>",),))._repr_html_()
    assert "\u202e" not in shown
    assert "8 slots \\u202ewin &lt;b&gt;" in shown


def test_the_command_that_continues_a_run_repeats_its_options() -> None:
    repeated = asked_again(['server.url="http://h:1"', "replicates=2"], "attached", None, "0,1")
    assert repeated == " --set 'server.url=\"http://h:1\"' --set replicates=2 --backend attached --devices 0,1"
    assert asked_again([], None, None) == ""


def test_a_condition_is_changed_by_its_name() -> None:
    table = {"condition": [{"name": "base"}, {"name": "twelve", "server": {"kv_slots": 12}}]}
    changed = override_table(table, ["condition.twelve.server.url=http://h:1"])
    assert changed["condition"][1]["server"] == {"kv_slots": 12, "url": "http://h:1"}
    for change, message in (
        ("condition.other.treatment=x", "'condition.other.treatment': nothing is named 'other'"),
        ("condition.twelve=1", "'condition.twelve' names no element of condition. Say condition.NAME.KEY"),
        ("condition.twelve.name.first=1", "'name' is not a table"),
    ):
        with pytest.raises(SpecError, match=re.escape(message)):
            override_table(table, [change])


def offered(words: str, cwd: Path) -> list[str]:
    shell = {"_HARNESS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    return command(environment=shell, cwd=cwd).stdout.split()


@pytest.mark.same_everywhere
def test_a_shell_completes_the_names_of_experiments(tmp_path: Path) -> None:
    folder = tmp_path / "today" / "mine" / "base" / "0"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    assert offered("harness run dem", tmp_path) == ["demo"]
    assert offered("harness table --runs today mi", tmp_path) == ["mine"]
