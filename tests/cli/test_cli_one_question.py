"""One question through every command: one sign, figures that agree.

On servers by URL, ``tests/docs`` asks one too, and ``tests/judge/decisions`` has the words where A is not there.
"""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.command_line import harness
from tests.support.experiments import UNHURRIED_TOML

pytestmark = pytest.mark.same_everywhere
# Do eight slots lower the cost of four sessions that come back twice?
QUESTION = """\
name = "slots"
time_scale = 1.0
replicates = 3
base_seed = 1
rules = ["superiority"]
[workload]
num_sessions = 4
requests_per_session = 3
generate_tokens = {distribution = "uniform", low = 16, high = 48}
wait_cap_s = 1.0
[[condition]]
name = "base"
server.kv_slots = 4
server.max_num_seqs = 4
server.decode_buckets = [1, 2, 4]
[[condition]]
name = "eight-slots"
server.kv_slots = 8
server.max_num_seqs = 4
server.decode_buckets = [1, 2, 4]
"""
RUNS = ("--runs", "simulated")
SENTENCE = re.compile(
    r"eight-slots costs (?P<change>\d+\.\d) % less than base "
    r"\((?P<near>\d+\.\d) to (?P<far>\d+\.\d) % less\): "
    r"(?P<verdict>[^.\n]+)"
)


class Sentence(NamedTuple):
    """A sentence about the cost, read back; changes are in per cent of the baseline's cost."""

    change: float
    near: float
    far: float
    verdict: str


def sentences(text: str) -> list[Sentence]:
    """Every sentence about the cost in a command's output, however its lines are broken."""
    flat = " ".join(text.split())
    found = [
        Sentence(float(match["change"]), float(match["near"]), float(match["far"]), match["verdict"])
        for match in SENTENCE.finditer(flat)
    ]
    assert flat.count("eight-slots costs") == len(found), flat
    return found


def called(folder: Path, *words: str) -> str:
    done = harness(*words, cwd=folder)
    # Exploratory runs decide nothing: 5.
    assert done.returncode == (5 if words[0] == "decide" else 0), (
        f"harness {' '.join(words)}\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("question")
    (folder / "slots.toml").write_text(QUESTION + UNHURRIED_TOML)
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    """What ``run`` printed."""
    return called(folder, "run", "slots.toml", "--runs", "simulated", "--backend", "sim")


def table_ratio(folder: Path) -> tuple[float, float, float]:
    """(ratio, low, high) of the cost in the machine-readable table, on A or on B where A is missing."""
    text = called(folder, "table", "slots", *RUNS, "--format", "csv")
    (row,) = [row for row in csv.DictReader(io.StringIO(text)) if row["condition"] == "eight-slots"]
    channel = "a" if row["ratio_a"] else "b"
    ratio, low, high = (float(row[f"ratio_{channel}{end}"]) for end in ("", "_low", "_high"))
    return ratio, low, high


def test_run_table_compare_and_decide_say_the_same(folder: Path, printed: str) -> None:
    ratio, low, high = table_ratio(folder)
    changes = tuple(round(100 * (1 - end), 1) for end in (ratio, high, low))
    in_words = [sentences(text) for text in (printed, called(folder, "table", "slots", *RUNS))]
    assert in_words[0] == in_words[1]
    for of_run in in_words[0]:
        assert of_run[:3] == changes
        assert of_run.verdict.startswith("cheaper")
    assert in_words[0], printed
    compared = called(folder, "compare", "simulated/slots", "--format", "csv")
    cost = next(row for row in csv.DictReader(io.StringIO(compared)) if "s_per_token" in row["measure"])
    assert float(cost["ratio"]) == pytest.approx(ratio, abs=5e-4)
    assert cost["verdict"] == "cheaper"
    (decision,) = json.loads(called(folder, "decide", "slots", *RUNS, "--format", "json"))
    decided = called(folder, "decide", "slots", *RUNS)
    (of_decide,) = sentences(decided)
    assert of_decide.verdict.startswith("NOT SUBJECT (would be PASS)")
    assert of_decide[:3] == changes
    assert decision["numbers"]["ratio"] == pytest.approx(ratio, abs=5e-5)
    assert (decision["would_be"], decision["label"]) == ("PASS", "CHEAPER")
    assert "modelled device time (A)" in decided


@pytest.mark.usefixtures("printed")
def test_the_mean_of_draws_lies_within_the_interval_of_one_draw(folder: Path) -> None:
    predicted = re.search(
        r"eight-slots / base: (\d\.\d+) \+- \d\.\d+ \(mean of \d+ draws\), 90 ?% of outcomes (\d\.\d+) to (\d\.\d+)",
        # At 80 columns the line is folded.
        " ".join(called(folder, "simulate", "slots.toml").split()),
    )
    assert predicted is not None
    mean, low, high = (float(text) for text in predicted.groups())
    assert low < mean < high < 1
    ratio, least, most = table_ratio(folder)
    assert least < ratio < most < 1
    assert least < mean < most
