"""What was run, as names and values that people can read: specs, versions, machine, commands.

Values are shown as the manifests hold them; where runs differ, the page says so. Nothing is interpreted.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.analysis.compare.ratio import ran_until_decided
from harness.errors import HarnessError
from harness.measure.records.manifest import LaunchReport, Manifest, table_at
from harness.measure.records.run import SealedRun
from harness.model.engine.config import sequences_that_fit
from harness.model.spec.workload import unused_keys

Facts = tuple[str, tuple[tuple[str, str], ...]]
# Long, or different in every run by nature, or shown elsewhere on the page.
HIDDEN_FACTS = {
    "argv",
    "boot_id",
    "captured_at_utc",
    "git_changed",
    "load_average_1min",
    "question",
    "realtime_minus_monotonic_ns",
    "title",
}
MAX_FACT_LENGTH = 160


def gather_facts(runs: Sequence[SealedRun]) -> tuple[Facts, ...]:
    """Groups of (name, value) of the whole experiment; a value that is not the same in every run says so."""
    manifests = [run.manifest for run in runs]
    groups: list[tuple[str, list[Mapping[str, Any]]]] = [
        ("Experiment", [_scalars(_part(manifest, "experiment")) for manifest in manifests]),
        ("Workload", [_workload(manifest) for manifest in manifests]),
        ("Plans", [_plans(runs)]),
        ("Server, before a condition changes it", [_part(manifest, "server", inner=True) for manifest in manifests]),
        ("KV memory", [_kv_memory(run) for run in runs]),
        ("Client", [_part(manifest, "client") for manifest in manifests]),
        ("Limits", [_part(manifest, "limits") for manifest in manifests]),
        ("Run status", [_run_status(manifest) for manifest in manifests]),
        ("Observation", [manifest.observation.model_dump() for manifest in manifests]),
        *(
            (f"Provenance: {name}", [_provenance(manifest, name) for manifest in manifests])
            for name in dict.fromkeys(key for manifest in manifests for key in manifest.provenance)
        ),
    ]
    facts = [(name, _shared_pairs(tables)) for name, tables in groups]
    return tuple((name, pairs) for name, pairs in facts if pairs)


def _workload(manifest: Manifest) -> Mapping[str, Any]:
    """The requested workload, without the keys that mean nothing for its source."""
    workload = _part(manifest, "workload")
    strange = unused_keys(str(workload.get("source", "")))
    return {name: value for name, value in workload.items() if name not in strange}


def _run_status(manifest: Manifest) -> Mapping[str, Any]:
    """Exploratory, or confirmatory and by which frozen file; the scheduler rules that the server followed."""
    record = manifest.preregistration
    standing = {"runs are": manifest.label, "rules in force": manifest.server_spec.get("rules", "")}
    return standing | ({} if record is None else record.model_dump())


def _plans(runs: Sequence[SealedRun]) -> Mapping[str, Any]:
    """Where the plans' numbers come from and what they leave out, each value once; replicates are drawn apart."""
    values: dict[str, dict[str, None]] = {}
    for run in runs:
        plan = run.plan_if_readable
        for name, value in {} if plan is None else plan.provenance.items():
            if name != "workload" and value != "":
                values.setdefault(name, {})[fact_text(value)] = None
    return {name: ", ".join(each) + " (by run)" * (len(each) > 1) for name, each in values.items()}


def _kv_memory(run: SealedRun) -> Mapping[str, Any]:
    """Of paged KV memory: how many of the plan's longest requests fit at a time, in each engine; {} for slots."""
    try:
        if not run.server.is_paged:
            return {}
    except HarnessError:
        return {}
    plan, shown = run.plan_if_readable, table_at(run.manifest.effective, "server")
    blocks, size = shown.get("num_gpu_blocks"), shown.get("block_size")
    if plan is None or not isinstance(blocks, int) or not isinstance(size, int):
        return {"longest requests at a time": "unknown: the server shows no number of blocks, or not their size"}
    longest = max(request.stream_tokens for request in plan.requests)
    stated = LaunchReport.tolerant(table_at(run.manifest.effective, "launch")).cache_config_info
    tokens = stated.get("kv_cache_size_tokens", "")
    is_less = tokens.isdecimal() and int(tokens) < (blocks - 1) * size
    return {
        "longest requests at a time": int(tokens) // longest if is_less else sequences_that_fit(blocks, size, longest),
        "longest request, tokens": longest,
        "tokens of a block": size,
        "blocks": blocks,
        **({"tokens that the server states (kv_cache_size_tokens)": int(tokens)} if is_less else {}),
    }


def _part(manifest: Manifest, name: str, *, inner: bool = False) -> Mapping[str, Any]:
    """A table of the request; inner: the experiment's own, before a condition changed it, where that is recorded."""
    requested = manifest.requested
    of_experiment = requested.get("experiment", {}).get(name)
    part = (of_experiment or requested.get(name)) if inner else (requested.get(name) or of_experiment)
    return part if isinstance(part, Mapping) else {}


def _provenance(manifest: Manifest, name: str) -> Mapping[str, Any]:
    part = manifest.provenance.get(name, {})
    return part if isinstance(part, Mapping) else {name: part}


def _scalars(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if not isinstance(value, (dict, list, tuple))}


def _shared_pairs(tables: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    flat = [dict(_flatten(table)) for table in tables]
    pairs: list[tuple[str, str]] = []
    for name in dict.fromkeys(name for table in flat for name in table):
        values = list(dict.fromkeys(table.get(name, "") for table in flat))
        text = values[0] if len(values) == 1 else f"differs between runs ({len(values)} values)"
        if text:
            pairs.append((name, text))
    return tuple(pairs)


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in table.items():
        if key in HIDDEN_FACTS:
            continue
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        else:
            yield name, fact_text(value)


def fact_text(value: Any) -> str:
    """A value of a spec or a manifest as people write it: {1,2,4,8}, yes, 0.5; "" for what is absent."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return " ".join(f"{key} {fact_text(item)}" for key, item in value.items())
    is_list = isinstance(value, (list, tuple))
    if is_list and not value:
        return "\u2013"
    text = "{" + ",".join(fact_text(item) for item in value) + "}" if is_list else str(value)
    return text if len(text) <= MAX_FACT_LENGTH else text[: MAX_FACT_LENGTH - 1] + "\u2026"


def written_workload(manifest: Manifest) -> Mapping[str, Any]:
    """What a run's condition replayed: the experiment's workload with the condition's own keys."""
    return {**_part(manifest, "workload", inner=True), **(manifest.requested_condition.get("workload") or {})}


def changes_from_experiment(manifest: Manifest) -> tuple[tuple[str, str, str], ...]:
    """What a condition that is its own baseline changes in the experiment's server and workload."""
    server = _part(manifest, "server", inner=True)
    return (
        *changes({**server, **(manifest.requested_condition.get("server") or {})}, server),
        *changes(written_workload(manifest), _part(manifest, "workload", inner=True), "workload."),
    )


def changes(this: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> tuple[tuple[str, str, str], ...]:
    """(key, value before, value now) wherever two tables differ."""
    keys = list(dict.fromkeys([*other, *this]))
    return tuple(
        (prefix + key, fact_text(other.get(key)) or "default", fact_text(this.get(key)) or "default")
        for key in keys
        if this.get(key) != other.get(key)
    )


def num_planned(run: SealedRun) -> int:
    """Runs that the experiment asks for; 0 where its stopping rule decides or the manifest does not say."""
    experiment = run.manifest.requested_experiment
    if ran_until_decided(run):
        return 0
    return len(experiment.get("condition") or ()) * int(experiment.get("replicates") or 0)


def reproduce_command(run: SealedRun) -> str:
    """The commands that perform the experiment again and write the report again."""
    manifest = run.manifest
    argv = manifest.provenance.get("argv")
    source = str(manifest.requested.get("spec_source") or f"{manifest.experiment}.toml")
    root = run.path.parent.parent.parent
    until = " --until decided" if ran_until_decided(run) else ""
    started = shlex.join(str(part) for part in argv) if isinstance(argv, (list, tuple)) and argv else ""
    lines = ["# as it was started", started] if started else []
    lines += [
        "# again, into a new folder",
        f"harness run {shlex.quote(source)}{until} --runs NEW_FOLDER",
        "# this report, from the sealed runs",
        f"harness report {manifest.experiment} --runs {shlex.quote(str(root))}",
    ]
    return "\n".join(lines)


def spec_text(run: SealedRun) -> str:
    """The requested experiment as JSON, defaults filled in; empty when the manifest holds none."""
    experiment = run.manifest.requested_experiment
    return json.dumps(experiment, indent=2, ensure_ascii=False) if experiment else ""
