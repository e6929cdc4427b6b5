"""Facts about launch and client in a manifest, as typed values.

A missing or unreadable value is None or empty, never zero; the other values stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

DeviceMetrics = dict[str, dict[str, dict[str, float]]]
Facts = TypeVar("Facts", bound="_Facts")


def table_at(found: object, *keys: str) -> Mapping[str, Any]:
    """The table below these keys; an empty one where there is none."""
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return found if isinstance(found, Mapping) else {}  # pyright: ignore[reportUnknownVariableType]


class _Facts(BaseModel):
    """Base: frozen; keys that this version does not know are left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    @classmethod
    def tolerant(cls: type[Facts], found: Any) -> Facts:
        """The facts in a part of a manifest; a key that does not read is as if it were not there."""
        table: dict[str, Any] = dict(found) if isinstance(found, Mapping) else {}
        try:
            return cls.model_validate(table)
        except ValidationError as error:
            broken = {str(item["loc"][0]) for item in error.errors()}
            return cls.model_validate({key: value for key, value in table.items() if key not in broken})


class LaunchReport(_Facts):
    """What the log and metrics of a server show of it.

    settings: last value of each changed setting. engine: from its first configuration line.
    cache_config_info: labels of that gauge. vllm: its version. pool_tokens: of the whole KV pool, vLLM's null block
    included. device_metrics: tracker ("MODEL", "SAMPLER") -> phase ("decode", "prefill") -> numbers; latencies in ms,
    averages in us. observer: lines of the observer.
    """

    settings: dict[str, str] = Field(default_factory=dict)
    engine: dict[str, str] = Field(default_factory=dict)
    cache_config_info: dict[str, str] = Field(default_factory=dict)
    vllm: str = ""
    pool_tokens: int | None = None
    device_metrics: DeviceMetrics = Field(default_factory=dict)
    observer: tuple[str, ...] = ()

    def decode_p50_ms(self, tracker: str) -> float | None:
        """Median of one tracker over all decode steps of the server; None where it reported none."""
        return self.device_metrics.get(tracker, {}).get("decode", {}).get("p50_ms")


class SelfAudit(_Facts):
    """Dispatch lags of the replay against the null server, wall ms: of re-arrivals, and of all sends."""

    floor_rearrival_lag_ms: tuple[float, ...] | None = None
    floor_lag_ms: tuple[float, ...] = ()


class ClientAudit(_Facts):
    """Figures that the client recorded. Times in wall units, except stall_intervals_ns: (start, duration), model ns."""

    num_stalls: float | None = None
    stall_max_ms: float | None = None
    stall_intervals_ns: tuple[tuple[int, int], ...] | None = None
    cpu_s: float | None = None
    cpu_others_s: float | None = None
    self_audit: SelfAudit | None = None

    @property
    def floor_lag_ms(self) -> tuple[float, ...]:
        """Lags of the self-audit's re-arrivals; older runs recorded only all sends together."""
        if self.self_audit is None:
            return ()
        rearrivals = self.self_audit.floor_rearrival_lag_ms
        return self.self_audit.floor_lag_ms if rearrivals is None else rearrivals
