"""``harness plan`` and ``harness trace``: plans, tool waits and recorded agents; runs written as traces.

Writes only the files that the commands name; prints counts, never text of a recording.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.addresses import ExperimentArgument, RunsArgument, RunsOption, named_runs, output_option
from harness.cli.terminal import new_console, print_facts, print_folded, print_text, printable_lines
from harness.errors import SpecError
from harness.shipped import find_shipped

if TYPE_CHECKING:
    from harness.model.traces.account import ReadNotes, ReadOptions
    from harness.model.traces.recording import TraceHead


def plan_build(
    experiment: ExperimentArgument,
    output: Annotated[Path, output_option("Folder for the plan files.")] = Path("plans/frozen"),
) -> None:
    """Write every plan an experiment will replay, each named by its hash.

    Example: `harness plan build demo -o plans/demo`
    """
    from harness.model.experiment import resolve
    from harness.model.plan.files import save_plan
    from harness.model.spec import load_experiment
    from harness.runner.experiment import checked

    written: set[str] = set()
    for run in checked(resolve(load_experiment(experiment))):
        if run.plan.hash not in written:
            written.add(run.plan.hash)
            print_folded(f"{save_plan(run.plan, output)}  replicate {run.replicate}, {run.plan.treatment}")


def plan_show(path: Annotated[Path, typer.Argument(help="A plan file.")]) -> None:
    """Check a plan file against its hash and describe it.

    Example: `harness plan show plan.jsonl`
    """
    from harness.model.plan.build import describe
    from harness.model.plan.files import read_plan

    if not path.is_file():
        raise SpecError(
            "is no plan file", where=str(path), hint=f"Write those of an experiment: harness plan build {path}"
        )
    print_facts(describe(read_plan(path)))


def waits_show(
    name: Annotated[str, typer.Argument(help="A shipped distribution, or a file.")] = "tracelab-v0.0.2",
    cap_s: Annotated[float, typer.Option(min=0.001, help="Waits are cut at this many seconds.")] = 60.0,
) -> None:
    """Quantiles, mean and capped share of a tool-wait distribution.

    Example: `harness plan waits show tracelab-v0.0.2`
    """
    from harness.model.plan.waits import load_waits

    waits = load_waits(name)
    mean_s, std_s = waits.moments_s(cap_s)
    print_folded(f"{waits.name}: {len(waits.tools)} tools, {waits.total_calls} calls; capped at {cap_s:g} s")
    for u in (0.25, 0.5, 0.75, 0.9, 0.95):
        print_text(f"  p{u * 100:<4.0f} {min(waits.mixture_quantile_ms(u) / 1000, cap_s):10.4f} s")
    print_text(f"  mean {mean_s:10.4f} s   standard deviation {std_s:.4f} s")
    print_text(f"  below 1 s {100 * waits.cdf(1000.0):.2f} %   capped {100 * waits.capped_share(cap_s):.2f} %")


BlockTokensOption = Annotated[
    int, typer.Option(min=0, help="Tokens of a named block, where the format does not say; 0: its usual size.")
]
TimeUnitOption = Annotated[
    str, typer.Option(help="Unit of bare numbers of time: s, ms, us or ns; default: the format's own.")
]
RecordedWaitsOption = Annotated[
    str,
    typer.Option(
        help="Wait distribution for waits that a recording does not say: shipped, or a file; default: tracelab-v0.0.2."
    ),
]
LengthsOption = Annotated[
    str, typer.Option(help="What input_length counts in sessions without names of blocks: new or whole.")
]
SinceOption = Annotated[
    str, typer.Option("--since", metavar="TIME", help="Sessions that begin so long after the first: 90s, 5min, 26h.")
]
UntilOption = Annotated[
    str, typer.Option("--until", metavar="TIME", help="Sessions that begin before so long after the first.")
]


def trace_import(
    sources: Annotated[
        list[Path], typer.Argument(help="Recorded files, folders that are searched for them, or - for a pipe.")
    ],
    output: Annotated[Path, output_option("The trace file to write (.jsonl).")],
    kind: Annotated[
        str, typer.Option("--format", help="Format of the files; `auto` looks at them. All: harness trace formats.")
    ] = "auto",
    name: Annotated[str, typer.Option(help="Name of the trace; default: the file's stem.")] = "",
    block_tokens: BlockTokensOption = 0,
    time_unit: TimeUnitOption = "",
    waits: RecordedWaitsOption = "",
    lengths: LengthsOption = "",
    since: SinceOption = "",
    until: UntilOption = "",
    force: Annotated[bool, typer.Option("--force", help="Replace another trace of this name.")] = False,
) -> None:
    """Read recorded agents and write one trace: counts, times and waits only, no text, path or command.

    What a format does not promise is checked: the import refuses, or says what it dropped and what it assumed.

    Example: `harness trace import ~/.claude/projects -o my-agents.jsonl`
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from harness.inputs import standard_input_as_file
    from harness.model.traces.importing import check_new, import_trace
    from harness.model.traces.recording import is_trace

    check_trace_format(kind)
    options = read_options(block_tokens, time_unit, waits, lengths, since, until)
    if not is_trace(output):
        check_new(output, may_replace=force)
    columns, console = (BarColumn(), DownloadColumn(), TimeRemainingColumn()), new_console(stderr=True)
    with standard_input_as_file() if Path("-") in sources else nullcontext(Path("-")) as piped:
        files = [piped if source == Path("-") else source for source in sources]
        total = sum(path.stat().st_size for source in files for path in _files(source))
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            head, notes = import_trace(
                files,
                output,
                name=name or output.stem,
                kind=kind,
                progress=lambda done: bar.advance(task, done),
                options=options,
                may_replace=force,
            )
    for line in import_notes(output, head, notes):
        print_folded(line)
    _show(str(output))


def read_options(
    block_tokens: int, time_unit: str, waits: str, lengths: str, since: str = "", until: str = ""
) -> ReadOptions:
    """What a person says of recordings that do not say it; SpecError for an unknown unit of time or kind of length."""
    from harness.clock import NS_PER_S
    from harness.model.spec.sections import seconds_of
    from harness.model.traces.account import TIME_UNITS_NS, ReadOptions
    from harness.model.traces.recording import DEFAULT_WAITS

    units = {"": 0, **TIME_UNITS_NS}
    if time_unit not in units:
        raise SpecError(f"unknown unit {time_unit!r}", where="--time-unit", hint="Use s, ms, us or ns")
    if lengths not in ("", "new", "whole"):
        raise SpecError(f"unknown kind of length {lengths!r}", where="--lengths", hint="Use new or whole")
    spans_s = {"--since": seconds_of(since or "0s"), "--until": seconds_of(until or "0s")}
    for option, seconds in spans_s.items():
        if seconds is None:
            what = f"{since if option == '--since' else until!r} is no time"
            raise SpecError(what, where=option, hint="Write 90s, 5min or 26h after the first session")
    since_ns, until_ns = (round((seconds or 0) * NS_PER_S) for seconds in spans_s.values())
    if until and until_ns <= since_ns:
        raise SpecError(f"{until} is not after --since", where="--until", hint="Both count from the first session")
    return ReadOptions(block_tokens, units[time_unit], waits or DEFAULT_WAITS, lengths, since_ns, until_ns)


def trace_formats(name: Annotated[str, typer.Argument(help="A format; without, all of them.")] = "") -> None:
    """What each format that is read does not promise, and what the import does then.

    Example: `harness trace formats mooncake`
    """
    from harness.model.traces.importing import TRACE_FORMATS

    check_trace_format(name or "auto")
    for each, form in TRACE_FORMATS.items():
        if name not in ("", "auto", each):
            continue
        print_folded(f"{each}: {form.description}")
        if form.held_to:
            print_folded(f"  held to: {form.held_to}; rows of a newer release are labelled")
        for line in form.not_promised:
            print_folded(f"  not promised: {line}")
        for kind, reason in form.passed.items():
            print_folded(f"  passed over: {kind}: {reason}")


def import_notes(output: Path, head: TraceHead, notes: ReadNotes) -> Iterator[str]:
    """What an import read, left out and assumed, a line each."""

    yield f"{output}: {head.source_format}, {notes.num_rows} rows read"
    yield "  " + ", ".join(f"{count} {kind}" for kind, count in notes.rows.items())
    for what, counts in (("unknown", notes.unknown), ("broken", notes.broken), ("dropped", notes.dropped + notes.left)):
        for reason, count in counts.most_common():
            yield f"  {what}: {count} x {reason}, first at {printable_lines(notes.first_at[reason])}"
    for label in head.labels:
        yield f"  assumed: {printable_lines(label)}"


def check_trace_format(kind: str) -> None:
    """Raises SpecError for a format that no reader knows."""
    from harness.model.traces.importing import TRACE_FORMATS

    if kind != "auto" and kind not in TRACE_FORMATS:
        raise SpecError(f"unknown format {kind!r}", where="--format", hint=f"Use auto, {', '.join(TRACE_FORMATS)}")


def _files(source: Path) -> list[Path]:
    return [path for path in source.rglob("*") if path.is_file()] if source.is_dir() else [source] * source.is_file()


def trace_show(
    trace: Annotated[str, typer.Argument(help="A trace file, or a shipped trace by name.")],
    picture: Annotated[Path | None, typer.Option(help="Also draw it: .svg, .png or .pdf.")] = None,
    max_context: Annotated[
        int, typer.Option(min=0, help="Also say what fits so many tokens of prompt and answer.")
    ] = 0,
    scale: Annotated[str, typer.Option(help="With every length divided, as workload.scale: 1/k.")] = "1",
    everything: Annotated[
        bool, typer.Option("--all", help="All lines, each whole; else one screen of 24 x 80.")
    ] = False,
) -> None:
    """A trace on one screen: lengths, waits and ceilings; what was assumed, estimated and dropped; how to replay it.

    Example: `harness trace show coding-agent --max-context 8000 --picture coding-agent.svg`
    """
    _show(trace, is_whole=everything)
    if max_context or scale != "1":
        _show_what_fits(trace, max_context, scale)
    if picture is not None:
        from harness.model.traces.recording import load_trace
        from harness.present.report.trace_picture import draw_trace

        draw_trace(load_trace(trace), picture)
        print_folded(f"wrote {picture}")


def trace_export(
    name: RunsArgument,
    output: Annotated[Path, output_option("The file to write.")],
    form: Annotated[str, typer.Option("--format", help="agentic-mooncake, otel or csv.")] = "agentic-mooncake",
    runs: RunsOption = Path("runs"),
) -> None:
    """Write one sealed run as a trace that others replay; nothing of a prompt is in it.

    Example: `harness trace export demo/base-waits/0 --format otel -o spans.json --runs runs/today`
    """
    from harness.outputs import write_atomic
    from harness.present.export.traces import export_trace

    found = named_runs(name, runs)
    if len(found) > 1:
        hint = f"Name one of {', '.join(run.label for run in found)}"
        raise SpecError(f"{len(found)} runs, and a trace is of one", where=" ".join(name), hint=hint)
    write_atomic(output, [export_trace(found[0], form)], what="the trace")
    print_folded(f"wrote {output}")


def _show_what_fits(trace: str, max_context: int, scale: str) -> None:
    """What a plan with this scale and context takes of the trace, and what it leaves out."""
    from harness.model.experiment import build_plan
    from harness.model.spec import WorkloadSpec

    given = {"source": "trace", "trace": trace, "scale": scale, "max_context_tokens": max_context}
    plan = build_plan(WorkloadSpec.from_table(given, where="--scale, --max-context"), 0, 0)
    print_folded(f"at scale {scale}: {plan.num_requests} requests in {plan.num_sessions} sessions")
    print_folded(f"  left out: {plan.provenance['left_out'] or 'nothing'}")


# A terminal's usual size; the last line is the next prompt's.
SCREEN_LINES, SCREEN_COLUMNS, KEY_WIDTH = 24, 80, 16


def _show(trace: str, *, is_whole: bool = False) -> None:
    """A trace's facts, what its import changed, and the command that replays it; on one screen, or the whole."""
    from harness.model.traces.recording import changes_at_import, describe_trace, open_trace

    path = Path(trace) if Path(trace).is_file() else find_shipped("traces", trace, what="trace")
    with open_trace(path) as reader:
        facts, name = describe_trace(reader), reader.head.name
        changes = changes_at_import(reader.head)
    parts = {key: [printable_lines(value)] for key, value in facts.items()}
    parts |= {kind: [printable_lines(each) for each in reasons or ["nothing"]] for kind, reasons in changes.items()}
    # A name that ``harness init`` takes, for a trace of any name.
    experiment = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:20].strip("-") or "replay"
    parts["replay"] = [shlex.join(["harness", "init", experiment, "--from", trace])]
    if not is_whole:
        _cut_to_screen(parts, changes, "... all of it: " + shlex.join(["harness", "trace", "show", trace, "--all"]))
    for key, lines in parts.items():
        for place, line in enumerate(lines):
            print_text(f"{'' if place else key:<{KEY_WIDTH}}{line}")


def _cut_to_screen(parts: dict[str, list[str]], kinds: Collection[str], note: str) -> None:
    """Shorten the longest of these kinds, line by line, until all parts fit a screen; each keeps a line."""
    width, is_cut = SCREEN_COLUMNS - KEY_WIDTH, False
    wrap = textwrap.TextWrapper(width - len(" ..."), subsequent_indent="  ").wrap
    for key, lines in parts.items():
        if key in kinds:
            parts[key] = [part for line in lines for part in wrap(line)]
        elif key != "replay":
            parts[key] = [line if len(line) <= width else line[: width - 3] + "..." for line in lines]
    while sum(map(len, parts.values())) + is_cut >= SCREEN_LINES:
        longest = max(kinds, key=lambda kind: len(parts[kind]))
        is_cut = True
        parts[longest] = [*parts[longest][:-2], parts[longest][-2].rstrip(" .") + " ..."]
    if is_cut:
        parts[""] = [note]
