"""A server that somebody else started, as a backend; every run on it has a finding that says so.

It is never started, restarted, stopped or configured here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from harness.clock import NS_PER_S, ScaledClock
from harness.errors import RecordsError, ServerError
from harness.kinds import KINDS, ServingStack
from harness.measure.client.target import Endpoint, Target, endpoint_at, endpoint_of
from harness.measure.records import layout
from harness.measure.records.findings import finding
from harness.measure.records.manifest import Observation
from harness.measure.server.ask import HTTP_OK, Reply
from harness.measure.server.doctor import Check
from harness.measure.server.life import (
    MODELS,
    VERSION,
    LaunchPlan,
    get_at,
    get_metrics,
    model_entry,
    stated_version,
)
from harness.measure.server.once import once
from harness.measure.server.probe import Needs, probe
from harness.measure.server.tokenizer import forget_text_sizes, remember_vocabulary, text_sizes_of
from harness.model.engine.config import PREFILL_CHUNK_TOKENS, changed_keys, requested_settings
from harness.model.experiment import PlannedRun
from harness.model.spec import ServerSpec
from harness.model.spec.server import PAGED_KEYS, keys_applied_by
from harness.plugins import BackendKind
from harness.redact import redacted_text
from harness.runner.backends.base import FirstExperiment, ServerBackend
from harness.runner.run import LaunchOptions, settings_in_force, unlike_log
from harness.secrets import without_secrets
from harness.stacks.rbln.launch.launch_log import LaunchFacts, read_metrics
from harness.stacks.rbln.rules.kv_rules import PAGED, is_paged
from harness.stacks.vllm.step_log import StepLog, header_before, read_step_log, stack_of

ABOUT = "a server that somebody else started; it is never restarted"
ATTACHED = finding("server-attached", "the server was started by somebody else and not restarted for this run")


@dataclass(frozen=True, slots=True)
class AttachedBackend(ServerBackend):
    """Somebody else's OpenAI-compatible server at ``server.url``; its model is ``server.model`` or the first."""

    kind: BackendKind = KINDS["attached"]
    shown_keys: ClassVar[frozenset[str]] = keys_applied_by("attached")

    @property
    def first_command(self) -> str:
        return "harness init --for URL"

    @property
    def first_experiment(self) -> FirstExperiment:
        address = ('url = "http://127.0.0.1:8000"', "the server that you started; harness init --for URL asks it")
        needs = "harness doctor --url http://127.0.0.1:8000"
        return FirstExperiment(about=ABOUT, server=(address,), needs=needs)

    def readiness(self) -> Check:
        return Check(
            name="backend attached",
            ok=True,
            found="a server that somebody else started",
            need="its address; no restart between runs, and reports say so",
            how="Use the emulator backend, whose server is fresh for every run",
        )

    def check_server(self, server: ServerSpec) -> None:
        _ = endpoint_of(server).headers
        for url in server.replica_urls:
            endpoint_at(url, server.api_key_env, "server.replica_urls")

    def check_host(self, server: ServerSpec) -> None:
        for step_log in _step_logs(server):
            _ = _header_at(step_log)

    def lacks(self, runs: Sequence[PlannedRun]) -> tuple[str, ...]:
        run, spec = runs[0], runs[0].spec
        needs = Needs(
            spec.client,
            run.plan.prompt_form,
            run.server.model,
            metrics=spec.limits.needs_metrics,
            token_id_range=run.plan.token_id_range,
            request_timeout_s=spec.limits.request_timeout_s,
            request=spec.workload_of(run.condition).request,
            metrics_url=run.server.metrics_url,
            longest_tokens=max(request.stream_tokens for each in runs for request in each.plan.requests),
        )
        report = probe(endpoint_of(run.server), needs)
        remember_vocabulary(endpoint_of(run.server), report.vocabulary)
        return (*report.problems, *_silent_replicas(run.server), *_unlike_log(run.server))

    def ask_ahead(self, runs: Sequence[PlannedRun]) -> None:
        if all(run.plan.prompt_form == "token-ids" for run in runs):
            return
        server = runs[0].server
        endpoint = endpoint_of(server)
        model = _model_of(endpoint, get_at(endpoint, MODELS), server.model)
        # Nothing is asked between runs.
        once(("text sizes", endpoint), lambda: forget_text_sizes(endpoint))
        for run in runs:
            spec, request = run.spec, run.spec.workload_of(run.condition).request
            timeout_ns = round(spec.limits.request_timeout_s * NS_PER_S)
            target = Target(endpoint, model, spec.client, ScaledClock(1.0), timeout_ns, request=request)
            _ = text_sizes_of(target, run.plan, is_ours=False)

    def in_force(self, server: ServerSpec) -> dict[str, Any]:
        return _in_force(server, facts_of(server), has_paged=bool(changed_keys(server) & PAGED_KEYS))

    def shows_rules(self, server: ServerSpec) -> bool | None:
        """Whether it shows the rules of its scheduler; None where no server answers."""
        return None if get_at(endpoint_of(server), MODELS).error else "rules" in self.in_force(server)

    def stack_shown(self, server: ServerSpec, facts: LaunchFacts | None = None) -> tuple[ServingStack | None, str]:
        """Which stack serves, and what shows it; None where a vLLM shows neither, "" where nothing shows a vLLM.

        facts: from ``facts_of``, where it was asked already.
        Blocks of vllm-rbln hold whole prefill chunks: other blocks are vLLM's, and such blocks say nothing.
        """
        facts = facts or facts_of(server)
        if facts.emulator:
            return (
                ServingStack.vllm if is_paged(str(facts.emulator.get("rules", ""))) else ServingStack.rbln
            ), "the emulator's metrics"
        header = _header_in_force(server)
        if header is not None and (found := stack_of(header.engine_settings.get("scheduler"))) is not None:
            return found, "the scheduler's class in its step log"
        if facts.paged().get("block_size", 0) % PREFILL_CHUNK_TOKENS:
            return ServingStack.vllm, "its metrics: blocks that no prefill chunk of vllm-rbln fits"
        return None, "vLLM's metrics" if facts.cache else ""

    def all_shown(
        self, server: ServerSpec, stack: ServingStack | None = None, facts: LaunchFacts | None = None
    ) -> dict[str, Any]:
        """``in_force``, and of vLLM itself its rules and its KV memory. stack: which serves; default: as shown."""
        facts = facts or facts_of(server)
        found, by = self.stack_shown(server, facts)
        stack = stack or found
        if facts.emulator or stack is not ServingStack.vllm:
            in_force = _in_force(server, facts, has_paged=False)
            # vLLM itself has no slots: none are named where nothing shows which of the two serves.
            return {key: value for key, value in in_force.items() if stack or not by or key != "usable_kv_slots"}
        server = server.model_copy(update={"rules": PAGED})
        return {"rules": PAGED, **_in_force(server, facts, has_paged=True)}

    def launch(self, server: ServerSpec, options: LaunchOptions) -> LaunchPlan:
        step_log = options.run_folder / layout.STEP_LOG
        endpoint = endpoint_of(server)
        models = get_at(endpoint, MODELS)
        return LaunchPlan(
            backend=self.kind.name,
            argv=(),
            host=endpoint.host,
            port=endpoint.port,
            model=_model_of(endpoint, models, server.model),
            reached_at=endpoint,
            requested={
                "server": server.model_dump(mode="json"),
                "url": redacted_text(endpoint.url),
                "version": stated_version(get_at(endpoint, VERSION)),
            },
            files={"step_log": step_log} if server.step_log else {},
            observation=Observation(steps="step-log" if server.step_log else "none", has_kv_log=False),
            appended=tuple(_kept(server, step_log)),
            effective={
                **{key: requested_settings(server)[key] for key in self.shown_keys},
                **_shown_by_models(models, server.model),
            },
            is_ours=self.kind.is_restarted,
            findings=(ATTACHED,),
        )


def _silent_replicas(server: ServerSpec) -> Iterator[str]:
    """The replicas whose metrics nobody answers for."""
    for number, url in enumerate(server.replica_urls):
        reply = get_at(endpoint_of(server.replica.model_copy(update={"url": url})), "/metrics")
        if reply.status != HTTP_OK:
            why = reply.error or f"HTTP {reply.status}"
            yield f"replica {number} at {redacted_text(url)} does not answer GET /metrics ({why})"


def _unlike_log(server: ServerSpec) -> list[str]:
    """What the server shows unlike the header in force of its step log."""
    log = _header_in_force(server)
    return [] if log is None or not server.is_paged else unlike_log(log, facts_of(server), _stated(server))


def _step_logs(server: ServerSpec) -> list[str]:
    """The step log of the server, or of each replica; empty where there is none."""
    if server.is_routed and server.step_log:
        return [server.step_log.replace("{replica}", str(number)) for number in range(server.num_replicas)]
    return [server.step_log] if server.step_log else []


def _kept(server: ServerSpec, step_log: Path) -> Iterator[tuple[Path, Path]]:
    """The server's step logs, one per data-parallel engine, and where what it appends to them is kept."""
    if server.step_log:
        source = Path(server.step_log)
        for path in layout.engine_files(source):
            yield path, step_log.with_name(step_log.name + path.name[len(source.name) :])


def facts_of(server: ServerSpec) -> LaunchFacts:
    """What the server's metrics show."""
    facts = LaunchFacts()
    read_metrics(get_metrics(endpoint_of(server), server.metrics_url).body.decode("utf-8", "replace"), facts)
    return facts


def _in_force(server: ServerSpec, facts: LaunchFacts, *, has_paged: bool) -> dict[str, Any]:
    """The settings that metrics, list of models and step log show. has_paged: with the blocks of paged KV memory."""
    return settings_in_force(server, facts, _stated(server), _header_in_force(server), has_paged=has_paged)


def _stated(server: ServerSpec) -> dict[str, Any]:
    """The longest request, as its list of models states it now."""
    return _shown_by_models(get_at(endpoint_of(server), MODELS), server.model)


def _header_in_force(server: ServerSpec) -> StepLog | None:
    """The header in force of the server's step log, of replicas that of the first; None without one."""
    return next(map(_header_at, _step_logs(server)), None)


def _header_at(step_log: str) -> StepLog:
    """The last header of a step log; ServerError where it cannot be read."""
    try:
        with open(step_log, "rb") as file:
            return read_step_log(without_secrets(header_before(file)[0]), where=step_log)
    except (OSError, RecordsError) as error:
        what = error.what if isinstance(error, RecordsError) else f"cannot be read ({error.strerror})"
        raise ServerError(
            what, where=step_log, hint="Start the server with its step log, on this host (docs/guides/vllm-steps.md)"
        ) from error


def _shown_by_models(reply: Reply, name: str) -> dict[str, Any]:
    """The longest request, from vLLM's list of models."""
    try:
        return {"slot_tokens": int(model_entry(reply, name)["max_model_len"])}
    except (LookupError, TypeError, ValueError):
        return {}


def _model_of(endpoint: Endpoint, reply: Reply, name: str) -> str:
    if reply.error:
        raise ServerError(
            f"no server answers there ({reply.error})", where=endpoint.url, hint="Start it, or change server.url"
        )
    try:
        return str(model_entry(reply, name)["id"])
    except LookupError:
        raise ServerError(
            f"GET {MODELS} gives status {reply.status} and no model {name}".rstrip(),
            where=endpoint.url,
            hint=f"`harness doctor --url {endpoint.url}` says what is missing",
        ) from None


BACKEND = AttachedBackend()
