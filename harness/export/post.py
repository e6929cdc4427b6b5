"""Sends spans to an OpenTelemetry collector: OTLP over HTTP, as JSON, with the headers of the usual variable.

A batch that the collector could not take for a moment is sent again. Span ids are the same each time.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx

from harness.clock import NS_PER_S, MonotonicClock
from harness.errors import HarnessError, SpecError, in_one_line
from harness.export.measured import MeasuredRun
from harness.export.otel import batches

TRACES_PATH = "/v1/traces"
TIMEOUT_S = 30.0
HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
# Answers after which the protocol lets a client send again (OTLP 1.5, "Retryable Response Codes").
_RETRIED = {429, 502, 503, 504}
_WAITS_S = (1, 2)


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
    return headers


def post_spans(run: MeasuredRun, url: str) -> int:
    """How many spans of the run the collector took; HarnessError where it took not all of them."""
    num_sent = 0
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False, headers=collector_headers()) as client:
        for batch in batches(run):
            _post(client, url, batch)
            num_sent += len(batch["resourceSpans"][0]["scopeSpans"][0]["spans"])
    return num_sent


def _post(client: httpx.Client, url: str, batch: dict[str, Any]) -> None:
    try:
        answer = _answered(client, url, batch)
        answer.raise_for_status()
        body = answer.json() if answer.content else {}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise HarnessError(
            f"the collector did not take the spans ({in_one_line(error) or type(error).__name__})",
            where=url,
            hint="Start one with OTLP/HTTP enabled, or leave --otlp out: the file has the same spans",
        ) from error
    refused: Any = body.get("partialSuccess", {}) if isinstance(body, dict) else {}  # pyright: ignore[reportUnknownMemberType]
    if int(refused.get("rejectedSpans", 0) or 0):
        why = refused.get("errorMessage", "")
        raise HarnessError(f"the collector rejected {refused['rejectedSpans']} spans ({why})", where=url)


def _answered(client: httpx.Client, url: str, batch: dict[str, Any]) -> httpx.Response:
    """The collector's answer; after a passing failure the batch is sent again, twice at most."""
    clock = MonotonicClock()
    for wait_s in _WAITS_S:
        try:
            answer = client.post(url, json=batch)
        except httpx.TransportError:
            pass
        else:
            if answer.status_code not in _RETRIED:
                return answer
        clock.sleep_until_ns(clock.now_ns() + wait_s * NS_PER_S)
    return client.post(url, json=batch)
