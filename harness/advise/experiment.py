"""Writes the experiment that would validate a proposal, and the criteria that decide it, as TOML for people to read.

New inputs, the same workload, baseline beside proposal; nothing is run or frozen here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from harness.errors import RecordsError
from harness.spec import ExperimentSpec, ServerShape, ServerSpec

REPLICATES = 3


def write_experiment(
    folder: Path, measured: ExperimentSpec, server: ServerSpec, proposed: Mapping[str, ServerShape], *, seed: int
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
    proposed: Mapping[str, ServerShape],
    seed: int,
    criteria: Path,
) -> str:
    base = server.shape
    parts = {"workload": measured.workload, "server": server, "client": measured.client, "limits": measured.limits}
    written = {
        key: part.model_dump(mode="json", exclude_defaults=True, exclude_none=True) for key, part in parts.items()
    }
    table = {
        "name": name,
        "title": f"Validation of a change to {measured.name}",
        "question": "Does the proposed configuration save what the simulator promises?",
        "backend": measured.backend,
        "time_scale": measured.time_scale,
        "replicates": max(REPLICATES, measured.replicates),
        "base_seed": seed,
        "baseline": "baseline",
        "rules": [str(criteria)],
        **{key: keys for key, keys in written.items() if keys or key in ("workload", "server")},
        "condition": [
            {"name": "baseline"},
            *(
                {"name": condition, **({"server": changes} if (changes := _changes(candidate, base)) else {})}
                for condition, candidate in proposed.items()
            ),
        ],
    }
    return (
        f"# Written by `harness advise` from the sealed runs of {measured.name!r}: new inputs of the same workload.\n"
        f"# Baseline {base.label}; proposed: {'; '.join(candidate.label for candidate in proposed.values())}.\n"
        f"{tomli_w.dumps(table)}"
    )


def _changes(candidate: ServerShape, base: ServerShape) -> dict[str, Any]:
    """Keys of [server] in which a proposal differs from the baseline."""
    sides = [
        {
            "decode_buckets": one.decode_buckets,
            "max_num_seqs": one.max_num_seqs,
            "kv_slots": one.kv_slots,
            # TOML has no null: without a lowered admission limit, the limit itself is written where they differ.
            "max_active_seqs": one.max_active_seqs or one.max_num_seqs,
        }
        for one in (candidate, base)
    ]
    changes = {key: value for key, value in sides[0].items() if value != sides[1][key]}
    if candidate.max_active_seqs is None and base.max_active_seqs is None:
        changes.pop("max_active_seqs", None)
    return changes


def _criteria(name: str, proposed: Mapping[str, ServerShape]) -> str:
    table = {
        "name": f"{name}-criteria"[:64],
        "version": 1,
        "kind": "cost-validation",
        "source": "paper 4-3",
        "question": "Is the predicted cost ratio right, and on the right side of 1?",
        "conditions": list(proposed),
        "min_replicates": REPLICATES,
        "tolerance": "revised",
        "tau0": 0.02,
        "max_error": 0.03,
        "equivalence_band": [0.98, 1.02],
    }
    head = "# The paper's criteria of cost validation, for the proposed conditions; freeze before measuring.\n"
    return head + tomli_w.dumps(table)
