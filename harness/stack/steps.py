"""Files of engine steps that a server of any stack wrote, and the padding p and h(n) of their decode steps.

A file is recognised by its content; each stack's reader is a file of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import RecordsError
from harness.stack import gaudi, tpu
from harness.stack.rbln.rules import native_log
from harness.stack.step_file import StepFile
from harness.stack.vllm.step_log import read_step_log
from harness.table import Table

READERS = (tpu, gaudi, native_log)
"""Beside vLLM's step log. Each has PACKAGE, HOW to get the file, the MARK of its content, and ``read``."""


def ways_to_steps(packages: Collection[str] | None = None) -> list[str]:
    """How each stack, or each of these packages, writes its steps to a file."""
    return [f"{reader.PACKAGE}: {reader.HOW}" for reader in READERS if packages is None or reader.PACKAGE in packages]


def read_steps(content: bytes, *, where: str = "step file") -> StepFile:
    """The steps in a file of any known stack; RecordsError for any other file."""
    if b'"vllm_step_log"' in content.split(b"\n", 1)[0]:
        log = read_step_log(content, where=where)
        damaged = [log.first_damaged.encode()] * log.num_damaged
        return StepFile(f"vLLM {log.vllm or 'of unknown version'}, step log", log.steps, damaged, log.unseen)
    for reader in READERS:
        if reader.MARK in content:
            return reader.read(content)
    known = "; ".join(ways_to_steps())
    raise RecordsError(
        "is no file of steps that is known",
        where=where,
        hint=f"Known are vLLM's step log (docs/step-files.md) and {known}",
    )


def load_steps(path: Path) -> StepFile:
    """``read_steps`` of a file."""
    with RecordsError.on_os_error("cannot be read", where=path):
        return read_steps(path.read_bytes(), where=str(path))


@dataclass(frozen=True, slots=True)
class StepPadding:
    """Padding of the pure decode steps of a file.

    steps_by_shape: by (n, b); b is None where the server did not show it. eager_by_shape: those of them without a
    graph; None where no step shows its mode. p: share of padded positions, sum(b - n) / sum(b); None where no b is
    known or no step is counted.
    """

    steps_by_shape: dict[tuple[int, int | None], int]
    eager_by_shape: dict[tuple[int, int | None], int] | None
    p: float | None

    @property
    def h(self) -> dict[int, int]:
        """Decode steps by n."""
        counts: Counter[int] = Counter()
        for (n, _), num_steps in self.steps_by_shape.items():
            counts[n] += num_steps
        return dict(sorted(counts.items()))


def padding_of(file: StepFile) -> StepPadding:
    """(n, b), p and h(n) of the pure decode steps."""
    shapes: Counter[tuple[int, int | None]] = Counter()
    eager: Counter[tuple[int, int | None]] = Counter()
    for step in file.steps.select(["n", "b", "runtime_mode"]).to_pylist():
        if step["n"] is None:
            continue
        shape = (step["n"], step["b"])
        shapes[shape] += 1
        eager[shape] += step["runtime_mode"] == "NONE"
    known = [(n, b, num_steps) for (n, b), num_steps in shapes.items() if b is not None]
    num_positions = sum(b * num_steps for _, b, num_steps in known)
    num_used = sum(n * num_steps for n, _, num_steps in known)
    has_p = file.has_each_step and num_positions > 0
    return StepPadding(
        dict(sorted(shapes.items(), key=lambda item: (item[0][0], item[0][1] or 0))),
        None if file.steps["runtime_mode"].null_count == file.steps.num_rows else dict(eager),
        1 - num_used / num_positions if has_p else None,
    )


def step_tables(file: StepFile) -> tuple[Table, Table]:
    """One row about the file, and its decode shapes, a row each. Counts are absent where the file has none."""
    padding = padding_of(file)
    kinds = file.num_by_kind
    h = padding.h
    num_decode = sum(h.values())
    is_counted = file.has_each_step
    whole: dict[str, Any] = {
        "steps": file.steps.num_rows if is_counted else None,
        "decode_steps": num_decode if is_counted else None,
        "decode_steps_without_b": sum(n for (_, b), n in padding.steps_by_shape.items() if b is None),
        **{f"{kind}_steps": kinds.get(kind, 0) if is_counted else None for kind in ("prefill", "mixed")},
        "other_steps": sum(count for kind, count in kinds.items() if kind not in ("decode", "prefill", "mixed"))
        if is_counted
        else None,
        "padding_p": padding.p,
        "damaged_lines": len(file.damaged),
    }
    first = (f"first damaged line: {file.first_damaged!a}",) if file.damaged else ()
    shapes = [
        (
            n,
            b,
            num_steps if is_counted else None,
            num_steps / num_decode if is_counted else None,
            h[n] if is_counted else None,
            None if padding.eager_by_shape is None else padding.eager_by_shape[n, b],
        )
        for (n, b), num_steps in padding.steps_by_shape.items()
    ]
    columns = ("n", "b", "steps", "share_of_decode_steps", "steps_with_n", "steps_without_graph")
    return (
        Table("steps", file.source, tuple(whole), (tuple(whole.values()),), notes=(*first, *file.notes)),
        Table("decode shapes", "requests n and padded size b of pure decode steps", columns, tuple(shapes)),
    )
