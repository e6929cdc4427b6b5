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
from itertools import pairwise

import numpy as np

from harness.analysis.compare.boundaries import boundaries_at
from harness.analysis.compare.measures import MEASURES, OF_SERVERS, Bounds, Counted, Measure, Value, mean_of
from harness.analysis.compare.pairs import in_order
from harness.analysis.compare.rare import deciding, skew_in_words
from harness.analysis.compare.ratio import Ratio, blocks_of, have_ratio, paired_ratio
from harness.analysis.figures import place_of
from harness.analysis.stats import MIN_REPLICATES, Estimate, grouped, t_quantile
from harness.errors import SpecError
from harness.judge.planning.power import MOST_BLOCKS, blocks_for_superiority
from harness.measure.records.layout import COST_MODEL
from harness.measure.records.manifest import Manifest, table_at
from harness.measure.records.run import SealedRun, origin_of

NO_SPREAD = 1e-9
# Of alpha that is left, the share that a look leaves to later ones.
LEFT = 0.2
# More blocks than an experiment can have.
MANY = MOST_BLOCKS


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
    def key(self) -> str:
        """Tells this run from any other, wherever it lies: of sealed records and of a saved baseline the same."""
        made = self.manifest
        began = made.provenance.get("captured_at_utc", "")
        return f"{made.experiment}/{made.condition}/{made.replicate} {made.plan_hash[:12]} {began}".strip()

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
    missing would tell.
    """

    limits: Mapping[str, float]
    asked: frozenset[str] = frozenset()
    alpha: float = 0.05
    power: float = 0.9


def gate_policy(
    figures: Sequence[str] = (), thresholds: Sequence[str] = (), alpha: float = 0.05, power: float = 0.9
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
    return GatePolicy(limits, frozenset((*figures, *given)), alpha, power)


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
    the limits that decide: "worse" where ``low`` lies above the limit, a pass where ``high`` lies below it. Over every
    look each holds with its share of alpha: ``high`` with alpha, ``low`` with alpha over the number of figures. looks:
    how often this figure was looked at. more_blocks: pairs missing for a verdict; None where no number up to MANY would
    do, or none is missing.
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
    looks: int = 0
    more_blocks: int | None = None
    shape: str = ""

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
PairKey = tuple[str, str]


def pair_keys(new: Sequence[GateRun], base: Sequence[GateRun]) -> frozenset[PairKey]:
    """The pairs that a look at these runs is made of."""
    return frozenset(map(_key, (pair for pairs in _paired(new, base).values() for pair in pairs)))


def _key(pair: _Pair) -> PairKey:
    return pair[0].key, pair[1].key


def judge(
    new: Sequence[GateRun], base: Sequence[GateRun], policy: GatePolicy, earlier: Sequence[frozenset[PairKey]] = ()
) -> GateResult:
    """The gate over runs of the same plan, condition by condition.

    earlier: the pairs of every look before this one, each among those of the next. With one condition a side, their
    names may differ. Raises SpecError where the sides cannot be compared: another kind
    of server, time scale, window or form of answers, or no plan in common.
    """
    if not new or not base:
        raise SpecError("no valid runs on one side", where="gate", hint="See `harness runs` for the reasons")
    _check_alike(new, base)
    pairs = _paired(new, base)
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
            why = "" if name in policy.asked or not of_condition else _not_carried(FIGURES[name], of_condition)
            if why:
                left_out.append(f"left out: {name} of {condition}, {why}; to judge it all the same: --figure {name}")
            else:
                empty = GateTest(condition, name, limit, len(of_condition), GateVerdict.CANNOT_TELL, "")
                tests.append(_tested(empty, of_condition, policy, family, earlier))
    shapes = [f"{test.figure} of {test.condition}: {test.shape}" for test in tests if test.shape]
    notes = [*shapes, *left_out, *_coverage(new, base, pairs), *_differences(pairs)]
    if new[0].manifest.kind.has_device is False:
        notes.append("no device: every figure and interval is given the step times of the cost model")
    origin = origin_of((*base, *new))
    experiments = " against ".join(dict.fromkeys((new[0].manifest.experiment, base[0].manifest.experiment)))
    return GateResult(tuple(tests), tuple(notes), origin, experiments, policy)


def _paired(new: Sequence[GateRun], base: Sequence[GateRun]) -> dict[str, list[_Pair]]:
    """The pairs of each condition of the baseline."""
    ours, theirs = _sides(new, base)
    return {name: in_order(ours.get(name, []), runs, _plan) for name, runs in theirs.items()}


def _plan(run: GateRun) -> str:
    return run.manifest.plan_hash


def _sides(
    new: Sequence[GateRun], base: Sequence[GateRun]
) -> tuple[dict[str, list[GateRun]], dict[str, list[GateRun]]]:
    """Both sides by condition, in the names of the new one where each has a single condition."""
    ours, theirs = (grouped(runs, lambda run: run.condition) for runs in (new, base))
    if len(ours) == len(theirs) == 1:
        theirs = dict(zip(ours, theirs.values(), strict=True))
    return ours, theirs


def _not_carried(figure: Measure, pairs: Sequence[_Pair]) -> str:
    """Why these runs cannot carry the figure, in words; "" where they can."""
    if not any(run.values.get(figure.name) for pair in pairs for run in pair):
        return "which neither side observed"
    number = _number_a_side(figure, pairs)
    if number >= figure.num_needed:
        return ""
    blocks, what = _blocks_for_number(figure, pairs), figure.counted.value
    return f"which needs {figure.num_needed:,} {what} a side ({number:,} here), about {blocks:,} blocks"


def _number_a_side(figure: Measure, pairs: Sequence[_Pair]) -> int:
    """Requests or sessions that the figure counts, of the side that has fewer."""
    return min(sum(_number(figure, run) for run in side) for side in zip(*pairs, strict=True))


def _number(figure: Measure, run: GateRun) -> int:
    return run.num_requests if figure.counted is Counted.REQUESTS else run.num_sessions


def _blocks_for_number(figure: Measure, pairs: Sequence[_Pair]) -> int:
    """Pairs that would have the requests or sessions that a figure needs, as many in each."""
    number = _number_a_side(figure, pairs)
    return math.ceil(figure.num_needed * len(pairs) / number) if number else MANY


def _known(figure: Measure, pairs: Sequence[_Pair]) -> list[tuple[Value, Value]]:
    """The figure's values of the pairs that have a ratio."""
    values = [(new.values.get(figure.name), base.values.get(figure.name)) for new, base in pairs]
    return [(new, base) for new, base in values if new and base and figure.has_ratio(new) and figure.has_ratio(base)]


def _tested(
    empty: GateTest,
    pairs: Sequence[_Pair],
    policy: GatePolicy,
    family: int,
    earlier: Sequence[frozenset[PairKey]],
) -> GateTest:
    """The verdict of one figure, over this look and the earlier ones at which it had an estimate."""
    figure, known = empty.measure, _known(empty.measure, pairs)
    if not pairs:
        return replace(empty, why="no new run has the plan of a baseline's run")
    if len(known) < len(pairs):
        why = f"not observed in {len(pairs) - len(known)} of {len(pairs)} pairs"
        return replace(empty, num_pairs=len(known), why=why)
    means = [mean_of(side) for side in zip(*known, strict=True)]
    empty = replace(empty, new=means[0], baseline=means[1])
    targets = {str(figure.target_of(run.manifest)) for pair in pairs for run in pair}
    if not all(means) or len(targets) > 1:
        why = "0 on one side, which has no ratio" if len(targets) == 1 else f"other targets ([slo] {figure.target})"
        return replace(empty, why=why)
    number = _number_a_side(figure, pairs)
    if number < figure.num_needed:
        why = f"{number} {figure.counted.value} a side, {figure.num_needed} are needed"
        return replace(empty, why=why, more_blocks=_blocks_for_number(figure, pairs) - len(pairs))
    looks = [[pair for pair in pairs if _key(pair) in keys] for keys in earlier]
    ratios = [ratio for look in (*looks, pairs) if (ratio := ratio_of(figure, look)) is not None]
    estimates = [ratio.estimate for ratio in ratios if ratio.estimate is not None]
    if not ratios or ratios[-1].estimate is None:
        why = f"{len(pairs)} pairs, {MIN_REPLICATES} are needed for an interval"
        return replace(empty, why=why, more_blocks=max(1, MIN_REPLICATES - len(pairs)))
    if not figure.is_lower_better:
        # Worse is above 1 for every figure.
        estimates = [one.inverse for one in estimates]
    (new_down, new_up), (base_down, base_up) = (log_bounds(figure.name, side) for side in zip(*pairs, strict=True))
    late = (new_down - base_up, new_up - base_down)
    test, is_open = _with_limits(empty, estimates, policy, family, late=late)
    if is_open:
        more = _more_blocks(estimates[-1], math.log(test.limit), policy, family, len(estimates))
        test = replace(test, more_blocks=more)

    def verdict_of(places: Sequence[int]) -> GateVerdict | None:
        """The verdict of one look at some of the pairs; None where so few have none."""
        some = [blocks[place] for place in places]
        estimate = paired_ratio(some, [pairs[place][0] for place in places]).estimate if have_ratio(some) else None
        if estimate is None:
            return None
        one = estimate if figure.is_lower_better else estimate.inverse
        return _with_limits(empty, [one], policy, family, late=late)[0].verdict

    blocks = blocks_of(*zip(*known, strict=True))
    one = deciding([new.manifest.replicate for new, _ in pairs], verdict_of)
    skew = skew_in_words((1 if figure.is_lower_better else -1) * np.array(ratios[-1].values))
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
    test: GateTest,
    estimates: Sequence[Estimate],
    policy: GatePolicy,
    family: int,
    *,
    late: tuple[float, float] = (0.0, 0.0),
) -> tuple[GateTest, bool]:
    """The verdict by the limits of all looks, and whether more blocks would tell what these do not.

    estimates: of each look, this one last. late: how far the log ratio may lie below and above, by the bounds of its
    values.
    """
    last, num_looks = estimates[-1], len(estimates)
    spread = [one._replace(error=0.0, base=None) if one.error < NO_SPREAD else one for one in estimates]
    lows, highs = (
        [one.ends(t)[side] for one, t in zip(spread, _boundaries(estimates, alpha), strict=True)]
        for side, alpha in ((0, policy.alpha / family), (1, policy.alpha))
    )
    # Each limit holds at every look with its whole alpha, so the tightest does.
    low, high = max(lows), min(highs)
    if low > high:
        low, high = lows[-1], highs[-1]
    low, high = low + late[0], high + late[1]
    at = math.log(test.limit)
    verdict = GateVerdict.WORSE if low > at else GateVerdict.PASS if high < at else GateVerdict.CANNOT_TELL
    why = {GateVerdict.WORSE: "above its limit", GateVerdict.PASS: ""}.get(verdict, "the interval holds the limit")
    is_open = verdict is GateVerdict.CANNOT_TELL
    is_late = is_open and not low - late[0] <= at <= high - late[1]
    if is_late:
        why = f"{test.measure.open_by}: the ratio may be {math.exp(last.mean + late[0]):.3f} to "
        why += f"{math.exp(last.mean + late[1]):.3f}"
    ratio, low, high = math.exp(last.mean), math.exp(low), math.exp(high)
    told = replace(test, verdict=verdict, why=why, ratio=ratio, low=low, high=high, looks=num_looks)
    return told, is_open and not is_late


def _spent(alpha: float, num_looks: int) -> float:
    """Alpha spent after so many looks: never all of it, so that there may always be one more."""
    return alpha * (1 - LEFT**num_looks)


def _boundaries(estimates: Sequence[Estimate], alpha: float) -> tuple[float, ...]:
    """t of each look, one-sided, such that a ratio at its limit ever crosses with probability alpha at most."""
    spent = [_spent(alpha, look) for look in range(1, len(estimates) + 1)]
    sizes = tuple(one.degrees + 1 for one in estimates)
    if all(after > before for before, after in pairwise(sizes)):
        return boundaries_at(sizes, tuple(spent), is_one_sided=True)
    # Devices scatter, and more blocks of them are no more data: each look by itself.
    alone = [after - before for before, after in pairwise((0.0, *spent))]
    return tuple(t_quantile(1 - 2 * share, one.degrees) for share, one in zip(alone, estimates, strict=True))


def _more_blocks(estimate: Estimate, at: float, policy: GatePolicy, family: int, num_looks: int) -> int | None:
    """Blocks beside those at hand that would tell at the next look, should ratio and spread stay as measured.

    at: the log of the limit.
    """
    above = estimate.mean - at
    sd = max(estimate.error * math.sqrt(estimate.num_units), NO_SPREAD)
    alpha = _spent(policy.alpha, num_looks + 1) - _spent(policy.alpha, num_looks)
    needed = blocks_for_superiority(sd, -abs(above), alpha / family if above > 0 else alpha, policy.power)
    return None if needed is None else max(1, needed - estimate.num_units)


# What makes a pair meaningless when it differs, as a function of the manifest.
_FIXED: Mapping[str, Callable[[Manifest], object]] = {
    "kind of server": lambda manifest: manifest.kind.label,
    "time scale": lambda manifest: manifest.time_scale,
    "answers as a stream": lambda manifest: manifest.requested_client.get("stream", True),
    "measurement window": lambda manifest: dict(table_at(manifest.requested_experiment, "window")),
}


def same_run(new: Sequence[GateRun], base: Sequence[GateRun]) -> str:
    """The key of a run that both sides hold; empty where there is none.

    Simulated runs of one second may be equal to the byte and are not the same: their folders tell.
    """
    seals = {run.seal for run in base if not run.manifest.kind.is_virtual}
    places = {(run.folder, run.key) for run in base if run.folder}
    return next((run.key for run in new if run.seal in seals or (run.folder, run.key) in places), "")


def _check_alike(new: Sequence[GateRun], base: Sequence[GateRun]) -> None:
    for what, of in _FIXED.items():
        values = [sorted({str(of(run.manifest)) for run in side}) for side in (new, base)]
        if values[0] != values[1]:
            raise SpecError(
                f"the sides differ in their {what}: {', '.join(values[0])} against {', '.join(values[1])}",
                where="gate",
                hint="Compare runs that were made alike, or make the baseline again",
            )


def _coverage(new: Sequence[GateRun], base: Sequence[GateRun], pairs: Mapping[str, Sequence[_Pair]]) -> list[str]:
    """Runs and conditions that enter no test."""
    ours, theirs = _sides(new, base)
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
