"""The frozen file: everything that is fixed before a confirmatory measurement, in one JSON file with its own digest.

It is written once; a file that was changed later is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from harness.analysis.compare.drawn import Prediction
from harness.analysis.stats import quantile
from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.judge.prereg.ledger import Instant, Ledger
from harness.judge.prereg.repository import file_sha256
from harness.measure.records.manifest import PreregistrationRecord
from harness.measure.server.provenance import source_sha256
from harness.model.experiment import PlannedRuns
from harness.model.plan.model import Plan
from harness.model.spec import ExperimentSpec, Spec, describe_validation_error
from harness.model.spec.rules import AnyRule, DecisionRule

ANEW = "freeze a copy of the experiment's file with another name = and base_seed"
FORMAT: Literal["harness-preregistration/1"] = "harness-preregistration/1"


class NamedFile(Spec):
    """A file and what it was: path from the repository's root, SHA-256 of its bytes."""

    path: str
    sha256: str


class FrozenPlan(Spec):
    """The plan of one run: its hash, and its file, which holds the same hash."""

    condition: str
    replicate: int
    hash: str
    drawn_hash: str
    path: str


class Quantiles(Spec):
    """Of how many values, their least and most, and quantiles of them."""

    count: int
    least: float
    p50: float
    p90: float
    most: float

    def __str__(self) -> str:
        return f"{self.least:,.6g} to {self.most:,.6g} (p50 {self.p50:,.6g}, p90 {self.p90:,.6g})"


class Replayed(Spec):
    """What the plans of these conditions replay, all replicates together. waits_s: None where nothing is waited."""

    conditions: tuple[str, ...]
    plans: int
    sessions: int
    prompt_tokens: Quantiles
    generate_tokens: Quantiles
    waits_s: Quantiles | None = None

    @property
    def sentence(self) -> str:
        """All of it, in words."""
        waits = "no waits" if self.waits_s is None else f"waits of {self.waits_s} s"
        return (
            f"{', '.join(self.conditions)}: {self.plans} plans, {self.sessions} sessions, {self.prompt_tokens.count} "
            f"requests; prompts of {self.prompt_tokens} tokens; answers of {self.generate_tokens} tokens; {waits}"
        )


def replayed_by(plans: Mapping[str, Sequence[Plan]]) -> tuple[Replayed, ...]:
    """What the plans of each condition replay; conditions that replay the same stand together."""
    found: dict[str, Replayed] = {}
    for name, own in plans.items():
        requests = [request for plan in own for request in plan.requests]
        waits_s = [wait_ns / NS_PER_S for plan in own for wait_ns in plan.waited_ns()]
        replayed = Replayed(
            conditions=(),
            plans=len(own),
            sessions=sum(plan.num_sessions for plan in own),
            prompt_tokens=_spread([request.prompt_tokens for request in requests]),
            generate_tokens=_spread([request.generate_tokens for request in requests]),
            waits_s=_spread(waits_s) if any(waits_s) else None,
        )
        same = found.get(key := replayed.model_dump_json(), replayed)
        found[key] = same.model_copy(update={"conditions": (*same.conditions, name)})
    return tuple(found.values())


def _spread(values: Sequence[float]) -> Quantiles:
    p50, p90 = (round(quantile(values, q), 6) for q in (0.5, 0.9))
    return Quantiles(count=len(values), least=round(min(values), 6), p50=p50, p90=p90, most=round(max(values), 6))


class FrozenRule(Spec):
    """A decision rule, whole, and the file it was read from."""

    file: NamedFile
    rule: AnyRule


class FrozenPerturbation(Spec):
    """Sizes of perturbations by their key in [prediction]. assumed: keys that were neither given nor calibrated."""

    sizes: dict[str, float]
    assumed: tuple[str, ...]


class Preregistration(Spec):
    """Everything that is fixed before the measurement. experiment: with its overrides applied.

    replayed: what the plans hold, for people who have no file of them.
    code_sha256: of the harness's Python files; code_commit: the commit they were checked out from. rule_code: the same
    hash of each package of a plug-in that holds a rule's kind. files: inputs of
    plans and predictions (cost models, wait distributions, patches). artifacts: folder -> identifying hash of every
    compiled artifact on this machine. prediction_rules: the KV rules of all predictions, "" where each server has its
    own; condition_rules: the rules by condition, "auto" resolved. perturbations: of the draws, by condition; empty
    where nothing was drawn. is_tree_dirty: other files had uncommitted changes. digest: SHA-256 of the rest of this
    file.
    """

    format: Literal["harness-preregistration/1"] = FORMAT
    name: str
    frozen_at_utc: Instant
    experiment_file: NamedFile
    overrides: tuple[str, ...] = ()
    experiment: ExperimentSpec
    plans: tuple[FrozenPlan, ...]
    replayed: tuple[Replayed, ...] = ()
    prediction_rules: str = ""
    condition_rules: dict[str, str] = Field(default_factory=dict)
    perturbations: dict[str, FrozenPerturbation] = Field(default_factory=dict)
    predictions: dict[str, dict[int, Prediction]]
    rules: tuple[FrozenRule, ...]
    code_sha256: str
    code_commit: str = ""
    rule_code: dict[str, str] = Field(default_factory=dict)
    files: tuple[NamedFile, ...]
    artifacts: dict[str, str] = Field(default_factory=dict)
    parent_commit: str = ""
    is_tree_dirty: bool = False
    dirty_paths: tuple[str, ...] = ()
    digest: str = ""

    def sealed(self) -> Preregistration:
        """A copy with its digest."""
        return self.model_copy(update={"digest": _digest(self.model_dump(mode="json"))})

    def to_json(self) -> str:
        """The text of the frozen file."""
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"

    @property
    def plan_hashes(self) -> dict[tuple[str, int], str]:
        return {(plan.condition, plan.replicate): plan.hash for plan in self.plans}


def changed_rule_code(frozen: Preregistration) -> str:
    """That a plug-in's rules are not the code that was frozen, in words; "" where they are."""
    now = rule_code([each.rule for each in frozen.rules])
    changed = [name for name, sha256 in frozen.rule_code.items() if now.get(name) != sha256]
    return f"the package {changed[0]!r}, whose rule decides, is not the code that was frozen" if changed else ""


def rule_code(rules: Sequence[DecisionRule]) -> dict[str, str]:
    """SHA-256 of the packages, without the harness's own, that hold these rules and their functions, by name."""
    names = {place.split(":")[0].split(".")[0] for rule in rules for place in (type(rule).__module__, rule.cases_at)}
    return {name: _code_sha256(name) for name in sorted(names - {"harness"})}


def _code_sha256(name: str) -> str:
    found = find_spec(name)
    if found is None:
        return ""
    folders = found.submodule_search_locations
    return source_sha256(Path(next(iter(folders)))) if folders else file_sha256(Path(str(found.origin)))


@dataclass(frozen=True, slots=True)
class RunAuthorization:
    """Permission for confirmatory runs: record for manifests, bytes of the frozen file, its runs, their ledger."""

    record: PreregistrationRecord
    content: bytes = field(repr=False)
    planned: PlannedRuns = field(repr=False)
    ledger: Ledger = field(repr=False)


def parse_preregistration(content: bytes, *, where: str) -> Preregistration:
    """The content of a frozen file; SpecError when it is not a frozen file or was edited after it was frozen."""
    try:
        table: dict[str, Any] = json.loads(content)
        frozen = Preregistration.model_validate(table)
    except ValidationError as error:
        raise SpecError(
            f"is not a frozen file of this version: {describe_validation_error(error)}",
            where=where,
            hint=f"Use the harness version that froze it, with its plug-ins, or {ANEW}",
        ) from error
    except (ValueError, RecursionError) as error:
        raise SpecError(
            "is not a frozen file (no JSON)",
            where=where,
            hint=f"Make one: harness prereg freeze {where if where.endswith('.toml') else 'FILE.toml'} --commit",
        ) from error
    if frozen.digest != _digest(table):
        raise SpecError(
            "was edited after it was frozen",
            where=where,
            hint=f"Restore it from the first commit of git log -- {where}: git checkout COMMIT -- {where}",
        )
    return frozen


def read_frozen(path: Path) -> bytes:
    """The bytes of a frozen file."""
    with SpecError.on_os_error("cannot be read", where=path, hint="Check the path"):
        return path.read_bytes()


def _digest(table: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in table.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
