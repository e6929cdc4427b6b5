"""``harness prereg`` and ``decide``: criteria fixed before a run, applied after it, published.

A rule that says FAIL ends the process with its own exit code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from harness.cli.addresses import RunsOption, SealedArgument, SetOption, from_here, output_option, sealed_runs
from harness.cli.terminal import print_folded, print_text, time_left
from harness.errors import ExitCode, RuleFailedError, SpecError, UndecidedError
from harness.table import cell_text

if TYPE_CHECKING:
    from harness.judge.decisions.decide import Decision
    from harness.judge.prereg import Judgement

RepositoryOption = Annotated[
    Path | None, typer.Option("--repository", help="Git repository of the freeze. Default: around the runs, or here.")
]
FormatOption = Annotated[
    Literal["text", "markdown", "json"], typer.Option("--format", help="How the result is printed.")
]


def freeze(
    experiment: Annotated[Path, typer.Argument(help="Experiment file (TOML).")],
    seed: Annotated[int | None, typer.Option(help="New base seed; one that no file names.")] = None,
    changes: SetOption = None,
    rules: Annotated[
        list[str] | None, typer.Option("--rule", help="Decision rule to freeze beside the file's own. Repeatable.")
    ] = None,
    folder: Annotated[Path | None, output_option("Folder. Default: plans/frozen of the repository.")] = None,
    predict_with: Annotated[
        str | None, typer.Option(help="KV rules of the predictions. Default: each server's own.")
    ] = None,
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty", help="Freeze beside uncommitted changes.")] = False,
    commit: Annotated[bool, typer.Option("--commit", help="Commit the frozen files, and nothing else.")] = False,
    tag: Annotated[str, typer.Option(help="Tag that commit.")] = "",
    sign: Annotated[bool, typer.Option("--sign", help="Sign the tag.")] = False,
) -> None:
    """Write plans, predictions, criteria and code versions in one file.

    Do this before the first run.

    Example: `harness prereg freeze mine.toml --seed 20270101 --commit`
    """

    from harness.judge.prereg import FreezeOptions
    from harness.judge.prereg import freeze as freeze_experiment
    from harness.model.spec import experiment_file, experiment_table, parse_experiment
    from harness.model.spec.changes import override_table
    from harness.stacks.rbln.rules.kv_rules import check_rules

    if predict_with is not None:
        try:
            check_rules(predict_with)
        except ValueError as error:
            raise SpecError(str(error), where="--predict-with") from error
    overrides = [*(changes or []), *([f"base_seed={seed}"] if seed is not None else [])]
    experiment = experiment_file(experiment)
    spec = parse_experiment(override_table(experiment_table(experiment), overrides), where=str(experiment))
    options = FreezeOptions(
        folder=folder,
        rules=tuple(rules or ()),
        prediction_rules=predict_with,
        allows_dirty_tree=allow_dirty,
        is_committed=commit,
        tag=tag,
        is_signed=sign,
    )
    with time_left("predicting") as on_progress:
        frozen = freeze_experiment(spec, experiment, overrides=overrides, options=options, on_progress=on_progress)
    content = frozen.preregistration
    print_folded(f"{from_here(frozen.path)}")
    num_plans = len({plan.hash for plan in content.plans})
    rules_in_words = f"{len(content.rules)} rule{'s' * (len(content.rules) != 1)}"
    print_text(f"  {len(content.plans)} runs, {num_plans} plans, {rules_in_words}, seed {spec.base_seed}")
    if not content.predictions:
        print_folded("  no predictions: no costs of these servers are named (server.cost_model)")
    for place in dict.fromkeys(str(Path(artifact).parent) for artifact in content.artifacts):
        how = f"harness server compile -o {place} --check"
        print_folded(f"  compiled models by the sizes and ends of their files; every byte: {how}")
    print_folded(f"  digest {content.digest}")
    path = from_here(frozen.path)
    if frozen.commit is None:
        plans = f"{path.with_suffix('')}"
        print_folded(f"  commit it before the first run: git add {path} {plans} && git commit -m 'Freeze {spec.name}'")
    else:
        print_folded(f"  commit {frozen.commit.sha}")
    until = "" if content.experiment.stop is None else " --until decided"
    print_folded(f"  then: harness run --confirmatory {path}{until}")


def decide(
    experiment: SealedArgument,
    runs: RunsOption = Path("runs"),
    rules: Annotated[
        list[str] | None, typer.Option("--rule", help="Rule name or file. Default: frozen, else the experiment's own.")
    ] = None,
    output: FormatOption = "text",
    repository: RepositoryOption = None,
) -> None:
    """Apply decision rules to sealed valid runs.

    Prints PASS, FAIL, WITHHELD or NOT SUBJECT, with every number used.

    Confirmatory runs are judged by the rules and predictions they were frozen with. Exploratory ones are NOT SUBJECT.
    Runs whose freeze or ledger does not show what they are decide nothing. Invalid runs are left out. As long as a
    frozen run is missing, or INVALID with repetitions left, every decision is WITHHELD.

    Exit codes: 0 every decision is PASS or NOT SUBJECT, and one is PASS; 4 at least one is FAIL; 5 these runs do not
    decide (one is WITHHELD, or all are NOT SUBJECT); 2 no such runs or rule, or a rule that was not frozen; 1 records
    that are damaged or mixed.

    Example: `harness decide demo --rule superiority --runs runs/today`
    """
    from harness.judge.prereg import decide

    judgement = decide(sealed_runs(runs, experiment), rules or (), repository=repository)
    if output == "json":
        print_text(json.dumps([_decision_record(judgement, decision) for decision in judgement.decisions], indent=2))
    else:
        _show(judgement, is_full=output == "markdown")
    if judgement.is_confirmatory:
        _exit_as_decided(judgement)
    judgement.require_passed()


def _decision_record(judgement: Judgement, decision: Decision) -> dict[str, Any]:
    from harness.judge.catalogue import interval_record

    return {
        "rule": decision.rule,
        "subject": decision.subject,
        "outcome": decision.outcome.value,
        "label": decision.label,
        "would_be": None if decision.would_be is None else decision.would_be.value,
        "answer": decision.answer,
        "reason": decision.reason,
        "origin": judgement.origin,
        "blocks": decision.num_blocks,
        "planned_blocks": judgement.num_planned_blocks,
        "numbers": dict(decision.numbers),
        "intervals": {name: interval_record(interval) for name, interval in decision.intervals.items()},
    }


def _show(judgement: Judgement, *, is_full: bool = False) -> None:
    """The decisions with their origin and blocks, then what became of the runs that are not valid."""
    print_folded(judgement.origin)
    standing = "confirmatory" if judgement.is_confirmatory else "exploratory"
    num = len(judgement.decisions)
    left_out = f", {judgement.num_invalid} invalid runs left out" if judgement.num_invalid else ""
    print_folded(f"{num} decision{'s' * (num != 1)} on {standing} runs{left_out}")
    for decision in judgement.decisions:
        if decision.answer:
            print_folded(decision.answer)
        label = f" {decision.label}" if decision.label else ""
        would_be = f" (would be {decision.would_be.value})" if decision.would_be is not None else ""
        blocks = judgement.blocks_of(decision)
        print_folded(f"{decision.outcome.value}{label}{would_be}  {decision.rule}: {decision.subject}{blocks}")
        print_folded(f"    {decision.reason}", hang=4)
        if is_full:
            for name, number in decision.numbers.items():
                print_folded(f"    {name}: {cell_text(number)}")
    for line in judgement.account_lines:
        print_folded(line)


def publish(
    experiment: Annotated[str, typer.Argument(help="Name of a frozen experiment.")],
    runs: RunsOption = Path("runs"),
    output: Annotated[Path | None, output_option("Default: `EXPERIMENT.zip`")] = None,
    repository: RepositoryOption = None,
    sign_key: Annotated[Path | None, typer.Option(help="SSH key that signs the checksums.")] = None,
    exploratory: Annotated[
        bool, typer.Option("--exploratory", help="Pack runs before which nothing was frozen, marked as such.")
    ] = False,
) -> None:
    """Pack a decided experiment in an archive that a stranger can check.

    It holds runs, freeze, ledger, verdict, checksums and, with a key, a signature.

    Exit codes: those of `harness decide`; the archive is there whatever it says.

    Example: `harness prereg publish configuration -o configuration.zip --sign-key ~/.ssh/id_ed25519`
    """
    from harness.judge.prereg import publish as publish_runs
    from harness.judge.prereg import publish_exploratory
    from harness.measure.records.archive import EXPLORATORY_NOTE

    archive = output or Path(f"{experiment}.zip")
    if exploratory:
        publish_exploratory(sealed_runs(runs, experiment), archive, signing_key=sign_key)
        print_folded(f"{archive}: {EXPLORATORY_NOTE}")
        print_folded(f"  a stranger reads it: harness verify {archive.name}; harness table {archive.name}")
        return
    judgement = publish_runs(sealed_runs(runs, experiment), archive, repository=repository, signing_key=sign_key)
    _show(judgement)
    print_folded(f"{archive}: written; decision: {_outcomes(judgement)}")
    print_folded(f"  a stranger checks it: harness prereg check {archive.name}")
    _exit_as_decided(judgement)


def check(
    archive: Annotated[Path, typer.Argument(help="An archive of `harness prereg publish`, or a folder of its files.")],
    signers: Annotated[Path | None, typer.Option(help="ssh's file of allowed signers.")] = None,
) -> None:
    """Check a published archive by what is in it alone.

    Says what was asked, predicted and decided, on how many blocks and from what origin; which runs are INVALID; what
    the archive proves, by whom and since when; and what it cannot prove. `index.html` in the archive says the same.

    Exit codes: 1 it does not hold; 5 its verdict and page are words of another version, and no signer of --signers
    answers for them; else those of `harness decide`: 0 it passed, 4 a decision is FAIL, 5 it does not decide.

    Example: `harness prereg check configuration.zip --signers allowed_signers`
    """
    from harness.judge.prereg import check_published
    from harness.judge.prereg.page import archive_lines

    checked = check_published(archive, signers)
    for claim in checked.unheld:
        print_folded(f"not proven: {claim}. Do not read them; what follows is made again from the runs")
    _show(checked.judgement)
    unproven = [claim for claim in checked.unproven if claim not in checked.unheld]
    for line in archive_lines(checked.frozen, checked.proven, unproven):
        print_folded(line)
    print_folded(f"the archive is whole; decision: {_outcomes(checked.judgement)}")
    if checked.unheld:
        raise typer.Exit(ExitCode.CANNOT_TELL)
    _exit_as_decided(checked.judgement)


def _outcomes(judgement: Judgement) -> str:
    return ", ".join(dict.fromkeys(decision.outcome.value for decision in judgement.decisions)) or "none"


def _exit_as_decided(judgement: Judgement) -> None:
    """The exit code of the decisions, without a line that would read as an error: the command did its work."""
    try:
        judgement.require_passed()
    except (RuleFailedError, UndecidedError) as decided:
        raise typer.Exit(int(decided.exit_code)) from None
