"""The manifest of a run: manifest.json is written last, and only a folder that has one is a run.

It names every file of the run with its size and SHA-256, and never changes after sealing. Facts about server and client
are read as typed values: a missing or unreadable value is None or empty, never zero.
"""

from __future__ import annotations

import errno
import hashlib
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.errors import RecordsError
from harness.kinds import kind_of_run
from harness.measure.records.schema import NAMES_OF_LAYOUT_3, READABLE_VERSIONS, SCHEMA_VERSION
from harness.plugins import BackendKind

DeviceMetrics = dict[str, dict[str, dict[str, float]]]
Facts = TypeVar("Facts", bound="_Facts")
WARMED_UP = "warmed_up_ns"
"""Among ``timings``: when the warm-up of a fresh server had ended."""


def table_at(value: object, *keys: str) -> Mapping[str, Any]:
    """The table below these keys; empty where there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return value if isinstance(value, Mapping) else {}  # pyright: ignore[reportUnknownVariableType]


class _Facts(BaseModel):
    """Base: frozen; unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    @classmethod
    def tolerant(cls: type[Facts], value: Any) -> Facts:
        """The facts in a part of a manifest; an unreadable key counts as absent."""
        table: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {}
        try:
            return cls.model_validate(table)
        except ValidationError as error:
            broken = {str(item["loc"][0]) for item in error.errors()}
            return cls.model_validate({key: value for key, value in table.items() if key not in broken})


class LaunchReport(_Facts):
    """Facts about a server from its log and metrics.

    settings: last value of each changed setting. engine: from its first configuration line.
    cache_config_info: labels of that gauge. vllm: its version. pool_tokens: of the whole KV pool, vLLM's null block
    included. device_metrics: tracker ("MODEL", "SAMPLER") -> phase ("decode", "prefill") -> numbers; latencies in ms,
    averages in us. observer: lines of the observer. is_emulator: its metrics say that it is the emulator.
    """

    settings: dict[str, str] = Field(default_factory=dict)
    engine: dict[str, str] = Field(default_factory=dict)
    cache_config_info: dict[str, str] = Field(default_factory=dict)
    vllm: str = ""
    pool_tokens: int | None = None
    device_metrics: DeviceMetrics = Field(default_factory=dict)
    observer: tuple[str, ...] = ()
    is_emulator: bool = False

    def decode_p50_ms(self, tracker: str) -> float | None:
        """Median of one tracker over all decode steps of the server; None where it reported none."""
        return self.device_metrics.get(tracker, {}).get("decode", {}).get("p50_ms")


class SelfAudit(_Facts):
    """Dispatch lags of the re-arrivals in the replay against the null server, wall ms."""

    floor_rearrival_lag_ms: tuple[float, ...] = ()


class ClientAudit(_Facts):
    """Figures that the client recorded. Times in wall units, except stall_intervals_ns: (start, duration), model ns."""

    num_stalls: float | None = None
    stall_max_ms: float | None = None
    stall_intervals_ns: tuple[tuple[int, int], ...] | None = None
    cpu_s: float | None = None
    cpu_others_s: float | None = None
    self_audit: SelfAudit | None = None

    @property
    def floor_lag_ms(self) -> tuple[float, ...]:
        """Lags of the self-audit's re-arrivals, wall ms."""
        return () if self.self_audit is None else self.self_audit.floor_rearrival_lag_ms


Severity = Literal["invalid", "warning", "info"]
StepSource = Literal["bucket-log", "iteration-log", "step-log", "none"]


SETTING_DECLARED = "setting-declared"
"""Code of the finding that names settings which nothing showed."""


class _Record(BaseModel):
    """Base of the parts of a manifest: frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Finding(_Record):
    """A finding about a run: a stable code, its severity, the evidence in numbers, and what to do.

    severity "invalid" makes the run INVALID; "warning" is something a reader must know; "info" is a note.
    """

    code: str
    severity: Severity
    evidence: str
    hint: str = ""

    def __str__(self) -> str:
        line = f"{self.code}: {self.evidence}"
        return f"{line}. {self.hint}" if self.hint else line


class FileEntry(_Record):
    """One file of a run, as it was when the run was sealed."""

    sha256: str
    size_bytes: int = Field(ge=0)


class DerivedEntry(_Record):
    """One derived table: its content, not its bytes, because any Parquet writer may rebuild it."""

    rows: int = Field(ge=0)
    content_sha256: str
    file_sha256: str = Field(default="", description="of the file as it was sealed: most readers need no more")


class ClockRecord(_Record):
    """The run's clock: model ns = CLOCK_MONOTONIC ns * scale.

    realtime_minus_monotonic_ns: CLOCK_REALTIME - CLOCK_MONOTONIC at the start of the run, wall ns; the second one at
    its end. Their difference is how far the machine's wall clock was adjusted meanwhile.
    """

    scale: float = Field(default=1.0, gt=0)
    realtime_minus_monotonic_ns: int = 0
    realtime_minus_monotonic_after_ns: int | None = None


class Observation(_Record):
    """The declared sources of observation. A missing source makes a run INVALID; so does an undeclared [BUCKET] line,
    from an undeclared patch."""

    steps: StepSource = "bucket-log"
    has_kv_log: bool = True
    has_metrics: bool = True
    patch: dict[str, Any] = Field(default_factory=dict, description="patch name, file hashes before and after")


class ServerRecord(_Record):
    """The server process under test."""

    pid: int | None = None
    is_alive_until_stop: bool = True
    exit_status: int | None = None
    argv: tuple[str, ...] = ()
    facts: dict[str, Any] = Field(default_factory=dict)


class PreregistrationRecord(_Record):
    """The frozen file that a confirmatory run was made under; the run keeps a copy of it.

    sha256: of the file's bytes. committed_at_s: committer time of ``commit``, seconds since the epoch (UTC).
    start: the ledger's entry of this run's start.
    """

    path: str
    sha256: str
    commit: str
    committed_at_s: int
    tag: str = ""
    start: str = ""


class FleetRecord(_Record):
    """The device of a fleet that made a run; absent outside a fleet.

    host: its name. neighbours: devices of that host that were busy at the start or the end of the replay.
    client_cores: cores of the client; empty where there were too few to share out. uuid, card,
    temperature_c (minimum and maximum of the run): of the device, from its driver; absent without a driver's report.
    emulated_factor: factor on the step times of an emulated or simulated device; absent for a real device.
    """

    device: int = Field(ge=0)
    host: str
    neighbours: tuple[int, ...] = ()
    client_cores: tuple[int, ...] = ()
    uuid: str = ""
    card: str = ""
    temperature_c: tuple[float, float] | None = None
    emulated_factor: float | None = None


class EarlierTry(_Record):
    """An INVALID run that was repeated and kept in ``folder``, beside its repetition. seal: of its manifest."""

    folder: str
    seal: str
    invalid_reasons: tuple[str, ...]


class Manifest(_Record):
    """Everything needed to judge a run and to compute its figures again, except the tables."""

    schema_version: int = SCHEMA_VERSION
    experiment: str
    condition: str
    replicate: int = Field(ge=0)
    order_index: int = Field(default=0, description="position of this run within its replicate's order")
    baseline: str = Field(default="", description="name of the experiment's baseline condition")
    backend: str = ""
    status: Literal["valid", "invalid"] = "valid"
    invalid_reasons: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    earlier_tries: tuple[EarlierTry, ...] = Field(default=(), description="INVALID runs that this one repeats")
    plan_hash: str
    drawn_hash: str = Field(default="", description="hash of the plan before its treatment: equal in a replicate")
    treatment: str = "as-drawn"
    planned_requests: int = Field(ge=0)
    requested: dict[str, Any] = Field(default_factory=dict, description="the spec as a person wrote it, defaults in")
    effective: dict[str, Any] = Field(default_factory=dict, description="settings that server and client really used")
    clock: ClockRecord = ClockRecord()
    observation: Observation = Observation()
    server: ServerRecord = ServerRecord()
    client_audit: dict[str, Any] = Field(default_factory=dict)
    preregistration: PreregistrationRecord | None = Field(
        default=None, description="absent: the run is exploratory, for ever"
    )
    fleet: FleetRecord | None = Field(default=None, description="which device of how many; absent outside a fleet")
    provenance: dict[str, Any] = Field(default_factory=dict)
    timings: dict[str, int] = Field(default_factory=dict, description="named instants of the run, model ns")
    files: dict[str, FileEntry] = Field(default_factory=dict)
    derived: dict[str, DerivedEntry] = Field(default_factory=dict)
    seal: str = Field(default="", description="SHA-256 of this file while this key, its last, is empty")

    @property
    def is_valid(self) -> bool:
        return self.status == "valid"

    @property
    def kind(self) -> BackendKind:
        """What served: the backend's kind, or an emulator where the server's metrics said so."""
        is_emulator = LaunchReport.tolerant(table_at(self.effective, "launch")).is_emulator
        # Of a server that somebody else started, only the emulator shows its rules. Runs without the key need this.
        shows_rules = "rules" in (self.effective.get("shown") or ()) and not kind_of_run(self.backend).is_restarted
        return kind_of_run(self.backend, is_emulator=is_emulator or shows_rules)

    @property
    def label(self) -> Literal["confirmatory", "exploratory"]:
        """Whether criteria and predictions were fixed before this run."""
        return "exploratory" if self.preregistration is None else "confirmatory"

    @property
    def requested_experiment(self) -> dict[str, Any]:
        """The requested experiment (a dumped ExperimentSpec); empty where the manifest holds none."""
        return dict(table_at(self.requested, "experiment"))

    @property
    def title(self) -> str:
        """The experiment's title; its name where it has none."""
        return str(self.requested_experiment.get("title") or self.experiment)

    @property
    def question(self) -> str:
        """What the experiment asks; empty where it does not say."""
        return str(self.requested_experiment.get("question", ""))

    @property
    def requested_condition(self) -> dict[str, Any]:
        """The requested condition (a dumped ConditionSpec); empty where the manifest holds none."""
        return next((dict(table) for table in self._conditions if table.get("name") == self.condition), {})

    @property
    def _conditions(self) -> Iterable[Mapping[str, Any]]:
        """The requested conditions; none where the manifest holds none."""
        conditions: Any = self.requested_experiment.get("condition")
        return map(table_at, conditions if isinstance(conditions, list) else ())

    @property
    def declared_settings(self) -> str:
        """ "declared, not verified: kv_slots = 12"; empty where every setting was shown."""
        return next((finding.evidence for finding in self.findings if finding.code == SETTING_DECLARED), "")

    @property
    def varied_settings(self) -> frozenset[str]:
        """Keys of [server] that some condition of the experiment sets."""
        from harness.model.spec.server import set_keys

        return frozenset(key for table in self._conditions for key in set_keys(table_at(table, "server")))

    @property
    def packages(self) -> dict[str, str]:
        """Versions of the packages that the harness ran with; empty where none were noted."""
        return dict(table_at(self.provenance, "packages"))

    @property
    def factors(self) -> dict[str, Any]:
        """Factors of the run's condition; empty where the experiment gives none."""
        return dict(table_at(self.requested_condition, "factors"))

    @property
    def time_scale(self) -> float:
        """Model nanoseconds per wall nanosecond."""
        return self.clock.scale

    @property
    def requested_server(self) -> dict[str, Any]:
        """The requested server configuration (a dumped ServerSpec)."""
        return dict(table_at(self.requested, "server"))

    @property
    def requested_client(self) -> dict[str, Any]:
        """The requested client configuration (a dumped ClientSpec)."""
        return dict(table_at(self.requested, "client"))

    @property
    def serving_version(self) -> str:
        """Version of vllm-rbln that served; "" where none served or it is unknown."""
        return str(table_at(self.server.facts, "launch", "requested", "versions").get("vllm-rbln", ""))

    @property
    def vllm_version(self) -> str:
        """Version of vLLM that served, from its environment or as it stated; "" where it is unknown."""
        requested = table_at(self.server.facts, "launch", "requested")
        return str(table_at(requested, "versions").get("vllm") or requested.get("version") or "")

    @property
    def stack(self) -> str:
        """ "vllm-rbln 0.12.0" or "vllm 0.30.0": what served; "" where no stack did, or its version is unknown."""
        versions = table_at(self.server.facts, "launch", "requested", "versions")
        return next((f"{name} {versions[name]}" for name in ("vllm-rbln", "vllm") if versions.get(name)), "")

    @property
    def is_on_cpu(self) -> bool:
        """Whether vLLM's own build for CPUs served; vllm-rbln stands on one too, and drives an NPU."""
        return self.stack.startswith("vllm ") and self.stack.endswith("+cpu")

    @property
    def device(self) -> str:
        """ "RBLN-CA25, driver 3.0.0": what rbln-smi of its host said before the start; "" where it named no device."""
        report = table_at(self.server.facts, "launch", "requested", "devices")
        rows: Any = report.get("devices")
        names = dict.fromkeys(str(table_at(row).get("name") or "") for row in rows) if isinstance(rows, list) else ()
        named = ", ".join(filter(None, names))
        driver = report.get("KMD_version") or report.get("kmd_version")
        return f"{named}, driver {driver}" if named and driver else named

    @property
    def server_spec(self) -> dict[str, Any]:
        """The server configuration in force: effective where known, else requested."""
        return {**self.requested_server, **table_at(self.effective, "server")}

    @property
    def num_replicas(self) -> int:
        """Servers behind one router whose files the run has; 1 for a server by itself."""
        return self.num_scraped if self.is_ours or self.observation.steps == "step-log" else 1

    @property
    def num_scraped(self) -> int:
        """Servers behind one router whose metrics the run has; 1 for a server by itself."""
        replicas = table_at(self.server.facts, "launch").get("replicas", ())
        return max(1, len(replicas)) if isinstance(replicas, list | tuple) else 1

    @property
    def is_ours(self) -> bool:
        """Whether the harness started the server."""
        return table_at(self.server.facts, "launch").get("is_ours", True) is not False

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """The compiled decode buckets; empty where the manifest has none."""
        buckets: Any = self.server_spec.get("decode_buckets")
        return tuple(buckets) if isinstance(buckets, list | tuple) else ()

    def to_json(self) -> str:
        """The text of manifest.json, sealed."""
        text = self.model_copy(update={"seal": ""}).model_dump_json(indent=2) + "\n"
        # The last key of this name is the manifest's: its content may hold keys of the same name.
        before, _, after = text.rpartition(_seal_key(""))
        return before + _seal_key(hashlib.sha256(text.encode()).hexdigest()) + after


def load_manifest(path: Path) -> Manifest:
    """The manifest in a file; RecordsError, which names the file, where anything is wrong with it."""
    with RecordsError.on_os_error(
        "the run has no readable manifest",
        where=path,
        hint="Move the folder out of the records; it was never sealed or was damaged since",
    ):
        if not stat.S_ISREG(path.lstat().st_mode):
            # Reading a pipe or a device would never end.
            raise OSError(errno.EINVAL, "not a regular file")
        text = path.read_bytes()
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise RecordsError(
            f"is not a manifest: {'.'.join(str(part) for part in first['loc']) or 'text'}: {first['msg']}",
            where=str(path),
            hint="The file was edited or damaged after sealing; restore it or move the run away",
        ) from error
    if manifest.schema_version not in READABLE_VERSIONS:
        raise RecordsError(
            f"is of layout {manifest.schema_version}, and this version reads layouts {READABLE_VERSIONS}",
            where=str(path),
            hint="Read it with the harness version that sealed it",
        )
    if wrong := _contradiction(manifest, text):
        raise RecordsError(wrong, where=str(path), hint="Restore the file from a copy, or move the run away")
    if manifest.schema_version != SCHEMA_VERSION:
        return manifest.model_copy(update={"requested": _renamed(manifest.requested)})
    return manifest


def _renamed(requested: Any) -> Any:
    """What was requested, with the keys of layout 3 under their present names."""
    if isinstance(requested, dict):
        items = cast("dict[str, Any]", requested).items()
        return {NAMES_OF_LAYOUT_3.get(name, name): _renamed(value) for name, value in items}
    if isinstance(requested, list):
        return [_renamed(value) for value in cast("list[Any]", requested)]
    return requested


def _contradiction(manifest: Manifest, text: bytes) -> str:
    """Evidence that a manifest was changed after sealing; "" without any."""
    before, _, after = text.rpartition(_seal_key(manifest.seal).encode())
    if manifest.seal != hashlib.sha256(before + _seal_key("").encode() + after).hexdigest():
        return "differs from what was sealed (its own SHA-256)"
    is_broken = bool(manifest.invalid_reasons) or any(found.severity == "invalid" for found in manifest.findings)
    if manifest.is_valid and is_broken:
        return "was edited: it says valid, and names reasons why the run is INVALID"
    return ""


def _seal_key(seal: str) -> str:
    return f'"seal": "{seal}"'
