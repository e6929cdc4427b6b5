"""``harness init``: an experiment file to begin with. It asks no question and starts no server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from harness.cli.doctor import DEFAULT_WAIT, WaitOption, seconds_to_wait
from harness.cli.inputs import BlockTokensOption, LengthsOption, RecordedWaitsOption, TimeUnitOption, read_options
from harness.cli.terminal import print_folded, print_with_comment
from harness.errors import SpecError
from harness.kinds import DEFAULT_BACKEND, KINDS, kind_named
from harness.outputs import write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from harness.model.experiment import PlannedRuns
    from harness.model.traces.account import ReadOptions
    from harness.model.traces.recording import TraceFile
    from harness.runner.backends.base import FirstExperiment, Line

# What two drawn requests of a session can take together, rounded up.
DRAWN_TOKENS = 2_560
AGENTS_AT_A_TIME = 8
# The kind of server that --for measures: somebody else started it.
ATTACHED = next(kind.name for kind in KINDS.values() if not kind.is_restarted)


@dataclass(frozen=True)
class Workload:
    """The lines of [workload]. slot_tokens: longest request that it needs room for; 0: the default's.

    num_at_once: agents that it lets run at a time.
    """

    lines: tuple[Line, ...]
    slot_tokens: int = 0
    notes: tuple[str, ...] = ()
    num_at_once: int = AGENTS_AT_A_TIME


def init(
    name: Annotated[str, typer.Argument(help="Name of the experiment; its file becomes `NAME.toml`.")] = "mine",
    backend: Annotated[str, typer.Option(help=f"What is measured: {', '.join(KINDS)}.")] = "",
    source: Annotated[
        str,
        typer.Option("--from", metavar="FILE", help="Replay recorded agents, as `harness trace import` reads them."),
    ] = "",
    block_tokens: BlockTokensOption = 0,
    time_unit: TimeUnitOption = "",
    waits: RecordedWaitsOption = "",
    lengths: LengthsOption = "",
    urls: Annotated[
        list[str] | None,
        typer.Option(
            "--for", metavar="URL", help="Measure this server: it is asked what it is. Twice: compare two servers."
        ),
    ] = None,
    api_key_env: Annotated[str, typer.Option(help="With --for: environment variable with the server's key.")] = "",
    wait: WaitOption = DEFAULT_WAIT,
    slots: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Compare with this many KV slots. Modelled servers only.")
    ] = None,
    buckets: Annotated[
        str, typer.Option(metavar="1,2,4,6,8", help="Compare with these compiled batch sizes. Modelled servers only.")
    ] = "",
) -> None:
    """Write an experiment file to begin with, a comment on each line.

    With --from a quick simulation chooses the change of slots or sizes that fits the recording. With --for twice the
    file compares two servers on the same plans.

    Example: `harness init six-or-eight --buckets 1,2,4,6,8`
    """
    if not source and (block_tokens or time_unit or waits or lengths):
        hint = "Name the recordings with --from, or leave these options out"
        raise SpecError("goes with --from", where="--block-tokens, --time-unit, --waits, --lengths", hint=hint)
    options, servers = read_options(block_tokens, time_unit, waits, lengths), tuple(urls or ())
    asked = Asked(backend, servers, source, api_key_env, seconds_to_wait(wait), options)

    def changed(draft: Draft) -> Draft:
        if slots is not None or buckets:
            return _with_change(draft, slots, _sizes(buckets))
        return _fitted(draft) if source and len(servers) < 2 else draft

    name = name.removesuffix(".toml")
    path, start = Path(f"{name}.toml"), write_experiment(name, asked, changed).start
    print_folded(f"wrote {path}. Next:")
    commands = {
        start.needs: "comes first",
        f"harness simulate {path}" if start.has_costs else "": "predicts it, in seconds",
        f"harness run {path} --dry-run": "checks what it needs and starts nothing",
        f"harness run {path} --runs runs/{name}": "runs it and writes the report",
    }
    width = max(map(len, commands))
    for command, meaning in commands.items():
        if command:
            print_with_comment(f"  {command:<{width}}", meaning, gap=2)


@dataclass(frozen=True)
class Draft:
    """The experiment that is being written. kind: its backend."""

    name: str
    kind: str
    start: FirstExperiment
    workload: Workload

    @property
    def text(self) -> str:
        """The file."""
        return _text(self.name, self.kind, self.start, self.workload)

    def planned(self, replicates: int = 1) -> PlannedRuns:
        """Its first runs; SpecError where the file would be refused."""
        from harness.model.experiment import resolve
        from harness.model.spec import parse_experiment
        from harness.model.spec.base import tomllib

        spec = parse_experiment(tomllib.loads(self.text), where=f"{self.name}.toml")
        return resolve(spec.model_copy(update={"replicates": replicates}))

    @property
    def is_modelled(self) -> bool:
        """Whether a change of slots or sizes takes no other artifact and no other server."""
        from harness.runner.backends.base import MORE_SLOTS

        return self.start.other == MORE_SLOTS

    def asking(self, question: str, other: Sequence[Line], note: str = "") -> Draft:
        """The draft with another question, and ``other`` as the lines of its second condition."""
        notes = (*self.workload.notes, note) if note else self.workload.notes
        start = replace(self.start, question=question, other=tuple(other))
        return replace(self, start=start, workload=replace(self.workload, notes=notes))


class Asked(NamedTuple):
    """What an experiment is written for: a backend, or servers that run, and drawn or recorded sessions.

    wait_s: for servers that are starting. options: of the import of recordings.
    """

    backend: str = ""
    urls: tuple[str, ...] = ()
    source: str = ""
    api_key_env: str = ""
    wait_s: float = 0.0
    options: ReadOptions | None = None


def write_experiment(name: str, asked: Asked, changed: Callable[[Draft], Draft]) -> Draft:
    """Write ``NAME.toml``, and its trace where one is imported; nothing where something is wrong.

    changed: what is asked of the draft besides. Raises SpecError where the file is there already, or what it asks
    cannot be measured, ServerError where a server cannot.
    """
    path, imported = _new_file(name), Path(f"{name}.jsonl")
    is_new = not imported.exists()
    try:
        draft = changed(_draft(name, asked))
        _check(draft, is_running=bool(asked.urls))
    except BaseException:
        # The trace of a file that is not written would be in the way of the next try.
        if is_new:
            imported.unlink(missing_ok=True)
        raise
    write_text(path, draft.text)
    for note in draft.workload.notes:
        print_folded(note)
    return draft


def to_be_tuned(draft: Draft) -> Draft:
    """The draft with what runs today alone: one condition."""
    return draft.asking("Which configuration serves these sessions at the lowest cost?", ())


def _draft(name: str, asked: Asked) -> Draft:
    """The first experiment of a server or a backend, on drawn or recorded sessions."""
    from harness.cli.first_servers import experiment_on
    from harness.model.traces.account import ReadOptions
    from harness.runner.backends import backend_named

    kind = _kind(asked)
    start = backend_named(kind).first_experiment
    if asked.urls:
        start = experiment_on(asked.urls, asked.api_key_env, asked.wait_s)
    if not asked.source:
        return Draft(name, kind, start, _drawn(start))
    return Draft(name, kind, start, _recorded(asked.source, name, start, asked.options or ReadOptions()))


def _check(draft: Draft, *, is_running: bool) -> None:
    """Raise what ``harness run --dry-run`` would. is_running: the server of the file can be asked now."""
    from harness.runner.experiment import checked, refuse_what_is_missing

    planned = checked(draft.planned())
    if is_running:
        refuse_what_is_missing(planned.runs)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.strip("{}[] ").split(",") if part.strip())
    except ValueError as error:
        raise SpecError(f"{text!r} is no list of sizes", where="--buckets", hint="Write 1,2,4,6,8") from error


def _with_change(draft: Draft, slots: int | None, sizes: Sequence[int], note: str = "") -> Draft:
    """The draft with this change as its other condition."""
    option = "--buckets" if slots is None else "--slots"
    if not draft.is_modelled:
        raise SpecError(
            f"{draft.kind} has no change of slots or sizes that a condition alone can make",
            where=option,
            hint="Compile or start another server for it, and name that in a condition: harness explain server",
        )
    parts = [f"{slots} KV slots"] * (slots is not None) + [f"the sizes {list(sizes)}"] * bool(sizes)
    name = "-".join([f"{slots}-slots"] * (slots is not None) + [f"{len(sizes)}-sizes"] * bool(sizes))
    lines: list[Line] = [("[[condition]]", "what it changes: harness explain server"), (f'name = "{name}"', "")]
    lines += [(f"server.kv_slots = {slots}", "")] * (slots is not None)
    lines += [(f"server.decode_buckets = {list(sizes)}", "compiled batch sizes")] * bool(sizes)
    changed = draft.asking(f"Do {' and '.join(parts)} lower the cost of these agents?", lines, note)
    (base,), (other,) = changed.planned().by_condition.values()
    if base.server.shape == other.server.shape:
        raise SpecError(
            f"the baseline has {' and '.join(parts)} already", where=option, hint="Name another number, or other sizes"
        )
    return changed


def _fitted(draft: Draft) -> Draft:
    """The draft with the change that fits its recording."""
    return _with_best_change(draft) if draft.is_modelled else _with_a_difference(draft)


def _with_best_change(draft: Draft) -> Draft:
    """With the change that a quick search on the recording predicts to pay most."""
    from harness.tune.explore import QUICK, explore
    from harness.tune.hint import question_of_run
    from harness.tune.plans import MARGIN

    (run,) = draft.planned().by_condition["base"]
    try:
        found = explore(question_of_run(run), QUICK)
    except SpecError:
        # More sessions than a quick search takes.
        return draft
    if (proposal := found.smallest) is None:
        least = f"{100 * MARGIN:g} %"
        note = f"simulated: no change of slots or sizes saves {least} on it; the file compares eight slots with twelve"
        return draft.asking(draft.start.question, draft.start.other, note)
    setup, base = proposal.setup, found.baseline
    sizes = () if setup.decode_buckets == base.decode_buckets else setup.decode_buckets
    slots = setup.kv_slots if setup.kv_slots != base.kv_slots else None
    return _with_change(draft, slots, sizes, f"simulated: {proposal.sentence}")


def _with_a_difference(draft: Draft) -> Draft:
    """With fewer agents at a time where no agent of the recording waits; alone where there is one agent."""
    (base,), (other,) = draft.planned().by_condition.values()
    if base.plan.sessions != other.plan.sessions:
        return draft
    most = draft.workload.num_at_once
    fewer = most // 2
    if not fewer:
        note = "one session without waits: nothing can be compared on one server, so the file has one condition"
        return draft.asking("What do these requests cost on this server?", (), note)
    return draft.asking(
        f"Do these agents cost less where {fewer} of them run at a time, against {most}? None of them waits.",
        [
            ("[[condition]]", "the same sessions, fewer of them at a time"),
            (f'name = "{fewer}-at-a-time"', ""),
            (f"workload.concurrency = {fewer}", ""),
        ],
    )


def _new_file(name: str) -> Path:
    from harness.model.spec import check_name

    path = Path(f"{name}.toml")
    try:
        check_name(name)
    except ValueError as error:
        raise SpecError(str(error), where="harness init", hint="Use small letters, digits and dashes") from error
    if path.exists():
        raise SpecError("is there already", where=str(path), hint="Choose another name: harness init NAME")
    return path


def _kind(asked: Asked) -> str:
    if asked.urls and asked.backend not in ("", ATTACHED):
        what = f"goes with backend {ATTACHED}, not with {asked.backend}"
        raise SpecError(what, where="--for", hint="Leave one of the two out")
    return kind_named(ATTACHED if asked.urls else asked.backend or DEFAULT_BACKEND).name


def _drawn(start: FirstExperiment) -> Workload:
    lines: list[Line] = [
        (f"num_sessions = {AGENTS_AT_A_TIME}", "agents at a time"),
        ("wait_cap_s = 10.0", "waits for tools are cut here"),
    ]
    if start.room_tokens < DRAWN_TOKENS:
        low, high, answer = start.room_tokens // 8, start.room_tokens // 4, start.room_tokens // 16
        lines.append((f'prompt_tokens = {{ distribution = "uniform", low = {low}, high = {high} }}', ""))
        lines.append((f'generate_tokens = {{ distribution = "uniform", low = {answer // 2}, high = {answer} }}', ""))
    return Workload(tuple(lines))


def _recorded(source: str, name: str, start: FirstExperiment, options: ReadOptions) -> Workload:
    """The whole of a recorded trace, imported where it is not yet; lengths divided where they are too long."""
    from harness.runner.backends.base import SLOT_TOKENS

    written, trace, notes = _trace_of(source, name, options)
    requests = [request for recording in trace.recordings for request in recording.requests]
    longest = max(request.prompt_tokens + request.generate_tokens for request in requests)
    # Lengths are rounded up, prompt and answer each.
    divisor = 1 if longest <= start.room_tokens else -(-longest // (start.room_tokens - 2))
    lines: list[Line] = [
        ('source = "trace"', ""),
        (f'trace = "{written}"', f"{len(trace.recordings)} sessions, {len(requests)} requests; num_sessions: fewer"),
    ]
    if divisor > 1:
        why = f"divides every length: the longest request has {longest} tokens, and {start.room_tokens} fit"
        lines.append((f'scale = "1/{divisor}"', why))
    if trace.head.arrivals == "together" and len(trace.recordings) > AGENTS_AT_A_TIME:
        lines.append((f"concurrency = {AGENTS_AT_A_TIME}", "agents at a time; left out: all start at once"))
    if any(request.wait_kind == "human" for request in requests):
        lines.append(('human_waits = "cap"', "waits for a person; those for tools are kept as recorded"))
        lines.append(("human_wait_cap_s = 60.0", ""))
    needed = min(-(-longest // divisor) + 2, start.room_tokens)
    slots = -(-needed // 128) * 128 if start.sets_slot_tokens and needed > SLOT_TOKENS else 0
    return Workload(tuple(lines), slots, notes, min(AGENTS_AT_A_TIME, len(trace.recordings)))


def _trace_of(source: str, name: str, options: ReadOptions) -> tuple[str, TraceFile, tuple[str, ...]]:
    """(the trace as the experiment names it, its content, what the import says)."""
    from harness.cli.inputs import import_notes
    from harness.model.traces.account import ReadOptions
    from harness.model.traces.importing import import_trace
    from harness.model.traces.recording import is_trace, load_trace, read_trace

    path = Path(source)
    if not path.exists() or is_trace(path):
        if options != ReadOptions():
            what = "is a trace already: block tokens, time unit and waits were settled by its import"
            raise SpecError(what, where=source, hint="Leave these options out, or give the recordings themselves")
        return source, load_trace(source), ()
    output = Path(f"{name}.jsonl")
    if output.exists():
        raise SpecError("is there already", where=str(output), hint="Choose another name: harness init NAME")
    head, notes = import_trace([path], output, name=name, options=options)
    return str(output), read_trace(output), tuple(import_notes(output, head, notes))


def _text(name: str, kind: str, start: FirstExperiment, workload: Workload) -> str:
    """The experiment file."""
    scale = [(f"time_scale = {start.time_scale}", "the emulator runs this many times as fast as the server it models")]
    each = f"each with inputs of its own; how many it takes: harness power {name}.toml"
    rules = [('rules = ["superiority"]', "how harness decide answers: is the condition cheaper than its baseline?")]
    form = [(f'prompt_form = "{start.prompt_form}"', "what this server takes")] if start.prompt_form else []
    slots = [(f"slot_tokens = {workload.slot_tokens}", "room for the longest request")] if workload.slot_tokens else []
    server = [*start.server, *slots]
    lines: list[Line] = [
        (f'name = "{name}"', ""),
        (f'question = "{start.question}"', ""),
        (f'backend = "{kind}"', start.about),
        *(scale if start.time_scale != 1 else []),
        (f"replicates = {start.replicates}", each),
        ("base_seed = 1", ""),
        *(rules if start.other else []),
        ("[limits]", ""),
        ("retries = 3", "a frozen run that a busy machine made INVALID may be repeated so often"),
        *start.limits,
        ("[workload]", "every key: harness explain workload"),
        *workload.lines,
        *form,
        *([("[server]", "every key: harness explain server"), *server] if server else []),
        ("[[condition]]", "the first one is the baseline"),
        *start.base,
        *start.other,
    ]
    body = [f"{setting:<25} # {comment}" if comment else setting for setting, comment in lines]
    return "\n".join(body) + "\n"
