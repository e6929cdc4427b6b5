"""The looks that a gate has taken at the runs of a folder, so that adding blocks and looking again keeps its alpha.

A sequence is a policy and the pairs of runs of each look, every one among those of the next. Its file lies beside the
runs. Definitions: docs/guides/gate.md, "More blocks".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.errors import RecordsError, SpecError
from harness.judge.decisions.gate import GatePolicy, PairKey
from harness.outputs import write_atomic

LOOKS_FILE = "gate-looks.json"


class LookSequence(BaseModel):
    """One policy over the same runs. conditions: judged; added: the pairs that each look has beyond the one before."""

    model_config = ConfigDict(extra="forbid")

    limits: dict[str, float]
    asked: list[str]
    alpha: float
    added: list[list[tuple[str, str]]]

    @property
    def looks(self) -> list[frozenset[PairKey]]:
        """The pairs of every look, in order."""
        seen: set[PairKey] = set()
        looks: list[frozenset[PairKey]] = []
        for added in self.added:
            seen.update(added)
            looks.append(frozenset(seen))
        return looks


class LooksFile(BaseModel):
    """Every sequence of looks at the runs of one experiment's folder, the newest last."""

    model_config = ConfigDict(extra="forbid")

    sequences: list[LookSequence] = []


@dataclass(frozen=True, slots=True)
class PlacedLook:
    """Where a look stands. earlier: the looks before it; file: with it recorded; notes: what a reader must know."""

    earlier: tuple[frozenset[PairKey], ...]
    file: LooksFile
    notes: tuple[str, ...]


def placed(file: LooksFile, policy: GatePolicy, pairs: frozenset[PairKey]) -> PlacedLook:
    """The place of a look at these pairs: one that was taken already, the next of a sequence, or the first of another.

    The same pairs under the same policy are the same look. More pairs are the next look. Anything else is another
    sequence, with an alpha of its own, and said.
    """
    wanted = (dict(policy.limits), set(policy.asked), policy.alpha)
    for place in reversed(range(len(file.sequences))):
        sequence = file.sequences[place]
        looks = sequence.looks
        if (sequence.limits, set(sequence.asked), sequence.alpha) != wanted:
            continue
        if pairs in looks:
            earlier = looks[: looks.index(pairs)]
            return PlacedLook(tuple(earlier), file, (_look_note(len(earlier) + 1, "taken before", looks),))
        if pairs > looks[-1]:
            added = sorted(pairs - looks[-1])
            longer = sequence.model_copy(update={"added": [*sequence.added, added]})
            sequences = [*file.sequences[:place], longer, *file.sequences[place + 1 :]]
            return PlacedLook(
                tuple(looks), LooksFile(sequences=sequences), (_look_note(len(looks) + 1, "recorded", [*looks, pairs]),)
            )
    first = LookSequence(
        limits=dict(policy.limits), asked=sorted(policy.asked), alpha=policy.alpha, added=[sorted(pairs)]
    )
    notes = [_look_note(1, "recorded", [pairs])]
    others = sum(bool(_new_runs(pairs) & _new_runs(sequence.looks[-1])) for sequence in file.sequences)
    if others:
        plural = "s" * (others != 1)
        notes.append(
            f"these runs were judged before in {others} other sequence{plural} (other figures, limits, alpha or "
            "baseline): each may be wrong with its own alpha, so that a verdict chosen among them is wrong more often"
        )
    return PlacedLook((), LooksFile(sequences=[*file.sequences, first]), tuple(notes))


def _new_runs(pairs: frozenset[PairKey]) -> set[str]:
    return {new for new, _ in pairs}


def _look_note(number: int, what: str, looks: Sequence[frozenset[PairKey]]) -> str:
    counts = ", ".join(str(len(pairs)) for pairs in looks)
    return f"look {number} at these runs, {what} (pairs at each look: {counts})"


def read_looks(folder: Path) -> LooksFile:
    """The looks at the runs of an experiment's folder; RecordsError for a file that cannot be read."""
    path = folder / LOOKS_FILE
    if not path.exists():
        return LooksFile()
    try:
        return LooksFile.model_validate_json(path.read_bytes(), strict=False)
    except (OSError, ValidationError) as error:
        raise RecordsError(
            "is no record of a gate's looks that this version reads",
            where=str(path),
            hint="Restore it from a copy; without it more blocks would be judged as if nobody had looked before",
        ) from error


def write_looks(folder: Path, file: LooksFile) -> str:
    """Writes the looks beside the runs; a note where the folder takes no file, "" otherwise."""
    text = json.dumps(file.model_dump(), indent=1) + "\n"
    try:
        write_atomic(folder / LOOKS_FILE, [text.encode()], what="the looks of the gate")
    except (RecordsError, SpecError):
        return f"this look is not recorded, as {folder} takes no file: a look after more blocks would not count it"
    return ""
