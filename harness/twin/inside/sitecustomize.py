# pyright: basic, reportMissingImports=false
"""Runs in every process of the server before anything else: torchvision's compiled operators do not load here.

transformers imports torchvision, whose Python part wants to register fakes for operators that its compiled part would
define. Defining their schemas is enough; none is ever called. Nothing else is changed.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from typing import Any


class _BeforeTorchvision(MetaPathFinder):
    """Defines the schemas when torchvision is first imported, so that processes without torch stay quick."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        del path, target
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _define_schemas()


def _define_schemas() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    # The schemas live as long as the library object.
    torch.library._twin_torchvision = library  # type: ignore[attr-defined]


if importlib.util.find_spec("torch") is not None:
    sys.meta_path.insert(0, _BeforeTorchvision())
