"""Words, environment and log format of ``vllm serve``: the same on this host, on another one and on the twin.

Nothing is written or started here. Next: ``backends.rbln`` and ``remote.plan`` make LaunchPlans of it.
Source: vllm 0.22.0, vllm-rbln 0.11.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.live.launch import LOOPBACK
from harness.spec import ServerSpec

PRECISE_FORMAT = "%(created).6f %(process)d %(levelname)s %(name)s %(message)s"
DEBUG_LOGGERS = (
    "vllm_rbln.v1.core.prefix_cache_manager",
    "vllm_rbln.model_executor.models.optimum.model_base",
    "vllm_rbln.v1.worker.optimum_model_runner",
)
"""The only loggers read below INFO: slots and evictions; decode buckets and KV copies; prefill and release."""
SOCKET_FOLDER_VARIABLE = "VLLM_RPC_BASE_PATH"
"""vLLM's processes talk over sockets in it and leave them there; by default it is the common temporary folder."""
QUIET = {
    "PYTHONUNBUFFERED": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_COLOR": "0",
    "NO_COLOR": "1",
}


def visible_devices(vllm_rbln: str, devices: Iterable[int]) -> dict[str, str]:
    """The variable that names a server's NPUs: RBLN_DEVICES, from vllm-rbln 0.12 on RBLN_VISIBLE_DEVICES."""
    release = tuple(map(int, re.findall(r"\d+", vllm_rbln)[:2]))
    name = "RBLN_VISIBLE_DEVICES" if release >= (0, 12) else "RBLN_DEVICES"
    return {name: ",".join(map(str, devices))}


def logging_config() -> dict[str, Any]:
    """A logging.dictConfig for VLLM_LOGGING_CONFIG_PATH: microseconds, and DEBUG only where it is read.

    It replaces the stack's own set-up, so both trees must be in it. The precise line's first word is the epoch second.
    """
    loggers: dict[str, Any] = {
        tree: {"handlers": ["stderr"], "level": "INFO", "propagate": False} for tree in ("vllm", "vllm_rbln")
    }
    loggers |= {name: {"level": "DEBUG"} for name in DEBUG_LOGGERS}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"precise": {"format": PRECISE_FORMAT}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "precise"}},
        "loggers": loggers,
    }


def serve_arguments(server: ServerSpec, artifact: Path, port: int, model: str, override: int | None) -> tuple[str, ...]:
    """The words after ``vllm``. extra_args come last, so that they win."""
    return (
        "serve",
        str(artifact),
        *("--host", LOOPBACK, "--port", str(port), "--served-model-name", model),
        "--enable-prompt-tokens-details",
        "--enable-logging-iteration-details",
        "--enable-log-requests",
        "--enable-prefix-caching" if server.prefix_caching else "--no-enable-prefix-caching",
        *("--generation-config", "vllm"),
        # 0 would let the API server kill the engine before it prints its step statistics.
        *("--shutdown-timeout", str(max(1, int(server.stop_grace_s)))),
        *(() if override is None else ("--num-gpu-blocks-override", str(override))),
        *server.extra_args,
    )
