"""The smaller tables of an experiment: [client], [limits], [slo], [window], [prediction], [stop], [tune] and [fleet].

Data only: nothing is replayed, judged, drawn, decided or started here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from ipaddress import ip_address
from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from harness.clock import NS_PER_S
from harness.model.spec.base import DeviceNumbers, Spec

FORMER_CLIENTS = ("epoll", "aiohttp")
# Time in steps (s) is of runs whose engine core stamped them.
Basis = Literal["a", "s", "b"]
EVERY = "every"
MIN_LOOK_BLOCKS = 2
MAX_PRESET_LOOKS = 20
FOREVER_NS = 1 << 62


class ClientSpec(Spec):
    """How the client replays the plan."""

    stream: bool = True
    spin_us: int = Field(default=300, ge=0, le=2000, description="longest busy-wait before a deadline; 0: none")
    processes: int = Field(default=1, ge=1, le=64, description="client processes that share the sessions")
    realtime: bool = Field(
        default=False,
        description="SCHED_RR for the replay where the system allows it, else a better nice value: it runs as soon as "
        "it wakes, before a server that shares its cores",
    )
    own_core: bool = Field(
        default=False, description="a core for each client process, which a server that the harness starts does not use"
    )
    scrape_interval_s: float = Field(default=1.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _one_client(cls, table: Any) -> Any:
        """Records and files of earlier releases name one of two clients; there is one."""
        given = cast("Mapping[str, Any]", table) if isinstance(table, Mapping) else {}
        if given.get("name") not in FORMER_CLIENTS:
            return table
        return {key: value for key, value in given.items() if key != "name"}


class LimitsSpec(Spec):
    """Limits beyond which a run is INVALID. Times in wall ms on the client's machine, where nothing else is written."""

    rearrival_lag_p99_ms: float = Field(default=10.0, gt=0)
    start_spread_ms: float = Field(default=20.0, gt=0)
    stall_ms: float = Field(default=1000.0, gt=0, description="longest host stall that may touch a request")
    stamp_lag_ms: float = Field(
        default=1000.0, gt=0, description="longest pause of the client, also from the kernel's stamp to its own"
    )
    first_token_held_ms: float = Field(
        default=5.0, gt=0, description="longest that a proxy may hold back first tokens, mean over the answers"
    )
    read_together_ms: float = Field(
        default=5.0, gt=0, description="how much earlier than its stamp a chunk may have come, mean over the chunks"
    )
    server_stall_ms: float = Field(
        default=1000.0, gt=0, description="longest time without an engine step, beyond what the cost model explains"
    )
    schedule_moved_share: float = Field(
        default=0.05, gt=0, description="share of the replay by which stalls may move an emulator's schedule"
    )
    needs_stall_meter: bool = Field(default=True, description="a run whose stall meter was lost is INVALID")
    needs_metrics: bool = Field(default=True, description="a run whose server answers no GET /metrics is INVALID")
    residual_share: float | None = Field(
        default=None, gt=0, le=1, description="largest (B - A) / B of a run; without it, only a finding above 0.05"
    )
    retries: int = Field(
        default=0, ge=0, le=100, description="times that an INVALID run may be repeated under a freeze, which fixes it"
    )
    request_timeout_s: float = Field(default=600.0, gt=0, description="model seconds one request may take")


class SloSpec(Spec):
    """Latency targets. Goodput counts the requests per second that meet every target of a request that is set.

    ``session_s`` is the target of a whole session: see "Sessions" in docs/reference/method-sessions.md.
    """

    ttft_ms: float | None = Field(default=None, gt=0, description="model ms to the first token")
    tpot_ms: float | None = Field(
        default=None, gt=0, description="model ms per token after the first, mean of the request"
    )
    itl_ms: float | None = Field(default=None, gt=0, description="model ms between two tokens of the request")
    itl_percentile: float = Field(
        default=100.0, gt=0, le=100, description="percentile of the request's gaps that itl_ms limits; 100: every gap"
    )
    e2e_ms: float | None = Field(default=None, gt=0, description="model ms from the send to the end of the answer")
    session_s: float | None = Field(
        default=None, gt=0, description="model s from a session's first send to its last token, less its waits"
    )

    @model_validator(mode="after")
    def _percentile_has_a_limit(self) -> SloSpec:
        if self.itl_ms is None and "itl_percentile" in self.model_fields_set and self.itl_percentile != 100.0:
            raise ValueError("itl_percentile limits nothing without itl_ms; set both")
        return self

    @property
    def is_set(self) -> bool:
        """Whether a request has any target."""
        return any(limit is not None for limit in (self.ttft_ms, self.tpot_ms, self.itl_ms, self.e2e_ms))


class WindowSpec(Spec):
    """The part of a run, measured or simulated, whose requests count. Times in model seconds.

    It begins when ``warmup_s`` are over and every user has finished ``after_requests`` requests, and lasts
    ``measure_s``.
    """

    warmup_s: float = Field(default=0.0, ge=0, description="model seconds from the common start that do not count")
    after_requests: int = Field(default=0, ge=0, description="requests that every user finishes before it begins")
    measure_s: float | None = Field(default=None, gt=0, description="model seconds that count then; default: the rest")

    def in_words(self, seconds: str = "s") -> str:
        """ " due from 5 to 25 s after the start", to follow the word requests; empty where all count."""
        if self.after_requests:
            begin = f" due after every user has finished {self.after_requests} requests"
            warm = f" and {self.warmup_s:g} {seconds} have passed" if self.warmup_s else ""
            return begin + warm + ("" if self.measure_s is None else f", for {self.measure_s:g} {seconds}")
        if self.measure_s is None:
            return f" due from {self.warmup_s:g} {seconds} after the start" if self.warmup_s else ""
        return f" due from {self.warmup_s:g} to {self.warmup_s + self.measure_s:g} {seconds} after the start"

    def bounds_ns(self, start_ns: int, ready_ns: int) -> tuple[int, int]:
        """[first, last) instants of the window of a run that starts at ``start_ns``.

        ready_ns: when every user has finished ``after_requests`` requests.
        """
        first_ns = max(start_ns + round(self.warmup_s * NS_PER_S), ready_ns)
        return first_ns, FOREVER_NS if self.measure_s is None else first_ns + round(self.measure_s * NS_PER_S)


class PerturbationSpec(Spec):
    """Perturbations of predicted runs: standard deviations; means for delays, which are exponential.

    A size that is left out comes from the calibration in the cost file. Without a calibration it is assumed, and
    reports say so (``harness.model.sim.draws``).
    """

    draws: int = Field(default=20, ge=1, le=100_000, description="simulations of each run; 1: a single, nominal one")
    level: float = Field(default=0.9, gt=0, lt=1, description="share of outcomes that an interval is to hold")
    seed: int = Field(default=20261201, ge=0)
    start_ms: float | None = Field(default=None, ge=0, description="mean delay of a session's start")
    lag_ms: float | None = Field(default=None, ge=0, description="mean delay of a re-arrival")
    step_sd: float | None = Field(default=None, ge=0, lt=0.25, description="relative, each step on its own")
    decode_sd: float | None = Field(default=None, ge=0, lt=0.5, description="relative, all decode steps of a device")
    bucket_sd: float | None = Field(default=None, ge=0, lt=0.5, description="relative, f(b) of each bucket")
    prefill_sd: float | None = Field(default=None, ge=0, lt=0.5, description="relative, all prefills")
    artifact_sd: float | None = Field(default=None, ge=0, lt=0.5, description="relative, all steps of a compilation")


_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|m|h)")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?GiB")


def seconds_of(duration: str) -> float | None:
    """The seconds of "90s", "20min" or "20m", "2h"; None for any other text."""
    match = _DURATION.fullmatch(duration)
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2][0]] if match else None


class TuneSpec(Spec):
    """What `harness tune` may change, for which goal, and how long it may take."""

    budget: str = Field(default="1h", description="wall time for all of it, '90s', '20min', '2h'")
    may_change: tuple[str, ...] = Field(
        default=(),
        description="keys of [server] that may change: kv_slots, num_gpu_blocks, max_num_seqs, decode_buckets, "
        "prefix_caching, router, long_prefill_tokens, max_num_batched_tokens; default: all that this server has; and "
        "where they are named async_scheduling, block_size, offload_blocks; with given rates num_speculative_tokens",
    )
    goal: Literal["cost", "sessions"] = Field(
        default="cost",
        description='"cost": least device time within the targets in [slo], if any; "sessions": most agents at a time '
        "whose targets in [slo] hold",
    )
    percentile: float = Field(
        default=95.0,
        gt=0,
        lt=100,
        description="share of requests, and of sessions, in percent that is to meet the targets in [slo], if any",
    )
    memory: str = Field(default="", description="of one device, '14GiB'; default: no limit on a modelled server")
    agents: tuple[int, ...] = Field(
        default=(),
        description="numbers of sessions at a time that sizes are chosen for, each alike; default: the workload's, and "
        "between what is as good for it, a quarter less and more",
    )
    most_sizes: int = Field(
        default=0, ge=0, le=64, description="compiled sizes at most; default: two more than now, and 8 at most"
    )

    @field_validator("budget")
    @classmethod
    def _is_duration(cls, budget: str) -> str:
        if not seconds_of(budget):
            raise ValueError(f"is {budget!r}, and a time is wanted: '90s', '20min' or '2h'")
        return budget

    @field_validator("memory")
    @classmethod
    def _is_memory(cls, memory: str) -> str:
        if memory and (not (match := _MEMORY.fullmatch(memory)) or float(match[1]) == 0):
            raise ValueError(f"is {memory!r}, and a size is wanted: '14GiB'")
        return memory

    @field_validator("agents")
    @classmethod
    def _are_agents(cls, agents: tuple[int, ...]) -> tuple[int, ...]:
        if any(number < 1 for number in agents) or len(set(agents)) != len(agents):
            raise ValueError(f"must be positive and without repeats, got {list(agents)}")
        return agents

    @property
    def budget_s(self) -> float:
        """The budget in seconds."""
        return seconds_of(self.budget) or 0.0

    @property
    def memory_gib(self) -> float | None:
        """Memory of one device, GiB; None where no limit was given."""
        match = _MEMORY.fullmatch(self.memory)
        return float(match[1]) if match else None


class StopSpec(Spec):
    """The stopping rule: `harness run --until decided` ends at the first look that decides every comparison."""

    margin: float = Field(gt=0, lt=1, description="cost ratios from 1 / (1 + margin) to 1 + margin count as equal")
    alpha: float = Field(
        default=0.05, gt=0, le=0.5, description="chance that any look of any comparison is wrong; comparisons share it"
    )
    budget: int = Field(ge=2, le=1000, description="blocks at most; a block is every condition once on one plan draw")
    looks: Literal["every"] | tuple[int, ...] = Field(
        default=EVERY, description='"every": after each block; or the numbers of blocks after which to look, [6, 12]'
    )
    channel: Basis = Field(
        default="a", description="whose costs decide: a, reconstructed, s, measured in steps, or b, observed in flight"
    )

    @field_validator("looks", mode="before")
    @classmethod
    def _looks(cls, looks: Any) -> Any:
        """One message; a union would report a failure for each of its types."""
        if looks == EVERY:
            return looks
        is_list = isinstance(looks, list | tuple)
        if not is_list or not looks or any(isinstance(look, bool) or not isinstance(look, int) for look in looks):
            raise ValueError('must be "every" or a list of numbers of blocks, e.g. [6, 12, 24]')
        if looks[0] < MIN_LOOK_BLOCKS or any(later <= earlier for earlier, later in pairwise(looks)):
            raise ValueError(f"must ascend from {MIN_LOOK_BLOCKS} blocks on, not {list(looks)}")
        if len(looks) > MAX_PRESET_LOOKS:
            raise ValueError(f'has {len(looks)} looks, at most {MAX_PRESET_LOOKS}; for more say "every"')
        return looks

    @model_validator(mode="after")
    def _within_budget(self) -> StopSpec:
        if self.looks != EVERY and self.preset_looks[-1] > self.budget:
            raise ValueError(f"looks: the last look, at {self.looks[-1]} blocks, is beyond the budget of {self.budget}")
        return self

    @property
    def preset_looks(self) -> tuple[int, ...]:
        """Numbers of blocks of the looks, the end of the budget included; empty where every block is a look."""
        if self.looks == EVERY:
            return ()
        looks = tuple(int(look) for look in self.looks)
        return looks if looks[-1] >= self.budget else (*looks, self.budget)

    @property
    def log_margin(self) -> float:
        """ln(1 + margin): logs of cost ratios within it count as equal."""
        return math.log1p(self.margin)

    def __str__(self) -> str:
        when = (
            "a look after every block" if self.looks == EVERY else f"looks at {', '.join(map(str, self.looks))} blocks"
        )
        limits = f"margin {self.margin:.3g}, alpha {self.alpha:g}, at most {self.budget} blocks"
        return f"{limits}, {when}, channel {self.channel.upper()}"


class EmulatedDevice(Spec):
    """Speed, drift and noise of an emulated device, and the effect of busy neighbours: shares of each step's time."""

    speed_offset: float = Field(default=0.0, gt=-0.9, le=9, description="share by which each step lasts longer")
    drift_per_hour: float = Field(default=0.0, ge=-1, le=1, description="share that each model hour adds to that")
    noise: float = Field(default=0.0, ge=0, le=0.5, description="standard deviation of a run's log step time")
    neighbour_cost: float = Field(default=0.0, ge=0, le=1, description="share that each busy neighbour adds")

    def factor(self, hours: float, neighbours: int, normal: float) -> float:
        """The factor on the step times of a run.

        hours: since the device's first run. neighbours: devices busy at the same time. normal: a standard normal draw.
        """
        level = 1 + self.speed_offset + self.drift_per_hour * hours + self.neighbour_cost * neighbours
        return max(0.05, level) * math.exp(self.noise * normal)


_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


class DeviceSlot(NamedTuple):
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
                "worker; use tls:// or an ssh tunnel (docs/guides/fleet.md), or say open_port = true"
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
    def places(self) -> tuple[DeviceSlot, ...]:
        """All devices, those of several hosts in turn."""
        return tuple(DeviceSlot(host, device) for device in self.devices for host in self.hosts or ("",))

    def place_of(self, block: int) -> DeviceSlot:
        """The device that performs all conditions of a block."""
        return self.places[block % len(self.places)]
