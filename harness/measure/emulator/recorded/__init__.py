"""What vLLM's server says whatever is scheduled, as data: metric families, the fixed fields of answers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def recorded(name: str) -> Any:
    """The JSON document ``name`` of this folder. It is shared: callers do not change it."""
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))
