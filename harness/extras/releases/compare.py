"""Two releases of a stack over the same plans: which decisions differ, which figures, which names of log and metrics.

Nothing is decided, and no run is made: `harness gate` judges one against the other.
Definitions: docs/guides/releases.md, "Two releases side by side".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from harness.analysis.compare.measures import mean_of
from harness.analysis.compare.ratio import Family
from harness.analysis.figures import cells, same
from harness.analysis.stats import grouped, paired
from harness.errors import SpecError
from harness.judge.decisions.gate import FIGURES, GateRun, gate_run, ratio_of
from harness.measure.records import layout
from harness.measure.records.run import SealedRun, origin_of
from harness.table import Cell, Table, table_of

# "[PFX] ALLOC": what a line of the log is about.
_LOG_NAME = re.compile(rb"\[[A-Z][A-Z0-9_]+\](?: \[?[A-Z][A-Z_]+\b)?")


def compare_releases(
    old: Sequence[SealedRun], new: Sequence[SealedRun], names: tuple[str, str]
) -> tuple[Table, Table, Table]:
    """Tables of decisions, figures and names, over the valid runs that both releases have; SpecError without any."""
    before, after = ([run for run in side if run.is_valid] for side in (old, new))
    pairs = paired(before, after, lambda run: (run.key, run.manifest.plan_hash))
    if not pairs:
        raise SpecError("no plan ran validly on both releases", where="stack compare", hint="See `harness runs`")
    origin = origin_of(run for pair in pairs for run in pair)
    titles = f"{names[0]} and {names[1]}"
    decisions = table_of(
        f"Decisions of {titles}",
        "first_step: the first decode step whose (n, b) differs; steps: how many differ, place by place; first_event "
        "and events: the same of slot events (kind, slots, reused tokens, caller).",
        (_decisions(base, run) for base, run in pairs),
        origin,
    )
    rows = _figures([(gate_run(run), gate_run(base)) for base, run in pairs])
    figures = table_of(
        f"Figures of {titles}",
        f"ratio: {names[1]} over {names[0]}, over pairs of runs of one plan, with an interval of 95 % for all of them "
        "together; differs: whether it leaves 1 out; a dash: too few runs or requests. "
        + "; ".join(f"{name}: {figure.meaning}" for name, figure in FIGURES.items())
        + ".",
        rows,
        origin,
    )
    return (
        decisions,
        figures,
        table_of(f"Names of {titles}", "What only one of them shows.", _names(pairs, names), origin),
    )


def _decisions(base: SealedRun, run: SealedRun) -> dict[str, Cell]:
    steps = [_rows(each, "steps", ("n", "b")) for each in (base, run)]
    events = [_rows(each, "kv_events", ("kind", "slots", "reused_tokens", "caller")) for each in (base, run)]
    first_step, num_steps = _different(*steps)
    first_event, num_events = _different(*events)
    return {
        "run": base.label,
        "decode_steps": f"{len(steps[0])} : {len(steps[1])}",
        "first_step": first_step,
        "at_first_step": "" if first_step is None else f"{_at(steps[0], first_step)} : {_at(steps[1], first_step)}",
        "steps": num_steps,
        "first_event": first_event,
        "at_first_event": ""
        if first_event is None
        else f"{_at(events[0], first_event)} : {_at(events[1], first_event)}",
        "events": num_events,
    }


def _rows(run: SealedRun, table: str, columns: Sequence[str]) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in run.table(table).select(list(columns)).to_pylist()]


def _different(old: Sequence[object], new: Sequence[object]) -> tuple[int | None, int]:
    """The first place at which two sequences differ, and at how many they do."""
    places = [place for place, (one, other) in enumerate(zip_longest(old, new)) if one != other]
    return (places[0] if places else None), len(places)


def _at(rows: Sequence[tuple[object, ...]], place: int) -> str:
    return str(rows[place]) if place < len(rows) else "ended"


def _figures(pairs: Sequence[tuple[GateRun, GateRun]]) -> list[dict[str, Cell]]:
    """A row for each figure of each condition that some run shows."""
    by_condition = grouped(pairs, lambda pair: pair[0].condition)
    shown = [
        (condition, name, of_condition)
        for condition, of_condition in by_condition.items()
        for name in FIGURES
        if any(run.values.get(name) for pair in of_condition for run in pair)
    ]
    return [_figure(condition, name, of_condition, len(shown)) for condition, name, of_condition in shown]


def _figure(condition: str, name: str, pairs: Sequence[tuple[GateRun, GateRun]], family: int) -> dict[str, Cell]:
    ratio = ratio_of(FIGURES[name], pairs)
    interval = None if ratio is None else Family(family).interval(ratio)
    sides = [[run.values.get(name) for run in side] for side in zip(*pairs, strict=True)]
    new, old = (mean_of([value for value in side if value]) if all(side) else None for side in sides)
    return {
        "condition": condition,
        "figure": name,
        "pairs": len(pairs),
        "old": old,
        "new": new,
        "ratio": None if interval is None else interval.estimate,
        **cells(interval, same("low", "high")),
        "differs": None if interval is None else not interval.contains(1.0),
    }


def _names(pairs: Iterable[tuple[SealedRun, SealedRun]], releases: tuple[str, str]) -> list[dict[str, Cell]]:
    """Metrics and log lines that every paired run of one release together shows, and the other does not."""
    seen = {"metric": (set[str](), set[str]()), "log line": (set[str](), set[str]())}
    for pair in pairs:
        for side, run in enumerate(pair):
            seen["metric"][side].update(run.table("metrics").column("name").to_pylist())
            log = run.file(layout.SERVER_LOG)
            if log.is_file():
                seen["log line"][side].update(name.decode() for name in _LOG_NAME.findall(log.read_bytes()))
    return [
        {"kind": kind, "name": name, "only_in": release}
        for kind, (old, new) in seen.items()
        for release, names in zip(releases, (old - new, new - old), strict=True)
        for name in sorted(names)
    ]
