"""How each release of the served stack speaks: what its answers, errors, metrics and log have that another's lack.

One entry per release; a release without one speaks as the one before it. What is scheduled is not told here, that is
``harness.stack.rbln.kv_rules``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.stack.rbln.kv_rules import NEWEST_STABLE, RULE_SETS, RuleSet

# The rest of vLLM's CacheConfig, as it is on this path.
_CONFIG_OF_0_22: dict[str, object] = {
    "_block_size_resolved": True,
    "cache_dtype": "auto",
    "calculate_kv_scales": False,
    "gpu_memory_utilization": 0.92,
    "hash_block_size": None,
    "is_attention_free": False,
    "kv_cache_dtype_skip_layers": [],
    "kv_cache_memory_bytes": None,
    "kv_offloading_backend": "native",
    "kv_offloading_size": None,
    "kv_sharing_fast_prefill": False,
    "mamba_block_size": None,
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": None,
    "mamba_ssm_cache_dtype": "auto",
    "num_cpu_blocks": None,
    "num_gpu_blocks_override": None,
    "prefix_caching_hash_algo": "sha256",
    "sliding_window": None,
    "user_specified_block_size": True,
    "user_specified_mamba_block_size": False,
}
_CONFIG_OF_0_30 = {
    **{key: value for key, value in _CONFIG_OF_0_22.items() if key not in ("calculate_kv_scales", "hash_block_size")},
    "enable_mamba_fine_grained_prefix_cache": False,
    "gpu_memory_utilization": 0.93,
    "kv_cache_layout": None,
    "prefix_cache_retention_interval": 0,
    "prefix_match_unit": None,
    "replayssm_buffer_len": 16,
    "skip_page_size_padded": None,
    "use_kda_recoverssm": False,
    "use_replayssm": False,
}
_CONFIG_OF_0_31 = {
    **{key: value for key, value in _CONFIG_OF_0_30.items() if key != "enable_mamba_fine_grained_prefix_cache"},
    "effective_attention_block_size": 128,
    "enable_mamba_shared_prefix_checkpoint": False,
    "swa_bounded_replay": True,
}


@dataclass(frozen=True)
class Dialect:
    """What one release says in its own way.

    vllm: the version it pins. null_fields: what ends a whole answer, always null here. has_usage_details: usage says
    null and zero where older ones left the field away. has_empty_tool_calls: a chat's message lists no calls.
    names_fields: an error names the field at fault. kv_device: whose KV cache the log speaks of. tells_pool: the size
    of the pool is among the cache's labels, and in one line of the log. counts_preemptions: there is a histogram of
    them. cache_config: labels of vllm:cache_config_info that depend on no setting.
    """

    vllm: str
    null_fields: tuple[str, ...]
    has_usage_details: bool
    has_empty_tool_calls: bool
    names_fields: bool
    kv_device: str
    tells_pool: bool
    counts_preemptions: bool
    cache_config: Mapping[str, object]


_OF_0_11_1 = Dialect(
    vllm="0.22.0",
    null_fields=("kv_transfer_params",),
    has_usage_details=False,
    has_empty_tool_calls=True,
    names_fields=False,
    kv_device="GPU",
    tells_pool=False,
    counts_preemptions=False,
    cache_config=_CONFIG_OF_0_22,
)
_OF_0_12_0 = Dialect(
    vllm="0.30.0",
    null_fields=("kv_transfer_params", "ec_transfer_params", "metrics"),
    has_usage_details=True,
    has_empty_tool_calls=False,
    names_fields=True,
    kv_device="CPU",
    tells_pool=True,
    counts_preemptions=True,
    cache_config=_CONFIG_OF_0_30,
)
DIALECTS = {
    "0.11.1": _OF_0_11_1,
    # Its answers were not compared: those of 0.11.1, under its own number.
    "0.11.2": replace(_OF_0_11_1, vllm="0.24.0"),
    "0.12.0": _OF_0_12_0,
    "0.12.1": replace(_OF_0_12_0, vllm="0.31.0", cache_config=_CONFIG_OF_0_31),
}
"""By vllm-rbln release, oldest first."""


def dialect_of(rules: RuleSet) -> Dialect:
    """How the newest release that follows ``rules`` speaks; rules that no release follows, as the newest stable."""
    release = (rules.releases or RULE_SETS[NEWEST_STABLE].releases)[-1]
    spoken = [dialect for known, dialect in DIALECTS.items() if _number(known) <= _number(release)]
    return spoken[-1]


def _number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))
