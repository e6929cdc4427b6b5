"""Whether new runs are worse than a baseline by more than a margin, figure by figure, over runs of the same plan.

"Cannot tell" is an answer of its own and never a pass. Nothing is read from disk but sealed runs, and nothing written.
Definitions: docs/gate.md, "How it decides".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from harness.analysis.cost.devices import estimate_of
from harness.analysis.figures import place_of
from harness.analysis.serving import latencies
from harness.analysis.stats import (
    MIN_REPLICATES,
    Estimate,
    FloatArray,
    grouped,
    holm,
)
from harness.errors import SpecError
from harness.judge.compare.measures import MEASURES, Kind, Measure, Value, log_values
from harness.judge.decisions.decide import one_sided_p
from harness.judge.planning.power import MOST_BLOCKS, blocks_for_superiority
from harness.records import SealedRun, origin_of
from harness.records.layout import COST_MODEL
from harness.records.manifest import Manifest, table_at

NO_SPREAD = 1e-9
# More blocks than an experiment can have.
MANY = MOST_BLOCKS


class GateVerdict(str, Enum):
    """What the gate says of a figure, and of all of them."""

    PASS = "pass"
    WORSE = "worse"
    CANNOT_TELL = "cannot tell"


# The figures that are judged unless the user names others: a higher value is worse.
FIGURES: Mapping[str, Measure] = {name: measure for name, measure in MEASURES.items() if measure.limit is not None}


@dataclass(frozen=True, slots=True)
class GateRun:
    """The figures of one valid run, of sealed records or of a saved baseline.

    num_requests: answered requests with a time to first token. device, unit: where in a fleet it ran.
    """

    manifest: Manifest
    device: str
    unit: int
    num_requests: int
    values: Mapping[str, Value | None]

    @property
    def condition(self) -> str:
        return self.manifest.condition


def gate_run(run: SealedRun) -> GateRun:
    """Every figure of a sealed run."""
    place = place_of(run)
    num_requests = int(np.count_nonzero(~np.isnan(latencies(run).ttft_ns)))
    values = {name: figure.of(run) for name, figure in FIGURES.items()}
    return GateRun(run.manifest, place["device"], place["unit"], num_requests, values)


@dataclass(frozen=True, slots=True)
class GatePolicy:
    """What is judged and how. limits: by figure, the largest accepted ratio; is_named: the user named the figures.

    alpha: of each side's tests. power: with which the blocks that are missing would tell.
    """

    limits: Mapping[str, float]
    is_named: bool = False
    alpha: float = 0.05
    power: float = 0.9


def gate_policy(
    figures: Sequence[str] = (), thresholds: Sequence[str] = (), alpha: float = 0.05, power: float = 0.9
) -> GatePolicy:
    """The policy for these figures, default all, and thresholds "FIGURE=RATIO"; SpecError for what is no figure.

    A figure with a threshold is judged too when only some figures are named.
    """
    given = dict(map(_threshold, thresholds))
    for name in (*figures, *given):
        if name not in FIGURES:
            raise SpecError(f"{name!r} is no figure of the gate", where="gate", hint=f"Use {', '.join(FIGURES)}")
    wanted = [name for name in FIGURES if not figures or name in figures or name in given]
    return GatePolicy(
        {name: given.get(name, FIGURES[name].limit or 1.0) for name in wanted}, bool(figures), alpha, power
    )


def _threshold(text: str) -> tuple[str, float]:
    name, _, ratio = text.partition("=")
    try:
        limit = float(ratio)
    except ValueError:
        limit = math.nan
    if not 1 <= limit < 100:
        hint = "Write FIGURE=RATIO with a ratio of 1 or more, e.g. ttft_p99=1.05"
        raise SpecError(f"{text!r} is no threshold", where="--fail-above", hint=hint)
    return name.strip(), limit


@dataclass(frozen=True, slots=True)
class GateTest:
    """One figure of one condition against its baseline.

    new, baseline: means over the pairs. ratio, low, high: interval of level 1 - 2 alpha; ``high`` is the one-sided
    limit that decides a pass, ``low`` one that decides "worse" before its adjustment. p_pass: that the ratio is at the
    limit or above. p_worse: that it is at the limit or below, and p_holm: the same over all figures (Holm).
    more_blocks: pairs missing for a verdict; None where no number up to MANY would do, or none is missing.
    """

    condition: str
    figure: str
    limit: float
    num_pairs: int
    verdict: GateVerdict
    why: str
    new: float | None = None
    baseline: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    p_pass: float | None = None
    p_worse: float | None = None
    p_holm: float | None = None
    more_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class GateResult:
    """All tests. notes: what a reader must know of the two sides. origin: what stood in for a device."""

    tests: tuple[GateTest, ...]
    notes: tuple[str, ...]
    origin: str
    experiment: str
    policy: GatePolicy

    @property
    def verdict(self) -> GateVerdict:
        """Worse where any figure is; else "cannot tell" where any is open; a pass needs every figure."""
        verdicts = {test.verdict for test in self.tests}
        open_or_worse = (GateVerdict.WORSE, GateVerdict.CANNOT_TELL)
        return next((verdict for verdict in open_or_worse if verdict in verdicts or not verdicts), GateVerdict.PASS)


# A new run and the baseline's run of the same plan.
_Pair = tuple[GateRun, GateRun]


def judge(new: Sequence[GateRun], base: Sequence[GateRun], policy: GatePolicy) -> GateResult:
    """The gate over runs of the same plan, condition by condition.

    With one condition a side, their names may differ. Raises SpecError where the sides cannot be compared: another kind
    of server, time scale, window or form of answers, or no plan in common.
    """
    if not new or not base:
        raise SpecError("no valid runs on one side", where="gate", hint="See `harness runs` for the reasons")
    sides = [grouped(runs, lambda run: run.condition) for runs in (new, base)]
    if len(sides[0]) == len(sides[1]) == 1:
        sides[1] = dict(zip(sides[0], sides[1].values(), strict=True))
    _check_alike(new, base)
    pairs = {name: _pairs(sides[0].get(name, []), runs) for name, runs in sides[1].items()}
    if not any(pairs.values()):
        raise SpecError(
            "no new run has the plan of a baseline's run in the same condition",
            where="gate",
            hint="Run the same experiment, with the same base_seed, workload and conditions, on both sides",
        )
    wanted = [
        (condition, name)
        for condition, of_condition in pairs.items()
        for name in policy.limits
        if policy.is_named or not of_condition or any(_is_known(pair, name) for pair in of_condition)
    ]
    tests = [_test(condition, FIGURES[name], pairs[condition], policy, len(wanted)) for condition, name in wanted]
    notes = [*_coverage(sides, pairs), *_unseen(pairs, policy), *_differences(pairs)]
    origin = origin_of((*base, *new))
    experiments = " against ".join(dict.fromkeys((new[0].manifest.experiment, base[0].manifest.experiment)))
    return GateResult(tuple(_adjusted(tests, policy.alpha)), tuple(notes), origin, experiments, policy)


def _pairs(new: Sequence[GateRun], base: Sequence[GateRun]) -> list[_Pair]:
    """Runs of equal plans; the runs of a plan that was repeated are paired in order."""
    others = {plan: iter(runs) for plan, runs in grouped(base, lambda run: run.manifest.plan_hash).items()}
    pairs = ((run, next(others.get(run.manifest.plan_hash, iter(())), None)) for run in new)
    return [(run, other) for run, other in pairs if other is not None]


def _is_known(pair: _Pair, name: str) -> bool:
    return any(run.values.get(name) is not None for run in pair)


def _test(condition: str, figure: Measure, pairs: Sequence[_Pair], policy: GatePolicy, family: int) -> GateTest:
    """The figure with both p-values: a pass, or "cannot tell" until p is adjusted over all figures."""
    values = [(new.values.get(figure.name), base.values.get(figure.name)) for new, base in pairs]
    known = [(new, base) for new, base in values if new and base and new.amount > 0 and base.amount > 0]
    limit = policy.limits[figure.name]
    empty = GateTest(condition, figure.name, limit, len(known), GateVerdict.CANNOT_TELL, "")
    if not pairs:
        return replace(empty, why="no new run has the plan of a baseline's run")
    if len(known) < len(pairs):
        return replace(empty, why=f"not observed in {len(pairs) - len(known)} of {len(pairs)} pairs")
    sides = list(zip(*known, strict=True))
    means = [sum(value.amount for value in side) / sum(value.units for value in side) for side in sides]
    empty = replace(empty, new=means[0], baseline=means[1])
    num_requests = min(sum(run.num_requests for run in side) for side in zip(*pairs, strict=True))
    if num_requests < figure.requests_needed:
        needed = math.ceil(figure.requests_needed * len(pairs) / num_requests) if num_requests else MANY
        why = f"{num_requests} requests a side, {figure.requests_needed} are needed"
        return replace(empty, why=why, more_blocks=needed - len(pairs))
    logs = _log_ratios(figure, known)
    estimate = estimate_of(logs.tolist(), [run for run, _ in pairs])
    if estimate is None:
        why = f"{len(pairs)} pairs, {MIN_REPLICATES} are needed for an interval"
        return replace(empty, why=why, more_blocks=max(1, MIN_REPLICATES - len(pairs)))
    return _with_interval(empty, estimate, policy, family)


def _log_ratios(figure: Measure, known: Sequence[tuple[Value, Value]]) -> FloatArray:
    """A log ratio of each pair; of sums their mean is that of the sums, as in ``harness compare``."""
    new, base = ([pair[side] for pair in known] for side in (0, 1))
    if figure.kind is Kind.SUM:
        return log_values(new) - log_values(base)
    return np.log([value.amount for value in new]) - np.log([value.amount for value in base])


def _with_interval(test: GateTest, estimate: Estimate, policy: GatePolicy, family: int) -> GateTest:
    interval = estimate.interval(level=1 - 2 * policy.alpha)
    error = 0.0 if estimate.error < NO_SPREAD else estimate.error
    above = estimate.mean - math.log(test.limit)
    p_pass, p_worse = (one_sided_p(distance, error, estimate.degrees) for distance in (-above, above))
    is_pass = p_pass < policy.alpha
    return replace(
        test,
        verdict=GateVerdict.PASS if is_pass else GateVerdict.CANNOT_TELL,
        why="" if is_pass else "the interval holds the limit",
        ratio=interval.estimate,
        low=interval.low,
        high=interval.high,
        p_pass=p_pass,
        p_worse=p_worse,
        more_blocks=None if is_pass else _more_blocks(estimate, above, policy, family),
    )


def _more_blocks(estimate: Estimate, above: float, policy: GatePolicy, family: int) -> int | None:
    """Blocks beside those at hand that would tell, should the ratio and the spread be those that were measured."""
    sd = max(estimate.error * math.sqrt(estimate.num_units), NO_SPREAD)
    alpha = policy.alpha / family if above > 0 else policy.alpha
    needed = blocks_for_superiority(sd, -abs(above), alpha, policy.power)
    return None if needed is None else max(1, needed - estimate.num_units)


def _adjusted(tests: Sequence[GateTest], alpha: float) -> list[GateTest]:
    """ "Worse" where Holm's p over all figures of all conditions is below alpha; the others as they are."""
    adjusted = holm([test.p_worse for test in tests])
    return [
        replace(test, p_holm=p, verdict=GateVerdict.WORSE, why="above its limit", more_blocks=None)
        if p is not None and p < alpha
        else replace(test, p_holm=p)
        for test, p in zip(tests, adjusted, strict=True)
    ]


# What makes a pair meaningless when it differs, as a function of the manifest.
_FIXED: Mapping[str, Callable[[Manifest], object]] = {
    "kind of server": lambda manifest: manifest.kind.label,
    "time scale": lambda manifest: manifest.time_scale,
    "answers as a stream": lambda manifest: manifest.requested_client.get("stream", True),
    "measurement window": lambda manifest: dict(table_at(manifest.requested_experiment, "window")),
}


def _check_alike(new: Sequence[GateRun], base: Sequence[GateRun]) -> None:
    for what, of in _FIXED.items():
        values = [sorted({str(of(run.manifest)) for run in side}) for side in (new, base)]
        if values[0] != values[1]:
            raise SpecError(
                f"the sides differ in their {what}: {', '.join(values[0])} against {', '.join(values[1])}",
                where="gate",
                hint="Compare runs that were made alike, or make the baseline again",
            )


def _coverage(sides: Sequence[Mapping[str, Sequence[GateRun]]], pairs: Mapping[str, Sequence[_Pair]]) -> list[str]:
    """Runs and conditions that enter no test."""
    new, base = sides
    notes = [f"{name}: not judged, the baseline has no such condition" for name in new if name not in base]
    for name, of_condition in pairs.items():
        unpaired = len(new.get(name, ())) + len(base[name]) - 2 * len(of_condition)
        if unpaired:
            notes.append(f"{name}: {unpaired} runs without a partner of the same plan were left out")
    return notes


def _unseen(pairs: Mapping[str, Sequence[_Pair]], policy: GatePolicy) -> list[str]:
    """Figures that neither side observed, which are not judged unless they were asked for."""
    if policy.is_named:
        return []
    every = [pair for of_condition in pairs.values() for pair in of_condition]
    names = [name for name in policy.limits if not any(_is_known(pair, name) for pair in every)]
    return [f"not judged, as neither side observed it: {', '.join(names)}"] if names else []


def _differences(pairs: Mapping[str, Sequence[_Pair]]) -> list[str]:
    """Settings, stack and machine in which the paired runs differ: what a ratio may come from."""
    notes: list[str] = []
    for pair in (pair for of_condition in pairs.values() for pair in of_condition):
        new, base = (_facts(run.manifest) for run in pair)
        for name in sorted(new.keys() | base.keys()):
            before, now = (facts.get(name, "not known") for facts in (base, new))
            notes += [f"{name}: {before} in the baseline, {now} now"] if before != now else []
    return list(dict.fromkeys(notes))


def _facts(manifest: Manifest) -> dict[str, str]:
    """Settings in force, versions, cost model and machine of a run, as text."""
    host, cost_file = table_at(manifest.provenance, "host"), manifest.files.get(COST_MODEL)
    facts = {
        f"server.{key}": str(value) for key, value in manifest.server_spec.items() if value not in (None, "", {}, [])
    }
    facts |= {f"client.{key}": str(value) for key, value in manifest.requested_client.items()}
    facts |= {
        "vllm-rbln": manifest.serving_version,
        "rbln-harness": manifest.packages.get("rbln-harness", ""),
        "machine": f"{host.get('hostname', '')} ({host.get('cpu_model', '')})",
        "cost model (SHA-256)": "" if cost_file is None else cost_file.sha256[:12],
    }
    return {name: text for name, text in facts.items() if text}
