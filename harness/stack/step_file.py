"""The steps that a server of any stack wrote to a file, in the columns of vLLM's step log.

A damaged record is counted and quoted, never repaired. A value that a stack does not show is null.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
import pydantic_core

from harness.stack.vllm.step_log import MAX_COUNT, SCHEMA


@dataclass(frozen=True, slots=True)
class StepFile:
    """The steps of a file. source: the stack, with the version that the format was read from.

    steps: columns of ``SCHEMA``. has_each_step: False where a file names each shape once, so that there are no counts.
    notes: what the file does not show, and what its figures leave out.
    """

    source: str
    steps: pa.Table
    damaged: Sequence[bytes]
    notes: tuple[str, ...]
    has_each_step: bool = True

    @property
    def first_damaged(self) -> str:
        """The first damaged record, shortened; "" for none."""
        return self.damaged[0][:120].decode("utf-8", "replace") if self.damaged else ""

    @property
    def num_by_kind(self) -> dict[str, int]:
        """How many steps there are of each kind."""
        return dict(Counter(cast("list[str]", self.steps["kind"].to_pylist())))


def step_table(records: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Records by column name as a table of ``SCHEMA``; what a record lacks is null."""
    return pa.Table.from_pylist([dict(record) for record in records], schema=SCHEMA)


def json_object(text: bytes) -> dict[str, Any]:
    """The JSON object in ``text``; empty where there is none."""
    try:
        value = pydantic_core.from_json(text)
    except ValueError:
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT
