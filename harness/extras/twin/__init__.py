"""The twin: the real vLLM and vllm-rbln, where a stand-in takes the place of the closed device runtime.

``inside`` runs in a twin's own processes; everything else runs here.
"""

from harness.plugins import BackendKind, Plugin

_AT = "harness.extras.twin"
PLUGIN = Plugin(
    name="twin",
    summary="the real vLLM and vllm-rbln on a stand-in device",
    groups={"server twin": "The real vLLM + vllm-rbln on a stand-in device.\n\nExample: `harness server twin install`"},
    commands={"server twin install": f"{_AT}.commands:install", "server twin artifact": f"{_AT}.commands:artifact"},
    kinds=(
        BackendKind(
            name="twin",
            label="twin (real vLLM and vllm-rbln on a stand-in device with modelled step times)",
            has_stack=True,
            lifecycle_s=20.0,
        ),
    ),
    backends={"twin": f"{_AT}.backend:BACKEND"},
    services={"stand-in stack": f"{_AT}.backend:site_packages"},
)
