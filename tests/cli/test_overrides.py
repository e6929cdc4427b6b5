"""What was said on a command line is said again by the command that continues it."""

from __future__ import annotations

from harness.cli.overrides import asked_again


def test_the_command_that_continues_a_run_says_its_options_again() -> None:
    said = asked_again(['server.url="http://h:1"', "replicates=2"], "attached", None, "0,1")
    assert said == " --set 'server.url=\"http://h:1\"' --set replicates=2 --backend attached --devices 0,1"
    assert asked_again([], None, None) == ""
