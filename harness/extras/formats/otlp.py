"""Spans and log records as flat spans: OTLP JSON, Tempo's, Jaeger's, Phoenix's, the SDK's console's, and flat ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from harness.clock import NS_PER_MS, NS_PER_US
from harness.model.traces.account import ReadNotes
from harness.model.traces.base import read_tables
from harness.model.traces.values import Record, list_of, record_of, records_of, seconds_ns, text_of

DEEPEST_VALUE = 16
TABLES = read_tables(Path(__file__).with_name("otel.toml"))
PLAIN, DOCUMENTS, LOGS, EVENTS, ANSWERED, (DETAILS,) = TABLES["otlp"].values()


def spans_in(document: Record, notes: ReadNotes) -> Iterator[Record]:
    """The spans of a document, with plain attributes, and instants as ``start_ns`` and ``end_ns`` or as texts."""
    if record_of(document, "trace"):
        yield from spans_in(record_of(document["trace"]), notes)
    elif document.keys() & {*DOCUMENTS, *LOGS}:
        yield from _of_otlp(document, notes)
    elif "spans" in document or isinstance(document.get("data"), list):
        processes = record_of(document, "processes")
        for span in map(record_of, list_of(document.get("spans", document.get("data")))):
            if "spans" in span:
                yield from spans_in(span, notes)
            else:
                yield _of_jaeger(span, processes, notes) if "traceID" in span else _plain(span, notes)
    else:
        yield _plain(document, notes)  # a line may be one span by itself


def _plain(span: Record, notes: ReadNotes) -> Record:
    """A flat span, as it is or as the SDK and Phoenix write it."""
    context = record_of(span, "context") or span
    ids = {name: text_of(context, name) for name in ("trace_id", "span_id")}
    ids["parent_span_id"] = text_of(span, "parent_span_id") or text_of(span, "parent_id")
    resource = record_of(span, "resource", "attributes")
    status = span.get("status") or span.get("status_code")
    more: Record = {"status": status, "resource_attributes": resource} if context is not span else {}
    more |= {name: notes.date_ns(at) for name in ("start_ns", "end_ns") if isinstance(at := span.get(name), int)}
    if isinstance(span.get("attributes"), dict):
        more["attributes"] = dict(_dotted(record_of(span, "attributes")))
    return span | {name: given.removeprefix("0x") for name, given in ids.items()} | more


def _dotted(values: Record, name: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Attributes by their whole names, where a store has nested them."""
    for key, value in values.items():
        if isinstance(value, dict) and depth < DEEPEST_VALUE:
            yield from _dotted(record_of(value), f"{name}{key}.", depth + 1)
        else:
            yield f"{name}{key}", value


def _of_jaeger(span: Record, processes: Record, notes: ReadNotes) -> Record:
    """A span of Jaeger's JSON, whose instants are in us and whose attributes are tags."""
    start, spent = (_whole(span.get(name)) for name in ("startTime", "duration"))
    start_ns = notes.date_ns(None if start is None else NS_PER_US * start, NS_PER_US)
    process = record_of(processes, text_of(span, "processID"))
    tags = [records_of(each, "tags") for each in (span, process)]
    attributes, resource = ({text_of(tag, "key"): tag.get("value") for tag in each} for each in tags)
    references = records_of(span, "references")
    links = [each for each in references if text_of(each, "refType") == "FOLLOWS_FROM"]
    above = (text_of(each, "spanID") for each in references if each not in links)
    resource.setdefault("service.name", text_of(process, "serviceName"))
    notes.assume(TABLES["labels"]["cut"], bool(attributes.get("otel.dropped_attributes_count")))
    return {
        "trace_id": text_of(span, "traceID"),
        "span_id": text_of(span, "spanID"),
        "name": span.get("operationName"),
        "parent_span_id": next(above, ""),
        "start_ns": start_ns,
        "end_ns": None if start_ns is None or spent is None else start_ns + notes.unit_ns(NS_PER_US) * spent,
        "status": attributes.get("otel.status_code"),
        "links": links,
        "attributes": attributes,
        "resource_attributes": resource,
    }


def _of_otlp(document: Record, notes: ReadNotes) -> Iterator[Record]:
    for of_resource in (each for key in (*DOCUMENTS, *LOGS) for each in records_of(document, key)):
        resource = _attributes(record_of(of_resource, "resource").get("attributes"))
        # Before OTLP 0.15 the scope was called an instrumentation library.
        for key in ("scopeSpans", "instrumentationLibrarySpans", "scopeLogs"):
            for of_scope in map(record_of, list_of(_of(of_resource, key))):
                schema = _of(of_scope, "schemaUrl") or _of(of_resource, "schemaUrl")
                for span in records_of(of_scope, "spans"):
                    yield _flat(span, resource, notes) | {"schema": schema}
                for record in map(record_of, list_of(_of(of_scope, "logRecords"))):
                    yield _of_log(record, resource, notes)


def _of_log(record: Record, resource: Record, notes: ReadNotes) -> Record:
    """A log record as the span that it tells of: it was written when that had ended."""
    attributes = _attributes(record.get("attributes"))
    event = text_of(attributes, "event.name") or text_of(record, "eventName") or text_of(record, "event_name")
    kind = event.rpartition(".")[2] if event != DETAILS or attributes.keys() & {*ANSWERED} else "api_request"
    operation = (kind if kind in EVENTS else "") or text_of(attributes, "gen_ai.operation.name") or f"event {event}"
    end_ns = notes.date_ns(_whole(_of(record, "timeUnixNano")) or _whole(_of(record, "observedTimeUnixNano")))
    spent_ns = seconds_ns(attributes.get("duration_ms") or 0, NS_PER_MS) or 0
    return {
        "trace_id": _of(record, "traceId"),
        "parent_span_id": _of(record, "spanId"),
        "start_ns": None if end_ns is None else end_ns - spent_ns,
        "end_ns": end_ns,
        "event": event,
        "status": "ERROR" if kind == "api_error" else "",
        "attributes": attributes | {"gen_ai.operation.name": operation},
        "resource_attributes": resource,
    }


def _of(record: Record, name: str) -> object:
    """The value of a key, by its name in lowerCamelCase or in snake_case."""
    return record.get(name, record.get(re.sub("([A-Z])", r"_\1", name).lower()))


def _flat(span: Record, resource: Record, notes: ReadNotes) -> Record:
    notes.assume(TABLES["labels"]["cut"], bool(_of(span, "droppedAttributesCount")))
    told = {name: _of(span, key) for name, key in TABLES["span-keys"].items()}
    instants = {f"{end}_ns": notes.date_ns(_whole(_of(span, f"{end}TimeUnixNano"))) for end in ("start", "end")}
    return told | instants | {"attributes": _attributes(span.get("attributes")), "resource_attributes": resource}


def _attributes(pairs: object, depth: int = 0) -> Record:
    return {text_of(pair, "key"): _value(record_of(pair, "value"), depth) for pair in records_of(pairs)}


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
