"""Production requests with named blocks: Mooncake's (FAST'25 release, kvcache-ai) and Bailian's (Alibaba)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from harness.clock import NS_PER_MS, NS_PER_S
from harness.extras.formats import blocks
from harness.model.traces.account import ReadNotes
from harness.model.traces.base import read_tables, trace_format
from harness.model.traces.recording import RecordedRequest, Recording, hidden_name
from harness.model.traces.values import Record, seconds_ns

# Requests a second of a whole service; instants in another unit are a thousand times off.
LIKELY_RATES = (0.01, 20.0)
BY_ARRIVAL, REPEATED = read_tables(Path(__file__).with_name("labels.toml"))["mooncake"].values()


class _Row(NamedTuple):
    """One request as read. chat: its id, None in a format without ids."""

    at_ns: int
    prompt: int
    generate: int
    names: tuple[object, ...]
    chat: str | None


def _recordings(files: Iterable[Path], notes: ReadNotes, block_tokens: int, unit_ns: int) -> Iterator[Recording]:
    """A recording for each request. unit_ns: of ``timestamp``."""
    paths = list(files)
    unit = notes.unit_ns(unit_ns)
    read_rows = [list(_rows(path, unit, notes)) for path in paths]
    rows_of = _once_each(read_rows, notes)
    lengths = ((row.prompt, len(row.names)) for rows in rows_of for _, row in rows)
    size = blocks.settled_block_tokens(lengths, block_tokens, notes, str(paths[0]))
    requests = _named(rows_of, size, notes, is_one_set=notes.dropped[REPEATED] > 0)
    in_files = (notes.in_order(rows, lambda one: one[0], "rows out of order of time") for rows in requests)
    arrivals = sorted((one for rows in in_files for one in rows), key=lambda one: one[0])
    check_instants([at_ns for at_ns, _ in arrivals], unit, notes)
    for place, (at_ns, request) in enumerate(arrivals):
        yield Recording(hidden_name(f"request {place}"), at_ns - arrivals[0][0], (request,))


def _rows(path: Path, unit_ns: int, notes: ReadNotes) -> Iterator[tuple[str, _Row]]:
    def row(record: Record, _: str) -> _Row | None:
        at_ns, names = seconds_ns(record.get("timestamp"), unit_ns), record.get("hash_ids")
        if at_ns is None or blocks.BlockNames().numbers(names) is None:
            return None
        lengths, chat = blocks.lengths_of(record), record.get("chat_id")
        notes.assume(BY_ARRIVAL, lengths is not None and record.get("parent_chat_id") not in (None, -1))
        return lengths and _Row(at_ns, *lengths, tuple(names or ()), None if chat is None else repr(chat))

    yield from blocks.parsed_lines([path], notes, row, "a request without its time, lengths or block names")


def _once_each(files: Sequence[Sequence[tuple[str, _Row]]], notes: ReadNotes) -> list[list[tuple[str, _Row]]]:
    """The rows of each file, without those that an earlier file holds too, and without a chat id that came before."""
    held: Counter[_Row] = Counter()
    kept: list[list[tuple[str, _Row]]] = []
    for rows in files:
        own: Counter[_Row] = Counter()
        kept.append([])
        for at, row in rows:
            own[row] += 1
            if own[row] <= held[row]:
                notes.drop(REPEATED, at)
            elif own[row] > 1 and row.chat is not None:
                notes.drop("rows with a chat id that came before", at)
            else:
                kept[-1].append((at, row))
                notes.assume("rows equal to an earlier row in every value: kept, for rows have no id", own[row] > 1)
        held |= own
    return kept


def _named(
    files: Sequence[Sequence[tuple[str, _Row]]], block_tokens: int, notes: ReadNotes, *, is_one_set: bool
) -> list[list[tuple[int, RecordedRequest]]]:
    """(instant, request) of the rows of each file, with block names as numbers."""
    orders = [blocks.NameOrder() for _ in files]
    for order, rows in zip(orders, files, strict=True):
        names = blocks.BlockNames()
        for _, row in rows:
            order.add(row.names, names.numbers(row.names) or ())
    num_unchained = sum(order.num_unchained for order in orders)
    notes.assume("block names that follow different names: each names its own block only", num_unchained)
    is_anew = blocks.are_anew(orders, notes, is_one_set=is_one_set)
    shared = blocks.BlockNames()
    requests: list[list[tuple[int, RecordedRequest]]] = []
    for place, rows in enumerate(files):
        requests.append([])
        for at, row in rows:
            if len(row.names) > -(-row.prompt // block_tokens):
                notes.row_broken(blocks.TOO_MANY_NAMES, at, was_call=True)
                continue
            numbers = shared.numbers(row.names, place * is_anew) or ()
            whole = numbers[: row.prompt // block_tokens]
            lengths = (row.prompt, 0, notes.answered(row.generate))
            requests[-1].append((row.at_ns, RecordedRequest(None, (), 0, "none", *lengths, whole)))
    return requests


def check_instants(instants_ns: Sequence[int], unit_ns: int, notes: ReadNotes) -> None:
    """Label arrivals, in order, that are all one instant, or at a rate that speaks for another unit of time."""
    span_s = (instants_ns[-1] - instants_ns[0]) / NS_PER_S if len(instants_ns) > 1 else 0
    if len(instants_ns) > 1 and not span_s:
        notes.assume("requests that all arrive at the same instant", len(instants_ns))
    elif span_s and not notes.options.time_unit_ns:
        rate = (len(instants_ns) - 1) / span_s
        if not LIKELY_RATES[0] <= rate <= LIKELY_RATES[1]:
            unit = {NS_PER_MS: "milliseconds", NS_PER_S: "seconds"}.get(unit_ns, f"{unit_ns} ns")
            what = f"requests whose instants are taken as {unit}: {rate:.3g} a second over {span_s:.4g} s. "
            notes.assume(f"{what}If they are in another unit, give --time-unit", len(instants_ns))


MOONCAKES = {"block_tokens": blocks.MOONCAKE_BLOCK_TOKENS, "unit_ns": NS_PER_MS}
FORMAT = trace_format(__file__, "mooncake", partial(_recordings, **MOONCAKES))
BAILIAN = trace_format(__file__, "bailian", partial(_recordings, block_tokens=16, unit_ns=NS_PER_S))
