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
    FieldSerializationInfo,
    SerializerFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)

from harness.clock import NS_PER_S, NS_PER_US
from harness.model.spec.base import DeviceNumbers, Spec
from harness.redact import redacted_arguments, redacted_env, redacted_text
from harness.stacks.rbln.rules.kv_rules import (
    AUTO,
    NATIVE,
    PAGED,
    RuleSet,
    check_active_limit,
    check_rules,
    is_paged,
    rule_set,
    rules_for_vllm,
)

RouterKind = Literal["harness", "vllm-router", "sglang-router", "haproxy", "nginx", "command"]
ROUTER_POLICIES = ("round-robin", "least-requests", "session-affinity", "prefix-aware")
"""Policies of the harness's own router; other routers' own words for them are in ``ROUTER_WORDS``."""
ROUTER_WORDS: dict[str, dict[str, str]] = {
    "vllm-router": {"round-robin": "round_robin", "session-affinity": "consistent_hash", "prefix-aware": "cache_aware"},
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


def _no_option(name: str) -> str:
    if name.startswith("-"):
        raise ValueError("a name that starts with '-' would be read as an option; write ./ before it")
    return name


def _http_url(url: str) -> str:
    if url and not re.match(r"https?://[^/@\s]+(/\S*)?$", url):
        raise ValueError(f"{redacted_text(url)!r} is not http://HOST:PORT/metrics")
    return url


Operand = Annotated[str, AfterValidator(_no_option)]
"""A name on a command line."""
MetricsUrl = Annotated[str, AfterValidator(_http_url)]


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
    environment: Operand = Field(
        default="", description="virtual environment that holds the router's program; default: the one on PATH"
    )

    @field_validator("session_header")
    @classmethod
    def _is_a_header(cls, name: str) -> str:
        if name and not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a header")
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
MOST_REPLICAS = 64
SSH_DESTINATION = re.compile(r"(ssh://)?(\w[\w.+-]*@)?([\w:][\w.:%-]*|\[[0-9a-fA-F:.%]+\](:\d+)?)/?")
PatchMode = Literal["overlay", "none"]
MOST_SEQS = 1024
MOST_CONTEXT_TOKENS = 1 << 20
MOST_SLOT_TOKENS = 32_768
"""Of modelled servers with KV slots: vllm-rbln compiles longer ones in partitions only."""


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
    if server.get("model") or server.get("step_log") or (server.get("url") and is_paged(str(server.get("rules")))):
        return ()
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MOST_SEQS:
        return None
    drafts: object = server.get("num_speculative_tokens")
    counts_tokens = is_paged(str(server.get("rules"))) and server["rules"] != NATIVE
    tokens = 1 + max(drafts, 0) if isinstance(drafts, int) and counts_tokens else 1
    return tuple(tokens * size for size in default_buckets(limit))


def set_keys(changes: Mapping[str, Any]) -> frozenset[str]:
    """The keys that a condition sets; sizes that are left to the server are none of them."""
    return frozenset(key for key, value in changes.items() if key != "decode_buckets" or value)


KeyKind = Literal["engine", "slots", "paged", "modelled", "launch", "harness", "routed"]
"""engine: of every server. slots, paged: of one kind of KV memory. modelled: of paged memory, and only of models.
launch: how a server is started or reached. harness: never seen by a server. routed: of replicas behind a router."""
_KIND_WORDS = {"paged": "paged KV memory: ", "modelled": "paged KV memory, modelled: "}


class ServerKey(NamedTuple):
    """What a row of the table of server keys holds beside name, type, default and words.

    flag: of ``vllm serve``. header: its name in the step log of a vLLM. backends: those whose launch applies it, so
    that nothing has to show it. engine: the engine's name of it, and unit: how many of the engine's units one of the
    key's is, where these differ. is_newer: records leave it out where it has its default. lever: its place among what a
    search can change, the easiest change first; 0: not changed. change: that change in words. values: what a search
    tries of it beside today's; of a row with them nothing else has to know the key. is_asked: it is searched only where
    it is named.
    """

    kind: KeyKind
    flag: str = ""
    header: str = ""
    backends: tuple[str, ...] = ()
    engine: str = ""
    unit: int = 1
    is_newer: bool = False
    lever: int = 0
    change: str = ""
    values: tuple[int, ...] = ()
    is_asked: bool = False


def shown(kind: KeyKind, header: str, flag: str = "", lever: int = 0, change: str = "") -> ServerKey:
    """A row that a vLLM shows. flag: default: as the header has it."""
    return ServerKey(kind, flag or f"--{header.replace('_', '-')}", header, lever=lever, change=change)


def searched(row: ServerKey, lever: int, values: tuple[int, ...], *, is_asked: bool = False) -> ServerKey:
    """A row whose values a search tries; the change is named by the key."""
    return row._replace(lever=lever, values=values, is_asked=is_asked)


def key(row: ServerKey, default: Any, words: str, **limits: Any) -> Any:
    """A row of the table. words: its description; limits: as pydantic's ``Field`` takes them."""
    return Field(default, description=words, json_schema_extra=row._asdict(), **limits)


ENGINE, HARNESS, ROUTED = ServerKey("engine"), ServerKey("harness"), ServerKey("routed", is_newer=True)
RBLN = ServerKey("launch", backends=("rbln",))
ATTACHED = ServerKey("launch", backends=("attached",))
# `--speculative-config JSON`, and a key of it alone: `-sc.method ngram`.
SPECULATIVE_FLAG = re.compile(r"(--speculative[-_]config|-sc)(?=[=.]|$)")
STACKS = ServerKey("launch", backends=("rbln", "vllm"))
DRAFTS = ServerKey("paged", backends=("vllm",), is_newer=True)


class ServerSpec(Spec):
    """The server's compile-time configuration, and how it is launched."""

    # The table of server keys, from which lists of keys, launches, the engine's settings and `explain server` follow.
    max_num_seqs: int = key(
        shown("engine", "max_num_seqs", lever=3), 8, "the limit: most requests running at once", ge=1, le=MOST_SEQS
    )
    decode_buckets: tuple[int, ...] = key(
        shown("engine", "cudagraph_capture_sizes", lever=4),
        (1, 2, 4, 8),
        "compiled batch sizes, with drafts in tokens; default: max_num_seqs, its half, ... to 1; of a vLLM: its own",
    )
    kv_slots: int | None = key(
        ServerKey("slots", lever=1, change="{new} KV slots in place of {old}"),
        None,
        "physical KV slots; left out: room for max_num_seqs of the longest requests",
        ge=1,
    )
    slot_tokens: int = key(
        shown("engine", "max_model_len"),
        8192,
        "longest request, prompt and answer together",
        ge=256,
        le=MOST_CONTEXT_TOKENS,
        multiple_of=128,
    )
    cost_model: str = key(
        ServerKey("engine", backends=("rbln", "vllm", "attached")),
        "paper",
        "step times: a shipped model, or the path of a TOML file",
    )
    prefix_caching: bool = key(
        shown("engine", "enable_prefix_caching", lever=5, change="prefix caching {new}"),
        True,
        "reuse the KV of prompts that begin alike",
    )
    rules: RulesName = key(ENGINE, AUTO, "scheduler and KV rules; auto: those of the server")
    max_active_seqs: int | None = key(
        ServerKey("slots", "--max-num-active-seqs", backends=("rbln",)),
        None,
        "admits fewer than max_num_seqs without recompiling",
        ge=1,
    )
    num_gpu_blocks: int | None = key(
        shown("paged", "num_gpu_blocks", "--num-gpu-blocks-override", 2, "{new} KV blocks in place of {old}"),
        None,
        "its blocks; default: what fits",
        ge=2,
    )
    block_size: int | None = key(
        searched(shown("paged", "block_size")._replace(engine="block_tokens"), 11, (16, 32, 64, 128), is_asked=True),
        None,
        "tokens of a block; default: the server's",
        ge=1,
    )
    max_num_batched_tokens: int | None = key(
        searched(shown("paged", "max_num_batched_tokens"), 9, (256, 512, 1024, 2048, 4096, 8192, 16384)),
        None,
        "most tokens of an engine step; default: the server's, which vLLM takes from the device: 2,048 below 70 GiB "
        "(so modelled ones), 8,192 on H100 and H200, 16,384 from 160 GiB",
        ge=1,
    )
    long_prefill_tokens: int | None = key(
        searched(shown("paged", "long_prefill_token_threshold"), 8, (0, 128, 256, 512, 1024, 2048)),
        None,
        "most tokens of one prompt in a step; default: the server's, which is 0: no such limit",
        ge=0,
    )
    async_scheduling: bool | None = key(
        searched(shown("paged", "async_scheduling"), 10, (False, True), is_asked=True),
        None,
        "each step is decided when the one before it begins; default: the server's, or false where it is emulated or "
        "simulated",
    )
    num_speculative_tokens: int | None = key(
        DRAFTS._replace(flag="--speculative-config", lever=13, values=tuple(range(9)), is_asked=True),
        None,
        "speculative decoding: tokens drafted for a request and step; default: 0, none",
        ge=0,
    )
    speculative_method: str | None = key(DRAFTS, None, "how they are drafted: ngram, eagle, eagle3, mtp, draft_model")
    synthetic_acceptance_rates: tuple[float, ...] | None = key(DRAFTS, None, "share that accepts 1, 2, 3... drafts")
    keep_kv_s: float | None = key(
        ServerKey("modelled", engine="keep_kv_ns", unit=NS_PER_S, is_newer=True),
        None,
        "longest that the KV of a request is pinned that says when its session returns; default: none",
        gt=0,
    )
    offload_blocks: int | None = key(
        searched(ServerKey("modelled", is_newer=True), 12, (0, 256, 1024, 4096, 16384), is_asked=True),
        None,
        "blocks of a second memory, which overwritten ones go to; default: none",
        ge=1,
    )
    offload_block_us: float | None = key(
        ServerKey("modelled", engine="offload_block_ns", unit=NS_PER_US, is_newer=True),
        None,
        "time to load a block from there; default: 0",
        ge=0,
    )
    start_timeout_s: float = key(HARNESS, 60.0, "longest wait until the server answers", gt=0)
    stop_grace_s: float = key(HARNESS, 10.0, "time that it has to end by itself", gt=0)
    port: int = key(ServerKey("harness", "--port"), 0, "0: any free port", ge=0, le=65535)
    model: Operand = key(
        ServerKey("launch", "--model", "model", ("vllm", "attached")),
        "",
        "the model: of backend 'vllm' as `vllm serve` takes it; of 'attached' as the server lists it",
    )
    speculative_model: Operand = key(
        DRAFTS._replace(kind="launch"), "", "backend 'vllm': the drafter, where one is named"
    )
    artifact: Operand = key(RBLN, "", "backend 'rbln': folder of the compiled model")
    environment: Operand = key(
        STACKS, "", "virtual environment that holds vllm; default: the one on PATH. Twin: or a version"
    )
    devices: DeviceNumbers = key(RBLN, (), "NPUs that the server sees; default: what the artifact needs, from 0")
    patch: PatchMode = key(RBLN, "overlay", "how the [BUCKET] line gets into a real stack")
    observer: bool = key(STACKS, True, "real stacks: one record per engine step, from inside")
    extra_args: tuple[str, ...] = key(STACKS, (), "more arguments of `vllm serve`; the last one counts")
    env: dict[str, str] = key(STACKS, {}, "more environment variables of the server; secrets are left out of records")
    url: str = key(ATTACHED, "", "backend 'attached': the server somebody else started")
    step_log: str = key(
        ATTACHED,
        "",
        "backend 'attached': file that the server's step log is written to (docs/guides/vllm-steps.md); of replicas "
        "with {replica} for the number of each",
    )
    api_key_env: str = key(
        HARNESS,
        "",
        "backend 'attached': name of the environment variable that holds the server's API key",
        pattern=r"^([A-Za-z_]\w*)?$",
    )
    declared: bool = key(HARNESS, False, "what nothing shows is as you say; reports call it declared, not verified")
    ssh: str = key(RBLN, "", "backend 'rbln': start the server on this host, over ssh")
    device_metrics_url: MetricsUrl = key(
        HARNESS, "", "of rbln-metrics-exporter, e.g. http://127.0.0.1:9090/metrics; read through every run"
    )
    metrics_url: MetricsUrl = key(
        ServerKey("harness", is_newer=True),
        "",
        "backend 'attached': where the server's metrics are, when not at url + /metrics; its key is sent there only if "
        "the server is the same",
    )
    replicas: int = key(
        ROUTED._replace(lever=7),
        1,
        "servers of this shape behind one router (docs/guides/routers.md)",
        ge=1,
        le=MOST_REPLICAS,
    )
    router: RouterSpec | None = key(
        ROUTED._replace(lever=6, change="routing by {new} in place of {old}"),
        None,
        "the router before two or more replicas: kind, policy; default: the harness's, round-robin",
    )
    replica_urls: tuple[str, ...] = key(
        ROUTED, (), "backend 'attached': the replicas' own addresses behind the router at url"
    )
    replica_header: str = key(ROUTED, "", "response header by which the router names the replica that answered")

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
        """Records of a server without newer keys are as they were before there were these."""
        table: dict[str, Any] = dump(self)
        unset = {key for key in NEWER_KEYS if getattr(self, key) == DEFAULTS[key]}
        return {key: value for key, value in table.items() if key not in unset}

    # Not as kinds of value: records of earlier versions have these keys, also where they are as by default.
    @field_serializer("env", "url", "metrics_url", "device_metrics_url", "replica_urls", "extra_args", when_used="json")
    def _without_secrets(self, value: Any, info: FieldSerializationInfo) -> Any:
        if info.field_name == "replica_urls":
            return tuple(map(redacted_text, value))
        redacted = {"env": redacted_env, "extra_args": redacted_arguments}.get(info.field_name, redacted_text)
        return redacted(value)

    @field_validator("ssh")
    @classmethod
    def _destination(cls, destination: str) -> str:
        # On ssh's command line, "-oProxyCommand=..." would run a command on this host.
        if destination and not SSH_DESTINATION.fullmatch(destination):
            raise ValueError("ssh is not HOST, USER@HOST or ssh://USER@HOST:PORT")
        return destination

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
    def _native_is_modelled(self) -> ServerSpec:
        if self.rules == NATIVE and (self.model or self.step_log or self.url or self.artifact):
            raise ValueError(f"rules {NATIVE!r} are of a server that is simulated; leave model, url and artifact out")
        return self

    @model_validator(mode="after")
    def _drafts_are_accepted(self) -> ServerSpec:
        rates, num_drafts = self.synthetic_acceptance_rates or (), self.num_speculative_tokens or 0
        if any(not 0 <= rate <= before for rate, before in zip(rates, (1.0, *rates), strict=False)):
            raise ValueError(f"synthetic_acceptance_rates {list(rates)} must fall from the first on, between 1 and 0")
        if (num_drafts or rates) and not self.is_paged:
            raise ValueError(
                f"rules {self.rules!r} know no drafts: vllm-rbln's compiled models have none; leave them out, or take "
                f"rules = {PAGED!r}, or those of its native path, {NATIVE!r}"
            )
        if num_drafts and not (self.speculative_method and num_drafts <= len(rates)):
            raise ValueError(f"{num_drafts} drafts need speculative_method and as many synthetic_acceptance_rates")
        return self

    @model_validator(mode="after")
    def _slots_can_be_compiled(self) -> ServerSpec:
        is_modelled = not (self.is_paged or self.is_vllm or self.artifact or self.url)
        if is_modelled and self.slot_tokens > MOST_SLOT_TOKENS:
            raise ValueError(
                f"slot_tokens {self.slot_tokens:,} is more than the {MOST_SLOT_TOKENS:,} that a modelled KV slot has; "
                f"paged rules take up to {MOST_CONTEXT_TOKENS:,}: rules = 'vllm-paged'"
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
        return self.model_copy(update={key: DEFAULTS[key] for key in ROUTED_KEYS}) if self.is_routed else self

    @property
    def has_drafts(self) -> bool:
        """Whether its arguments ask for speculative decoding, whose acceptance is then not known."""
        return any(SPECULATIVE_FLAG.match(word) for word in self.extra_args)

    @property
    def is_vllm(self) -> bool:
        """Whether vLLM itself serves, not a model of it; or a server of others that has its rules."""
        return bool(self.model or self.step_log or (self.url and is_paged(self.rules)))

    @property
    def is_paged(self) -> bool:
        """Whether it is a vLLM with paged KV memory, which runs a batch above the largest captured size eagerly."""
        return self.rule_set().is_paged

    @property
    def counts_tokens(self) -> bool:
        """Whether its sizes count tokens, of which a request with drafts has several; else they count requests."""
        return self.is_paged and self.rules != NATIVE

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


SERVER_KEYS: Mapping[str, ServerKey] = {
    name: ServerKey(**cast("dict[str, Any]", field.json_schema_extra))
    for name, field in ServerSpec.model_fields.items()
}
NEWER_KEYS = [name for name, row in SERVER_KEYS.items() if row.is_newer]
DEFAULTS: Mapping[str, Any] = {name: field.default for name, field in ServerSpec.model_fields.items()}


def keys_of(*kinds: KeyKind) -> frozenset[str]:
    """The keys of these kinds."""
    return frozenset(name for name, row in SERVER_KEYS.items() if row.kind in kinds)


def keys_applied_by(backend: str) -> frozenset[str]:
    """The keys whose values a launch of this backend applies, so that nothing has to show them."""
    return frozenset(name for name, row in SERVER_KEYS.items() if backend in row.backends)


def key_in_words(name: str) -> str:
    """Which servers have a key, what it is, and the flag of ``vllm serve`` that sets it."""
    row = SERVER_KEYS[name]
    flag = f" ({row.flag})" if row.flag else ""
    return f"{_KIND_WORDS.get(row.kind, '')}{ServerSpec.model_fields[name].description}{flag}"


RETENTION_KEYS = keys_of("modelled")
"""What becomes of KV that nobody holds."""
PAGED_KEYS = keys_of("paged", "modelled")
ROUTED_KEYS = keys_of("routed")
HARNESS_KEYS = keys_of("harness", "routed")
"""The server never sees them."""
ENGINE_KEYS = keys_of("engine", "slots", "paged", "modelled")
"""All settings of a simulated or emulated server."""
LEVERS = sorted((key for key, row in SERVER_KEYS.items() if row.lever), key=lambda key: SERVER_KEYS[key].lever)
"""What a search can change, the easiest change first."""
VALUE_LEVERS = tuple(key for key in LEVERS if SERVER_KEYS[key].values)
"""Levers that are a row of the table and nothing else; of paged KV memory."""
