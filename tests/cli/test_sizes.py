"""``harness server sizes``: a table for people, and a line of JSON for each case of other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import harness
from tests.support.processes import NO_PORT

DRAFTS = {"method": "eagle", "runner": "v1", "max_num_seqs": 8, "num_speculative_tokens": 3}


def test_the_table_names_the_batches_without_a_graph_and_the_size_that_covers_them() -> None:
    words = [word for key, value in DRAFTS.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    done = harness("server", "sizes", *words, "--set", "cudagraph_capture_sizes=[1, 2, 4, 8]")
    assert done.returncode == 0, done.stderr
    assert "vLLM 0.33.0, model runner V1, 3 drafts by eagle" in done.stdout
    assert "batches of 3 to 8 requests of 4 tokens each run without a graph; size 32 covers them" in done.stdout
    assert "--cudagraph-capture-sizes 4 8 32" in done.stdout


def test_each_line_of_json_has_an_answer_and_a_bad_one_ends_no_other(tmp_path: Path) -> None:
    cases: list[Any] = [
        {**DRAFTS, "cudagraph_capture_sizes": [1, 2, 4, 8], "release": None, "cudagraph_mode": None},
        {"max_num_seqs": 2, "enforce_eager": True},
        {"seqs": 2},
        [],
        {"release": "0.12.0"},
        {"max_num_seqs": "8"},
        {"method": "ngram"},
        {"max_num_seqs": 8, "max_num_batched_tokens": 4},
    ]
    file = tmp_path / "cases.jsonl"
    file.write_text("\n".join(["{", *map(json.dumps, cases), ""]))
    done = harness("server", "sizes", "--jsonl", str(file))
    first, *answers = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert first["error"].startswith("not JSON")
    assert answers[0]["sizes"] == [4, 8]
    assert answers[0]["mode"] == "FULL_AND_PIECEWISE"
    assert answers[0]["uniform"][1:3] == [[2, "FULL", 8], [3, "NONE", 12]]
    assert answers[1] == {"sizes": [], "mode": "NONE", "uniform": [[1, "NONE", 1], [2, "NONE", 2]]}
    assert "seqs: unknown key" in answers[2]["error"]
    assert "an object of flags" in answers[3]["error"]
    assert "vLLM 0.12.0 is not known" in answers[4]["error"]
    assert "must be a whole number" in answers[5]["error"]
    assert "num_speculative_tokens is missing" in answers[6]["error"]
    assert "must be at least max_num_seqs" in answers[7]["error"]


def test_the_flags_of_an_experiment_and_of_a_recording_are_read(tmp_path: Path) -> None:
    header = {
        "vllm_step_log": 1,
        "vllm": "0.31.0",
        "effective": {"max_num_seqs": 6, "num_speculative_tokens": 2, "cudagraph_capture_sizes": [3, 6, 9]},
    }
    recording = tmp_path / "steps.jsonl"
    recording.write_text(json.dumps(header) + "\n")
    done = harness(
        "server", "sizes", "gpu-capture-sizes", "--from", str(recording), "--set", "num_speculative_tokens=2"
    )
    assert done.returncode == 0, done.stderr
    assert f"{recording}: vLLM 0.31.0, model runner V2, 2 drafts" in done.stdout
    assert "size 18 covers them" in done.stdout
    assert "waits-8, nowaits-8: vLLM 0.33.0" in done.stdout


def test_a_server_that_does_not_answer_has_no_table() -> None:
    done = harness("server", "sizes", "--for", f"http://127.0.0.1:{NO_PORT}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Start the server, or name its flags: --set KEY=VALUE" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "seqs=8"), "sets no flag of captured sizes"),
        (("--set", "max_num_seqs=few"), "max_num_seqs"),
        (("--release", "0.12.0"), "known: 0.30.0"),
        (("--from", "README.md"), "shows no settings of a vLLM"),
    ],
)
def test_what_names_no_server_is_refused_in_one_line(words: tuple[str, ...], said: str) -> None:
    done = harness("server", "sizes", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
