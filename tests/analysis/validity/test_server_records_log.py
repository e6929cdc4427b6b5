"""A log that was changed or lost a line is INVALID with the first line that cannot be; whole logs have no finding."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis import Evidence, check_run
from harness.analysis.logs.derive import derive_tables
from harness.analysis.logs.parse import Derived, ParseCounts
from harness.analysis.validity.server_records import check_log_lines
from harness.measure.records import layout
from harness.measure.records.manifest import Finding
from harness.measure.records.run import SealedRun
from harness.runner import run_experiment
from harness.stacks.vllm.step_log import read_step_log
from tests.support.analysis_tables import manifest, requests_table, steps_table
from tests.support.experiments import small_experiment
from tests.support.step_files import VLLM_HEADER, lines, vllm_step

SIZES = (1, 2, 4, 8)
BUCKET = "[BUCKET] request_nums={} padded_batch_size={}"


def size_findings(pairs: list[tuple[int, int]], sizes: tuple[int, ...] = SIZES) -> list[Finding]:
    derived = Derived({"steps": steps_table(*pairs)}, ParseCounts(), steps_source="bucket-log")
    run = manifest(requested={"server": {"decode_buckets": list(sizes)}})
    return list(check_log_lines(Evidence(run, requests_table(), derived)))


def smallest(n: int) -> int:
    return min(size for size in SIZES if size >= n)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=40), st.data())
def test_a_steps_size_is_the_smallest_compiled_one_that_holds_its_requests(
    sizes: list[int], data: st.DataObject
) -> None:
    pairs = [(n, smallest(n)) for n in sizes]
    assert size_findings(pairs) == []
    place = data.draw(st.integers(0, len(pairs) - 1))
    n, right = pairs[place]
    wrong = data.draw(st.integers(n, 16).filter(lambda b: b != right))
    (found,) = size_findings([*pairs[:place], (n, wrong), *pairs[place + 1 :]])
    assert (found.code, found.severity) == ("step-size", "invalid")
    assert f"first step {place}: {BUCKET.format(n, wrong)}" in found.evidence


def test_a_batch_that_no_compiled_size_holds_is_found_and_unknown_sizes_are_not_judged() -> None:
    assert [found.code for found in size_findings([(9, 9)])] == ["step-size"]
    assert size_findings([(9, 9), (3, 5)], sizes=()) == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SealedRun:
    """Five sessions on the emulator, whose log has every kind of line."""
    workload: dict[str, Any] = {"num_sessions": 5, "waits": "none"}
    workload["generate_tokens"] = {"distribution": "uniform", "low": 8, "high": 40}
    spec = small_experiment(workload=workload, condition=[{"name": "base"}])
    (only,) = run_experiment(spec, runs_root=tmp_path_factory.mktemp("runs")).require_valid().runs
    return only


def reasons(run: SealedRun, folder: Path, log: str) -> list[str]:
    """Why the run is INVALID with this log."""
    shutil.copytree(run.path, folder, dirs_exist_ok=True)
    (folder / layout.SERVER_LOG).write_text(log)
    derived = derive_tables(folder, run.manifest)
    found = check_run(Evidence(run.manifest, run.table("requests"), derived, run.plan))
    return [str(one) for one in found if one.severity == "invalid"]


def without_line(log: str, text: str, place: int) -> str:
    """The log without one of the lines that hold ``text``."""
    listed = log.splitlines(keepends=True)
    found = [number for number, line in enumerate(listed) if text in line]
    del listed[found[place]]
    return "".join(listed)


@pytest.mark.live
def test_a_whole_log_of_a_server_has_no_finding(run: SealedRun, tmp_path: Path) -> None:
    log = (run.path / layout.SERVER_LOG).read_text()
    assert "is now scheduled" in log
    assert reasons(run, tmp_path, log) == []


@pytest.mark.live
@pytest.mark.parametrize(
    ("line", "place", "code"),
    [
        *(("[PFX] [ALLOC]", place, "slots-inconsistent") for place in (0, 3, -1)),
        *(("[PFX] [FREE-REQUEST]", place, "slots-inconsistent") for place in (0, 3)),
        *(("is now scheduled", place, "prefill-missing") for place in (0, 3, -1)),
    ],
)
def test_a_lost_line_of_a_slot_or_a_prefill_makes_the_run_invalid(
    run: SealedRun, tmp_path: Path, line: str, place: int, code: str
) -> None:
    log = (run.path / layout.SERVER_LOG).read_text()
    found = reasons(run, tmp_path, without_line(log, line, place))
    assert any(reason.startswith(f"{code}: ") for reason in found)
    assert any(re.search(r"first:? .*cmpl-|byte \d+ of server\.log", reason) for reason in found)


def graph_findings(*steps: list[object], **effective: Any) -> list[str]:
    known = {**VLLM_HEADER["effective"], "cudagraph_capture_sizes": [8, 4, 2, 1], **effective}
    log = read_step_log(lines({**VLLM_HEADER, "effective": known}, *steps))
    derived = Derived({}, ParseCounts(), steps_source="step-log", step_log=log)
    return [found.code for found in check_log_lines(Evidence(manifest(), requests_table(), derived))]


@pytest.mark.parametrize(
    ("n", "b", "mode", "is_right"),
    [
        (3, 4, "FULL", True),
        (3, 4, "PIECEWISE", True),
        (3, 8, "FULL", False),
        (3, 3, "FULL", False),
        (5, 7, "PIECEWISE", False),
        (9, 9, "NONE", True),
        (3, 3, "NONE", True),
        (9, 16, "NONE", False),
        (9, 9, "FULL", False),
    ],
)
def test_a_step_of_a_vllm_has_the_size_that_its_dispatcher_chooses(n: int, b: int, mode: str, is_right: bool) -> None:
    step = vllm_step(1, n, b, mode)
    assert graph_findings(vllm_step(0, 1, 1), step) == ([] if is_right else ["step-size"])
    # What the header cannot tell is not judged.
    assert graph_findings(step, data_parallel_size=2) == []
    assert graph_findings(step, num_speculative_tokens=3) == []


def test_a_vllm_without_known_sizes_or_with_tensor_parallel_padding_is_not_judged_by_them() -> None:
    assert graph_findings(vllm_step(0, 3, 8), cudagraph_capture_sizes=None) == []
    assert graph_findings(vllm_step(0, 9, 12, "NONE"), tensor_parallel_size=4) == []
    assert graph_findings(vllm_step(0, 9, 11, "NONE"), tensor_parallel_size=4) == ["step-size"]
