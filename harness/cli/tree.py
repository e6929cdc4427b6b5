"""The tree of commands: which function each command is, and under which heading help shows it.

A module of commands is loaded when one of its commands is called or listed, so that the others start fast.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup, TyperOption

from harness.cli import print_version
from harness.errors import MAX_LINE_CHARS, escape_controls, printable
from harness.plugins import part_at, plugged

# Of the click that typer has within it, or beside it in older releases.
_UsageError: Any = typer.BadParameter.__mro__[1]


def _problem_in_words(error: typer.BadParameter) -> str:
    """What is wrong with the value of an option, in the words that a wrong key of a file gets."""
    if (cause := error.__cause__) is None:
        return error.message
    from pydantic import ValidationError

    from harness.model.spec.base import problems_of

    if not isinstance(cause, ValidationError):
        return error.message
    first = cause.errors()[0]
    given, most = first["input"], first.get("ctx", {}).get("le", 1)
    words = problems_of(cause)[0][1] + (". It is a share: 0.02 is 2 %" if most < 1 else "")
    return words if repr(given) in words else f"{given!r} {words}"


@contextmanager
def _words_that_can_be_shown() -> Generator[None]:
    """Errors of a command line in words like those of a file, and what was typed without control characters."""
    try:
        yield
    except typer.BadParameter as error:
        error.message = printable(_problem_in_words(error), MAX_LINE_CHARS)
        raise
    except _UsageError as error:
        error.message = printable(error.message, MAX_LINE_CHARS)
        raise


class _PlainHelp:
    """Help that names no type for an option without a value."""

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        for option in self.get_params(ctx):
            if isinstance(option, TyperOption) and option.is_flag:
                option.metavar = ""
        super().format_help(ctx, formatter)  # pyright: ignore[reportAttributeAccessIssue]  # of the command beside it


class Command(_PlainHelp, TyperCommand):
    """A command of this command line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # of click's or typer's own, by typer's version
        for before, word in zip(["", *args], args, strict=False):
            if not word:
                of = f"The value of {printable(before)!r}" if before.startswith("-") else "An argument"
                ctx.fail(f"{of} is empty: '' names nothing. Give a value, or leave it out")
        with _words_that_can_be_shown():
            left = super().parse_args(ctx, args)
        for option in self.params:
            value = ctx.params.get(option.name)
            if isinstance(value, float) and not math.isfinite(value):
                ctx.fail(f"Invalid value for {option.opts[0]!r}: {value} is no number of anything. Give a finite one")
        return left


class Group(_PlainHelp, TyperGroup):
    """A group of commands."""


def _load(place: str) -> Any:
    """The command whose function is at "package.module:function"."""
    alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    settings = PASSED_ON if place == "harness.cli.server:emulator" else {}
    alone.command(cls=Command, **settings)(part_at(place))
    command: Any = typer.main.get_command(alone)
    # Python without docstrings (-OO) has no help to show.
    command.short_help = (command.help or "").partition("\n\n")[0]
    return command


class Commands(Mapping[str, Any]):
    """The commands of a group by name, ours and then those of plug-ins; each is loaded when it is looked up.

    words: those of the group itself, "" at the root.
    """

    def __init__(self, words: str) -> None:
        self._words = words
        self._commands = _below(words, COMMANDS, GROUPS)

    def _all(self) -> dict[str, Any]:
        return {**_below(self._words, plugged("commands"), plugged("groups")), **self._commands}

    def __getitem__(self, name: str) -> Any:
        if name not in self._commands:
            self._commands[name] = self._all()[name]
        if isinstance(command := self._commands[name], str):
            command = self._commands[name] = _load(command if "." in command else f"harness.cli.{command}")
        command.name, path = name, f"{self._words} {name}".strip()
        command.rich_help_panel = None if self._words else HEADING_OF.get(name, "More")
        command.hidden = path in NOT_FIRST
        return command

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*self._commands, *self._all()])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _below(words: str, commands: Mapping[str, str], groups: Mapping[str, str]) -> dict[str, Any]:
    """What stands directly below a group: the places of commands, and groups with what they mean."""
    above = f"{words} " if words else ""
    found: dict[str, Any] = {}
    for path, place in commands.items():
        name, _, deeper = path.removeprefix(above).partition(" ")
        if path.startswith(above) and name not in found:
            found[name] = _group(above + name, groups.get(above + name, "")) if deeper else place
    return found


def _group(words: str, meaning: str) -> Group:
    return Group(
        help=meaning,
        short_help=meaning.partition("\n\n")[0],
        commands=Commands(words),  # pyright: ignore[reportArgumentType]  # only read
        no_args_is_help=True,
        rich_markup_mode="markdown",
    )


# What `harness --help` shows, heading by heading; groups stand below "More".
HEADINGS = {
    "Before a run": ("init", "doctor", "explain", "simulate", "power"),
    "Run": ("run", "tune", "sweep", "watch"),
    "After a run": ("report", "table", "compare", "gate", "decide", "open", "runs", "query", "verify"),
}
HEADING_OF = {name: heading for heading, names in HEADINGS.items() for name in names}
COMMANDS = {
    "init": "init:init",
    "doctor": "doctor:doctor",
    "explain": "explain:explain",
    "simulate": "predict:simulate",
    "power": "power:power",
    "run": "run:run",
    "tune": "tune:tune",
    "sweep": "run:sweep",
    "watch": "watch:watch",
    "report": "results:report",
    "table": "results:table",
    "compare": "compare:compare",
    "gate": "compare:gate",
    "decide": "prereg:decide",
    "open": "records:open_archive",
    "runs": "records:list_runs",
    "query": "records:query",
    "verify": "records:verify",
    "plan build": "inputs:plan_build",
    "plan show": "inputs:plan_show",
    "plan waits show": "inputs:waits_show",
    "trace import": "inputs:trace_import",
    "trace formats": "inputs:trace_formats",
    "trace show": "inputs:trace_show",
    "trace export": "inputs:trace_export",
    "predict noise": "power:noise",
    "prereg freeze": "prereg:freeze",
    "prereg publish": "prereg:publish",
    "prereg check": "prereg:check",
    "records derive": "records:derive",
    "records export": "records:export",
    "server emulator": "server:emulator",
    "server compile": "server:compile_model",
    "server patch status": "server:patch_status",
    "server patch verify": "server:patch_verify",
    "server patch apply": "server:patch_apply",
    "server patch check": "server:patch_check",
    "server devices": "server:devices",
    "server sizes": "sizes:sizes",
    "server calibrate": "calibrate:calibrate",
    "fleet status": "watch:fleet_status",
}
"""Each command with "module:function" of ``harness.cli``."""
GROUPS = {
    "plan": "Inputs of an experiment: session plans and tool waits.\n\n"
    "Example: `harness plan build demo -o plans/demo`",
    "plan waits": "Distributions of tool waits.\n\nExample: `harness plan waits show tracelab-v0.0.2`",
    "trace": "Recorded agents in, runs out.\n\nExample: `harness trace show coding-agent`",
    "predict": "What to expect before a run: noise, costs.\n\nExample: `harness predict noise demo --runs runs/today`",
    "prereg": "Criteria fixed before a run, applied after it.\n\nExample: `harness prereg check slots.zip`",
    "records": "Sealed runs as files: rebuild, export.\n\nExample: `harness records derive demo --runs runs/today`",
    "server": "Servers to measure: emulator, NPUs, patch, calibration, sizes.\n\n"
    "Not listed: `harness server twin`.\n\nExample: `harness server devices`",
    "server patch": "The observation patch of vllm-rbln.\n\nExample: `harness server patch status --twin`",
    "fleet": "Several devices, hosts or replicas at once.\n\nExample: `harness fleet status demo --runs runs/today`",
}
# Words that a newcomer tries.
FIRST_WORDS = {"demo": ["run", "demo"], "list": ["runs"], "help": ["--help"], "version": ["--version"]}
# The emulator takes every option itself, --help too.
PASSED_ON: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,
}
# Of those who keep up with the stack: called as others, and in no list of a user's.
NOT_FIRST = ("stack", "server twin")
FIRST_STEPS = """\
Three things to do first:

  harness run demo --backend sim    a whole experiment and its report, simulated
  harness doctor                    what this machine can run
  harness init                      an experiment file of your own

Every command: harness --help"""


class Root(Group):
    """The command ``harness`` itself."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = Commands("")  # pyright: ignore[reportAttributeAccessIssue]  # only read

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [*FIRST_WORDS.get(args[0], args[:1]), *args[1:]] if args else args)

    @_words_that_can_be_shown()
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            groups = {name: command for name in self.commands if isinstance(command := self.commands[name], Group)}
            below = [f"{name} {word}" for name, group in groups.items() for word in group.commands]
            words = [path.split()[1] for path in below if path.split()[1] not in self.commands]
            near = difflib.get_close_matches(args[0], [*self.commands, *words], n=1)
            if near and near[0] not in self.commands:
                meant = ", ".join(repr(path) for path in below if path.split()[1] == near[0])
                ctx.fail(f"No such command {args[0]!r}. Did you mean {meant}?")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="harness",
    cls=Root,
    help="Measure vLLM servers under agents that come back after tool calls.\n\n"
    "Example: `harness run demo --backend sim`",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 pass, 1 harness fault, 2 bad spec, 3 run invalid, 4 rule failed or gate worse, "
    "5 nothing decided or gate cannot tell, 130 interrupted. Not listed: `harness paper`, the study, and "
    "`harness stack`, new releases.",
)


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print_version()
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(escape_controls(FIRST_STEPS))
