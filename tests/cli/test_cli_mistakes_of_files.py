"""Mistakes in the files that people write, by hypothesis: each is refused with its key and its file, in one line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import SpecError
from harness.extras.search.space import parse_space
from harness.model.engine.cost import load_cost_model
from harness.model.plan.waits import load_waits
from harness.model.spec import load_experiment, load_toml

pytestmark = pytest.mark.same_everywhere

NUM_MISTAKES = int(os.environ.get("MISTAKES", "40"))
tried = settings(
    max_examples=NUM_MISTAKES, suppress_health_check=list(HealthCheck), derandomize="MISTAKES" not in os.environ
)

EXPERIMENT = """\
name = "small"
title = "Small"
backend = "sim"
base_seed = 7
replicates = 2
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
"""


def space(path: Path) -> object:
    return parse_space(load_toml(path), where=str(path))


def shipped(kind: str, name: str) -> str:
    return (Path(__file__).parents[2] / "plans" / kind / f"{name}.toml").read_text(encoding="utf-8")


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


def names_it(said: str, key: str) -> bool:
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
        assert names_it(said, key), said
        assert refused.value.hint or ": " in refused.value.what, said

    holds()
