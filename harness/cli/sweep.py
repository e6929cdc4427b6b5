"""``harness sweep``: one key of an experiment over several values, a condition each, and a curve in the report.

Only the table of the experiment is made here; it is run and reported like any other.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli.addresses import (
    BackendOption,
    ExperimentArgument,
    ResumeOption,
    SetOption,
    asked_again,
    changes_of,
    override_table,
)
from harness.cli.run import RunsOption, perform
from harness.errors import SpecError


def sweep(
    experiment: ExperimentArgument,
    over: Annotated[
        str,
        typer.Option("--over", help="KEY=VALUE,VALUE,... of [server] or [workload], e.g. `server.kv_slots=8,10,12`."),
    ],
    runs: RunsOption = Path("runs"),
    resume: ResumeOption = False,
    backend: BackendOption = None,
    replicates: Annotated[int | None, typer.Option(min=1, help="Use this number of replicates.")] = None,
    changes: SetOption = None,
) -> None:
    """Run an experiment at several values of one key.

    The report draws rates and latencies along it.
    The first value is the baseline of the others. Results lie under NAME-sweep-KEY.

    Example: `harness sweep demo --over workload.num_sessions=2,4,8 --backend sim --runs runs/sweep`
    """
    from harness.records.addresses import experiment_at
    from harness.spec import parse_experiment

    path, recorded, _ = experiment_at(experiment, runs)
    table = swept_table(override_table(recorded, changes_of(changes, backend, replicates)), over)
    spec = parse_experiment(table, where=f"{path} --over {over}")
    options = asked_again(changes or [], backend, replicates)
    again = f"harness sweep {experiment} --over {shlex.quote(over)}{options}"
    perform(spec, path, runs, resume=resume, again=again)


def swept_table(table: dict[str, Any], over: str) -> dict[str, Any]:
    """The experiment with a condition per value of ``over``, each the baseline condition with that one change.

    Raises SpecError where ``over`` names no key of a server or a workload, or fewer than two values.
    """
    from harness.spec import ServerSpec, WorkloadSpec

    tables = {"server": ServerSpec, "workload": WorkloadSpec}
    key, _, text = over.partition("=")
    where, _, name = key.strip().partition(".")
    parts = [part.strip() for part in text.split(",") if part.strip()]
    values = [override_table({}, [f"value={part}"])["value"] for part in parts]
    if not name and (homes := [home for home, spec in tables.items() if where in spec.model_fields]):
        raise SpecError(f"{where!r} is a key of [{homes[0]}]", where="--over", hint=f"Write --over {homes[0]}.{over}")
    if where not in tables or not name or len(values) < 2 or len(set(map(str, values))) < len(values):
        hint = "Write e.g. --over workload.num_sessions=2,4,8"
        raise SpecError(f"{over!r} is not KEY=VALUE,VALUE,... with two different values", where="--over", hint=hint)
    conditions: list[dict[str, Any]] = table.get("condition") or [{"name": "base"}]
    base = next((each for each in conditions if each.get("name") == table.get("baseline")), conditions[0])
    short = name.replace("_", "-")
    made = [
        override_table(
            {**base, "name": f"{short}-{value}".lower(), "baseline": "", "factors": {name: value}},
            [f"{where}.{name}={part}"],
        )
        for value, part in zip(values, parts, strict=True)
    ]
    return {
        **table,
        "name": f"{table.get('name', 'experiment')}-sweep-{short}"[:64],
        "baseline": made[0]["name"],
        "condition": made,
        "title": f"{table.get('title') or table.get('name')}: {key.strip()}",
        "question": f"How do cost and latency change with {key.strip()}?",
        "analysis": "",
        "rules": [],
    }
