"""The paper's tables from simulated runs: its columns, its digits, and what is said where runs are missing."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.tree import app
from harness.errors import SpecError
from harness.extras.paper.catalogue.reuse import dummy_requests
from harness.extras.paper.rows import contributions, loaded_memory_gib, recompilation, whose_times
from harness.extras.paper.source import PaperRuns
from harness.extras.paper.tables import paper_tables
from harness.measure.records.store import RunStore
from harness.model.spec import PerturbationSpec, load_experiment
from harness.runner import run_experiment
from harness.shipped import find_shipped, shipped_folder
from harness.table import Table, TableForm, written
from tests.docs.pages import blocks_of, page_text
from tests.support.report_runs import as_sealed

PAPER_ORDER = (
    *("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII", "XIII", "XIV", "XV"),
    *(f"S{number}" for number in range(1, 13)),
)
# Experiment -> what the names of the conditions that are left out begin with.
EXPERIMENTS = {"bucket-intervention": "n8", "configuration": "n10", "dummy-lifecycle": "concurrent", "step-cost": "-"}


@pytest.fixture(scope="module")
def runs_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One replicate of most conditions of four shipped experiments, in virtual time."""
    folder = shipped_folder("experiments")
    assert folder is not None
    root = tmp_path_factory.mktemp("runs")
    for name, left_out in EXPERIMENTS.items():
        spec = load_experiment(folder / f"{name}.toml")
        kept = tuple(one for one in spec.condition if not one.name.startswith(left_out))
        changes = {"backend": "sim", "replicates": 1, "condition": kept, "prediction": PerturbationSpec(draws=1)}
        run_experiment(spec.model_copy(update=changes), runs_root=root)
    return root


def number(table: Table) -> str:
    return table.name.removeprefix("Table ")


def one_table(root: Path, number: str) -> Table:
    [table] = paper_tables(PaperRuns(root), [number])
    return table


@cache
def rows_of(root: Path, number: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(row) for row in one_table(root, number).text_rows())


def test_all_tables_come_in_the_papers_order_and_a_missing_one_names_its_command(tmp_path: Path) -> None:
    tables = paper_tables(PaperRuns(tmp_path))
    assert tuple(number(table) for table in tables) == PAPER_ORDER
    # Table XV is arithmetic: it needs no run.
    assert [number(table) for table in tables if table.rows] == ["XV"]
    assert all("Make it with: harness " in table.notes[0] for table in tables if not table.rows)
    assert f"harness run plans/experiments/alignment.toml --runs {tmp_path}" in tables[0].notes[0]


def test_table_xv_is_the_papers_arithmetic(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "XV")
    assert [row[:2] for row in rows] == [("16", "4.50 GiB"), ("24", "6.75 GiB"), ("32", "9.00 GiB")]


def test_an_unknown_number_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="XVI"):
        paper_tables(PaperRuns(tmp_path), ["XVI"])


@pytest.fixture(scope="module")
def every_table(runs_root: Path) -> list[Table]:
    return list(paper_tables(PaperRuns(runs_root)))


def test_every_table_of_runs_without_an_npu_says_so(every_table: list[Table]) -> None:
    shown = [table for table in every_table if table.rows and number(table) != "XV"]
    assert {"II", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII", "S4", "S7", "S8", "S12"} == {
        number(table) for table in shown
    }
    assert all(table.origin.startswith("No accelerator was measured") for table in shown)


def test_tables_ii_and_vi_show_the_same_padding(runs_root: Path) -> None:
    grid, with_waits, without, _difference = rows_of(runs_root, "II")[0]
    assert grid == "{1,2,4,8}"
    assert rows_of(runs_root, "VI")[0] == ("Padding ratio", without, with_waits)


def test_table_vii_gives_the_model_that_the_simulator_was_given(runs_root: Path) -> None:
    rows = {row[0]: row[1] for row in rows_of(runs_root, "VII")}
    # f + alpha of the paper's model: whole steps do not tell them apart.
    assert [rows[f"f({bucket})"] for bucket in (1, 2, 4, 8)] == ["10.371 ms", "10.921 ms", "11.326 ms", "13.471 ms"]
    assert rows["Additional time per request beta"] == "0.0413 ms/request"


def test_table_viii_lists_the_papers_three_configurations(runs_root: Path) -> None:
    assert rows_of(runs_root, "VIII") == (
        ("Baseline", "8", "{1, 2, 4, 8}"),
        ("More KV slots", "16", "{1, 2, 4, 8, 16}"),
        ("More KV slots and changed bucket grid", "16", "{1, 4, 6, 8, 10, 16}"),
    )


def test_predictions_of_exploratory_runs_are_shown_and_not_subject_to_decision(runs_root: Path) -> None:
    rows = rows_of(runs_root, "IX")
    assert [row[1] for row in rows] == ["6", "6", "8", "8"]
    for _measurement, _n, _changed, predicted, observed, error, outcome in rows:
        # In virtual time the prediction is what happens.
        assert predicted == observed
        assert float(error) == 0.0
        assert not outcome.startswith("Passed")


def test_full_and_fixed_arrival_predictions_differ_only_where_arrivals_move(runs_root: Path) -> None:
    for row in rows_of(runs_root, "XI"):
        observed, full, full_error, fixed, fixed_error = row[3:]
        assert (full, full_error) == (observed, "0.0000")
        assert float(fixed_error) == pytest.approx(abs(float(fixed) - float(observed)), abs=1.01e-4)


def test_the_sum_rows_of_table_s8_are_the_rows_of_table_xii(runs_root: Path) -> None:
    sums = {(row[1], row[2]): row for row in rows_of(runs_root, "S8") if row[3] == "Sum"}
    for condition, changed, ratio_a, saving_a, ratio_b, saving_b in rows_of(runs_root, "XII"):
        row = sums[condition.partition(",")[0].removeprefix("N="), changed]
        assert (row[6], row[7], row[9], row[10]) == (ratio_a, ratio_b, f"+{saving_a}", f"+{saving_b}")


def test_table_s4_derives_dummy_requests_by_the_schedulers_rule_and_says_so(runs_root: Path) -> None:
    table = one_table(runs_root, "S4")
    for row in table.rows:
        assert row[3] == f"{row[2]} (derived)"
    assert any(note.startswith("Derived: ") for note in table.notes)


def test_dummy_requests_are_not_derived_where_the_rule_does_not_apply(runs_root: Path) -> None:
    run = RunStore(runs_root).sealed("dummy-lifecycle")[0]
    assert dummy_requests(run) == "49 (derived)"
    for changed in ({"rules": "paper"}, {"prefix_caching": False}):
        server = {**run.manifest.requested["server"], **changed}
        other = run.manifest.model_copy(update={"requested": {**run.manifest.requested, "server": server}})
        assert dummy_requests(replace(run, manifest=other)) is None


def test_table_s3_keeps_the_papers_order_and_s2_says_whose_times_it_shows(tmp_path: Path) -> None:
    spec = load_experiment(find_shipped("experiments", "recompilation", what="experiment"))
    kept = tuple(one for one in spec.condition if one.name.endswith("-b1"))
    run_experiment(spec.model_copy(update={"backend": "sim", "replicates": 2, "condition": kept}), runs_root=tmp_path)
    source = PaperRuns(tmp_path)
    pairs = [row["pair"] for row in recompilation(source)]
    assert pairs == ["A1 vs. A3 (recompilation)", "A1 vs. A2 (grid change)", "A2 vs. A3"]
    assert whose_times(source).startswith("Whole step periods")
    for number in ("S2", "S3"):
        table = one_table(tmp_path, number)
        assert table.rows == ()
        assert table.notes[0].startswith("Simulated runs of one input are equal: there is no noise to show.")


def test_the_tables_after_the_catalogue_find_its_runs(tmp_path: Path) -> None:
    invoke = partial(CliRunner().invoke, app, catch_exceptions=False)
    made = ("paper", "catalogue", "--run", "--only", "prefill-injection", "--replicates", "1", "--runs", str(tmp_path))
    performed = invoke(made)
    assert performed.exit_code == 0
    # What the guide says next.
    following = [line.partition(": ")[2] for line in performed.output.splitlines()[-2:]]
    (guide,) = [block.commands for block in blocks_of(page_text("guides/review")) if block.tested_with]
    assert [" ".join(command.split()[:3]) for command in following] == ["harness search paper", "harness paper tables"]
    assert [following[0], f"{following[1]} -o runs/tables.md".replace(str(tmp_path), "runs/catalogue")] == guide[1:]
    tables = ("paper", "tables", "--runs", str(tmp_path))
    one = invoke((*tables, "--table", "IV"))
    assert one.exit_code == 0, one.output
    assert "backend sim" in one.output
    some = invoke((*tables, "--table", "IV", "--table", "S10"))
    assert some.exit_code == 5
    assert "1 of 2 tables have no figures: S10; why stands under each" in some.output
    (tmp_path / "emulator").mkdir()
    with pytest.raises(SpecError, match=f"Give one: --runs {tmp_path}/"):
        invoke(tables)


def test_the_papers_own_contributions_print_as_table_s7() -> None:
    printed = {"bucket_change": "8 -> 6"}
    five = {"n": 5, "h(n)": 115, "slots_removed": 230, "share_of_slots": 230 / 1218, "drop_of_p": 0.0333824} | printed
    six = {"n": 6, "h(n)": 494, "slots_removed": 988, "share_of_slots": 988 / 1218, "drop_of_p": 0.1415440} | printed
    shares = ({"share_of_drop": 0.191}, {"share_of_drop": 0.809})
    rows = contributions([five | shares[0], six | shares[1]], 1288)
    assert [(row["n"], row["h(n)"], row["slots_removed"]) for row in rows] == [
        (5, 115, 230),
        (6, 494, 988),
        ("Other", 679, 0),
        ("Total", 1288, 1218),
    ]
    assert rows[-1]["drop_of_p"] == pytest.approx(0.1749264)


def test_loaded_memory_is_that_of_the_devices_that_serve(runs_root: Path, tmp_path: Path) -> None:
    run = RunStore(runs_root).sealed()[0]
    assert loaded_memory_gib(run) is None
    used_gib = (6.6, 7.0, 6.8, 6.7, 0.1, 0.0)
    empty = [{"npu": npu, "memory_used_bytes": 0} for npu in range(6)]
    full = [{"npu": npu, "memory_used_bytes": int(gib * 2**30)} for npu, gib in enumerate(used_gib)]
    reports = [{"readings": empty}, {"readings": full}, {"error": "gives no answer"}, {"readings": empty}]
    (tmp_path / "devices.jsonl").write_text("".join(json.dumps(report) + "\n" for report in reports))
    assert loaded_memory_gib(as_sealed(run, tmp_path)) == pytest.approx((6.6, 7.0))


def artifact(root: Path, name: str, versions: dict[str, str], **spec: object) -> None:
    (root / name).mkdir(parents=True)
    record = {"spec": spec, "versions": versions, "seconds": 407.2, "size_bytes": round(12.378 * 2**30), "files": {}}
    (root / name / "harness-artifact.json").write_text(json.dumps(record))


def test_table_xiv_comes_from_the_records_of_compiled_artifacts(tmp_path: Path) -> None:
    compiled = {"rebel-compiler": "0.11.1.post1", "optimum-rbln": "0.11.1"}
    artifact(tmp_path, "a", compiled, batch_size=16, decoder_batch_sizes=[1, 2, 4, 8, 16])
    [table] = paper_tables(PaperRuns(tmp_path / "runs", artifacts=tmp_path), ["XIV"])
    assert table.rows == (("Slot 16, {1,2,4,8,16} (a)", "5", "407 s", "12.378 GiB"),)
    assert not any("stand-in" in note for note in table.notes)
    artifact(tmp_path, "b", {"optimum-rbln": "0.11.1"}, batch_size=8, decoder_batch_sizes=[8])
    [table] = paper_tables(PaperRuns(tmp_path / "runs", artifacts=tmp_path), ["XIV"])
    assert any(note.startswith("No NPU compiler was run for 1 of 2 artifacts") for note in table.notes)


def test_table_xiv_without_artifacts_says_what_to_run(tmp_path: Path) -> None:
    [table] = paper_tables(PaperRuns(tmp_path, artifacts=tmp_path), ["XIV"])
    assert table.notes[0].startswith("Not run yet. Make it with: harness server compile")


@pytest.mark.parametrize("form", list(TableForm))
def test_all_tables_are_written_in_every_form(every_table: list[Table], form: TableForm) -> None:
    page = written(every_table, form)
    assert "Baseline" in page
    assert "Confirmatory" in page or "Exploratory" in page


def test_the_command_writes_one_table_to_a_file(runs_root: Path, tmp_path: Path) -> None:
    options = ["--runs", str(runs_root), "--table", "viii", "--format", "csv", "-o", str(tmp_path / "t.csv")]
    done = CliRunner().invoke(app, ["paper", "tables", *options])
    assert done.exit_code == 0, done.output
    assert 'Baseline,8,"{1, 2, 4, 8}"' in (tmp_path / "t.csv").read_text()
