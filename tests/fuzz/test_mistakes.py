"""Mistakes on purpose, drawn by hypothesis: each is refused with words that name it.

On command lines: values of the options of every group, and names of options; the exit code is a documented one. In
files that people write: keys and their values, refused in one line. ``make fuzz`` tries more.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import ExitCode, SpecError
from harness.extras.search.space import parse_space
from harness.model.engine.cost import load_cost_model
from harness.model.plan.waits import load_waits
from harness.model.spec import load_experiment, load_toml
from tests.model.traces.test_importing_privately import planted
from tests.support.checkout import ROOT
from tests.support.command_line import harness

pytestmark = pytest.mark.same_everywhere

NUM_MISTAKES = int(os.environ.get("MISTAKES", "10"))
tried = settings(
    max_examples=NUM_MISTAKES, suppress_health_check=[*HealthCheck], derandomize="MISTAKES" not in os.environ
)
CODES = {int(code) for code in ExitCode}
NOT_SHOWN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
STYLES = re.compile(r"\x1b\[[\d;]*m")

EXPERIMENT = """\
name = "small"
title = "Small"
backend = "sim"
base_seed = 7
replicates = 3
order = "rotation"
[workload]
num_sessions = 2
requests_per_session = 2
wait_cap_s = 2.0
prompt_tokens = {distribution = "uniform", low = 200, high = 400}
waits = "tracelab-v0.0.2"
[server]
max_num_seqs = 8
kv_slots = 8
cost_model = "paper"
prefix_caching = true
[limits]
retries = 1
stall_ms = 500.0
[slo]
ttft_ms = 500.0
[stop]
margin = 0.02
budget = 24
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
        "search slots --top 3 --set rules=vendor-0.12.0 -o found",
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
        "--look 2 --summary s.md --format text",
        "history runs/small again/small --figure cost -o h.html --format csv",
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
    for runs in ("runs", "again"):
        assert harness("run", "small.toml", "--runs", runs, cwd=folder).returncode == 0
    (folder / "recorded").mkdir()
    planted(folder / "recorded")
    (folder / "notes.txt").write_text("a note\n")
    (folder / "empty").mkdir()
    (folder / "empty.toml").write_text("")
    (folder / "binary.toml").write_bytes(bytes(range(256)))
    (folder / "turned\u202etxt.toml").write_text("name = \n")
    (folder / "archive.zip").write_bytes(b"PK\x05\x06" + bytes(18))
    return folder


@contextmanager
def only_what_was_there(folder: Path) -> Generator[None]:
    """What is new in a folder afterwards is removed."""
    before = set(folder.iterdir())
    yield
    for path in set(folder.iterdir()) - before:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


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
            done = harness(*words, cwd=place)
        code, out, err = done.returncode, done.stdout, done.stderr
        assert code in CODES, (words, code)
        assert "Traceback" not in err, (words, err)
        assert NOT_SHOWN.search(STYLES.sub("", out + err)) is None, (words, out + err)
        if code in (ExitCode.HARNESS_FAULT, ExitCode.BAD_SPEC):
            assert names_it(err + out, option, wrong), (words, err)

    holds()


def space(path: Path) -> object:
    return parse_space(load_toml(path), where=str(path))


def shipped(kind: str, name: str) -> str:
    return (ROOT / "plans" / kind / f"{name}.toml").read_text(encoding="utf-8")


FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "experiment": (EXPERIMENT, load_experiment),
    "search space": (shipped("spaces", "paper"), space),
    "cost model": (shipped("costs", "paper"), load_cost_model),
    "waits": (shipped("waits", "none"), lambda path: load_waits(str(path))),
}
# TOML of values that no key of these files takes, by what they stand in for.
WRONG = {
    "number": ('"two"', "true", "[]", "{a = 1}", "-1e30", "nan", "2026-01-01"),
    "text": ("7", "true", "{a = 1}", "nan", "[[1]]"),
    "flag": ('"yes"', "{a = 1}", "[1]", "nan"),
    "list": ("7", '"x"', "{a = 1}", "nan", "[[[]]]", '["x"]'),
    "table": ("7", '"x"', "nan", "[1]"),
}
LINE = re.compile(r"^(?P<key>[\w.-]+) = (?P<value>[^#\n]+)", re.MULTILINE)


def kind_of(value: str) -> str:
    value = value.strip()
    if value in ("true", "false"):
        return "flag"
    return {"[": "list", "{": "table", '"': "text", "'": "text"}.get(value[0], "number")


@st.composite
def mistaken(draw: Any, text: str) -> tuple[str, str]:
    """A file with one mistake, and the key that has it."""
    lines = [found for found in LINE.finditer(text) if found["value"].count("[") == found["value"].count("]")]
    line = draw(st.sampled_from(lines))
    key, start, end = line["key"], line.start(), line.end()
    what = draw(st.sampled_from(["value", "value", "value", "misspelt", "twice", "unknown"]))
    if what == "misspelt":
        place = draw(st.integers(0, len(key) - 1))
        # A number with one digit more is a number.
        wrong = key[:place] + draw(st.sampled_from("xq" if key.isdigit() else "xq7")) + key[place:]
        return text[:start] + wrong + text[start + len(key) :], wrong
    if what == "twice":
        return f"{text[:end]}\n{line[0]}{text[end:]}", key
    if what == "unknown":
        name = draw(st.from_regex(r"zz[a-z_]{3,12}", fullmatch=True))
        return f"{text[:start]}{name} = 1\n{text[start:]}", name
    wrong = draw(st.sampled_from(WRONG[kind_of(line["value"])]))
    return f"{text[:start]}{key} = {wrong}{text[end:]}", key


def names_its_key(said: str, key: str) -> bool:
    """Whether the words have the key, a table that it begins with, or the line; without a tag, what is missing."""
    return any(part in said for part in key.split(".")) or bool(re.search(r"line \d+|needs a distribution", said))


@pytest.mark.parametrize("kind", FILES)
def test_a_mistake_in_a_file_is_named_by_its_key(kind: str, tmp_path: Path) -> None:
    text, read = FILES[kind]
    path = tmp_path / "mine.toml"

    @tried
    @given(mistaken(text))
    def holds(drawn: tuple[str, str]) -> None:
        content, key = drawn
        path.write_text(content, encoding="utf-8")
        with pytest.raises(SpecError) as refused:
            read(path)
        said = str(refused.value)
        assert "\n" not in said
        assert str(path) in said, said
        assert names_its_key(said, key), said
        assert refused.value.hint or ": " in refused.value.what, said

    holds()
