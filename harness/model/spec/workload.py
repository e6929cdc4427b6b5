"""The workload of a replicate: how many sessions, what they send and carry in each request, how long they wait.

Sources other than "drawn" fix some keys; a key without effect is refused. Texts of requests may hold placeholders,
which the client fills in. Nothing is drawn, filled in or sent here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, field_validator, model_validator

from harness.model.spec.base import Name, Spec
from harness.redact import is_secret

PLACEHOLDER_VALUES = {
    "session": "number of the session in the plan; a part of a session has a number of its own",
    "turn": "number of the request in its session, from 0",
    "session_id": "name of the session, of all its parts, unique to this run",
    "request_id": "name of the request, unique to this run",
    "expected_wait_s": "planned wait until the session goes on, in seconds; null for its last request",
    "expected_wait_ms": "the same in milliseconds",
    "prompt_tokens": "planned prompt",
    "generate_tokens": "planned answer",
}
"""Placeholders, and what stands for each."""
PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|\{(env:)?(\w+)\}")
# What the harness itself writes into each request.
OWN_KEYS = frozenset(
    (
        *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "seed", "ignore_eos"),
        *("stream", "stream_options", "request_id", "return_token_ids"),
    )
)
OWN_HEADERS = frozenset(
    ("host", "content-type", "content-length", "transfer-encoding", "connection", "accept", "x-request-id")
)
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


KEEP_KV = "keep_kv_ms"
"""Key of a body by which a request tells a server that pins KV when its session returns."""


class RequestSpec(Spec):
    """What each request carries besides its prompt. A condition's table replaces that of the experiment.

    Texts in extra_body and headers may hold the request's values as {session}, {turn}, {session_id}, {request_id},
    {expected_wait_s}, {expected_wait_ms}, {prompt_tokens}, {generate_tokens}; {{word}} stands for {word}.
    """

    max_completion_tokens: bool = Field(
        default=False, description="send the answer's length as max_completion_tokens instead of max_tokens"
    )
    temperature: float = Field(default=0.0, ge=0)
    extra_body: dict[str, Any] = Field(
        default={}, description="further keys of the JSON body; a text that is one placeholder becomes a JSON value"
    )
    headers: dict[str, str] = Field(
        default={}, description="further HTTP headers; {env:NAME} takes an environment variable, which is not recorded"
    )

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @field_validator("extra_body")
    @classmethod
    def _check_body(cls, body: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"must be JSON: {error}") from error
        if own := sorted(OWN_KEYS & body.keys()):
            raise ValueError(f"must not hold {', '.join(own)}: the harness writes that itself")
        for text in _texts_of(body):
            _check_placeholders(text, may_use_environment=False)
        return body

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, text in headers.items():
            if not _HEADER_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a header")
            if name.lower() in OWN_HEADERS:
                raise ValueError(f"must not hold {name}: the harness writes that itself")
            if not text.isascii() or not text.isprintable():
                raise ValueError(f"{name} must be printable ASCII")
            if is_secret(name) and not PLACEHOLDER.search(text):
                raise ValueError(f"{name} may be a secret, and this file is recorded: write {{env:NAME}}")
            _check_placeholders(text, may_use_environment=True)
        return headers


def _texts_of(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in cast("Mapping[str, object]", value).items():
            yield name
            yield from _texts_of(item)
    elif isinstance(value, Sequence):
        for item in cast("Sequence[object]", value):
            yield from _texts_of(item)


def _check_placeholders(text: str, *, may_use_environment: bool) -> None:
    for literal, environment, name in PLACEHOLDER.findall(text):
        if environment and not may_use_environment:
            raise ValueError("takes {env:NAME} in headers only")
        if not literal and not environment and name not in PLACEHOLDER_VALUES:
            known = ", ".join(PLACEHOLDER_VALUES)
            raise ValueError(f"knows no {{{name}}}: known are {known}; write {{{{{name}}}}} for the text itself")


MOST_TOKENS = 1 << 40


class FixedLength(Spec):
    """Always ``value`` tokens."""

    distribution: Literal["fixed"] = "fixed"
    value: int = Field(ge=1, le=MOST_TOKENS)

    @property
    def minimum(self) -> int:
        return self.value


class _BoundedLength(Spec):
    """A distribution between two limits, the fields ``low`` and ``high`` of each subclass."""

    if TYPE_CHECKING:
        low: int
        high: int

    @model_validator(mode="after")
    def _ordered(self) -> _BoundedLength:
        if self.high < self.low:
            raise ValueError(f"high ({self.high}) is below low ({self.low})")
        return self

    @property
    def minimum(self) -> int:
        return self.low


class UniformLength(_BoundedLength):
    """A whole number of tokens, uniform on [low, high], both ends included."""

    distribution: Literal["uniform"] = "uniform"
    low: int = Field(ge=1)
    high: int = Field(ge=1, le=MOST_TOKENS)


class LognormalLength(_BoundedLength):
    """exp(Normal(ln median, sigma)) tokens, rounded, clipped to [low, high]."""

    distribution: Literal["lognormal"] = "lognormal"
    median: float = Field(gt=0)
    sigma: float = Field(ge=0)
    low: int = Field(default=1, ge=1)
    high: int = Field(ge=1, le=MOST_TOKENS)


LengthDistribution = Annotated[FixedLength | UniformLength | LognormalLength, Field(discriminator="distribution")]


MOST_SESSIONS = 100_000
DEFAULT_SESSIONS = 8
PromptForm = Literal["token-ids", "text", "chat"]


class SessionGroup(Spec):
    """Some sessions of a drawn workload with other distributions; keys that are left out are the workload's.

    start_s: from the common start to the group's first session; the others follow start_offset_s apart.
    """

    name: Name
    num_sessions: int = Field(ge=1, le=100_000)
    start_s: float = Field(default=0.0, ge=0)
    start_offset_s: float = Field(default=0.0, ge=0)
    requests_per_session: int | None = Field(default=None, ge=1, le=10_000)
    prompt_tokens: LengthDistribution | None = None
    generate_tokens: LengthDistribution | None = None
    new_tokens: LengthDistribution | None = None


# Keys that a recording determines, and keys that only a recording has.
_DRAWN_KEYS = (
    *("requests_per_session", "prompt_tokens", "generate_tokens", "new_tokens", "shared_prefix_tokens"),
    *("group", "start_offset_s"),
)
_TRACE_KEYS = (
    "trace",
    "scale",
    "stretch_s",
    "agents",
    "max_context_tokens",
    "human_waits",
    "human_wait_cap_s",
    "arrivals",
    "start",
)


def _size_of(group: object) -> int:
    """The sessions of a group as written; 0 where its size is wrong, which is reported later."""
    size = group.get("num_sessions") if isinstance(group, Mapping) else getattr(group, "num_sessions", None)
    return size if isinstance(size, int) else 0


def unused_keys(source: str) -> tuple[str, ...]:
    """Keys of a workload that have no effect with its source."""
    return _DRAWN_KEYS if source == "trace" else _TRACE_KEYS


def with_implied_defaults(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a workload with the defaults that follow from its source and its groups."""
    given = dict(table)
    if given.get("group") and "num_sessions" not in given:
        given["num_sessions"] = sum(_size_of(group) for group in given["group"])
    if given.get("source") == "trace":
        # Recorded waits are kept: a cap would change how long KV blocks must live.
        return {"num_sessions": MOST_SESSIONS, "wait_cap_s": 1e9, "waits": "none"} | given
    background = given.get("num_background", 0)
    if given.get("source") != "sequential" or not isinstance(background, int):
        return given
    defaults: dict[str, Any] = {
        "num_sessions": background + 2,
        "requests_per_session": 1,
        "prompt_tokens": {"distribution": "fixed", "value": 2000},
        "generate_tokens": {"distribution": "fixed", "value": 8},
        "waits": "none",
    }
    return defaults | given


class WorkloadSpec(Spec):
    """How the sessions of one replicate are drawn (docs/reference/method.md, "Inputs"). Lengths in tokens, times in
    seconds.

    source "drawn": this harness's own seeded draws. "paper": the paper's seeded inputs, bit for bit.
    "sequential": one session after another (the survival experiment): a target, ``num_background`` others, and
    the target's re-arrival; its lengths default to 2,000 + 8 generated, 8 new, and it has no waits. "trace": recorded
    sessions as ``harness trace import`` wrote them, lengths and waits included.
    """

    source: Literal["drawn", "paper", "sequential", "trace"] = "drawn"
    num_sessions: int = Field(
        default=DEFAULT_SESSIONS,
        ge=1,
        le=MOST_SESSIONS,
        description="default with 'sequential': num_background + 2; with 'trace': all of it; with groups: their sum",
    )
    requests_per_session: int = Field(default=2, ge=1, le=10_000, description="'sequential': always 1")
    prompt_tokens: LengthDistribution = UniformLength(low=800, high=1600)
    generate_tokens: LengthDistribution = UniformLength(low=32, high=256)
    new_tokens: LengthDistribution = FixedLength(value=8)
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
    stretch_s: float = Field(
        default=0.0,
        ge=0,
        description="source 'trace': only recordings that begin within so long; where, is drawn for each replicate",
    )
    agents: int = Field(
        default=0,
        ge=0,
        le=MOST_SESSIONS,
        description="source 'trace': so many agents at once, each with a recording; several share one where there are "
        "fewer, with tokens of their own. 0: each recording once",
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
    start: Literal["beginning", "steady"] = Field(
        default="beginning", description="source 'trace': 'steady' begins each session in the middle, after one warm-up"
    )
    prompt_form: PromptForm = Field(
        default="token-ids", description="'text' for servers that take no token ids, 'chat' for /v1/chat/completions"
    )
    request: RequestSpec = Field(
        default=RequestSpec(), description="what each request carries besides its prompt; changes no plan"
    )
    token_id_range: tuple[int, int] = Field(default=(1000, 150_000), description="prompt ids lie in [low, high)")

    @model_validator(mode="before")
    @classmethod
    def _implied_defaults(cls, table: Any) -> Any:
        return with_implied_defaults(cast("Mapping[str, Any]", table)) if isinstance(table, Mapping) else table

    @model_validator(mode="after")
    def _consistent(self) -> WorkloadSpec:
        low, high = self.token_id_range
        if low < 0 or high - low < 256:
            raise ValueError(f"token_id_range [{low}, {high}) must hold at least 256 ids, none negative")
        if self.shared_prefix_tokens and self.prompt_tokens.minimum <= self.shared_prefix_tokens:
            raise ValueError(
                f"prompt_tokens can be as low as {self.prompt_tokens.minimum}, which leaves no token beside "
                f"shared_prefix_tokens ({self.shared_prefix_tokens})"
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
        for name in unused_keys(self.source):
            if getattr(self, name) != WorkloadSpec.model_fields[name].default:
                raise ValueError(f"{name} does not belong to source {self.source!r}; leave it out")
        if self.source == "trace" and not self.trace:
            raise ValueError("source 'trace' needs trace = NAME, or the path of a file that harness trace import wrote")
        if self.start == "steady" and self.arrivals == "recorded":
            raise ValueError("start = 'steady' lets all sessions begin together; leave out arrivals = 'recorded'")
        if self.agents and (self.concurrency or self.arrivals or self.num_sessions != MOST_SESSIONS):
            raise ValueError("agents says how many run at once; leave out num_sessions, concurrency and arrivals")

    def groups_or_self(self) -> tuple[tuple[SessionGroup, WorkloadSpec], ...]:
        """Every group with the workload of its sessions; one group "all" when there are none."""
        if not self.group:
            return ((SessionGroup(name="all", num_sessions=self.num_sessions), self),)
        keys = ("requests_per_session", "prompt_tokens", "generate_tokens", "new_tokens")
        return tuple(
            (group, self.model_copy(update={key: value for key, value in group if key in keys and value is not None}))
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
        """The paper's inputs exist for its distributions only."""
        free = {"source", "num_sessions", "prompt_form", "token_id_range", "request"}
        for name, info in WorkloadSpec.model_fields.items():
            if name not in free and getattr(self, name) != info.default:
                raise ValueError(f"source 'paper' fixes {name}; leave it out, or use source 'drawn'")
