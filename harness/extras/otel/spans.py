"""A run as OpenTelemetry spans, by the semantic conventions for generative AI, and their way to a collector.

The form is OTLP JSON (ids in hexadecimal, 64-bit numbers as text). Nothing of a prompt or an answer is in it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby, pairwise
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from harness.clock import NS_PER_S, MonotonicClock
from harness.errors import HarnessError, SpecError
from harness.measure.client.answer import describe_error_body
from harness.measure.server.ask import NO_ANSWER, Reply, ask_url
from harness.present.export.formats import Format
from harness.present.export.measured import MeasuredRequest, MeasuredRun, in_unit
from harness.secrets import note_secrets

NO_ROOM = (
    "gaps between tokens: a span has the time to its first token, the mean time per token and its end",
    "which session waited for which other session",
)
INTERNAL, CLIENT = 1, 3
SPANS_A_BATCH = 512
PROVIDER = "vllm"
TRACES_PATH = "/v1/traces"
TIMEOUT_S = 30.0
HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
# Answers after which the protocol lets a client send again (OTLP 1.5, "Retryable Response Codes").
_RETRIED = {NO_ANSWER, 429, 502, 503, 504}
MIN_STATUS_NOT_TAKEN = 300
_WAITS_S = (1, 2)
Span = dict[str, Any]


def spans_of(run: MeasuredRun) -> list[Span]:
    """Every span of the run: one a session, one a request, one a wait between two requests of a session."""
    sessions = groupby(run.requests, key=lambda request: request.session)
    return [span for _, requests in sessions for span in _session(run, list(requests))]


def batches(run: MeasuredRun, spans_a_batch: int = SPANS_A_BATCH) -> Iterator[dict[str, Any]]:
    """The spans as requests to a collector's ``/v1/traces``, each of so many spans."""
    spans = spans_of(run)
    for first in range(0, len(spans), spans_a_batch):
        yield resource_spans(run, spans[first : first + spans_a_batch])


def resource_spans(run: MeasuredRun, spans: list[Span]) -> dict[str, Any]:
    """Spans below the run that they are of."""
    resource = {"service.name": "rbln-harness", **{f"harness.{key}": value for key, value in run.metadata.items()}}
    scope = {"name": "rbln-harness", "version": run.metadata["harness"]}
    return {
        "resourceSpans": [
            {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [{"scope": scope, "spans": spans}]}
        ]
    }


def _session(run: MeasuredRun, requests: list[MeasuredRequest]) -> Iterator[Span]:
    number = requests[0].session
    trace = _identity(run, f"session {number}", 32)
    parent = _identity(run, f"span {number}", 16)
    conversation = {"gen_ai.conversation.id": f"{run.run.label}/s{number}", "gen_ai.agent.name": f"session-{number}"}
    server = {"server.address": run.host, "server.port": run.port} if run.host else {}

    def span(what: str, name: str, kind: int, span_ns: tuple[int, int], attributes: dict[str, Any]) -> Span:
        """A span of this session; what: names it among those of the run, "" for the session itself."""
        return {
            "traceId": trace,
            "spanId": _identity(run, what, 16) if what else parent,
            **({"parentSpanId": parent} if what else {}),
            "name": name,
            "kind": kind,
            "startTimeUnixNano": str(span_ns[0]),
            "endTimeUnixNano": str(span_ns[1]),
            "attributes": _attributes(attributes),
        }

    whole = (requests[0].sent_ns, max(request.done_ns for request in requests))
    session = {**_operation("invoke_agent"), **conversation, **server}
    yield span("", f"invoke_agent session-{number}", INTERNAL, whole, session)
    for request in requests:
        name, attributes = f"text_completion {run.model}".strip(), {**_request(run, request), **conversation, **server}
        yield span(request.name, name, CLIENT, (request.sent_ns, request.done_ns), attributes)
    tool = {**_operation("execute_tool"), "gen_ai.tool.name": "wait", "gen_ai.tool.type": "function", **conversation}
    for before, after in pairwise(requests):
        if before.wait_ns:
            yield span(f"wait {before.name}", "execute_tool wait", INTERNAL, (after.trigger_ns, after.due_ns), tool)


def _operation(name: str) -> dict[str, Any]:
    return {"gen_ai.operation.name": name, "gen_ai.provider.name": PROVIDER}


def _request(run: MeasuredRun, request: MeasuredRequest) -> dict[str, Any]:
    first_ns = int(request.token_ns[0]) - request.sent_ns if len(request.token_ns) else None
    return {
        **_operation("text_completion"),
        "gen_ai.request.model": run.model or None,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.stream": bool(len(request.token_ns)),
        "gen_ai.response.id": request.response_id or None,
        "gen_ai.response.finish_reasons": [request.finish_reason] if request.finish_reason else None,
        "gen_ai.response.time_to_first_chunk": in_unit(first_ns, NS_PER_S),
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.output_tokens": request.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
        "http.response.status_code": request.http_status,
        "harness.request_id": request.request_id,
        "harness.turn": request.turn,
        "harness.status": request.status,
        "harness.in_window": request.is_in_window,
        "harness.prefix": request.prefix or None,
        "harness.time_per_output_token_s": in_unit(request.tpot_ns, NS_PER_S),
        "harness.queue_s": in_unit(request.queue_ns, NS_PER_S),
        "harness.lateness_s": in_unit(request.sent_ns - request.due_ns, NS_PER_S),
    }


def _identity(run: MeasuredRun, what: str, digits: int) -> str:
    """An id of so many hexadecimal digits, the same each time that the run is exported."""
    return hashlib.sha256(f"{run.run.manifest.seal}\0{run.run.key}\0{what}".encode()).hexdigest()[:digits]


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}  # pyright: ignore[reportUnknownVariableType]
    return {"stringValue": str(value)}


def traces_url(url: str) -> str:
    """The address that takes spans: ``/v1/traces`` of a collector that is named by host and port alone."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise SpecError(f"{url!r} is no address of a collector", where="--otlp", hint="Use http://HOST:4318")
    return urlunsplit(parts._replace(path=parts.path if parts.path.strip("/") else TRACES_PATH))


def collector_headers() -> dict[str, str]:
    """The headers in OTEL_EXPORTER_OTLP_HEADERS, "name=value,name=value" with values percent-encoded; {} without it.

    Raises SpecError, which repeats no value, where it is written otherwise.
    """
    headers: dict[str, str] = {}
    for place, pair in enumerate(os.environ.get(HEADERS_VARIABLE, "").split(",")):
        name, separator, value = pair.strip().partition("=")
        name, value = name.strip(), unquote(value.strip())
        # A library's error about a header would show its value.
        is_header = bool(separator and name) and f"{name}{value}".isascii() and f"{name}{value}".isprintable()
        if pair.strip() and not is_header:
            raise SpecError(f"its part {place + 1} is not NAME=VALUE", where=HEADERS_VARIABLE, hint="Write name=value")
        if name:
            headers[name] = value
            note_secrets(value.split()[-1:])
    return headers


def sender(url: str) -> Callable[[MeasuredRun], int]:
    """Sends runs to the collector there; SpecError for what is no address or no header."""
    address, _checked = traces_url(url), collector_headers()
    return lambda run: post_spans(run, address)


def post_spans(run: MeasuredRun, url: str) -> int:
    """How many spans of the run the collector took; HarnessError where it took not all of them."""
    num_sent, headers = 0, collector_headers()
    for batch in batches(run):
        _post(url, headers, batch)
        num_sent += len(batch["resourceSpans"][0]["scopeSpans"][0]["spans"])
    return num_sent


def _post(url: str, headers: Mapping[str, str], batch: dict[str, Any]) -> None:
    reply = _answered(url, headers, json.dumps(batch).encode())
    answer: Any = reply.json() if reply.body else {}
    if reply.error or reply.status >= MIN_STATUS_NOT_TAKEN or answer is None:
        why = reply.error or f"status {reply.status}: {describe_error_body(reply.body)}"
        raise HarnessError(
            f"the collector did not take the spans ({why})",
            where=url,
            hint="Start one with OTLP/HTTP enabled, or leave --otlp out: the file has the same spans",
        )
    refused: Any = answer.get("partialSuccess", {}) if isinstance(answer, dict) else {}  # pyright: ignore[reportUnknownMemberType]
    if int(refused.get("rejectedSpans", 0) or 0):
        why = refused.get("errorMessage", "")
        raise HarnessError(f"the collector rejected {refused['rejectedSpans']} spans ({why})", where=url)


def _answered(url: str, headers: Mapping[str, str], batch: bytes) -> Reply:
    """The collector's answer; after a passing failure the batch is sent again, twice at most."""
    clock = MonotonicClock()
    for wait_s in _WAITS_S:
        reply = ask_url(url, deadline_s=TIMEOUT_S, body=batch, headers=headers)
        if reply.status not in _RETRIED:
            return reply
        clock.sleep_until_ns(clock.now_ns() + wait_s * NS_PER_S)
    return ask_url(url, deadline_s=TIMEOUT_S, body=batch, headers=headers)


FORMAT = Format("otel", NO_ROOM, {"traces.json": lambda run: resource_spans(run, spans_of(run))}, send=sender)
