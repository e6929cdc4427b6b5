"""A vLLM plugin that watches vllm-rbln's engine core and writes one record per step to a file of its own.

Nothing of the server's work is decided or changed here; whatever goes wrong is one log line, never an error of the
server. Without RBLN_OBSERVER_FILE it does nothing.
"""

from __future__ import annotations

import logging
import os

FILE_VARIABLE = "RBLN_OBSERVER_FILE"
# Below the tree that vllm-rbln's own logging configuration declares, so that the line reaches its handlers.
LOG = logging.getLogger("vllm_rbln.rbln_observer")


def register() -> None:
    """Entry point of ``vllm.general_plugins``: called in every process of the server, possibly more than once."""
    path = os.environ.get(FILE_VARIABLE, "")
    if not path:
        return
    try:
        from .hook import when_scheduler_is_made
        from .observe import attach

        when_scheduler_is_made(lambda scheduler: attach(scheduler, path))
    except Exception as error:
        LOG.warning("[OBSERVER] not observing: %s: %s", type(error).__name__, error)
