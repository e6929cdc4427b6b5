"""``harness freeze``, ``decide``, ``analyse``, ``catalogue``: fix criteria beforehand, and apply them to sealed runs.

Thin commands; nothing is computed here. A rule that says FAIL ends the process with its own exit code.
Next: ``harness.prereg`` and ``harness.analysis``.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.overrides import override_table
from harness.cli.run import RunsOption, sealed_runs
from harness.errors import RuleFailedError, SpecError

if TYPE_CHECKING:
    from harness.analysis.decide import Decision
    from harness.analysis.predictions import Predictions
    from harness.analysis.rules import DecisionRule
    from harness.prereg import Preregistration
    from harness.records import SealedRun


class ResultFormat(str, Enum):
    """How a result is printed."""

    text = "text"
    markdown = "markdown"
    json = "json"


FormatOption = Annotated[ResultFormat, typer.Option("--format", help="How the result is printed.")]


def register(app: typer.Typer) -> None:
    app.command(name="freeze")(freeze)
    app.command(name="decide")(decide)
    app.command(name="analyse")(analyse)
    app.command(name="catalogue")(catalogue)


def freeze(
    experiment: Annotated[Path, typer.Argument(help="Experiment file (TOML).")],
    seed: Annotated[int | None, typer.Option(help="New base seed; one that no file names.")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change one key. Repeatable.")] = None,
    rules: Annotated[
        list[str] | None, typer.Option("--rule", help="Decision rule to freeze beside the file's own. Repeatable.")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--to", help="Default: plans/frozen of the repository.")] = None,
    predict_with: Annotated[
        str | None, typer.Option("--predict-with", help="KV rules of the predictions. Default: each server's own.")
    ] = None,
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty", help="Freeze beside uncommitted changes.")] = False,
    commit: Annotated[bool, typer.Option("--commit", help="Commit the frozen files, and nothing else.")] = False,
    tag: Annotated[str, typer.Option(help="Tag that commit.")] = "",
    sign: Annotated[bool, typer.Option("--sign", help="Sign the tag.")] = False,
) -> None:
    """Fix plans, predictions, criteria, code and patches in one file, before measuring.

    Example: `harness freeze plans/experiments/configuration.toml --seed 20270101 --commit`
    """
    from typing import get_args

    from harness.prereg import FreezeOptions
    from harness.prereg import freeze as freeze_experiment
    from harness.spec import RulesName, load_toml, parse_experiment

    if predict_with is not None and predict_with not in get_args(RulesName):
        raise SpecError(f"unknown KV rules {predict_with!r}", where="--predict-with", hint=f"Use {get_args(RulesName)}")
    overrides = [*(changes or []), *([f"base_seed={seed}"] if seed is not None else [])]
    spec = parse_experiment(override_table(load_toml(experiment), overrides), where=str(experiment))
    options: Any = {
        "folder": folder,
        "rules": tuple(rules or ()),
        "prediction_rules": predict_with,
        "allows_dirty_tree": allow_dirty,
        "is_committed": commit,
        "tag": tag,
        "is_signed": sign,
    }
    frozen = freeze_experiment(spec, experiment, overrides=overrides, options=FreezeOptions(**options))
    content = frozen.preregistration
    print(f"{frozen.path}")
    print(
        f"  {len(content.plans)} runs, {len(frozen.paths) - 1} plans, {len(content.rules)} rules, seed {spec.base_seed}"
    )
    print(f"  digest {content.digest}")
    if frozen.commit is None:
        print(f"  commit it before the first run: git add {frozen.path} {frozen.path.with_suffix('')} && git commit")
    else:
        print(f"  commit {frozen.commit.sha}")
    print(f"  then: harness run --confirmatory {frozen.path}")


def decide(
    experiment: Annotated[str, typer.Argument(help="Name of an experiment with sealed runs.")],
    runs: RunsOption = Path("runs"),
    rules: Annotated[
        list[str] | None, typer.Option("--rule", help="Rule name or file. Default: frozen, else the experiment's own.")
    ] = None,
    output: FormatOption = ResultFormat.text,
) -> None:
    """Apply decision rules to sealed valid runs: PASS, FAIL, WITHHELD or NOT SUBJECT, with every number used.

    Confirmatory runs are judged by the rules and predictions they were frozen with. Exploratory ones are NOT SUBJECT.
    Exit code 4 when a rule says FAIL.

    Example: `harness decide configuration --runs runs/today`
    """
    from harness.analysis.decide import Outcome
    from harness.analysis.verdicts import Evidence, decide_experiment
    from harness.prereg import check_sealed_runs

    sealed = sealed_runs(runs, experiment)
    frozen = check_sealed_runs(sealed)
    chosen = _chosen_rules(sealed, frozen, rules or [])
    evidence = Evidence(sealed, _predictions(sealed, frozen))
    decisions = decide_experiment(chosen, evidence, is_confirmatory=frozen is not None)
    if output is ResultFormat.json:
        print(json.dumps([_decision_record(decision) for decision in decisions], indent=2))
    else:
        _show(
            decisions, "confirmatory" if frozen is not None else "exploratory", is_full=output is ResultFormat.markdown
        )
    failed = [decision for decision in decisions if decision.outcome is Outcome.FAIL]
    if failed:
        first = failed[0]
        what = f"{len(failed)} of {len(decisions)} decisions are FAIL, first {first.rule} on {first.subject}"
        raise RuleFailedError(what, where=experiment)


def _chosen_rules(sealed: list[SealedRun], frozen: Preregistration | None, names: list[str]) -> list[DecisionRule]:
    """The frozen rules of confirmatory runs, else the named ones; one that differs from its frozen self is refused."""
    from harness.analysis.rules import load_rule
    from harness.analysis.runfacts import experiment_of

    if frozen is None:
        asked = names or list(experiment_of(sealed[0]).rules)
        if not asked:
            raise SpecError("the experiment names no rules", where=sealed[0].experiment, hint="Name one with --rule")
        return [load_rule(name) for name in asked]
    if not names:
        return [entry.rule for entry in frozen.rules]
    chosen: list[DecisionRule] = []
    for name in names:
        rule = load_rule(name)
        entry = frozen.rule_named(rule.name)
        if entry is None or entry.rule != rule:
            what = "was not frozen" if entry is None else "was changed after the freeze"
            raise SpecError(
                f"criterion {rule.name!r} {what}, so it cannot judge confirmatory runs",
                where=name,
                hint="Leave --rule out: the frozen criteria apply",
            )
        chosen.append(entry.rule)
    return chosen


def _predictions(sealed: list[SealedRun], frozen: Preregistration | None) -> Predictions:
    from harness.prereg import predict_runs

    return predict_runs(sealed) if frozen is None else frozen.predictions


def _decision_record(decision: Decision) -> dict[str, Any]:
    from harness.analysis.tabular import interval_record

    return {
        "rule": decision.rule,
        "subject": decision.subject,
        "outcome": decision.outcome.value,
        "label": decision.label,
        "would_be": None if decision.would_be is None else decision.would_be.value,
        "reason": decision.reason,
        "numbers": dict(decision.numbers),
        "intervals": {name: interval_record(interval) for name, interval in decision.intervals.items()},
    }


def _show(decisions: list[Decision], standing: str, *, is_full: bool) -> None:
    from harness.analysis.tabular import cell_text

    print(f"{len(decisions)} decisions on {standing} runs")
    for decision in decisions:
        label = f" {decision.label}" if decision.label else ""
        would_be = f" (would be {decision.would_be.value})" if decision.would_be is not None else ""
        print(f"{decision.outcome.value}{label}{would_be}  {decision.rule}: {decision.subject}")
        print(f"    {decision.reason}")
        if is_full:
            for name, number in decision.numbers.items():
                print(f"    {name}: {cell_text(number)}")


def analyse(
    experiment: Annotated[str, typer.Argument(help="Name of an experiment with sealed runs.")],
    runs: RunsOption = Path("runs"),
    name: Annotated[str, typer.Option("--as", help="Analysis to use instead of the experiment's own.")] = "",
    output: FormatOption = ResultFormat.text,
) -> None:
    """Compute what the experiment asks for: its tables, intervals and notes.

    Example: `harness analyse alignment --runs runs/today --format markdown`
    """
    from harness.analysis.catalogue import analyse as analyse_runs
    from harness.prereg import check_sealed_runs

    sealed = sealed_runs(runs, experiment)
    frozen = check_sealed_runs(sealed)
    result = analyse_runs(sealed, _predictions([run for run in sealed if run.is_valid], frozen), name)
    if output is ResultFormat.json:
        print(result.to_json(), end="")
    elif output is ResultFormat.markdown:
        print(result.to_markdown(), end="")
    else:
        _print_tables(result)


def _print_tables(result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    from harness.analysis.tabular import rows_as_text

    console = Console()
    for table in result.tables:
        shown = Table(*table.columns, header_style="bold", title=f"{table.name}: {table.caption}", title_justify="left")
        for row in rows_as_text(table.rows):
            shown.add_row(*row)
        console.print(shown)
    for name, interval in result.intervals.items():
        console.print(f"{name}: {interval}", highlight=False, soft_wrap=True)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)


def catalogue() -> None:
    """List the experiments that ship, each with its question.

    Example: `harness catalogue`
    """
    from harness.shipped import shipped_folder
    from harness.spec import load_experiment

    folder = shipped_folder("experiments")
    if folder is None:
        raise SpecError("no experiment ships with this installation", hint="Use a checkout: plans/experiments")
    for path in sorted(folder.glob("*.toml")):
        spec = load_experiment(path)
        runs = len(spec.condition) * spec.replicates
        print(f"{spec.name}  ({len(spec.condition)} conditions x {spec.replicates} = {runs} runs)")
        print(f"    {spec.title}")
        print(f"    {spec.question}")
