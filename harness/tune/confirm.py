"""The measurement of a proposal: today's server and at most two candidates, on plans that nothing before has seen.

Its file is written, and fixed with the predictions, before the first of its runs. Nothing is run here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import tomli_w
from pydantic import BaseModel

from harness.analysis.compare.answer import asked_in_words
from harness.analysis.compare.ratio import Verdict
from harness.analysis.compare.stopping import ComparisonLooks, SequentialStatus, bonferroni, looks_at
from harness.analysis.serving import ServingFigures
from harness.analysis.summary import ExperimentSummary, summarise
from harness.clock import NS_PER_MS
from harness.errors import SpecError
from harness.judge.planning.power import blocks_until_decided
from harness.judge.planning.rare_plans import left_open_in_words
from harness.kinds import kind_named, kind_of_run
from harness.measure.client.target import endpoint_at
from harness.measure.records.run import SealedRun
from harness.model.experiment import build_plan
from harness.model.plan.build import derive_seed
from harness.model.spec import ConditionSpec, ExperimentSpec, ServerSpec, StopSpec, parse_experiment
from harness.model.spec.sections import Basis
from harness.table import interval_text
from harness.tune.explore import Explored
from harness.tune.folder import CONFIRM, EXPLORED, TuneFolder
from harness.tune.plans import MARGIN, SEED_RANGE
from harness.tune.predict import Option
from harness.tune.setups import Baseline, Setup
from harness.tune.targets import Felt, Point

BASE, BEST, SMALLEST = "today", "best", "smallest"
MOST_BLOCKS = 24
"""Plans of a measurement at most."""
LEAST_BLOCKS = 4
LAST_START = 0.95
"""Share of the budget after which no run begins, so that the last one ends near its end."""
LOOKS = (6, 12)
ALPHA = 0.05
EXCESS = {4: 1.3, 6: 0.4, 12: 0.2}
"""Points by which confirmed gains are too high in the mean, by the fewest plans of a budget (docs/evidence)."""


def with_one_condition(spec: ExperimentSpec, name: str, replicates: int) -> ExperimentSpec:
    """The experiment's baseline alone, its changes of server and workload written into the experiment's tables."""
    table = plain_table(spec)
    table |= {"name": name[:64], "replicates": replicates, "condition": [unchanged(spec, BASE)]}
    return parse_experiment(table, where=name)


def plain_table(spec: ExperimentSpec) -> dict[str, Any]:
    """The parts of an experiment that its baseline runs with, keys that are not defaults alone."""
    base = base_condition(spec)
    parts = {
        "workload": spec.workload_of(base),
        "server": spec.server_of(base),
        "client": spec.client,
        "limits": spec.limits,
        "slo": spec.slo,
        "window": spec.window,
        "prediction": spec.prediction,
    }
    written = {key: _set_keys(part) for key, part in parts.items()}
    return {
        "backend": spec.backend,
        "time_scale": spec.time_scale,
        "base_seed": spec.base_seed,
        **{key: keys for key, keys in written.items() if keys},
    }


def unchanged(spec: ExperimentSpec, name: str) -> dict[str, Any]:
    """What runs today, as a condition of this name."""
    return {"name": name, "treatment": base_condition(spec).treatment}


def is_repeated(spec: ExperimentSpec) -> bool:
    """Whether every plan has the same sessions, as of a recording that is replayed whole."""
    workload = spec.workload_of(base_condition(spec))
    return build_plan(workload, 1, 0).sessions == build_plan(workload, 1, 1).sessions


def plans_in_words(spec: ExperimentSpec, count: int) -> str:
    """ "12 new plans", "12 repeats of the same sessions"."""
    return f"{count} repeats of the same sessions" if is_repeated(spec) else f"{count} new plans"


def _set_keys(part: BaseModel) -> dict[str, Any]:
    """The keys that differ from their defaults, each with its whole value: a length names its distribution."""
    is_set = part.model_dump(exclude_defaults=True, exclude_none=True)
    return part.model_dump(mode="json", include=set(is_set), exclude_none=True)


def candidates_of(explored: Explored) -> dict[str, Option]:
    """What is measured beside today's server, by the name of its condition."""
    if explored.best is None or explored.smallest is None:
        return {}
    if explored.best.setup == explored.smallest.setup:
        return {BEST: explored.best}
    return {SMALLEST: explored.smallest, BEST: explored.best}


def place_key(spec: ExperimentSpec) -> str:
    """The key of [server] that somebody has to fill in for a candidate: "url", "artifact", or "" where nobody has."""
    if not kind_named(spec.backend).is_restarted:
        return "url"
    return "artifact" if server_of(spec).artifact else ""


def placed_keys(spec: ExperimentSpec, base: Baseline, setup: Setup, place: str | None) -> dict[str, Any]:
    """The keys of [server] that a condition with this configuration sets. place: value of ``place_key``, if any; of an
    address with the server's step log, where it has one: "URL,FILE"."""
    if not place:
        return base.keys(setup)
    where, _, step_log = place.partition(",") if place_key(spec) == "url" else (place, "", "")
    return {**base.keys(setup), place_key(spec): where, **({"step_log": step_log} if step_log else {})}


def refuse_one_address(today: ServerSpec, candidates: Mapping[str, str]) -> None:
    """SpecError where a candidate has the address of today's server, or of another candidate."""
    taken = {
        endpoint_at(url, "", "server.url").place: ("today's server", url) for url in (today.url, *today.replica_urls)
    }
    for name, place in candidates.items():
        url = place.partition(",")[0]
        whose, other = taken.setdefault(endpoint_at(url, "", "--candidate").place, (name, url))
        if whose != name:
            hint = "Start a server for each candidate beside today's, on another port"
            raise SpecError(f"{name} at {url} is {whose} at {other}", where="--candidate", hint=hint)


class Measurement(NamedTuple):
    """What is measured.

    budget: blocks at most. base: today's server. places: values of ``place_key`` by candidate. channel: what counts.
    """

    candidates: Mapping[str, Option]
    budget: int
    base: Baseline
    places: Mapping[str, str] = MappingProxyType({})
    channel: Basis = "a"


def confirm_text(spec: ExperimentSpec, wanted: Measurement) -> str:
    """The experiment file of the measurement."""
    base, budget = wanted.base, wanted.budget
    conditions = [unchanged(spec, BASE)]
    for name, option in wanted.candidates.items():
        conditions.append(
            {**unchanged(spec, name), "server": placed_keys(spec, base, option.setup, wanted.places.get(name))}
        )
    table = plain_table(spec)
    table |= {
        "name": f"{spec.name[:56]}-confirm",
        "title": f"{spec.title or spec.name}: today's configuration and what is proposed",
        "question": "Does the proposed configuration cost less device time, and by how much?",
        "replicates": budget,
        "base_seed": derive_seed(spec.base_seed, "tune/confirm") % SEED_RANGE,
        "baseline": BASE,
        "stop": {
            "margin": MARGIN,
            "alpha": ALPHA,
            "budget": budget,
            # A share takes all plans.
            "looks": [budget] if spec.slo.is_set or spec.slo.session_s else looks_within(budget),
            "channel": wanted.channel,
        },
        "condition": conditions,
    }
    head = "# Written by `harness tune`: new plans of the same sessions, fixed with the predictions before any run.\n"
    return head + tomli_w.dumps(table)


def freeze(folder: TuneFolder, spec: ExperimentSpec, wanted: Measurement) -> ExperimentSpec:
    """Write and fix the measurement; the experiment of an earlier call where there is one."""
    if folder.frozen() is None:
        folder.write_text(CONFIRM, confirm_text(spec, wanted))
        predicted = {
            name: {"ratio": option.ratio.ratio, "error": option.ratio.error, "low": option.low, "high": option.high}
            for name, option in wanted.candidates.items()
        }
        folder.freeze({"predicted": predicted}, [CONFIRM, EXPLORED])
    path = folder.path / CONFIRM
    spec = folder.kept_experiment(CONFIRM, "")
    fixed = path.read_text(encoding="utf-8")
    if not all(part in fixed for place in wanted.places.values() for part in place.split(",")):
        hint = f"Give the addresses of {path}, or begin anew in another folder"
        raise SpecError("differs from what was fixed before the first run", where="--candidate", hint=hint)
    return spec


class BudgetTooShortError(SpecError):
    """The budget has room for fewer plans than decide anything; the hint names one that has."""


def blocks_within(seconds: float, block_s: float, seconds_before: float = 0.0, most: int = 0) -> int:
    """Blocks of a measurement that fit into the time; BudgetTooShortError where no rule can decide by so many.

    seconds_before: what the stages before take, for the advice. most: MOST_BLOCKS where it is 0.
    """
    most = most or MOST_BLOCKS
    if block_s <= 0:
        return most
    blocks = min(most, int(seconds / block_s))
    if blocks < LEAST_BLOCKS:
        # Never as many as were given: runs may take longer than they did.
        minutes = math.ceil((LEAST_BLOCKS * block_s + seconds_before) / LAST_START / 60)
        minutes = max(minutes, int((seconds + seconds_before) // 60) + 1)
        raise BudgetTooShortError(
            f"it leaves room for {max(blocks, 0)} plan{'s' * (blocks != 1)} of {block_s:.0f} s each, and fewer than "
            f"{LEAST_BLOCKS} decide nothing",
            where="tune.budget",
            hint=f"Allow {minutes} min, or shorten the sessions",
        )
    return blocks


def looks_within(budget: int) -> list[int]:
    """The numbers of blocks after which the rule looks: seldom, so that intervals stay narrow."""
    return [*(look for look in LOOKS if look < budget), budget]


def power(option: Option, blocks: int, num_comparisons: int, *, needs_flight: bool = False) -> float:
    """The probability that a measurement of so many plans ends in a verdict, if the prediction is right.

    needs_flight: on a device time in flight has to notice the effect as well.
    """
    stop = StopSpec(margin=MARGIN, alpha=ALPHA, budget=blocks, looks=tuple(looks_within(blocks)))
    stop = bonferroni(stop, num_comparisons)
    seen = [(option.ratio.ratio, option.block_sd), *([option.flight] if needs_flight and option.flight else [])]
    ends = [blocks_until_decided(max(sd, 1e-4), math.log(ratio), stop) for ratio, sd in seen]
    return min(float((each <= blocks).mean()) for each in ends)


def first_look(quick: Explored, blocks: int, spec: ExperimentSpec) -> str:
    """What a quick search proposes, and the chance that so many plans show it."""
    if quick.is_missed and quick.smallest is None:
        return "no configuration is predicted to meet the targets, so it ends after explore"
    if (proposal := quick.smallest) is None:
        most = 100 * quick.most_saved
        return f"no change is predicted to save 1 % (at most {most:.1f} %), so it ends after explore"
    predicted = f"{proposal.words}, predicted {100 * proposal.saving:.1f} % less"
    if is_repeated(spec):
        return f"{predicted}; whether repeats tell it from today's, the spread of the server's own runs decides"
    chance = power(proposal, blocks, 2, needs_flight=kind_named(spec.backend).has_device is not False)
    return (
        f"{predicted}; {blocks} plans tell it from today's with probability {chance:.2f}, if that is right and plans "
        "alone make runs differ"
    )


@dataclass(frozen=True)
class Confirmed:
    """What the measurement shows of one candidate. saving, low, high: shares, at the last look; None: no interval.

    verdict: "less", "more", "equal" within MARGIN, or "" where it was not told apart. apart: why nothing is told:
    modelled device time (A) and time in flight (B) contradict each other, or there is no interval; "" otherwise.
    beside: what the time in flight of a device's server says of the device time; "" where it is not asked. excess: that
    gains of so few plans are too high in the mean. share, today: what of its runs, and of today's, met the targets of
    [slo]; None without. left_open: what plans that were not seen may change. felt: times to tokens of its runs beside
    today's; "" where they are not known exactly.
    """

    name: str
    saving: float
    low: float | None
    high: float | None
    verdict: str
    num_blocks: int
    channel: str
    apart: str = ""
    beside: str = ""
    excess: str = ""
    left_open: str = ""
    share: Point | None = None
    today: Point | None = None
    felt: str = ""

    @property
    def is_better(self) -> bool:
        """Whether it is shown to cost less, and within the targets where there are any; or to meet those that today's
        server misses."""
        if self.share is None or self.today is None:
            return self.verdict == "less"
        return self.share.verdict == "holds" and (self.verdict == "less" or self.today.verdict == "fails")

    @property
    def words(self) -> str:
        """ "7.3 % less device time (5.1 to 9.4)"."""
        what = "time in flight" if self.channel == "b" else "device time"
        side = "less" if self.saving >= 0 else "more"
        interval = ""
        if self.low is not None and self.high is not None:
            ends = sorted((self.low, self.high)) if self.saving >= 0 else sorted((-self.low, -self.high))
            interval = f" ({interval_text(100 * ends[0], 100 * ends[1], 1)})"
        return f"{100 * abs(self.saving):.1f} % {side} {what}{interval}"

    def lines(self) -> Iterator[str]:
        """What it shows, as lines of text."""
        beside = f"; {self.beside}" if self.beside else ""
        yield f"{self.name}: {self.words} on {self.num_blocks} plans{beside}"
        if self.left_open:
            yield f"  {self.left_open}"


class Measured(NamedTuple):
    """What the measurement of a proposal showed. best_is_better: the best costs less than the smallest change. why: why
    it is not whole. declared: settings that nothing showed, in words.
    """

    shown: tuple[Confirmed, ...] = ()
    best_is_better: bool = False
    why: str = ""
    declared: str = ""


NOT_MEASURED = Measured()
VERDICTS = {Verdict.LOWER: "less", Verdict.HIGHER: "more", Verdict.EQUIVALENT: "equal"}


def confirmed(spec: ExperimentSpec, runs: Sequence[SealedRun], status: SequentialStatus) -> tuple[Confirmed, ...]:
    """What the sealed runs of a measurement show so far, under its rule."""
    summary = summarise(runs) if any(run.is_valid for run in runs) else None
    beside = {} if summary is None else _beside(summary, runs)
    return tuple(
        replace(
            _confirmed(looks),
            beside=beside.get(looks.condition, ""),
            felt="" if summary is None else _felt(summary, looks.condition),
            excess=excess_of(status.stop.budget),
            left_open="" if is_repeated(spec) else left_open_in_words(spec, looks.condition, looks.num_seen),
        )
        for looks in status.comparisons
        if looks.num_blocks
    )


def excess_of(budget: int) -> str:
    """What must be said of a gain that so few plans confirm; "" of MOST_BLOCKS."""
    points = max((most for most in EXCESS.items() if most[0] <= budget), default=(0, EXCESS[LEAST_BLOCKS]))[1]
    return f"gains of so few plans are some {points:g} points too high in the mean" if budget < MOST_BLOCKS else ""


def _beside(summary: ExperimentSummary, runs: Sequence[SealedRun]) -> dict[str, str]:
    """What time in flight says of each candidate, where a server on a device was measured."""
    if not kind_of_run(runs[0].manifest.backend).has_device:
        return {}
    return {each.name: asked_in_words(each.comparison) for each in summary.conditions if each.comparison is not None}


def _felt(summary: ExperimentSummary, condition: str) -> str:
    now, today = (summary.serving_of(name) for name in (condition, BASE))
    if now is None or today is None:
        return ""
    ours, theirs = _times(now), _times(today)
    return "" if ours is None or theirs is None else ours.beside(theirs)


def _times(figures: ServingFigures) -> Felt | None:
    """Its times to tokens; None where the client read tokens too late for exact ones."""
    found = [each.at(q) for name in ("ttft", "itl") if (each := figures.of(name)) for q in (0.5, 0.99)]
    if len(found) not in (2, 4) or any(one.at_least is not None for one in found):
        return None
    ms = [one.value / NS_PER_MS for one in found]
    return Felt(ms[0], ms[1], *(ms[2:] or (None, None)))


def _confirmed(looks: ComparisonLooks) -> Confirmed:
    interval = looks.interval
    low, high = (None, None) if interval is None else (1 - interval.high, 1 - interval.low)
    verdict = VERDICTS.get(looks.verdict, "")
    apart = looks.why_no_interval if interval is None else "" if looks.last is None else looks.last.apart
    return Confirmed(looks.condition, 1 - looks.ratio, low, high, verdict, looks.num_seen, looks.channel, apart)


def best_is_better(status: SequentialStatus) -> bool:
    """Whether the runs show that the best candidate costs less than the smallest, by a sequence on the same blocks."""
    by_name = {looks.condition: looks for looks in status.comparisons}
    if not {BEST, SMALLEST} <= by_name.keys():
        return False
    best, smallest = by_name[BEST].by_replicate, by_name[SMALLEST].by_replicate
    blocks = [best[replicate].over(smallest[replicate]) for replicate in best if replicate in smallest]
    looks = list(looks_at(blocks, status.stop))
    return bool(looks) and looks[-1].high < 1


def server_of(spec: ExperimentSpec) -> ServerSpec:
    """The server of an experiment's baseline."""
    return spec.server_of(base_condition(spec))


def base_of(spec: ExperimentSpec, explored: Explored | None) -> Baseline:
    """What runs today, with the memory that a search took it to have."""
    return Baseline(server_of(spec), None if explored is None else explored.baseline)


def base_condition(spec: ExperimentSpec) -> ConditionSpec:
    """What runs today."""
    return next(one for one in spec.condition if one.name == spec.baseline_name)


def budget_ended(budget: str, status: SequentialStatus | None) -> str:
    """That the budget ended a measurement, and what it left undecided."""
    undecided = [each.condition for each in (status.comparisons if status else ()) if not each.verdict.is_final]
    on = f" on {', '.join(undecided)}" if undecided else ""
    return f"the budget of {budget} ended before the rule had decided{on}"


def commonest_reason(runs: Sequence[SealedRun]) -> str:
    """The commonest reason why runs are INVALID."""
    reasons = Counter(reason.partition(":")[0] for run in runs for reason in run.invalid_reasons)
    return reasons.most_common(1)[0][0]
