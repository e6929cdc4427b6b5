"""The runtime's profiler. vllm-rbln imports it from 0.12.1 on and calls it only where RBLN_PROFILER is on."""

from __future__ import annotations
