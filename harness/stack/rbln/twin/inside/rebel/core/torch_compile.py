# pyright: basic, reportMissingImports=false
"""The backend that torch.compile is given for the sampler: runs the traced graph as it is, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def rbln_backend(graph: torch.fx.GraphModule, inputs: Sequence[Any], **_: object) -> Callable[..., Any]:
    """The graph itself, uncompiled."""
    del inputs
    return graph.forward
