"""Confirmatory runs: the authorization, every reason to refuse it, and what sealed runs and decisions say of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.analysis.figures import run_figures
from harness.errors import RecordsError, RuleFailedError, SpecError
from harness.judge.decisions.decide import Outcome
from harness.judge.prereg import Preregistration, authorize, check_sealed_runs, decide
from harness.judge.prereg.frozen import parse_preregistration
from harness.measure.records import layout
from harness.measure.records.store import RunStore
from harness.model.engine.cost import find_cost_file
from harness.model.spec import ServerSpec
from harness.runner import run_experiment
from harness.runner.experiment import will_fail_again
from tests.judge.prereg.conftest import entered
from tests.support import command_line
from tests.support.workplace import RULE, Workplace, rewrite_manifest


def test_confirmatory_runs_carry_their_preregistration(measured: Workplace) -> None:
    runs, commit = measured.sealed, measured.git("log", "-1", "--format=%H").strip()
    assert len(runs) == 6
    for run in runs:
        assert run.is_valid, run.invalid_reasons
        assert run.manifest.label == "confirmatory"
        assert run.manifest.preregistration.commit == commit
        assert run.file(layout.FROZEN).read_bytes() == measured.frozen.read_bytes()
    assert check_sealed_runs(runs) == parse_preregistration(measured.frozen.read_bytes(), where="small.json")


def test_the_label_is_in_the_table_of_runs(measured: Workplace) -> None:
    assert set(RunStore(measured.runs).query("select label from runs").column("label").to_pylist()) == {"confirmatory"}


Change = Callable[[Workplace], object]


def edited(path: str, old: str, new: str) -> Change:
    """Another text in the first file of this name, committed."""

    def change(place: Workplace) -> None:
        file = sorted(place.root.glob(path))[0]
        file.write_text(file.read_text().replace(old, new, 1))
        place.commit_all()

    return change


def _refreeze(place: Workplace, **changes: object) -> None:
    """What a running test cannot edit: code and shipped files. What was frozen of them can be another."""
    content = Preregistration.model_validate_json(place.frozen.read_text())
    place.frozen.write_text(content.model_copy(update={**changes, "digest": ""}).sealed().to_json())
    place.amend_all()


def _edit_patch_of_the_installation(place: Workplace) -> None:
    content = Preregistration.model_validate_json(place.frozen.read_text())
    files = tuple(
        file.model_copy(update={"sha256": "0" * 64}) if file.path.startswith("shipped:patches/") else file
        for file in content.files
    )
    assert files != content.files
    _refreeze(place, files=files)


def _uncommit(place: Workplace) -> None:
    place.git("rm", "-q", "--cached", str(place.frozen))
    place.git("commit", "-q", "-m", "forget it")


@pytest.fixture(scope="module")
def authorized(new_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a patch, costs of its own and a freeze that authorizes its runs."""
    with pytest.MonkeyPatch.context() as patched:
        place = entered(new_repository, tmp_path_factory.mktemp("authorized"), patched)
        place.write("patches/vendor-1/observe.patch", "as it was")
        place.write("plans/costs/mine.toml", find_cost_file("paper").read_text())
        place.experiment_file.write_text(
            place.experiment_file.read_text().replace("max_num_seqs = 8", 'cost_model = "plans/costs/mine.toml"')
        )
        place.commit_all()
        place.freeze()
        authorize(place.frozen, runs_root=place.runs)
    return place.root


REASONS: list[tuple[Change, str]] = [
    (
        edited("plans/frozen/small/*.jsonl", '"start_offset_ns":0', '"start_offset_ns":7'),
        r"the plan of \w+/\d was changed after the freeze",
    ),
    (edited("plans/rules/mine.toml", "0.03", "0.3"), "criterion 'mine' was changed after the freeze"),
    (
        lambda place: (place.rule_file.unlink(), place.commit_all()),
        "criterion 'mine' is gone since the freeze",
    ),
    (
        edited("plans/experiments/small.toml", "replicates = 3", "replicates = 4"),
        "the experiment was changed after the freeze",
    ),
    (
        edited("plans/frozen/small.json", '"max_error": 0.03', '"max_error": 0.3'),
        "was edited after it was frozen",
    ),
    (lambda place: _refreeze(place, code_sha256="0" * 64), "the harness's code was changed after the freeze"),
    (edited("patches/vendor-1/observe.patch", "as it was", "changed"), "a patch was changed after the freeze"),
    (_edit_patch_of_the_installation, r"patches/.*: a patch was changed after the freeze"),
    (edited("plans/costs/mine.toml", "9.870", "9.871"), "the cost model was changed after the freeze"),
    (
        lambda place: (place.write("plans/experiments/later.toml", "base_seed = 424242\n"), place.commit_all()),
        "base seed 424242 was used before, by plans/experiments/later.toml",
    ),
    (_uncommit, "is not committed"),
]


@pytest.mark.parametrize(("change", "reason"), REASONS, ids=[reason for _, reason in REASONS])
def test_each_reason_against_a_confirmatory_run_is_named(
    authorized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, reason: str
) -> None:
    place = entered(authorized, tmp_path, monkeypatch)
    change(place)
    with pytest.raises(SpecError, match=reason) as refused:
        authorize(place.frozen, runs_root=place.runs)
    assert "\n" not in str(refused.value)
    assert not place.runs.exists()


def test_a_frozen_file_that_only_another_branch_holds_is_not_authorized(place: Workplace) -> None:
    frozen = place.freeze(is_committed=False).path
    content = frozen.read_bytes()
    place.git("checkout", "-q", "-b", "elsewhere")
    place.commit_all()
    place.git("checkout", "-q", "-")
    frozen.parent.mkdir(parents=True, exist_ok=True)
    frozen.write_bytes(content)
    (place.root / ".git/info/exclude").write_text(frozen.name)
    with pytest.raises(SpecError, match="is not committed"):
        authorize(frozen)


def test_a_run_started_before_its_freeze_is_refused(place: Workplace) -> None:
    frozen = place.freeze(is_committed=False)
    place.commit_all("frozen in the future", at="@4000000000 +0000")
    with pytest.raises(SpecError, match="the run would start before its freeze"):
        authorize(frozen.path)


def test_sealed_runs_that_began_before_their_freeze_decide_nothing(measured: Workplace) -> None:
    run = measured.sealed[0]
    record = run.manifest.model_dump(mode="json")["preregistration"]
    rewrite_manifest(run.path, preregistration={**record, "committed_at_s": record["committed_at_s"] + 10**9})
    with pytest.raises(RecordsError, match="before its freeze was committed"):
        check_sealed_runs(RunStore(measured.runs).sealed("small"))


def test_exploratory_runs_burn_their_seed(place: Workplace) -> None:
    frozen = place.freeze()
    place.run_exploratory()
    with pytest.raises(SpecError, match="by exploratory run small/base/0"):
        authorize(frozen.path, runs_root=place.runs)


def test_a_seed_of_exploratory_runs_is_refused_at_the_freeze_too(place: Workplace) -> None:
    # In a folder of its own below runs, as `--runs runs/today` makes.
    run_experiment(place.spec, runs_root=place.runs / "today")
    with pytest.raises(SpecError, match=r"by exploratory run today/small/base/0 \(and 5 more\)"):
        place.freeze()


def test_a_run_keeps_the_cost_model_that_prices_it(measured: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = measured.sealed
    before = run_figures(runs[0])
    assert runs[0].file(layout.COST_MODEL).read_bytes() == find_cost_file("paper").read_bytes()
    # The file that the name means is another one now: the run's figures stay.
    changed = measured.write("costs/paper.toml", find_cost_file("paper").read_text().replace("9.870", "19.870"))
    monkeypatch.setattr("harness.shipped.SHIPPED_ROOTS", (changed.parents[1],))
    reopened = RunStore(measured.runs).run(*runs[0].key)
    assert run_figures(reopened).a == before.a


def test_runs_made_with_another_cost_model_than_the_frozen_one_decide_nothing(measured: Workplace) -> None:
    run = measured.sealed[0]
    files = run.manifest.model_dump(mode="json")["files"]
    files[layout.COST_MODEL]["sha256"] = "0" * 64
    rewrite_manifest(run.path, files=files)
    with pytest.raises(RecordsError, match="was made with another cost model"):
        check_sealed_runs(RunStore(measured.runs).sealed("small"))


def test_a_prediction_frozen_under_other_rules_than_the_server_followed_decides_nothing(place: Workplace) -> None:
    runs = place.run_confirmatory(place.freeze(prediction_rules="vendor-0.11.1").path)
    launch = {"requested": {"versions": {"vllm-rbln": "0.12.0"}}}
    server = runs[0].manifest.model_dump(mode="json").get("server") or {}
    rewrite_manifest(runs[0].path, server={**server, "facts": {"launch": launch}})
    with pytest.raises(RecordsError, match=r"follows vendor-0\.12\.0.* frozen under vendor-0\.11\.1"):
        check_sealed_runs(RunStore(place.runs).sealed("small"))


@pytest.mark.parametrize(("name", "old"), [(layout.COST_MODEL, b"9.870"), (layout.FROZEN, b"0.03")])
def test_an_edited_copy_of_what_a_run_keeps_decides_nothing(measured: Workplace, name: str, old: bytes) -> None:
    runs = measured.sealed
    copy = runs[0].file(name)
    copy.write_bytes(copy.read_bytes().replace(old, b"0.04"))
    with pytest.raises(RecordsError, match="differs from what was sealed"):
        check_sealed_runs(runs)


def test_resuming_with_a_changed_cost_model_is_refused(place: Workplace) -> None:
    mine = place.write("plans/costs/mine.toml", find_cost_file("paper").read_text())
    spec = place.spec.model_copy(update={"server": ServerSpec(cost_model="plans/costs/mine.toml"), "replicates": 1})
    run_experiment(spec, runs_root=place.runs)
    mine.write_text(mine.read_text().replace("9.870", "9.970"))
    with pytest.raises(SpecError, match="was sealed with another cost model than"):
        run_experiment(spec, runs_root=place.runs, resume=True)


def test_a_frozen_file_edited_in_the_work_tree_is_said_by_run_and_by_decide(measured: Workplace) -> None:
    measured.frozen.write_text(measured.frozen.read_text()[:-20])
    with pytest.raises(
        SpecError, match=r"differs from the file that was committed.* git checkout HEAD -- \S*small\.json"
    ):
        authorize(measured.frozen, runs_root=measured.runs)
    judgement = decide(measured.sealed)
    assert judgement.decisions[0].outcome is Outcome.PASS
    assert judgement.account_lines[-1].startswith(
        "note: plans/frozen/small.json differs from the file that was committed"
    )


def test_an_experiment_whose_runs_were_frozen_says_how_it_goes_on(measured: Workplace) -> None:
    spec = measured.sealed[0].spec.model_copy(update={"replicates": 4})
    with pytest.raises(SpecError, match=r"6 sealed runs .* made from its freeze plans/frozen/small\.json.*--resume"):
        run_experiment(spec, runs_root=measured.runs)


def test_an_invalid_confirmatory_run_is_repeated_only_as_often_as_was_frozen(measured: Workplace) -> None:
    run = measured.sealed[0].path
    rewrite_manifest(run, status="invalid", invalid_reasons=["late"])
    preregistration, authorization = authorize(measured.frozen, runs_root=measured.runs)
    assert will_fail_again(next(run for run in RunStore(measured.runs).sealed() if not run.is_valid))
    with pytest.raises(SpecError, match="the 0 repetitions that this freeze allows are used up"):
        run_experiment(
            preregistration.experiment,
            runs_root=measured.runs,
            authorization=authorization,
            resume=True,
            retry_invalid=True,
        )
    assert (run / layout.MANIFEST).is_file()


def test_mixed_standing_is_refused(measured: Workplace) -> None:
    rewrite_manifest(measured.sealed[0].path, preregistration=None)
    with pytest.raises(RecordsError, match="different freezes"):
        check_sealed_runs(RunStore(measured.runs).sealed("small"))


def test_what_is_no_frozen_file_says_so(place: Workplace) -> None:
    with pytest.raises(SpecError, match="is not a frozen file"):
        parse_preregistration(place.experiment_file.read_bytes(), where="small.toml")


def harness(place: Workplace, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command_line.harness(*arguments, cwd=place.root, environment={"COLUMNS": "200"})


def test_freeze_run_and_decide_from_the_command_line(place: Workplace) -> None:
    frozen = harness(place, "prereg", "freeze", "plans/experiments/small.toml", "--seed", "777001", "--commit")
    assert frozen.returncode == 0, frozen.stderr
    ran = harness(place, "run", "--confirmatory", "plans/frozen/small.json", "--runs", "runs")
    assert ran.returncode == 0, ran.stderr
    decided = harness(place, "decide", "small", "--runs", "runs", "--format", "json")
    assert decided.returncode == 0, decided.stderr
    (decision,) = json.loads(decided.stdout)
    assert (decision["subject"], decision["outcome"]) == ("more", "PASS")
    for name in ("a_s", "b_s", "baseline_a_s", "predicted_ratio", "tau_initial", "tau_revised", "error", "max_error"):
        assert name in decision["numbers"]
    # A changed criterion cannot judge what was frozen under another.
    place.rule_file.write_text(RULE.format(max_error=0.5))
    refused = harness(place, "decide", "small", "--runs", "runs", "--rule", "plans/rules/mine.toml")
    assert refused.returncode == 2
    assert "criterion 'mine' was changed after the freeze" in refused.stderr
    # The frozen ones still do.
    assert harness(place, "decide", "small", "--runs", "runs").returncode == 0


def test_a_failed_rule_has_its_own_exit_code(place: Workplace) -> None:
    # More sessions than slots, and predictions by other KV rules: the promise misses by more than nothing.
    place.write("plans/rules/mine.toml", RULE.format(max_error=1e-9) + "equivalence_band = [1.0, 1.0]\n")
    content = place.experiment_file.read_text().replace("num_sessions = 4", "num_sessions = 12")
    place.experiment_file.write_text(content.replace("[1, 2, 3, 4, 8]", "[1, 2, 3, 4, 8]\nserver.kv_slots = 24"))
    place.commit_all()
    place.run_confirmatory(place.freeze(prediction_rules="paper").path)
    decided = harness(place, "decide", "small", "--runs", "runs")
    assert "FAIL" in decided.stdout
    assert (decided.returncode, decided.stderr) == (4, ""), "an answer, and no error of the command"


def test_a_notebook_judges_as_the_command_line_does(measured: Workplace) -> None:
    runs = measured.sealed
    judgement = decide(runs).require_passed()
    assert judgement.is_confirmatory
    assert [decision.outcome.value for decision in judgement.decisions] == ["PASS"]
    failed = replace(judgement.decisions[0], outcome=Outcome.FAIL)
    with pytest.raises(RuleFailedError, match="1 of 1 decisions are FAIL, first mine on more"):
        replace(judgement, decisions=(failed,)).require_passed()
    with pytest.raises(SpecError, match="criterion 'direction' was not frozen"):
        decide(runs, ["direction"])
    with pytest.raises(SpecError, match="no sealed runs"):
        decide([])


def test_nothing_is_decided_before_every_frozen_run_is_sealed(place: Workplace) -> None:
    place.rule_file.write_text(RULE.format(max_error=0.03).replace("min_replicates = 3", "min_replicates = 2"))
    place.commit_all()
    runs = place.run_confirmatory(place.freeze().path)
    assert [one.outcome for one in decide(runs).decisions] == [Outcome.PASS]
    # Two whole replicates satisfy the rule, but three were frozen.
    two = [run for run in runs if run.replicate < 2]
    [decision] = decide(two).decisions
    assert decision.outcome is Outcome.WITHHELD
    assert decision.reason.startswith("4 of 6 frozen runs are sealed; so far PASS: ")


def test_exploratory_runs_are_not_subject_to_a_decision(place: Workplace) -> None:
    place.run_exploratory()
    decided = harness(place, "decide", "small", "--runs", "runs")
    assert decided.returncode == 5
    assert "these runs do not decide everything that was asked (1 NOT SUBJECT)" in decided.stderr
    assert "NOT SUBJECT" in decided.stdout
    assert "would be PASS" in decided.stdout
    assert place.git("for-each-ref", "refs/harness") == ""


def test_a_confirmatory_run_takes_no_changes(place: Workplace) -> None:
    place.freeze()
    refused = harness(place, "run", "--confirmatory", "plans/frozen/small.json", "--set", "replicates=1")
    assert refused.returncode == 2
    assert "exactly what was frozen" in refused.stderr


FROZEN_STOP = """
[stop]
margin = 0.05
alpha = 0.2
budget = 4
looks = [2, 3]
"""


def test_a_frozen_stopping_rule_ends_the_runs_and_the_decision_stands_without_the_rest(place: Workplace) -> None:
    with place.experiment_file.open("a") as file:
        file.write(FROZEN_STOP)
    place.commit_all()
    frozen = place.freeze()
    assert len(frozen.preregistration.plans) == 8
    preregistration, authorization = authorize(frozen.path, runs_root=place.runs)
    outcome = run_experiment(
        preregistration.experiment, runs_root=place.runs, authorization=authorization, until_decided=True
    )
    assert outcome.is_decided
    assert len(outcome.runs) < 8
    stopped = decide(outcome.runs).decisions[-1]
    assert (stopped.rule, stopped.outcome) == ("stop", Outcome.PASS)
    undecided = decide(outcome.runs[:2] + outcome.runs[-1:]).decisions[-1]
    assert undecided.outcome is Outcome.WITHHELD
    assert "3 of 8 frozen runs are sealed" in undecided.reason
