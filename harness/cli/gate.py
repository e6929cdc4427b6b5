"""``harness gate``: are new runs worse than a baseline by more than a margin?

Reads sealed runs and baselines; writes a baseline and summaries for CI.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harness.cli.addresses import RunsOption, complete_sealed, valid_runs
from harness.cli.terminal import terminal
from harness.errors import ExitCode, SpecError
from harness.outputs import write_text
from harness.table import to_text

if TYPE_CHECKING:
    from harness.analysis.decisions.gate import GateResult, GateRun

STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
GateForm = Literal["text", "markdown", "json"]


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
        Path | None, typer.Option("--save-baseline", help="Write NEW as a baseline to this folder; nothing is judged.")
    ] = None,
    figures: Annotated[
        list[str] | None,
        typer.Option("--figure", help="Judge only this figure. Repeatable. Default: each that was observed."),
    ] = None,
    thresholds: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-above",
            metavar="FIGURE=RATIO",
            help="Largest accepted ratio to the baseline. Repeatable. Default: cost, tpot, reuse and padding 1.01, "
            "ttft_p50 1.05, ttft_p99 1.10.",
        ),
    ] = None,
    alpha: Annotated[float, typer.Option(help="Of a false pass, and of a false worse.", min=1e-6, max=0.49)] = 0.05,
    power: Annotated[float, typer.Option(help="With which more blocks would tell.", min=0.01, max=0.999)] = 0.9,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML to this file.")] = None,
    summary: Annotated[
        Path | None,
        typer.Option("--summary", help=f"Write Markdown to this file; ${STEP_SUMMARY} is appended to."),
    ] = None,
    form: Annotated[GateForm, typer.Option("--format", help="How the result is printed.")] = "text",
    runs: RunsOption = Path("runs"),
    force: Annotated[bool, typer.Option("--force", help="Replace a baseline that is there.")] = False,
) -> None:
    """Judge whether new runs are worse than a baseline.

    Runs of the same plan are paired. A figure passes when its ratio is shown to stay below the limit, and is worse when
    it is shown to lie above it; anything else is "cannot tell", never a pass (docs/gate.md).

    Exit codes: 0 pass, 4 worse, 5 cannot tell.

    Example: `harness gate demo --against baselines/demo --fail-above ttft_p50=1.1 --summary gate.md`
    """
    if (save_baseline is None) == (not against):
        raise SpecError(
            "says neither or both of --against and --save-baseline",
            where="harness gate",
            hint="Judge with --against BASE, or write a baseline with --save-baseline FOLDER",
        )
    if save_baseline is not None:
        from harness.export.baseline import save_baseline as save

        for path in save(save_baseline, valid_runs(new, runs), may_replace=force):
            print(f"wrote {path}")
        return
    from harness.analysis.decisions.gate import GateVerdict, gate_policy, judge
    from harness.report.gate import gate_junit, gate_markdown

    policy = gate_policy(figures or [], thresholds or [], alpha, power)
    result = judge(_side(new, runs), _side(against, runs), policy)
    _print(result, form)
    if junit is not None:
        write_text(junit, gate_junit(result))
    if summary is not None:
        kept = summary.read_text(encoding="utf-8") if str(summary) == os.environ.get(STEP_SUMMARY) else ""
        write_text(summary, kept + gate_markdown(result))
    codes = {GateVerdict.PASS: ExitCode.PASS, GateVerdict.WORSE: ExitCode.RULE_FAILED}
    raise typer.Exit(int(codes.get(result.verdict, ExitCode.CANNOT_TELL)))


def _side(address: str, runs: Path) -> list[GateRun]:
    from harness.analysis.decisions.gate import gate_run
    from harness.export.baseline import is_baseline, load_baseline

    place = Path(address)
    return load_baseline(place) if is_baseline(place) else [gate_run(run) for run in valid_runs(address, runs)]


def _print(result: GateResult, form: GateForm) -> None:
    from rich.text import Text

    from harness.report.gate import gate_json, gate_lines, gate_markdown, shown_table

    if form != "text":
        print(gate_json(result) if form == "json" else gate_markdown(result), end="")
        return
    out = terminal()
    out.print(Text(to_text(shown_table(result), out.width)), soft_wrap=True, end="")
    for line in gate_lines(result):
        out.print(Text(line), soft_wrap=True)
