# pyright: basic, reportMissingImports=false
"""Host buffers that the real runtime reaches by DMA; here plain tensors."""

from __future__ import annotations

import torch


def aligned_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **_: object) -> torch.Tensor:
    """An uninitialised host tensor."""
    return torch.empty(shape, dtype=dtype)
