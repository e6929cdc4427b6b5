"""How a sealed run is read; ``sealed/layout-3.zip`` holds two that an earlier version sealed (backend sim)."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from harness.analysis import run_figures
from harness.analysis.logs.derive import rebuild
from harness.analysis.summary import summarise
from harness.errors import PlanError, RecordsError, in_one_line
from harness.judge.catalogue import analyse
from harness.judge.prereg import predict_runs
from harness.measure.records import layout
from harness.measure.records.disk import file_entry
from harness.measure.records.run import SealedRun, by_condition
from harness.measure.records.store import RunStore
from harness.present.report import conditions_table, write_report

SEALED = Path(__file__).parent / "sealed" / "layout-3.zip"


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    with zipfile.ZipFile(SEALED) as archive:
        archive.extractall(tmp_path)
    return RunStore(tmp_path)


@pytest.fixture
def run(store: RunStore) -> SealedRun:
    return store.run("tiny", "base", 0)


def test_runs_of_an_earlier_version_verify_and_their_tables_rebuild_to_what_was_sealed(store: RunStore):
    assert store.verify() == 2
    for run in store.sealed():
        rebuild(run)
    assert store.verify() == 2


def test_runs_of_an_earlier_version_answer_queries(store: RunStore):
    rows = store.query("select condition, sum(cached_tokens) as cached from requests group by all order by all")
    assert rows.to_pylist() == [{"condition": "base", "cached": 512}, {"condition": "one-bucket", "cached": 512}]


def test_runs_of_an_earlier_version_are_reported_with_the_figures_of_then(store: RunStore, tmp_path: Path):
    summary = summarise(store.sealed())
    compared = summary.condition("one-bucket").comparison
    assert f"{compared.ratio_a:.4f}" == f"{compared.ratio_b:.4f}" == "1.0986"
    assert summary.condition("one-bucket").padding.ratio == pytest.approx(0.8333, abs=5e-5)
    assert len(conditions_table(summary).rows) == 2
    assert "one-bucket" in write_report(store.sealed(), tmp_path / "page.html").read_text(encoding="utf-8")


def test_runs_of_an_earlier_version_are_analysed(store: RunStore):
    assert analyse(store.sealed(), predict_runs(store.sealed())).tables


def test_a_run_hands_out_what_it_was_made_from(run: SealedRun):
    assert run.label == "base/0"
    assert run.spec.base_seed == 11
    assert run.server.decode_buckets == (1, 2, 4, 8)
    assert run.workload.num_sessions == 2
    assert run.plan.hash == run.manifest.plan_hash
    assert run.cost_model.decode_step_ns(8, 1) > 0
    assert run.group_sessions() == {"all": range(2)}


def test_a_file_is_parsed_once_and_a_figure_computed_once(run: SealedRun):
    first = (run.plan, run.server, run.table("requests"), run_figures(run))
    for name in (layout.PLAN, layout.table_path("requests")):
        run.file(name).unlink()
    again = (run.plan, run.server, run.table("requests"), run_figures(run))
    assert all(one is other for one, other in zip(first, again, strict=True))


def test_a_run_whose_plan_is_of_another_version_keeps_its_other_figures(run: SealedRun):
    path = run.file(layout.PLAN)
    path.write_bytes(b"{}\n")
    files = {**run.manifest.files, layout.PLAN: file_entry(path)}
    other = SealedRun(run.path, run.manifest.model_copy(update={"files": files}))
    with pytest.raises(PlanError):
        _ = other.plan
    assert run_figures(other).num_requests == 4


def test_a_run_of_another_layout_is_refused_with_the_way_to_read_it(run: SealedRun):
    path = run.path / layout.MANIFEST
    path.write_text(run.manifest.model_copy(update={"schema_version": 2}).to_json())
    with pytest.raises(RecordsError, match=r"is of layout 2, and this version reads layouts \(3, 4\)") as refused:
        RunStore(run.path.parents[2]).sealed()
    assert refused.value.hint == "Read it with the harness version that sealed it"


def test_a_run_of_layout_3_is_read_with_the_present_names(run: SealedRun):
    requested = json.loads(json.dumps(run.manifest.requested).replace('"distribution"', '"law"'))
    requested["experiment"]["fleet"] = {"devices": [0], "emulated": {"0": {"slower": 0.03}}}
    older = run.manifest.model_copy(update={"schema_version": 3, "requested": requested})
    (run.path / layout.MANIFEST).write_text(older.to_json())
    [read] = [sealed for sealed in RunStore(run.path.parents[2]).sealed() if sealed.key == run.key]
    assert read.workload == run.workload
    assert read.fleet_spec.emulated[0].speed_offset == 0.03


def test_a_manifest_without_an_experiment_is_one_clear_line(run: SealedRun):
    bare = SealedRun(run.path, run.manifest.model_copy(update={"requested": {}}))
    with pytest.raises(RecordsError, match="holds no experiment that this version reads"):
        _ = bare.spec


def test_runs_are_grouped_in_the_order_of_the_experiment(store: RunStore):
    assert list(by_condition(reversed(store.sealed()))) == ["base", "one-bucket"]


def test_what_a_library_says_of_a_damaged_table_stands_on_one_line() -> None:
    assert in_one_line(OSError("cannot:\n  No more data to read.\n")) == "cannot: No more data to read."
