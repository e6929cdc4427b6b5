"""Several servers behind a router: what routing does to the reuse of sessions that come back, and to cost."""

from harness.plugins import Plugin

PLUGIN = Plugin(
    name="replicas",
    summary="several servers behind a router: policies compared",
    commands={"predict replicas": "harness.extras.replicas.commands:replicas"},
)
