"""``harness prereg``, ``decide``, ``paper catalogue`` and ``analyse``: criteria fixed before runs, applied after them.

Thin commands; nothing is computed here. A rule that says FAIL ends the process with its own exit code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from harness.cli.addresses import ReplicatesOption, RunsOption, SealedArgument, SetOption, override_table, sealed_runs
from harness.cli.terminal import printable_lines, terminal, time_left
from harness.clock import NS_PER_S, MonotonicClock
from harness.errors import RunInvalidError, SpecError
from harness.kinds import DEFAULT_BACKEND, kind_named
from harness.shipped import find_shipped, shipped_names
from harness.table import cell_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from harness.analysis.decisions.decide import Decision
    from harness.runner import ProgressSink
    from harness.spec import ExperimentSpec


RepositoryOption = Annotated[
    Path | None, typer.Option("--repository", help="Git repository of the freeze. Default: around the runs, or here.")
]
FormatOption = Annotated[
    Literal["text", "markdown", "json"], typer.Option("--format", help="How the result is printed.")
]
# What predicting and analysing the runs of an experiment takes, of what making them took.
ANALYSIS_SHARE = 0.3


def freeze(
    experiment: Annotated[Path, typer.Argument(help="Experiment file (TOML).")],
    seed: Annotated[int | None, typer.Option(help="New base seed; one that no file names.")] = None,
    changes: SetOption = None,
    rules: Annotated[
        list[str] | None, typer.Option("--rule", help="Decision rule to freeze beside the file's own. Repeatable.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder. Default: plans/frozen of the repository.")
    ] = None,
    predict_with: Annotated[
        str | None, typer.Option("--predict-with", help="KV rules of the predictions. Default: each server's own.")
    ] = None,
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty", help="Freeze beside uncommitted changes.")] = False,
    commit: Annotated[bool, typer.Option("--commit", help="Commit the frozen files, and nothing else.")] = False,
    tag: Annotated[str, typer.Option(help="Tag that commit.")] = "",
    sign: Annotated[bool, typer.Option("--sign", help="Sign the tag.")] = False,
    sign_key: Annotated[
        Path | None, typer.Option("--sign-key", help="SSH key that signs the frozen file (ssh-keygen -Y sign).")
    ] = None,
) -> None:
    """Write plans, predictions, criteria and code versions in one file.

    Do this before the first run.

    Example: `harness prereg freeze mine.toml --seed 20270101 --commit`
    """
    from harness.prereg import FreezeOptions
    from harness.prereg import freeze as freeze_experiment
    from harness.spec import experiment_file, experiment_table, parse_experiment
    from harness.stack.rbln.rules.kv_rules import check_rules

    if predict_with is not None:
        try:
            check_rules(predict_with)
        except ValueError as error:
            raise SpecError(str(error), where="--predict-with") from error
    overrides = [*(changes or []), *([f"base_seed={seed}"] if seed is not None else [])]
    experiment = experiment_file(experiment)
    spec = parse_experiment(override_table(experiment_table(experiment), overrides), where=str(experiment))
    options: Any = {
        "folder": folder,
        "rules": tuple(rules or ()),
        "prediction_rules": predict_with,
        "allows_dirty_tree": allow_dirty,
        "is_committed": commit,
        "tag": tag,
        "is_signed": sign,
        "signing_key": sign_key,
    }
    with time_left("predicting") as on_progress:
        frozen = freeze_experiment(
            spec, experiment, overrides=overrides, options=FreezeOptions(**options), on_progress=on_progress
        )
    content = frozen.preregistration
    print(f"{frozen.path}")
    num_plans = len({plan.hash for plan in content.plans})
    print(f"  {len(content.plans)} runs, {num_plans} plans, {len(content.rules)} rules, seed {spec.base_seed}")
    print(f"  digest {content.digest}")
    if frozen.commit is None:
        print(f"  commit it before the first run: git add {frozen.path} {frozen.path.with_suffix('')} && git commit")
    else:
        print(f"  commit {frozen.commit.sha}")
    print(f"  then: harness run --confirmatory {frozen.path}")


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
    Runs whose freeze or ledger does not show what they are decide nothing. Invalid runs are left out.

    Exit codes: 0 no decision is FAIL (WITHHELD and NOT SUBJECT fail nothing), 4 at least one
    is, 2 no such runs or rule, or a rule that was not frozen, 1 records that are damaged or mixed.

    Example: `harness decide demo --rule superiority --runs runs/today`
    """
    from harness.prereg import judge
    from harness.records import origin_of

    sealed = sealed_runs(runs, experiment)
    judgement = judge(sealed, rules or (), repository=repository)
    if output == "json":
        print(json.dumps([_decision_record(decision) for decision in judgement.decisions], indent=2))
    else:
        standing = "confirmatory" if judgement.is_confirmatory else "exploratory"
        num_invalid = sum(not run.is_valid for run in sealed)
        if origin := origin_of(sealed):
            print(origin)
        _show(judgement.decisions, standing, num_invalid, is_full=output == "markdown")
        for abort in judgement.aborts:
            print(f"started and not sealed: {abort}")
    judgement.require_passed()


def _decision_record(decision: Decision) -> dict[str, Any]:
    from harness.analysis.catalogue import interval_record

    return {
        "rule": decision.rule,
        "subject": decision.subject,
        "outcome": decision.outcome.value,
        "label": decision.label,
        "would_be": None if decision.would_be is None else decision.would_be.value,
        "answer": decision.answer,
        "reason": decision.reason,
        "numbers": dict(decision.numbers),
        "intervals": {name: interval_record(interval) for name, interval in decision.intervals.items()},
    }


def _show(decisions: Sequence[Decision], standing: str, num_invalid: int, *, is_full: bool) -> None:

    left_out = f", {num_invalid} invalid runs left out" if num_invalid else ""
    print(f"{len(decisions)} decision{'s' * (len(decisions) != 1)} on {standing} runs{left_out}")
    for decision in decisions:
        if decision.answer:
            print(decision.answer)
        label = f" {decision.label}" if decision.label else ""
        would_be = f" (would be {decision.would_be.value})" if decision.would_be is not None else ""
        print(f"{decision.outcome.value}{label}{would_be}  {decision.rule}: {decision.subject}")
        print(f"    {decision.reason}")
        if is_full:
            for name, number in decision.numbers.items():
                print(f"    {name}: {cell_text(number)}")


def publish(
    experiment: Annotated[str, typer.Argument(help="Name of a frozen experiment.")],
    runs: RunsOption = Path("runs"),
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: `EXPERIMENT.zip`")] = None,
    repository: RepositoryOption = None,
    sign_key: Annotated[Path | None, typer.Option("--sign-key", help="SSH key that signs the checksums.")] = None,
) -> None:
    """Pack a decided experiment in an archive that a stranger can check.

    It holds runs, freeze, ledger, verdict, checksums and, with a key, a signature.

    Example: `harness prereg publish configuration --runs runs/main -o configuration.zip --sign-key ~/.ssh/id_ed25519`
    """
    from harness.prereg import publish as publish_runs

    archive = output or Path(f"{experiment}.zip")
    judgement = publish_runs(sealed_runs(runs, experiment), archive, repository=repository, signing_key=sign_key)
    _show(judgement.decisions, "confirmatory", 0, is_full=False)
    print(f"{archive}\n  a stranger checks it: harness prereg check {archive.name}")


def check_archive(
    archive: Annotated[Path, typer.Argument(help="An archive of `harness prereg publish`.")],
    signers: Annotated[Path | None, typer.Option("--signers", help="ssh's file of allowed signers.")] = None,
) -> None:
    """Check a published archive by what is in it alone.

    Says what it proves, by whom and since when, and what it cannot prove.

    Example: `harness prereg check configuration.zip --signers allowed_signers`
    """
    from harness.prereg import check_published

    checked = check_published(archive, signers)
    _show(checked.judgement.decisions, "confirmatory", 0, is_full=False)
    for abort in checked.judgement.aborts:
        print(f"started and not sealed: {abort}")
    for claim in checked.proven:
        print(f"proven: {claim}")
    for claim in checked.unproven:
        print(f"not proven: {claim}")
    checked.judgement.require_passed()


def analyse(
    experiment: SealedArgument,
    runs: RunsOption = Path("runs"),
    name: Annotated[str, typer.Option("--as", help="Analysis to use instead of the experiment's own.")] = "",
    output: FormatOption = "text",
) -> None:
    """Compute what the experiment asks for: its tables, intervals and notes.

    Example: `harness paper analyse demo --as general --runs runs/today --format markdown`
    """
    from harness.analysis.catalogue import analyse as analyse_runs
    from harness.prereg import check_sealed_runs, predictions_for

    sealed = sealed_runs(runs, experiment)
    frozen = check_sealed_runs(sealed)
    result = analyse_runs(sealed, predictions_for(sealed, frozen), name)
    if output == "json":
        print(result.to_json(), end="")
    elif output == "markdown":
        print(result.to_markdown(), end="")
    else:
        print(result.to_text(terminal().width), end="")


def catalogue(
    perform: Annotated[bool, typer.Option("--run", help="Perform them and write each one's analysis.")] = False,
    only: Annotated[list[str] | None, typer.Option("--only", help="Only this experiment. Repeatable.")] = None,
    backend: Annotated[str, typer.Option(help="Backend for --run.")] = "sim",
    runs: Annotated[Path, typer.Option("--runs", help="Folder for --run.")] = Path("runs/catalogue"),
    replicates: ReplicatesOption = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change one key of each. Repeatable.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Perform only what is not sealed there yet.")] = False,
) -> None:
    """List the experiments of the method, each with its question; or perform them all.

    Each has a page in docs/experiments. With --run every experiment's analysis is written beside its runs, as
    RUNS/BACKEND/NAME.md; then `harness decide NAME --runs RUNS/BACKEND` and `harness paper tables --runs RUNS/BACKEND`.
    Exit code 3 when a run is invalid.

    Example: `harness paper catalogue`
    """
    from harness.spec import experiment_table, parse_experiment

    extra = [*(changes or []), *([f"replicates={replicates}"] if replicates is not None else [])]
    extra += [f'backend="{backend}"'] if perform else []
    paths = _catalogue_files(only or [])
    specs = [parse_experiment(override_table(experiment_table(path), extra), where=str(path)) for path in paths]
    if perform:
        _perform_all(specs, paths, runs / backend, resume=resume)
        return
    for spec in specs:
        num_runs = len(spec.condition) * spec.replicates
        print(f"{spec.name}  ({len(spec.condition)} conditions x {spec.replicates} = {num_runs} runs)")
        print(f"    {printable_lines(spec.title)}")
        print(f"    {printable_lines(spec.question)}")


def _catalogue_files(only: list[str]) -> list[Path]:
    """Files of the experiments that name an analysis; SpecError when a name of ``only`` is none of them."""
    from harness.spec import load_toml

    paths = [find_shipped("experiments", name, what="experiment") for name in only or shipped_names("experiments")]
    if not paths:
        raise SpecError("no experiment ships with this installation", hint="Use a checkout: plans/experiments")
    return [path for path in paths if only or (load_toml(path).get("analysis") and _is_general(path))]


def _is_general(path: Path) -> bool:
    """Whether an experiment can run on any backend; those that are about the real stack cannot."""
    from harness.spec import load_toml

    return not kind_named(load_toml(path).get("backend", DEFAULT_BACKEND)).has_stack


def _perform_all(specs: Sequence[ExperimentSpec], paths: Sequence[Path], runs: Path, *, resume: bool) -> None:
    """Perform every experiment, with the time left; RunInvalidError when a run is invalid."""
    from harness.processes import parallel_map
    from harness.runner.experiment import what_to_do
    from harness.runner.monitor import predicted_work
    from harness.runner.progress import ProgressEvent, RunSealed

    # All are looked at before the first is performed; runs that are sealed are analysed, but take no more time.
    both = {
        spec.name: what_to_do(spec, runs, resume=resume, retry_invalid=False, authorization=None)[:2] for spec in specs
    }
    work = {name: {run.label: predicted_work(run) for run in todo} for name, (_, todo) in both.items()}
    analyses = {name: ANALYSIS_SHARE * sum(map(predicted_work, planned)) for name, (planned, _) in both.items()}
    whole = sum(map(sum, (todo.values() for todo in work.values()))) + sum(analyses.values())
    order, processes = list(range(len(specs))), 1
    # Servers of another kind than the simulator's would disturb each other.
    if all(kind_named(spec.backend).is_virtual for spec in specs):
        processes = None
        # One of little work tells whether sharing is worth it; then those of most, so that the last is a short one.
        order.sort(key=lambda place: -sum(work[specs[place].name].values()) - analyses[specs[place].name])
        order.insert(0, order.pop())
    results: dict[int, tuple[str, int]] = {}
    num_printed, done = 0, 0.0

    def perform(place: int, tell: Callable[[float], None]) -> tuple[str, int]:
        name = specs[place].name

        def on_progress(event: ProgressEvent, /) -> None:
            if isinstance(event, RunSealed):
                tell(work[name][event.label])

        found = _perform(specs[place], runs, str(paths[place]), resume=resume, on_progress=on_progress)
        tell(analyses[name])
        return found

    with time_left("catalogue") as show:

        def on_share(share: float) -> None:
            nonlocal done
            done += share
            show(done / whole)

        for place, found in parallel_map(perform, order, on_share, processes):
            results[order[place]] = found
            while num_printed in results:
                print(results[num_printed][0], flush=True)
                num_printed += 1
    if num_invalid := sum(invalid for _, invalid in results.values()):
        raise RunInvalidError(f"{num_invalid} runs are invalid", where=str(runs), hint="See `harness runs`")


def _perform(
    spec: ExperimentSpec, runs: Path, source: str, *, resume: bool, on_progress: ProgressSink
) -> tuple[str, int]:
    """Perform one experiment and write its analysis beside its runs: what to say of it, and how many are invalid."""
    from harness.analysis.catalogue import analyse as analyse_runs
    from harness.prereg import predictions_for
    from harness.runner import run_experiment

    clock = MonotonicClock()
    began_ns = clock.now_ns()
    outcome = run_experiment(spec, runs_root=runs, spec_source=source, resume=resume, on_progress=on_progress)
    sealed = list(outcome.runs)
    result = analyse_runs(sealed, predictions_for(sealed, None))
    page = runs / f"{spec.name}.md"
    page.write_text(result.to_markdown(), encoding="utf-8")
    num_invalid = len(outcome.invalid_runs)
    seconds = (clock.now_ns() - began_ns) / NS_PER_S
    counted = f"{len(sealed):>3} runs, {num_invalid} invalid, {seconds:6.1f} s"
    lines = [f"{spec.name:<27} {spec.backend:<9} {counted}  {page}"]
    lines += [f"    {run.condition}/{run.replicate}: {'; '.join(run.invalid_reasons)}" for run in outcome.invalid_runs]
    return "\n".join(lines), num_invalid
