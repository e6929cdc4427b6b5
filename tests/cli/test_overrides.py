"""What was said on a command line is said again by the command that continues it."""

from __future__ import annotations

import re

import pytest

from harness.cli.overrides import asked_again, override_table
from harness.errors import SpecError


def test_the_command_that_continues_a_run_says_its_options_again() -> None:
    said = asked_again(['server.url="http://h:1"', "replicates=2"], "attached", None, "0,1")
    assert said == " --set 'server.url=\"http://h:1\"' --set replicates=2 --backend attached --devices 0,1"
    assert asked_again([], None, None) == ""


def test_a_condition_is_changed_by_its_name() -> None:
    table = {"condition": [{"name": "base"}, {"name": "twelve", "server": {"kv_slots": 12}}]}
    changed = override_table(table, ["condition.twelve.server.url=http://h:1"])
    assert changed["condition"][1]["server"] == {"kv_slots": 12, "url": "http://h:1"}
    for change, message in (
        ("condition.other.treatment=x", "'condition.other.treatment': nothing is named 'other'"),
        ("condition.twelve=1", "'condition.twelve' names no element of condition. Say condition.NAME.KEY"),
        ("condition.twelve.name.first=1", "'name' is not a table"),
    ):
        with pytest.raises(SpecError, match=re.escape(message)):
            override_table(table, [change])
