"""Freezing: what the file holds, and what it refuses to be written for."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import which

import pytest

from harness.errors import SpecError
from harness.judge.prereg import authorize
from harness.judge.prereg.freeze import FreezeOptions, freeze, seeds_in
from harness.judge.prereg.frozen import parse_preregistration
from harness.judge.prereg.page import predictions_in_words
from harness.model.plan.files import read_plan
from harness.stacks.rbln.rules.kv_rules import NEWEST_STABLE
from tests.support.sshd import make_key
from tests.support.workplace import Workplace


def test_a_frozen_file_fixes_plans_predictions_criteria_code_and_inputs(place: Workplace) -> None:
    frozen = place.freeze()
    content = parse_preregistration(frozen.path.read_bytes(), where="small.json")
    assert frozen.path == place.root / "plans" / "frozen" / "small.json"
    assert len(content.plans) == 6
    assert {read_plan(place.root / plan.path).hash for plan in content.plans} == {plan.hash for plan in content.plans}
    # Conditions without a treatment share the plan of their replicate.
    assert len({plan.hash for plan in content.plans}) == 3
    assert content.predictions["more"][2].device_ns > 0
    assert [entry.rule.name for entry in content.rules] == ["mine"]
    own = [Path(file.path).name for file in content.files if "patches/" not in file.path]
    assert sorted(own) == ["paper.toml", "tracelab-v0.0.2.toml"]
    assert any(file.path.startswith("shipped:patches/vllm_rbln-0.11.1/") for file in content.files)
    assert content.code_sha256
    assert not content.is_tree_dirty
    assert content.condition_rules == dict.fromkeys(content.predictions, NEWEST_STABLE)
    # What the draws were made with, and which of it is assumed; the words of an interval say so.
    assert set(content.perturbations) == set(content.predictions)
    for each in content.perturbations.values():
        assert set(each.assumed) <= set(each.sizes)
        assert each.sizes["step_sd"] > 0
    assert all("if the assumed sizes are right)" in line for line in predictions_in_words(content))
    given = {name: each.model_copy(update={"assumed": ()}) for name, each in content.perturbations.items()}
    known = content.model_copy(update={"perturbations": given})
    assert not any("assumed" in line for line in predictions_in_words(known))


def test_a_server_of_which_no_costs_are_named_is_frozen_without_predictions(place: Workplace) -> None:
    text = (
        place.experiment_file.read_text().replace('"sim"', '"attached"').replace("plans/rules/mine.toml", "superiority")
    )
    server = '[server]\nurl = "http://127.0.0.1:9"\ndeclared = true\n'
    place.experiment_file.write_text(text.replace("[server]\n", server))
    place.commit_all()
    content = place.freeze().preregistration
    assert (content.predictions, content.perturbations) == ({}, {})
    assert [entry.rule.name for entry in content.rules] == ["superiority"]
    assert list(predictions_in_words(content)) == []


def test_a_refused_freeze_leaves_no_file(place: Workplace) -> None:
    with pytest.raises(SpecError, match=r"has no .chunked_prefill."):
        place.freeze(prediction_rules="vllm-paged")
    assert not (place.root / "plans" / "frozen").exists()


def test_commit_takes_the_frozen_files_and_nothing_else(place: Workplace) -> None:
    place.write("notes.txt", "draft")
    place.freeze(allows_dirty_tree=True)
    shown = place.git("show", "--name-only", "--format=%s", "HEAD").splitlines()
    assert shown[0] == "Preregister small: plans, predictions and criteria"
    assert all(line.startswith("plans/frozen/small") for line in shown[1:] if line)
    assert "notes.txt" in place.git("status", "--porcelain")


def test_a_tag_is_put_on_the_commit_and_recorded_with_the_authorization(place: Workplace) -> None:
    frozen = place.freeze(tag="prereg-small")
    assert place.git("rev-list", "-n", "1", "prereg-small").strip() == frozen.commit.sha
    assert authorize(frozen.path)[1].record.tag == "prereg-small"


@pytest.mark.skipif(which("ssh-keygen") is None, reason="signing needs ssh-keygen")
def test_a_signed_tag_is_recorded_as_signed(place: Workplace) -> None:
    key = place.root.parent / "key"
    make_key(key)
    place.git("config", "gpg.format", "ssh")
    place.git("config", "user.signingkey", str(key))
    frozen = place.freeze(tag="prereg-small", is_signed=True)
    # Whose keys to believe is said by a file; without one the words of a signature prove nothing.
    assert authorize(frozen.path)[1].record.tag == "prereg-small; signature not verified"
    signers = place.root.parent / "signers"
    signers.write_text(f"tester@example.invalid {key.with_suffix('.pub').read_text()}")
    place.git("config", "gpg.ssh.allowedSignersFile", str(signers))
    assert authorize(frozen.path)[1].record.tag == "prereg-small; signed"


def test_a_compiled_artifact_that_changes_after_the_freeze_is_refused(place: Workplace) -> None:
    artifact = place.root.parent / "artifact"
    artifact.mkdir()
    (artifact / "decoder.rbln").write_bytes(b"graph")
    server = place.spec.server.model_copy(update={"artifact": str(artifact)})
    spec = place.spec.model_copy(update={"server": server})
    frozen = freeze(spec, place.experiment_file, options=FreezeOptions(is_committed=True))
    assert list(frozen.preregistration.artifacts) == [str(artifact)]
    authorize(frozen.path)
    (artifact / "decoder.rbln").write_bytes(b"GRAPH")
    with pytest.raises(SpecError, match="the compiled artifact was compiled again or changed since the freeze"):
        authorize(frozen.path)


def test_a_freeze_of_compiled_models_that_are_not_here_is_refused_and_names_all_of_them(place: Workplace) -> None:
    path, own = place.experiment_file, 'name = "more"\n'
    text = path.read_text().replace('backend = "sim"', 'backend = "rbln"')
    text = text.replace("max_num_seqs = 8", f'max_num_seqs = 8\nartifact = "{place.root.parent}/eight"')
    path.write_text(text.replace(own, f'{own}server.artifact = "{place.root.parent}/more"\n'))
    place.commit_all()
    with pytest.raises(
        SpecError, match=r"eight: no such artifact\.(.|\n)*more: no such artifact\. Compile it"
    ) as refused:
        place.freeze()
    assert f"harness server compile qwen3-4b -o {place.root.parent}" in str(refused.value)
    assert not place.frozen.parent.exists()
    # The simulator takes no model.
    freeze(place.spec.model_copy(update={"backend": "sim"}), path)


def test_a_second_freeze_is_refused_and_says_how_a_changed_experiment_is_frozen(place: Workplace) -> None:
    place.freeze()
    with pytest.raises(SpecError, match="is frozen already") as refused:
        place.freeze()
    assert "copy the experiment's file, give the copy another name = and base_seed" in str(refused.value)


def test_a_signature_without_a_tag_and_a_tag_without_a_commit_are_refused(place: Workplace) -> None:
    with pytest.raises(SpecError, match="only a tag can be signed"):
        place.freeze(is_signed=True)
    with pytest.raises(SpecError, match="a tag needs the commit"):
        place.freeze(is_committed=False, tag="early")


@pytest.mark.parametrize(("tag", "is_signed"), [("taken", False), ("no name", False), ("free", True)])
def test_a_tag_that_git_refuses_leaves_no_files_and_no_commit(place: Workplace, tag: str, is_signed: bool) -> None:
    place.git("tag", "taken")
    place.git("config", "user.signingkey", "nobody's")
    with pytest.raises(SpecError, match=r"git tag failed.* Choose another name or key"):
        place.freeze(tag=tag, is_signed=is_signed)
    assert not place.frozen.parent.exists()
    assert place.git("tag").split() == ["taken"]


def test_a_dirty_tree_is_refused_unless_told_and_then_recorded(place: Workplace) -> None:
    place.write("notes.txt", "draft")
    with pytest.raises(SpecError, match=r"uncommitted changes \(1\), first notes\.txt"):
        place.freeze()
    frozen = place.freeze(allows_dirty_tree=True)
    assert frozen.preregistration.is_tree_dirty
    assert frozen.preregistration.dirty_paths == ("notes.txt",)


def test_an_experiment_outside_any_repository_is_refused(place: Workplace, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere" / "small.toml"
    outside.parent.mkdir()
    outside.write_text(place.experiment_file.read_text())
    with pytest.raises(SpecError, match="in no git repository"):
        freeze(place.spec, outside, options=FreezeOptions())
    with pytest.raises(SpecError, match="lies outside the repository"):
        freeze(place.spec, place.experiment_file, options=FreezeOptions(folder=tmp_path / "frozen"))
    assert not (tmp_path / "frozen").exists()


def test_predictions_can_be_made_with_the_papers_rules(place: Workplace) -> None:
    frozen = place.freeze(prediction_rules="paper").preregistration
    assert {frozen.prediction_rules, *frozen.condition_rules.values()} == {"paper"}


def test_a_frozen_interval_is_over_200_draws_unless_the_experiment_says_how_many(place: Workplace) -> None:
    written = place.experiment_file.read_text()
    made = {}
    for text in (written.replace("prediction = {draws = 20}\n", ""), written.replace("424242", "424243")):
        place.experiment_file.write_text(text)
        place.commit_all()
        folder = place.root / "plans" / f"frozen-{len(made)}"
        frozen = place.freeze(folder=folder, allows_dirty_tree=True).preregistration
        made[len(made)] = {len(run.draws.device_ns) for run in frozen.predictions["base"].values() if run.draws}
    assert made == {0: {200}, 1: {20}}


# The ledger of seeds.


@pytest.mark.parametrize(
    ("path", "content", "by"),
    [
        ("plans/experiments/earlier.toml", "base_seed = 424242\n", ""),
        ("plans/spaces/search.toml", "[inputs]\nsearch_seeds = [1, 424242]\n", ""),
        ("plans/costs/mine.toml", "[calibration]\nseeds = [424242]\n", ""),
        ("plans/frozen/earlier.json", json.dumps({"experiment": {"base_seed": 424242}}), ""),
        ("plans/inputs/some.jsonl", json.dumps({"format": "harness-plan/1", "seed": 424242}) + "\n", ""),
        (
            "runs/search-mine/search.json",
            json.dumps({"space": {"inputs": {"search_seeds": [1, 424242]}}}),
            "search search-mine",
        ),
    ],
)
def test_a_seed_that_any_file_of_the_repository_used_is_refused(
    place: Workplace, path: str, content: str, by: str
) -> None:
    place.write(path, content)
    place.commit_all()
    with pytest.raises(SpecError, match=rf"base seed 424242 was used before, by {by or path}"):
        place.freeze()


def test_a_seed_of_a_file_that_was_deleted_since_is_refused(place: Workplace) -> None:
    gone = place.write("plans/experiments/earlier.toml", "base_seed = 424242\n")
    place.commit_all()
    gone.unlink()
    place.commit_all()
    with pytest.raises(SpecError, match=r"earlier\.toml in commit"):
        place.freeze()


def test_a_seed_that_was_left_out_is_refused_and_counts_as_the_default(place: Workplace) -> None:
    written = place.experiment_file.read_text()
    place.write("plans/experiments/small.toml", written.replace("base_seed = 424242\n", ""))
    place.write("plans/experiments/other.toml", 'name = "other"\n[[condition]]\nname = "base"\n')
    place.commit_all()
    with pytest.raises(SpecError, match="Freeze it with a seed that nothing has used"):
        place.freeze()
    place.write("plans/experiments/small.toml", written.replace("424242", "1"))
    place.commit_all()
    with pytest.raises(SpecError, match=r"base seed 1 was used before, by plans/experiments/other\.toml"):
        place.freeze()


def test_a_frozen_file_fixes_what_defaults_became(place: Workplace) -> None:
    written = place.experiment_file.read_text().replace("num_sessions = 4\n", "")
    place.write("plans/experiments/small.toml", written + '[[condition]]\nname = "wide"\nserver.max_num_seqs = 12\n')
    place.commit_all()
    experiment = json.loads(place.freeze().path.read_bytes())["experiment"]
    assert experiment["workload"]["num_sessions"] == 8
    assert experiment["server"]["decode_buckets"] == [1, 2, 4, 8]
    assert experiment["condition"][2]["server"]["decode_buckets"] == [1, 3, 6, 12]


def test_seeds_of_resampling_are_no_inputs(place: Workplace) -> None:
    rule = 'name = "s"\nkind = "saturation"\nlevels = ["a", "b"]\nseed = 424242\n'
    place.write("plans/rules/other.toml", rule)
    place.commit_all()
    assert place.freeze().path.exists()


def test_seeds_are_found_under_their_keys_only() -> None:
    content = {"base_seed": 1, "a": [{"search_seeds": [2, 3]}, {"seed": True}], "num": 4, "reseed": 5}
    for text in (
        json.dumps(content),
        json.dumps(content, indent=1),
        "base_seed = 1\nsearch_seeds = [\n 2, 3]\nnum = 4",
    ):
        assert sorted(seeds_in(text)) == [1, 2, 3]


NO_RULE = ('rules = ["plans/rules/mine.toml"]', "")
NO_SECOND = ('[[condition]]\nname = "more"\nserver.decode_buckets = [1, 2, 3, 4, 8]\n', "")


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("rules/mine", [("max_error", 'conditions = ["n6-*"]\nmax_error')], "criterion 'mine' finds no condition of"),
        ("experiments/small", [("replicates = 3", "replicates = 2")], "its rules need 3 replicates to decide, and it"),
        ("experiments/small", [NO_RULE], r"no decision rule, so its runs could .*equivalence.*superiority"),
        ("experiments/small", [NO_RULE, NO_SECOND], r"Add a second \[\[condition\]\]"),
    ],
)
def test_an_experiment_whose_runs_could_decide_nothing_is_refused(
    place: Workplace, file: str, changes: list[tuple[str, str]], message: str
) -> None:
    path = place.root / "plans" / f"{file}.toml"
    for old, new in changes:
        path.write_text(path.read_text().replace(old, new))
    place.commit_all()
    with pytest.raises(SpecError, match=message):
        place.freeze()
    assert not place.frozen.exists()


def test_a_rule_can_be_named_with_the_freeze(place: Workplace) -> None:
    place.experiment_file.write_text(place.experiment_file.read_text().replace(*NO_RULE))
    place.commit_all()
    assert place.freeze(rules=("superiority",)).preregistration.rules[0].rule.name == "superiority"


def test_sealed_runs_in_the_tree_are_to_be_ignored_and_not_committed(place: Workplace) -> None:
    place.write(".gitignore", "")
    place.commit_all()
    place.write("runs/small/base/0/manifest.json", "{}")
    with pytest.raises(SpecError, match="uncommitted changes") as refused:
        place.freeze()
    assert "Write runs/ into .gitignore" in str(refused.value.hint)
