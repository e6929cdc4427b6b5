"""What people write: experiments, conditions, servers and workloads, as frozen objects read from TOML.

Everything is checked at the door, unknown keys included; inside the harness a spec is never edited, only derived.
Next: ``harness.plan`` builds the inputs a WorkloadSpec asks for; ``harness.runner`` runs an ExperimentSpec.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from harness.errors import SpecError
from harness.redact import redacted_arguments, redacted_env
from harness.shipped import find_shipped

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_SESSIONS = 100_000
NAME_PATTERN = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}$")
Treatment = Literal["as-drawn", "no-waits", "equal-waits"]
BackendName = Literal["emulator", "twin", "sim", "rbln", "attached"]
ClientName = Literal["epoll", "aiohttp"]
RulesName = Literal["vendor-0.11.1", "vendor-0.11.2", "paper", "paper+dummy"]
PromptForm = Literal["token-ids", "text"]
PatchMode = Literal["overlay", "in-place", "none"]


class Spec(BaseModel):
    """Base of everything a person writes: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class FixedLaw(Spec):
    """Always ``value`` tokens."""

    law: Literal["fixed"] = "fixed"
    value: int = Field(ge=1)

    @property
    def minimum(self) -> int:
        return self.value

    @property
    def maximum(self) -> int:
        return self.value


class UniformLaw(Spec):
    """A whole number of tokens, uniform on [low, high], both ends included."""

    law: Literal["uniform"] = "uniform"
    low: int = Field(ge=1)
    high: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> UniformLaw:
        if self.high < self.low:
            raise ValueError(f"high ({self.high}) is below low ({self.low})")
        return self

    @property
    def minimum(self) -> int:
        return self.low

    @property
    def maximum(self) -> int:
        return self.high


class LognormalLaw(Spec):
    """exp(Normal(ln median, sigma)) tokens, rounded, clipped to [low, high]."""

    law: Literal["lognormal"] = "lognormal"
    median: float = Field(gt=0)
    sigma: float = Field(ge=0)
    low: int = Field(default=1, ge=1)
    high: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> LognormalLaw:
        if self.high < self.low:
            raise ValueError(f"high ({self.high}) is below low ({self.low})")
        return self

    @property
    def minimum(self) -> int:
        return self.low

    @property
    def maximum(self) -> int:
        return self.high


LengthLaw = Annotated[FixedLaw | UniformLaw | LognormalLaw, Field(discriminator="law")]


class SessionGroup(Spec):
    """Some sessions of a drawn workload with laws of their own; what is left out is the workload's.

    start_s: the group's sessions start so long after the common start (and stay start_offset_s apart among themselves).
    """

    name: str
    num_sessions: int = Field(ge=1, le=100_000)
    start_s: float = Field(default=0.0, ge=0)
    start_offset_s: float = Field(default=0.0, ge=0)
    requests_per_session: int | None = Field(default=None, ge=1, le=10_000)
    prompt_tokens: LengthLaw | None = None
    generate_tokens: LengthLaw | None = None
    new_tokens: LengthLaw | None = None

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        return check_name(name)


class WorkloadSpec(Spec):
    """How the sessions of one replicate are drawn (methods 2). Lengths in tokens, times in seconds.

    source "drawn": this harness's own seeded draws. "paper": the paper's seeded inputs, bit for bit.
    "sequential": one session after another (the survival experiment): a target, ``num_background`` others, and
    the target's re-arrival; its lengths default to 2,000 + 8 generated, 8 new, and it has no waits.
    """

    source: Literal["drawn", "paper", "sequential", "trace"] = "drawn"
    num_sessions: int = Field(
        ge=1, le=MOST_SESSIONS, description="default with 'sequential': num_background + 2; with 'trace': all of it"
    )
    requests_per_session: int = Field(default=2, ge=1, le=10_000, description="'sequential': always 1")
    prompt_tokens: LengthLaw = UniformLaw(low=800, high=1600)
    generate_tokens: LengthLaw = UniformLaw(low=32, high=256)
    new_tokens: LengthLaw = FixedLaw(value=8)
    waits: str = Field(default="tracelab-v0.0.2", description="a shipped distribution, or the path of a TOML file")
    wait_cap_s: float = Field(default=60.0, gt=0)
    start_offset_s: float = Field(default=0.0, ge=0, description="session i starts i * start_offset_s after the start")
    concurrency: int | None = Field(
        default=None, ge=1, description="closed population: session i starts when session i - concurrency ends"
    )
    shared_prefix_tokens: int = Field(default=0, ge=0)
    num_background: int = Field(default=0, ge=0, le=99_998, description="source 'sequential' only")
    group: tuple[SessionGroup, ...] = Field(
        default=(), description="source 'drawn': groups of sessions, numbered in this order; num_sessions is their sum"
    )
    trace: str = Field(default="", description="source 'trace': a shipped trace, or the path of an imported one")
    scale: str = Field(
        default="1", pattern=r"^1(/[1-9][0-9]{0,3})?$", description="source 'trace': '1/k' divides every length by k"
    )
    max_context_tokens: int = Field(
        default=0, ge=0, description="source 'trace': leave out requests whose prompt and answer are longer; 0: none"
    )
    human_waits: Literal["keep", "cap", "drop"] = Field(
        default="keep", description="source 'trace': waits for a person"
    )
    human_wait_cap_s: float = Field(default=60.0, gt=0, description="source 'trace': with human_waits = 'cap'")
    arrivals: Literal["", "together", "recorded"] = Field(
        default="", description="source 'trace': how its sessions start; default: as the trace says"
    )
    prompt_form: PromptForm = Field(default="token-ids", description="'text' for servers that re-tokenise")
    token_id_range: tuple[int, int] = Field(default=(1000, 150_000), description="prompt ids lie in [low, high)")

    @model_validator(mode="before")
    @classmethod
    def _implied_defaults(cls, table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        given = dict(cast("Mapping[str, Any]", table))
        if given.get("group") and "num_sessions" not in given:
            # A group without a readable size gets its own error further down.
            groups = [group if isinstance(group, Mapping) else vars(group) for group in given["group"]]
            sizes = [size for group in groups if isinstance(size := group.get("num_sessions"), int)]
            given["num_sessions"] = sum(sizes)
        if given.get("source") == "trace":
            # What a recording waited is kept: a cap would change how long its KV blocks have to live.
            return {"num_sessions": MOST_SESSIONS, "wait_cap_s": 1e9, "waits": "none"} | given
        background = given.get("num_background", 0)
        if given.get("source") != "sequential" or not isinstance(background, int):
            return given
        defaults: dict[str, Any] = {
            "num_sessions": background + 2,
            "requests_per_session": 1,
            "prompt_tokens": {"law": "fixed", "value": 2000},
            "generate_tokens": {"law": "fixed", "value": 8},
            "waits": "none",
        }
        return defaults | given

    @model_validator(mode="after")
    def _consistent(self) -> WorkloadSpec:
        low, high = self.token_id_range
        if low < 0 or high - low < 256:
            raise ValueError(f"token_id_range [{low}, {high}) must hold at least 256 ids, none negative")
        if self.shared_prefix_tokens and self.prompt_tokens.minimum <= self.shared_prefix_tokens:
            raise ValueError(
                f"prompt_tokens can be as low as {self.prompt_tokens.minimum}, which leaves nothing of a session's own "
                f"beside shared_prefix_tokens ({self.shared_prefix_tokens})"
            )
        if self.group:
            self._check_groups()
        if self.source == "sequential":
            self._check_sequential()
        elif self.num_background:
            raise ValueError(f"num_background belongs to source 'sequential', not to {self.source!r}")
        if self.source == "paper":
            self._check_paper()
        self._check_trace()
        return self

    @property
    def length_divisor(self) -> int:
        """k of ``scale`` = 1/k."""
        return int(self.scale.rpartition("/")[2])

    def _check_trace(self) -> None:
        own = ("trace", "scale", "max_context_tokens", "human_waits", "human_wait_cap_s", "arrivals")
        drawn = ("requests_per_session", "prompt_tokens", "generate_tokens", "new_tokens", "shared_prefix_tokens")
        strangers = (*drawn, "group", "start_offset_s") if self.source == "trace" else own
        for name in strangers:
            if getattr(self, name) != WorkloadSpec.model_fields[name].default:
                raise ValueError(f"{name} does not belong to source {self.source!r}; leave it out")
        if self.source == "trace" and not self.trace:
            raise ValueError("source 'trace' needs trace = NAME, or the path of a file that harness trace import wrote")

    def groups_or_self(self) -> tuple[tuple[SessionGroup, WorkloadSpec], ...]:
        """Every group with the workload as it is for that group's sessions; one nameless group when there are none."""
        if not self.group:
            return ((SessionGroup(name="all", num_sessions=self.num_sessions), self),)
        laws = ("requests_per_session", "prompt_tokens", "generate_tokens", "new_tokens")
        return tuple(
            (group, self.model_copy(update={law: own for law in laws if (own := getattr(group, law)) is not None}))
            for group in self.group
        )

    def _check_groups(self) -> None:
        names = [group.name for group in self.group]
        if len(set(names)) != len(names):
            raise ValueError(f"group names repeat: {names}")
        if self.source != "drawn" or self.concurrency is not None or self.start_offset_s:
            raise ValueError("groups belong to source 'drawn', without concurrency; each has its own start_offset_s")
        total = sum(group.num_sessions for group in self.group)
        if self.num_sessions != total:
            raise ValueError(f"num_sessions is {self.num_sessions}, the groups have {total}; leave num_sessions out")

    def _check_sequential(self) -> None:
        if self.num_sessions != self.num_background + 2:
            raise ValueError(
                f"num_sessions is {self.num_sessions}, but a sequential workload has num_background + 2 = "
                f"{self.num_background + 2}; leave num_sessions out"
            )
        if self.requests_per_session != 1 or self.concurrency or self.start_offset_s or self.waits != "none":
            raise ValueError(
                "a sequential workload has one request per session, one after the other and without waits; leave out "
                "requests_per_session, concurrency, start_offset_s and waits"
            )

    def _check_paper(self) -> None:
        """The paper's inputs exist for its own laws only; every other key would silently not be the paper's."""
        free = {"source", "num_sessions", "prompt_form", "token_id_range"}
        for name, info in WorkloadSpec.model_fields.items():
            if name not in free and getattr(self, name) != info.default:
                raise ValueError(f"source 'paper' fixes {name}; leave it out, or use source 'drawn'")


class ServerSpec(Spec):
    """The server's compile-time configuration, and how it is launched."""

    max_num_seqs: int = Field(default=8, ge=1, le=1024, description="the limit: most requests running at once")
    decode_buckets: tuple[int, ...] = (1, 2, 4, 8)
    kv_slots: int | None = Field(default=None, ge=1, description="physical KV slots; default: max_num_seqs")
    slot_tokens: int = Field(default=8192, ge=256, le=32768, multiple_of=128, description="max_model_len")
    cost_model: str = "paper"
    prefix_caching: bool = True
    rules: RulesName = "vendor-0.11.1"
    start_timeout_s: float = Field(default=60.0, gt=0)
    stop_grace_s: float = Field(default=10.0, gt=0)
    port: int = Field(default=0, ge=0, le=65535, description="0: any free port")
    artifact: str = Field(default="", description="backend 'rbln': folder of the compiled model")
    environment: str = Field(default="", description="virtual environment that holds vllm; default: the one on PATH")
    devices: tuple[int, ...] = Field(default=(), description="RBLN_DEVICES; default: what the artifact needs, from 0")
    patch: PatchMode = Field(default="overlay", description="how the [BUCKET] line gets into a real stack")
    observer: bool = Field(default=True, description="real stacks: one record per engine step, from inside")
    extra_args: tuple[str, ...] = Field(default=(), description="more arguments of `vllm serve`; the last one counts")
    env: dict[str, str] = Field(
        default_factory=dict, description="more environment variables of the server; secrets are left out of records"
    )
    url: str = Field(default="", description="backend 'attached': the server somebody else started")
    ssh: str = Field(default="", description="backend 'rbln': start the server on this host, over ssh")
    device_metrics_url: str = Field(
        default="", description="of rbln-metrics-exporter, e.g. http://127.0.0.1:9090/metrics; read through every run"
    )

    @field_serializer("env", when_used="json")
    def _env_without_secrets(self, env: dict[str, str]) -> dict[str, str]:
        return redacted_env(env)

    @field_serializer("extra_args", when_used="json")
    def _arguments_without_secrets(self, words: tuple[str, ...]) -> tuple[str, ...]:
        return redacted_arguments(words)

    @field_validator("device_metrics_url")
    @classmethod
    def _http_url(cls, url: str) -> str:
        if url and not re.match(r"http://[^/@\s]+(/\S*)?$", url):
            raise ValueError(f"device_metrics_url is {url!r}, not http://HOST:PORT/metrics")
        return url

    @field_validator("devices")
    @classmethod
    def _distinct_devices(cls, devices: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(devices)) != len(devices) or any(device < 0 for device in devices):
            raise ValueError(f"devices must be distinct and not negative, got {list(devices)}")
        return devices

    @field_validator("decode_buckets")
    @classmethod
    def _ascending(cls, buckets: tuple[int, ...]) -> tuple[int, ...]:
        if not buckets:
            raise ValueError("decode_buckets is empty")
        if min(buckets) < 1:
            raise ValueError(f"decode_buckets must be positive, got {list(buckets)}")
        if len(set(buckets)) != len(buckets):
            raise ValueError(f"decode_buckets repeats a value: {list(buckets)}")
        return tuple(sorted(buckets))

    @model_validator(mode="after")
    def _limit_is_a_bucket(self) -> ServerSpec:
        if self.decode_buckets[-1] != self.max_num_seqs:
            raise ValueError(
                f"decode_buckets {list(self.decode_buckets)} must end with max_num_seqs ({self.max_num_seqs}), "
                "or a full batch has no compiled step"
            )
        return self

    @property
    def num_kv_slots(self) -> int:
        return self.max_num_seqs if self.kv_slots is None else self.kv_slots


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

    @field_serializer("server", when_used="json")
    def _server_without_secrets(self, server: dict[str, Any]) -> dict[str, Any]:
        kept = dict(server)
        if isinstance(env := kept.get("env"), Mapping):
            kept["env"] = redacted_env(cast("Mapping[str, str]", env))
        if isinstance(words := kept.get("extra_args"), (list, tuple)):
            kept["extra_args"] = list(redacted_arguments(cast("list[str]", words)))
        return kept

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        return check_name(name)


class LimitsSpec(Spec):
    """What makes a run INVALID. Times in wall milliseconds of the client's own machine."""

    rearrival_lag_p99_ms: float = Field(default=10.0, gt=0)
    start_spread_ms: float = Field(default=20.0, gt=0)
    request_timeout_s: float = Field(default=600.0, gt=0, description="model seconds one request may take")


class ClientSpec(Spec):
    """How the plan is replayed."""

    name: ClientName = "epoll"
    stream: bool = True
    spin_us: int = Field(default=300, ge=0, le=2000, description="longest busy-wait before a deadline; 0: none")
    processes: int = Field(default=1, ge=1, le=64, description="client processes that share the sessions")
    scrape_interval_s: float = Field(default=1.0, gt=0)


class ExperimentSpec(Spec):
    """An experiment: conditions x replicates, each run on a freshly started server."""

    name: str
    title: str = ""
    question: str = ""
    backend: BackendName = Field(default="emulator", description="'sim': virtual time, no server process")
    time_scale: float = Field(default=1.0, ge=0.1, le=100, description="model time / wall time; 1 on real servers")
    replicates: int = Field(default=3, ge=1, le=1000)
    base_seed: int = Field(ge=0)
    same_input: bool = Field(
        default=False, description="every replicate repeats the input of replicate 0: restarts only"
    )
    baseline: str = ""
    workload: WorkloadSpec
    server: ServerSpec = ServerSpec()
    client: ClientSpec = ClientSpec()
    limits: LimitsSpec = LimitsSpec()
    analysis: str = Field(default="", description="what `harness analyse` computes; default: padding and cost")
    rules: tuple[str, ...] = Field(default=(), description="decision rules that `harness decide` applies by default")
    condition: tuple[ConditionSpec, ...] = Field(min_length=1)

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        return check_name(name)

    @model_validator(mode="after")
    def _consistent(self) -> ExperimentSpec:
        names = [condition.name for condition in self.condition]
        if len(set(names)) != len(names):
            raise ValueError(f"condition names repeat: {names}")
        if self.baseline and self.baseline not in names:
            raise ValueError(f"baseline {self.baseline!r} is not one of the conditions {names}")
        for condition in self.condition:
            if condition.baseline and condition.baseline not in names:
                raise ValueError(f"condition {condition.name}: baseline {condition.baseline!r} is not one of {names}")
            self.server_of(condition)
            self.workload_of(condition)
        return self

    @property
    def baseline_name(self) -> str:
        return self.baseline or self.condition[0].name

    def baseline_of(self, condition: ConditionSpec) -> str:
        """The name of the condition that ``condition`` is compared with (its own name for the baseline itself)."""
        return condition.baseline or self.baseline_name

    def input_of(self, replicate: int) -> int:
        """Which draw a replicate gets: its own, or the first one's where only execution is repeated."""
        return 0 if self.same_input else replicate

    def workload_of(self, condition: ConditionSpec) -> WorkloadSpec:
        """What one condition replays. Conditions that change no key of it share one plan in each replicate."""
        if not condition.workload:
            return self.workload
        table = self.workload.model_dump(exclude_unset=True)
        if {"num_background", "group"} & condition.workload.keys():
            # Both decide the number of sessions.
            table.pop("num_sessions", None)
        return WorkloadSpec.model_validate({**table, **condition.workload})

    def server_of(self, condition: ConditionSpec) -> ServerSpec:
        """The whole server configuration of one condition."""
        return ServerSpec.model_validate({**self.server.model_dump(), **condition.server})


def check_name(name: str) -> str:
    """Names become folders: lower case, digits, dot, dash, underscore."""
    if not NAME_PATTERN.match(name):
        raise ValueError(f"name {name!r} must match {NAME_PATTERN.pattern}")
    return name


def load_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file; every failure is a SpecError that names the file and the line."""
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise SpecError(f"cannot be read ({error.strerror})", where=str(path), hint="Check the path") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"is not UTF-8 text (byte {error.start})", where=str(path), hint="Save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"is not valid TOML: {error}", where=str(path), hint="Mend the line named") from error


def describe_validation_error(error: ValidationError) -> str:
    """All problems of one pydantic error in one line, each with its key."""
    problems: list[str] = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown key"
        problems.append(f"{key}: {message}" if key else message)
    return "; ".join(problems)


def parse_experiment(table: Mapping[str, Any], *, where: str) -> ExperimentSpec:
    """An ExperimentSpec from a TOML table; raises SpecError naming every key that is wrong."""
    try:
        return ExperimentSpec.model_validate(table)
    except ValidationError as error:
        raise SpecError(
            describe_validation_error(error), where=where, hint="See `harness explain experiment` for every key"
        ) from error


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
    return parse_experiment(load_toml(path), where=str(path))
