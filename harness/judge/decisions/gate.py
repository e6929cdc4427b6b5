"""Whether new runs are worse than a baseline by more than a margin, figure by figure, over runs of the same plan.

"Cannot tell" is an answer of its own and never a pass. Nothing is read from disk but sealed runs, and nothing written.
Definitions: docs/guides/gate.md, "How it decides".
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

import numpy as np

from harness.analysis.compare.measures import MEASURES, OF_SERVERS, Bounds, Counted, Measure, Value, mean_of
from harness.analysis.compare.pairs import in_order
from harness.analysis.compare.rare import deciding, skew_in_words
from harness.analysis.compare.ratio import Ratio, blocks_of, have_ratio, paired_ratio
from harness.analysis.figures import place_of
from harness.analysis.stats import MIN_REPLICATES, Estimate, grouped, t_quantile
from harness.errors import SpecError
from harness.judge.planning.power import MOST_BLOCKS, PlannedTest
from harness.measure.records.layout import COST_MODEL
from harness.measure.records.manifest import Manifest, table_at
from harness.measure.records.run import SealedRun, origin_of

NO_SPREAD = 1e-9
HOLDS_LIMIT = "the interval holds the limit"
# Of alpha that is left, the share that a look leaves to later ones.
LEFT = 0.2


class GateVerdict(str, Enum):
    """What the gate says of a figure, and of all of them."""

    PASS = "pass"
    WORSE = "worse"
    CANNOT_TELL = "cannot tell"


# The measures that can be judged. Those with a limit are judged unless the user names others.
# Modelled device time (A) is priced by a cost model and cannot see that a device became slower; B is the cost.
FIGURES: Mapping[str, Measure] = {name: measure for name, measure in MEASURES.items() if name not in OF_SERVERS}


@dataclass(frozen=True)
class GateRun:
    """The figures of one valid run, of sealed records or of a saved baseline.

    num_requests: answered requests with a time to first token. num_sessions: sessions that finished; 0 of a baseline
    that an earlier version saved. device, unit: where in a fleet it ran. bounds: what figures can be whose tokens were
    read late, or whose power was sampled; the others are exact. folder: where it was read from, links resolved.
    """

    manifest: Manifest
    device: str
    unit: int
    num_requests: int
    values: Mapping[str, Value | None]
    num_sessions: int = 0
    bounds: Mapping[str, Bounds] = field(default_factory=dict[str, Bounds])
    folder: str = field(default="", compare=False)

    @property
    def condition(self) -> str:
        return self.manifest.condition

    @property
    def label(self) -> str:
        return f"{self.manifest.experiment}/{self.condition}/{self.manifest.replicate}"

    @cached_property
    def seal(self) -> str:
        """SHA-256 of its manifest: equal for a run and its copies, wherever they lie."""
        return hashlib.sha256(self.manifest.to_json().encode()).hexdigest()


def gate_run(run: SealedRun) -> GateRun:
    """Every figure of a sealed run."""
    place = place_of(run)
    numbers = {f"num_{counted.value}": counted.number(run) for counted in Counted}
    values = {name: figure.of(run) for name, figure in FIGURES.items()}
    bounds = {
        name: bound
        for name, figure in FIGURES.items()
        if figure.bounds is not None and (bound := figure.bounds(run)) is not None
    }
    folder = str(run.path.resolve())
    return GateRun(run.manifest, place["device"], place["unit"], values=values, bounds=bounds, folder=folder, **numbers)


def log_bounds(figure: str, runs: Sequence[GateRun]) -> tuple[float, float]:
    """How far ln of a figure over runs may lie below and above what was observed, by their bounds."""
    known = [(value, run.bounds.get(figure)) for run in runs if (value := run.values.get(figure)) is not None]
    observed = sum(value.amount for value, _ in known)
    least, most = (
        sum(value.amount if bound is None else bound[end] * value.units for value, bound in known) for end in (0, 1)
    )
    return (math.log(least / observed) if least > 0 else -math.inf), math.log(most / observed)


@dataclass(frozen=True, slots=True)
class GatePolicy:
    """What is judged and how. limits: by figure, the largest accepted ratio; asked: figures that the user named.

    alpha: of a false pass, and of any false "worse", at however many looks. power: with which the blocks that are
    missing would tell. look: how often the caller has judged these runs, this time included.
    """

    limits: Mapping[str, float]
    asked: frozenset[str] = frozenset()
    alpha: float = 0.05
    power: float = 0.9
    look: int = 1

    def share(self, look: int) -> float:
        """Of alpha, what one look spends: all looks together spend less than alpha."""
        return self.alpha * (1 - LEFT) * LEFT ** (look - 1)


def gate_policy(
    figures: Sequence[str] = (), thresholds: Sequence[str] = (), alpha: float = 0.05, power: float = 0.9, look: int = 1
) -> GatePolicy:
    """The policy for these figures, default all with a limit, and thresholds "FIGURE=RATIO".

    A figure with a threshold is judged too when only some figures are named. SpecError for what is no figure, or has no
    limit.
    """
    given = dict(map(_threshold, thresholds))
    for name in (*figures, *given):
        if name not in FIGURES:
            raise SpecError(f"{name!r} is no figure of the gate", where="gate", hint=f"Use {', '.join(FIGURES)}")
    usual = figures or [name for name, figure in FIGURES.items() if figure.limit is not None]
    limits: dict[str, float] = {}
    for name, figure in FIGURES.items():
        if name not in usual and name not in given:
            continue
        limit = given.get(name, figure.limit)
        if limit is None:
            hint = f"Say it: --fail-above {name}=1.05"
            raise SpecError(f"{name} has no limit of its own", where="gate", hint=hint)
        limits[name] = limit
    return GatePolicy(limits, frozenset((*figures, *given)), alpha, power, look)


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

    new, baseline: means over the pairs. ratio: new over baseline; where more is better, baseline over new. low, high:
    the limits that decide: "worse" where ``low`` lies above the limit, a pass where ``high`` lies below it. Each holds
    with the alpha of this look: ``high`` with all of it, ``low`` with it over the number of figures. more_blocks: pairs
    missing for a verdict; None where no number up to MOST_BLOCKS would do, or none is missing. shape: the pair that
    decides, and a skew. is_carried: whether a side observed it, in as many requests or sessions as it needs.
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
    more_blocks: int | None = None
    shape: str = ""
    is_carried: bool = True

    @property
    def measure(self) -> Measure:
        return FIGURES[self.figure]

    @property
    def unit(self) -> str:
        """Of its values."""
        return self.measure.column.removeprefix(f"{self.figure}_").replace("_per_", "/").replace("_", " ")


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
        verdicts = {test.verdict for test in self.tests} or {GateVerdict.CANNOT_TELL}
        open_or_worse = (GateVerdict.WORSE, GateVerdict.CANNOT_TELL)
        return next((verdict for verdict in open_or_worse if verdict in verdicts), GateVerdict.PASS)


# A new run and the baseline's run of the same plan.
_Pair = tuple[GateRun, GateRun]


def judge(new: Sequence[GateRun], base: Sequence[GateRun], policy: GatePolicy) -> GateResult:
    """The gate over runs of the same plan, condition by condition.

    With one condition a side, their names may differ. Raises SpecError where the sides cannot be compared: another
    kind of server, time scale, window or form of answers, or no plan in common.
    """
    if not new or not base:
        raise SpecError("no valid runs on one side", where="gate", hint="See `harness runs` for the reasons")
    _check_alike(new, base)
    ours, theirs = (grouped(runs, lambda run: run.condition) for runs in (new, base))
    if len(ours) == len(theirs) == 1:
        theirs = dict(zip(ours, theirs.values(), strict=True))
    pairs = {
        name: in_order(ours.get(name, []), runs, lambda run: run.manifest.plan_hash) for name, runs in theirs.items()
    }
    if not any(pairs.values()):
        raise SpecError(
            "no new run has the plan of a baseline's run in the same condition",
            where="gate",
            hint="Run the same experiment, with the same base_seed, workload and conditions, on both sides",
        )
    tests: list[GateTest] = []
    left_out: list[str] = []
    family = len(pairs) * len(policy.limits)
    for condition, of_condition in pairs.items():
        for name, limit in policy.limits.items():
            empty = GateTest(condition, name, limit, len(of_condition), GateVerdict.CANNOT_TELL, "")
            test = _tested(empty, of_condition, policy, family)
            if test.is_carried or name in policy.asked:
                tests.append(test)
            else:
                why = f"{name} of {condition}, {test.why}"
                left_out.append(f"left out: {why}; to judge it all the same: --figure {name}")
    shapes = [f"{test.figure} of {test.condition}: {test.shape}" for test in tests if test.shape]
    means = [
        f"{name}: the mean over runs of each run's own percentile, not the percentile of all requests that `harness "
        "table` shows"
        for name in dict.fromkeys(test.figure for test in tests if test.measure.quantile is not None)
    ]
    notes = [*means, *shapes, *left_out, *_coverage(ours, theirs, pairs), *_differences(pairs)]
    if new[0].manifest.kind.has_device is False:
        notes.append("no device: every figure and interval is given the step times of the cost model")
    origin = origin_of((*base, *new))
    experiments = " against ".join(dict.fromkeys((new[0].manifest.experiment, base[0].manifest.experiment)))
    return GateResult(tuple(tests), tuple(notes), origin, experiments, policy)


def _number_a_side(figure: Measure, pairs: Sequence[_Pair]) -> int:
    """Requests or sessions that the figure counts, of the side that has fewer."""
    counted = "num_requests" if figure.counted is Counted.REQUESTS else "num_sessions"
    return min(sum(getattr(run, counted) for run in side) for side in zip(*pairs, strict=True))


def _known(figure: Measure, pairs: Sequence[_Pair]) -> list[tuple[Value, Value]]:
    """The figure's values of the pairs that have a ratio."""
    values = [(new.values.get(figure.name), base.values.get(figure.name)) for new, base in pairs]
    return [(new, base) for new, base in values if new and base and figure.has_ratio(new) and figure.has_ratio(base)]


def _tested(empty: GateTest, pairs: Sequence[_Pair], policy: GatePolicy, family: int) -> GateTest:
    """The verdict of one figure."""
    figure, known = empty.measure, _known(empty.measure, pairs)
    if not pairs:
        return replace(empty, why="no new run has the plan of a baseline's run")
    is_seen = any(run.values.get(figure.name) for pair in pairs for run in pair)
    number = _number_a_side(figure, pairs)
    if is_seen and number < figure.num_needed:
        blocks = math.ceil(figure.num_needed * len(pairs) / number) if number else MOST_BLOCKS
        what = f"{number:,} {figure.counted.value} a side, {figure.num_needed:,} are needed"
        why = f"{what}, about {blocks:,} blocks"
        return replace(empty, why=why, more_blocks=blocks - len(pairs), is_carried=False)
    if len(known) < len(pairs):
        why = f"not observed in {len(pairs) - len(known)} of {len(pairs)} pairs"
        return replace(empty, num_pairs=len(known), why=why, is_carried=is_seen)
    means = [mean_of(side) for side in zip(*known, strict=True)]
    empty = replace(empty, new=means[0], baseline=means[1])
    targets = {str(figure.target_of(run.manifest)) for pair in pairs for run in pair}
    if not all(means) or len(targets) > 1:
        why = "0 on one side, which has no ratio" if len(targets) == 1 else f"other targets ([slo] {figure.target})"
        return replace(empty, why=why)
    ratio = ratio_of(figure, pairs)
    if ratio is None or ratio.estimate is None:
        why = f"{len(pairs)} pairs, {MIN_REPLICATES} are needed for an interval"
        return replace(empty, why=why, more_blocks=max(1, MIN_REPLICATES - len(pairs)))
    (new_down, new_up), (base_down, base_up) = (log_bounds(figure.name, side) for side in zip(*pairs, strict=True))
    late = (new_down - base_up, new_up - base_down)
    test = _with_limits(empty, ratio.estimate, policy, family, late)
    if test.why == HOLDS_LIMIT:
        test = replace(test, more_blocks=_more_blocks(test, ratio.estimate, policy, family))

    def verdict_of(places: Sequence[int]) -> GateVerdict | None:
        """The verdict of some of the pairs; None where so few have none."""
        some = ratio_of(figure, [pairs[place] for place in places])
        if some is None or some.estimate is None:
            return None
        return _with_limits(empty, some.estimate, policy, family, late).verdict

    one = deciding([new.manifest.replicate for new, _ in pairs], verdict_of)
    skew = skew_in_words((1 if figure.is_lower_better else -1) * np.array(ratio.values))
    shape = "" if one is None else f"replicate {one[0]} decides: without it, {one[1].value}"
    return replace(test, shape="; ".join(filter(None, (shape, skew))))


def ratio_of(figure: Measure, pairs: Sequence[_Pair]) -> Ratio | None:
    """The ratio of pairs that all have the figure; None where one has not, or they hold too few requests."""
    known = _known(figure, pairs)
    if not known or len(known) < len(pairs) or _number_a_side(figure, pairs) < figure.num_needed:
        return None
    blocks = blocks_of(*zip(*known, strict=True))
    return paired_ratio(blocks, [run for run, _ in pairs]) if have_ratio(blocks) else None


def _with_limits(
    test: GateTest, estimate: Estimate, policy: GatePolicy, family: int, late: tuple[float, float]
) -> GateTest:
    """The verdict by the limits of this look. late: how far the log ratio may lie below and above, by its values."""
    # Worse is above 1 for every figure.
    estimate = estimate if test.measure.is_lower_better else estimate.inverse
    spread = estimate._replace(error=0.0, base=None) if estimate.error < NO_SPREAD else estimate
    alpha = policy.share(policy.look)
    (low, _), (_, high) = (
        spread.ends(t_quantile(1 - 2 * share, estimate.degrees)) for share in (alpha / family, alpha)
    )
    at = math.log(test.limit)
    is_told = not low <= at <= high
    low, high = low + late[0], high + late[1]
    test = replace(test, ratio=math.exp(estimate.mean), low=math.exp(low), high=math.exp(high))
    if low > at:
        return replace(test, verdict=GateVerdict.WORSE, why="above its limit")
    if high < at:
        return replace(test, verdict=GateVerdict.PASS)
    ends = f"{math.exp(estimate.mean + late[0]):.3f} to {math.exp(estimate.mean + late[1]):.3f}"
    why = f"{test.measure.open_by}: the ratio may be {ends}" if is_told else HOLDS_LIMIT
    return replace(test, why=why)


def _more_blocks(test: GateTest, estimate: Estimate, policy: GatePolicy, family: int) -> int | None:
    """Blocks beside those at hand that would tell at the next look, should ratio and spread stay as measured."""
    above = (estimate.mean if test.measure.is_lower_better else -estimate.mean) - math.log(test.limit)
    sd = estimate.error * math.sqrt(estimate.num_units)
    alpha = policy.share(policy.look + 1)
    planned = PlannedTest(sd, alpha / family if above > 0 else alpha)
    needed = planned.blocks(-abs(above), "superiority", policy.power)
    return None if needed is None else max(1, needed - estimate.num_units)


# What makes a pair meaningless when it differs, as a function of the manifest.
_FIXED: Mapping[str, Callable[[Manifest], object]] = {
    "kind of server": lambda manifest: manifest.kind.label,
    "time scale": lambda manifest: manifest.time_scale,
    "answers as a stream": lambda manifest: manifest.requested_client.get("stream", True),
    "measurement window": lambda manifest: dict(table_at(manifest.requested_experiment, "window")),
}


def same_run(new: Sequence[GateRun], base: Sequence[GateRun]) -> str:
    """The label of a run that both sides hold; empty where there is none.

    Simulated runs of one second may be equal to the byte and are not the same: their folders tell.
    """
    seals = {run.seal for run in base if not run.manifest.kind.is_virtual}
    places = {(run.folder, run.label) for run in base if run.folder}
    return next((run.label for run in new if run.seal in seals or (run.folder, run.label) in places), "")


def _check_alike(new: Sequence[GateRun], base: Sequence[GateRun]) -> None:
    for what, of in _FIXED.items():
        values = [sorted({str(of(run.manifest)) for run in side}) for side in (new, base)]
        if values[0] != values[1]:
            raise SpecError(
                f"the sides differ in their {what}: {', '.join(values[0])} against {', '.join(values[1])}",
                where="gate",
                hint="Compare runs that were made alike, or make the baseline again",
            )


def _coverage(
    ours: Mapping[str, Sequence[GateRun]], theirs: Mapping[str, Sequence[GateRun]], pairs: Mapping[str, Sequence[_Pair]]
) -> list[str]:
    """Runs and conditions that enter no test."""
    notes = [f"{name}: not judged, the baseline has no such condition" for name in ours if name not in theirs]
    for name, of_condition in pairs.items():
        unpaired = len(ours.get(name, ())) + len(theirs[name]) - 2 * len(of_condition)
        if unpaired:
            notes.append(f"{name}: {unpaired} runs without a partner of the same plan were left out")
    return notes


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
