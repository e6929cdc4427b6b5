"""Each module here is one kind of server, as a value ``BACKEND``: its checks, its launch, its ``perform``.

What others may know of a kind without running it stands in ``harness.kinds``; a module is loaded when it is needed.
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
    """One line for each kind: can this machine run it?"""
    return (backend_named(name).readiness() for name in KINDS)
