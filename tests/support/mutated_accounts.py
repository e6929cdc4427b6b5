"""Sound recordings of every format with rows removed, doubled, moved, or of a renamed type: is a change ever silent?

``python -m tests.support.mutated_accounts 100000`` reads so many and prints what came of them; it ends at the first
count or wait that changed without a word. The sums of each account are asserted by the import itself.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.model.traces.base import ReadNotes
from harness.model.traces.importing import read_recordings
from harness.model.traces.recording import Recording
from tests.support.sound_traces import SOUND

# Rows that are whole calls, which no other row counts or names: without one the rest is a recording of fewer calls.
WITHOUT_LINKS = ("mooncake", "bailian", "otel", "weka", "atif", "openhands", "swe-agent")
ROWS_INSIDE = {"atif": "steps", "openhands": "history", "swe-agent": "messages", "weka": "requests"}
ROWS_INSIDE["opencode"] = "messages"
# LMCache's rows have no type: what would be renamed is a role in a prompt, which makes it another prompt.
UNTYPED = ("lmcache",)
TYPES = re.compile(r'"(type|source|role|kind|gen_ai\.operation\.name)": "(\w+)"')


def _lines(kind: str, rng: random.Random) -> tuple[list[str], str]:
    """The rows of a sound file after one to three changes, and what was changed."""
    lines = SOUND[kind]()
    changes: list[str] = []
    for _ in range(rng.randrange(1, 4)):
        inside = ROWS_INSIDE.get(kind)
        place = rng.randrange(kind == "csv", len(lines))
        if inside is None:
            lines[kind == "csv" :] = _changed(lines[kind == "csv" :], changes, kind, rng)
        else:
            document: Any = json.loads(lines[place])
            rows = _changed([json.dumps(row) for row in document[inside]], changes, kind, rng)
            lines[place] = json.dumps(document | {inside: [json.loads(row) for row in rows]})
    return lines, ", ".join(changes)


def _changed(rows: list[str], changes: list[str], kind: str, rng: random.Random) -> list[str]:
    if not rows:
        return rows
    ways = ("removed", "doubled", "moved", "renamed")
    what, place = rng.choice(ways[:3] if kind in UNTYPED else ways), rng.randrange(len(rows))
    row = rows[place]
    changes.append(f"row {place} {what}")
    if what == "removed":
        return rows[:place] + rows[place + 1 :]
    if what == "doubled":
        return [*rows[: place + 1], *rows[place:]]
    if what == "renamed":
        return [*rows[:place], TYPES.sub(r'"\1": "\2_2"', row, count=1), *rows[place + 1 :]]
    rest = rows[:place] + rows[place + 1 :]
    rest.insert(rng.randrange(len(rest) + 1), row)
    return rest


def _read(kind: str, lines: list[str], folder: Path) -> tuple[list[Recording], ReadNotes] | None:
    """What an import reads; None where it refuses."""
    source = folder / f"in.{'csv' if kind == 'csv' else 'jsonl'}"
    source.write_text("".join(f"{line}\n" for line in lines))
    try:
        _, recordings, notes = read_recordings([source], kind=kind)
    except HarnessError:
        return None
    return recordings, notes


def _calls(recordings: list[Recording]) -> list[tuple[int, ...]]:
    """Each call: its lengths and its wait."""
    return sorted((one.prompt_tokens, one.generate_tokens, one.wait_ns) for each in recordings for one in each.requests)


def came_of(kind: str, rng: random.Random, folder: Path) -> str:
    """One of "equal", "said", "refused" or "fewer"; AssertionError where something changed without a word."""
    lines, changes = _lines(kind, rng)
    sound = _read(kind, SOUND[kind](), folder)
    read = _read(kind, lines, folder)
    if read is None or sound is None:
        return "refused"
    (recordings, notes), (whole, of_sound) = read, sound
    if _calls(recordings) == _calls(whole):
        return "equal"
    if notes.dropped or notes.broken or notes.unknown or notes.left or set(notes.assumed) - set(of_sound.assumed):
        return "said"
    # LMCache's prompts are estimated from characters, and every file says so: only its answers are counts.
    first = 1 if kind == "lmcache" else 0
    lengths, of_whole = (Counter(call[first:2] for call in _calls(each)) for each in (recordings, whole))
    assert lengths <= of_whole, f"{kind}: {changes}: calls that are not there, without a word"
    known = [call[first:] for call in _calls(whole)]
    is_shorter = (
        all(call[first:] in known for call in _calls(recordings)) or kind in WITHOUT_LINKS or lengths != of_whole
    )
    assert is_shorter, f"{kind}: {changes}: {_calls(recordings)} for {_calls(whole)}, without a word"
    zeros = [sum(not call[2] for call in _calls(each)) for each in (recordings, whole)]
    assert zeros[0] <= zeros[1], f"{kind}: {changes}: a wait of nothing, without a word"
    return "fewer"


def read_many(number: int, seed: int) -> Counter[str]:
    """What came of so many recordings, all formats in turn."""
    rng, came, kinds = random.Random(seed), Counter[str](), sorted(SOUND)
    with tempfile.TemporaryDirectory() as folder:
        for place in range(number):
            kind = kinds[place % len(kinds)]
            came[f"{kind}: {came_of(kind, rng, Path(folder))}"] += 1
    return came


if __name__ == "__main__":
    for what, count in sorted(read_many(int(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 1).items()):
        print(f"{count:8d} recordings  {what}")
