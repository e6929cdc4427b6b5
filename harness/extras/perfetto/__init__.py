"""Runs as traces for ui.perfetto.dev."""

from harness.plugins import Plugin

PLUGIN = Plugin(
    name="perfetto",
    summary="runs as traces for ui.perfetto.dev",
    commands={"trace perfetto": "harness.extras.perfetto.commands:perfetto"},
)
