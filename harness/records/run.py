"""One sealed run, and how everyone reads it: each file is parsed at most once, each figure computed at most once.

What was asked for comes back as checked specs, what the server and the client said as typed facts. Nothing here
computes a figure or writes. Next: ``harness.analysis`` computes figures of a SealedRun with ``once_per_run``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ValidationError

from harness.errors import PlanError, RecordsError
from harness.records import layout, schema
from harness.records.disk import file_entry
from harness.records.facts import ClientAudit, LaunchReport
from harness.records.manifest import Manifest
from harness.spec import ClientSpec, ConditionSpec, ExperimentSpec, LimitsSpec, ServerSpec, WorkloadSpec

if TYPE_CHECKING:
    from harness.engine import CostModel
    from harness.plan import Plan

Value = TypeVar("Value")
Parsed = TypeVar("Parsed", bound=BaseModel)


class RunKey(NamedTuple):
    """What names a run: one condition of one replicate of an experiment."""

    experiment: str
    condition: str
    replicate: int


@dataclass(frozen=True)
class SealedRun:
    """One sealed run: its folder and its manifest; everything else is read when asked for, and kept."""

    path: Path
    manifest: Manifest
    _values: dict[object, object] = field(default_factory=dict[object, object], init=False, repr=False, compare=False)

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
        """The experiment it was made for; RecordsError when the manifest holds none that this version reads."""
        return self._parsed(ExperimentSpec, self.manifest.requested.get("experiment", {}), "experiment")

    @cached_property
    def condition_spec(self) -> ConditionSpec:
        """Its condition, as it was written."""
        for condition in self.spec.condition:
            if condition.name == self.condition:
                return condition
        raise RecordsError(
            f"its experiment has no condition {self.condition!r}", where=str(self.path), hint="Restore it"
        )

    @cached_property
    def workload(self) -> WorkloadSpec:
        """What it replayed."""
        return self.spec.workload_of(self.condition_spec)

    @cached_property
    def server(self) -> ServerSpec:
        """The server configuration that was asked for; rules that it left open are those of the version that served."""
        asked = self._parsed(ServerSpec, self.manifest.requested_server, "server")
        return asked.model_copy(update={"rules": asked.rule_set(self.manifest.serving_version).name})

    @cached_property
    def client(self) -> ClientSpec:
        """How its plan was to be replayed."""
        return self._parsed(ClientSpec, self.manifest.requested.get("client", {}), "client")

    @cached_property
    def limits(self) -> LimitsSpec:
        """What it was held to."""
        return self._parsed(LimitsSpec, self.manifest.requested.get("limits", {}), "limits")

    @cached_property
    def launch(self) -> LaunchReport:
        """What the server said about itself."""
        return LaunchReport.tolerant(self.manifest.effective.get("launch"))

    @cached_property
    def audit(self) -> ClientAudit:
        """What the client and its machine did."""
        return ClientAudit.tolerant(self.manifest.client_audit)

    @cached_property
    def plan(self) -> Plan:
        """What it sent; PlanError when the file is gone or of a version that this one does not read."""
        from harness.plan import read_plan

        return read_plan(self.file(layout.PLAN))

    @property
    def plan_if_readable(self) -> Plan | None:
        """Its plan, or None: its bytes were sealed with the run, and the other figures do not hang on it."""
        try:
            return self.plan
        except PlanError:
            return None

    @cached_property
    def cost_model(self) -> CostModel:
        """What prices channel A: the copy that lies in the run; runs older than such copies, the file of that name."""
        from harness.engine import load_cost_model

        path = self.file(layout.COST_MODEL)
        return load_cost_model(path if path.is_file() else str(self.manifest.server_spec.get("cost_model", "paper")))

    def group_sessions(self) -> dict[str, range]:
        """Session indices of every named group, in order; one group "all" when the workload has none."""
        found: dict[str, range] = {}
        first = 0
        for group, _laws in self.workload.groups_or_self():
            found[group.name] = range(first, first + group.num_sessions)
            first += group.num_sessions
        return found

    def file(self, name: str) -> Path:
        """Path of a file of this run, by its name in ``layout``."""
        return self.path / name

    def table(self, name: str) -> pa.Table:
        """Table ``name`` of this run (a key of schema.TABLES), empty when the run has none."""
        if name == "chunks":
            # A row per token: too much to keep for every run of an experiment, and read in one place each.
            return self._read_table(name)
        if name not in self._values:
            self._values[name] = self._read_table(name)
        return cast("pa.Table", self._values[name])

    def once(self, compute: Callable[[SealedRun], Value]) -> Value:
        """``compute(self)``, at most once for this object."""
        if compute not in self._values:
            self._values[compute] = compute(self)
        return cast("Value", self._values[compute])

    def forget(self) -> None:
        """Read tables and compute figures again from here on: derived tables were rebuilt."""
        self._values.clear()

    def _read_table(self, name: str) -> pa.Table:
        path = self.path / layout.table_path(name)
        if not path.exists():
            return schema.empty(name)
        try:
            # One file, not a dataset: a folder named key=value above it must not become a column.
            table = pq.ParquetFile(path).read()
        except (OSError, pa.ArrowException) as error:
            raise damaged(path, f"cannot be read ({error})") from error
        return table.rename_columns([schema.EARLIER_NAMES.get(column, column) for column in table.column_names])

    def _parsed(self, model: type[Parsed], asked: Mapping[str, Any], what: str) -> Parsed:
        try:
            return model.model_validate(asked)
        except ValidationError as error:
            raise RecordsError(
                f"its manifest holds no {what} that this version reads ({error.error_count()} problems)",
                where=str(self.path),
                hint="Read it with the harness version that sealed it",
            ) from error

    def check_sizes(self) -> None:
        """Raise RecordsError when a file of the manifest is missing or has another size (cheap: no bytes read)."""
        for name, entry in self.manifest.files.items():
            path = self.path / name
            try:
                size_bytes = path.stat().st_size
            except OSError as error:
                raise damaged(path, f"is missing ({error.strerror})") from error
            if size_bytes != entry.size_bytes:
                raise damaged(path, f"has {size_bytes} bytes, {entry.size_bytes} were sealed")

    def verify(self) -> None:
        """Raise RecordsError naming the first file whose bytes differ from what was sealed, or that was added."""
        self.check_sizes()
        for name, entry in self.manifest.files.items():
            if file_entry(self.path / name).sha256 != entry.sha256:
                raise damaged(self.path / name, "differs from what was sealed (SHA-256)")
        for name, derived in self.manifest.derived.items():
            if schema.content_sha256(self._read_table(name)) != derived.content_sha256:
                path = self.path / layout.table_path(name)
                raise damaged(path, "differs from what was sealed", hint="`harness derive` rebuilds derived tables")
        known = {*self.manifest.files, layout.MANIFEST, *(layout.table_path(name) for name in schema.TABLES)}
        for path in sorted(self.path.rglob("*")):
            if path.is_file() and str(path.relative_to(self.path)) not in known:
                raise damaged(path, "was added after sealing")


def once_per_run(compute: Callable[[SealedRun], Value]) -> Callable[[SealedRun], Value]:
    """A figure of a run that is computed when it is first asked for and kept with the run's object."""

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


def paired(runs: Sequence[SealedRun], baseline: Sequence[SealedRun]) -> list[tuple[SealedRun, SealedRun]]:
    """Runs of both conditions by equal replicate."""
    others = {run.replicate: run for run in baseline}
    return [(run, others[run.replicate]) for run in runs if run.replicate in others]


def damaged(path: Path, what: str, *, hint: str = "Restore the file from a copy, or move the run away") -> RecordsError:
    """The error of a run that is not as it was sealed."""
    return RecordsError(what, where=str(path), hint=hint)
