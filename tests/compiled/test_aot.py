"""Machine code is called without numba, from files that are made once and fit what they are called with."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

from harness.compiled import bind, by_kind, compiled, jit
from harness.compiled.aot import kind_of
from harness.compiled.records import IntArray, new_records
from harness.model.engine.scheduler import warm_up

STEP = """
import sys
from harness.model.engine.scheduler import warm_up
warm_up()
print("numba" in sys.modules)
"""


class Pair:
    left: int
    right: int


@compiled
def first_of(numbers: Any, place: int) -> int:
    return numbers[place]


@compiled
def corner_of(square: IntArray, row: int, column: int) -> int:
    return square[row, column]


@compiled
def length_of(table: Any) -> int:
    return len(table)


class Slots(NamedTuple):
    held: IntArray


class Blocks(NamedTuple):
    held: IntArray


@jit
def held_slots(memory: Slots) -> int:
    return memory.held[0]


@jit
def held_blocks(memory: Blocks) -> int:
    return 16 * memory.held[0]


held_tokens = by_kind({Slots: held_slots, Blocks: held_blocks})


@compiled
def held(memory: Slots | Blocks, more: int) -> int:
    return held_tokens(memory) + more


@compiled
def write(numbers: IntArray, number: int) -> None:
    numbers[0] = number


def test_a_process_that_finds_machine_code_steps_the_engine_without_numba() -> None:
    warm_up()
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_each_kind_of_table_has_code_of_its_own_and_each_table_its_own_values() -> None:
    line, square = np.arange(4, dtype=np.int64), np.arange(10, 16, dtype=np.int64).reshape(2, 3)
    assert [first_of(numbers, 3) for numbers in (line, line + 100)] == [3, 103]
    assert [corner_of(square, 1, 2), corner_of(square + 100, 1, 0), corner_of(square, 0, 2)] == [15, 113, 12]
    assert [length_of(table) for table in (line, square, new_records(Pair, 5), line[:0])] == [4, 2, 5, 0]


def test_the_kind_of_tables_chooses_the_function_that_is_called() -> None:
    memory = np.array([3], dtype=np.int64)
    assert [held(Slots(memory), 1), held(Blocks(memory), 2)] == [4, 50]


def test_tables_of_one_row_or_column_or_none_run_the_code_of_longer_ones() -> None:
    assert len({repr(kind_of(np.zeros(shape))) for shape in [(3, 4), (1, 4), (3, 1), (1, 1), (0, 4)]}) == 1


def test_a_table_that_does_not_lie_row_after_row_is_refused() -> None:
    for table in (np.arange(12).reshape(4, 3).T, np.arange(16)[::2]):
        with pytest.raises(TypeError, match="row after row"):
            length_of(table)


def test_an_array_of_other_numbers_than_int64_is_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        length_of(np.zeros(3, dtype=np.int32))


def test_a_function_without_a_result_gives_none_and_changes_its_memory() -> None:
    numbers = np.zeros(2, dtype=np.int64)
    assert write(numbers, -(2**63)) is None
    assert numbers.tolist() == [-(2**63), 0]


def test_a_function_with_bound_tables_takes_the_numbers_that_are_left() -> None:
    numbers = np.zeros(2, dtype=np.int64)
    bound = bind(write, numbers)
    bound(7)
    assert numbers.tolist() == [7, 0]
    assert bind(first_of, numbers)(0) == 7


def test_threads_that_call_with_tables_of_other_kinds_each_run_their_own_code() -> None:
    tables: list[Any] = [np.arange(8, dtype=np.int64), np.arange(12).reshape(3, 4), new_records(Pair, 5)]

    def lengths_of(table: Any) -> set[int]:
        return {length_of(table) for _ in range(500)}

    with ThreadPoolExecutor(3) as threads:
        lengths = list(threads.map(lengths_of, tables))
    assert lengths == [{8}, {3}, {5}]


def test_memory_of_a_table_is_not_taken_for_memory_of_numbers() -> None:
    with pytest.raises(TypeError, match="int64"):
        first_of(new_records(Pair, 1), 0)
