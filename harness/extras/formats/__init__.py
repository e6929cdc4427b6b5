"""Trace formats that few have: agentic Mooncake, spans, trajectories of agents, Weka and LMCache."""

from harness.plugins import Plugin

_AT = "harness.extras.formats"
PLUGIN = Plugin(
    name="formats",
    summary="traces as agentic Mooncake, OpenTelemetry, ATIF, OpenHands, opencode, SWE-agent, Weka and LMCache",
    trace_formats={
        "agentic-mooncake": f"{_AT}.agentic:FORMAT",
        "otel": f"{_AT}.otel:FORMAT",
        "atif": f"{_AT}.atif:FORMAT",
        "openhands": f"{_AT}.openhands:FORMAT",
        "opencode": f"{_AT}.opencode:FORMAT",
        "swe-agent": f"{_AT}.swe_agent:FORMAT",
        "weka": f"{_AT}.weka:FORMAT",
        "lmcache": f"{_AT}.lmcache:FORMAT",
    },
)
