"""A server that somebody else started, as a backend; every run on it says so.

It is never started, restarted, stopped or configured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

from harness.engine.settings import requested_settings
from harness.errors import ServerError, SpecError
from harness.kinds import KINDS, BackendKind
from harness.records import Finding, Observation
from harness.redact import redacted_text
from harness.runner.backends.base import LaunchOptions, ServerBackend
from harness.server.doctor import Check
from harness.server.launch import LaunchPlan
from harness.server.life import get
from harness.server.ports import url_host
from harness.spec import ServerSpec
from harness.stack.rbln.launch_log import LaunchFacts, read_metrics

ATTACHED = Finding(
    code="server-attached",
    severity="warning",
    evidence="the server was started by somebody else and not restarted for this run",
    hint="What it held or did before is part of this run; compare only with runs that say the same",
)


@dataclass(frozen=True, slots=True)
class AttachedBackend(ServerBackend):
    """Somebody else's OpenAI-compatible server at ``server.url``; the model is the first one it lists."""

    kind: BackendKind = KINDS["attached"]
    # Where it stands is what the harness connects to; costs only price what was measured.
    shown_keys: ClassVar[frozenset[str]] = frozenset({"url", "cost_model"})

    def readiness(self) -> Check:
        return Check(
            name="backend attached",
            ok=True,
            found="a server that somebody else started",
            need="its address; no restart between runs, and reports say so",
            how="Use the emulator backend, whose server is fresh for every run",
        )

    def check_host(self, server: ServerSpec) -> None:
        _first_model(*_address(server.url))

    def in_force(self, server: ServerSpec) -> dict[str, Any]:
        host, number = _address(server.url)
        facts = LaunchFacts()
        read_metrics(get(host, number, "/metrics").body.decode("utf-8", "replace"), facts)
        return facts.effective(_shown_by_models(host, number))

    def _plan(self, server: ServerSpec, options: LaunchOptions) -> LaunchPlan:
        del options  # nothing is launched
        host, number = _address(server.url)
        url = f"http://{url_host(host)}:{number}"
        return LaunchPlan(
            backend=self.kind.name,
            argv=(),
            host=host,
            port=number,
            model=_first_model(host, number),
            requested={"server": server.model_dump(mode="json"), "url": url, "version": _version(host, number)},
            observation=Observation(steps="none", has_kv_log=False),
            effective={
                **{key: requested_settings(server)[key] for key in self.shown_keys},
                **_shown_by_models(host, number),
            },
            is_ours=self.kind.is_restarted,
            findings=(ATTACHED,),
        )


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or not parts.hostname or not port or parts.path not in ("", "/"):
        raise SpecError(
            f"is {redacted_text(url)!r}, not http://HOST:PORT",
            where="server.url",
            hint='Write for example "http://127.0.0.1:8000"',
        )
    return parts.hostname, port


def _shown_by_models(host: str, port: int) -> dict[str, Any]:
    """The longest request, which vLLM's list of models names."""
    try:
        return {"slot_tokens": int(get(host, port, "/v1/models").json()["data"][0]["max_model_len"])}
    except (LookupError, TypeError, ValueError):
        return {}


def _first_model(host: str, port: int) -> str:
    reply = get(host, port, "/v1/models")
    url = f"http://{url_host(host)}:{port}"
    if reply.error:
        raise ServerError(f"no server answers there ({reply.error})", where=url, hint="Start it, or change server.url")
    try:
        return str(reply.json()["data"][0]["id"])
    except (LookupError, TypeError):
        raise ServerError(
            f"GET /v1/models gives status {reply.status} and no model",
            where=url,
            hint="Is it an OpenAI-compatible server?",
        ) from None


def _version(host: str, port: int) -> str:
    answer: Any = get(host, port, "/version").json()
    return str(answer.get("version", "")) if isinstance(answer, dict) else ""


BACKEND = AttachedBackend()
