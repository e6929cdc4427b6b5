"""Refuses, before the first run, what cannot be measured: unknown analyses, missing models, ports and server settings.

A single error names every setting that nobody would apply or show, for all conditions, and the ways out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.analysis.catalogue import analysis_named
from harness.engine.config import HARNESS_KEYS, changed_keys, differences, keys_shown, requested_settings
from harness.errors import ServerError, SpecError
from harness.experiment import PlannedRun, PlannedRuns
from harness.kinds import BackendKind, kind_named
from harness.redact import redacted_text
from harness.runner.backends import backend_named

URL_EACH = "Start a server for each condition and name it: server.url in [[condition]]"
DECLARE = "Where you know that they hold, set server.declared = true: reports then say declared, not verified"


def checked(planned: PlannedRuns) -> PlannedRuns:
    """The same runs; SpecError for an unknown analysis, or a compiled model that is missing or different."""
    analysis_named(planned.spec.analysis, planned.spec.name)
    for name, runs in planned.by_condition.items():
        try:
            backend_named(planned.spec.backend).check_server(runs[0].server)
        except SpecError as error:
            raise SpecError(error.what, where=f"condition {name!r}: {error.where}", hint=error.hint) from error
    return planned


def check_hosts(runs: Iterable[PlannedRun]) -> None:
    """Refuse, before anything starts, runs that need something this host does not have now."""
    of_conditions = list({run.condition.name: run for run in runs}.values())
    for run in of_conditions:
        backend_named(run.spec.backend).check_host(run.server)
    refuse_what_is_missing(of_conditions)


def refuse_what_is_missing(runs: Sequence[PlannedRun]) -> None:
    """One error for everything that running servers lack, and for settings that nothing would show."""
    lacks: list[str] = []
    for run in {(run.server.url, run.server.api_key_env): run for run in runs}.values():
        lacks += [f"{redacted_text(run.server.url)}: {one}" for one in backend_named(run.spec.backend).lacks(run)]
    try:
        refuse_unshown_settings(runs)
    except SpecError as error:
        if not lacks:
            raise
        lacks.append(f"{error.what}. {error.hint}")
    if not lacks:
        return
    raise ServerError(
        "; ".join(lacks),
        where=f"backend {runs[0].spec.backend}",
        hint="Nothing was performed. `harness doctor --url URL` asks a server again",
    )


def refuse_unshown_settings(runs: Iterable[PlannedRun]) -> None:
    """SpecError unless every setting that a condition varies is, or will be, shown in each condition."""
    problems: list[str] = []
    can_declare = False
    of_conditions = {run.condition.name: run for run in runs}
    for name, run in of_conditions.items():
        backend, server = backend_named(run.spec.backend), run.server
        varied = run.spec.varied_settings - HARNESS_KEYS
        if not varied and backend.kind.is_restarted:
            continue
        in_force = backend.in_force(server)
        held = varied if backend.kind.is_restarted else varied | changed_keys(server)
        problems += [f"condition {name}: {text}" for text in differences(server, in_force, held)]
        if (unshown := varied - backend.shown_keys - keys_shown(in_force)) and not server.declared:
            can_declare = True
            problems.append(f"condition {name}: nothing shows {_named(unshown, requested_settings(server))}")
    if problems:
        kind = kind_named(next(iter(of_conditions.values())).spec.backend)
        raise SpecError(
            "; ".join(problems), where=f"backend {kind.name}", hint=_ways_out(kind, can_declare=can_declare)
        )


def _named(keys: Iterable[str], wanted: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {wanted[key]}" for key in sorted(keys))


def _ways_out(kind: BackendKind, *, can_declare: bool) -> str:
    other = URL_EACH if not kind.is_restarted else "Leave those keys out, or choose another backend"
    return f"{other}. {DECLARE}" if can_declare else other
