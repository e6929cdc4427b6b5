"""Result files of other benchmarks: sealed runs in their shapes, and their results as a side of a comparison."""

from harness.plugins import Plugin

_AT = "harness.extras.peers"
PLUGIN = Plugin(
    name="peers",
    summary="result files of vLLM bench, AIPerf, GuideLLM and inference-perf",
    export_formats={
        "vllm-bench": f"{_AT}.vllm_bench:FORMAT",
        "aiperf": f"{_AT}.aiperf:FORMAT",
        "guidellm": f"{_AT}.guidellm:FORMAT",
        "inference-perf": f"{_AT}.inference_perf:FORMAT",
    },
    result_files={"peers": f"{_AT}.results:peer_side"},
)
