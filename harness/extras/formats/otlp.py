"""OTLP JSON as flat spans: one ExportTraceServiceRequest a document, or one a line (the collector's file exporter).

Follows the JSON Protobuf encoding of OTLP 1.5 (opentelemetry.io, "OTLP/HTTP"): names in lowerCamelCase, 64-bit numbers
as text or as numbers, ids in hexadecimal, attributes as typed values. Names in snake_case, as Python's protobuf writes
them, and Tempo's ``batches`` are read as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from harness.model.traces.base import Record, list_of, record_of, text_of

DEEPEST_VALUE = 16
PLAIN = ("stringValue", "boolValue", "doubleValue")
DOCUMENTS = ("resourceSpans", "resource_spans", "batches")
CAPITAL = re.compile("([A-Z])")


def flat_spans(document: Record) -> Iterator[Record]:
    """The spans of a document, with plain attributes and instants as ``start_ns`` and ``end_ns``."""
    for resource_spans in (each for key in DOCUMENTS for each in map(record_of, list_of(document.get(key)))):
        resource = _attributes(record_of(resource_spans.get("resource")).get("attributes"))
        # Before OTLP 0.15 the scope was called an instrumentation library.
        for key in ("scopeSpans", "instrumentationLibrarySpans"):
            for scope_spans in map(record_of, list_of(_of(resource_spans, key))):
                schema = _of(scope_spans, "schemaUrl") or _of(resource_spans, "schemaUrl")
                for span in map(record_of, list_of(scope_spans.get("spans"))):
                    yield _flat(span, resource) | {"schema": schema}


def _of(record: Record, name: str) -> object:
    """The value of a key, by its name in lowerCamelCase or in snake_case."""
    return record.get(name, record.get(CAPITAL.sub(r"_\1", name).lower()))


def _flat(span: Record, resource: Record) -> Record:
    return {
        "trace_id": _of(span, "traceId"),
        "span_id": _of(span, "spanId"),
        "parent_span_id": _of(span, "parentSpanId"),
        "start_ns": _whole(_of(span, "startTimeUnixNano")),
        "end_ns": _whole(_of(span, "endTimeUnixNano")),
        "status": span.get("status"),
        "attributes": _attributes(span.get("attributes")),
        "resource_attributes": resource,
    }


def _attributes(pairs: object, depth: int = 0) -> Record:
    rows = map(record_of, list_of(pairs))
    return {text_of(pair, "key"): _value(record_of(pair.get("value")), depth) for pair in rows}


def _value(value: Record, depth: int = 0) -> object:
    """The value of an AnyValue; None where it has none, or is nested too deeply."""
    plain = next((given for key in PLAIN if (given := _of(value, key)) is not None), None)
    if plain is not None or depth > DEEPEST_VALUE:
        return plain
    if (whole := _of(value, "intValue")) is not None:
        return _whole(whole)
    if pairs := list_of(record_of(_of(value, "kvlistValue")).get("values")):
        return _attributes(pairs, depth + 1)
    members = map(record_of, list_of(record_of(_of(value, "arrayValue")).get("values")))
    return [_value(member, depth + 1) for member in members] or None


def _whole(value: object) -> int | None:
    """A 64-bit number, which JSON may hold as text."""
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) <= 20:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 64 else None
