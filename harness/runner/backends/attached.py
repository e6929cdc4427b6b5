"""A server that somebody else started, as a backend; every run on it has a finding that says so.

It is never started, restarted, stopped or configured here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from harness.client.target import Endpoint, endpoint_of
from harness.engine.config import requested_settings
from harness.errors import ServerError
from harness.experiment import PlannedRun
from harness.kinds import KINDS, BackendKind
from harness.records import Finding, Observation
from harness.redact import redacted_text
from harness.runner.backends.base import ServerBackend, refuse_keys
from harness.runner.backends.first import FirstExperiment
from harness.runner.run import LaunchOptions
from harness.server.ask import Reply
from harness.server.doctor import Check
from harness.server.life import MODELS, LaunchPlan, get_at
from harness.server.probe import Needs, probe
from harness.spec import ServerSpec
from harness.stack.rbln.launch_log import LaunchFacts, read_metrics

ABOUT = "a server that somebody else started; it is never restarted"
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
    # The harness connects to the URL, and the cost model prices what was measured: both hold without being shown.
    shown_keys: ClassVar[frozenset[str]] = frozenset({"url", "cost_model"})

    @property
    def first_command(self) -> str:
        return "harness init --for URL"

    @property
    def first_experiment(self) -> FirstExperiment:
        address = ('url = "http://127.0.0.1:8000"', "the server that you started; harness init --for URL asks it")
        return FirstExperiment(about=ABOUT, server=(address,))

    def readiness(self) -> Check:
        return Check(
            name="backend attached",
            ok=True,
            found="a server that somebody else started",
            need="its address; no restart between runs, and reports say so",
            how="Use the emulator backend, whose server is fresh for every run",
        )

    def check_server(self, server: ServerSpec) -> None:
        refuse_keys(server, {"model"}, "the model is the first that the server lists")
        _ = endpoint_of(server).headers

    def lacks(self, run: PlannedRun) -> tuple[str, ...]:
        spec = run.spec
        needs = Needs(spec.client, run.plan.prompt_form, metrics=spec.limits.needs_metrics)
        return probe(endpoint_of(run.server), needs).problems

    def in_force(self, server: ServerSpec) -> dict[str, Any]:
        endpoint = endpoint_of(server)
        facts = LaunchFacts()
        read_metrics(get_at(endpoint, "/metrics").body.decode("utf-8", "replace"), facts)
        return facts.effective(_shown_by_models(get_at(endpoint, MODELS)))

    def _plan(self, server: ServerSpec, options: LaunchOptions) -> LaunchPlan:
        del options  # nothing is launched
        endpoint = endpoint_of(server)
        models = get_at(endpoint, MODELS)
        return LaunchPlan(
            backend=self.kind.name,
            argv=(),
            host=endpoint.host,
            port=endpoint.port,
            model=_first_model(endpoint, models),
            reached_at=endpoint,
            requested={
                "server": server.model_dump(mode="json"),
                "url": redacted_text(endpoint.url),
                "version": _version(endpoint),
            },
            observation=Observation(steps="none", has_kv_log=False),
            effective={
                **{key: requested_settings(server)[key] for key in self.shown_keys},
                **_shown_by_models(models),
            },
            is_ours=self.kind.is_restarted,
            findings=(ATTACHED,),
        )


def _shown_by_models(reply: Reply) -> dict[str, Any]:
    """The longest request, from vLLM's list of models."""
    try:
        return {"slot_tokens": int(reply.json()["data"][0]["max_model_len"])}
    except (LookupError, TypeError, ValueError):
        return {}


def _first_model(endpoint: Endpoint, reply: Reply) -> str:
    if reply.error:
        raise ServerError(
            f"no server answers there ({reply.error})", where=endpoint.url, hint="Start it, or change server.url"
        )
    try:
        return str(reply.json()["data"][0]["id"])
    except (LookupError, TypeError):
        raise ServerError(
            f"GET {MODELS} gives status {reply.status} and no model",
            where=endpoint.url,
            hint=f"`harness doctor --url {endpoint.url}` says what is missing",
        ) from None


def _version(endpoint: Endpoint) -> str:
    answer: Any = get_at(endpoint, "/version").json()
    return str(answer.get("version", "")) if isinstance(answer, dict) else ""


BACKEND = AttachedBackend()
