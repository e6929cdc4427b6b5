"""``harness stack``: check whether a release of the vendor's stack is supported, and record it in the table of facts.

Needs no device and no torch, starts nothing, and changes only the table that the command names.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harness.cli.addresses import ExperimentArgument, SetOption, TableFormsOption, changes_of, experiment_with
from harness.cli.terminal import print_tables, print_text, time_left
from harness.errors import ExitCode, SpecError
from harness.kinds import KINDS, kind_named
from harness.table import TableForm

if TYPE_CHECKING:
    from harness.measure.records.run import SealedRun
    from harness.stacks.rbln.launch.releases import ReleaseCheck
    from harness.stacks.rbln.launch.sources import Sources

ReleaseArgument = Annotated[
    Path,
    typer.Argument(help="Wheel or zip of vllm-rbln or of vLLM itself, virtual environment, or site-packages folder."),
]
VllmOption = Annotated[
    Path | None, typer.Option("--vllm", help="The same for vLLM. Default: beside the release; else what is recorded.")
]
TableOption = Annotated[Path | None, typer.Option("--table", help="Table of facts. Default: the one of this harness.")]


def check(
    release: ReleaseArgument,
    vllm: VllmOption = None,
    against: Annotated[
        str, typer.Option(help="Compare with this release (its number, or its wheel) as if no other were known.")
    ] = "",
    table: TableOption = None,
    output: Annotated[Literal["text", "json"], typer.Option("--format", help="How to print it.")] = "text",
) -> None:
    """Say which facts that rules, patch, observer, log grammar and metrics rest on still hold in a release.

    Exit code 0 when all hold, 3 when something changed that matters, 2 for what is no release. Example:
    `harness stack check vllm_rbln-0.12.1a8-py3-none-any.whl --against 0.12.0`
    """
    from harness.stacks.rbln.launch.releases import check_release, load_table
    from harness.stacks.rbln.launch.sources import Release, open_sources, wheel_beside

    checked_release = Release.of(release, vllm)
    named = checked_release.named
    _place, facts = load_table(table, named.package)
    places = [named.place]
    if against and Path(against).exists():
        places.insert(0, Path(against))
        against = open_sources(Path(against), named.package).version
    if against and against not in facts.releases:
        raise SpecError(
            f"{against} is not recorded", where="--against", hint=f"Recorded are {', '.join(facts.releases)}"
        )

    def find(package: str, version: str) -> Sources | None:
        if package == named.package and version == named.version:
            return None
        return next((wheel for place in places if (wheel := wheel_beside(place, package, version))), None)

    checked = count(1)
    with time_left(f"{_title(named.package)} {named.version}") as on_progress:
        result = check_release(
            facts,
            checked_release,
            against=against,
            find=find,
            on_fact=lambda _name: on_progress(next(checked) / len(facts.facts)),
        )
    print_text(_as_json(result) if output == "json" else _as_text(result))
    raise typer.Exit(int(ExitCode.PASS if result.holds else ExitCode.RUN_INVALID))


def record(release: ReleaseArgument, vllm: VllmOption = None, table: TableOption = None) -> None:
    """Write a release that somebody has read into the table of facts: what stands in it now counts as known.

    Read what `harness stack check` shows first. Example: `harness stack record vllm_rbln-0.12.0-py3-none-any.whl`
    """
    from harness.stacks.rbln.launch.releases import load_table, recorded, write_table
    from harness.stacks.rbln.launch.sources import Release

    read = Release.of(release, vllm)
    named, engine = read.named, read.vllm
    place, facts = load_table(table, named.package)
    write_table(recorded(facts, read), place)
    beside = f" with vLLM {engine.version}" if engine else f" with vLLM {named.vllm_pin or 'of no version'}, not read"
    text = f"{_title(named.package)} {named.version}" + ("" if named is engine else beside)
    print_text(f"{place}: {text}, {len(facts.facts)} facts")


def compare(
    old: Annotated[str, typer.Argument(help="Release of vllm-rbln; for `rbln` and `vllm`, an environment.")],
    new: Annotated[str, typer.Argument(help="The other one.")],
    experiment: ExperimentArgument,
    backend: Annotated[str, typer.Option(help="What serves: a twin, an NPU, `vllm`, or `sim`.")] = "twin",
    runs: Annotated[Path, typer.Option("--runs", help="Folder for the runs of both.")] = Path("runs/releases"),
    changes: SetOption = None,
    form: TableFormsOption = TableForm.text,
) -> None:
    """Run the same plans on two releases and show what differs.

    Decisions step by step, figures with intervals, names of metrics and log lines. Runs that are sealed already are
    kept. `sim` simulates the rules of each release, of vLLM itself where the number is one of its.

    Example: `harness stack compare 0.11.2 0.12.0 twin-demo --runs runs/releases`
    """
    from harness.cli.run import ensure_machine_code
    from harness.extras.releases.compare import compare_releases
    from harness.runner import run_experiment

    sides: list[list[SealedRun]] = []
    # Both are looked at before anything runs.
    settings = [_release_setting(release, backend) for release in (old, new)]
    names = _names_of(old, new)
    for name, setting in zip(names, settings, strict=True):
        spec, _, _ = experiment_with(experiment, [*changes_of((), backend), setting, *(changes or ())])
        ensure_machine_code(spec)
        sides.append(list(run_experiment(spec, runs_root=runs / name, resume=True).require_valid().runs))
    print_tables(compare_releases(sides[0], sides[1], names), form)


def _names_of(old: str, new: str) -> tuple[str, str]:
    """The names of both, of their folders too: of environments the last part of the path in which they differ."""
    if old == new:
        raise SpecError("both are the same release", where=old, hint="Name two")
    before, after = (Path(release).absolute().parts if "/" in release else (release,) for release in (old, new))
    for first, second in zip(reversed(before), reversed(after), strict=False):
        if first != second:
            return first, second
    raise SpecError("both are the same environment", where=old, hint="Name two")


def _release_setting(release: str, backend: str) -> str:
    """The key that chooses a release: its environment, or in a simulation its rules."""
    from harness.stacks.rbln.rules.kv_rules import rules_for_version, rules_for_vllm
    from harness.stacks.vllm.launch import find_vllm

    kind = kind_named(backend)
    if kind.has_stack:
        return f'server.environment="{release}"'
    if kind.has_observer:
        find_vllm(str(Path(release).absolute()))
        return f'server.environment="{Path(release).absolute()}"'
    if not kind.is_virtual:
        usable = [name for name, other in KINDS.items() if other.has_stack or other.has_observer or other.is_virtual]
        raise SpecError(
            "has no releases to compare", where=f"--backend {backend}", hint=f"Use one of {', '.join(usable)}"
        )
    rules = rules_for_version(release) or rules_for_vllm(release)
    if rules is None:
        raise SpecError(
            "no rules of this release are known", where=release, hint="`harness stack check` reads a new one"
        )
    return f'server.rules="{rules.name}"'


def _title(package: str) -> str:
    """A package as its vendor writes it."""
    return {"vllm_rbln": "vllm-rbln", "vllm": "vLLM"}[package]


def _as_text(result: ReleaseCheck) -> str:
    from harness.stacks.rbln.launch.sources import RBLN

    how = {"read": "read", "recorded": "not read; its record counts", "not found": "neither found nor recorded"}
    beside = f" with vLLM {result.vllm_version or '?'} ({how[result.vllm_source]})"
    lines = [
        f"{_title(result.package)} {result.version}{beside if result.package == RBLN else ''}: "
        f"{len(result.facts) - len(result.changed)} of {len(result.facts)} facts as in {result.compared_with}"
    ]
    for checked in result.changed:
        known = f"; as in {', '.join(checked.known_in)}" if checked.known_in else ""
        lines.append(f"{checked.state}: {checked.fact.name} ({', '.join(checked.fact.affects)}){known}")
        lines.append(f"    {checked.fact.file}")
        lines += [f"    {line}" for line in checked.diff]
    lines += [f"{use.what}: {use.verdict} ({use.why})" for use in result.uses]
    return "\n".join(lines)


def _as_json(result: ReleaseCheck) -> str:
    return json.dumps(
        {
            "package": result.package,
            "release": result.version,
            "rules": None if result.rules is None else result.rules.name,
            "vllm": {"version": result.vllm_version, "source": result.vllm_source},
            "compared_with": result.compared_with,
            "holds": result.holds,
            "uses": [{"what": use.what, "verdict": use.verdict, "why": use.why} for use in result.uses],
            "facts": [
                {
                    "name": checked.fact.name,
                    "file": checked.fact.file,
                    "affects": list(checked.fact.affects),
                    "state": checked.state,
                    "known_in": list(checked.known_in),
                    "diff": list(checked.diff),
                }
                for checked in result.facts
            ],
        },
        indent=2,
    )
