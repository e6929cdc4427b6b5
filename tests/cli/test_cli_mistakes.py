"""Mistakes on purpose, drawn by hypothesis: each ends with a documented exit code and words that name what is wrong.

Values of the options of every command group, names of options, and keys of the files that people write.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.cli import main
from harness.errors import ExitCode
from tests.model.traces.test_importing_privately import planted
from tests.support.command_line import harness

pytestmark = pytest.mark.same_everywhere

# `make fuzz` tries more.
NUM_MISTAKES = int(os.environ.get("MISTAKES", "20"))
tried = settings(
    max_examples=NUM_MISTAKES, suppress_health_check=list(HealthCheck), derandomize="MISTAKES" not in os.environ
)
GIVEN_UP_AFTER_S = 30
CODES = {int(code) for code in ExitCode}
NOT_SHOWN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
STYLES = re.compile(r"\x1b\[[\d;]*m")

EXPERIMENT = """
name = "small"
backend = "sim"
base_seed = 7
replicates = 3
[workload]
num_sessions = 2
wait_cap_s = 2.0
prompt_tokens = {distribution = "uniform", low = 200, high = 400}
generate_tokens = {distribution = "uniform", low = 8, high = 24}
[server]
max_num_seqs = 8
[[condition]]
name = "base"
[[condition]]
name = "more"
server.decode_buckets = [1, 2, 3, 4, 8]
"""
# A line of each command, with a value for each option; those that a mistake must not start are dry or short.
GROUPS = {
    "before a run": (
        "init mine --backend sim --slots 12 --buckets 1,2,4,8",
        "explain workload",
        "simulate small.toml --draws 1",
        "power small.toml --runs runs --margin 0.02 --precision 0.01 --alpha 0.05 --power 0.9 --blocks 5 --start-s 3",
        "search slots --budget-s 1 --workers 1 --top 3 --set rules=vendor-0.12.0 -o found",
    ),
    "run": (
        "run small.toml --backend sim --runs new --replicates 1 --set workload.num_sessions=2 --report p.html "
        "--dry-run",
        "sweep small.toml --over workload.num_sessions=2,4 --backend sim --runs new --replicates 1",
        "watch --runs runs --interval-s 1 --once",
    ),
    "after a run": (
        "report small --runs runs -o page.html",
        "table small --runs runs --format csv",
        "compare runs/small/base --baseline runs/small/more --format csv",
        "gate runs/small/more --against runs/small/base --figure cost --fail-above cost=1.1 --alpha 0.05 --power 0.9 "
        "--junit j.xml --summary s.md --format text",
        "history runs/small runs/small --figure cost -o h.html --format csv",
        "decide small --rule superiority --runs runs --format json",
        "open archive.zip -o opened",
        "runs small --runs runs --format csv",
        "query 'select 1' --runs runs --format csv --timeout 5 -o q.csv",
        "verify small --runs runs",
    ),
    "plan": (
        "plan build small.toml -o plans",
        "plan show plan.jsonl",
        "plan waits show tracelab-v0.0.2 --cap-s 60",
        "plan waits import recorded --format claude -o w.toml",
    ),
    "trace": (
        "trace import recorded -o t.jsonl --format claude --block-tokens 0 --time-unit s --waits tracelab-v0.0.2",
        "trace formats mooncake",
        "trace show coding-agent --max-context 8000 --scale 1/4 --picture p.svg",
        "trace export small/base/0 -o x.json --format otel --runs runs",
        "trace perfetto small/base/0 -o t.json --runs runs",
    ),
    "predict": (
        "predict noise small --runs runs",
        "predict ratios slots --ablation lru-slots --set rules=vendor-0.12.0",
    ),
    "prereg": (
        "prereg freeze small.toml --seed 7",
        "decide small --rule superiority --runs runs --format json",
        "prereg publish small --runs runs -o a.zip",
        "prereg check archive.zip",
    ),
    "records": (
        "verify small --runs runs",
        "records derive small --runs runs",
        "records export small --format csv -o out --runs runs",
    ),
    "server": (
        "server compile spec.toml -o artifacts",
        "server devices --format json",
    ),
    "fleet": ("fleet status small --runs runs",),
    "stack": ("stack steps steps.jsonl --format csv",),
    "paper": (
        "paper catalogue --only demo",
        "paper analyse small --as general --runs runs --format json",
        "paper tables --runs runs --table I --format csv -o t.csv",
    ),
}
NUMBERS = ("two", "", "1,5", "1e", "nan", "-3", "-0.5", "1e400", "9" * 40)
PLACES = (
    *("no-such-place", "no-such.toml", "notes.txt", "empty", "empty.toml", "binary.toml", "", ".", "/dev/null", "-"),
    *("notes.txt/below", os.fsdecode(b"name-\xff"), "turned\u202etxt.toml", "n" * 300, "base.tml"),
)
WORDS = (
    "nonsense",
    "",
    "\u202enonsense",
    "a=b",
    "[x]",
    "'",
    "-",
    "*",
    os.fsdecode(b"\xff"),
    "\x1b[2Jcleared",
    "n" * 300,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an experiment, its sealed runs, recordings, and files that are none of these."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "small.toml").write_text(EXPERIMENT)
    assert harness("run", "small.toml", "--runs", "runs", cwd=folder).returncode == 0
    (folder / "recorded").mkdir()
    planted(folder / "recorded")
    (folder / "notes.txt").write_text("a note\n")
    (folder / "empty").mkdir()
    (folder / "empty.toml").write_text("")
    (folder / "binary.toml").write_bytes(bytes(range(256)))
    (folder / "turned\u202etxt.toml").write_text("name = \n")
    (folder / "archive.zip").write_bytes(b"PK\x05\x06" + bytes(18))
    return folder


class TooLong(BaseException):
    """Raised by the alarm in a command that goes on; nothing catches it."""


@contextmanager
def only_what_was_there(folder: Path) -> Iterator[None]:
    """Enter a folder; what is new in it afterwards is removed."""
    here, before = Path.cwd(), set(folder.iterdir())
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)
        for path in set(folder.iterdir()) - before:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def called(words: list[str]) -> tuple[int, str, str]:
    """Exit code and both outputs of a command, in this process."""

    def give_up(_number: int, _frame: FrameType | None) -> None:
        raise TooLong

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape") for _ in range(2))
    argv, before = sys.argv, signal.signal(signal.SIGPROF, give_up)
    sys.argv = ["harness", *words]
    signal.setitimer(signal.ITIMER_PROF, GIVEN_UP_AFTER_S)
    code = 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        sys.argv = argv
    texts: list[str] = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8", "surrogateescape"))  # type: ignore[attr-defined]
    return code, texts[0], texts[1]


def places_of_values(words: list[str]) -> list[tuple[int, str]]:
    """(index of each value in a command line, the option before it or "")."""
    first = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    num_of_name = 3 if words[:2] == ["plan", "waits"] else 2 if words[0] in SUBCOMMANDS else 1
    found = [(at, "") for at in range(num_of_name, first)]
    return found + [
        (at, words[at - 1])
        for at in range(first + 1, len(words))
        if words[at - 1].startswith("-") and not words[at].startswith("-")
    ]


SUBCOMMANDS = {"plan", "trace", "predict", "prereg", "records", "server", "fleet", "stack", "paper"}


def wrong_values(value: str) -> tuple[str, ...]:
    if re.fullmatch(r"[\d.]+", value):
        return NUMBERS
    return PLACES if re.search(r"[./]|^runs$|^new$|^recorded$|^small$", value) and "=" not in value else WORDS


@st.composite
def mistakes(draw: Any, group: str) -> tuple[list[str], str, str]:
    """A command line with one mistake, the option that has it ("" for an argument), and the wrong value."""
    words = shlex.split(draw(st.sampled_from(GROUPS[group])))
    values = places_of_values(words)
    if draw(st.integers(0, 5)) == 0 or not values:
        options = [word for word in words if word.startswith("--")]
        name = (draw(st.sampled_from(options)) if options else "--run") + draw(st.sampled_from(["x", "-s", "s\u202e"]))
        return [*words, name], name, name
    at, option = draw(st.sampled_from(values))
    wrong = draw(st.sampled_from(wrong_values(words[at])))
    return [*words[:at], wrong, *words[at + 1 :]], option, wrong


def names_it(said: str, option: str, wrong: str) -> bool:
    """Whether the words name the option or what was given for it."""
    flat = re.sub(r"[\s\u2500-\u257f]+", "", said)
    shown = NOT_SHOWN.sub(lambda found: ascii(found[0])[1:-1], wrong)
    return (not wrong and "is empty" in said) or any(
        name and re.sub(r"\s", "", name)[:20] in flat for name in (option.strip("-"), shown, wrong)
    )


@pytest.mark.parametrize("group", GROUPS)
def test_a_mistake_in_a_command_line_is_named(group: str, place: Path) -> None:
    @tried
    @given(mistakes(group))
    def holds(drawn: tuple[list[str], str, str]) -> None:
        words, option, wrong = drawn
        with only_what_was_there(place):
            code, out, err = called(words)
        assert code in CODES, (words, code)
        assert "Traceback" not in err, (words, err)
        assert NOT_SHOWN.search(STYLES.sub("", out + err)) is None, (words, out + err)
        if code in (ExitCode.HARNESS_FAULT, ExitCode.BAD_SPEC):
            assert names_it(err + out, option, wrong), (words, err)

    holds()
