"""The target and the result of a replay: the server's address, how to replay, the recorded tables.

The API key itself stays in the environment. It is read when a request is made, and is in no record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa

from harness.clock import ScaledClock
from harness.errors import SpecError
from harness.measure.records.schema import RowStream
from harness.model.plan.tokens import AS_PLANNED, PromptIds
from harness.model.plan.words import TextSizes
from harness.model.spec.sections import ClientSpec
from harness.model.spec.server import ServerSpec
from harness.model.spec.workload import RequestSpec
from harness.redact import redacted_text
from harness.secrets import environment_secret

PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a server. prefix: the path before /v1 and /metrics. api_key_env: name of a variable, or ""."""

    host: str
    port: int
    is_https: bool = False
    prefix: str = ""
    api_key_env: str = ""

    @property
    def authority(self) -> str:
        """Host and port as in a URL and the Host header; IPv6 addresses in brackets, no port that is the usual one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self._scheme] else f"{host}:{self.port}"

    @property
    def place(self) -> tuple[str, int, str]:
        """Host, port and path: equal for two addresses of one server. localhost is 127.0.0.1."""
        return "127.0.0.1" if self.host == "localhost" else self.host, self.port, self.prefix

    @property
    def url(self) -> str:
        return f"{self._scheme}://{self.authority}{self.prefix}"

    @property
    def _scheme(self) -> str:
        return "https" if self.is_https else "http"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request; SpecError where the key is missing."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key_env else {}

    @property
    def api_key(self) -> str:
        """The key from the environment, "" for none; SpecError where it is missing."""
        if not self.api_key_env:
            return ""
        key = environment_secret(self.api_key_env)
        if not key:
            raise SpecError(
                f"the environment has no key in {self.api_key_env}",
                where="server.api_key_env, --api-key-env",
                hint=f"export {self.api_key_env}=...",
            )
        return key


def endpoint_of(server: ServerSpec) -> Endpoint:
    """The address in ``server.url``, with or without a port and a path that ends in /v1; SpecError for any other."""
    return endpoint_at(server.url, server.api_key_env, "server.url")


def endpoint_at(url: str, api_key_env: str, where: str) -> Endpoint:
    """As ``endpoint_of``, of an address that stands at ``where``."""
    try:
        parts = urlsplit(url)
        port = parts.port or PORTS.get(parts.scheme, 0)
    except ValueError:
        parts, port = urlsplit(""), 0
    is_plain = not (parts.query or parts.fragment or parts.username)
    if not port or parts.scheme not in PORTS or not parts.hostname or not is_plain:
        raise SpecError(
            f"is {redacted_text(url)!r}, not http://HOST:PORT or https://HOST/PATH/v1",
            where=where,
            hint="A user and a password are not sent: put a proxy before the server that adds them"
            if parts.username
            else 'Write for example "http://127.0.0.1:8000"',
        )
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Endpoint(parts.hostname, port, parts.scheme == "https", prefix, api_key_env)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one replay recorded. All instants are clock ns.

    requests: REQUESTS schema, one row per planned request, in plan order. chunks: CHUNKS schema, by (session, request,
    chunk), on disk: a long run has millions. start_ns: the common start. audit: facts about the client and its
    host (plain JSON values, wall ns where named so).
    """

    requests: pa.Table
    chunks: RowStream
    start_ns: int
    audit: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """The server of a replay and how to replay. Every client process gets it.

    request_timeout_ns: clock ns that one request may take. is_strict: an answer that differs from vLLM's is a problem,
    also where no figure depends on it. request: what each request carries besides its prompt. text_sizes: of the words
    of text and chat prompts. prompt_ids: of this run, where its prompts are not those of the plan. records: folder for
    rows that wait on disk; None: the system's folder for temporary files. replica_header: of a response, by which a
    router names who answered.
    """

    endpoint: Endpoint
    model: str
    options: ClientSpec
    clock: ScaledClock
    request_timeout_ns: int
    records: Path | None = None
    is_strict: bool = True
    request: RequestSpec = field(default_factory=RequestSpec)
    text_sizes: TextSizes = field(default_factory=TextSizes)
    prompt_ids: PromptIds = AS_PLANNED
    replica_header: str = ""
