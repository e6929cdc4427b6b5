"""One question through every command, simulated and on two servers by URL: one sign, figures that agree."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.command_line import harness
from tests.support.emulator_process import end, start_ready
from tests.support.experiments import UNHURRIED_TOML

pytestmark = [pytest.mark.live, pytest.mark.timeout(900), pytest.mark.same_everywhere]
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
PLACES = ("simulated", "attached")
SENTENCE = re.compile(
    r"eight-slots costs (?P<change>\d+\.\d) % less than base "
    r"\(95 % interval(?:, given these costs)?: (?P<near>\d+\.\d) to (?P<far>\d+\.\d) % less\): (?P<verdict>[^.\n]+)"
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
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two emulators that stand for servers which somebody else started: the options that name them."""
    folder = tmp_path_factory.mktemp("servers")
    shape = ("--max-num-seqs", "4", "--decode-buckets", "1,2,4")
    slots = {"base": "4", "eight-slots": "8"}
    started = {
        name: start_ready(folder / name, *shape, "--kv-slots", number, time_scale=1.0) for name, number in slots.items()
    }
    yield [
        word for name, server in started.items() for word in ("--set", f"condition.{name}.server.url={server.address}")
    ]
    for server in started.values():
        end(server)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("question")
    (folder / "slots.toml").write_text(QUESTION + UNHURRIED_TOML)
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """What ``run`` printed in each place. The simulator compiles what the servers need, before they start."""
    run = ("run", "slots.toml", "--runs")
    simulated = called(folder, *run, "simulated", "--backend", "sim")
    servers: list[str] = request.getfixturevalue("servers")
    attached = called(folder, *run, "attached", "--backend", "attached", "--set", "time_scale=1", *servers)
    return {"simulated": simulated, "attached": attached}


def table_ratio(folder: Path, place: str) -> tuple[float, float, float]:
    """(ratio, low, high) of the cost in the machine-readable table, on A or on B where A is missing."""
    text = called(folder, "table", "slots", "--runs", place, "--format", "csv")
    (row,) = [row for row in csv.DictReader(io.StringIO(text)) if row["condition"] == "eight-slots"]
    channel = "a" if row["ratio_a"] else "b"
    ratio, low, high = (float(row[f"ratio_{channel}{end}"]) for end in ("", "_low", "_high"))
    return ratio, low, high


def test_one_question_has_one_answer_in_every_command(folder: Path, printed: dict[str, str]) -> None:
    """One test, so that the runs are made once."""
    for place in PLACES:
        run_table_compare_and_decide_say_the_same(folder, printed, place)
    the_answer_says_which_channel_it_stands_on(folder, printed)
    prediction_and_both_measurements_agree_within_their_intervals(folder, printed)
    compare_pairs_what_was_predicted_with_what_was_measured(folder, printed)


def run_table_compare_and_decide_say_the_same(folder: Path, printed: dict[str, str], place: str) -> None:
    ratio, low, high = table_ratio(folder, place)
    changes = tuple(round(100 * (1 - end), 1) for end in (ratio, high, low))
    in_words = [sentences(text) for text in (printed[place], called(folder, "table", "slots", "--runs", place))]
    assert in_words[0] == in_words[1]
    for of_run in in_words[0]:
        assert of_run[:3] == changes
        assert of_run.verdict.startswith("cheaper")
    assert in_words[0], printed[place]
    compared = called(folder, "compare", f"{place}/slots", "--format", "csv")
    cost = next(row for row in csv.DictReader(io.StringIO(compared)) if "s_per_token" in row["measure"])
    assert float(cost["ratio"]) == pytest.approx(ratio, abs=5e-4)
    assert cost["verdict"] == "cheaper"
    (decision,) = json.loads(called(folder, "decide", "slots", "--runs", place, "--format", "json"))
    (of_decide,) = sentences(called(folder, "decide", "slots", "--runs", place))
    assert of_decide.verdict.startswith("NOT SUBJECT (would be PASS)")
    assert of_decide[:3] == changes
    assert decision["numbers"]["ratio"] == pytest.approx(ratio, abs=5e-5)
    assert (decision["would_be"], decision["label"]) == ("PASS", "CHEAPER")


def the_answer_says_which_channel_it_stands_on(folder: Path, printed: dict[str, str]) -> None:
    reasons = {place: called(folder, "decide", "slots", "--runs", place) for place in PLACES if printed[place]}
    assert "modelled device time (A)" in reasons["simulated"]
    assert "time in flight (B), as modelled device time (A) is not there" in reasons["attached"]
    assert "B alone" in " ".join(printed["attached"].split())


def prediction_and_both_measurements_agree_within_their_intervals(folder: Path, printed: dict[str, str]) -> None:
    """The mean of draws, one simulated draw, and servers by URL on the client's clock."""
    predicted = re.search(
        r"eight-slots / base: (\d\.\d+) \+- \d\.\d+ \(mean of \d+ draws\), 90 ?% of outcomes (\d\.\d+) to (\d\.\d+)",
        # At 80 columns the line is folded.
        " ".join(called(folder, "simulate", "slots.toml").split()),
    )
    assert predicted is not None
    mean, low, high = (float(text) for text in predicted.groups())
    assert low < mean < high < 1
    for place in PLACES:
        ratio, least, most = table_ratio(folder, place)
        assert least < ratio < most < 1, printed[place]
        assert least < mean < most, f"{place}: predicted {mean}, {ratio} [{least}, {most}]"


def compare_pairs_what_was_predicted_with_what_was_measured(folder: Path, printed: dict[str, str]) -> None:
    assert set(printed) == set(PLACES)
    for place in PLACES[1:]:
        text = called(folder, "compare", f"{place}/slots", "--baseline", "simulated/slots")
        assert text.count("paired by plan, 3:3 runs") == 2, text
