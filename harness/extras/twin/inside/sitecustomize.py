# pyright: basic, reportMissingImports=false
"""Runs first in every process of the server: makes torchvision importable where its compiled part does not load.

transformers imports torchvision, whose Python part registers fakes for operators of its compiled part. A compiled part
built for a GPU does not load beside a CPU build of torch. The schemas of the operators are then defined here; no
operator is ever called. Where the compiled part loads, defining them would end the process.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class _BeforeTorchvision(MetaPathFinder):
    """Defines the schemas when torchvision is first imported, so that processes without torch start quickly."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        del path, target
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            if not _compiled_part_loads():
                _define_schemas()


def _compiled_part_loads() -> bool:
    import torch

    spec = importlib.util.find_spec("torchvision")
    places = (spec.submodule_search_locations if spec is not None else None) or ()
    for library in (path for place in places for path in Path(place).glob("_C*.so")):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return True
    return False


def _define_schemas() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    # The schemas live as long as the library object.
    torch.library._twin_torchvision = library  # type: ignore[attr-defined]


if importlib.util.find_spec("torch") is not None:
    sys.meta_path.insert(0, _BeforeTorchvision())
