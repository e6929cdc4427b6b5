# pyright: basic, reportMissingImports=false
"""An accelerator whose caches can be emptied, which a real server has from torch-rbln and calls at shutdown.

The CPU build of torch raises there, which would end the engine process with a traceback. Nothing else is replaced.
"""

from __future__ import annotations

import torch


def _empty_cache() -> None:
    """There is no cache."""


if not torch.accelerator.is_available():
    torch.accelerator.empty_cache = _empty_cache
    # vLLM 0.30 also empties the host's cache.
    torch.accelerator.empty_host_cache = _empty_cache
