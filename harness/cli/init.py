"""``harness init``: an experiment file to begin with. It asks no question and starts no server."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from harness.cli import inputs
from harness.cli.doctor import DEFAULT_WAIT, StackOption, WaitOption, seconds_to_wait
from harness.cli.first_sessions import Workload, drawn, imported_file, read_trace_of, recorded
from harness.cli.sizes import notes_of_server
from harness.cli.terminal import print_folded, print_with_comment
from harness.errors import SpecError
from harness.kinds import DEFAULT_BACKEND, KINDS, ServingStack, kind_named
from harness.measure.server.once import asked_once
from harness.outputs import write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from harness.model.experiment import PlannedRuns
    from harness.model.traces.account import ReadOptions
    from harness.runner.backends.base import FirstExperiment, Line

# The kind of server that --for measures: somebody else started it.
ATTACHED = next(kind.name for kind in KINDS.values() if not kind.is_restarted)

AgentsOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=100_000,
        help="With --from: so many agents at once; several replay one recording where there are fewer.",
    ),
]


@asked_once()
def init(
    name: Annotated[str, typer.Argument(help="Name of the experiment; its file becomes `NAME.toml`.")] = "mine",
    backend: Annotated[str, typer.Option(help=f"What is measured: {', '.join(KINDS)}.")] = "",
    source: Annotated[
        str,
        typer.Option("--from", metavar="FILE", help="Replay recorded agents, as `harness trace import` reads them."),
    ] = "",
    agents: AgentsOption = 0,
    block_tokens: inputs.BlockTokensOption = 0,
    time_unit: inputs.TimeUnitOption = "",
    waits: inputs.RecordedWaitsOption = "",
    lengths: inputs.LengthsOption = "",
    since: inputs.SinceOption = "",
    until: inputs.UntilOption = "",
    urls: Annotated[
        list[str] | None,
        typer.Option(
            "--for", metavar="URL", help="Measure this server: it is asked what it is. Twice: compare two servers."
        ),
    ] = None,
    api_key_env: Annotated[str, typer.Option(help="With --for: environment variable with the server's key.")] = "",
    stack: StackOption = None,
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
    if not source and (agents or block_tokens or time_unit or waits or lengths or since or until):
        hint = "Name the recordings with --from, or leave these options out"
        options = "--agents, --block-tokens, --time-unit, --waits, --lengths, --since, --until"
        raise SpecError("goes with --from", where=options, hint=hint)
    options, servers = inputs.read_options(block_tokens, time_unit, waits, lengths, since, until), tuple(urls or ())
    asked = DraftInputs(backend, servers, source, api_key_env, seconds_to_wait(wait), options, agents, stack)

    def changed(draft: Draft) -> Draft:
        if slots is not None or buckets:
            return _with_change(draft, slots, _sizes(buckets))
        if not source or len(servers) > 1:
            return draft
        # The change that fits the recording.
        if not draft.is_modelled:
            return _with_a_difference(draft)
        return _with_best_change(_without_prefix_caching(draft) if draft.workload.server else draft)

    name = name.removesuffix(".toml")
    path, start = Path(f"{name}.toml"), write_experiment(name, asked, changed).start
    print_folded(f"wrote {path}. Next:")
    commands = {
        start.needs: "comes first",
        f"harness simulate {path}" if start.has_costs else "": "predicts it, in seconds",
        f"harness run {path} --dry-run": "checks what it needs and starts nothing",
        f"harness run {path} --runs runs/{name}": "runs it and writes the report",
        f"harness prereg freeze {path} --seed 2 --commit" if start.other else "": "in git: for a decision that counts",
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
        start, workload = self.start, self.workload
        scale = f"time_scale = {start.time_scale}" if start.time_scale != 1 else ""
        each = f"each with inputs of its own; how many it takes: harness power {self.name}.toml"
        rules = 'rules = ["superiority"]' if start.other else ""
        form = f'prompt_form = "{start.prompt_form}"' if start.prompt_form else ""
        slots = f"slot_tokens = {workload.slot_tokens}" if workload.slot_tokens else ""
        has_server = start.server or workload.server or slots
        lines: list[Line] = [
            (f'name = "{self.name}"', ""),
            (f'question = "{start.question}"', ""),
            (f'backend = "{self.kind}"', start.about),
            (scale, "the emulator runs this many times as fast as the server it models"),
            (f"replicates = {start.replicates}", each),
            ("base_seed = 1", ""),
            (rules, "how harness decide answers: is the condition cheaper than its baseline?"),
            ("[limits]", ""),
            ("retries = 3", "a frozen run that a busy machine made INVALID may be repeated so often"),
            *start.limits,
            ("[workload]", "every key: harness explain workload"),
            *workload.lines,
            (form, "what this server takes"),
            ("[server]" if has_server else "", "every key: harness explain server"),
            *start.server,
            *workload.server,
            (slots, "room for the longest request"),
            ("[[condition]]", "the first one is the baseline"),
            *start.base,
            *start.other,
        ]
        body = [f"{setting:<25} # {comment}" if comment else setting for setting, comment in lines if setting]
        return "\n".join(body) + "\n"

    def planned(self) -> PlannedRuns:
        """Its first runs; SpecError where the file would be refused."""
        from harness.model.experiment import resolve
        from harness.model.spec import parse_experiment
        from harness.model.spec.base import tomllib

        spec = parse_experiment(tomllib.loads(self.text), where=f"{self.name}.toml")
        return resolve(spec.model_copy(update={"replicates": 1}))

    def predicted_s(self) -> float:
        """Seconds of the server's time that its first run takes, as its costs have them."""
        from harness.runner.progress import predicted_end_s

        return predicted_end_s(self.asking("", ()).planned().runs[0])

    @property
    def is_modelled(self) -> bool:
        """Whether a change of slots or sizes takes no other artifact and no other server."""
        return self.start.sets_slot_tokens

    def asking(self, question: str, other: Sequence[Line], note: str = "") -> Draft:
        """The draft with another question, and ``other`` as the lines of its second condition."""
        notes = (*self.workload.notes, note) if note else self.workload.notes
        start = replace(self.start, question=question, other=tuple(other))
        return replace(self, start=start, workload=replace(self.workload, notes=notes))


class DraftInputs(NamedTuple):
    """What an experiment is written for: a backend, or servers that run, and drawn or recorded sessions.

    wait_s: for servers that are starting. options: of the import of recordings. agents: see ``Recordings``. stack: that
    serves, where the server does not show it.
    """

    backend: str = ""
    urls: tuple[str, ...] = ()
    source: str = ""
    api_key_env: str = ""
    wait_s: float = 0.0
    options: ReadOptions | None = None
    agents: int = 0
    stack: ServingStack | None = None


def write_experiment(name: str, asked: DraftInputs, changed: Callable[[Draft], Draft]) -> Draft:
    """Write ``NAME.toml``, and its trace where one is imported; nothing where something is wrong.

    changed: what is asked of the draft besides. Raises SpecError where the file is there already, or what it asks
    cannot be measured, ServerError where a server cannot.
    """
    from harness.runner.experiment import checked, refuse_what_is_missing

    path = _new_file(name)
    made = [each for each in (imported_file(name, asked.source), _cost_file(name)) if not each.exists()]
    try:
        draft = changed(_draft(name, asked))
        planned = checked(draft.planned())
        if asked.urls:
            # What ``harness run --dry-run`` would refuse; a server that is named can be asked now.
            refuse_what_is_missing(planned.runs)
    except BaseException:
        # The trace of a file that is not written would be in the way of the next try.
        for each in made:
            each.unlink(missing_ok=True)
        raise
    write_text(path, draft.text)
    for note in (*draft.workload.notes, *notes_of_server(asked.urls[0] if asked.urls else "", asked.source)):
        print_folded(note)
    return draft


def to_be_tuned(draft: Draft) -> Draft:
    """The draft with what runs today alone: one condition."""
    return draft.asking("Which configuration serves these sessions at the lowest cost?", ())


def _draft(name: str, asked: DraftInputs) -> Draft:
    """The first experiment of a server or a backend, on drawn or recorded sessions."""
    from harness.cli.first_servers import experiment_on, started_as_recorded
    from harness.model.traces.account import ReadOptions
    from harness.runner.backends import backend_named
    from harness.stacks.vllm.step_log import recorded_server

    kind = _kind(asked)
    start = backend_named(kind).first_experiment
    # The recording is read before the server is asked anything, which it may record.
    server = recorded_server(Path(asked.source)) if asked.source else None
    read = read_trace_of(asked.source, name, asked.options or ReadOptions()) if asked.source else None
    if asked.urls:
        start = experiment_on(asked.urls, asked.api_key_env, asked.wait_s, asked.stack, server)
    elif kind_named(kind).has_observer and server is not None and server.stack is ServingStack.vllm:
        start = started_as_recorded(start, server)
    if read is None:
        return Draft(name, kind, start, drawn(start))
    takes_rules = start.sets_slot_tokens and not kind_named(kind).has_stack
    is_recorded = server is not None and (len(asked.urls) == 1 or kind_named(kind).has_observer)
    has_costs = not is_recorded or any("cost_model" in line for line, _ in start.server)
    lines, note = ((), "") if has_costs else _recorded_costs(name, asked.source)
    start = replace(start, server=(*start.server, *lines))

    def predicted_s(tried: Workload) -> float:
        return Draft(name, kind, start, tried).predicted_s()

    workload = recorded(read, start, predicted_s, asked.agents, takes_rules=takes_rules)
    return Draft(name, kind, start, replace(workload, notes=(*workload.notes, *start.notes, *filter(None, [note]))))


def _cost_file(name: str) -> Path:
    """Where the costs of recorded steps are written."""
    return Path(f"{name}-costs-1.toml")


def _recorded_costs(name: str, source: str) -> tuple[tuple[Line, ...], str]:
    """(lines of [server], what to say): the costs of the server by the timed steps beside its recording."""
    from harness.analysis.calibration.cost_file import fit_recorded, write_cost_file
    from harness.errors import RecordsError
    from harness.plugins import plugged, service
    from harness.tune.price import SEED, fit_errors, fit_in_words

    timed = "timed steps of a recording"
    steps = service(timed, where="--from")(Path(source)) if timed in plugged("services") else None
    if steps is None:
        return (), ""
    try:
        _refuse_unlike(Path(source), steps)
        fitted = fit_recorded(steps, seed=SEED)
        path = write_cost_file(fitted, Path(), _cost_file(name).stem.removesuffix("-1"))
    except (RecordsError, SpecError) as error:
        return (), f"the recorded steps do not tell its costs: {error}"
    words = f"fitted to {fitted.origin.words}"
    return ((f'cost_model = "{path}"', words),), f"costs: {words}; {fit_in_words(fit_errors(path))}"


def _refuse_unlike(recording: Path, steps: Path) -> None:
    """RecordsError where recorded sessions and the steps beside them show another value of a setting."""
    from harness.errors import RecordsError
    from harness.stacks.vllm.step_log import recorded_server

    sides = [recorded_server(recording, "vllm_sessions"), recorded_server(steps, "vllm_core_steps")]
    shown, timed = ({} if side is None else side.settings for side in sides)
    if unlike := [
        f"{key} = {shown[key]} and {timed[key]}" for key in shown if timed.get(key, shown[key]) != shown[key]
    ]:
        what = f"{recording.name} and {steps.name} show {'; '.join(unlike)}"
        raise RecordsError(what, hint="Record both anew, and change neither")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.strip("{}[] ").split(",") if part.strip())
    except ValueError as error:
        raise SpecError(f"{text!r} is no list of sizes", where="--buckets", hint="Write 1,2,4,6,8") from error


def _with_change(draft: Draft, slots: int | None, sizes: Sequence[int]) -> Draft:
    """The draft with this change as its other condition."""
    option = "--buckets" if slots is None else "--slots"
    if not draft.is_modelled:
        raise SpecError(
            f"{draft.kind} has no change of slots or sizes that a condition alone can make",
            where=option,
            hint="Compile or start another server for it, and name that in a condition: harness explain server",
        )
    parts = [f"{slots} KV slots"] * (slots is not None) + [f"the sizes {list(sizes)}"] * bool(sizes)
    keys = {"kv_slots": slots, "decode_buckets": list(sizes)}
    changed = _with_keys(draft, {key: value for key, value in keys.items() if value}, " and ".join(parts))
    (base,), (other,) = changed.planned().by_condition.values()
    if base.server.shape == other.server.shape:
        raise SpecError(
            f"the baseline has {' and '.join(parts)} already", where=option, hint="Name another number, or other sizes"
        )
    return changed


NAME_PARTS = {
    "kv_slots": "{}-slots",
    "num_gpu_blocks": "{}-blocks",
    "max_num_seqs": "{}-at-once",
    "prefix_caching": "other-prefix-caching",
}


def _with_keys(draft: Draft, keys: Mapping[str, Any], words: str, note: str = "") -> Draft:
    """The draft with these keys of [server] in its other condition. words: what they are."""
    sizes = keys.get("decode_buckets")
    parts = [NAME_PARTS[key].format(value) for key, value in keys.items() if key in NAME_PARTS]
    name = "-".join([*parts, *([f"{len(sizes)}-sizes"] if sizes else [])])
    lines: list[Line] = [("[[condition]]", "what it changes: harness explain server"), (f'name = "{name}"', "")]
    lines += [(f"server.{key} = {json.dumps(value)}", "") for key, value in keys.items()]
    question = f"Do {words} lower the cost of these agents?"
    if words.startswith("compile "):
        question = f"Does it pay for these agents to {words}?"
    return draft.asking(question, lines, note)


def _without_prefix_caching(draft: Draft) -> Draft:
    """With the question of a server that reuses what sessions share."""
    return draft.asking(
        "What does prefix caching save on these requests?",
        [
            ("[[condition]]", "the same requests, nothing of a prompt reused"),
            ('name = "no-prefix-caching"', ""),
            ("server.prefix_caching = false", ""),
        ],
    )


def _with_best_change(draft: Draft) -> Draft:
    """With the change that a quick search on the recording predicts to pay most; the draft's own where none pays."""
    from harness.tune.explore import QUICK, explore
    from harness.tune.plans import MARGIN, question_of_run
    from harness.tune.setups import Baseline

    (run,) = draft.planned().by_condition["base"]
    memory = "num_gpu_blocks" if run.server.is_paged else "kv_slots"
    proposal, note = None, f"simulated: no change of memory or sizes saves {100 * MARGIN:g} % on it"
    try:
        proposal = explore(question_of_run(run, (memory, "decode_buckets")), QUICK).smallest
    except SpecError:
        note = "these are more requests than a quick search takes"
    if proposal is None:
        return draft.asking(draft.start.question, draft.start.other, f"{note}; the file asks: {draft.start.question}")
    return _with_keys(
        draft, Baseline(run.server).keys(proposal.setup), proposal.words, f"simulated: {proposal.sentence}"
    )


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


def _kind(asked: DraftInputs) -> str:
    if asked.urls and asked.backend not in ("", ATTACHED):
        what = f"goes with backend {ATTACHED}, not with {asked.backend}"
        raise SpecError(what, where="--for", hint="Leave one of the two out")
    return kind_named(ATTACHED if asked.urls else asked.backend or DEFAULT_BACKEND).name
