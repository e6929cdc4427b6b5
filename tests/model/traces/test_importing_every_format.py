"""What no format promises, over every reader: repeated files and rows, order, whole lines, placeholders, bytes."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from harness.errors import SpecError
from harness.model.traces.importing import TRACE_FORMATS
from harness.model.traces.links import MAY_ASK, UNANSWERED
from harness.model.traces.recording import RecordedRequest, TraceFile
from tests.support.mutated_accounts import ROWS_INSIDE
from tests.support.sound_traces import SESSIONS, SOUND, TURNS, Lines
from tests.support.trace_rows import imported

KINDS = sorted(TRACE_FORMATS)
NUM_REQUESTS = SESSIONS * TURNS
# Of which every file is labelled.
ESTIMATED = ("agentic-mooncake", "atif", "csv", "lmcache", "otel", "vllm-sessions", "weka")
DOCUMENTS = ("atif", "gemini-cli", "opencode", "openhands", "swe-agent", "weka")  # a row is a whole session


def written(folder: Path, kind: str, lines: Lines, name: str = "in") -> Path:
    path = folder / f"{name}.{'csv' if kind == 'csv' else 'jsonl'}"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def said(trace: TraceFile) -> bool:
    return bool(trace.head.dropped or trace.head.broken or trace.head.labels)


def content(trace: TraceFile) -> list[tuple[int, tuple[RecordedRequest, ...]]]:
    """Recordings without their names, which may depend on where a row stands."""
    return sorted((one.start_ns, one.requests) for one in trace.recordings)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_of_a_sound_file_that_is_imported_whole_its_end_alone_is_said(tmp_path: Path, kind: str) -> None:
    trace = imported(written(tmp_path, kind, SOUND[kind]()))
    assert trace.head.source_format == kind
    assert trace.num_requests == NUM_REQUESTS
    assert not trace.head.dropped
    assert not trace.head.broken
    labels = [label for label in trace.head.labels if MAY_ASK not in label]
    assert kind in ESTIMATED or labels in ([], [f"2 x {UNANSWERED}"], [f"1 x {UNANSWERED}"])
    assert any(request.wait_ns for one in trace.recordings for request in one.requests) or kind in (
        "mooncake",
        "bailian",
    )


HAVE_BARE_TIMES = ("agentic-mooncake", "bailian", "mooncake", "opencode", "swe-agent")


def test_a_unit_of_time_that_is_given_is_that_of_the_times_or_is_refused(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind, SOUND[kind]())
    usual = content(imported(path))
    if kind in HAVE_BARE_TIMES:
        assert content(imported(path, time_unit_ns=50_000_000)) != usual
    else:
        with pytest.raises(SpecError, match="Leave --time-unit out"):
            imported(path, time_unit_ns=50_000_000)


@pytest.mark.parametrize("ending", ["", "\n"])
def test_a_file_given_again_under_another_name_adds_nothing_and_is_counted(
    tmp_path: Path, kind: str, ending: str
) -> None:
    first = written(tmp_path, kind, SOUND[kind]())
    alone = content(imported(first))
    copy = first.with_name(f"copy{first.suffix}")
    copy.write_text(first.read_text() + ending)
    trace = imported(first, first, copy)
    assert content(trace) == alone
    assert sum(trace.head.dropped.values()) > 1


def test_an_older_copy_of_a_file_adds_nothing_and_is_counted(tmp_path: Path, kind: str) -> None:
    if kind == "csv":
        pytest.skip("a session that lacks rounds is another session: tested by itself")
    lines = SOUND[kind]()
    whole, older = written(tmp_path, kind, lines), written(tmp_path, kind, lines[: len(lines) * 2 // 3], "a-backup")
    alone = content(imported(whole))
    for files in ((whole, older), (older, whole)):
        trace = imported(*files)
        assert content(trace) == alone
        assert trace.head.dropped


def test_rows_that_stand_twice_in_their_file_are_dropped_or_labelled(tmp_path: Path, kind: str) -> None:
    lines = SOUND[kind]()
    alone = content(imported(written(tmp_path, kind, lines)))
    twice = [*lines[:1], *(line for line in lines[1:] for _ in range(2))]
    trace = imported(written(tmp_path, kind, twice))
    if kind == "mooncake":
        assert trace.head.labels, "rows have no id: both are kept, and labelled"
    else:
        assert content(trace) == alone
        assert said(trace) or kind == "codex", "a token count is often told twice"


@pytest.mark.parametrize("seed", range(2))
def test_rows_in_any_order_give_the_same_requests(tmp_path: Path, kind: str, seed: int) -> None:
    lines = SOUND[kind]()
    alone = content(imported(written(tmp_path, kind, lines)))
    head, rows = (lines[:1], lines[1:]) if kind == "csv" else ([], lines)
    random.Random(seed).shuffle(rows)
    trace = imported(written(tmp_path, kind, [*head, *rows]))
    assert content(trace) == alone
    keeps_order = kind in (
        "agentic-mooncake",
        "otel",
        *DOCUMENTS,
    )  # a row says itself when it came, or what it waits for
    assert said(trace) or keeps_order or rows == lines


def renamed(lines: Lines) -> Lines:
    """The same rows as other sessions of a later time."""
    changes = (
        ("s0", "t0"),
        ("s1", "t1"),
        ('"one"', '"two"'),
        ("2026-03-01T10", "2026-03-01T12"),
        ("17723592", "17723692"),
        ("17723593", "17723693"),
    )
    changes += (
        ('"timestamp": 60000', '"timestamp": 90000'),
        ('"0-', '"7-'),
        ('"1-', '"8-'),
        ('request_id": "0', 'request_id": "a'),
    )
    changes += (('trace_id": "0', 'trace_id": "a'), ('recorder": "s0', 'recorder": "s2'))
    for old, new in changes:
        lines = [line.replace(old, new) for line in lines]
    return lines


def test_two_recordings_merged_or_interleaved_in_one_file_are_both_there(tmp_path: Path, kind: str) -> None:
    if kind in ("mooncake", "bailian"):
        pytest.skip("rows of no session: any two files are one trace")
    head, one = (SOUND[kind]()[:1], SOUND[kind]()[1:]) if kind == "csv" else ([], SOUND[kind]())
    other = renamed(one)
    assert other != one
    apart = sorted(requests for _, requests in content(imported(written(tmp_path, kind, head + one)))) * 2
    merged = imported(written(tmp_path, kind, [*head, *one, *other]))
    assert sorted(requests for _, requests in content(merged)) == sorted(apart)
    mixed = [line for pair in zip(one, other, strict=True) for line in pair]
    interleaved = imported(written(tmp_path, kind, [*head, *mixed]))
    if kind in ("codex", "vllm-sessions"):
        assert said(interleaved), "its rows do not name their session"
    else:
        assert sorted(requests for _, requests in content(interleaved)) == sorted(apart)


def test_a_row_that_is_cut_off_is_counted(tmp_path: Path, kind: str) -> None:
    lines = SOUND[kind]()
    assert imported(written(tmp_path, kind, [*lines[:-1], lines[-1][: len(lines[-1]) // 2]])).head.broken


def test_a_packed_file_whose_end_is_missing_is_refused(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind, SOUND[kind]())
    path.write_bytes(gzip.compress(path.read_bytes())[:-12])
    with pytest.raises(SpecError, match=r"cannot be read (to its end|as CSV)"):
        imported(path)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("kind", ["mooncake", "bailian"])
def test_rows_without_sessions_of_two_recordings_in_one_file_are_there_or_counted_and_labelled(
    tmp_path: Path, kind: str
) -> None:
    one = SOUND[kind]()
    other = renamed(one)[1:]
    interleaved = [line for pair in zip(one, reversed([*other, one[0]]), strict=True) for line in pair]
    for rows in ([*one, *other, one[0]], interleaved):
        trace = imported(written(tmp_path, kind, rows))
        assert trace.num_requests + sum(trace.head.dropped.values()) == len(rows)
        assert said(trace), "their instants go back, or an id stands twice"


def test_bytes_around_the_rows_change_nothing(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind, SOUND[kind]())
    alone, plain = content(imported(path)), path.read_bytes()
    for changed in (b"\xef\xbb\xbf" + plain, plain.replace(b"\n", b"\r\n"), gzip.compress(plain), plain.rstrip()):
        path.write_bytes(changed)
        assert content(imported(path)) == alone


def test_an_empty_file_beside_others_is_counted_and_alone_is_refused_as_empty(tmp_path: Path, kind: str) -> None:
    path, empty = written(tmp_path, kind, SOUND[kind]()), written(tmp_path, kind, [], "empty")
    if kind != "csv":
        assert imported(path, empty).head.dropped == {"files in no known format": 1}
    with pytest.raises(SpecError, match=r"is empty|no column"):
        imported(empty)


def test_many_answers_of_a_token_or_two_are_labelled(tmp_path: Path, kind: str) -> None:
    keys = {"codex": '"output_tokens": 100', "tracelab": '"output_tokens": 100', "weka": '"out": 90', "csv": ",90,"}
    keys |= {"vllm-sessions": '"generated_tokens": 60'}
    keys |= {"opencode": '"output": 100, "reasoning": 20', "gemini-cli": '"output": 80, "thoughts": 20'}
    keys |= {"qwen-code": '"candidatesTokenCount": 100'}
    counted = dict.fromkeys(("atif", "openhands", "swe-agent"), '"completion_tokens": 100')
    key = counted | {"claude": '"output_tokens": 400', "otel": '"gen_ai.usage.output_tokens": 100'} | keys
    old = key.get(kind, '"output_length": 60')
    lines = [line.replace(old, re.sub(r"\d+(?=,?$)|(?<=: )\d+(?=, )", "1", old)) for line in SOUND[kind]()]
    assert lines != SOUND[kind]()
    assert any("placeholder" in label for label in imported(written(tmp_path, kind, lines)).head.labels)


def test_a_key_that_no_reader_knows_changes_nothing_and_is_named(tmp_path: Path, kind: str) -> None:
    if not {"line", "row"} & TRACE_FORMATS[kind].known.keys():
        pytest.skip("its keys are free, or the harness writes them")
    usual = content(imported(written(tmp_path, kind, SOUND[kind]())))
    if kind == "csv":
        head, *lines = SOUND[kind]()
        lines = [f"{head},pausedMs", *(f"{line},7" for line in lines)]
    else:
        lines = [json.dumps(with_a_key(kind, json.loads(line))) for line in SOUND[kind]()]
    trace = imported(written(tmp_path, kind, lines))
    assert content(trace) == usual
    assert any(
        re.fullmatch(r"\d+ x rows with a key that is not known here: pausedMs", each) for each in trace.head.labels
    )


def with_a_key(kind: str, row: Any) -> Any:
    inside = {"weka": None}.get(kind, ROWS_INSIDE.get(kind))
    if inside is None or inside not in row or kind == "swe-agent":
        return row | {"pausedMs": 7}
    return row | {inside: [each | {"pausedMs": 7} for each in row[inside]]}


def test_every_format_lists_what_it_does_not_promise(kind: str) -> None:
    assert len(TRACE_FORMATS[kind].not_promised) >= 3
