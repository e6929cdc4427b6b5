"""An experiment as a TOML file describes it: conditions, replicates, their order and the tables that they share.

A specification is never changed after it was read; conditions derive their own from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import AfterValidator, Field, ValidationError, field_serializer, model_validator

from harness.errors import SpecError
from harness.kinds import DEFAULT_BACKEND, KINDS
from harness.model.spec.base import KeyPath, Name, Problem, Spec, format_problems, load_toml, problems_of
from harness.model.spec.rules import Factors, WrittenFactors, factor_names, factors_from_name, load_rule
from harness.model.spec.sections import (
    ClientSpec,
    FleetSpec,
    LimitsSpec,
    PerturbationSpec,
    SloSpec,
    StopSpec,
    TuneSpec,
    WindowSpec,
)
from harness.model.spec.server import RouterSpec, ServerSpec, implied_buckets, set_keys
from harness.model.spec.workload import DEFAULT_SESSIONS, WorkloadSpec, with_implied_defaults
from harness.redact import redacted_value
from harness.shipped import find_shipped

_Spec = TypeVar("_Spec", ServerSpec, WorkloadSpec)
Treatment = Literal["as-drawn", "no-waits", "equal-waits"]
OrderName = Literal["rotation", "abba", "latin"]
DEFAULT_SEED = 1


def _known_backend(name: str) -> str:
    if name not in KINDS:
        raise ValueError(f"unknown backend {name!r}; there are {', '.join(KINDS)}")
    return name


BackendName = Annotated[str, AfterValidator(_known_backend)]


_HARMLESS = frozenset({*ServerSpec.model_fields, *RouterSpec.model_fields})
"""Keys of [server] whose text may be recorded."""


class ConditionSpec(Spec):
    """A condition: changes to the experiment's server or workload, and a treatment of the plan's waits."""

    name: Name
    treatment: Treatment = "as-drawn"
    server: dict[str, Any] = Field(default_factory=dict, description="keys of [server] that this condition changes")
    workload: dict[str, Any] = Field(
        default_factory=dict,
        description="keys of [workload] that this condition changes; all but request give it a plan of its own",
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
        return cast("dict[str, Any]", redacted_value(server, _HARMLESS))


class ExperimentSpec(Spec):
    """An experiment: conditions x replicates, each run on a freshly started server."""

    name: Name
    title: str = ""
    question: str = ""
    backend: BackendName = Field(default=DEFAULT_BACKEND, description="kind of server; harness doctor lists them")
    time_scale: float = Field(default=1.0, ge=0.1, le=100, description="model time / wall time; 1 on real servers")
    replicates: int = Field(default=6, ge=1, le=1000)
    base_seed: int = Field(
        default=DEFAULT_SEED, ge=0, description="of everything that is drawn; a freeze wants it written, and new"
    )
    same_input: bool = Field(
        default=False,
        description="every replicate repeats the input of replicate 0: restarts only, which say nothing of other plans",
    )
    order: OrderName = Field(
        default="rotation",
        description="of the conditions in each replicate: rotated, there and back, or Williams' square",
    )
    baseline: str = ""
    workload: WorkloadSpec = WorkloadSpec()
    server: ServerSpec = ServerSpec()
    client: ClientSpec = ClientSpec()
    limits: LimitsSpec = LimitsSpec()
    slo: SloSpec = SloSpec()
    window: WindowSpec = WindowSpec()
    prediction: PerturbationSpec = PerturbationSpec()
    stop: StopSpec | None = Field(
        default=None, description="the rule by which `harness run --until decided` ends; none: it cannot be used"
    )
    tune: TuneSpec | None = Field(
        default=None, exclude=True, description="what `harness tune` may do; runs of the experiment do not read it"
    )
    fleet: FleetSpec | None = Field(
        default=None, description="devices that share the replicates, side by side; none: one after another on one"
    )
    analysis: str = Field(
        default="", description="what `harness paper analyse` computes: harness explain analysis; default: general"
    )
    rules: tuple[str, ...] = Field(default=(), description="decision rules that `harness decide` applies by default")
    condition: tuple[ConditionSpec, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _resolve_conditions(cls, table: Any) -> Any:
        return _with_resolved_conditions(cast("Mapping[str, Any]", table)) if isinstance(table, Mapping) else table

    @model_validator(mode="after")
    def _consistent(self) -> ExperimentSpec:
        written = [dict(condition) for condition in self.condition]
        if problems := _problems_of_conditions(written, self.baseline, self.server, self.workload):
            raise ValueError(format_problems(problems, table={"condition": written}))
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
            fixed = [key for key in ("port", "devices", "url", "ssh") if getattr(server, key)]
            if fixed := [*fixed, *(["replicas"] if server.is_routed else [])]:
                raise ValueError(f"server.{fixed[0]} is of one place, and a fleet has several; leave it out")
        return self

    @property
    def factors(self) -> Mapping[str, Factors]:
        """Factors of each condition; where no condition gives any, they are read from the names."""
        given = {condition.name: condition.factors for condition in self.condition}
        return given if any(given.values()) else {name: factors_from_name(name) for name in given}

    @property
    def varied_settings(self) -> frozenset[str]:
        """Keys of [server] that some condition sets: the comparison depends on their values in every condition."""
        return frozenset(key for condition in self.condition for key in set_keys(condition.server))

    @property
    def margin(self) -> float:
        """What counts as equal: of [stop], else 2 %."""
        return 0.02 if self.stop is None else self.stop.margin

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
                "declares no stopping rule, and a rule chosen after the first run proves nothing",
                where=where or self.name,
                hint="Add [stop] with margin and budget (`harness power` proposes it), or leave --until out",
            )
        return self.model_copy(update={"replicates": self.stop.budget})

    def input_of(self, replicate: int) -> int:
        """The number of the plan draw of a replicate: 0 for all where ``same_input`` is set."""
        return 0 if self.same_input else self.unit_of(replicate)

    @property
    def keeps_step(self) -> bool:
        """Whether the experiment fixes which runs are simultaneous; devices then start each period together."""
        return self.fleet is not None and (self.fleet.lockstep or self._limits_neighbours)

    @property
    def _limits_neighbours(self) -> bool:
        return any(condition.neighbours is not None for condition in self.condition)

    def num_at_once(self, condition: ConditionSpec) -> int:
        """Devices of one host that run a condition at once, in a fleet that keeps step."""
        num_devices = 1 if self.fleet is None else len(self.fleet.devices)
        return 1 + condition.neighbours if isinstance(condition.neighbours, int) else num_devices

    def unit_of(self, replicate: int) -> int:
        """A number that replicates share when their runs are simultaneous by plan."""
        return replicate if self.fleet is None or not self.keeps_step else replicate // len(self.fleet.places)

    def turn_of(self, replicate: int) -> int:
        """Which order of conditions a replicate takes: each device uses all of them, its neighbour one ahead."""
        if self.fleet is None:
            return replicate
        turn, place = divmod(replicate, len(self.fleet.places))
        if self._limits_neighbours:  # simultaneous runs have the same condition
            return turn
        # "abba" needs two turns of the same device.
        return turn + place * (2 if self.order == "abba" else 1)

    def workload_of(self, condition: ConditionSpec) -> WorkloadSpec:
        """The workload of a condition. Conditions that change no key of it share a plan in each replicate."""
        return _changed_workload(self.workload, condition.workload) if condition.workload else self.workload

    def server_of(self, condition: ConditionSpec) -> ServerSpec:
        """The complete server configuration of a condition."""
        return _changed_server(self.server, condition.server)


def _with_resolved_conditions(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table with the defaults that follow from a condition's changes written into the condition.

    A record has all keys of [server] and [workload], so there these defaults would look like written values.
    """
    conditions = table.get("condition")
    if not isinstance(conditions, list | tuple):
        return table
    server, workload = _changes(table, "server"), _changes(table, "workload")
    return {
        **table,
        "condition": [_resolved(condition, server, workload) for condition in cast("Sequence[Any]", conditions)],
    }


def _resolved(condition: Any, server: Mapping[str, Any], workload: Mapping[str, Any]) -> Any:
    if not isinstance(condition, Mapping):
        return condition
    written = dict(cast("Mapping[str, Any]", condition))
    changes = _changes(written, "server")
    buckets = implied_buckets({**server, **changes})
    of_server = implied_buckets(server)
    usual = ServerSpec().decode_buckets if of_server is None else of_server
    if buckets is not None and buckets != usual:
        written["server"] = {**changes, "decode_buckets": list(buckets)}
    changes = _changes(written, "workload")
    if "source" in changes:
        implied = {"num_sessions": DEFAULT_SESSIONS} | with_implied_defaults({**workload, **changes})
        written["workload"] = {**{key: value for key, value in implied.items() if key not in workload}, **changes}
    return written


def _changed_workload(workload: WorkloadSpec, changes: Mapping[str, Any]) -> WorkloadSpec:
    table = workload.model_dump(exclude_unset=True)
    if {"num_background", "group"} & changes.keys():
        # Both keys determine the number of sessions.
        table.pop("num_sessions", None)
    return WorkloadSpec.model_validate({**table, **changes})


def _changed_server(server: ServerSpec, changes: Mapping[str, Any]) -> ServerSpec:
    table, router = server.model_dump(), changes.get("router")
    if isinstance(router, Mapping) and "kind" not in router:
        # A condition may change the policy alone; another kind of router begins anew.
        changes = {**changes, "router": {**(table.get("router") or {}), **cast("Mapping[str, Any]", router)}}
    return ServerSpec.model_validate({**table, **changes})


def _problems_of_conditions(
    conditions: Sequence[Mapping[str, Any]], baseline: object, server: ServerSpec | None, workload: WorkloadSpec | None
) -> list[Problem]:
    """Problems of the conditions: names, baselines, and the keys of server and workload that each changes.

    server, workload: of the experiment; None where these are wrong themselves. Then only a condition's keys are judged.
    """
    names = [condition.get("name") for condition in conditions]
    unknown = f"is not one of the conditions {', '.join(map(str, names))}"
    problems: list[Problem] = []
    if baseline and baseline not in names:
        problems.append((("baseline",), f"{baseline!r} {unknown}"))
    for number, condition in enumerate(conditions):
        at: KeyPath = ("condition", number)
        if condition.get("name") in names[:number]:
            problems.append(((*at, "name"), "another condition has that name"))
        if (named := condition.get("baseline")) and named not in names:
            problems.append(((*at, "baseline"), f"{named!r} {unknown}"))
        if changes := _changes(condition, "server"):
            plain = server or ServerSpec()
            problems += _problems_of_changes(_changed_server, plain, changes, (*at, "server"), own_only=server is None)
        if changes := _changes(condition, "workload"):
            problems += _problems_of_changes(
                _changed_workload,
                workload or WorkloadSpec(num_sessions=1),
                changes,
                (*at, "workload"),
                own_only=workload is None,
            )
    return problems


def _changes(condition: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    changes = condition.get(key)
    return cast("Mapping[str, Any]", changes) if isinstance(changes, Mapping) else {}


def _problems_of_changes(
    apply: Callable[[_Spec, Mapping[str, Any]], object],
    spec: _Spec,
    changes: Mapping[str, Any],
    at: KeyPath,
    *,
    own_only: bool,
) -> list[Problem]:
    """Problems of ``spec`` with the changes of a condition. own_only: of the changed keys alone."""
    try:
        apply(spec, changes)
    except ValidationError as error:
        changed = {(*at, str(key)) for key in changes}
        problems = problems_of(error, ExperimentSpec, at)
        return [problem for problem in problems if not own_only or problem[0][: len(at) + 1] in changed]
    return []


def _problems_of_table(error: ValidationError, table: Mapping[str, Any]) -> list[Problem]:
    """Every problem of a refused experiment. Pydantic alone would not judge conditions once another table is wrong."""
    problems = problems_of(error, ExperimentSpec)
    listed = _with_resolved_conditions(table).get("condition")
    conditions = cast("list[Any]", listed) if isinstance(listed, list) else []
    are_named = all(isinstance(table, Mapping) and isinstance(table.get("name"), str) for table in conditions)
    if not conditions or not are_named:
        return problems
    wrong = {path[0] for path, _ in problems if path}
    server = None if "server" in wrong else ServerSpec.model_validate(table.get("server", {}))
    workload = None if "workload" in wrong else WorkloadSpec.model_validate(table.get("workload", {}))
    more = _problems_of_conditions(cast("list[Mapping[str, Any]]", conditions), table.get("baseline"), server, workload)
    # The problems without a key repeat those of the conditions in one text.
    return [*(problem for problem in problems if problem[0] or not more), *more]


def parse_experiment(table: Mapping[str, Any], *, where: str) -> ExperimentSpec:
    """An ExperimentSpec from a TOML table; raises SpecError naming every key that is wrong.

    where: the file, or another source of the table. Problems name lines where it is a file.
    """
    try:
        spec = ExperimentSpec.model_validate(table)
    except ValidationError as error:
        raise SpecError(
            format_problems(_problems_of_table(error, table), table=table, file=Path(where)),
            where=where,
            hint="See `harness explain experiment` for every key",
        ) from error
    _check_rules(spec, where)
    return spec


def _check_rules(spec: ExperimentSpec, where: str) -> None:
    """Refuse an unknown rule, and a rule over factors that no condition has, where conditions give factors."""
    known = factor_names(condition.factors for condition in spec.condition)
    for name in spec.rules:
        if ("/" in name or name.endswith(".toml")) and not Path(name).exists():
            continue  # relative to another working directory, where `decide` and `freeze` look for it
        rule = load_rule(name)
        if known and (unknown := [factor for factor in rule.factors_named if factor not in known]):
            raise SpecError(
                f"rule {name!r} uses factor {unknown[0]!r}, which no condition has",
                where=f"{where}: rules",
                hint=f"The conditions have {', '.join(known)}",
            )


def experiment_file(name_or_path: Path | str) -> Path:
    """The path of an experiment: a file, NAME.toml in the working directory, or the shipped experiment of that name.

    Raises SpecError, which lists the shipped names, where there is neither.
    """
    text = str(name_or_path)
    if text.endswith(".toml") or "/" in text or Path(text).exists():
        return Path(text)
    beside = Path(f"{text}.toml")
    return beside if beside.is_file() else find_shipped("experiments", text, what="experiment")


def load_experiment(name_or_path: Path | str) -> ExperimentSpec:
    """The experiment in a TOML file, or the shipped experiment of that name."""
    path = experiment_file(name_or_path)
    return parse_experiment(experiment_table(path), where=str(path))


# Keys that may hold the path of a file, by their table.
_PATH_KEYS = {"workload": ("waits", "trace"), "server": ("cost_model",)}


def experiment_table(path: Path) -> dict[str, Any]:
    """The table in an experiment file. Files that it names are searched beside it, then in the working directory."""
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
    """``named`` as a path beside ``path``, where such a file exists; else unchanged."""
    if not isinstance(named, str) or not (named.endswith((".toml", ".jsonl")) or "/" in named):
        return named
    beside = path.parent / named
    return str(beside) if beside.is_file() else named
