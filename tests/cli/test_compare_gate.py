"""`harness gate` as CI calls it: exit codes, summaries, a baseline that was saved."""

from __future__ import annotations

import json
from pathlib import Path

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
    left = "left out: ttft_p99 of base, 24 requests a side, 1,000 are needed, about 167 blocks; to judge it"
    assert (code, left in " ".join(shown.split())) == (0, True)
    code, shown = gate(folders, "same", "--figure", "ttft_p99")
    assert (code, "ttft_p99: cannot tell; 51" in shown or "24 requests a side, 1,000 are needed" in shown) == (5, True)


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
    assert (changed.returncode, "figures.csv differs from its checksum" in changed.stderr) == (1, True)


def test_the_summary_is_markdown_and_is_appended_to_that_of_a_step(folders: Path, tmp_path: Path) -> None:
    plain, step = tmp_path / "gate.md", tmp_path / "step.md"
    for path in (plain, step):
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
    assert "| cost [s/token] | 4 |" in plain.read_text()


def test_every_form_says_the_verdict_and_what_was_simulated(folders: Path) -> None:
    for form in ("text", "markdown", "json"):
        _, shown = gate(folders, "slow", "--format", form)
        assert "worse" in shown
        assert "Predicted: simulated in virtual time" in shown
    assert {row["verdict"] for row in json.loads(shown)["tests"]} == {"worse", "cannot tell", "pass"}
    assert {row["unit"] for row in json.loads(shown)["tests"]} >= {"s/token", "ms", "computed tokens/request"}


def test_a_second_look_has_less_of_alpha(folders: Path) -> None:
    made = [json.loads(gate(folders, "slow", "--look", look, "--format", "json")[1]) for look in ("1", "2")]
    assert [one["look"] for one in made] == [1, 2]
    ends = [(test["low"], test["high"]) for one in made for test in one["tests"] if test["figure"] == "cost"]
    assert ends[1][0] < ends[0][0] < ends[0][1] < ends[1][1]


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
