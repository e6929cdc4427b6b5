"""Requested settings of a server beside those in force: which keys they are, and where the two differ.

``in_force`` holds keys of a ServerSpec with the values that somebody showed (``usable_kv_slots`` may stand for
``kv_slots``); a key that nobody showed is absent. Nothing is measured or refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from harness.engine.config import EngineConfig, usable_slots
from harness.spec import ServerSpec
from harness.stack.rbln.kv_rules import AUTO, rule_set

HARNESS_KEYS = frozenset({"start_timeout_s", "stop_grace_s", "port", "device_metrics_url", "declared", "api_key_env"})
"""Keys of a ServerSpec that tell the harness what to do, and the server nothing."""
ENGINE_KEYS = frozenset(
    {
        "max_num_seqs",
        "decode_buckets",
        "kv_slots",
        "slot_tokens",
        "prefix_caching",
        "rules",
        "max_active_seqs",
        "cost_model",
    }
)
"""Keys that an engine works by: all that a simulated or emulated server has."""


def requested_settings(server: ServerSpec) -> dict[str, Any]:
    """Every setting that a server is asked for, as JSON values without secrets; defaults are worked out."""
    return {
        **server.model_dump(mode="json", exclude=set(HARNESS_KEYS)),
        "kv_slots": server.num_kv_slots,
        "max_active_seqs": server.max_active_seqs or server.max_num_seqs,
        "rules": AUTO if server.rules == AUTO else rule_set(server.rules).name,
    }


def settings_of(config: EngineConfig, cost_model: str) -> dict[str, Any]:
    """The settings that an engine really runs with. cost_model: the name by which its costs were loaded."""
    return {
        "max_num_seqs": config.max_num_seqs,
        "decode_buckets": list(config.decode_buckets),
        "kv_slots": config.kv_slots,
        "slot_tokens": config.slot_tokens,
        "prefix_caching": config.prefix_caching,
        "rules": config.rules,
        "max_active_seqs": config.active_limit,
        "cost_model": cost_model,
    }


def keys_shown(in_force: Iterable[str]) -> frozenset[str]:
    """The keys of a ServerSpec that these facts say something about."""
    keys = frozenset(in_force)
    return keys | {"kv_slots"} if "usable_kv_slots" in keys else keys


def changed_keys(server: ServerSpec) -> frozenset[str]:
    """Settings whose value is not the default's."""
    table, usual = server.model_dump(), ServerSpec().model_dump()
    return frozenset(key for key, value in table.items() if value != usual[key]) - HARNESS_KEYS


def differences(server: ServerSpec, in_force: Mapping[str, Any], keys: Set[str]) -> list[str]:
    """ "kv_slots: requested 12, in force 8", for each of ``keys`` that is in force otherwise than requested."""
    found: list[str] = []
    requested = requested_settings(server)
    for key in sorted(requested.keys() & keys):
        name, wanted = key, requested[key]
        if key == "kv_slots" and key not in in_force:
            name, wanted = "usable_kv_slots", _usable_slots(server, in_force.get("partition_tokens"))
        if name in in_force and wanted != in_force[name] and not (key == "rules" and wanted == AUTO):
            found.append(f"{name}: requested {wanted}, in force {in_force[name]}")
    return found


def _usable_slots(server: ServerSpec, partition_tokens: int | None) -> int:
    """Slots that requests can hold. partition_tokens: of one slot, where a request spans several."""
    slots_per_seq = -(-server.slot_tokens // (partition_tokens or server.slot_tokens))
    return usable_slots(server.physical_slots(slots_per_seq), server.max_num_seqs, slots_per_seq)
