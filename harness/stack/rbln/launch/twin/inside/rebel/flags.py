"""Switches of the runtime that a server reads from vllm-rbln 0.12.1 on; all off in the stand-in."""

from __future__ import annotations

RBLN_PROFILER = False
