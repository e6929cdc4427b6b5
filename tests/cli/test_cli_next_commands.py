"""Each command that another one prints is run as it is printed, from a question to a decision that counts."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import blocks_of, lines_that_the_review_guide_lacks, page_text
from tests.support.checkout import ROOT
from tests.support.command_line import harness

pytestmark = pytest.mark.same_everywhere


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An empty git repository that keeps runs out."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for words in ("init -q .", "config user.name me", "config user.email me@example.org"):
        subprocess.run(["git", *words.split()], cwd=folder, check=True)
    (folder / ".gitignore").write_text("runs/\n")
    return folder


def commit(folder: Path) -> None:
    for words in (["add", "."], ["commit", "-qm", "the question"]):
        subprocess.run(["git", *words], cwd=folder, check=True)


def followed(folder: Path, command: str, expected: tuple[int, ...] = (0,)) -> str:
    """What a printed line answers when a person copies it, all parts of it."""
    printed = ""
    for part in command.split(" && "):
        program, *words = re.findall(r"'[^']*'|\S+", part)
        words = [word.strip("'") for word in words]
        if program == "harness":
            done = harness(*words, cwd=folder, environment={"COLUMNS": "200"})
        else:
            done = subprocess.run([program, *words], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode in expected, f"{part}\n{done.stdout[-500:]}\n{done.stderr}"
        printed += done.stdout + done.stderr
    return printed


def first_experiment(folder: Path) -> str:
    """What ``harness init`` prints of mine.toml, which then has a seed of its own and a tenth of a freeze's draws."""
    printed = followed(folder, "harness init mine --backend sim")
    path = folder / "mine.toml"
    path.write_text("prediction = {draws = 20}\n" + path.read_text().replace("base_seed = 1\n", "base_seed = 2027\n"))
    return printed


def line_after(start: str, printed: str) -> str:
    found = re.search(rf"{re.escape(start)} (.*?)\s*$", printed, re.MULTILINE)
    assert found is not None, printed
    return found[1]


def decided_from(folder: Path, frozen: str) -> str:
    """What is decided when the lines that a freeze prints are followed."""
    if "commit it before" in frozen:
        followed(folder, line_after("commit it before the first run:", frozen))
    ran = followed(folder, line_after("then:", frozen))
    assert "next:" not in ran, "one step follows: the decision"
    return followed(folder, line_after("decide it:", ran), expected=(0, 4, 5))


def test_what_init_prints_leads_to_a_decision_that_counts(repository: Path) -> None:
    begun = first_experiment(repository)
    commit(repository)
    *first, freeze = re.findall(r"^  (harness .*?)  +# ", begun, re.MULTILINE)
    assert len(first) == 3
    for command in first:
        followed(repository, command)
    assert re.search(
        r"(PASS|FAIL).*superiority: twelve-slots vs base", decided_from(repository, followed(repository, freeze))
    )


def test_runs_that_were_not_frozen_say_how_to_get_a_decision_and_a_used_seed_names_an_unused_one(
    repository: Path,
) -> None:
    first_experiment(repository)
    followed(repository, "harness run mine.toml --replicates 3 --runs runs/first")
    undecided = followed(repository, "harness decide mine --runs runs/first", expected=(5,))
    commit(repository)
    assert "harness prereg freeze mine.toml --commit --seed 2028" in undecided
    refused = followed(repository, "harness prereg freeze mine.toml", expected=(2,))
    assert "then: harness run" in followed(repository, line_after("nothing has used:", refused))


def test_the_decision_of_runs_that_were_never_made_says_how_they_are_made(repository: Path) -> None:
    first_experiment(repository)
    commit(repository)
    told = followed(repository, "harness decide mine --runs runs/main", expected=(2,))
    assert "for a decision that counts harness prereg freeze mine.toml --commit, else" in told
    assert "harness run mine.toml --runs runs/main" in told
    (repository / "plans").mkdir()
    (repository / "mine.toml").rename(repository / "other.toml")
    told = followed(repository, "harness decide mine --runs runs/main", expected=(2,))
    assert "harness run other.toml --runs runs/main" in told
    assert "harness run FILE.toml --runs runs/main" in followed(
        repository / "plans", "harness decide mine --runs runs/main", expected=(2,)
    )
    (repository / "other.toml").rename(repository / "mine.toml")
    followed(repository, "harness prereg freeze mine.toml --commit")
    # Runs of another experiment, below it or in it, are not those.
    followed(repository, "harness run demo --backend sim --replicates 1 --runs runs/main/check")
    told = followed(repository, "harness decide mine --runs runs/main", expected=(2,))
    followed(repository, line_after("make some:", told))
    assert "on confirmatory runs" in followed(repository, "harness decide mine --runs runs/main", expected=(0, 4))


def commands_of(page: str, first: str) -> list[str]:
    """The commands of the block of a page that begins with ``first``, without comments."""
    texts = [block.text for block in blocks_of(page_text(page)) if first in block.text]
    lines = texts[0][texts[0].index(first) :].splitlines()
    return [re.sub(r"  +#.*", "", line.removeprefix("$ ")) for line in lines if "harness " in line]


def test_the_way_to_a_confirmatory_verdict_of_a_shipped_experiment_is_as_its_page_says(repository: Path) -> None:
    shutil.copytree(ROOT / "plans", repository / "plans")
    commit(repository)
    freeze, run, decide = commands_of("reference/experiments/README", "harness prereg freeze")
    smaller = "--set backend=sim --set replicates=3 --set workload.num_sessions=4 --set prediction.draws=20"
    followed(repository, f"{freeze} {smaller}")
    followed(repository, run)
    assert re.search(r"(PASS|FAIL).* cost-validation", followed(repository, decide, expected=(0, 4, 5)))


def test_the_guide_of_the_npu_leads_to_a_verdict_where_the_simulator_measures(repository: Path) -> None:
    (text,) = [block.text for block in blocks_of(page_text("guides/npu")) if block.marks.get("file") == "ca25.toml"]
    kept = [line for line in text.splitlines() if not re.match(r"(server\.)?(environment|artifact|devices) = ", line)]
    kept.insert(0, "prediction = {draws = 20}")
    (repository / "ca25.toml").write_text("\n".join(kept).replace('"rbln"', '"sim"'))
    commit(repository)
    answers = [
        followed(repository, command, expected=(0, 4)) for command in commands_of("guides/npu", "harness prereg freeze")
    ]
    answers += [
        followed(repository, command, expected=(0, 4))
        for command in commands_of("guides/npu", "harness prereg publish")
    ]
    for answer in (answers[2], answers[-1]):
        assert re.search(r"(PASS|FAIL) .*superiority: bucket-6 vs base", answer), answer
    # The last line is the decision: a negative one is no error of the command.
    assert re.search(r"the archive is whole; decision: (PASS|FAIL)\s*$", answers[-1]), answers[-1]
    assert lines_that_the_review_guide_lacks(answers[-1]) == []


def test_what_power_prints_is_an_experiment_that_a_freeze_takes(repository: Path) -> None:
    first_experiment(repository)
    path = repository / "mine.toml"
    path.write_text(path.read_text().replace('rules = ["superiority"]', ""))
    planned = followed(repository, "harness power mine.toml --rule superiority --blocks 20")
    pasted = planned.partition("in place of its own replicates:\n")[2].partition("or, ")[0]
    path.write_text(re.sub(r"(?m)^replicates = .*$", pasted, path.read_text()))
    commit(repository)
    assert "then: harness run" in followed(repository, "harness prereg freeze mine.toml")


def test_a_stopping_rule_is_followed_to_its_verdict(repository: Path) -> None:
    first_experiment(repository)
    path = repository / "mine.toml"
    path.write_text(path.read_text() + "[stop]\nmargin = 0.5\nbudget = 6\n")
    commit(repository)
    frozen = followed(repository, "harness prereg freeze mine.toml --commit")
    assert line_after("then:", frozen).endswith("--until decided")
    assert "stop: twelve-slots" in decided_from(repository, frozen)


def test_a_frozen_experiment_is_not_run_without_its_freeze_and_says_what_is(repository: Path) -> None:
    first_experiment(repository)
    commit(repository)
    followed(repository, "harness prereg freeze mine.toml --commit")
    swept = "harness sweep mine.toml --over server.kv_slots=8,10"
    for command in ("harness run mine.toml", "harness run mine --dry-run --runs runs/first", swept):
        refused = followed(repository, command, expected=(2,))
        assert not (repository / "runs").exists()
    first = line_after("A first look:", refused)
    assert first.endswith("--runs runs/first")
    followed(repository, first)
    measure, _, _ = line_after("Measure it:", refused).partition(". A first look")
    assert "on confirmatory runs" in decided_from(repository, f"then: {measure}\n")


def test_a_server_that_did_not_start_says_where_its_log_is_kept(repository: Path) -> None:
    started = "harness run demo --backend emulator --replicates 1 --set server.start_timeout_s=0.01"
    log, _, rest = line_after("its log:", followed(repository, started, expected=(1,))).partition(";")
    assert (repository / log).is_file()
    assert rest == " then the same command goes on (run, calibrate: with --resume)"
