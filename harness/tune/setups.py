"""Configurations that a search varies: what may change, how large a change is, and what it takes of a device.

Nothing is simulated here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from harness.errors import SpecError
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import DeviceSpec
from harness.model.spec import ServerSpec
from harness.model.spec.server import LEVERS, ROUTED_KEYS, SERVER_KEYS, VALUE_LEVERS, ServerShape, default_buckets
from harness.stacks.rbln.rules.kv_rules import PAGED

NUM_DRAFTS = "num_speculative_tokens"
STEPS = (1.25, 1.5, 2.0)
"""Rungs of a ladder, between a number and its double."""
MORE_SIZES, MOST_SIZES = 2, 8
"""Compiled sizes that a configuration may have more than the baseline, and in all."""


class Setup(NamedTuple):
    """A configuration of a server. kv_slots: physical ones; None under paged rules. num_gpu_blocks: only there.

    decode_buckets: in requests; of a server with drafts in tokens. replicas, policy: of servers behind a router; 1 and
    "" of a server alone. others: (key, value) of those of VALUE_LEVERS that it has, in their order.
    """

    max_num_seqs: int
    decode_buckets: tuple[int, ...]
    kv_slots: int | None
    num_gpu_blocks: int | None
    prefix_caching: bool = True
    replicas: int = 1
    policy: str = ""
    others: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, server: ServerSpec) -> Setup:
        """The configuration of a server, with the memory that it has by default written out."""
        config = EngineConfig.from_server(server.replica) if server.is_paged else None
        return cls(
            server.max_num_seqs,
            server.decode_buckets,
            None if config else server.num_kv_slots,
            config.num_blocks if config else None,
            server.prefix_caching,
            server.num_replicas,
            server.routing.policy if server.is_routed else "",
            () if config is None else tuple((key, _value_in(config, key)) for key in levers_of(server)),
        )

    @property
    def query(self) -> int:
        """Tokens of a request in a decode step."""
        return 1 + int(self.value_of(NUM_DRAFTS) or 0)

    def with_other(self, key: str, value: int) -> Setup:
        """With another value of one of VALUE_LEVERS. With blocks of another size there are as many tokens of KV memory,
        and with other drafts sizes for as many requests."""
        others = tuple((name, value if name == key else old) for name, old in self.others)
        if key == NUM_DRAFTS:
            sizes = {-(-size // self.query) * (1 + value) for size in self.decode_buckets}
            return self._replace(others=others, decode_buckets=tuple(sorted(sizes)))
        if key != "block_size" or self.num_gpu_blocks is None:
            return self._replace(others=others)
        blocks = (self.num_gpu_blocks - 1) * int(self.value_of(key)) // value + 1
        return self._replace(others=others, num_gpu_blocks=blocks)

    def on(self, server: ServerSpec) -> ServerSpec:
        """The server with this configuration, for the simulator."""
        update: dict[str, Any] = {key: self.value_of(key) for key in LEVERS if key not in (*ROUTED_KEYS, *VALUE_LEVERS)}
        update |= self.others
        if server.is_routed:
            update["router"] = server.routing.model_copy(update={"policy": self.policy})
        return server.model_copy(update=update)

    def value_of(self, key: str) -> Any:
        """The value of a key of [server]; of the router its policy."""
        if key in VALUE_LEVERS:
            return dict(self.others).get(key)
        return self.policy if key == "router" else getattr(self, key)

    @property
    def label(self) -> str:
        """ "{1,4,8}/8", "{1,4,8}/8, 12 slots", "{1,2}/8, 1024 blocks, 2 x least-requests", "8 requests at once"."""
        sizes = f"{{{','.join(map(str, self.decode_buckets))}}}/" if self.decode_buckets else ""
        slots = "" if self.kv_slots in (None, self.max_num_seqs) else f", {self.kv_slots} slots"
        blocks = "" if self.num_gpu_blocks is None else f", {self.num_gpu_blocks} blocks"
        caching = "" if self.prefix_caching else ", no prefix caching"
        behind = f", {self.replicas} x {self.policy}" if self.replicas > 1 else ""
        usual = dict(_usual_others()) if self.others else {}
        others = "".join(f", {key} {value:d}" for key, value in self.others if value != usual.get(key))
        limit = self.max_num_seqs if sizes else f"{self.max_num_seqs} requests at once"
        return f"{sizes}{limit}{slots}{blocks}{caching}{behind}{others}"


def _value_in(config: EngineConfig, key: str) -> int:
    """The value of one of VALUE_LEVERS that an engine has."""
    if key == NUM_DRAFTS:
        return config.drafts.num_drafts
    value: int = getattr(config, SERVER_KEYS[key].engine or key)
    return value


@cache
def _usual_others() -> tuple[tuple[str, int], ...]:
    """The values of VALUE_LEVERS that nobody has to name."""
    return Setup.of(ServerSpec(rules=PAGED)).others


class Baseline:
    """The server that runs today, and what a change of it is.

    setup: where it differs from what the server has by default, such as the KV blocks that it shows. Memory and compile
    time are arithmetic of one model on one kind of device.
    """

    def __init__(self, server: ServerSpec, setup: Setup | None = None) -> None:
        self.server, self.setup, self.device = server, setup or Setup.of(server), DeviceSpec()

    @property
    def follows(self) -> bool:
        """Whether the KV memory is as large as ``max_num_seqs`` of the longest requests need, by default."""
        is_left = self.server.kv_slots is None and self.server.num_gpu_blocks is None
        return is_left and self.setup == Setup.of(self.server)

    def implied(self, limit: int) -> Setup:
        """The baseline with another ``max_num_seqs``: what a size below it is stays, and memory that follows it."""
        base = self.setup
        if limit == base.max_num_seqs:
            return base
        most = limit * base.query
        sizes = tuple(sorted({size for size in base.decode_buckets if size < most} | {most}))
        slots, blocks = base.kv_slots, base.num_gpu_blocks
        if self.follows and blocks is not None:
            blocks = (blocks - 1) * limit // base.max_num_seqs + 1
        elif self.follows:
            slots = limit
        return base._replace(
            max_num_seqs=limit,
            decode_buckets=sizes if base.decode_buckets else (),
            kv_slots=slots,
            num_gpu_blocks=blocks,
        )

    def levers(self, setup: Setup) -> tuple[str, ...]:
        """The keys that have to be changed; what follows from another key is none."""
        base, implied = self.setup, self.implied(setup.max_num_seqs)
        if setup.others:
            for key in ("block_size", NUM_DRAFTS):
                implied = implied.with_other(key, setup.value_of(key) or 0)
            implied = implied._replace(others=base.others)
        usual = {key: (base if key == "max_num_seqs" else implied).value_of(key) for key in LEVERS}
        return tuple(key for key in LEVERS if setup.value_of(key) != usual[key])

    def size_of(self, setup: Setup) -> tuple[float, ...]:
        """How large a change is, smallest first: keys to change, memory that it takes more, sizes to compile."""
        memory = (setup.kv_slots or 0) + (setup.num_gpu_blocks or 0)
        return (
            len(self.levers(setup)),
            memory,
            len(setup.decode_buckets),
            abs(setup.max_num_seqs - self.setup.max_num_seqs),
            *setup.decode_buckets,
        )

    def keys(self, setup: Setup) -> dict[str, Any]:
        """The keys of [server] that a condition with this configuration sets."""
        changed = {*self.levers(setup)} - {"replicas"}
        if setup.decode_buckets != self.setup.decode_buckets:
            changed.add("decode_buckets")
        if "block_size" in changed and self.server.num_gpu_blocks is not None:
            changed.add("num_gpu_blocks")
        written = {key: setup.value_of(key) for key in SERVER_KEYS if key in changed}
        forms: dict[str, Any] = {"decode_buckets": list(setup.decode_buckets), "router": {"policy": setup.policy}}
        return {key: forms.get(key, value) for key, value in written.items() if value is not None}

    def words(self, setup: Setup) -> str:
        """What the change is: "compile {1,4,6,8,10,16} for 16 requests at once", "12 KV slots in place of 8".

        The sizes are left out where a server that is given this number of requests takes the same by default.
        """
        base, levers = self.setup, self.levers(setup)
        by_default = setup.decode_buckets in ((), base.decode_buckets, default_buckets(setup.max_num_seqs))
        has_sizes = "decode_buckets" in levers or not by_default
        verb = "capture" if self.server.is_paged else "compile"
        sizes = f"{verb} {{{','.join(map(str, setup.decode_buckets))}}}" if has_sizes else ""
        limit = f"{setup.max_num_seqs} requests at once" if "max_num_seqs" in levers else ""
        parts = [" for ".join(filter(None, (sizes, limit)))]
        for key in levers:
            new = setup.value_of(key)
            new = ("off", "on")[new] if isinstance(new, bool) else new
            change = SERVER_KEYS[key].change or f"{key} {{new}}" * (key in VALUE_LEVERS)
            parts.append(change.format(new=new, old=base.value_of(key)))
        return ", ".join(filter(None, parts)) or "no change"

    def shape(self, setup: Setup) -> ServerShape:
        """As the arithmetic of memory and compile time takes it."""
        slots = self.server.num_kv_slots if setup.kv_slots is None else setup.kv_slots
        tokens = self.server.slot_tokens
        return ServerShape(setup.max_num_seqs, setup.decode_buckets, slots, tokens, None, setup.num_gpu_blocks)

    def memory_gib(self, setup: Setup) -> float | None:
        """Memory of one device after loading, GiB, by the arithmetic of ``device``; None of a vLLM, of any model."""
        return None if self.server.is_vllm else self.device.memory_gib(self.shape(setup))

    def misfit(self, memory_gib: float | None) -> str:
        """That today's server takes more than a device has, in words; "" where it fits, or nothing was said."""
        needs_gib = self.memory_gib(self.setup)
        if memory_gib is None or needs_gib is None or needs_gib <= memory_gib:
            return ""
        return (
            f"today's server needs {needs_gib:.1f} GiB per device and does not fit {memory_gib:g} GiB; "
            "others may take as much as it does"
        )

    def compile_s(self, setup: Setup) -> float | None:
        """Time to compile all sizes, by the arithmetic of ``device``; None of a vLLM, which compiles none."""
        return None if self.server.is_paged else self.device.compile_s(self.shape(setup))


def levers_of(server: ServerSpec) -> list[str]:
    """The levers of a row alone that a server has: drafts only where it is known how many are accepted."""
    has_rates = bool(server.synthetic_acceptance_rates)
    return [key for key in VALUE_LEVERS if server.is_paged and (key != NUM_DRAFTS or has_rates)]


def default_levers(server: ServerSpec) -> tuple[str, ...]:
    """What can be changed of a server by default; sizes that are left to a vLLM stay with it."""
    memory = "num_gpu_blocks" if server.is_paged else "kv_slots"
    sizes = ("decode_buckets",) if server.decode_buckets else ()
    caching = () if server.prefix_caching else ("prefix_caching",)
    others = [key for key in levers_of(server) if key == NUM_DRAFTS or not SERVER_KEYS[key].is_asked]
    return (memory, "max_num_seqs", *sizes, *caching, *(("router",) if server.is_routed else ()), *others)


def possible_levers(server: ServerSpec) -> tuple[str, ...]:
    """Every key that a search can change of a server."""
    kinds = ("paged",) if server.is_vllm else ("paged", "modelled")
    others = [key for key in levers_of(server) if SERVER_KEYS[key].kind in kinds]
    sizes = ["decode_buckets"] if server.is_vllm and server.is_paged else []
    return tuple(dict.fromkeys([*default_levers(server), "prefix_caching", *sizes, *others]))


def checked_levers(names: Sequence[str], server: ServerSpec) -> tuple[str, ...]:
    """``names``, else the default; SpecError for a key that this server does not have, or that no search changes."""
    possible = possible_levers(server)
    if "offload_blocks" in names and not server.offload_block_us:
        what = "a second memory at no price would always pay"
        raise SpecError(what, where="tune.may_change", hint="Name what a block costs: server.offload_block_us")
    for name in names:
        if name not in possible:
            raise SpecError(
                f"{name!r} is no key that can be searched on this server",
                where="tune.may_change",
                hint=f"Choose of {', '.join(possible)}",
            )
    return tuple(dict.fromkeys(names)) or default_levers(server)


def ladder(start: int, most: int) -> Iterator[int]:
    """``start`` times 1, 1.25, 1.5, 2, 2.5, 3, 4, ..., rounded up, up to ``most``, which is the last."""
    last, doubled = start, start
    yield start
    while last < most:
        for step in STEPS:
            number = min(math.ceil(doubled * step), most)
            if number > last:
                last = number
                yield number
        doubled *= 2
