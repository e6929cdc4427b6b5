"""The observer in vLLM's engine core records the requests of sessions, beside its steps or alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.measure.client import replay_state
from harness.stacks.vllm.core_steps import read_core_steps
from harness.stacks.vllm.inside import vllm_step_log
from harness.stacks.vllm.inside.vllm_step_log.sessions import UNUSUAL
from harness.stacks.vllm.launch import CORE_STEPS
from harness.stacks.vllm.step_log import read_step_log
from tests.stacks.vllm.test_core_steps import run_core

SESSIONS = "VLLM_SESSIONS_FILE"
# A request as vLLM's own has it: hashes of its whole blocks, which grow with its answer.
TURNS = """
class Status:
    def __init__(self, name): self.name = name

def request(name, tokens, hashes, arrival_time=0.0):
    made = Space(request_id=name, prompt=list(range(tokens)), num_tokens=tokens, num_prompt_tokens=tokens)
    made.block_hashes, made.max_tokens, made.num_output_tokens = list(hashes), 40, 0
    made.arrival_time, made.status = arrival_time, Status("RUNNING")
    return made

def play(scheduler, made, more, reason="FINISHED_LENGTH_CAPPED", tokens=24):
    scheduler.add_request(made)
    step = scheduler.schedule()
    made.num_output_tokens = 1
    scheduler.update_from_output(step, ran())
    step = scheduler.schedule()
    made.num_output_tokens, made.status = tokens, Status(reason)
    made.block_hashes += more
    scheduler.update_from_output(step, ran(made.request_id))

scheduler = core()
one = [b"system", b"user"]
play(scheduler, request("a", 36, one), [b"answer"])
adapted = request("b", 70, [*one, b"answer", b"tool"])
adapted.lora_request, adapted.priority = Space(lora_name="private"), 0
play(scheduler, adapted, [b"second"], "FINISHED_STOPPED")
play(scheduler, request("cmpl-rbln-harness-1-0-0", 36, [b"system", b"another"]), [b"third"], "FINISHED_ABORTED")
scheduler.schedule()
"""


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_request_says_whose_blocks_it_begins_with_and_how_it_ended(tmp_path: Path) -> None:
    done = run_core(tmp_path, TURNS, **{SESSIONS: str(tmp_path / "s.jsonl")})

    assert (done.returncode, done.stderr) == (0, "")
    header, *lines = lines_of(tmp_path / "s.jsonl")
    assert (header["vllm_sessions"], header["block_tokens"], header["engine"]) == (1, 16, 0)
    assert header["effective"]["max_num_seqs"] == 4
    came, ended = lines[::2], lines[1::2]
    assert [(line["request"], line["like"], line["known"], line["blocks"]) for line in came] == [
        (0, -1, 0, 2),
        (1, 0, 3, 4),
        (2, 0, 1, 2),
    ]
    assert [(line["end"], line["reason"], line["blocks"]) for line in ended] == [
        (0, "length", 3),
        (1, "stop", 5),
        (2, "abort", 3),
    ]
    assert [line["prompt_tokens"] for line in came] == [36, 70, 36]
    assert ["harness" in line for line in came] == [False, False, True]
    assert [[name for name in UNUSUAL if name in line] for line in came] == [[], ["lora"], []]
    assert replay_state.OWN_REQUESTS == vllm_step_log.OWN_REQUESTS
    for before, after in zip(came, ended, strict=True):
        assert before["arrival_ns"] == before["queued_ns"] < after["admitted_ns"]
        assert after["admitted_ns"] < after["first_token_ns"] < after["end_ns"]
        assert (after["generated_tokens"], after["cached_tokens"]) == (24, 16)
    assert not re.search("system|rbln-harness|private", (tmp_path / "s.jsonl").read_text())


def test_beside_the_steps_it_has_their_instants(tmp_path: Path) -> None:
    files = {SESSIONS: str(tmp_path / "s.jsonl"), **CORE_STEPS.variables(tmp_path / "core.jsonl")}
    done = run_core(tmp_path, TURNS, **files)

    assert (done.returncode, done.stderr) == (0, "")
    requests = read_core_steps((tmp_path / "core.jsonl").read_bytes()).requests.to_pylist()
    came = [line for line in lines_of(tmp_path / "s.jsonl") if "request" in line]
    ended = [line for line in lines_of(tmp_path / "s.jsonl") if "end" in line]
    assert [line["queued_ns"] for line in came] == [request["queued_ns"] for request in requests]
    assert [line["admitted_ns"] for line in ended] == [request["admitted_ns"] for request in requests]


def test_the_clock_of_the_day_says_when_a_request_came_unless_it_was_set_meanwhile(tmp_path: Path) -> None:
    script = TURNS.partition("scheduler = core()")[0] + (
        "import time\n"
        "scheduler = core()\n"
        "for age in (0.5, -3600, 3600):\n"
        "    play(scheduler, request(str(age), 20, [], time.time() - age), [])\n"
    )
    run_core(tmp_path, script, **{SESSIONS: str(tmp_path / "s.jsonl")})

    came = [line for line in lines_of(tmp_path / "s.jsonl") if "request" in line]
    first, ahead, long_ago = (line["queued_ns"] - line["arrival_ns"] for line in came)
    assert first >= 500_000_000
    assert (ahead, long_ago) == (0, 0)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"VLLM_SESSIONS_DISK_BYTES": "1400"}, "stopped after [0-9]+ requests: OSError: the limit of disk is reached"),
        ({"VLLM_SESSIONS_FILE": "/proc/no/s.jsonl"}, "not observing: FileNotFoundError"),
        ({"VLLM_SESSIONS_FILE_BYTES": "much"}, "not observing: ValueError"),
        # Every line would begin a file, which holds its header alone.
        ({"VLLM_SESSIONS_FILE_BYTES": "100"}, "not observing: ValueError: .* is 100, and the least is 65536"),
    ],
)
def test_what_goes_wrong_is_a_line_and_the_server_goes_on(
    tmp_path: Path, variables: dict[str, str], reason: str
) -> None:
    files = {SESSIONS: str(tmp_path / "s.jsonl"), **CORE_STEPS.variables(tmp_path / "core.jsonl"), **variables}
    done = run_core(tmp_path, TURNS + "print(len(scheduler.running))\n", **files)

    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert done.stderr.count("[SESSIONS]") == 1
    assert re.search(rf"\[SESSIONS\] {reason}", done.stderr)
    # The other record goes on too.
    assert len(read_core_steps((tmp_path / "core.jsonl").read_bytes()).steps) == 6


def test_a_recorder_that_stops_raises_nothing_into_the_server_though_its_last_lines_cannot_be_written(
    tmp_path: Path,
) -> None:
    script = TURNS.partition("scheduler = core()")[0] + (
        "from vllm.sched import Scheduler\n"
        "decide = Scheduler.schedule\n"
        "def of_an_unknown_version(self):\n"
        "    output = decide(self)\n"
        "    output.scheduled_new_reqs = 5\n"
        "    return output\n"
        "Scheduler.schedule = of_an_unknown_version\n"
        "scheduler = core()\n"
        "made = request('a', 36, [b'system'])\n"
        "made.max_tokens = '\\ud800'\n"
        "scheduler.add_request(made)\n"
        "scheduler.schedule()\n"
        "print('goes on')\n"
    )
    done = run_core(tmp_path, script, **{SESSIONS: str(tmp_path / "s.jsonl")})
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr
    assert re.search(r"\[SESSIONS\] stopped after 1 requests: TypeError", done.stderr)


def test_the_kinds_of_kv_memory_are_among_the_settings(tmp_path: Path) -> None:
    script = TURNS.partition("scheduler = core()")[0] + (
        "from vllm.sched import Scheduler\n"
        "class FullAttentionSpec: pass\n"
        "Scheduler.kv_cache_config = Space(kv_cache_groups=[Space(kv_cache_spec=FullAttentionSpec())])\n"
        "core(num_hash_lookahead_tokens=3)\n"
    )
    run_core(tmp_path, script, **{SESSIONS: str(tmp_path / "s.jsonl"), **CORE_STEPS.variables(tmp_path / "core.jsonl")})
    effective = lines_of(tmp_path / "s.jsonl")[0]["effective"]
    assert effective["kv_groups"] == ["FullAttentionSpec"]
    assert effective["num_hash_lookahead_tokens"] == 3
    log = read_step_log((tmp_path / "core.jsonl").read_bytes())
    assert log.engine_settings == {
        "scheduler": "vllm.sched.Scheduler",
        "kv_groups": ["FullAttentionSpec"],
        "num_hash_lookahead_tokens": 3,
    }
    assert log.unknown_rules == "its drafter reads several tokens ahead"


def test_where_the_server_copies_cached_tokens_they_are_the_sum_of_the_copies(tmp_path: Path) -> None:
    script = (
        "from vllm.sched import Scheduler\n"
        "decide = Scheduler.schedule\n"
        "def copied(self):\n"
        "    output = decide(self)\n"
        "    output.cached_length = [16, 128]\n"
        "    return output\n"
        "Scheduler.schedule = copied\n"
    )
    run_core(tmp_path, script + TURNS, **{SESSIONS: str(tmp_path / "s.jsonl")})
    ended = [line for line in lines_of(tmp_path / "s.jsonl") if "end" in line]
    assert [line["cached_tokens"] for line in ended] == [144] * 3


def test_each_engine_writes_its_own_file(tmp_path: Path) -> None:
    script = TURNS.partition("scheduler = core()")[0] + (
        "for engine in (0, 1):\n    play(core(engine), request('a', 20, [b'x']), [])\n"
    )
    run_core(tmp_path, script, **{SESSIONS: str(tmp_path / "s.jsonl")})

    files = sorted(tmp_path.glob("s*.jsonl"))
    assert [path.name for path in files] == ["s.engine1.jsonl", "s.jsonl"]
    assert [lines_of(path)[0]["engine"] for path in files] == [1, 0]
    recorders = [lines_of(path)[0]["recorder"] for path in files]
    assert recorders[0] != recorders[1]


def test_a_server_that_is_started_again_writes_the_next_file(tmp_path: Path) -> None:
    for _ in range(3):
        run_core(tmp_path, TURNS, **{SESSIONS: str(tmp_path / "s.jsonl")})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.1.jsonl", "s.2.jsonl", "s.jsonl", "site"]
