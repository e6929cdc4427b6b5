# pyright: basic, reportMissingImports=false
"""What torch-rbln gives a real server at shutdown: an accelerator whose caches can be emptied.

The CPU build of torch raises there, which would end the engine process with a traceback. Nothing else is replaced.
"""

from __future__ import annotations

import torch


def _empty_cache() -> None:
    """There is none."""


if not torch.accelerator.is_available():
    torch.accelerator.empty_cache = _empty_cache
    # vLLM 0.30 empties the host's too.
    torch.accelerator.empty_host_cache = _empty_cache
