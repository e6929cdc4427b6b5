"""OTLP JSON as flat spans: one ExportTraceServiceRequest a document, or one a line (the collector's file exporter).

Follows the JSON Protobuf encoding of OTLP 1.5 (opentelemetry.io, "OTLP/HTTP"): names in lowerCamelCase, 64-bit numbers
as text or as numbers, ids in hexadecimal, attributes as typed values.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.model.traces.base import Record, list_of, record_of, text_of

DEEPEST_VALUE = 16


def flat_spans(document: Record) -> Iterator[Record]:
    """The spans of a document, with plain attributes and instants as ``start_ns`` and ``end_ns``."""
    for resource_spans in map(record_of, list_of(document.get("resourceSpans"))):
        resource = _attributes(record_of(resource_spans.get("resource")).get("attributes"))
        # Before OTLP 0.15 the scope was called an instrumentation library.
        for key in ("scopeSpans", "instrumentationLibrarySpans"):
            for scope_spans in map(record_of, list_of(resource_spans.get(key))):
                for span in map(record_of, list_of(scope_spans.get("spans"))):
                    yield _flat(span, resource)


def _flat(span: Record, resource: Record) -> Record:
    return {
        "trace_id": text_of(span, "traceId"),
        "span_id": text_of(span, "spanId"),
        "parent_span_id": text_of(span, "parentSpanId"),
        "start_ns": _whole(span.get("startTimeUnixNano")),
        "end_ns": _whole(span.get("endTimeUnixNano")),
        "attributes": _attributes(span.get("attributes")),
        "resource_attributes": resource,
    }


def _attributes(pairs: object) -> Record:
    return {text_of(pair, "key"): _value(record_of(pair.get("value"))) for pair in map(record_of, list_of(pairs))}


def _value(value: Record, depth: int = 0) -> object:
    """The value of an AnyValue; None where it has none, or is nested too deeply."""
    if depth > DEEPEST_VALUE:
        return None
    for key in ("stringValue", "boolValue", "doubleValue"):
        if key in value:
            return value[key]
    if "intValue" in value:
        return _whole(value["intValue"])
    if "arrayValue" in value:
        return [_value(record_of(each), depth + 1) for each in list_of(record_of(value["arrayValue"]).get("values"))]
    if "kvlistValue" in value:
        pairs = map(record_of, list_of(record_of(value["kvlistValue"]).get("values")))
        return {text_of(pair, "key"): _value(record_of(pair.get("value")), depth + 1) for pair in pairs}
    return None


def _whole(value: object) -> int | None:
    """A 64-bit number, which JSON may hold as text."""
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) <= 20:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 64 else None
