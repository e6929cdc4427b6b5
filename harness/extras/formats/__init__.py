"""Trace formats of others: agents' logs and trajectories but Claude's, spans, and recordings of services."""

from harness.plugins import Plugin

_AT = "harness.extras.formats"
_NAMES = "otel atif openhands gemini-cli qwen-code opencode swe-agent weka lmcache vllm-sessions"
PLUGIN = Plugin(
    name="formats",
    summary="traces of Codex, other agents, OpenTelemetry, TraceLab, Mooncake, Bailian, Weka, LMCache and vLLM itself",
    commands={"plan waits import": f"{_AT}.commands:waits_import"},
    trace_formats={
        **{name: f"{_AT}.{name}:FORMAT" for name in ("tracelab", "codex")},
        "bailian": f"{_AT}.mooncake:BAILIAN",
        "mooncake": f"{_AT}.mooncake:FORMAT",
        "csv": f"{_AT}.columns:FORMAT",
        "agentic-mooncake": f"{_AT}.agentic:FORMAT",
        **{name: f"{_AT}.{name.replace('-', '_')}:FORMAT" for name in _NAMES.split()},
    },
)
