"""Gaudi, vLLM on Intel accelerators: the reader of its profiler file."""
