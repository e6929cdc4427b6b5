"""One figure over dates and releases: a point with its interval for each set of runs, and where the level changed."""

from harness.plugins import Plugin

PLUGIN = Plugin(
    name="history",
    summary="follows a figure over dates and releases",
    commands={"history": "harness.extras.history.commands:history"},
)
