"""The same plans on two releases of a stack: which decisions differ, which figures, which names of log and metrics.

Reads sealed runs of equal plans; makes none. Definitions: docs/releases.md, "Two releases side by side".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from harness.analysis.decisions.gate import FIGURES, GateTest, gate_policy, gate_run, judge
from harness.analysis.figures import cells, same
from harness.errors import SpecError
from harness.records import SealedRun, layout, origin_of
from harness.table import Cell, Table, table_of

# "[PFX] ALLOC": what a line of the log is about.
_LOG_NAME = re.compile(rb"\[[A-Z][A-Z0-9_]+\](?: \[?[A-Z][A-Z_]+\b)?")


def compare_releases(
    old: Sequence[SealedRun], new: Sequence[SealedRun], names: tuple[str, str]
) -> tuple[Table, Table, Table]:
    """Tables of decisions, figures and names, over the valid runs that both releases have; SpecError without any."""
    pairs = [(base, run) for base in old for run in new if _is_pair(base, run)]
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
    result = judge([gate_run(run) for _, run in pairs], [gate_run(base) for base, _ in pairs], gate_policy())
    figures = table_of(
        f"Figures of {titles}",
        f"ratio: {names[1]} over {names[0]}, with its 90 % interval over pairs of runs of one plan; differs: whether "
        "the interval leaves 1 out; a dash: too few runs. "
        + "; ".join(f"{name}: {figure.meaning}" for name, figure in FIGURES.items())
        + ".",
        map(_figure, result.tests),
        origin,
    )
    return (
        decisions,
        figures,
        table_of(f"Names of {titles}", "What only one of them shows.", _names(pairs, names), origin),
    )


def _is_pair(one: SealedRun, other: SealedRun) -> bool:
    return (
        one.is_valid and other.is_valid and one.key == other.key and one.manifest.plan_hash == other.manifest.plan_hash
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


# Columns of the table of figures, and where in a test of the gate each is.
FIGURE_COLUMNS = {
    **same("condition", "figure"),
    "pairs": "num_pairs",
    "old": "baseline",
    **same("new", "ratio", "low", "high"),
}


def _figure(test: GateTest) -> dict[str, Cell]:
    has_interval = test.low is not None and test.high is not None
    differs = not (test.low or 0.0) <= 1 <= (test.high or 0.0) if has_interval else None
    return {**cells(test, FIGURE_COLUMNS), "differs": differs}


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
