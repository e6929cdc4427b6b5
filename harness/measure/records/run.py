"""A sealed run, as all code reads it: each file is parsed at most once, each figure computed at most once.

The requested configuration is returned as validated specifications, facts about server and client as typed values.
Nothing here computes a figure or writes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ValidationError

from harness.errors import PlanError, RecordsError, in_one_line, unknown_name
from harness.kinds import kind_of_run, origin_note
from harness.measure.records import layout, schema
from harness.measure.records.disk import is_as_written_here, is_unfinished, known_entry
from harness.measure.records.manifest import ClientAudit, LaunchReport, Manifest
from harness.plugins import BackendKind
from harness.run_key import RunKey
from harness.stacks.rbln.rules.kv_rules import AUTO

if TYPE_CHECKING:
    from harness.model.engine import CostModel
    from harness.model.plan.model import Plan
    from harness.model.spec import (
        ClientSpec,
        ConditionSpec,
        ExperimentSpec,
        FleetSpec,
        LimitsSpec,
        ServerSpec,
        WorkloadSpec,
    )

_RESTORE = "Restore the file from a copy, or move the run away"
_REBUILD = "`harness records derive` rebuilds derived tables"

Value = TypeVar("Value")
Parsed = TypeVar("Parsed", bound=BaseModel)


@dataclass(frozen=True, repr=False)
class SealedRun:
    """A sealed run: its folder and manifest. Everything else is read at first use and kept."""

    path: Path
    manifest: Manifest
    _values: dict[object, object] = field(default_factory=dict[object, object], init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        verdict = "valid" if self.is_valid else f"INVALID ({', '.join(self.invalid_reasons)})"
        return f"SealedRun {self.experiment}/{self.label}: {verdict}, {self.manifest.backend}, in {self.path}"

    @property
    def experiment(self) -> str:
        return self.manifest.experiment

    @property
    def condition(self) -> str:
        return self.manifest.condition

    @property
    def replicate(self) -> int:
        return self.manifest.replicate

    @property
    def invalid_reasons(self) -> tuple[str, ...]:
        return self.manifest.invalid_reasons

    @property
    def key(self) -> RunKey:
        return RunKey(self.manifest.experiment, self.manifest.condition, self.manifest.replicate)

    @property
    def label(self) -> str:
        return f"{self.condition}/{self.replicate}"

    @property
    def is_valid(self) -> bool:
        return self.manifest.is_valid

    @cached_property
    def spec(self) -> ExperimentSpec:
        """Its experiment; RecordsError when the manifest holds none that this version reads."""
        from harness.model.spec import ExperimentSpec

        return self._parsed(ExperimentSpec, self.manifest.requested.get("experiment", {}), "experiment")

    @cached_property
    def condition_spec(self) -> ConditionSpec:
        """Its condition in the experiment."""
        for condition in self.spec.condition:
            if condition.name == self.condition:
                return condition
        raise RecordsError(
            f"its experiment has no condition {self.condition!r}", where=str(self.path), hint="Restore it"
        )

    @cached_property
    def workload(self) -> WorkloadSpec:
        """The workload it replayed."""
        return self.spec.workload_of(self.condition_spec)

    @cached_property
    def server(self) -> ServerSpec:
        """The requested server configuration; rules "auto" are replaced by those of the server."""
        from harness.model.spec import ServerSpec

        requested = self._parsed(ServerSpec, self.manifest.requested_server, "server")
        named = requested.rules if requested.rules != AUTO else str(self.manifest.server_spec.get("rules", AUTO))
        named_server = requested.model_copy(update={"rules": named})
        version = self.manifest.vllm_version if named_server.is_vllm else self.manifest.serving_version
        return named_server.model_copy(update={"rules": named_server.rule_set(version).name})

    @property
    def simulated_server(self) -> ServerSpec:
        """Its server for the simulator: keys of paged memory that were left to the server have the values in force."""
        from harness.model.spec.server import PAGED_KEYS

        in_force, server = self.manifest.effective.get("server", {}), self.server
        left = {key for key in PAGED_KEYS & in_force.keys() if getattr(server, key) is None}
        return server.model_copy(update={key: in_force[key] for key in left})

    @cached_property
    def client(self) -> ClientSpec:
        """The requested client configuration."""
        from harness.model.spec import ClientSpec

        return self._parsed(ClientSpec, self.manifest.requested.get("client", {}), "client")

    @cached_property
    def limits(self) -> LimitsSpec:
        """The limits beyond which it is INVALID."""
        from harness.model.spec import LimitsSpec

        return self._parsed(LimitsSpec, self.manifest.requested.get("limits", {}), "limits")

    @cached_property
    def fleet_spec(self) -> FleetSpec | None:
        """The fleet of its experiment; None without one."""
        from harness.model.spec import FleetSpec

        requested = self.manifest.requested_experiment.get("fleet")
        return None if requested is None else self._parsed(FleetSpec, requested, "fleet")

    @property
    def device(self) -> int | None:
        """The device of its fleet; None outside a fleet."""
        return None if self.manifest.fleet is None else self.manifest.fleet.device

    @cached_property
    def launch(self) -> LaunchReport:
        """Facts about the server, from its log and metrics."""
        return LaunchReport.tolerant(self.manifest.effective.get("launch"))

    @cached_property
    def audit(self) -> ClientAudit:
        """Facts about the client and its machine."""
        return ClientAudit.tolerant(self.manifest.client_audit)

    @cached_property
    def plan(self) -> Plan:
        """The plan it sent; PlanError when this version does not read the file."""
        from harness.model.plan.files import read_plan

        return read_plan(self.file(layout.PLAN))

    @property
    def plan_if_readable(self) -> Plan | None:
        """Its plan, or None when this version does not read it: many figures do not need it."""
        try:
            return self.plan
        except PlanError:
            return None

    @property
    def cost_file(self) -> Path:
        """The copy of the cost file in the run; where the run has none, the file of that name."""
        from harness.model.engine.cost import find_cost_file

        is_kept = layout.COST_MODEL in self.manifest.files
        name = str(self.manifest.server_spec.get("cost_model", "paper"))
        return self.file(layout.COST_MODEL) if is_kept else find_cost_file(name)

    @cached_property
    def cost_model(self) -> CostModel:
        """The cost model of modelled device time (A)."""
        from harness.model.engine import load_cost_model

        return load_cost_model(self.cost_file)

    def group_sessions(self) -> dict[str, range]:
        """Session indices of every named group, in order; one group "all" when the workload has none."""
        groups: dict[str, range] = {}
        first = 0
        for group, _workload in self.workload.groups_or_self():
            groups[group.name] = range(first, first + group.num_sessions)
            first += group.num_sessions
        return groups

    @property
    def is_by_simulator(self) -> bool:
        """Whether the simulator wrote the derived tables itself, from its events: there is no log and no scrape.

        Runs that were simulated before this was so have both.
        """
        return kind_of_run(self.manifest.backend).is_virtual and layout.SERVER_LOG not in self.manifest.files

    def file(self, name: str) -> Path:
        """Path of a file of this run, by its name in ``layout``; RecordsError when it is not as it was sealed.

        Its bytes are hashed once in this process. The path of a file that the run never had does not exist.
        """
        path = self.path / name
        entry = self.manifest.files.get(name)
        if entry is not None:
            if self._hash_of(path) != entry.sha256:
                raise damaged(path, "differs from what was sealed (SHA-256)")
        elif name != layout.MANIFEST and os.path.lexists(path):
            raise damaged(path, "was added after sealing")
        return path

    def table_file(self, name: str) -> Path | None:
        """Path of table ``name`` (a key of schema.TABLES) as it was sealed, None when the run has none."""
        within = layout.table_path(name)
        derived = self.manifest.derived.get(name)
        if derived is None:
            path = self.file(within)
            return path if within in self.manifest.files else None
        path = self.path / within
        hint = _RESTORE if self.is_by_simulator else _REBUILD
        if self._hash_of(path, hint) != derived.file_sha256:
            # It may have been rebuilt by this version: equal content, in the bytes that this version writes.
            table = schema.conform(name, self._parquet(path))
            if schema.content_sha256(table) != derived.content_sha256 or not is_as_written_here(path, table):
                raise damaged(path, "differs from what was sealed", hint=hint)
        return path

    def table(self, name: str) -> pa.Table:
        """Table ``name`` of this run (a key of schema.TABLES), empty when the run has none; SpecError for others."""
        if name not in schema.TABLES:
            raise unknown_name("table", name, schema.TABLES)
        if name == "chunks":
            # It has a row for each token: too large to keep for every run of an experiment.
            return self._read_table(name)
        if name not in self._values:
            self._values[name] = self._read_table(name)
        return cast("pa.Table", self._values[name])

    def with_targets(self, **targets: float) -> SealedRun:
        """The same run held to other targets than its experiment states: keys of [slo]. Its files stay as they are."""
        experiment = self.manifest.requested_experiment
        experiment["slo"] = dict(experiment.get("slo") or {}) | targets
        requested = self.manifest.requested | {"experiment": experiment}
        return SealedRun(self.path, self.manifest.model_copy(update={"requested": requested}))

    def once(self, compute: Callable[[SealedRun], Value]) -> Value:
        """``compute(self)``, at most once for this object."""
        if compute not in self._values:
            self._values[compute] = compute(self)
        return cast("Value", self._values[compute])

    def forget(self) -> None:
        """Drop tables and figures that were read: derived tables were rebuilt."""
        self._values.clear()

    def _read_table(self, name: str) -> pa.Table:
        path = self.table_file(name)
        return schema.empty(name) if path is None else schema.with_newer_columns(name, self._parquet(path))

    def _parquet(self, path: Path) -> pa.Table:
        try:
            # ParquetFile, not a dataset: a folder named key=value above it must not become a column.
            table = pq.ParquetFile(path).read(use_threads=False)
        except (OSError, pa.ArrowException) as error:
            if isinstance(error, MemoryError) or "launch worker thread" in str(error):
                raise MemoryError(in_one_line(error)) from error
            raise damaged(path, f"cannot be read ({in_one_line(error)})") from error
        return table

    def _parsed(self, model: type[Parsed], requested: Mapping[str, Any], what: str) -> Parsed:
        try:
            return model.model_validate(requested)
        except ValidationError as error:
            raise RecordsError(
                f"its manifest holds no {what} that this version reads ({error.error_count()} problems)",
                where=str(self.path),
                hint="Read it with the harness version that sealed it",
            ) from error

    def check_listing(self) -> None:
        """RecordsError when a file of the manifest is missing, no regular file, misnamed or of another size.

        Cheap: no bytes are read. Derived tables are checked when they are read, so that they can be rebuilt.
        """
        for name, entry in self.manifest.files.items():
            path = self.path / name
            if not layout.is_listed_name(name):
                raise damaged(self.path / layout.MANIFEST, f"names {name!r}, which cannot be a file of a run")
            size_bytes = self._regular(path).st_size
            if size_bytes != entry.size_bytes:
                raise damaged(path, f"has {size_bytes} bytes, {entry.size_bytes} were sealed")
        for name in self.manifest.derived:
            if name not in schema.DERIVED_TABLES:
                raise damaged(self.path / layout.MANIFEST, f"names {name!r}, which is not a derived table")

    def verify(self) -> None:
        """Raise RecordsError naming the first file whose bytes differ from what was sealed, or that was added."""
        self.check_listing()
        for name in self.manifest.files:
            self.file(name)
        for name in self.manifest.derived:
            self.table_file(name)
        self._check_foreign()
        self._check_requests()

    def _check_foreign(self) -> None:
        known = {*self.manifest.files, layout.MANIFEST, *map(layout.table_path, self.manifest.derived)}
        folders = {str(parent) for name in known for parent in PurePosixPath(name).parents}
        for path in sorted(self.path.rglob("*")):
            is_folder = stat.S_ISDIR(path.lstat().st_mode)
            if path.parent.name == layout.DERIVED and is_unfinished(path):
                continue
            if path.relative_to(self.path).as_posix() not in (folders | {layout.DERIVED} if is_folder else known):
                raise damaged(path, "was added after sealing")

    def _check_requests(self) -> None:
        """Manifest, plan and requests table hold the same requests (without a plan: the same number)."""
        columns = ["session", "request", "planned_generate_tokens"]
        rows = schema.conform("requests", self.table("requests")).select(columns).to_pylist()
        manifest = self.path / layout.MANIFEST
        if len(rows) != self.manifest.planned_requests:
            raise damaged(
                manifest, f"names {self.manifest.planned_requests} planned requests, the table has {len(rows)}"
            )
        if layout.PLAN not in self.manifest.files or (plan := self.plan_if_readable) is None:
            return
        if plan.hash != self.manifest.plan_hash:
            raise damaged(manifest, f"names plan {self.manifest.plan_hash[:12]}, its plan is {plan.hash[:12]}")
        planned = [
            (session, request, of_request.generate_tokens)
            for session, of_session in enumerate(plan.sessions)
            for request, of_request in enumerate(of_session.requests)
        ]
        if planned != sorted(tuple(row[column] for column in columns) for row in rows):
            raise damaged(self.path / layout.PLAN, "is not the plan that the requests of this run follow")
        self._check_draw(plan)

    def _check_draw(self, plan: Plan) -> None:
        """The plan was drawn for this replicate: a run copied as another replicate has the wrong draw."""
        if not self.manifest.requested_experiment:
            return
        draw = (plan.seed, plan.replicate)
        expected = (self.spec.base_seed, self.spec.input_of(self.replicate))
        if draw != expected:
            seed, number = draw
            raise damaged(
                self.path / layout.PLAN,
                f"is draw {number} of seed {seed}, and replicate {self.replicate} has draw {expected[1]} of seed "
                f"{expected[0]}: this run was copied from another replicate",
                hint="Move the copy away, and perform the run that is missing",
            )

    def _hash_of(self, path: Path, hint: str = _RESTORE) -> str:
        self._regular(path, hint)
        try:
            return known_entry(path).sha256
        except OSError as error:
            raise damaged(path, f"cannot be read ({error.strerror})", hint=hint) from error

    def _regular(self, path: Path, hint: str = _RESTORE) -> os.stat_result:
        """The system's facts of a regular file of this run; a link on its path counts as damage."""
        for folder in path.relative_to(self.path).parents:
            if (self.path / folder).is_symlink():
                raise damaged(self.path / folder, "is a symbolic link")
        try:
            facts = path.lstat()
        except OSError as error:
            raise damaged(path, f"is missing ({error.strerror})", hint=hint) from error
        if not stat.S_ISREG(facts.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(facts.st_mode) else "no regular file"
            raise damaged(path, f"is {kind}", hint=hint)
        return facts


def once_per_run(compute: Callable[[SealedRun], Value]) -> Callable[[SealedRun], Value]:
    """A figure of a run, computed at first use and kept with the run's object."""

    @wraps(compute)
    def figure(run: SealedRun) -> Value:
        return run.once(compute)

    return figure


def by_condition(runs: Iterable[SealedRun]) -> dict[str, list[SealedRun]]:
    """Valid runs by condition, conditions in the order of the experiment, runs by replicate."""
    counted = [run for run in runs if run.is_valid]
    order = {condition.name: place for place, condition in enumerate(counted[0].spec.condition)} if counted else {}
    grouped: dict[str, list[SealedRun]] = {}
    for run in sorted(counted, key=lambda run: (order.get(run.condition, len(order)), run.replicate)):
        grouped.setdefault(run.condition, []).append(run)
    return grouped


class HasManifest(Protocol):
    """A run, or figures of one that carry its manifest."""

    @property
    def manifest(self) -> Manifest: ...


def origin_of(runs: Iterable[HasManifest]) -> str:
    """The note on the origin of these runs' figures: where they are from, and which settings were declared."""
    listed = list(runs)
    manifests = [run.manifest for run in listed]
    kinds = dict.fromkeys(origin_note(of.kind.name, is_on_cpu=of.is_on_cpu, device=of.device) for of in manifests)
    return " ".join(filter(None, (*kinds, served_by(listed), declared_by(listed))))


def kind_of(runs: Iterable[HasManifest]) -> BackendKind:
    """The kind of server behind these runs; of several, the one that says least of a device."""
    kinds = [run.manifest.kind for run in runs]
    return min(kinds, key=lambda kind: (not kind.is_virtual, kind.has_device is not False))


def served_by(runs: Iterable[HasManifest]) -> str:
    """ "Served by vllm 0.30.0."; empty where no stack did."""
    stacks = sorted({run.manifest.stack for run in runs} - {""})
    return f"Served by {', '.join(stacks)}." if stacks else ""


def declared_by(runs: Iterable[HasManifest]) -> str:
    """ "Declared, not verified: base (kv_slots = 8)."; empty where every setting was shown."""
    declared = dict.fromkeys((run.manifest.condition, run.manifest.declared_settings) for run in runs)
    named = "; ".join(f"{condition} ({text.partition(': ')[2]})" for condition, text in declared if text)
    return f"Declared, not verified: {named}." if named else ""


def damaged(path: Path, what: str, *, hint: str = _RESTORE) -> RecordsError:
    """The error of a run that is not as it was sealed."""
    return RecordsError(what, where=str(path), hint=hint)
