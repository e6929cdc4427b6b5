"""The METRICS table of a run, computed from its scrapes: bodies of ``/metrics`` as they came, a JSON line each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from harness.records import schema

# Samples that are kept as Python values: Arrow's own take a tenth of the memory.
BLOCK_SAMPLES = 1 << 15
HTTP_OK = 200
MOST_KNOWN_NAMES = 16
_known_names: dict[bytes, list[tuple[str, str]]] = {}


def metrics_table(lines: Iterable[bytes]) -> tuple[pa.Table, int, int]:
    """(METRICS table, scrapes, scrapes without a readable body) of the lines of the scrapes' file."""
    columns: dict[str, list[Any]] = {name: [] for name in schema.METRICS.names}
    blocks: list[pa.Table] = []
    num_scrapes = num_failed = 0
    for line in lines:
        scrape = num_scrapes
        num_scrapes += 1
        try:
            at_ns, reason, names, values = _scraped(line)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            num_failed += 1
            continue
        same = ([one] * len(values) for one in (scrape, at_ns, reason))
        both = ([name for name, _ in names], [labels for _, labels in names])
        for column, cells in zip(columns.values(), (*same, *both, values), strict=True):
            column.extend(cells)
        if len(columns["value"]) >= BLOCK_SAMPLES:
            blocks.append(pa.table(columns, schema=schema.METRICS))
            columns = {name: [] for name in columns}
    return pa.concat_tables([*blocks, pa.table(columns, schema=schema.METRICS)]), num_scrapes, num_failed


def _scraped(line: bytes) -> tuple[int, str, list[tuple[str, str]], list[float]]:
    """Instant, reason, names and values of a scrape; ValueError and its like where they cannot be read."""
    record = json.loads(line)
    if record["status"] != HTTP_OK:
        raise ValueError("no body")
    names, values = _samples(record["body"])
    at_ns, reason = int(record["at_ns"]), str(record["reason"])
    if not (0 <= at_ns < 1 << 63 and reason.isprintable()):
        raise ValueError("no instant or no reason")
    return at_ns, reason, names, values


def _samples(body: str) -> tuple[list[tuple[str, str]], list[float]]:
    """(name, labels) and value of every sample. Scrapes of one server differ in values alone: names are read once."""
    # A body may hold bytes that were no UTF-8, kept as lone surrogates: Arrow strings cannot.
    text = body.encode("utf-8", "replace").decode("utf-8")
    lines = [line.rpartition(" ") for line in text.split("\n") if line and not line.startswith("#")]
    heads = "\n".join(head for head, _space, _value in lines)
    key = hashlib.sha256(f"{heads}\n{_comments(text)}".encode()).digest()
    known = _known_names.get(key)
    # A line without a space has no head, as has no line.
    if known is not None and len(known) == len(lines):
        return known, [float(value) for _head, _space, value in lines]
    parsed = list(_parsed(text))
    names = [(name, labels) for name, labels, _value in parsed]
    if len(parsed) == len(lines) and all(
        _is_value(line[2], sample[2]) for line, sample in zip(lines, parsed, strict=True)
    ):
        if len(_known_names) >= MOST_KNOWN_NAMES:
            _known_names.clear()
        _known_names[key] = names
    return names, [value for _name, _labels, value in parsed]


def _comments(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if line.startswith("#"))


def _is_value(text: str, value: float) -> bool:
    """Whether the last word of a line is its value, and no timestamp."""
    try:
        return repr(float(text)) == repr(value)
    except ValueError:
        return False


def _parsed(text: str) -> Iterator[tuple[str, str, float]]:
    # Only what derives tables needs it, and it takes a tenth of the start of a command.
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{sample.labels[key]}"' for key in sorted(sample.labels))
            yield sample.name, labels, float(sample.value)
