"""A stand-in for Rebellions' closed device runtime: the calls of optimum-rbln and vllm-rbln 0.11.1 to 0.12.1.

It compiles and computes nothing; ``twin_device`` is the device behind it.
"""

from __future__ import annotations

from importlib import metadata

from twin_device.settings import read_settings

from . import accelerator, flags, kv_cache, ops, profiler
from .compile_context import CompileContext
from .runtime import RBLNCompiledModel, Runtime

try:
    __version__ = metadata.version("rebel-compiler")
except metadata.PackageNotFoundError:
    # A twin without metadata of the stand-in.
    __version__ = "0.11.1"

__all__ = [
    "CompileContext",
    "RBLNCompiledModel",
    "Runtime",
    "accelerator",
    "compile",
    "compile_from_torch",
    "device_count",
    "flags",
    "get_npu_name",
    "kv_cache",
    "manual_seed",
    "npu_is_available",
    "ops",
    "profiler",
]


def get_npu_name(device_id: int = 0) -> str | None:
    """The device's name, None for an unknown device."""
    settings = read_settings()
    return settings.npu_name if 0 <= device_id < settings.num_npus else None


def npu_is_available(device_id: int = 0) -> bool:
    """Whether the device exists."""
    return get_npu_name(device_id) is not None


def device_count() -> int:
    """Number of devices that the machine claims to have."""
    return read_settings().num_npus


def manual_seed(seed: int) -> None:
    """Nothing here is random."""
    del seed


def compile(*_: object, **__: object) -> RBLNCompiledModel:  # noqa: A001 - the runtime's own name
    """Always refused: compiling needs the real runtime."""
    raise NotImplementedError(
        "the stand-in runtime does not compile; write an artifact with `harness server twin artifact`"
    )


compile_from_torch = compile
