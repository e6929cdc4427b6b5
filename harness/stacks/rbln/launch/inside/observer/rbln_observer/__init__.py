"""A vLLM plugin that observes vllm-rbln's engine core and writes a record per step to a file.

It changes nothing in the server; a failure is a log line, never an error of the server. It waits, without importing
anything early, until the engine core creates its scheduler; other processes stay unchanged. Without RBLN_OBSERVER_FILE
it does nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FILE_VARIABLE = "RBLN_OBSERVER_FILE"
# In the logger tree of vllm-rbln's logging configuration, so that the line reaches its handlers.
LOG = logging.getLogger("vllm_rbln.rbln_observer")
MODULE = "vllm_rbln.v1.core.optimum_scheduler"
CLASS = "RBLNOptimumScheduler"
MARK = "_rbln_observer_waits"


def register() -> None:
    """Entry point of ``vllm.general_plugins``: called in every process of the server, possibly more than once."""
    path = os.environ.get(FILE_VARIABLE, "")
    if not path:
        return
    try:
        from .observe import attach

        when_scheduler_is_made(lambda scheduler: attach(scheduler, path))
    except Exception as error:
        LOG.warning("[OBSERVER] not observing: %s: %s", type(error).__name__, error)


def when_scheduler_is_made(attach: Callable[[Any], None]) -> None:
    """Call ``attach(scheduler)`` once for each scheduler, right after it is created."""
    module = sys.modules.get(MODULE)
    if module is not None and hasattr(module, CLASS):
        _wait_in(module, attach)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(attach))


class _Finder(MetaPathFinder):
    """Notices the import of the scheduler's module and leaves it to the other finders."""

    def __init__(self, attach: Callable[[Any], None]) -> None:
        self._attach = attach

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader = None if spec is None else spec.loader
        if spec is None or loader is None:
            return spec
        run_module = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run_module(module)
            _wait_in(module, self._attach)

        loader.exec_module = exec_module
        return spec


def _wait_in(module: ModuleType, attach: Callable[[Any], None]) -> None:
    try:
        scheduler_class = getattr(module, CLASS)
        make = scheduler_class.__init__
        if hasattr(make, MARK):
            return

        @functools.wraps(make)
        def made(self: Any, *args: Any, **options: Any) -> None:
            make(self, *args, **options)
            try:
                attach(self)
            except Exception as error:
                LOG.warning("[OBSERVER] not observing: %s: %s", type(error).__name__, error)

        setattr(made, MARK, True)
        scheduler_class.__init__ = made
    except Exception as error:
        LOG.warning("[OBSERVER] not observing: %s: %s", type(error).__name__, error)
