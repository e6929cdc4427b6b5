"""``[fleet]``: the devices that share an experiment's blocks, and how emulated devices differ.

The number of a block determines its device; every device has the same number of blocks. Nothing is started here.
"""

from __future__ import annotations

import math
import re
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from harness.spec.base import DeviceNumbers, Spec


class EmulatedDevice(Spec):
    """Speed, drift and noise of an emulated device, and the effect of busy neighbours: shares of each step's time."""

    slower: float = Field(default=0.0, gt=-0.9, le=9, description="share by which each step lasts longer")
    drift_per_hour: float = Field(default=0.0, ge=-1, le=1, description="share that each model hour adds to that")
    noise: float = Field(default=0.0, ge=0, le=0.5, description="standard deviation of a run's log step time")
    neighbour_cost: float = Field(default=0.0, ge=0, le=1, description="share that each busy neighbour adds")

    def factor(self, hours: float, neighbours: int, normal: float) -> float:
        """The factor on the step times of a run.

        hours: since the device's first run. neighbours: devices busy at the same time. normal: a standard normal draw.
        """
        level = 1 + self.slower + self.drift_per_hour * hours + self.neighbour_cost * neighbours
        return max(0.05, level) * math.exp(self.noise * normal)


_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


class Place(NamedTuple):
    """A device of a fleet. host: "" for the host of the harness."""

    host: str
    device: int

    def __str__(self) -> str:
        return f"{self.host}/dev{self.device}" if self.host else f"dev{self.device}"


class FleetSpec(Spec):
    """Devices that run blocks in parallel, each with one server at a time."""

    devices: DeviceNumbers = Field(min_length=1, max_length=256, description="numbers of the devices of each host")
    hosts: tuple[str, ...] = Field(
        default=(), max_length=256, description="hosts that have these devices, as their workers are named; none: this"
    )
    scheduler: str = Field(
        default="", description="Dask scheduler that the workers of hosts are at, e.g. tls://alpha:8786"
    )
    open_port: bool = Field(
        default=False, description="allow a scheduler without TLS that is not on loopback: whoever reaches it runs code"
    )
    overcommit: bool = Field(
        default=False, description="run even where the clients' lateness, measured before, is over the limits"
    )
    lockstep: bool = Field(
        default=False,
        description="runs of equal place in a round of the devices start at once, all blocks of a round on one plan",
    )
    emulated: dict[int, EmulatedDevice] = Field(
        default_factory=dict, description="by device, how it differs: emulator and simulator only; none: they are equal"
    )

    @model_validator(mode="after")
    def _known_devices(self) -> FleetSpec:
        if unknown := sorted(self.emulated.keys() - set(self.devices)):
            raise ValueError(f"emulated.{unknown[0]} is not one of the devices {list(self.devices)}")
        return self

    @field_validator("hosts")
    @classmethod
    def _distinct_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(hosts)) != len(hosts) or not all(_HOST.fullmatch(host) for host in hosts):
            raise ValueError(f"hosts must be distinct names, got {list(hosts)}")
        return hosts

    @model_validator(mode="after")
    def _has_safe_scheduler(self) -> FleetSpec:
        if self.scheduler and not self.hosts:
            raise ValueError("a scheduler is for hosts, and none are named; fleet.hosts says which")
        name = urlsplit(self.scheduler)
        if self.scheduler and (name.scheme not in ("tcp", "tls") or not name.hostname or not name.port):
            raise ValueError(f"scheduler is {self.scheduler!r}, not tls://HOST:PORT or tcp://HOST:PORT")
        if name.scheme == "tcp" and not (self.is_on_loopback or self.open_port):
            raise ValueError(
                f"scheduler {self.scheduler} is neither loopback nor TLS, and whoever reaches it runs code on every "
                "worker; use tls:// or an ssh tunnel (docs/fleet.md), or say open_port = true"
            )
        return self

    @property
    def is_on_loopback(self) -> bool:
        """Whether only its own host can reach the scheduler."""
        host = urlsplit(self.scheduler).hostname or ""
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    @property
    def places(self) -> tuple[Place, ...]:
        """All devices, those of several hosts in turn."""
        return tuple(Place(host, device) for device in self.devices for host in self.hosts or ("",))

    def place_of(self, block: int) -> Place:
        """The device that performs all conditions of a block."""
        return self.places[block % len(self.places)]
