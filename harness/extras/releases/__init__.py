"""Releases of the vendor's stack: is a new one supported, and what differs between two of them."""

from harness.plugins import Plugin

_AT = "harness.extras.releases.commands"
PLUGIN = Plugin(
    name="releases",
    summary="checks a new release of the stack, and compares two",
    groups={
        "stack": "Releases of vllm-rbln and vLLM; step files of other stacks.\n\nExample: `harness stack check .venv`"
    },
    commands={"stack check": f"{_AT}:check", "stack record": f"{_AT}:record", "stack compare": f"{_AT}:compare"},
)
