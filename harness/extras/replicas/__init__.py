"""Several servers behind a router: started and measured, simulated, and what routing does to the reuse of sessions
that come back, and to cost."""

from harness.plugins import Plugin

PLUGIN = Plugin(
    name="replicas",
    summary="several servers behind a router: runs, and figures of each",
    commands={"fleet replicas": "harness.extras.replicas.commands:measured"},
    services={
        "replicas": "harness.extras.replicas.service:REPLICAS",
        "routing of runs": "harness.extras.replicas.figures:routing_of",
    },
)
