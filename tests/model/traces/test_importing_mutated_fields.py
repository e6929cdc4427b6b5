"""Fields that are absent, null or of another type: what an import reads is the same, or it says more than before."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.model.traces.importing import read_recordings
from tests.support.mutated_accounts import WITH_ARRIVALS, rows_of
from tests.support.naive_traces import NAIVE

Path_ = tuple[str | int, ...]
NUM_DRAWS = 60
# Values that are anything: another one is another recording.
FREE = ("hash_ids", "session_id", "input", "timestamp")


def places(value: Any, above: Path_ = ()) -> Iterator[Path_]:
    """Where each value of an object stands within a row; rows within a row are rows."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in pairs:
        if isinstance(name, str):
            yield (*above, name)
        yield from places(inner, (*above, name))


def changed(row: Any, place: Path_, rng: random.Random) -> Any:
    row = holder = copy.deepcopy(row)
    for name in place[:-1]:
        holder = holder[name]
    if (other := rng.choice(["absent", None, [], {}, [3], True])) == "absent":
        del holder[place[-1]]
    else:
        holder[place[-1]] = other
    return row


def read(kind: str, rows: list[Any], folder: Path) -> tuple[list[str], list[str]]:
    """(what each recording is, without names of blocks; every word of the account), or the refusal as words."""
    source = folder / "in.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    try:
        _, recordings, notes = read_recordings([source], kind=kind)
    except HarnessError as error:
        return [], [str(error)]
    found = [
        repr((one.start_ns * (kind in WITH_ARRIVALS), [request._replace(blocks=()) for request in one.requests]))
        for one in recordings
    ]
    counts = (notes.assumed, notes.dropped, notes.broken, notes.unknown, notes.left)
    return sorted(found), sorted(f"{count} x {what}" for each in counts for what, count in each.items())


@pytest.mark.parametrize("kind", sorted(NAIVE.keys() - {"csv"}))
def test_a_field_that_is_missing_or_of_another_type_changes_no_figure_without_a_word(tmp_path: Path, kind: str) -> None:
    rng, rows = random.Random(kind), [json.loads(line) for line in rows_of(kind)]
    sound, words = read(kind, rows, tmp_path)
    for _ in range(NUM_DRAWS):
        number = rng.randrange(len(rows))
        place = rng.choice([each for each in places(rows[number]) if each[0] not in FREE])
        mutated = [*rows[:number], changed(rows[number], place, rng), *rows[number + 1 :]]
        found, told = read(kind, mutated, tmp_path)
        assert found == sound or told != words, f"{kind}: row {number}, {place}: {mutated[number]}"
