"""``harness compare`` and ``gate``: runs against other runs and baselines.

Reads sealed runs, saved baselines and result files of other benchmarks; writes a baseline and summaries for CI.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harness import api
from harness.cli.addresses import RunsOption, SessionTargetOption, TableFormOption, complete_sealed, held_to, valid_runs
from harness.cli.terminal import print_folded, print_tables, print_text, say, show, terminal
from harness.errors import ExitCode, SpecError
from harness.outputs import write_text
from harness.table import Table, TableForm, table_of, with_four_digits

if TYPE_CHECKING:
    from harness.judge.decisions.gate import GateResult, GateRun

STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
GateForm = Literal["text", "markdown", "json"]


def compare(
    places: Annotated[
        list[str],
        typer.Argument(
            help="FOLDER, FOLDER/EXPERIMENT or FOLDER/EXPERIMENT/CONDITION; a name below --runs; an experiment's file; "
            "or result files of vLLM bench, AIPerf or GuideLLM."
        ),
    ],
    baseline: Annotated[
        str | None, typer.Option(help="Compare with this place instead: a condition, or conditions of the same names.")
    ] = None,
    session_target: SessionTargetOption = None,
    runs: RunsOption = Path("runs"),
    form: TableFormOption = TableForm.text,
) -> None:
    """Compare conditions across experiments, folders and dates.

    Below 1 is less.

    A ratio is always condition over baseline, by the baselines that the experiment names. Runs of the same drawn plan
    are paired; where the inputs differ, "paired" says no. Intervals and p-values are adjusted over the comparisons of
    one measure (Bonferroni). Invalid runs are left out.

    One side may be result files of another benchmark with per-request records, or a folder of them: its figures only,
    never paired (docs/guides/export.md).

    Example: `harness compare runs/tuesday/demo --baseline runs/monday/demo --format csv`
    """
    targets = None if session_target is None else {"session_s": session_target}
    table = api.compare(*dict.fromkeys(places), baseline=baseline, runs_root=runs, targets=targets)
    if form in (TableForm.csv, TableForm.json):
        print_tables([table], form)
        return
    rounded = with_four_digits(table, ("mean", "baseline_mean"))
    if form is TableForm.text:
        print_tables(_by_pair(rounded), form, remarks=[""])
        print_folded(table.explanation)
    else:
        print_tables([rounded], form)


def _by_pair(table: Table) -> list[Table]:
    """A table per pair, which fits a narrow terminal: a row per measure."""
    from itertools import groupby

    from harness.analysis.stats import GIVEN_COSTS

    shown = ("measure", "mean", "baseline_mean", "ratio", "low", "high", "p_adjusted", "verdict")
    named = ("condition", "baseline", "paired", "runs", "source")
    pairs: list[Table] = []
    for (condition, base, paired, runs, source), of_pair in groupby(
        table.records(), lambda row: tuple(row[name] for name in named)
    ):
        how = "paired by plan" if paired else "not paired: other inputs"
        name = f"{condition} against {base} ({how}, {runs} runs, {source})"
        rows = list(of_pair)
        notes = {row["note"] for row in rows}
        about_all = f"{notes.pop()}." if len(notes) == 1 and notes != {""} else ""
        given = [str(row["measure"]) for row in rows if str(row["note"]).endswith(GIVEN_COSTS.removeprefix(", "))]
        about_all = about_all or (f"{', '.join(given)}: interval{GIVEN_COSTS}." if given else "")
        pairs.append(table_of(name, about_all, ({name: row[name] for name in shown} for row in rows)))
    return pairs


def gate(
    new: Annotated[
        str,
        typer.Argument(
            metavar="NEW",
            help="Sealed runs: of an experiment (its name, file or folder), or of a condition.",
            autocompletion=complete_sealed,
        ),
    ],
    against: Annotated[
        str, typer.Option(metavar="BASE", help="The baseline: sealed runs, or a folder that --save-baseline wrote.")
    ] = "",
    save_baseline: Annotated[
        Path | None, typer.Option(help="Write NEW as a baseline to this folder; nothing is judged.")
    ] = None,
    figures: Annotated[
        list[str] | None,
        typer.Option(
            "--figure", help="Judge only this figure. Repeatable. Default: each with a limit that the runs can carry."
        ),
    ] = None,
    thresholds: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-above",
            metavar="FIGURE=RATIO",
            help="Largest accepted ratio to the baseline. Repeatable. Default: cost, tpot, reuse and padding 1.01, "
            "ttft_p50 1.05, ttft_p99 1.10; the others have none.",
        ),
    ] = None,
    session_target: SessionTargetOption = None,
    alpha: Annotated[
        float, typer.Option(help="Of a false pass, and of a false worse, over all looks.", min=1e-6, max=0.49)
    ] = 0.05,
    power: Annotated[float, typer.Option(help="With which more blocks would tell.", min=0.01, max=0.999)] = 0.9,
    look: Annotated[
        int, typer.Option(help="How often you judged these runs, this time included: 2 after more blocks.", min=1)
    ] = 1,
    summary: Annotated[
        Path | None, typer.Option(help=f"Write Markdown to this file; ${STEP_SUMMARY} is appended to.")
    ] = None,
    form: Annotated[GateForm, typer.Option("--format", help="How the result is printed.")] = "text",
    runs: RunsOption = Path("runs"),
    force: Annotated[bool, typer.Option("--force", help="Replace a baseline that is there.")] = False,
) -> None:
    """Judge whether new runs are worse than a baseline.

    Runs of the same plan are paired. A figure passes when its ratio is shown to stay below the limit, and is worse when
    it is shown to lie above it; anything else is "cannot tell", never a pass. Then run more blocks with --resume and
    ask the gate again with --look 2: each look spends a share of alpha (docs/guides/gate.md).

    Exit codes: 0 pass, 4 worse, 5 cannot tell.

    Example: `harness gate demo --against baselines/demo --fail-above ttft_p50=1.1 --summary gate.md`
    """
    if (save_baseline is None) == (not against):
        raise SpecError(
            "says neither or both of --against and --save-baseline",
            where="harness gate",
            hint="Judge with --against BASE, or write a baseline with --save-baseline FOLDER",
        )
    if save_baseline is not None and session_target is not None:
        hint = "Set it in the experiment ([slo] session_s), and run that"
        raise SpecError("a baseline has the targets of its experiment", where="--session-target", hint=hint)
    if save_baseline is not None:
        from harness.present.export.baseline import save_baseline as save

        for path in save(save_baseline, valid_runs(new, runs), may_replace=force):
            print_text(f"wrote {path}")
        return
    from harness.judge.decisions.gate import GateVerdict, gate_policy, judge, same_run
    from harness.present.report.gate import gate_markdown

    ours, theirs = (_side(address, runs, session_target) for address in (new, against))
    if same := same_run(ours, theirs):
        raise SpecError(
            f"both sides hold the same runs (first {same})",
            where="harness gate",
            hint="Name the runs of another server, or of another day, as --against",
        )
    result = judge(ours, theirs, gate_policy(figures or [], thresholds or [], alpha, power, look))
    _print(result, form)
    if summary is not None:
        kept = summary.read_text(encoding="utf-8") if str(summary) == os.environ.get(STEP_SUMMARY) else ""
        write_text(summary, kept + gate_markdown(result))
    codes = {GateVerdict.PASS: ExitCode.PASS, GateVerdict.WORSE: ExitCode.RULE_FAILED}
    raise typer.Exit(int(codes.get(result.verdict, ExitCode.CANNOT_TELL)))


def _side(address: str, runs: Path, session_target_s: float | None) -> list[GateRun]:
    from harness.judge.decisions.gate import gate_run
    from harness.present.export.baseline import is_baseline, load_baseline

    place = Path(address)
    if is_baseline(place):
        return load_baseline(place)
    return [gate_run(run) for run in held_to(valid_runs(address, runs), session_target_s)]


def _print(result: GateResult, form: GateForm) -> None:
    from harness.present.report.gate import gate_json, gate_lines, gate_markdown, headline, shown_tables

    if form != "text":
        print_text(gate_json(result) if form == "json" else gate_markdown(result), end="")
        return
    out = terminal()
    say(out, headline(result), markup=False)
    for table in shown_tables(result):
        out.print()
        show(out, table)
    out.print()
    for line in gate_lines(result):
        say(out, line, markup=False)
