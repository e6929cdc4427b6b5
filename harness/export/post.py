"""Sends spans to an OpenTelemetry collector: OTLP over HTTP, as JSON. Nothing is retried."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from harness.errors import HarnessError, SpecError, in_one_line
from harness.export.measured import MeasuredRun
from harness.export.otel import batches

TRACES_PATH = "/v1/traces"
TIMEOUT_S = 30.0


def traces_url(url: str) -> str:
    """The address that takes spans: ``/v1/traces`` of a collector that is named by host and port alone."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise SpecError(f"{url!r} is no address of a collector", where="--otlp", hint="Use http://HOST:4318")
    return urlunsplit(parts._replace(path=parts.path if parts.path.strip("/") else TRACES_PATH))


def post_spans(run: MeasuredRun, url: str) -> int:
    """How many spans of the run the collector took; HarnessError where it took not all of them."""
    num_sent = 0
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
        for batch in batches(run):
            _post(client, url, batch)
            num_sent += len(batch["resourceSpans"][0]["scopeSpans"][0]["spans"])
    return num_sent


def _post(client: httpx.Client, url: str, batch: dict[str, Any]) -> None:
    try:
        answer = client.post(url, json=batch)
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
