"""`harness gate` as CI calls it: exit codes, summaries, JUnit, a baseline that was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from harness.model.engine.cost import find_cost_file
from harness.runner import run_experiment
from tests.support.command_line import harness
from tests.support.experiments import small_experiment

pytestmark = pytest.mark.same_everywhere

FIGURES = ("--figure", "cost", "--figure", "tpot", "--figure", "ttft_p50", "--figure", "reuse", "--figure", "padding")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of today, and of a server whose decode steps take a fifth longer."""
    root = tmp_path_factory.mktemp("gate")
    text = find_cost_file("paper").read_text()
    for bucket, milliseconds in (("1", "9.870"), ("2", "10.420"), ("4", "10.825"), ("8", "12.970")):
        text = text.replace(f"{bucket} = {milliseconds}", f"{bucket} = {1.2 * float(milliseconds):.3f}")
    (root / "slower.toml").write_text(text)
    for name, cost_model in (("base", "paper"), ("same", "paper"), ("slow", str(root / "slower.toml"))):
        spec = small_experiment(
            backend="sim", replicates=4, server={"cost_model": cost_model}, condition=[{"name": "base"}]
        )
        run_experiment(spec, runs_root=root / name).require_valid()
    return root


def gate(folders: Path, new: str, *more: str) -> tuple[int, str]:
    called = harness("gate", str(folders / new / "small"), "--against", str(folders / "base" / "small"), *more)
    assert "Traceback" not in called.stderr
    return called.returncode, called.stdout


def test_an_equal_server_passes_a_slower_one_is_worse_and_the_rest_cannot_be_told(folders: Path) -> None:
    code, shown = gate(folders, "same", *FIGURES)
    assert (code, "gate small: pass" in shown, "Predicted: simulated in virtual time" in shown) == (0, True, True)
    code, shown = gate(folders, "slow", *FIGURES)
    assert (code, "gate small: worse" in shown) == (4, True)
    assert "note: server.cost_model: paper in the baseline" in shown
    code, shown = gate(folders, "same")
    left = "left out: ttft_p99 of base, which needs 1,000 requests a side (24 here), about 167 blocks; to judge it"
    assert (code, left in " ".join(shown.split())) == (0, True)
    code, shown = gate(folders, "same", "--figure", "ttft_p99")
    assert (code, "ttft_p99: cannot tell; 51" in shown or "24 requests a side, 1000 are needed" in shown) == (5, True)


def test_thresholds_decide_what_is_worse(folders: Path) -> None:
    assert gate(folders, "slow", "--figure", "cost", "--figure", "tpot")[0] == 4
    assert gate(folders, "slow", "--fail-above", "cost=1.5", "--fail-above", "tpot=1.5", "--figure", "cost")[0] == 0


def test_a_saved_baseline_says_what_its_runs_say(folders: Path, tmp_path: Path) -> None:
    folder = tmp_path / "baseline"
    assert harness("gate", str(folders / "base" / "small"), "--save-baseline", str(folder)).returncode == 0
    shown = [
        harness("gate", str(folders / "slow" / "small"), "--against", str(base), "--format", "json")
        for base in (folder, folders / "base" / "small")
    ]
    first, second = (json.loads(each.stdout) for each in shown)
    assert first["tests"] == second["tests"]
    assert [each.returncode for each in shown] == [4, 4]
    (folder / "figures.csv").write_text("condition\n")
    changed = harness("gate", str(folders / "slow" / "small"), "--against", str(folder))
    assert (changed.returncode, "figures.csv: differs from what was saved (SHA-256)" in changed.stderr) == (1, True)


def test_junit_counts_worse_as_failures_and_cannot_tell_as_errors(folders: Path, tmp_path: Path) -> None:
    gate(folders, "slow", *FIGURES, "--figure", "ttft_p99", "--junit", str(tmp_path / "gate.xml"))
    (suite,) = ElementTree.parse(tmp_path / "gate.xml").getroot()
    failed, unsure = (
        {case.get("name") for case in suite.iter("testcase") if case.find(kind) is not None}
        for kind in ("failure", "error")
    )
    assert {"cost", "tpot"} <= failed
    assert "ttft_p99" in unsure
    counts = [suite.get(kind) for kind in ("tests", "failures", "errors")]
    assert counts == ["6", str(len(failed)), str(len(unsure))]
    assert "no accelerator was measured" in ElementTree.tostring(suite, encoding="unicode")


def test_the_summary_is_markdown_and_is_appended_to_that_of_a_step(folders: Path, tmp_path: Path) -> None:
    plain, step = tmp_path / "gate.md", tmp_path / "step.md"
    # The first look is recorded, and those after it are the same one.
    for path in (plain, plain, step):
        path.write_text("# Before\n")
        called = harness(
            *(
                "gate",
                str(folders / "slow" / "small"),
                "--against",
                str(folders / "base" / "small"),
                "--summary",
                str(path),
            ),
            environment={"GITHUB_STEP_SUMMARY": str(step)},
        )
        assert called.returncode == 4
    assert plain.read_text().startswith("## Gate of small: worse\n")
    assert step.read_text() == "# Before\n" + plain.read_text()
    assert "no accelerator was measured" in plain.read_text()
    assert "| base | cost [s/token] | 4 |" in plain.read_text()


def test_every_form_says_the_verdict_and_what_was_simulated(folders: Path) -> None:
    for form in ("text", "markdown", "json"):
        _, shown = gate(folders, "slow", "--format", form)
        assert "worse" in shown
        assert "Predicted: simulated in virtual time" in shown
    assert {row["verdict"] for row in json.loads(shown)["tests"]} == {"worse", "cannot tell", "pass"}
    assert {row["unit"] for row in json.loads(shown)["tests"]} >= {"s/token", "ms", "computed tokens/request"}


def test_more_blocks_are_the_next_look_and_the_looks_lie_beside_the_runs(tmp_path: Path) -> None:
    result: dict[str, Any] = {}
    for replicates in (3, 5):
        for side in ("base", "new"):
            spec = small_experiment(backend="sim", replicates=replicates, condition=[{"name": "base"}])
            run_experiment(spec, runs_root=tmp_path / side, resume=True).require_valid()
        for _ in range(2):
            result = json.loads(gate(tmp_path, "new", "--figure", "cost", "--format", "json")[1])
        assert [test["looks"] for test in result["tests"]] == [1 if replicates == 3 else 2]
    assert "look 2 at these runs, taken before (pairs at each look: 3, 5)" in result["notes"]
    assert (tmp_path / "new" / "small" / "gate-looks.json").is_file()
    changed = gate(tmp_path, "new", "--fail-above", "cost=1.2")[1]
    assert "judged before in 1 other sequence" in " ".join(changed.split())
    assert harness("verify", "--runs", str(tmp_path / "new")).returncode == 0


def test_runs_are_not_judged_against_themselves(folders: Path) -> None:
    base = folders / "base" / "small"
    (folders / "link").symlink_to(folders / "base")
    for new in (str(base), str(base / "base"), str(folders / "link" / "small"), "small"):
        told = harness("gate", new, "--against", str(base), "--runs", str(folders / "base"))
        assert told.returncode == 2, new
        assert "both sides hold the same runs" in told.stderr


def test_one_of_against_and_save_baseline_is_needed(folders: Path) -> None:
    neither = harness("gate", str(folders / "base" / "small"))
    assert (neither.returncode, "--save-baseline" in neither.stderr) == (2, True)
