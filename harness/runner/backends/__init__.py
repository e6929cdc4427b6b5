"""Each module here is a kind of server, as a value ``BACKEND``: its checks, its launch, its ``perform``.

``harness.kinds`` holds the facts of a kind that need no import of it; a module is imported at first use.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from harness.kinds import KINDS, kind_named
from harness.runner.backends.base import Backend
from harness.server.doctor import Check


def backend_named(name: str) -> Backend:
    """The backend of a known kind: ``BACKEND`` in the module of that name; SpecError for an unknown one."""
    backend: Backend = import_module(f"{__name__}.{kind_named(name).name}").BACKEND
    return backend


def readiness() -> Iterator[Check]:
    """For each kind, whether this machine can run it."""
    return (backend_named(name).readiness() for name in KINDS)
