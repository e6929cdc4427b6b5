"""The router before several replicas of a server: a small one of the harness's own, or a real one by its command."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from harness.model.spec.base import Spec
from harness.redact import redacted_arguments

RouterKind = Literal["harness", "vllm-router", "sglang-router", "haproxy", "nginx", "command"]
POLICIES = ("round-robin", "least-requests", "session-affinity", "prefix-aware")
"""Policies of the harness's own router; other routers' own words for them are in ``WORDS``."""
WORDS: dict[str, dict[str, str]] = {
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
OWN_WORDS = frozenset({"vllm-router", "sglang-router"})
"""Routers whose other policies may be given in their own words."""
_HEADER = re.compile(r"[A-Za-z][A-Za-z0-9-]*")


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
        if name and not _HEADER.fullmatch(name):
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
        known = POLICIES if self.kind == "harness" else tuple(WORDS[self.kind])
        if self.policy not in known and (self.kind not in OWN_WORDS or self.policy in POLICIES):
            raise ValueError(f"{self.kind} has no policy {self.policy!r}; it has {', '.join(known)}")
        if self.policy == "session-affinity" and not self.session_header:
            raise ValueError("session-affinity needs session_header: the header that names a request's session")
        return self

    @field_serializer("command", when_used="json")
    def _command_without_secrets(self, words: tuple[str, ...]) -> tuple[str, ...]:
        return redacted_arguments(words)
