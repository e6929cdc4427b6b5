"""Writes the experiment that would validate a proposal, and the criteria that decide it, as TOML for people to read.

New inputs, the same workload, baseline beside proposal; nothing is run or frozen here.
Next: ``harness freeze`` fixes both files before anything is measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.errors import RecordsError
from harness.sim.search.space import Candidate, candidate_of
from harness.spec import ExperimentSpec, ServerSpec

REPLICATES = 3


def write_experiment(
    folder: Path, measured: ExperimentSpec, server: ServerSpec, proposed: Mapping[str, Candidate], *, seed: int
) -> tuple[Path, Path]:
    """(experiment file, criteria file). proposed: by the name of their condition. Raises RecordsError on a full
    disk.
    """
    name = f"{measured.name}-validation"[:64]
    experiment, criteria = folder / f"{name}.toml", folder / f"{name}-criteria.toml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        criteria.write_text(_criteria(name, proposed), encoding="utf-8")
        experiment.write_text(_experiment(name, measured, server, proposed, seed, criteria), encoding="utf-8")
    except OSError as error:
        raise RecordsError(f"cannot be written ({error.strerror})", where=str(folder), hint="Choose another") from error
    return experiment, criteria


def _experiment(
    name: str,
    measured: ExperimentSpec,
    server: ServerSpec,
    proposed: Mapping[str, Candidate],
    seed: int,
    criteria: Path,
) -> str:
    base = candidate_of(server)
    lines = [
        f"# Written by `harness advise` from the sealed runs of {measured.name!r}: new inputs of the same workload.",
        f"# Baseline {base.label}; proposed: " + "; ".join(candidate.label for candidate in proposed.values()) + ".",
        f"name = {_toml(name)}",
        f"title = {_toml(f'Validation of a change to {measured.name}')}",
        'question = "Does the proposed configuration save what the simulator promises?"',
        f"backend = {_toml(measured.backend)}",
        f"time_scale = {_toml(measured.time_scale)}",
        f"replicates = {max(REPLICATES, measured.replicates)}",
        f"base_seed = {seed}",
        'baseline = "baseline"',
        f"rules = [{_toml(str(criteria))}]",
        "",
        "[workload]",
        *_table(measured.workload.model_dump(mode="json", exclude_defaults=True, exclude_none=True)),
        "",
        "[server]",
        *_table(server.model_dump(mode="json", exclude_defaults=True, exclude_none=True)),
    ]
    for section, values in (("client", measured.client), ("limits", measured.limits)):
        table = values.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
        if table:
            lines += ["", f"[{section}]", *_table(table)]
    lines += ["", "[[condition]]", 'name = "baseline"']
    for condition, candidate in proposed.items():
        lines += ["", "[[condition]]", f"name = {_toml(condition)}"]
        if candidate.buckets != base.buckets:
            lines.append(f"server.decode_buckets = {_toml(list(candidate.buckets))}")
        if candidate.limit != base.limit:
            lines.append(f"server.max_num_seqs = {candidate.limit}")
        if candidate.kv_slots != base.kv_slots:
            lines.append(f"server.kv_slots = {candidate.kv_slots}")
    return "\n".join(lines) + "\n"


def _criteria(name: str, proposed: Mapping[str, Candidate]) -> str:
    return "\n".join(
        [
            "# The paper's criteria of cost validation, for the proposed conditions; freeze before measuring.",
            f"name = {_toml(f'{name}-criteria'[:64])}",
            "version = 1",
            'kind = "cost-validation"',
            'source = "paper 4-3"',
            'question = "Is the predicted cost ratio right, and on the right side of 1?"',
            f"conditions = {_toml(list(proposed))}",
            f"min_replicates = {REPLICATES}",
            'tolerance = "revised"',
            "tau0 = 0.02",
            "max_error = 0.03",
            "equivalence_band = [0.98, 1.02]",
            "",
        ]
    )


def _table(values: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_toml(value)}" for key, value in values.items()]


def _toml(value: Any) -> str:
    """A TOML value on one line; strings as JSON writes them, which TOML reads alike."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(each) for each in value) + "]"
    return json.dumps(value, ensure_ascii=False)
