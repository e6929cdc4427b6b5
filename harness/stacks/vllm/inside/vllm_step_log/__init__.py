# pyright: basic, reportMissingImports=false
"""Records of a vLLM server, observation only: steps by a stat logger (``logger``) or by the engine core (``core``), and
the requests of its sessions (``sessions``).

Here is what they share: reading attributes that may be absent, the header with the settings in effect, and the file.
Importing it loads nothing of vLLM.
"""

from __future__ import annotations

import json
import logging
import os
import time
from importlib import metadata
from typing import Any

LOG = logging.getLogger("vllm.vllm_step_log")
now_ns = time.monotonic_ns  # noqa: TID251 - runs inside the server, where the harness's clock is not
OWN_REQUESTS = "rbln-harness-"
"""The ids of requests that a measurement sends begin so. The API server puts words before them."""

DRAFTS = "speculative_config.num_speculative_tokens"
SETTINGS = {
    "model": "model_config.model",
    "max_model_len": "model_config.max_model_len",
    "enforce_eager": "model_config.enforce_eager",
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "long_prefill_token_threshold": "scheduler_config.long_prefill_token_threshold",
    "policy": "scheduler_config.policy",
    "max_loras": "lora_config.max_loras",
    "enable_chunked_prefill": "scheduler_config.enable_chunked_prefill",
    "async_scheduling": "scheduler_config.async_scheduling",
    "num_gpu_blocks": "cache_config.num_gpu_blocks",
    "block_size": "cache_config.block_size",
    "enable_prefix_caching": "cache_config.enable_prefix_caching",
    "cudagraph_mode": "compilation_config.cudagraph_mode",
    "cudagraph_capture_sizes": "compilation_config.cudagraph_capture_sizes",
    "tensor_parallel_size": "parallel_config.tensor_parallel_size",
    "data_parallel_size": "parallel_config.data_parallel_size",
    "api_server_count": "parallel_config._api_process_count",
    "device_type": "device_config.device_type",
    "num_speculative_tokens": DRAFTS,
    "cudagraph_metrics": "observability_config.cudagraph_metrics",
    "iteration_details": "observability_config.enable_logging_iteration_details",
}
"""Settings in effect: name in the header, and place in vLLM's configuration."""
SPECULATIVE = {
    "speculative_method": "speculative_config.method",
    "num_speculative_tokens_per_batch_size": "speculative_config.num_speculative_tokens_per_batch_size",
    "parallel_drafting": "speculative_config.parallel_drafting",
    "disable_eagle_block_drop": "speculative_config.disable_eagle_block_drop",
    "rejection_sample_method": "speculative_config.rejection_sample_method",
    "synthetic_acceptance_rates": "speculative_config.synthetic_acceptance_rates",
    "num_lookahead_tokens": "num_lookahead_tokens",
    "use_v2_model_runner": "use_v2_model_runner",
}
"""The same of a server that decodes speculatively."""


class LineFile:
    """Append-only lines of JSON. Each is written at once, because the server may be killed at any time."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._encode = json.JSONEncoder(separators=(",", ":"), default=str).encode

    def write(self, value: Any) -> None:
        self.write_bytes((self._encode(value) + "\n").encode())

    def write_bytes(self, line: bytes) -> None:
        if os.write(self._descriptor, line) != len(line):
            raise OSError("the record was written only in part")

    def status(self) -> os.stat_result:
        return os.fstat(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def engine_file(path: str, engine: int) -> str:
    """The file of a data-parallel engine: each writes its own."""
    return path + (f".{engine}" if engine else "")


def header_of(config: Any) -> dict[str, Any]:
    """What every header says: of the process, and the settings in effect of a ``VllmConfig``."""
    places = SETTINGS | (SPECULATIVE if value_at(config, DRAFTS) else {})
    values = {name: plain(value_at(config, place)) for name, place in places.items()}
    return {
        "vllm": version(),
        "pid": os.getpid(),
        "started_ns": now_ns(),
        "effective": {name: value for name, value in values.items() if value is not None},
        "absent": [name for name, place in SETTINGS.items() if not is_there(config, place)],
    }


def kv_of(scheduler: Any) -> dict[str, Any]:
    """How KV memory is kept: the kind of each group of layers, who coordinates them, and how many tokens after a block
    its hash covers, or after a part of a prompt the drafter reads. What does not show is left out."""
    groups = value_at(scheduler, "kv_cache_config.kv_cache_groups") or ()
    coordinator = value_at(scheduler, "kv_cache_manager.coordinator")
    specs = [value_at(group, "kv_cache_spec") for group in groups]
    shown = {
        "kv_groups": [type(spec).__name__ for spec in specs if spec is not None],
        "kv_coordinator": type(coordinator).__name__ if coordinator is not None else "",
        "num_hash_lookahead_tokens": plain(value_at(scheduler, "vllm_config.num_hash_lookahead_tokens")),
        "num_prefill_lookahead": plain(value_at(scheduler, "num_prefill_lookahead")),
    }
    return {name: value for name, value in shown.items() if value not in (None, "", [])}


def class_of(value: Any) -> str:
    """Module and name of the class of a value."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def value_at(owner: Any, place: str) -> Any:
    """The attribute at a dotted ``place``; None when any part of it is absent or cannot be read."""
    for name in place.split("."):
        try:
            owner = getattr(owner, name, None)
        except Exception:  # a property of an unknown version
            return None
        if owner is None:
            return None
    return owner


def is_there(owner: Any, place: str) -> bool:
    """Whether this vLLM has the attribute. A part that is None hides the rest, which then counts as there."""
    for name in place.split("."):
        try:
            if not hasattr(owner, name):
                return False
            owner = getattr(owner, name)
        except Exception:
            return False
        if owner is None:
            return True
    return True


def plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)


def version(distribution: str = "vllm") -> str:
    """The installed version; "" where there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
