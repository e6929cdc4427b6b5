"""Words, environment and log format of ``vllm serve``: the same on this host, on another one and on the twin.

Nothing is written or started here.
Source: vllm 0.22.0, vllm-rbln 0.11.1.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.records import Observation
from harness.redact import filled_env
from harness.server.launch import LOOPBACK
from harness.spec import ServerSpec
from harness.stack.rbln.observer import observer_variables

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
    name = "RBLN_VISIBLE_DEVICES" if _release(vllm_rbln) >= (0, 12) else "RBLN_DEVICES"
    return {name: ",".join(map(str, devices))}


def step_report_variables(vllm_rbln: str, folder: Path) -> dict[str, str]:
    """The variable that makes a server write its step statistics into ``folder`` as JSON, from vllm-rbln 0.12.1 on.

    The log holds them too, rounded, and only when the server ends in good order.
    """
    return {"VLLM_RBLN_METRICS_DIR": str(folder)} if _release(vllm_rbln) >= (0, 12, 1) else {}


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def server_env(
    server: ServerSpec,
    variables: Mapping[str, str],
    search: Sequence[str],
    observer: Path | None,
    plugins: str | None = None,
) -> dict[str, str]:
    """The environment of a served stack; what the experiment itself sets wins over everything.

    search: folders before the PYTHONPATH that the experiment asks for. observer: file of its records, None without it.
    plugins: VLLM_PLUGINS of the host, where the experiment sets none.
    """
    env = {**QUIET, "VLLM_RBLN_METRICS": "1", **variables}
    if observer is not None:
        env |= observer_variables(observer, server.env.get("VLLM_PLUGINS", plugins))
    asked = server.env.get("PYTHONPATH", "").split(os.pathsep)
    if path := [*search, *(folder for folder in asked if folder)]:
        env["PYTHONPATH"] = os.pathsep.join(path)
    given = filled_env(server.env, os.environ)
    return {**env, **{key: value for key, value in given.items() if key not in {"PYTHONPATH", "VLLM_PLUGINS"}}}


def declared(server: ServerSpec, patch: dict[str, Any]) -> Observation:
    """What the log of a served stack will show. patch: the record of what was patched."""
    return Observation(
        steps="iteration-log" if server.patch == "none" else "bucket-log",
        # Without prefix caching the stack keeps no slots, so it has nothing to log about them.
        has_kv_log=server.prefix_caching,
        patch=patch,
    )


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


def _active_limit(server: ServerSpec) -> tuple[str, ...]:
    """Words that lower admission; vLLM compares them with a limit that it would else only learn from the artifact."""
    if server.max_active_seqs is None:
        return ()
    return ("--max-num-seqs", str(server.max_num_seqs), "--max-num-active-seqs", str(server.max_active_seqs))


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
        *_active_limit(server),
        *(() if override is None else ("--num-gpu-blocks-override", str(override))),
        *server.extra_args,
    )
