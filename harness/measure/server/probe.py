"""Checks whether a replay against a server that somebody else started can be measured: models, a request, metrics.

The request is sent by the client of the replay, so the check has the same needs. Nothing is recorded.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Any

from harness.clock import NS_PER_S, ScaledClock
from harness.measure.client.answer import COMPRESSED, describe_error_body
from harness.measure.client.held_tokens import held_facts
from harness.measure.client.run import replay_here
from harness.measure.client.target import Endpoint, Target
from harness.measure.records.findings import tolerated as meaning_of
from harness.measure.server.ask import HTTP_OK, METRICS, Reply
from harness.measure.server.clean_start import SEED_BITS
from harness.measure.server.life import (
    MODELS,
    VERSION,
    get_at,
    get_metrics,
    model_entry,
    names_of_models,
    stated_version,
    unhealthy,
)
from harness.measure.server.once import once
from harness.measure.server.tokenizer import OUT_OF_VOCABULARY, range_within
from harness.model.plan.build import draw_plan
from harness.model.plan.model import Plan, RequestPlan, TokenIdRange
from harness.model.plan.tokens import PromptIds
from harness.model.spec import ClientSpec, PromptForm, RequestSpec, WorkloadSpec

PROMPT_TOKENS, ANSWER_TOKENS = 32, 4
# More than two blocks of 128 tokens, which is the largest usual size.
REUSED_TOKENS = 272
# So few that a short prompt has, but for one in ten thousand, each of them.
HIGHEST_IDS = 4
# No model has fewer token ids.
FEWEST_IDS = 256
NO_KEY = (401, 403)
UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
# Gateways say 500 to a form that they do not translate.
NOT_THIS_FORM = (400, 404, 405, 415, 422, 500, 501)
# A proxy answers, and not the server behind it.
NO_SERVER_BEHIND = (502, 503, 504)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a replay needs of a server.

    model: the id of a model; "" for the first one listed. request_timeout_s: the most that the request of the check may
    take. longest_tokens: prompt and answer of the longest request. asks_again: whether a prompt is asked twice before
    it is said that cached tokens are not stated.
    """

    client: ClientSpec = field(default_factory=ClientSpec)
    prompt_form: PromptForm = "token-ids"
    model: str = ""
    metrics: bool = True
    token_id_range: TokenIdRange = WorkloadSpec().token_id_range
    request_timeout_s: float = 60.0
    request: RequestSpec = field(default_factory=RequestSpec)
    longest_tokens: int = 0
    metrics_url: str = ""
    asks_again: bool = False

    @property
    def highest_ids(self) -> TokenIdRange:
        """The end of the range: a model that has these ids has all of them."""
        low, high = self.token_id_range
        return max(low, high - HIGHEST_IDS), high


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The answers of a server. problems: what a measurement lacks, each with its reason and a remedy.

    notes: limits of the figures. model: the id of the model that was asked. version: of vLLM, "" where not stated.
    has_metrics: whether GET /metrics gives values. vocabulary: number of its token ids, where the ids asked for were
    too high.
    """

    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()
    model: str = ""
    version: str = ""
    has_metrics: bool = True
    vocabulary: int | None = None


def probe(endpoint: Endpoint, needs: Needs) -> ProbeReport:
    """Check ``endpoint`` for all that ``needs`` names; SpecError where the key or the client is not available."""
    reply = get_at(endpoint, MODELS)
    if COMPRESSED in reply.error:
        return ProbeReport((f"answers are {reply.error}",))
    if UNTRUSTED in reply.error:
        return ProbeReport(
            (f"its certificate is not trusted ({reply.error}). Name the file of its authority: SSL_CERT_FILE=FILE",)
        )
    if reply.error:
        return ProbeReport((f"no server answers there ({reply.error}). Start it, or change server.url",))
    if reply.status in NO_KEY:
        return ProbeReport((_refused(endpoint, reply),))
    try:
        entry = model_entry(reply, needs.model)
    except LookupError:
        return ProbeReport((_no_model(endpoint, reply, needs.model),))
    model = str(entry["id"])
    # The answer does not depend on the longest request, nor on where the metrics are.
    asked = replace(needs, model=model, longest_tokens=0, metrics=False, metrics_url="", request_timeout_s=0.0)
    answered = once((endpoint, repr(asked)), lambda: _within_vocabulary(endpoint, model, needs))
    problems, notes, vocabulary = [*answered[0]], answered[1], answered[2]
    if sick := unhealthy(endpoint):
        problems.insert(0, f"{sick}: the server says that it cannot serve. Read its log, and start it again")
    limit: Any = entry.get("max_model_len")
    if isinstance(limit, int) and needs.longest_tokens > limit:
        problems.append(
            f"the longest request of the plan takes {needs.longest_tokens} tokens with its answer, and {MODELS} states "
            f"a limit of {limit} (max_model_len). Shorten the lengths of [workload], or start the server with "
            f"--max-model-len {needs.longest_tokens}"
        )
    metrics = get_metrics(endpoint, needs.metrics_url)
    body = metrics.body.decode("utf-8", "replace") if metrics.status == HTTP_OK else ""
    has_metrics = any(line and not line.startswith(("#", "<", "{")) for line in body.splitlines())
    if not has_metrics:
        answer = metrics.error or f"status {metrics.status}" + (
            " without a sample" if metrics.status == HTTP_OK else ""
        )
        where = "to that address" if "a redirect to" in metrics.error else "where they have another address"
        remedy = f"Set server.metrics_url {where}, or set limits.needs_metrics = false to measure without"
        address = needs.metrics_url or METRICS
        lack = f"GET {address} gives {answer}: load and the server's count of reuse cannot be checked"
        (problems if needs.metrics else notes).append(f"{lack}. {remedy}" if needs.metrics else lack)
    version = stated_version(get_at(endpoint, VERSION))
    return ProbeReport(tuple(problems), tuple(notes), model, version, has_metrics, vocabulary)


def _no_model(endpoint: Endpoint, reply: Reply, wanted: str) -> str:
    """Why a list of models does not name the one that is wanted, in the server's words where it has some."""
    if wanted and (names := names_of_models(reply)):
        return f"GET {MODELS} lists no model {wanted!r}, but {names}. Set server.model to one of them"
    words = "" if reply.status == HTTP_OK else f' ("{describe_error_body(reply.body)}")'
    lack = f"GET {MODELS} gives status {reply.status}{words} and no model: requests must name a model"
    if reply.status in NO_SERVER_BEHIND:
        return f"{lack}. A proxy answers, and reaches no server behind it: start that server, or give its own address"
    if reply.status != HTTP_OK and not endpoint.api_key_env:
        return f"{lack}. Is it an OpenAI-compatible server? Does it require an API key (server.api_key_env)?"
    return f"{lack}. Is it an OpenAI-compatible server?"


def _refused(endpoint: Endpoint, reply: Reply) -> str:
    if reply.challenge.lower() not in ("", "bearer"):
        return (
            f"status {reply.status}: the server asks for {reply.challenge} authorization, and the harness sends a "
            "bearer key only. Put a proxy before it that adds that header, or ask the server behind it"
        )
    if endpoint.api_key_env:
        return f"status {reply.status}: the server refuses the key in {endpoint.api_key_env}"
    return (
        f"status {reply.status}: the server requires an API key. Put it into an environment variable "
        'and name the variable: server.api_key_env = "NAME", or --api-key-env NAME'
    )


def _within_vocabulary(endpoint: Endpoint, model: str, needs: Needs) -> tuple[list[str], list[str], int | None]:
    """Problems and notes of a short request, and how many token ids are known where it decides the ids.

    Ever lower ids are asked for until the server takes them: a request that it refuses costs no step.
    """
    problems, notes = _short_request(endpoint, model, needs)
    known, ids = needs.token_id_range[1], needs.token_id_range
    while needs.prompt_form == "token-ids" and any(OUT_OF_VOCABULARY in problem for problem in problems):
        known = known * 9 // 10
        ids = range_within(known, needs.token_id_range)
        if ids is None or known < FEWEST_IDS:
            return problems, notes, None
        problems, notes = _short_request(endpoint, model, replace(needs, token_id_range=ids))
    if known == needs.token_id_range[1]:
        return problems, notes, None
    note = f"the model has fewer token ids than usual: prompts take those from {ids[0]:,} to {ids[1] - 1:,}"
    return problems, [*notes, note], known


def _short_request(endpoint: Endpoint, model: str, needs: Needs) -> tuple[list[str], list[str]]:
    """Problems and notes from one request of a few tokens."""
    # Asked again with the same ids, whole blocks of the prompt can be reused.
    seed, length = secrets.randbits(SEED_BITS), REUSED_TOKENS if needs.asks_again else PROMPT_TOKENS
    row, num_timed, tolerated, is_held = _answered(endpoint, model, needs, seed, length)
    if row["http_status"] in NO_KEY:
        return [_refused(endpoint, Reply(row["http_status"], b""))], []
    if row["status"] != "ok":
        problem = _explained(str(row["error"]) or str(row["status"]), row)
        is_other_form = row["http_status"] in NOT_THIS_FORM and OUT_OF_VOCABULARY not in problem
        remedy = _form_that_works(endpoint, model, needs) if is_other_form else ""
        return [f"{problem}. {remedy}" if remedy else problem], []
    problems: list[str] = []
    if needs.prompt_form == "token-ids" and row["prompt_tokens"] != row["planned_prompt_tokens"]:
        sent, counted = row["planned_prompt_tokens"], row["prompt_tokens"]
        problems.append(f"a prompt of {sent} token ids is counted as {counted}: lengths would not be as planned")
    notes: list[str] = []
    cached = row["cached_tokens"]
    if cached is None and needs.asks_again:
        # A server may leave out a count of nothing.
        cached = _answered(endpoint, model, needs, seed, length)[0]["cached_tokens"]
    if cached is None:
        again = ", nor when a prompt is asked again" if needs.asks_again else ""
        notes.append(
            f"usage does not state cached tokens{again}: reuse is unknown. Start a vLLM with "
            "--enable-prompt-tokens-details"
        )
    if needs.client.stream and not num_timed:
        notes.append("an answer has more chunks than tokens, and no token ids: TTFT and TPOT are unknown")
    if is_held:
        notes.append(
            "the tokens of a short answer came together: a proxy may collect them, and TTFT and ITL would be its own "
            "(docs/guides/own-server.md)"
        )
    notes += [f"tolerated: {meaning_of(code)}" for code in tolerated]
    return problems, notes


def _answered(
    endpoint: Endpoint, model: str, needs: Needs, seed: int, num_tokens: int
) -> tuple[dict[str, Any], int, list[str], bool]:
    """The row of a short request, how many of its tokens have an instant, what was tolerated in the answer, and
    whether its tokens came together."""
    options, timeout_ns = needs.client.model_copy(update={"processes": 1}), round(needs.request_timeout_s * NS_PER_S)
    target = Target(endpoint, model, options, ScaledClock(1.0), timeout_ns, is_strict=False, request=needs.request)
    target = replace(target, prompt_ids=PromptIds(seed, needs.highest_ids))
    result = replay_here(_plan(needs, num_tokens), target, on_event=None, is_stopped=lambda: False)
    (row,) = result.requests.to_pylist()
    num_timed = sum(result.chunks.to_table()["num_tokens"].to_pylist())
    is_held = held_facts(result.chunks, result.requests)["held_first"]["num_held"] > 0
    return row, num_timed, sorted(result.audit["tolerated"]), is_held


def _form_that_works(endpoint: Endpoint, model: str, needs: Needs) -> str:
    """The remedy where the server answers a request of another form; "" where it answers none."""
    forms: tuple[PromptForm, ...] = ("token-ids", "text", "chat")
    for form in forms:
        if form == needs.prompt_form:
            continue
        row, *_ = _answered(endpoint, model, replace(needs, prompt_form=form), 0, PROMPT_TOKENS)
        if row["status"] == "ok":
            known = "/v1/chat/completions alone" if form == "chat" else f"/v1/completions, with {form} prompts"
            return f'The server knows {known}: workload.prompt_form = "{form}"'
    return ""


def _explained(error: str, row: dict[str, Any]) -> str:
    if "return_token_ids" in error:
        return (
            "the server ignored return_token_ids: answers cannot continue a session. Use vLLM 0.10 or newer, or set "
            'workload.prompt_form = "text"'
        )
    if "max_completion_tokens" in error:
        return f"{error}. Set workload.request.max_completion_tokens = true"
    if OUT_OF_VOCABULARY in error:
        return f"{error}: the model knows fewer tokens. Set workload.token_id_range to ids that it has"
    if "no usage" in error:
        return "the server states no usage: tokens cannot be counted. It must honour stream_options.include_usage"
    if row["status"] == "wrong_length":
        return f"{error}: answers cannot have planned lengths. The server must honour ignore_eos and max_tokens"
    status = f" (status {row['http_status']})" if row["status"] == "http_error" else ""
    return f'a request of {row["planned_prompt_tokens"]} tokens failed{status}; its message: "{error}"'


def _plan(needs: Needs, num_tokens: int) -> Plan:
    """One session of one short request."""
    workload = WorkloadSpec(
        num_sessions=1, waits="none", prompt_form=needs.prompt_form, token_id_range=needs.token_id_range
    )
    plan = draw_plan(workload, 1, 0)
    (session,) = plan.sessions
    request = RequestPlan(keep_tokens=0, new_tokens=num_tokens, generate_tokens=ANSWER_TOKENS)
    return replace(plan, sessions=(replace(session, requests=(request,)),))
