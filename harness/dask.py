"""Dask's distributed package, where it is installed; nothing else of the harness imports it.

An optional extra: one machine needs none of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from harness.errors import SpecError


def distributed(where: str) -> Any:
    """The package; a SpecError with ``where`` when it is not installed."""
    try:
        return import_module("distributed")
    except ImportError as error:
        raise SpecError(
            "Dask is not installed", where=where, hint="Install it: pip install 'rbln-harness[cluster]'"
        ) from error
