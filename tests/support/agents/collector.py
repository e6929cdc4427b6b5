"""What a collector's file exporter writes: each export of spans over OTLP/HTTP as a line of OTLP JSON."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.raw_server import Asked, RawServer, Reply, whole

IDS = ("traceId", "spanId", "parentSpanId")


@contextmanager
def collecting(target: Path) -> Generator[str]:
    """The address to which an agent exports its spans, which become lines of ``target``."""
    from google.protobuf import json_format
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    def take(asked: Asked) -> Reply:
        body = gzip.decompress(asked.body) if asked.header("Content-Encoding") == "gzip" else asked.body
        document = with_ids_in_hex(json_format.MessageToDict(ExportTraceServiceRequest.FromString(body)))
        with target.open("a") as lines:
            lines.write(json.dumps(document) + "\n")
        return Reply([whole("{}", b"Content-Type: application/json")])

    with RawServer(take) as server:
        yield server.url


def with_ids_in_hex(value: Any) -> Any:
    """OTLP's JSON has ids in hexadecimal; that of Protocol Buffers has them in base64."""
    if isinstance(value, dict):
        return {
            key: base64.b64decode(inner).hex() if key in IDS and isinstance(inner, str) else with_ids_in_hex(inner)
            for key, inner in value.items()
        }
    return list(map(with_ids_in_hex, value)) if isinstance(value, list) else value
