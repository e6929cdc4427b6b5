# pyright: basic, reportMissingImports=false
"""The backend of torch.compile for the sampler: runs the traced graph unchanged, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def rbln_backend(graph: torch.fx.GraphModule, inputs: Sequence[Any], **_: object) -> Callable[..., Any]:
    """The graph, uncompiled."""
    del inputs
    return graph.forward
