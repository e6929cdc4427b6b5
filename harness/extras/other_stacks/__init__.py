"""Step files of vLLM and of vllm-rbln's native path."""

from harness.plugins import Plugin

_AT = "harness.extras.other_stacks.commands"
PLUGIN = Plugin(
    name="other_stacks",
    summary="step files of vLLM and of vllm-rbln's native path",
    commands={"stack steps": f"{_AT}:steps"},
)
