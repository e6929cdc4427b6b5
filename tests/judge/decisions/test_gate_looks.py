"""Looks of a gate: the same runs are the same look, more runs the next, anything else another sequence that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import RecordsError
from harness.judge.decisions.gate import PairKey, gate_policy
from harness.judge.decisions.gate_looks import LOOKS_FILE, LooksFile, placed, read_looks, write_looks


def pairs(*numbers: int, base: str = "base") -> frozenset[PairKey]:
    return frozenset((f"new {number}", f"{base} {number}") for number in numbers)


def after(*looks: frozenset[PairKey]) -> LooksFile:
    file = LooksFile()
    for look in looks:
        file = placed(file, gate_policy(), look).file
    return file


def test_more_pairs_are_the_next_look_and_the_same_pairs_the_same() -> None:
    file = after(pairs(0, 1, 2))
    second = placed(file, gate_policy(), pairs(0, 1, 2, 3, 4))
    assert second.earlier == (pairs(0, 1, 2),)
    again = placed(second.file, gate_policy(), pairs(0, 1, 2, 3, 4))
    assert (again.earlier, again.file) == (second.earlier, second.file)
    first_again = placed(second.file, gate_policy(), pairs(0, 1, 2))
    assert (first_again.earlier, first_again.file) == ((), second.file)
    assert second.notes == ("look 2 at these runs, recorded (pairs at each look: 3, 5)",)


def test_another_policy_baseline_or_set_of_runs_is_another_sequence_and_said() -> None:
    file = after(pairs(0, 1, 2))
    others = [
        placed(file, gate_policy(["cost"]), pairs(0, 1, 2, 3)),
        placed(file, gate_policy(alpha=0.1), pairs(0, 1, 2, 3)),
        placed(file, gate_policy(), pairs(0, 1, 2, 3, base="another")),
        placed(file, gate_policy(), pairs(1, 2, 3)),
    ]
    for other in others:
        assert other.earlier == ()
        assert "these runs were judged before in 1 other sequence" in other.notes[1]
        assert len(other.file.sequences) == 2
    unrelated = placed(file, gate_policy(), frozenset({("x", "y")}))
    assert len(unrelated.notes) == 1


def test_looks_are_read_back_and_a_damaged_file_is_refused(tmp_path: Path) -> None:
    assert read_looks(tmp_path) == LooksFile()
    file = after(pairs(0, 1, 2), pairs(0, 1, 2, 3))
    assert write_looks(tmp_path, file) == ""
    assert read_looks(tmp_path) == file
    (tmp_path / LOOKS_FILE).write_text("{")
    with pytest.raises(RecordsError, match="no record of a gate's looks"):
        read_looks(tmp_path)


def test_a_folder_that_takes_no_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "this look is not recorded" in write_looks(tmp_path / "file", LooksFile())
