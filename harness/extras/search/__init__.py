"""Search over configurations: every one of a space simulated, the best compared with intervals."""

from harness.plugins import Plugin

_AT = "harness.extras.search.commands"
PLUGIN = Plugin(
    name="search",
    summary="configurations of a search space, simulated and compared",
    services={"search space": "harness.extras.search.space:SpaceSpec"},
    commands={"search": f"{_AT}:search", "predict ratios": f"{_AT}:ratios"},
)
