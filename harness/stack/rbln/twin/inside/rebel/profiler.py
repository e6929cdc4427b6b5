"""The runtime's profiler, which vllm-rbln imports from 0.12.1 on and calls only where RBLN_PROFILER is on."""

from __future__ import annotations
