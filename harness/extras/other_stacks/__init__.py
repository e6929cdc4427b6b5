"""Step files of other stacks: tpu-inference, vLLM on Gaudi, and vllm-rbln's native path."""

from harness.plugins import Plugin

_AT = "harness.extras.other_stacks.commands"
PLUGIN = Plugin(
    name="other_stacks",
    summary="step files of tpu-inference, Gaudi and vllm-rbln's native path",
    commands={"stack steps": f"{_AT}:steps"},
    doctor={"steps": f"{_AT}:doctor_lines"},
)
