"""The tree of commands: which function each command is, under which heading help shows it, and its older spellings.

A module of commands is loaded when one of its commands is called or listed, so that the others start fast.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup, TyperOption

from harness.cli import print_version
from harness.shipped import shipped_names


@dataclass(frozen=True)
class Branch:
    """A group of commands.

    commands: each name with "module:function" of ``harness.cli``, or with a group below this one.
    respell: what a person may write without the name of a command, written with it.
    """

    help: str
    commands: Mapping[str, str | Branch]
    respell: Callable[[list[str]], list[str]] = field(default=list)


def _with_ratios(words: list[str]) -> list[str]:
    """``harness predict SPACE`` means the ratios of that space."""
    is_space = words[:1] and (words[0].endswith(".toml") or words[0] in shipped_names("spaces"))
    return ["ratios", *words] if is_space or words[:1] in (["--set"], ["--ablation"]) else words


def _with_perfetto(words: list[str]) -> list[str]:
    """``harness trace EXPERIMENT RUN`` means the viewer's trace of that run; what is nearly a command is a typo."""
    is_command = not words or words[0].startswith("-") or difflib.get_close_matches(words[0], TRACE)
    return words if is_command else ["perfetto", *words]


TRACE = {
    "import": "trace:trace_import",
    "show": "trace:trace_show",
    "export": "trace:trace_export",
    "perfetto": "trace:perfetto",
}
GROUPS = {
    "plan": Branch(
        "Inputs of an experiment: session plans and tool waits.\n\nExample: `harness plan build demo -o plans/demo`",
        {
            "build": "inputs:plan_build",
            "show": "inputs:plan_show",
            "waits": Branch(
                "Distributions of tool waits.\n\nExample: `harness plan waits show tracelab-v0.0.2`",
                {"show": "inputs:waits_show", "import": "inputs:waits_import"},
            ),
        },
    ),
    "trace": Branch(
        "Recorded agents in, runs out.\n\nExample: `harness trace show coding-agent`", TRACE, respell=_with_perfetto
    ),
    "predict": Branch(
        "What to expect before a run: replicates, noise, costs, advice.\n\nExample: `harness predict power demo`",
        {
            "power": "power:power",
            "noise": "power:scatter",
            "search": "search:search",
            "ratios": "search:predict",
            "advise": "search:advise",
            "coverage": "search:coverage",
        },
        respell=_with_ratios,
    ),
    "prereg": Branch(
        "Criteria fixed before a run, applied after it.\n\n"
        "Example: `harness prereg decide demo --rule superiority --runs runs/today`",
        {
            "freeze": "method:freeze",
            "decide": "method:decide",
            "publish": "method:publish",
            "check": "method:check_archive",
        },
    ),
    "records": Branch(
        "Sealed runs as files: check, rebuild, export.\n\nExample: `harness records verify --runs runs/today`",
        {"verify": "data:verify", "derive": "data:derive", "export": "records:export"},
    ),
    "server": Branch(
        "Servers to measure: emulator, twin, NPUs, patch, calibration.\n\nExample: `harness server devices`",
        {
            "emulator": "machine:emulator",
            "twin": Branch(
                "The real vLLM + vllm-rbln on a stand-in device.\n\nExample: `harness server twin install`",
                {"install": "twin:install", "artifact": "twin:artifact"},
            ),
            "compile": "stack:compile_model",
            "patch": Branch(
                "The observation patch of vllm-rbln.\n\nExample: `harness server patch status --twin`",
                {
                    "status": "stack:patch_status",
                    "verify": "stack:patch_verify",
                    "apply": "stack:patch_apply",
                    "check": "stack:patch_check",
                },
            ),
            "devices": "stack:devices",
            "calibrate": "calibrate:calibrate",
        },
    ),
    "stack": Branch(
        "Releases of vllm-rbln, and step files of other stacks.\n\nExample: `harness stack check .venv`",
        {"check": "release:check", "record": "release:record", "compare": "release:compare", "steps": "release:steps"},
    ),
    "paper": Branch(
        "The paper's experiments, analyses and tables.\n\nExample: `harness paper catalogue`",
        {
            "catalogue": "method:catalogue",
            "analyse": "method:analyse",
            "tables": "tables:tables",
            "signs": "tables:signs",
            "rules": "search:paper_rules",
        },
    ),
    "fleet": Branch(
        "Several devices or hosts at once.\n\nExample: `harness fleet status demo --runs runs/today`",
        {"status": "fleet:status", "worker": "fleet:worker"},
    ),
}
# What `harness --help` shows, heading by heading.
HEADINGS: dict[str, dict[str, str | Branch]] = {
    "Before a run": {
        "init": "init:init",
        "doctor": "machine:doctor",
        "explain": "explain:explain",
        "simulate": "inputs:simulate",
        "power": "power:power",
        "search": "search:search",
    },
    "Run": {
        "run": "run:run",
        "sweep": "sweep:sweep",
        "watch": "watch:watch",
    },
    "After a run": {
        "report": "run:report",
        "table": "run:table",
        "compare": "compare:compare",
        "gate": "gate:gate",
        "history": "history:history",
        "decide": "method:decide",
        "runs": "data:list_runs",
        "query": "data:query",
    },
    "More": {**GROUPS, "bench": "bench:bench"},
}
# Other words for the same commands, which help does not show.
ALIASES = {
    "demo": "run demo",
    "list": "runs",
    "help": "--help",
    "version": "--version",
    "verify": "records verify",
    "derive": "records derive",
    "waits": "plan waits",
    "scatter": "predict noise",
    "advise": "predict advise",
    "coverage": "predict coverage",
    "freeze": "prereg freeze",
    "publish": "prereg publish",
    "analyse": "paper analyse",
    "catalogue": "paper catalogue",
    "tables": "paper tables",
    "signs": "paper signs",
    "paper-rules": "paper rules",
    "emulator": "server emulator",
    "twin": "server twin",
    "compile": "server compile",
    "patch": "server patch",
    "devices": "server devices",
    "calibrate": "server calibrate",
}
# Older spellings of options, which help does not show.
OLDER_OPTIONS = {
    "method:freeze": {"--to": "--output"},
    "search:advise": {"--condition": "--baseline"},
    "stack:compile_model": {"--root": "--output"},
    "stack:devices": {"--json": "--format=json"},
    "stack:patch_apply": {"--overlays": "--output"},
    "twin:artifact": {
        "--batch-size": "--max-num-seqs",
        "--decoder-batch-sizes": "--decode-buckets",
        "--max-seq-len": "--slot-tokens",
    },
}
# What is passed on to another program as it is.
_PASSED_ON = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}, "add_help_option": False}
SETTINGS: dict[str, dict[str, Any]] = {"machine:emulator": _PASSED_ON}

FIRST_STEPS = """\
Three things to do first:

  harness run demo --backend sim    a whole experiment and its report, simulated
  harness doctor                    what this machine can run
  harness init                      an experiment file of your own

Every command: harness --help"""


def _respell(words: list[str]) -> list[str]:
    return [*ALIASES[words[0]].split(), *words[1:]] if words and words[0] in ALIASES else words


class _PlainHelp:
    """Help that names no type for an option without a value."""

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        for option in self.get_params(ctx):
            if isinstance(option, TyperOption) and option.is_flag:
                option.metavar = ""
        super().format_help(ctx, formatter)  # pyright: ignore[reportAttributeAccessIssue]  # of the command beside it


def _in_words_of_a_file(error: typer.BadParameter) -> str:
    """What is wrong with the value of an option, in the words that a wrong key of a file gets."""
    if (cause := error.__cause__) is None:
        return error.message
    from pydantic import ValidationError

    from harness.spec.base import problems_of

    if not isinstance(cause, ValidationError):
        return error.message
    given = cause.errors()[0]["input"]
    words = problems_of(cause)[0][1]
    return words if repr(given) in words else f"{given!r} {words}"


class Command(_PlainHelp, TyperCommand):
    """A command of this command line."""

    older_options: Mapping[str, str] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # of click's or typer's own, by typer's version
        try:
            return super().parse_args(ctx, [self._respelt(word) for word in args])
        except typer.BadParameter as error:
            error.message = _in_words_of_a_file(error)
            raise

    def _respelt(self, word: str) -> str:
        name, is_given, value = word.partition("=")
        return f"{self.older_options[name]}{is_given}{value}" if name in self.older_options else word


class Group(_PlainHelp, TyperGroup):
    """A group of commands; each is loaded at its first use."""

    branch: Branch

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self.branch.respell(args))


class Commands(Mapping[str, Any]):
    """The commands of a group by name; each is made when it is looked up."""

    def __init__(self, branch: Branch, headings: Mapping[str, str]) -> None:
        self._branch, self._headings = branch, headings
        self._made = cache(self._make)

    def __getitem__(self, name: str) -> Any:
        return self._made(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._branch.commands)

    def __len__(self) -> int:
        return len(self._branch.commands)

    def _make(self, name: str) -> Any:
        place, heading = self._branch.commands[name], self._headings.get(name)
        if isinstance(place, Branch):
            return _group(name, place, heading)
        module, _, function = place.partition(":")
        alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        settings = SETTINGS.get(place, {})
        alone.command(name=name, cls=Command, rich_help_panel=heading, **settings)(
            getattr(import_module(f"harness.cli.{module}"), function)
        )
        made: Any = typer.main.get_command(alone)
        made.short_help = made.help.partition("\n\n")[0]
        made.older_options = OLDER_OPTIONS.get(place, {})
        return made


def _group(name: str, branch: Branch, heading: str | None) -> Group:
    made = Group(
        name=name,
        help=branch.help,
        commands=Commands(branch, {}),  # pyright: ignore[reportArgumentType]  # only read
        no_args_is_help=True,
        rich_markup_mode="markdown",
        rich_help_panel=heading,
    )
    made.branch, made.short_help = branch, branch.help.partition("\n\n")[0]
    return made


class Root(Group):
    """The command ``harness`` itself."""

    branch = Branch("", {name: place for shown in HEADINGS.values() for name, place in shown.items()}, respell=_respell)

    def __init__(self, **given: Any) -> None:
        headings = {name: heading for heading, shown in HEADINGS.items() for name in shown}
        super().__init__(**given)
        self.commands = Commands(self.branch, headings)  # pyright: ignore[reportAttributeAccessIssue]  # only read

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        near = difflib.get_close_matches(args[0], [*self.branch.commands, *ALIASES], n=1)
        if args[0] not in self.branch.commands and near and near[0] in ALIASES:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {ALIASES[near[0]]!r}?")
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
    "5 gate cannot tell, 130 interrupted.",
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
        print(FIRST_STEPS)
