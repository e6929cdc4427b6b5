"""Sessions that a vLLM server recorded: drawn plans through the emulated server come back as they were played."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.measure.emulator.sessions import SessionRecorder
from harness.model.engine import EngineConfig
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.spec import ServerSpec
from harness.model.traces.account import ReadOptions
from harness.model.traces.importing import import_trace
from harness.model.traces.recording import read_trace
from harness.stacks.vllm.inside.vllm_step_log.sessions import BlockTable, Ended, Limits, SessionFile
from tests.support.recorded_sessions import (
    check_plan,
    imported,
    imported_sessions,
    planned_sessions,
    recorded,
)

NUM_PLANS = 14
SERVER = ServerSpec.model_validate(
    {"rules": "vllm-paged", "cost_model": "emulated-gpu", "slot_tokens": 2048, "block_size": 16}
)


def sessions(*turns: int, shared: int = 0, starts_ns: int = 0) -> Plan:
    """Sessions of so many turns; every prompt adds 100 tokens and every answer has 50."""

    def requests(count: int) -> Iterator[RequestPlan]:
        for turn in range(count):
            yield RequestPlan(150 * turn, 100 + shared * (turn == 0), 50, NS_PER_S)

    drawn = [
        SessionPlan(place, place * starts_ns, None, None, tuple(requests(count))) for place, count in enumerate(turns)
    ]
    return Plan("test", 1, 1, "as-drawn", shared, (300, 2000), tuple(drawn))


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_drawn_plans_come_back_with_every_session_turn_length_link_and_wait(tmp_path: Path) -> None:
    total: Counter[str] = Counter()
    for seed in range(NUM_PLANS):
        total += check_plan(seed, tmp_path / str(seed))
    assert total["plans"] == NUM_PLANS
    for what in ("aborted", "forks", "links", "evicted"):
        assert total[what] > 4, f"too few {what} to tell anything: {total}"


def test_a_file_says_nothing_of_the_tokens_but_which_prompts_begin_alike(tmp_path: Path) -> None:
    """Two servers that answer other prompts of the same lengths write the same lines."""
    plan = sessions(3, 2, shared=64)
    others = [Plan("test", seed, 1, "as-drawn", 64, (300, 2000), plan.sessions) for seed in (1, 2)]
    for place, each in enumerate(others):
        recorded(each, SERVER, tmp_path / f"{place}.jsonl")
    first, second = (lines_of(tmp_path / f"{place}.jsonl")[1:] for place in range(2))
    assert first == second
    assert {key for line in first for key in line} <= {
        *("request", "arrival_ns", "queued_ns", "prompt_tokens", "max_tokens", "like", "known", "blocks"),
        *("end", "admitted_ns", "first_token_ns", "end_ns", "cached_tokens", "generated_tokens", "preemptions"),
        "reason",
    }


def test_who_knows_a_prompt_finds_no_hash_of_it_in_the_file(tmp_path: Path) -> None:
    steps = recorded(sessions(2), SERVER, tmp_path / "a.jsonl")
    content = (tmp_path / "a.jsonl").read_text()
    keys = {int(key) for end in steps for request in end.start.arrivals for key in request.block_keys}
    assert len(keys) > 10
    numbers = {value for line in lines_of(tmp_path / "a.jsonl") for value in line.values() if isinstance(value, int)}
    assert not keys & numbers
    for key in keys:
        word = key & ((1 << 64) - 1)
        assert f"{word:016x}" not in content
        assert word.to_bytes(8, "little").hex() not in content


def test_two_files_of_one_server_share_no_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        recorded(sessions(2, 2), SERVER, tmp_path / f"{name}.jsonl")
    trace = imported(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    blocks = [set(recording.requests[0].blocks) for recording in trace.recordings]
    assert len(blocks) == 4
    assert not blocks[0] & blocks[2]
    assert all(request.base is None for recording in trace.recordings for request in recording.requests[:1])


def test_a_part_of_days_is_imported_by_when_sessions_begin(tmp_path: Path) -> None:
    recorded(sessions(2, 2, 2, 2, starts_ns=3600 * NS_PER_S), SERVER, tmp_path / "a.jsonl")
    options = ReadOptions(since_ns=1800 * NS_PER_S, until_ns=3 * 3600 * NS_PER_S)
    head, _ = import_trace([tmp_path / "a.jsonl"], tmp_path / "t.jsonl", name="part", options=options)
    starts_s = [recording.start_ns / NS_PER_S for recording in read_trace(tmp_path / "t.jsonl").recordings]
    assert starts_s == pytest.approx([1800, 5400], abs=1)
    assert head.dropped == {"requests of sessions that began before --since or after --until": 4}


def test_what_had_not_ended_and_what_came_before_the_file_is_counted(tmp_path: Path) -> None:
    recorded(sessions(3), SERVER, tmp_path / "all.jsonl")
    header, *rest = (tmp_path / "all.jsonl").read_text().splitlines()
    later = tmp_path / "later.jsonl"
    later.write_text("\n".join([header, *rest[1:-1]]))
    trace = imported(later)
    assert trace.head.passed["ends of requests that came before the files"] == 1
    assert trace.head.dropped == {"requests that had not ended when their file did": 1}
    assert trace.num_requests == 1
    assert any("blocks of a request that is not in the files" in label for label in trace.head.labels)


@pytest.mark.parametrize("cut", [40, 300, 700])
def test_a_killed_server_leaves_a_file_that_reads_to_its_last_whole_line(tmp_path: Path, cut: int) -> None:
    recorded(sessions(3, 3), SERVER, tmp_path / "a.jsonl")
    path = tmp_path / "a.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    trace = imported(path)
    whole = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
    assert trace.num_requests == sum("end" in line for line in whole) < 6
    assert trace.head.broken == {"no JSON object": 1}


def test_files_rotate_by_size_and_a_session_that_goes_on_after_that_is_labelled(tmp_path: Path) -> None:
    recorded(sessions(4, 4, 4), SERVER, tmp_path / "a.jsonl", Limits(file_bytes=4000))
    files = sorted(tmp_path.glob("a*.jsonl"))
    assert len(files) > 1
    assert all(path.stat().st_size <= 4000 for path in files)
    trace = imported(*files)
    assert trace.num_requests == 12
    assert any("after the first of a server" in label for label in trace.head.labels)
    assert trace.head.dropped == {}
    handles = [{line["request"] for line in lines_of(path) if "request" in line} for path in files]
    for path, mine in zip(files, handles, strict=True):
        # No request refers to one of another file.
        assert {line["like"] for line in lines_of(path) if "request" in line} <= mine | {-1}


def test_at_the_limit_of_disk_the_recorder_ends_and_says_so_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="limit of disk"):
        recorded(sessions(4, 4, 4), SERVER, tmp_path / "a.jsonl", Limits(disk_bytes=3500))
    assert lines_of(tmp_path / "a.jsonl")[-1] == {"stopped": "the limit of disk is reached"}
    assert imported(tmp_path / "a.jsonl").num_requests > 3
    # What earlier starts have written counts too.
    with pytest.raises(OSError, match="limit of disk"):
        SessionFile(str(tmp_path / "a.jsonl"), {}, Limits(disk_bytes=3500))


def play_alone(file: SessionFile, numbers: range) -> None:
    """Requests with a common first block, each over before the next comes."""
    for number in numbers:
        hashes = [b"system", number.to_bytes(4, "big")]
        file.came(number, (number, number), (36, 1), hashes)
        file.ended(number, Ended(number, number, number, 0, 1, 0, "length"), hashes)
    file.flush()


def test_a_file_that_is_copied_and_emptied_goes_on_with_a_header_of_its_own(tmp_path: Path) -> None:
    path, copied = tmp_path / "a.jsonl", tmp_path / "copied.jsonl"
    file = SessionFile(str(path), {"engine": 0, "block_tokens": 16})
    play_alone(file, range(3))
    copied.write_bytes(path.read_bytes())
    with path.open("r+b") as emptied:
        emptied.truncate()
    play_alone(file, range(3, 6))
    play_alone(file, range(6, 7))
    assert ["part" in line for line in lines_of(path)] == [True, *([False] * 8)]
    trace = imported(copied, path)
    assert trace.num_requests == 7
    assert trace.head.broken == {}


@pytest.mark.parametrize("is_replaced", [False, True])
def test_after_its_file_was_removed_the_recorder_writes_the_next_one(tmp_path: Path, is_replaced: bool) -> None:
    path = tmp_path / "a.jsonl"
    file = SessionFile(str(path), {"engine": 0, "block_tokens": 16})
    play_alone(file, range(3))
    path.unlink()
    if is_replaced:
        path.touch()
    play_alone(file, range(3, 6))
    play_alone(file, range(6, 7))
    (now,) = (each for each in tmp_path.iterdir() if each.stat().st_size)
    assert ["part" in line for line in lines_of(now)] == [True, *([False] * 8)]
    assert imported(now).num_requests == 4


def packed(path: Path) -> None:
    """As gzip does: the packed file is made, then the other removed."""
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


def test_packed_files_count_at_the_limit_of_disk_and_keep_their_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for _start in range(3):
        SessionFile(str(path), {"pad": "x" * 100})
    for name in ("a.jsonl", "a.1.jsonl"):
        packed(tmp_path / name)
    SessionFile(str(path), {})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.1.jsonl.gz", "a.2.jsonl", "a.3.jsonl", "a.jsonl.gz"]
    for name in ("a.2.jsonl", "a.3.jsonl"):
        packed(tmp_path / name)
    used = sum(each.stat().st_size for each in tmp_path.iterdir())
    with pytest.raises(OSError, match="limit of disk"):
        SessionFile(str(path), {}, Limits(disk_bytes=used + 400))


def test_the_number_of_a_file_that_was_taken_away_is_not_given_again_while_a_later_one_is_there(tmp_path: Path) -> None:
    for _start in range(4):
        SessionFile(str(tmp_path / "a"), {})
    for name in ("a.1", "a.2"):
        (tmp_path / name).unlink()
    SessionFile(str(tmp_path / "a"), {})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "a.3", "a.4"]


def test_a_full_disk_ends_in_a_whole_line(tmp_path: Path) -> None:
    file = SessionFile(str(tmp_path / "a.jsonl"), {})
    file.came(0, (1, 1), (16, 4), [b"a"])
    file.flush()
    with Path("/dev/full").open("wb") as full:
        file._file._descriptor = full.fileno()  # pyright: ignore[reportPrivateUsage]
        file.came(1, (2, 2), (16, 4), [b"a"])
        with pytest.raises(OSError, match="No space"):
            file.flush()
    assert [line.get("request") for line in lines_of(tmp_path / "a.jsonl")] == [None, 0]


def test_the_table_forgets_the_blocks_that_were_used_least_and_never_refers_to_what_it_forgot(tmp_path: Path) -> None:
    plan = sessions(*(5 for _ in range(12)), starts_ns=NS_PER_S // 2)
    recorded(plan, SERVER, tmp_path / "small.jsonl", Limits(blocks=60))
    recorded(plan, SERVER, tmp_path / "all.jsonl")
    small, whole = imported(tmp_path / "small.jsonl"), imported(tmp_path / "all.jsonl")
    assert small.num_requests == whole.num_requests == 60
    assert len(small.recordings) > len(whole.recordings) == 12
    links = {(request.prompt_tokens, request.keep_tokens) for each in whole.recordings for request in each.requests}
    kept = {(request.prompt_tokens, request.keep_tokens) for each in small.recordings for request in each.requests}
    assert kept - {(prompt, 0) for prompt, _ in links} <= links


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 20), st.integers(0, 5)), min_size=1, max_size=30))
def test_the_table_finds_what_a_walk_over_all_earlier_requests_finds(lengths: list[tuple[int, int, int]]) -> None:
    table, chains = BlockTable(1 << 20), [tuple[int, ...]()]
    first: dict[tuple[int, ...], int] = {}
    for request, (kept, added, answered) in enumerate(lengths):
        # Each goes on from a part of an earlier request.
        began = chains[(kept * 7) % len(chains)]
        prompt = (*began[: len(began) - kept % 3], *(100 * request + place for place in range(added)))
        whole = (*prompt, *(100 * request + 50 + place for place in range(answered)))
        for chain, before in ((prompt, 0), (whole, len(prompt))):
            hashes = [chain[: place + 1] for place in range(len(chain))]
            known = sum(each in first for each in hashes)
            assert table.add(request, hashes, before) == (first[hashes[known - 1]] if known else -1, known)
            first |= {each: request for each in hashes if each not in first}
        chains.append(whole)


def test_several_engines_and_a_restart_are_read_in_one_import(tmp_path: Path) -> None:
    plan = sessions(2, 2)
    recorded(plan, SERVER, tmp_path / "a.jsonl")
    recorded(plan, SERVER, tmp_path / "a.jsonl")
    files = sorted(tmp_path.glob("*.jsonl"))
    assert [path.name for path in files] == ["a.1.jsonl", "a.jsonl"]
    header, *rest = (tmp_path / "a.jsonl").read_text().splitlines()
    settings = json.loads(header)
    later = settings | {"recorder": "other", "boot": "another", "opened_unix_ns": settings["opened_unix_ns"] + NS_PER_S}
    (tmp_path / "b.jsonl").write_text("\n".join([json.dumps(later), *rest]))
    trace = imported(tmp_path / "a.1.jsonl", tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert len(trace.recordings) == 6
    starts_s = sorted(recording.start_ns / NS_PER_S for recording in trace.recordings)
    assert starts_s == pytest.approx([0, 0, 0, 0, 1, 1], abs=0.5)
    assert any("clock of the day" in label for label in trace.head.labels)


def test_without_prefix_caching_there_are_arrivals_and_lengths_only_and_that_is_said(tmp_path: Path) -> None:
    plan = sessions(3)
    server = SERVER.model_copy(update={"prefix_caching": False})
    steps = recorded(plan, server, tmp_path / "a.jsonl")
    trace = imported(tmp_path / "a.jsonl")
    assert len(trace.recordings) == 3
    assert [recording.requests[0].prompt_tokens for recording in trace.recordings] == [100, 250, 400]
    assert len(planned_sessions(plan, steps)) == 1
    assert any("without prefix caching" in label for label in trace.head.labels)


@pytest.mark.parametrize("others", [0, 1])
def test_an_answer_that_fills_no_block_is_continued_where_nobody_else_begins_so(tmp_path: Path, others: int) -> None:
    turns = (RequestPlan(0, 96, 5, 0), RequestPlan(101, 60, 50, 0), RequestPlan(211, 60, 50, 0))
    longer = (RequestPlan(0, 300, 5, 0),)
    another = tuple(SessionPlan(1 + place, 9 * NS_PER_S, None, None, longer) for place in range(others))
    plan = Plan("test", 1, 1, "as-drawn", 96 * others, (300, 2000), (SessionPlan(0, 0, None, None, turns), *another))
    recorded(plan, SERVER, tmp_path / "a.jsonl")
    trace = imported(tmp_path / "a.jsonl")
    kept = [[request.keep_tokens for request in each.requests] for each in trace.recordings]
    if others:
        assert kept == [[0], [0, 211], [0]]
        assert any("not with its answer" in label for label in trace.head.labels)
        heads = [each.requests[0].blocks[:6] for each in trace.recordings]
        assert heads[0] == heads[1] == heads[2], "its blocks are shared"
    else:
        assert kept == [[0, 101, 211]]
        assert any("taken to continue it" in label for label in trace.head.labels)


@pytest.mark.parametrize("early_ms", [0, 200, 5000])
def test_a_clock_of_the_day_that_is_off_moves_waits_and_no_session(tmp_path: Path, early_ms: int) -> None:
    """An API server on another machine stamps arrivals by a clock that is behind: the engine's order still holds."""
    plan = sessions(4, 4, 4, starts_ns=7 * NS_PER_S)
    steps = recorded(plan, SERVER, tmp_path / "a.jsonl")
    lines = lines_of(tmp_path / "a.jsonl")
    for line in lines[1:]:
        if line.get("request", 0) % 3:
            line["arrival_ns"] = max(line["arrival_ns"] - early_ms * 1_000_000, 0)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = imported(tmp_path / "a.jsonl")
    links = [[turn._replace(wait_ns=0) for turn in turns] for _start, turns in imported_sessions(trace)]
    assert links == [[turn._replace(wait_ns=0) for turn in turns] for _start, turns in planned_sessions(plan, steps)]
    assert min(recording.start_ns for recording in trace.recordings) == 0
    num_early = sum(
        turn.base >= 0 and turn.wait_ns == 0 for _start, turns in imported_sessions(trace) for turn in turns
    )
    said = [label.split(" x ")[0] for label in trace.head.labels if "they wait 0 s" in label]
    assert said == [str(num_early)] * bool(num_early)
    assert bool(num_early) == (early_ms > 1000)
    assert not any("not with its answer" in label or "keep a part" in label for label in trace.head.labels)


def test_a_folder_without_permission_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SessionRecorder(EngineConfig.from_server(SERVER), tmp_path / "no" / "a.jsonl")
    with pytest.raises(SpecError):
        imported(tmp_path / "no" / "a.jsonl")


def test_a_million_requests_take_no_more_memory_than_the_table_has_room(tmp_path: Path) -> None:
    file = SessionFile(str(tmp_path / "a.jsonl"), {}, Limits(blocks=1000))
    for number in range(20_000):
        hashes = [bytes([place]) + number.to_bytes(4, "big") for place in range(4)]
        file.came(number, (number, number), (64, 1), hashes)
        file.ended(number, Ended(number, number, number, 0, 1, 0, "length"), hashes)
    assert len(file._table._new) + len(file._table._old) <= 1000 + 4  # pyright: ignore[reportPrivateUsage]
