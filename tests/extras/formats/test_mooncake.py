"""Production requests: block sizes are checked, rows are sorted, and units of time and second files are labelled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import SpecError
from harness.extras.formats.mooncake import BY_ARRIVAL
from harness.model.traces.recording import describe_trace, open_trace
from tests.support.sound_traces import arrivals
from tests.support.trace_rows import imported, written

SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)


def ceiling(folder: Path) -> str:
    with open_trace(folder / "out.jsonl") as reader:
        return describe_trace(reader)["endless cache"].removeprefix("ceiling ")


def sharing(size: int, shared: int, prompt: int = 8192, last: int = 0) -> list[dict[str, Any]]:
    """Two prompts that share so many tokens, in blocks of a size; last: tokens of a part at their end."""
    num = prompt // size + bool(last)
    common = list(range(shared // size))
    names = [[*common, *range(10_000 * (row + 1), 10_000 * (row + 1) + num - len(common))] for row in range(2)]
    return [
        {"timestamp": 1000 * row, "input_length": prompt + last, "output_length": 50, "hash_ids": names[row]}
        for row in range(2)
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("last", [0, 7])
def test_another_block_size_is_refused_with_the_size_that_fits_and_read_where_it_is_given(
    tmp_path: Path, size: int, last: int
) -> None:
    path = written(tmp_path, sharing(size, shared=4096, last=last))
    if size != 512:
        with pytest.raises(
            SpecError, match=rf"blocks of 512 tokens.*trace import --block-tokens N \(blocks of {size} tokens fit"
        ):
            imported(path)
        assert not (tmp_path / "out.jsonl").exists()
    trace = imported(path, block_tokens=0 if size == 512 else size)
    assert trace.head.block_tokens == size
    assert ceiling(tmp_path).startswith("25.0 %")


def test_a_size_that_the_rows_contradict_is_refused_when_it_is_given_too(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="2 of 2 rows have more block names than their prompt has blocks of 128 tokens"):
        imported(written(tmp_path, sharing(64, 4096)), block_tokens=128)


def test_one_row_of_many_with_too_many_names_is_a_broken_row(tmp_path: Path) -> None:
    rows = [*sharing(512, 4096)] * 20
    rows.append({"timestamp": 50_000, "input_length": 600, "output_length": 5, "hash_ids": list(range(40))})
    trace = imported(written(tmp_path, rows))
    assert trace.num_requests == 40
    assert trace.head.broken == {"rows with more block names than their prompt has blocks": 1}


def test_a_size_that_is_a_guess_is_labelled(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 500, "output_length": 5, "hash_ids": [1]}
    label, part = imported(written(tmp_path, [row])).head.labels
    assert part == "1 x rows whose last block name is of a part of a block: it is left out"
    assert label.startswith("1 x blocks taken as 512 tokens, the format's usual size: 256, 1024, 2048")


@pytest.mark.parametrize("kind", ["mooncake", "bailian"])
def test_rows_out_of_order_of_time_arrive_when_they_say_and_it_is_said(tmp_path: Path, kind: str) -> None:
    rows = [{"timestamp": at, "input_length": 16, "output_length": 5, "hash_ids": []} for at in (900, 300, 600, 0)]
    rows = [row | ({"chat_id": at, "parent_chat_id": -1} if kind == "bailian" else {}) for at, row in enumerate(rows)]
    trace = imported(written(tmp_path, rows), time_unit_ns=NS_PER_S)
    assert [one.start_ns // NS_PER_S for one in trace.recordings] == [0, 300, 600, 900]
    assert trace.head.labels == ("3 x rows out of order of time: sorted",)


def test_conversations_of_bailian_come_at_their_arrivals_and_it_is_said(tmp_path: Path) -> None:
    row = {"input_length": 16, "output_length": 5, "hash_ids": []}
    rows = [row | {"timestamp": 300 * at, "chat_id": at, "parent_chat_id": at - 1} for at in range(3)]
    trace = imported(written(tmp_path, rows), time_unit_ns=NS_PER_S)
    assert trace.head.labels == (f"2 x {BY_ARRIVAL}",)
    assert [len(one.requests) for one in trace.recordings] == [1, 1, 1]
    del rows[0]["parent_chat_id"]  # -1, where none is given
    assert imported(written(tmp_path, rows), time_unit_ns=NS_PER_S).head == trace.head
    imported(written(tmp_path, [each | {"hash_ids": [7]} for each in rows]), time_unit_ns=NS_PER_S)
    with open_trace(tmp_path / "out.jsonl") as reader:
        assert describe_trace(reader)["turn before"] == "ceiling not known: no call follows another"


def test_rows_of_one_instant_keep_their_order(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 3000 * (place // 2), "input_length": 100 + place, "output_length": 5, "hash_ids": []}
        for place in range(6)
    ]
    trace = imported(written(tmp_path, rows))
    assert [one.requests[0].prompt_tokens for one in trace.recordings] == [100, 101, 102, 103, 104, 105]
    assert not trace.head.labels


def test_seconds_read_as_milliseconds_are_labelled_and_read_right_when_the_unit_is_given(tmp_path: Path) -> None:
    rows = [row | {"timestamp": 4.5 * place} for place, row in enumerate(arrivals())]
    path = written(tmp_path, rows)
    (label,) = imported(path).head.labels
    assert "instants are taken as milliseconds: 222 a second over 0.0225 s" in label
    assert "--time-unit" in label
    trace = imported(path, time_unit_ns=NS_PER_S)
    assert trace.recordings[-1].start_ns == 22_500 * NS_PER_MS
    assert not trace.head.labels


def test_requests_that_all_have_one_instant_are_labelled(tmp_path: Path) -> None:
    trace = imported(written(tmp_path, [row | {"timestamp": 0} for row in arrivals()]))
    assert trace.head.labels == ("6 x requests that all arrive at the same instant",)


def test_two_files_that_number_their_blocks_anew_share_nothing_and_parts_of_one_trace_do(tmp_path: Path) -> None:
    numbered: list[dict[str, Any]] = [
        {"timestamp": 3000 * row, "input_length": 1024, "output_length": 5, "hash_ids": [2 * row, 2 * row + 1]}
        for row in range(3)
    ]
    other = [row | {"timestamp": row["timestamp"] + 1500} for row in numbered]
    trace = imported(written(tmp_path, numbered, "a"), written(tmp_path, other, "b"))
    assert any("other blocks than those of the other files" in label for label in trace.head.labels)
    assert ceiling(tmp_path).startswith("0.0 %")
    later = [numbered[0] | {"timestamp": 60_000}, numbered[0] | {"timestamp": 63_000, "hash_ids": [6, 7]}]
    trace = imported(written(tmp_path, numbered, "a"), written(tmp_path, later[::-1], "b"))
    assert any("the same blocks in all files" in label for label in trace.head.labels)
    assert ceiling(tmp_path).startswith("20.0 %")


def test_names_that_are_not_chained_are_labelled_and_no_prefix_is_counted_that_is_none(tmp_path: Path) -> None:
    names = ([1, 2, 3], [3, 2, 1])
    rows = [
        {"timestamp": 2000 * row, "input_length": 1536, "output_length": 5, "hash_ids": names[row]} for row in range(2)
    ]
    trace = imported(written(tmp_path, rows))
    assert trace.head.labels == ("3 x block names that follow different names: each names its own block only",)
    assert ceiling(tmp_path).startswith("0.0 %")


def test_an_answer_of_no_token_is_no_placeholder_and_hides_none(tmp_path: Path) -> None:
    rows = [row | {"output_length": 0 if place < 2 else 90} for place, row in enumerate(arrivals())]
    assert imported(written(tmp_path, rows)).head.labels == ("2 x answers of no token taken as 1 token",)
    rows[2]["output_length"] = 1
    copy = written(tmp_path, [*rows, rows[-1] | {"timestamp": 99_000}], "b")
    for files in ([written(tmp_path, rows, "a")], [written(tmp_path, rows, "a"), copy]):
        labels = imported(*files).head.labels
        assert "2 x answers of no token taken as 1 token" in labels
        assert [label[:30] for label in labels if "placeholder" in label] == ["1 x answers of 1 or 2 tokens, "]


def test_equal_rows_of_one_file_are_kept_and_labelled_and_an_answer_of_no_token_is(tmp_path: Path) -> None:
    rows = [row | {"timestamp": 2500 * place} for place, row in enumerate(list(arrivals()) * 3)]
    rows += [rows[-1], rows[-1] | {"output_length": 0}]
    trace = imported(written(tmp_path, rows))
    assert trace.num_requests == 20
    assert trace.head.labels == (
        "1 x answers of no token taken as 1 token",
        "1 x rows equal to an earlier row in every value: kept, for rows have no id",
    )
