"""Switches of the runtime that a server asks for, from vllm-rbln 0.12.1 on; the stand-in has none on."""

from __future__ import annotations

RBLN_PROFILER = False
