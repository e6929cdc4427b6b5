"""The interface of a backend: checks before anything starts, a line for the doctor, and ``perform`` of a run.

A backend of servers adds the exact launch command; ``harness.runner.run`` starts, observes and stops every such server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from harness.errors import SpecError
from harness.measure.records.manifest import Observation
from harness.measure.records.run import SealedRun
from harness.measure.server.doctor import Check
from harness.measure.server.life import LaunchPlan
from harness.model.engine import CostModel, EngineConfig
from harness.model.engine.config import changed_keys
from harness.model.engine.paged import scheduler_of
from harness.model.experiment import PlannedRun
from harness.model.spec import ServerSpec
from harness.model.spec.server import ENGINE_KEYS, MOST_SLOT_TOKENS, PAGED_KEYS, keys_applied_by, keys_of
from harness.plugins import BackendKind, service
from harness.runner.run import Launch, LaunchOptions, RunContext, perform_run
from harness.stacks.rbln.launch.artifacts import check_served
from harness.stacks.rbln.launch.releases import rules_installed

if TYPE_CHECKING:
    from harness.stacks.rbln.launch.compile import Exporter

Line = tuple[str, str]
"""A line of the file, and the comment beside it."""

SLOT_TOKENS = 8192
MORE_SLOTS: tuple[Line, ...] = (
    ("[[condition]]", "what it changes: harness explain server"),
    ('name = "twelve-slots"', ""),
    ("server.kv_slots = 12", ""),
)
NO_WAITS: tuple[Line, ...] = (
    ("[[condition]]", "the same sessions without their waits for tools"),
    ('name = "no-waits"', ""),
    ('treatment = "no-waits"', ""),
)
SLOW_START: tuple[Line, ...] = (("start_timeout_s = 900.0", "the first start is slow"), ("stop_grace_s = 30.0", ""))


@dataclass(frozen=True)
class FirstExperiment:
    """What the file says of its backend. The defaults suit any server, as its sessions alone differ.

    about: the comment beside ``backend``. replicates: even, so that each of two conditions runs first as often. limits,
    server: more lines of these tables. base: lines of the first condition, which is the baseline. other: the condition
    that is compared with it. room_tokens: longest request that fits the server. sets_slot_tokens: slots of another
    length take no new model. prompt_form: "" for the default. needs: a command that comes before all others, or "".
    has_costs: a shipped cost model predicts it. notes: what is said beside the file.
    """

    about: str
    question: str = "What do waits for tools cost on this server, against the same sessions without any?"
    time_scale: float = 1.0
    replicates: int = 6
    limits: tuple[Line, ...] = ()
    server: tuple[Line, ...] = ()
    base: tuple[Line, ...] = (('name = "base"', ""),)
    other: tuple[Line, ...] = NO_WAITS
    room_tokens: int = SLOT_TOKENS
    sets_slot_tokens: bool = False
    prompt_form: str = ""
    needs: str = ""
    has_costs: bool = True
    notes: tuple[str, ...] = ()


MODELLED = FirstExperiment(
    about="",
    question="Do twelve KV slots lower the cost of agents that come back after tool calls, against eight?",
    other=MORE_SLOTS,
    room_tokens=MOST_SLOT_TOKENS,
    sets_slot_tokens=True,
)
"""Eight KV slots against twelve, for servers that take any shape."""


class Backend(ABC):
    """A kind of server that the harness can measure."""

    __slots__ = ()

    kind: BackendKind
    shown_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of a ServerSpec whose values in force every run of this kind shows. A condition that sets another key is
    refused, and a run that does not show these after all is INVALID."""

    def in_force(self, server: ServerSpec) -> Mapping[str, Any]:
        """Settings in force that are known before the first run, as ``harness.model.engine.config`` has them."""
        del server
        return {}

    def lacks(self, runs: Sequence[PlannedRun]) -> tuple[str, ...]:
        """What runs need and their running server lacks, each with its remedy; called before the first of them."""
        del runs
        return ()

    def ask_ahead(self, runs: Sequence[PlannedRun]) -> None:  # noqa: B027  # most kinds have nothing to ask
        """Ask a running server what its runs need to know, before the first of them."""

    def check_server(self, server: ServerSpec) -> None:  # noqa: B027  # most kinds have nothing to refuse
        """Refuse what no host could run, when an experiment is planned; raises SpecError."""

    def check_run(self, run: PlannedRun) -> None:
        """``check_server``, and what its costs lack; raises SpecError."""
        self.check_server(run.server)

    def check_host(self, server: ServerSpec) -> None:  # noqa: B027
        """Refuse, before the first server of an experiment starts, what this host cannot run.

        Raises as ``perform`` would: ServerError for a busy port or an absent stack, SpecError for a stale artifact.
        """

    def checked_on(self, server: ServerSpec) -> str:
        """What ``check_server`` and ``check_host`` look at, in words; "" where that is no more than the file says."""
        del server
        return ""

    def exporter(self, server: ServerSpec) -> Exporter:
        """What compiles models for a server; SpecError for a kind without, ServerError where it is not here."""
        del server
        raise SpecError("compiles no models", where=f"backend {self.kind.name}", hint="Use backend rbln")

    @property
    def first_command(self) -> str:
        """What the doctor offers where this machine can run the kind."""
        return f"harness init --backend {self.kind.name}"

    @property
    def first_experiment(self) -> FirstExperiment:
        """What ``harness init`` writes for this kind."""
        return FirstExperiment(about=self.kind.label)

    @abstractmethod
    def readiness(self) -> Check:
        """Whether this machine can run this kind; changes nothing."""

    def readiness_of(self, environment: str) -> Check:
        """``readiness`` with the stack in this virtual environment, for kinds that start one; "": the one on PATH."""
        del environment
        return self.readiness()

    @abstractmethod
    def perform(self, run: PlannedRun, context: RunContext) -> SealedRun | None:
        """Perform a run and seal it, valid or not; None when the user aborted it."""


STACK_KEYS = ENGINE_KEYS | keys_applied_by("rbln")
"""Settings that a launch of the real stack applies, or that the stack shows."""


def rules_in_force(site_packages: Path) -> dict[str, Any]:
    """The rules of the vllm-rbln installed there, as a setting in force; empty where its sources are unknown ones."""
    rules = rules_installed(site_packages)
    return {} if rules is None else {"rules": rules.name}


class Replicas(NamedTuple):
    """Several servers behind a router. launch: the plan of all of them, by the launch of one. simulated: a run of them
    in virtual time, a ``VirtualRun`` (``runner.backends.sim``), by its costs and folder. drawn: for a server, a
    function that simulates draws as ``run_draws`` does. check: refuses a router that this host cannot start, or that a
    virtual kind does not model. warm_up: compiles what ``drawn`` simulates with."""

    launch: Callable[[Launch, ServerSpec, LaunchOptions], LaunchPlan]
    simulated: Callable[[PlannedRun, CostModel, Path], Any]
    drawn: Callable[[ServerSpec], Callable[[Any, EngineConfig], Any]]
    check: Callable[[ServerSpec, BackendKind], None]
    warm_up: Callable[[], None]


class ServerBackend(Backend):
    """A kind with a server process behind HTTP."""

    __slots__ = ()

    @abstractmethod
    def launch(self, server: ServerSpec, options: LaunchOptions) -> LaunchPlan:
        """The command for ``server``, with its files written into the run's folder; starts nothing.

        Raises ServerError for a busy port, SpecError for what this kind cannot do.
        """

    def launch_all(self, server: ServerSpec, options: LaunchOptions) -> LaunchPlan:
        """The launch of a server, or of all its replicas and the router before them."""
        if not server.is_routed:
            return self.launch(server, options)
        replicas: Replicas = service("replicas", where="server.replicas")
        return replicas.launch(self.launch, server, options)

    def perform(self, run: PlannedRun, context: RunContext) -> SealedRun | None:
        return perform_run(run, context, self.launch_all)


VLLM_KEYS = PAGED_KEYS | {"model", "step_log"}
"""Keys of a ServerSpec for vLLM itself; other stacks do not have them."""


def refuse_keys(server: ServerSpec, keys: Set[str], why: str) -> None:
    """SpecError when ``server`` sets one of ``keys``, which would have no effect. why: "vllm-rbln has ..."."""
    if unknown := sorted(changed_keys(server) & keys):
        raise SpecError(why, where=", ".join(f"server.{key}" for key in unknown), hint="Leave the key out")


def observation_of(server: ServerSpec) -> Observation:
    """What an emulated or simulated server shows, as the real stacks do."""
    if server.is_paged:
        return Observation(steps="step-log", has_kv_log=False)
    # Without prefix caching there are no slots to log about.
    return Observation(has_kv_log=server.prefix_caching)


class ModelledBackend(Backend):
    """A kind that steps the simulator's engine. It refuses settings, and costs without a price, that its rules lack."""

    __slots__ = ()

    shown_keys: ClassVar[frozenset[str]] = ENGINE_KEYS

    def check_run(self, run: PlannedRun) -> None:
        super().check_run(run)
        scheduler_of(EngineConfig.from_server(run.server.replica), run.cost_model)

    def check_host(self, server: ServerSpec) -> None:
        if (rules := server.rule_set()).never_mixes:
            raise SpecError(
                f"servers of the rules {rules.name} are simulated only, since no record shows their steps",
                where="server.rules",
                hint="Use `harness simulate`, or choose other rules",
            )

    def check_server(self, server: ServerSpec) -> None:
        server = server.replica
        rules = server.rule_set()
        unknown = VLLM_KEYS - PAGED_KEYS if rules.is_paged else VLLM_KEYS
        if rules.is_paged:
            unknown |= keys_of("slots")
        refuse_keys(server, unknown, f"the rules {rules.name} do not have it")
        if server.offload_block_us is not None and not server.offload_blocks:
            raise SpecError(
                "is the time to load a block, and there is no second memory to load from",
                where="server.offload_block_us",
                hint="Set server.offload_blocks too, or leave it out",
            )
        try:
            EngineConfig.from_server(server)
        except SpecError as error:
            raise SpecError(
                error.what, where="server", hint=error.hint or "Set server.rules, or leave the key out"
            ) from error


def npus_of(server: ServerSpec, num_npus: int, device: int | None) -> tuple[int, ...]:
    """The NPUs of a server that needs ``num_npus``: those it names, else the first; for device d of a fleet group d."""
    first = 0 if device is None else device * num_npus
    return server.devices or tuple(range(first, first + num_npus))


def check_compiled_server(server: ServerSpec) -> None:
    """Refuse keys of vLLM itself, and a compiled model that is missing or differs from the condition.

    A model on another host is not checked.
    """
    refuse_keys(server, VLLM_KEYS, "vllm-rbln compiles a model with KV slots and does not have it")
    if server.artifact and not server.ssh:
        check_served(server)
