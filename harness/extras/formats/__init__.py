"""Trace formats of others: agents' logs and trajectories but Claude's, spans, and recordings of services."""

from harness.plugins import Plugin

_AT = "harness.extras.formats"
PLUGIN = Plugin(
    name="formats",
    summary="traces of Codex, other agents, OpenTelemetry, TraceLab, Mooncake, Bailian, Weka, LMCache and vLLM itself",
    commands={"plan waits import": f"{_AT}.commands:waits_import"},
    trace_formats={
        "tracelab": f"{_AT}.tracelab:FORMAT",
        "codex": f"{_AT}.codex:FORMAT",
        "bailian": f"{_AT}.mooncake:BAILIAN",
        "mooncake": f"{_AT}.mooncake:FORMAT",
        "csv": f"{_AT}.columns:FORMAT",
        "agentic-mooncake": f"{_AT}.agentic:FORMAT",
        "otel": f"{_AT}.otel:FORMAT",
        "atif": f"{_AT}.atif:FORMAT",
        "openhands": f"{_AT}.openhands:FORMAT",
        "gemini-cli": f"{_AT}.gemini_cli:FORMAT",
        "qwen-code": f"{_AT}.qwen_code:FORMAT",
        "opencode": f"{_AT}.opencode:FORMAT",
        "swe-agent": f"{_AT}.swe_agent:FORMAT",
        "weka": f"{_AT}.weka:FORMAT",
        "lmcache": f"{_AT}.lmcache:FORMAT",
        "vllm-sessions": f"{_AT}.vllm_sessions:FORMAT",
    },
)
