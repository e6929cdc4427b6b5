"""Figures of sealed runs as Prometheus metrics, and a Grafana board that shows them."""

from harness.plugins import Plugin

PLUGIN = Plugin(
    name="prometheus",
    summary="figures of runs as Prometheus metrics, and a Grafana board",
    export_formats={"prometheus": "harness.extras.prometheus.metrics:FORMAT"},
)
