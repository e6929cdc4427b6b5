"""A rule set is its four files: a toy one, written into a copy of the checkout, is served, simulated and checked.

Nothing but the files that CONTRIBUTING.md names is changed in the copy; a recipe that needs another place fails here.
"""

from __future__ import annotations

import re

import pytest

from tests.support.checkout import ROOT
from tests.support.copied_checkout import CopiedCheckout

EDITS = {
    "harness/stacks/rbln/rules/kv_rules.py": (
        (
            "    survives_copy_failure: bool = False\n",
            "    survives_copy_failure: bool = False\n    forgets: bool = False\n",
        ),
        (
            "_TABLE = (\n",
            '_TABLE = (\n    RuleSet("tried", "a toy that reuses nothing", releases=("98.7.6",), forgets=True),\n',
        ),
    ),
    "harness/model/engine/state.py": (("    sets_slot_aside: int\n", "    sets_slot_aside: int\n    forgets: int\n"),),
    "harness/model/engine/rules.py": (
        ("    while num_hits < most_blocks:\n", "    while num_hits < most_blocks and state.server[0].forgets == 0:\n"),
    ),
    "tests/support/oracle.py": (
        (
            "        hits: list[int] = []\n",
            "        hits: list[int] = []\n        if self.rules.forgets:\n            return hits\n",
        ),
    ),
}
EXPERIMENT = """
name = "toy"
backend = "sim"
base_seed = 5
replicates = 1

[workload]
num_sessions = 2
waits = "none"

[[condition]]
name = "toy"
server.rules = "tried"

[[condition]]
name = "vendor"
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> CopiedCheckout:
    """The checkout with the toy's four edits."""
    checkout = CopiedCheckout(tmp_path_factory.mktemp("checkout"), ("tests", "pyproject.toml", "README.md", "docs"))
    for name, pairs in EDITS.items():
        for old, new in pairs:
            checkout.edit(name, old, new)
    return checkout


def test_the_recipe_names_the_files_that_the_toy_took() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    part = re.search(r"^## A rule set\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert re.findall(r"^\d\. `([^`]+)`", part[1], re.MULTILINE) == list(EDITS)


def test_a_release_that_decides_otherwise_is_served_by_its_rules(copy: CopiedCheckout) -> None:
    asked = "from harness.stacks.rbln.rules.kv_rules import rule_set; print(rule_set('auto', '98.7.6').name)"
    assert copy.python("-c", asked) == "tried\n"


COMPILES = """
from harness.compiled import compiled, has_machine_code
from harness.model.engine import EngineConfig, rules
from harness.model.engine.config import new_state

look_up = compiled(rules.look_up)
config = EngineConfig(max_num_seqs=2, decode_buckets=(2,), kv_slots=2, slot_tokens=1024, rules="tried")
look_up(new_state(config, 2, with_events=False), 0, 0, 0)
print(has_machine_code(look_up))
"""


def test_the_edited_function_becomes_machine_code(copy: CopiedCheckout) -> None:
    assert copy.python("-c", COMPILES) == "True\n"


def test_a_rule_set_is_checked_against_the_second_opinion_and_measured(copy: CopiedCheckout) -> None:
    # The engine decides as the oracle under the toy's rules too, on two of its servers, and the table's own tests hold.
    checks = ("tests/stacks/rbln/rules/test_kv_rules.py", "tests/model/engine/test_scheduler_against_oracle.py")
    # Plain Python: machine code of the edited engine takes longer to make than to save.
    plain = {"NUMBA_DISABLE_JIT": "1"}
    some = ("-k", "kv_rules or tried and (more or two)")
    copy.python("-m", "pytest", "-q", "-W", "ignore:overflow", *checks, *some, variables=plain)
    copy.write("toy.toml", EXPERIMENT)
    copy.harness("run", "toy.toml", variables=plain)
    reused = copy.harness(
        "query", "--format", "csv", "select condition, max(cached_tokens) > 0 from requests group by 1 order by 1"
    )
    assert re.findall(r"(toy|vendor)\W+(\w+)", reused.lower()) == [("toy", "false"), ("vendor", "true")], reused
