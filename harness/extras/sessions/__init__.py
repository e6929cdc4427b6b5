"""Sessions that a vLLM server recorded: its scheduler's rules held to what it did."""

from harness.plugins import Plugin

_AT = "harness.extras.sessions.commands"
PLUGIN = Plugin(
    name="sessions",
    summary="replay of a vLLM's recorded sessions by its scheduler's rules, and the recorder in any environment",
    commands={"predict replay": f"{_AT}:replay", "server observe": f"{_AT}:observe"},
    services={
        "verdict of a recording": "harness.extras.sessions.verdict:verdict_of",
        "timed steps of a recording": "harness.extras.sessions.verdict:timed_steps_of",
    },
)
