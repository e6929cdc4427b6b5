"""The server of a run, and the router before its replicas: what is compiled in, how they are started, their addresses.

The router is a small one of the harness's own, or a real one by its command. Secrets in environments and arguments
reach the server and no record.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)

from harness.model.spec.base import DeviceNumbers, Spec
from harness.redact import redacted_arguments, redacted_env, redacted_text
from harness.stacks.rbln.rules.kv_rules import (
    AUTO,
    PAGED,
    RuleSet,
    check_active_limit,
    check_rules,
    rule_set,
    rules_for_vllm,
)

RouterKind = Literal["harness", "vllm-router", "sglang-router", "haproxy", "nginx", "command"]
ROUTER_POLICIES = ("round-robin", "least-requests", "session-affinity", "prefix-aware")
"""Policies of the harness's own router; other routers' own words for them are in ``ROUTER_WORDS``."""
ROUTER_WORDS: dict[str, dict[str, str]] = {
    "vllm-router": {
        "round-robin": "round_robin",
        "session-affinity": "consistent_hash",
        "prefix-aware": "cache_aware",
    },
    "sglang-router": {"round-robin": "round_robin", "prefix-aware": "cache_aware"},
    "haproxy": {
        "round-robin": "roundrobin",
        "least-requests": "leastconn",
        "session-affinity": "hdr({session_header})",
    },
    "nginx": {
        "round-robin": "",
        "least-requests": "least_conn;",
        "session-affinity": "hash $http_{session_variable} consistent;",
    },
}
"""What each real router calls a policy. Source: vllm-router 0.1.17 and sglang-router 0.3.2, ``--help``; HAProxy 2.6,
configuration manual, "balance"; nginx 1.22, ngx_http_upstream_module."""
REPLICA_HEADER = "X-Replica"
NAMING_ROUTERS = frozenset({"harness", "haproxy", "nginx"})
"""Routers that are configured here to say in ``REPLICA_HEADER`` who answered."""
ROUTERS_WITH_OWN_POLICIES = frozenset({"vllm-router", "sglang-router"})
"""Routers whose other policies may be given in their own words."""
_HEADER_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")


class RouterSpec(Spec):
    """The router to several replicas, and how it shares requests out."""

    kind: RouterKind = Field(default="harness", description="which router; command: any other, by its command line")
    policy: str = Field(
        default="round-robin",
        description="round-robin, least-requests, session-affinity or prefix-aware; vllm-router and sglang-router also "
        "take their own words",
    )
    session_header: str = Field(
        default="X-Session-Id", description="header that names a request's session; the client sends it; empty: none"
    )
    command: tuple[str, ...] = Field(
        default=(),
        description="of kind 'command': the program and its words; {urls}, {hosts}, {host} and {port} are filled in; "
        "of other kinds: more words",
    )
    health: str = Field(
        default="/health", pattern=r"^/\S*$", description="path that answers 200 when the router is open"
    )
    environment: str = Field(
        default="", description="virtual environment that holds the router's program; default: the one on PATH"
    )

    @field_validator("session_header")
    @classmethod
    def _is_a_header(cls, name: str) -> str:
        if name and not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a header")
        return name

    @field_validator("environment")
    @classmethod
    def _no_option(cls, name: str) -> str:
        if name.startswith("-"):
            raise ValueError("a name that starts with '-' would be read as an option; write ./ before it")
        return name

    @model_validator(mode="after")
    def _policy_is_known(self) -> RouterSpec:
        if self.kind == "command":
            if not self.command:
                raise ValueError('kind = "command" needs command = ["program", "...", "{urls}"]')
            return self
        if self.kind == "harness" and (self.command or self.environment):
            raise ValueError("the harness's own router takes no command and no environment; say another kind")
        known = ROUTER_POLICIES if self.kind == "harness" else tuple(ROUTER_WORDS[self.kind])
        if self.policy not in known and (self.kind not in ROUTERS_WITH_OWN_POLICIES or self.policy in ROUTER_POLICIES):
            raise ValueError(f"{self.kind} has no policy {self.policy!r}; it has {', '.join(known)}")
        if self.policy == "session-affinity" and not self.session_header:
            raise ValueError("session-affinity needs session_header: the header that names a request's session")
        return self

    @field_serializer("command", when_used="json")
    def _command_without_secrets(self, words: tuple[str, ...]) -> tuple[str, ...]:
        return redacted_arguments(words)


class ServerShape(NamedTuple):
    """What is compiled into a server, and its KV memory. Checked by ServerSpec and EngineConfig, not here.

    max_num_seqs: most requests running at once, as compiled. decode_buckets: ascending compiled batch sizes.
    kv_slots: physical KV slots. slot_tokens: longest request, prompt and answer together. max_active_seqs: most
    requests admitted at once; None: max_num_seqs. num_gpu_blocks: of paged KV memory, without slots.
    """

    max_num_seqs: int
    decode_buckets: tuple[int, ...]
    kv_slots: int
    slot_tokens: int = 8192
    max_active_seqs: int | None = None
    num_gpu_blocks: int | None = None

    @property
    def label(self) -> str:
        """ "{1,4,8}/8", "{1,4,8}/8 12 slots", "{1,4,8}/8 6 active", "{1,4,8}/8 1024 blocks" """
        buckets = ",".join(str(bucket) for bucket in self.decode_buckets)
        slots = "" if self.kv_slots == self.max_num_seqs else f" {self.kv_slots} slots"
        active = "" if self.max_active_seqs is None else f" {self.max_active_seqs} active"
        blocks = "" if self.num_gpu_blocks is None else f" {self.num_gpu_blocks} blocks"
        return f"{{{buckets}}}/{self.max_num_seqs}{slots}{active}{blocks}"


RulesName = Annotated[str, AfterValidator(check_rules)]
RETENTION_KEYS = frozenset({"keep_kv_s", "offload_blocks", "offload_block_us"})
"""Keys of a ServerSpec for what becomes of KV that nobody holds; only models have them."""
PAGED_KEYS = RETENTION_KEYS | {
    "num_gpu_blocks",
    "block_size",
    "max_num_batched_tokens",
    "long_prefill_tokens",
    "async_scheduling",
}
"""Keys of a ServerSpec that only a server with paged KV memory has."""
ROUTED_KEYS = frozenset({"replicas", "router", "replica_urls", "replica_header"})
"""Keys of a ServerSpec for several replicas behind a router; records of one server do not have them."""
_USUAL_ROUTED: dict[str, Any] = {"replicas": 1, "router": None, "replica_urls": (), "replica_header": ""}
_USUALLY_UNWRITTEN: dict[str, Any] = {**_USUAL_ROUTED, **dict.fromkeys(RETENTION_KEYS), "metrics_url": ""}
MOST_REPLICAS = 64
SSH_DESTINATION = re.compile(r"(ssh://)?(\w[\w.+-]*@)?([\w:][\w.:%-]*|\[[0-9a-fA-F:.%]+\](:\d+)?)/?")
PatchMode = Literal["overlay", "none"]
MOST_SEQS = 1024


def default_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """``max_num_seqs``, its half, and so on down to 1, rounded down, ascending.

    Source: vllm-rbln 0.12.0, v1/worker/bucketing/exponential_bucketing_manager.py, step 2, as many as there are.
    """
    halves = {max_num_seqs >> shift for shift in range(max_num_seqs.bit_length())}
    return tuple(sorted(halves))


def implied_buckets(server: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The buckets of a server that was written without any; None where they are written, or its limit is not.

    vLLM itself captures sizes of its own choice, or none: then there are no buckets here.
    """
    limit: object = server.get("max_num_seqs")
    if "decode_buckets" in server:
        return None
    if server.get("model") or server.get("step_log"):
        return ()
    if not isinstance(limit, int) or isinstance(limit, bool):
        return None
    return default_buckets(limit) if 1 <= limit <= MOST_SEQS else None


def set_keys(changes: Mapping[str, Any]) -> frozenset[str]:
    """The keys that a condition sets; sizes that are left to the server are none of them."""
    return frozenset(key for key, value in changes.items() if key != "decode_buckets" or value)


class ServerSpec(Spec):
    """The server's compile-time configuration, and how it is launched."""

    max_num_seqs: int = Field(default=8, ge=1, le=MOST_SEQS, description="the limit: most requests running at once")
    decode_buckets: tuple[int, ...] = Field(
        default=(1, 2, 4, 8),
        description="compiled batch sizes; default: max_num_seqs, its half, and so on down to 1; of a vLLM: its own",
    )
    kv_slots: int | None = Field(
        default=None, ge=1, description="physical KV slots; left out: room for max_num_seqs of the longest requests"
    )
    slot_tokens: int = Field(default=8192, ge=256, le=32768, multiple_of=128, description="max_model_len")
    cost_model: str = Field(default="paper", description="step times: a shipped model, or the path of a TOML file")
    prefix_caching: bool = Field(default=True, description="reuse the KV of prompts that begin alike")
    rules: RulesName = Field(default=AUTO, description="scheduler and KV rules; auto: those of the server")
    max_active_seqs: int | None = Field(
        default=None, ge=1, description="--max-num-active-seqs: admits fewer than max_num_seqs without recompiling"
    )
    num_gpu_blocks: int | None = Field(
        default=None, ge=2, description="paged KV memory: its blocks (--num-gpu-blocks-override); default: what fits"
    )
    block_size: int | None = Field(
        default=None, ge=1, description="paged KV memory: tokens of a block; default: the server's"
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        description="paged KV memory: most tokens of an engine step; default: the server's, which vLLM takes from the "
        "device: 2,048 below 70 GiB (so modelled ones), 8,192 on H100 and H200, 16,384 from 160 GiB",
    )
    long_prefill_tokens: int | None = Field(
        default=None,
        ge=0,
        description="paged KV memory: most tokens of one prompt in a step (--long-prefill-token-threshold); default: "
        "the server's, which is 0: no such limit",
    )
    async_scheduling: bool | None = Field(
        default=None,
        description="paged KV memory: each step is decided when the one before it begins; default: the server's, or "
        "false where it is emulated or simulated",
    )
    keep_kv_s: float | None = Field(
        default=None,
        gt=0,
        description="paged KV memory, modelled: longest that the KV of a request is pinned that says when its session "
        "returns; default: none",
    )
    offload_blocks: int | None = Field(
        default=None,
        ge=1,
        description="paged KV memory, modelled: blocks of a second memory, which overwritten ones go to; default: none",
    )
    offload_block_us: float | None = Field(
        default=None, ge=0, description="paged KV memory, modelled: time to load a block from there; default: 0"
    )
    start_timeout_s: float = Field(default=60.0, gt=0)
    stop_grace_s: float = Field(default=10.0, gt=0)
    port: int = Field(default=0, ge=0, le=65535, description="0: any free port")
    model: str = Field(
        default="",
        description="the model: of backend 'vllm' as `vllm serve` takes it; of 'attached' as the server lists it",
    )
    artifact: str = Field(default="", description="backend 'rbln': folder of the compiled model")
    environment: str = Field(
        default="",
        description="virtual environment that holds vllm; default: the one on PATH. Twin: or a version",
    )
    devices: DeviceNumbers = Field(
        default=(), description="NPUs that the server sees; default: what the artifact needs, from 0"
    )
    patch: PatchMode = Field(default="overlay", description="how the [BUCKET] line gets into a real stack")
    observer: bool = Field(default=True, description="real stacks: one record per engine step, from inside")
    extra_args: tuple[str, ...] = Field(default=(), description="more arguments of `vllm serve`; the last one counts")
    env: dict[str, str] = Field(
        default_factory=dict, description="more environment variables of the server; secrets are left out of records"
    )
    url: str = Field(default="", description="backend 'attached': the server somebody else started")
    step_log: str = Field(
        default="",
        description="backend 'attached': file that the server's step log is written to (docs/guides/vllm-steps.md); of "
        "replicas with {replica} for the number of each",
    )
    api_key_env: str = Field(
        default="",
        pattern=r"^([A-Za-z_]\w*)?$",
        description="backend 'attached': name of the environment variable that holds the server's API key",
    )
    declared: bool = Field(
        default=False, description="what nothing shows is as you say; reports call it declared, not verified"
    )
    ssh: str = Field(default="", description="backend 'rbln': start the server on this host, over ssh")
    device_metrics_url: str = Field(
        default="", description="of rbln-metrics-exporter, e.g. http://127.0.0.1:9090/metrics; read through every run"
    )
    metrics_url: str = Field(
        default="",
        description="backend 'attached': where the server's metrics are, when not at url + /metrics; its key is sent "
        "there only if the server is the same",
    )
    replicas: int = Field(
        default=1,
        ge=1,
        le=MOST_REPLICAS,
        description="servers of this shape behind one router (docs/guides/routers.md)",
    )
    router: RouterSpec | None = Field(
        default=None,
        description="the router before two or more replicas: kind, policy; default: the harness's, round-robin",
    )
    replica_urls: tuple[str, ...] = Field(
        default=(), description="backend 'attached': the replicas' own addresses behind the router at url"
    )
    replica_header: str = Field(
        default="", description="response header by which the router names the replica that answered"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_buckets(cls, table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        given = cast("Mapping[str, Any]", table)
        buckets = implied_buckets(given)
        return given if buckets is None else {**given, "decode_buckets": buckets}

    @model_serializer(mode="wrap")
    def _without_newer_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Records of one server are as they were before there were routers and retention."""
        table: dict[str, Any] = dump(self)
        unused = {key for key, usual in _USUALLY_UNWRITTEN.items() if getattr(self, key) == usual}
        return {key: value for key, value in table.items() if key not in unused}

    @field_serializer("env", when_used="json")
    def _env_without_secrets(self, env: dict[str, str]) -> dict[str, str]:
        return redacted_env(env)

    @field_serializer("url", "metrics_url", "device_metrics_url", when_used="json")
    def _address_without_secrets(self, url: str) -> str:
        return redacted_text(url)

    @field_serializer("replica_urls", when_used="json")
    def _addresses_without_secrets(self, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(redacted_text, urls))

    @field_serializer("extra_args", when_used="json")
    def _arguments_without_secrets(self, words: tuple[str, ...]) -> tuple[str, ...]:
        return redacted_arguments(words)

    @field_validator("metrics_url", "device_metrics_url")
    @classmethod
    def _http_url(cls, url: str) -> str:
        if url and not re.match(r"https?://[^/@\s]+(/\S*)?$", url):
            raise ValueError(f"{redacted_text(url)!r} is not http://HOST:PORT/metrics")
        return url

    @field_validator("ssh")
    @classmethod
    def _destination(cls, destination: str) -> str:
        # On ssh's command line, "-oProxyCommand=..." would run a command on this host.
        if destination and not SSH_DESTINATION.fullmatch(destination):
            raise ValueError("ssh is not HOST, USER@HOST or ssh://USER@HOST:PORT")
        return destination

    @field_validator("model", "artifact", "environment")
    @classmethod
    def _no_option(cls, name: str) -> str:
        if name.startswith("-"):
            raise ValueError("a name that starts with '-' would be read as an option; write ./ before it")
        return name

    @field_validator("decode_buckets")
    @classmethod
    def _ascending(cls, buckets: tuple[int, ...]) -> tuple[int, ...]:
        if min(buckets, default=1) < 1:
            raise ValueError(f"decode_buckets must be positive, got {list(buckets)}")
        if len(set(buckets)) != len(buckets):
            raise ValueError(f"decode_buckets repeats a value: {list(buckets)}")
        return tuple(sorted(buckets))

    @model_validator(mode="after")
    def _limit_is_a_bucket(self) -> ServerSpec:
        if not self.decode_buckets and not (self.is_vllm and self.is_paged):
            raise ValueError("decode_buckets is empty")
        if not self.is_paged and self.decode_buckets[-1] != self.max_num_seqs:
            raise ValueError(
                f"decode_buckets {list(self.decode_buckets)} must end with max_num_seqs ({self.max_num_seqs}), "
                "or a full batch has no compiled step"
            )
        return self

    @model_validator(mode="after")
    def _active_limit_is_known(self) -> ServerSpec:
        # With "auto" the serving version is not known yet; the launch and the simulation check again.
        check_active_limit(self.max_active_seqs, self.max_num_seqs, None if self.rules == AUTO else self.rule_set())
        return self

    @model_validator(mode="after")
    def _replicas_are_routed(self) -> ServerSpec:
        if self.replica_urls and self.replicas not in (1, len(self.replica_urls)):
            raise ValueError(f"{self.replicas} replicas and {len(self.replica_urls)} replica_urls; leave replicas out")
        if self.url and self.replicas > 1 and not self.replica_urls:
            raise ValueError(f"{self.replicas} replicas that run already need replica_urls: the address of each")
        if self.replica_urls and not self.url:
            raise ValueError("replica_urls are of servers that run already, behind the router at server.url")
        if self.is_routed and self.metrics_url:
            raise ValueError("metrics_url is of one server; of replicas each is asked at its own url + /metrics")
        if self.is_routed and self.port and not self.url:
            raise ValueError("port is of one server, and replicas need several; leave it out")
        if self.is_routed and self.step_log and "{replica}" not in self.step_log:
            raise ValueError("step_log is of one server; of replicas write {replica} where the number of each stands")
        return self

    @property
    def num_replicas(self) -> int:
        """Servers that answer behind one router."""
        return max(self.replicas, len(self.replica_urls))

    @property
    def is_routed(self) -> bool:
        """Whether several servers answer behind one router."""
        return self.num_replicas > 1

    @property
    def routing(self) -> RouterSpec:
        """The router; the harness's own where none is written."""
        return self.router or RouterSpec()

    @property
    def names_replica_in(self) -> str:
        """Response header by which the router says who answered; "" where it says nothing."""
        own = self.routing.kind in NAMING_ROUTERS and self.is_routed and not self.url
        return self.replica_header or (REPLICA_HEADER if own else "")

    @property
    def replica(self) -> ServerSpec:
        """One of the replicas, as a server by itself."""
        return self.model_copy(update=_USUAL_ROUTED) if self.is_routed else self

    @property
    def is_vllm(self) -> bool:
        """Whether vLLM itself serves, not a model of it."""
        return bool(self.model or self.step_log)

    @property
    def is_paged(self) -> bool:
        """Whether it is a vLLM with paged KV memory, which runs a batch above the largest captured size eagerly."""
        return self.rule_set().is_paged

    def rule_set(self, version: str = "") -> RuleSet:
        """Its rules; for ``auto`` those of the ``version`` of vLLM itself or vllm-rbln that serves, else the newest."""
        if self.rules == AUTO and self.is_vllm:
            return rules_for_vllm(version) or rule_set(PAGED)
        return rule_set(self.rules, version)

    @property
    def num_kv_slots(self) -> int:
        """Physical KV slots where each holds one request of the full length."""
        return self.physical_slots()

    def physical_slots(self, slots_per_seq: int = 1) -> int:
        """Physical KV slots where the longest request takes ``slots_per_seq`` of them."""
        return self.max_num_seqs * slots_per_seq if self.kv_slots is None else self.kv_slots

    @property
    def shape(self) -> ServerShape:
        """Its shape, which a search varies. ``max_active_seqs`` equal to ``max_num_seqs`` is no limit."""
        active = None if self.max_active_seqs == self.max_num_seqs else self.max_active_seqs
        return ServerShape(
            self.max_num_seqs, self.decode_buckets, self.num_kv_slots, self.slot_tokens, active, self.num_gpu_blocks
        )

    @classmethod
    def of_shape(cls, shape: ServerShape, rules: str) -> ServerSpec:
        """A server of this shape, otherwise with the defaults."""
        return cls(**shape._asdict(), rules=rules)
