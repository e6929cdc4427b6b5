"""Each recipe of CONTRIBUTING.md is enough: what is added through its files alone runs, is analysed and is reported.

A recipe that needs another place fails here, because nothing but its own files is given. Source: CONTRIBUTING.md.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tests.support.copied_checkout import TRIED_BACKEND, CopiedCheckout
from tests.support.release_wheels import empty_table, stack

EXPERIMENT = """
name = "tried"
title = "Tried by its recipe"
question = "Does it run?"
base_seed = 5
replicates = 1
analysis = "general"

[workload]
num_sessions = 2

[[condition]]
name = "base"

[[condition]]
name = "slots"
server.kv_slots = 12
"""
KIND = """    BackendKind(
        name="tried",
        label="tried by its recipe",
        scales_time=True,
        is_virtual=True,
    ),
"""
ANALYSIS = """
from harness.judge.catalogue import Analysis
from harness.table import table_of


def counted_table(experiment):
    rows = [{"condition": name, "runs": len(runs)} for name, runs in experiment.runs.items()]
    return table_of("counted", "Runs of each condition", rows)


COUNTED = Analysis("counted", "how many runs there are", (counted_table,))
"""


# Machine code of the edited engine takes longer to make than it saves.
PLAIN = {"NUMBA_DISABLE_JIT": "1"}


@pytest.fixture
def house(tmp_path: Path) -> CopiedCheckout:
    return CopiedCheckout(tmp_path)


MEASURE = """
        Measure(
            "requests",
            "requests_per_run",
            "requests of a run",
            lambda run: Value(run_figures(run).num_requests),
            limit=1.5,
        ),
"""
CHECK = """
def _check_is_small(run: Evidence) -> Iterator[Finding]:
    if run.requests.num_rows < 100:
        yield finding("run-small", f"{run.requests.num_rows} requests")


CHECKS:"""
ROW = """
[run-small]
severity = "warning"
means = "The run has few requests."
do = "Plan more sessions"
"""
PAGE = """
from harness.html import page, text
from harness.table import table_of, to_html


def tried_page(question):
    return page("Tried", [text(question), to_html(table_of("counted", "Runs", [{"runs": 2}]))])
"""


@pytest.fixture(scope="module")
def full_house(tmp_path_factory: pytest.TempPathFactory) -> CopiedCheckout:
    """What six recipes add, each through its own files, and runs of the experiment that is one of them."""
    house = CopiedCheckout(tmp_path_factory.mktemp("house"))
    house.edit("harness/kinds.py", "_TABLE = (\n", f"_TABLE = (\n{KIND}")
    house.write("harness/runner/backends/tried.py", TRIED_BACKEND)
    house.write("harness/extras/paper/catalogue/counted.py", ANALYSIS)
    line = '        "counted": "harness.extras.paper.catalogue.counted:COUNTED",\n'
    house.edit("harness/extras/paper/__init__.py", "    analyses={\n", f"    analyses={{\n{line}")
    house.edit("harness/analysis/compare/measures.py", "    for measure in (\n", f"    for measure in ({MEASURE}")
    house.edit("harness/measure/records/findings.toml", "\n[server-died]", f"{ROW}\n[server-died]")
    checks = "harness/analysis/validity/invariants.py"
    house.edit(checks, "\nCHECKS:", CHECK)
    house.edit(checks, "    check_answers,\n", "    check_answers,\n    _check_is_small,\n")
    house.write("harness/present/report/tried.py", PAGE)
    experiment = EXPERIMENT.replace("replicates = 1", "replicates = 3").replace("general", "counted")
    house.write("plans/experiments/tried.toml", experiment)
    assert "base/0" in house.harness("run", "tried", "--backend", "tried")
    return house


def test_a_backend_is_its_row_and_its_module(full_house: CopiedCheckout) -> None:
    assert "backend tried" in full_house.harness("doctor")
    unknown = ("--set", "condition.slots.server.extra_args=['--seed']")
    full_house.harness("run", "tried", "--backend", "tried", "--runs", "others", *unknown, exit_code=2)
    assert "backend tried (no accelerator)" in (full_house.root / "runs" / "tried.html").read_text()
    assert "tried" in full_house.harness("query", "select distinct backend from runs")


def test_an_analysis_is_its_module_and_its_line(full_house: CopiedCheckout) -> None:
    assert "how many runs there are" in full_house.harness("explain", "analysis")
    assert "counted: Runs of each condition" in full_house.harness("paper", "analyse", "tried")
    assert "Runs of each condition" in (full_house.root / "runs" / "tried.html").read_text()


def test_a_measure_is_its_row(full_house: CopiedCheckout) -> None:
    said = full_house.harness
    assert "requests_per_run" in said("table", "tried", "--format", "csv")
    assert "requests_per_run" in said("compare", "tried", "--baseline", "tried/base", "--format", "csv")
    said("gate", "tried/base", "--save-baseline", "kept")
    assert ",requests,4" in (full_house.root / "kept" / "figures.csv").read_text()
    assert "requests" in said("gate", "tried/base", "--against", "kept", "--figure", "requests")
    assert "requests" in said("history", "tried/base", "kept", "--figure", "requests", "--format", "csv")


def test_an_experiment_is_its_file_and_its_page(full_house: CopiedCheckout) -> None:
    assert "Tried by its recipe" in full_house.harness("paper", "catalogue", "--only", "tried")
    assert "base/0" in full_house.harness("run", "tried", "--dry-run", "--runs", "others")


def test_a_validity_check_is_its_row_its_function_and_the_page(full_house: CopiedCheckout) -> None:
    page = (full_house.root / "runs" / "tried.html").read_text()
    assert all(words in page for words in ("<code>run-small</code>", "The run has few requests.", "Plan more sessions"))
    full_house.harness("explain", "findings", "-o", "findings.md")
    row = "| `run-small` | warning | The run has few requests. | Plan more sessions |"
    assert row in (full_house.root / "findings.md").read_text()


def test_a_page_is_its_module(full_house: CopiedCheckout) -> None:
    asked = "from harness.present.report.tried import tried_page; print(tried_page('a < b?'))"
    page = full_house.python("-c", asked)
    assert "a &lt; b?" in page
    assert "<td>2</td>" in page
    assert "default-src 'none'" in page


SPOKEN = """
import sys
from harness.stacks.rbln.rules.dialect import dialect_of
from harness.stacks.rbln.rules.kv_rules import rule_set
from harness.extras.twin.environment import stack_named
for version in sys.argv[1:]:
    rules = rule_set("auto", version)
    print(stack_named(version).vllm, rules.name, dialect_of(rules).vllm)
"""


def test_a_release_is_its_facts_its_lock_its_number_and_its_dialect(house: CopiedCheckout, tmp_path: Path) -> None:
    known, new = "0.12.1a8", "0.12.2"
    shutil.copy(empty_table(tmp_path), house.root / "harness" / "stacks" / "rbln" / "launch" / "facts.json")
    house.harness("stack", "record", str(stack(tmp_path, known, vllm="0.31.0")))
    wheel = str(stack(tmp_path, new, vllm="0.33.0"))
    assert "rules: yes (vendor-0.12.1" in house.harness("stack", "check", wheel, exit_code=3)
    # Its facts, its lock, its number in the rules that it follows, its dialect: the files of the recipe.
    house.harness("stack", "record", wheel)
    lock = (house.root / "harness" / "extras" / "twin" / f"requirements-stack-{known}.lock").read_text()
    assert "\nvllm==0.31.0" in lock
    house.write(
        f"harness/extras/twin/requirements-stack-{new}.lock",
        lock.replace("\nvllm==0.31.0", "\nvllm==0.33.0"),
    )
    house.edit("harness/stacks/rbln/rules/kv_rules.py", 'releases=("0.12.1a8",)', f'releases=("0.12.1a8", "{new}")')
    like_0_12_0 = (
        '{"vllm": "0.33.0", "null_fields": [], "has_usage_details": true, "has_empty_tool_calls": false,'
        ' "names_fields": true, "kv_device": "CPU", "reports_pool": true, "counts_preemptions": true,'
        ' "cache_config": "0.30.0"}'
    )
    house.edit(
        "harness/stacks/rbln/rules/dialects.json",
        '\n },\n "cache_config"',
        f',"{new}": {like_0_12_0}\n }},\n "cache_config"',
    )
    spoken = house.python("-c", SPOKEN, new, "0.12.0")
    assert spoken == "0.33.0 vendor-0.12.1 0.33.0\n0.30.0 vendor-0.12.0 0.30.0\n"
    assert "as in 0.12.2" in house.harness("stack", "check", wheel, exit_code=3)


SERVER_KEY = """    decode_first: bool | None = key(
        ServerKey("paged", "--decode-first", "decode_first", is_newer=True), None, "decodes go before prompts"
    )
    unshown: int | None = key(ServerKey("paged", "--unshown", backends=("vllm",), is_newer=True), None, "in no header")
"""
PAGED = """
[server]
rules = "vllm-paged"
cost_model = "emulated-gpu"
"""
ARGUMENTS = """
from harness.model.spec import ServerSpec
from harness.stacks.vllm.launch import SHOWN_KEYS, key_arguments
print("decode_first" in SHOWN_KEYS, *key_arguments(ServerSpec(model="m", decode_first=True, unshown=2))[-3:])
"""


def test_a_server_key_is_its_row_and_the_engine_s_field(house: CopiedCheckout) -> None:
    house.edit("harness/model/spec/server.py", "    keep_kv_s: float", f"{SERVER_KEY}    keep_kv_s: float")
    field = "    offload_block_ns: int = 0\n"
    house.edit("harness/model/engine/config.py", field, f"{field}    decode_first: bool = False\n")
    assert "paged KV memory: decodes go before prompts (--decode-first)" in house.harness("explain", "decode_first")
    assert "--decode-first" in house.harness("server", "emulator", "--help")
    assert house.python("-c", ARGUMENTS) == "True --decode-first --unshown 2\n"
    paged = EXPERIMENT.replace("kv_slots = 12", "decode_first = true").replace("[workload]", f"{PAGED}\n[workload]")
    house.write("tried.toml", paged)
    house.harness("run", "tried.toml", "--backend", "sim", variables=PLAIN)
    shown = [
        json.loads((house.root / "runs" / "tried" / name / "0" / "manifest.json").read_text())["effective"]["server"]
        for name in ("base", "slots")
    ]
    assert [each["decode_first"] for each in shown] == [False, True]
    house.harness("run", "tried.toml", "--backend", "sim", "--set", "server.rules=auto", exit_code=2)


LIMITS = {
    "A server key": 2,
    "A validity check": 3,
    "A report page": 1,
    "A backend": 3,
    "A rule set": 5,
    "A release": 5,
    "An analysis": 3,
    "A measure": 1,
    "An experiment": 2,
}


@pytest.mark.parametrize("recipe", LIMITS)
def test_a_recipe_names_few_files_and_all_their_places_are_there(recipe: str) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    part = re.search(rf"^## {recipe}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    files = re.findall(r"^\d\. `([^`]+)`", part[1], re.MULTILINE)
    assert 0 < len(files) <= LIMITS[recipe]
    assert [file for file in files if not (ROOT / file).parent.is_dir()] == []
