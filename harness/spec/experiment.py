"""An experiment: conditions x replicates, what makes a run invalid, how it is replayed; read from TOML.

Inside the harness a spec is never edited, only derived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import AfterValidator, Field, ValidationError, field_serializer, field_validator, model_validator

from harness.errors import SpecError
from harness.kinds import DEFAULT_BACKEND, KINDS
from harness.redact import redacted_value
from harness.shipped import find_shipped
from harness.spec.base import Problem, Spec, check_name, load_toml, problems_of, told
from harness.spec.factors import Factors, WrittenFactors, factor_names, factors_from_name
from harness.spec.fleet import FleetSpec
from harness.spec.places import Place
from harness.spec.prediction import PerturbationSpec
from harness.spec.rules import load_rule
from harness.spec.server import ServerSpec
from harness.spec.stopping import StopSpec
from harness.spec.window import WindowSpec
from harness.spec.workload import WorkloadSpec

_Spec = TypeVar("_Spec", ServerSpec, WorkloadSpec)
Treatment = Literal["as-drawn", "no-waits", "equal-waits"]
ClientName = Literal["epoll", "aiohttp"]
OrderName = Literal["rotation", "abba", "latin"]


def _known_backend(name: str) -> str:
    if name not in KINDS:
        raise ValueError(f"unknown backend {name!r}; there are {', '.join(KINDS)}")
    return name


BackendName = Annotated[str, AfterValidator(_known_backend)]


class ConditionSpec(Spec):
    """One condition: changes to the experiment's server, and a treatment of the plan's waits."""

    name: str
    treatment: Treatment = "as-drawn"
    server: dict[str, Any] = Field(default_factory=dict, description="keys of [server] that this condition changes")
    workload: dict[str, Any] = Field(
        default_factory=dict,
        description="keys of [workload] that this condition changes; it then has a plan of its own",
    )
    baseline: str = Field(default="", description="condition it is compared with; default: the experiment's baseline")
    factors: WrittenFactors = Field(
        default_factory=dict, description="what it stands for, e.g. {N = 6, slots = 16}; rules and tables group by it"
    )

    neighbours: Annotated[int, Field(ge=0)] | Literal["all"] | None = Field(
        default=None, description="of a fleet: devices of the same host that are busy beside each of its runs, by plan"
    )

    @field_serializer("server", when_used="json")
    def _server_without_secrets(self, server: dict[str, Any]) -> dict[str, Any]:
        return cast("dict[str, Any]", redacted_value(server, frozenset(ServerSpec.model_fields)))

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        return check_name(name)


class LimitsSpec(Spec):
    """What makes a run INVALID. Times in wall milliseconds of the client's own machine."""

    rearrival_lag_p99_ms: float = Field(default=10.0, gt=0)
    start_spread_ms: float = Field(default=20.0, gt=0)
    stall_ms: float = Field(default=1000.0, gt=0, description="longest host stall that may touch a request")
    stamp_lag_ms: float = Field(
        default=1000.0, gt=0, description="longest pause of the client, also from the kernel's stamp to its own"
    )
    server_stall_ms: float = Field(
        default=1000.0, gt=0, description="longest time without an engine step, beyond what the cost model explains"
    )
    needs_stall_meter: bool = Field(default=True, description="a run whose stall meter was lost is INVALID")
    needs_metrics: bool = Field(default=True, description="a run whose server answers no GET /metrics is INVALID")
    residual_share: float | None = Field(
        default=None, gt=0, le=1, description="largest (B - A) / B of a run; without it, only a finding above 0.05"
    )
    retries: int = Field(
        default=0, ge=0, le=100, description="times that an INVALID run may be repeated under a freeze, which fixes it"
    )
    request_timeout_s: float = Field(default=600.0, gt=0, description="model seconds one request may take")


class ClientSpec(Spec):
    """How the plan is replayed."""

    name: ClientName = "epoll"
    stream: bool = True
    spin_us: int = Field(default=300, ge=0, le=2000, description="longest busy-wait before a deadline; 0: none")
    processes: int = Field(default=1, ge=1, le=64, description="client processes that share the sessions")
    scrape_interval_s: float = Field(default=1.0, gt=0)


class SloSpec(Spec):
    """Latency targets of a request. Goodput counts the requests per second that meet every target that is set."""

    ttft_ms: float | None = Field(default=None, gt=0, description="model ms to the first token")
    tpot_ms: float | None = Field(
        default=None, gt=0, description="model ms per token after the first, mean of the request"
    )
    itl_ms: float | None = Field(default=None, gt=0, description="model ms between two tokens of the request")
    itl_percentile: float = Field(
        default=100.0, gt=0, le=100, description="percentile of the request's gaps that itl_ms limits; 100: every gap"
    )
    e2e_ms: float | None = Field(default=None, gt=0, description="model ms from the send to the end of the answer")

    @model_validator(mode="after")
    def _percentile_has_a_limit(self) -> SloSpec:
        if self.itl_ms is None and "itl_percentile" in self.model_fields_set and self.itl_percentile != 100.0:
            raise ValueError("itl_percentile limits nothing without itl_ms; set both")
        return self

    @property
    def is_set(self) -> bool:
        return any(limit is not None for limit in (self.ttft_ms, self.tpot_ms, self.itl_ms, self.e2e_ms))


class ExperimentSpec(Spec):
    """An experiment: conditions x replicates, each run on a freshly started server."""

    name: str
    title: str = ""
    question: str = ""
    backend: BackendName = Field(default=DEFAULT_BACKEND, description=f"one of {', '.join(KINDS)}")
    time_scale: float = Field(default=1.0, ge=0.1, le=100, description="model time / wall time; 1 on real servers")
    replicates: int = Field(default=3, ge=1, le=1000)
    base_seed: int = Field(ge=0)
    same_input: bool = Field(
        default=False, description="every replicate repeats the input of replicate 0: restarts only"
    )
    order: OrderName = Field(
        default="rotation",
        description="of the conditions in each replicate: rotated, there and back, or Williams' square",
    )
    baseline: str = ""
    workload: WorkloadSpec
    server: ServerSpec = ServerSpec()
    client: ClientSpec = ClientSpec()
    limits: LimitsSpec = LimitsSpec()
    slo: SloSpec = SloSpec()
    window: WindowSpec = WindowSpec()
    prediction: PerturbationSpec = PerturbationSpec()
    stop: StopSpec | None = Field(
        default=None, description="the rule by which `harness run --until decided` ends; none: it cannot be used"
    )
    fleet: FleetSpec | None = Field(
        default=None, description="devices that share the replicates, side by side; none: one after another on one"
    )
    analysis: str = Field(
        default="", description="what `harness analyse` computes: harness explain analysis; default: general"
    )
    rules: tuple[str, ...] = Field(default=(), description="decision rules that `harness decide` applies by default")
    condition: tuple[ConditionSpec, ...] = Field(min_length=1)

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        return check_name(name)

    @model_validator(mode="after")
    def _consistent(self) -> ExperimentSpec:
        written = [dict(condition) for condition in self.condition]
        if found := _problems_of_conditions(written, self.baseline, self.server, self.workload):
            raise ValueError(told(found, table={"condition": written}))
        return self

    @model_validator(mode="after")
    def _fits_fleet(self) -> ExperimentSpec:
        most = 0 if self.fleet is None else len(self.fleet.devices) - 1
        for condition in self.condition:
            if isinstance(condition.neighbours, int) and condition.neighbours > most:
                raise ValueError(
                    f"condition {condition.name}: {condition.neighbours} neighbours, and a device has {most}"
                )
            if (1 + most) % (size := self.num_at_once(condition)):
                raise ValueError(f"condition {condition.name}: groups of {size} do not share {1 + most} devices evenly")
        if self.fleet is None:
            return self
        if self.fleet.hosts and self.keeps_step:
            raise ValueError(
                "fleet.hosts: devices of several hosts do not keep step; leave lockstep and neighbours out"
            )
        num_devices = len(self.fleet.places)
        if self.replicates % num_devices:
            more = self.replicates + num_devices - self.replicates % num_devices
            raise ValueError(
                f"{self.replicates} replicates cannot be shared evenly by {num_devices} devices; use {more} replicates"
            )
        if self.fleet.emulated and not KINDS[self.backend].scales_time:
            raise ValueError(
                f"fleet.emulated says how emulated devices differ, and {self.backend} has devices of its own"
            )
        for server in (self.server_of(condition) for condition in self.condition):
            if fixed := [key for key in ("port", "devices", "url", "ssh") if getattr(server, key)]:
                raise ValueError(f"server.{fixed[0]} is of one place, and a fleet has several; leave it out")
        return self

    @property
    def factors(self) -> Mapping[str, Factors]:
        """Factors of every condition by its name; where none gives any, what their names tell."""
        given = {condition.name: condition.factors for condition in self.condition}
        return given if any(given.values()) else {name: factors_from_name(name) for name in given}

    @property
    def varied_settings(self) -> frozenset[str]:
        """Keys of [server] that some condition sets: the contrast rests on their values in every condition."""
        return frozenset(key for condition in self.condition for key in condition.server)

    @property
    def baseline_name(self) -> str:
        return self.baseline or self.condition[0].name

    def baseline_of(self, condition: ConditionSpec) -> str:
        """The name of the condition that ``condition`` is compared with (its own name for the baseline itself)."""
        return condition.baseline or self.baseline_name

    def until_decided(self, where: str = "") -> ExperimentSpec:
        """This experiment with as many blocks as its stopping rule allows; SpecError where it declares none."""
        if self.stop is None:
            raise SpecError(
                "declares no stopping rule, and one that is chosen while data come in proves nothing",
                where=where or self.name,
                hint="Add [stop] with margin and budget (`harness power` proposes it), or leave --until out",
            )
        return self.model_copy(update={"replicates": self.stop.budget})

    def input_of(self, replicate: int) -> int:
        """Which draw a replicate gets: its own, or the first one's where only execution is repeated."""
        return 0 if self.same_input else self.unit_of(replicate)

    @property
    def keeps_step(self) -> bool:
        """Whether it is said who runs beside whom: then the devices of a fleet go from period to period together."""
        return self.fleet is not None and (self.fleet.lockstep or self._limits_neighbours)

    @property
    def _limits_neighbours(self) -> bool:
        return any(condition.neighbours is not None for condition in self.condition)

    def num_at_once(self, condition: ConditionSpec) -> int:
        """Devices of one host that are busy at once with a condition of a fleet that keeps step, itself included."""
        num_devices = 1 if self.fleet is None else len(self.fleet.devices)
        return 1 + condition.neighbours if isinstance(condition.neighbours, int) else num_devices

    def unit_of(self, replicate: int) -> int:
        """Replicates that are made at once by plan share a number; others have one of their own."""
        return replicate if self.fleet is None or not self.keeps_step else replicate // len(self.fleet.places)

    def turn_of(self, replicate: int) -> int:
        """Which of the orders a replicate takes: every device goes through all of them, neighbours one ahead."""
        if self.fleet is None:
            return replicate
        turn, place = divmod(replicate, len(self.fleet.places))
        if self._limits_neighbours:  # who runs beside whom, runs the same
            return turn
        # There and back are two turns of one device.
        return turn + place * (2 if self.order == "abba" else 1)

    def workload_of(self, condition: ConditionSpec) -> WorkloadSpec:
        """What one condition replays. Conditions that change no key of it share one plan in each replicate."""
        return _changed_workload(self.workload, condition.workload) if condition.workload else self.workload

    def server_of(self, condition: ConditionSpec) -> ServerSpec:
        """The whole server configuration of one condition."""
        return _changed_server(self.server, condition.server)


def _changed_workload(workload: WorkloadSpec, changes: Mapping[str, Any]) -> WorkloadSpec:
    table = workload.model_dump(exclude_unset=True)
    if {"num_background", "group"} & changes.keys():
        # Both decide the number of sessions.
        table.pop("num_sessions", None)
    return WorkloadSpec.model_validate({**table, **changes})


def _changed_server(server: ServerSpec, changes: Mapping[str, Any]) -> ServerSpec:
    return ServerSpec.model_validate({**server.model_dump(), **changes})


def _problems_of_conditions(
    conditions: Sequence[Mapping[str, Any]], baseline: object, server: ServerSpec | None, workload: WorkloadSpec | None
) -> list[Problem]:
    """What is wrong with conditions beside each other, and with what each of them changes.

    server, workload: what they change; None where that is wrong itself, and then only their own keys are told.
    """
    names = [one.get("name") for one in conditions]
    unknown = f"is not one of the conditions {', '.join(map(str, names))}"
    found: list[Problem] = []
    if baseline and baseline not in names:
        found.append((("baseline",), f"{baseline!r} {unknown}"))
    for place, one in enumerate(conditions):
        at: Place = ("condition", place)
        if one.get("name") in names[:place]:
            found.append(((*at, "name"), "another condition has that name"))
        if (named := one.get("baseline")) and named not in names:
            found.append(((*at, "baseline"), f"{named!r} {unknown}"))
        found += _problems_of_changes(_changed_server, server or ServerSpec(), one, (*at, "server"), server is not None)
        plain = workload or WorkloadSpec(num_sessions=1)
        found += _problems_of_changes(_changed_workload, plain, one, (*at, "workload"), workload is not None)
    return found


def _problems_of_changes(
    changed: Callable[[_Spec, Mapping[str, Any]], object], spec: _Spec, one: Mapping[str, Any], at: Place, knows: bool
) -> list[Problem]:
    """What is wrong with ``spec`` as a condition changes it. knows: whether it is what the experiment says."""
    changes = one.get(str(at[-1]))
    if not isinstance(changes, Mapping) or not changes:
        return []
    try:
        changed(spec, cast("Mapping[str, Any]", changes))
    except ValidationError as error:
        own = {(*at, str(key)) for key in cast("Mapping[str, Any]", changes)}
        return [one for one in problems_of(error, ExperimentSpec, at) if knows or one[0][: len(at) + 1] in own]
    return []


def _problems_of_table(error: ValidationError, table: Mapping[str, Any]) -> list[Problem]:
    """Every problem of a refused experiment: what pydantic says first ends its look at the conditions."""
    found = problems_of(error, ExperimentSpec)
    listed = table.get("condition")
    conditions = cast("list[Any]", listed) if isinstance(listed, list) else []
    if not all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in conditions) or not conditions:
        return found
    wrong = {place[0] for place, _ in found if place}
    server = None if "server" in wrong else ServerSpec.model_validate(table.get("server", {}))
    workload = None if "workload" in wrong else WorkloadSpec.model_validate(table["workload"])
    more = _problems_of_conditions(cast("list[Mapping[str, Any]]", conditions), table.get("baseline"), server, workload)
    # Told at their places, they need not be told together.
    return [*(one for one in found if one[0] or not more), *more]


def parse_experiment(table: Mapping[str, Any], *, where: str) -> ExperimentSpec:
    """An ExperimentSpec from a TOML table; raises SpecError naming every key that is wrong.

    where: the file, or what else the table comes from; problems name the lines of a file.
    """
    try:
        spec = ExperimentSpec.model_validate(table)
    except ValidationError as error:
        raise SpecError(
            told(_problems_of_table(error, table), table=table, file=Path(where)),
            where=where,
            hint="See `harness explain experiment` for every key",
        ) from error
    _check_rules(spec, where)
    return spec


def _check_rules(spec: ExperimentSpec, where: str) -> None:
    """Every rule is there and names only factors that some condition has, where the conditions give factors at all."""
    known = factor_names(condition.factors for condition in spec.condition)
    for name in spec.rules:
        if ("/" in name or name.endswith(".toml")) and not Path(name).exists():
            continue  # its place is another working directory: `decide` and `freeze` look for it there
        rule = load_rule(name)
        if known and (unknown := [factor for factor in rule.factors_named if factor not in known]):
            raise SpecError(
                f"rule {name!r} goes by factor {unknown[0]!r}, which no condition has",
                where=f"{where}: rules",
                hint=f"The conditions have {', '.join(known)}",
            )


def experiment_file(name_or_path: Path | str) -> Path:
    """The file as it is named; or, for a bare name that no file has, the experiment that ships under it.

    Raises SpecError, with the names that there are, for a bare name of neither.
    """
    text = str(name_or_path)
    if text.endswith(".toml") or "/" in text or Path(text).exists():
        return Path(text)
    return find_shipped("experiments", text, what="experiment")


def load_experiment(name_or_path: Path | str) -> ExperimentSpec:
    """The experiment in a TOML file, or the one that ships under a name."""
    path = experiment_file(name_or_path)
    return parse_experiment(experiment_table(path), where=str(path))


# Keys that may hold the path of a file, by the table they stand in.
_PATH_KEYS = {"workload": ("waits", "trace"), "server": ("cost_model",)}


def experiment_table(path: Path) -> dict[str, Any]:
    """What an experiment file says; the files that it names are looked for beside it, then in the working directory."""
    table = load_toml(path)
    conditions = table.get("condition")
    written = [table, *(cast("list[Any]", conditions) if isinstance(conditions, list) else [])]
    for owner in written:
        for part, keys in _PATH_KEYS.items():
            inner = cast("dict[str, Any]", owner).get(part) if isinstance(owner, dict) else None
            if isinstance(inner, dict):
                inner.update({key: _beside(path, inner[key]) for key in keys if key in inner})
    return table


def _beside(path: Path, named: object) -> object:
    """``named`` as a path beside the file ``path``, where it is the relative path of a file that lies there."""
    if not isinstance(named, str) or not (named.endswith((".toml", ".jsonl")) or "/" in named):
        return named
    beside = path.parent / named
    return str(beside) if beside.is_file() else named
