"""A search space: the configurations, their limits, and the inputs on which they are judged. All of it is TOML.

Everything is checked when it is read. A candidate never changes its place in the enumeration, so that ledgers can be
resumed. Nothing is simulated here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import comb
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from harness.errors import SpecError
from harness.model.engine.cost import DeviceSpec
from harness.model.spec import (
    PerturbationSpec,
    RulesName,
    ServerShape,
    ServerSpec,
    Spec,
    Treatment,
    WindowSpec,
    WorkloadSpec,
)
from harness.model.spec import load_toml as load_table
from harness.model.spec.base import Name
from harness.model.spec.changes import override_table
from harness.shipped import find_shipped, shipped_names
from harness.stacks.rbln.rules.kv_rules import AUTO, RULE_SETS, check_active_limit, rule_set

MOST_CANDIDATES = 10_000_000

Score = Literal["sum-seconds", "per-n"]
Objective = Literal["device-seconds", "waiting", "p99-completion", "memory", "compile-seconds", "artifact-size"]
BatchSize = int | Literal["max_num_seqs"]
SimulatedRules = Annotated[RulesName, AfterValidator(lambda name: rule_set(name).name)]


class BucketRule(Spec):
    """Bucket sets for each max_num_seqs: all of ``always``, the rest from ``others``, at most ``most`` buckets.

    sets: these sets instead of the rule (for each max_num_seqs the sets that end with it; under paged rules all).
    """

    always: tuple[BatchSize, ...] = (1, "max_num_seqs")
    others: tuple[int, ...] | None = Field(default=None, description="default: every whole number below the limit")
    most: int = Field(default=6, ge=1, le=64, description="buckets in all")
    sets: tuple[tuple[int, ...], ...] = ()

    def of_limit(self, limit: int, *, may_end_anywhere: bool = False) -> Iterator[tuple[int, ...]]:
        """Bucket sets in enumeration order: fewer buckets first, then by value.

        may_end_anywhere: of ``sets``, also those that do not end with the limit, as paged rules allow.
        """
        if self.sets:
            yield from (buckets for buckets in self.sets if may_end_anywhere or buckets[-1] == limit)
            return
        always, others = self._parts(limit)
        for count in range(self.most - len(always) + 1):
            for chosen in combinations(others, count):
                yield tuple(sorted(always | set(chosen)))

    def count(self, limit: int, *, may_end_anywhere: bool = False) -> int:
        if self.sets:
            return sum(may_end_anywhere or buckets[-1] == limit for buckets in self.sets)
        always, others = self._parts(limit)
        return sum(comb(len(others), count) for count in range(self.most - len(always) + 1))

    def _parts(self, limit: int) -> tuple[set[int], list[int]]:
        always = {limit if place == "max_num_seqs" else place for place in self.always} | {limit}
        always = {bucket for bucket in always if bucket <= limit}
        choices = range(1, limit) if self.others is None else sorted(set(self.others))
        return always, [bucket for bucket in choices if bucket < limit and bucket not in always]

    @field_validator("sets")
    @classmethod
    def _ascending(cls, sets: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        if any(not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1 for buckets in sets):
            raise ValueError("each of sets must be ascending, positive and not empty")
        return sets


class InputSpec(Spec):
    """The plans on which candidates are judged: users x seeds x replicates of one workload."""

    users: tuple[int, ...] = Field(min_length=1, description="the set of N: concurrent sessions")
    search_seeds: tuple[int, ...] = Field(min_length=1)
    evaluation_seeds: tuple[int, ...] = ()
    replicates: int = Field(default=3, ge=1, le=1000, description="plans per N and seed")
    sessions_per_user: int = Field(default=1, ge=1, le=10_000, description="above 1: a closed population")
    treatment: Treatment = "as-drawn"
    workload: dict[str, Any] = Field(default_factory=dict, description="keys of [workload], num_sessions apart")

    @model_validator(mode="after")
    def _apart(self) -> InputSpec:
        shared = set(self.search_seeds) & set(self.evaluation_seeds)
        if shared:
            raise ValueError(
                f"search_seeds and evaluation_seeds share {sorted(shared)}: a candidate would be judged on the inputs "
                "that chose it"
            )
        for name, values in (("search_seeds", self.search_seeds), ("users", self.users)):
            if len(set(values)) != len(values):
                raise ValueError(f"{name} repeats a value: {list(values)}")
        if min(self.users) < 1 or min((*self.search_seeds, *self.evaluation_seeds)) < 0:
            raise ValueError("users must be at least 1 and seeds not negative")
        for users in self.users:
            self.workload_of(users)
        return self

    def workload_of(self, users: int) -> WorkloadSpec:
        table = dict(self.workload)
        if not table.get("group"):
            table["num_sessions"] = users * self.sessions_per_user
        if self.sessions_per_user > 1:
            table["concurrency"] = users
        return WorkloadSpec.model_validate(table)


class ConstraintSpec(Spec):
    """Limits beyond which a candidate is left out; it stays in the ledger with the reason."""

    memory_gib: float | None = Field(default=None, gt=0, description="of one device")
    compile_s: float | None = Field(default=None, gt=0)
    artifact_gib: float | None = Field(default=None, gt=0)

    def violated(self, device: DeviceSpec, candidate: ServerShape) -> str:
        """Why a candidate is left out; "" when it is not."""
        checks = (
            ("memory", device.memory_gib(candidate), self.memory_gib, "GiB per device"),
            ("compile", device.compile_s(candidate), self.compile_s, "s"),
            ("artifact", device.artifact_gib(candidate), self.artifact_gib, "GiB"),
        )
        return "; ".join(
            f"{name} {have:.2f} > {most:g} {unit}" for name, have, most, unit in checks if most and have > most
        )


class DrawsSpec(PerturbationSpec):
    """The imagined experiments whose cost ratios make an interval, see ``harness.extras.search.intervals``.

    plans "new": the measured inputs will be new draws of the workload; "given": exactly the plans at hand.
    """

    draws: int = Field(default=200, ge=20, le=100_000, description="imagined experiments")
    seed: int = Field(default=20260801, ge=0)
    plans: Literal["new", "given"] = "new"
    replicates: int = Field(default=3, ge=1, le=1000, description="runs per condition whose sums make the ratio")


class SpaceSpec(Spec):
    """A search: which configurations, judged on what, within which limits."""

    name: Name
    title: str = ""
    rules: SimulatedRules = Field(default=AUTO, validate_default=True)
    cost_model: str = "paper"
    max_num_seqs: tuple[Annotated[int, Field(le=1024)], ...] = Field(
        min_length=1, description="batch_size: most requests running at once"
    )
    kv_slots: tuple[BatchSize, ...] = Field(
        default=("max_num_seqs",), min_length=1, description='numbers, or "max_num_seqs" for as many'
    )
    slot_tokens: tuple[int, ...] = Field(default=(8192,), min_length=1)
    max_active_seqs: tuple[BatchSize, ...] = Field(
        default=("max_num_seqs",),
        min_length=1,
        description="admission below max_num_seqs, without another artifact; not every release has it",
    )
    num_gpu_blocks: tuple[int, ...] = Field(
        default=(), description="paged rules: sizes of KV memory in blocks; default: room for the longest requests"
    )
    buckets: BucketRule = BucketRule()
    baseline: ServerSpec = ServerSpec()
    named: dict[str, ServerSpec] = Field(default_factory=dict, description="configurations to predict by name")
    inputs: InputSpec
    window: WindowSpec | None = None
    device: DeviceSpec = DeviceSpec()
    constraints: ConstraintSpec = ConstraintSpec()
    objectives: tuple[Objective, ...] = Field(
        default=("device-seconds", "memory", "compile-seconds"), min_length=1, description="axes of the Pareto front"
    )
    score: Score = "sum-seconds"
    sensitivity: tuple[tuple[int, ...], ...] = Field(default=(), description="sets of N; default: all of two or more")
    prediction: DrawsSpec = DrawsSpec()

    @field_validator("max_num_seqs", "slot_tokens")
    @classmethod
    def _positive(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if min(values) < 1 or len(set(values)) != len(values):
            raise ValueError(f"must be positive and without repeats, got {list(values)}")
        return values

    @model_validator(mode="after")
    def _consistent(self) -> SpaceSpec:
        unknown = {users for chosen in self.sensitivity for users in chosen} - set(self.inputs.users)
        if unknown or any(not chosen for chosen in self.sensitivity):
            raise ValueError(f"sensitivity: {sorted(unknown)} are not among inputs.users, or a set is empty")
        for active in self.max_active_seqs:
            if active != "max_num_seqs":
                check_active_limit(active, max(self.max_num_seqs), RULE_SETS[self.rules])
        self._check_paged()
        if self.count() == 0:
            raise ValueError("no bucket set fits any of max_num_seqs")
        if self.count() > MOST_CANDIDATES:
            raise ValueError(f"{self.count():,} candidates are more than {MOST_CANDIDATES:,}; narrow the space")
        return self

    def _check_paged(self) -> None:
        if not self.is_paged:
            if self.num_gpu_blocks:
                raise ValueError(f"the rules {self.rules!r} have KV slots: give kv_slots, not num_gpu_blocks")
            return
        if RULE_SETS[self.rules].never_mixes:
            raise ValueError(f"servers of the rules {self.rules!r} are simulated one by one, and not searched")
        if self.kv_slots != ("max_num_seqs",):
            raise ValueError(f"the rules {self.rules!r} have no KV slots: give num_gpu_blocks, not kv_slots")
        if self.window is not None:
            raise ValueError(f"the rules {self.rules!r} are not simulated in windows: leave window out")

    @property
    def is_paged(self) -> bool:
        """Whether its servers have paged KV memory, in blocks of vLLM's default size."""
        return RULE_SETS[self.rules].is_paged

    def count(self) -> int:
        """Number of candidates, those that constraints leave out included."""
        sets = sum(
            self.buckets.count(limit, may_end_anywhere=self.is_paged) * len(self._active_below(limit))
            for limit in self.max_num_seqs
        )
        return sets * len(self.kv_slots) * len(self.slot_tokens) * len(self.num_gpu_blocks or (None,))

    def _active_below(self, limit: int) -> tuple[int | None, ...]:
        """The admission limits that a compiled limit is tried with, None for itself; those above it are passed over."""
        places = (None if place in ("max_num_seqs", limit) else int(place) for place in self.max_active_seqs)
        return tuple(place for place in dict.fromkeys(places) if place is None or place < limit)

    def candidates(self) -> Iterator[ServerShape]:
        """Every candidate, in the order that breaks ties: limit, slots, slot length, admission, fewer buckets first."""
        for limit in self.max_num_seqs:
            for place in self.kv_slots:
                slots = limit if place == "max_num_seqs" else place
                for slot_tokens in self.slot_tokens:
                    for active, blocks in product(self._active_below(limit), self.num_gpu_blocks or (None,)):
                        for buckets in self.buckets.of_limit(limit, may_end_anywhere=self.is_paged):
                            yield ServerShape(limit, buckets, slots, slot_tokens, active, blocks)

    def sets_of_users(self) -> tuple[tuple[int, ...], ...]:
        """The sets of N that the sensitivity is shown for; the whole set is always among them."""
        users = self.inputs.users
        chosen = self.sensitivity or tuple(
            some for size in range(min(2, len(users)), len(users) + 1) for some in combinations(users, size)
        )
        return chosen if users in chosen else (*chosen, users)


def parse_space(table: dict[str, Any], *, where: str) -> SpaceSpec:
    """A SpaceSpec from a TOML table; raises SpecError naming every key that is wrong."""
    return SpaceSpec.from_table(table, where=where, hint="Compare with plans/spaces/paper.toml")


def load_space(name_or_path: str | Path, changes: Sequence[str] = ()) -> SpaceSpec:
    """A shipped search space by name, or a user's own file, with these keys changed; SpecError for an experiment."""
    name, spaces = str(name_or_path), shipped_names("spaces")
    is_experiment = name not in spaces and name in shipped_names("experiments")
    path = find_shipped("experiments" if is_experiment else "spaces", name, what="search space")
    table = load_table(path)
    if "condition" in table:
        raise SpecError(
            "is an experiment, and a search space is wanted",
            where=name,
            hint=f"`harness simulate {name}` predicts its conditions; spaces: {', '.join(spaces)}, or a file like "
            "these",
        )
    given = "".join(f" --set {change}" for change in changes)
    return parse_space(override_table(table, changes), where=f"{path}{given and ' with'}{given}")
