"""Runs as OpenTelemetry spans, in a file or sent to a collector."""

from harness.plugins import Plugin

PLUGIN = Plugin(
    name="otel",
    summary="OpenTelemetry spans of runs, as files or sent to a collector",
    export_formats={"otel": "harness.extras.otel.spans:FORMAT"},
)
