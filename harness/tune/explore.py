"""Searches the configurations of a server for the one that costs least device time for a workload.

Three sets of plans that share no seed: the first passes over the space, the second chooses among its best, and the
third gives the printed ratios, so that none of them is too good because it was chosen. Nothing is run here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.analysis.compare.drawn import DrawnRatio
from harness.errors import SpecError
from harness.judge.planning.deciding import unmeasured_in_words
from harness.model.engine.config import EngineConfig
from harness.table import with_error
from harness.tune.plans import LEAST_PLANS, MARGIN, SURE, Plans, Question, Rounds, agents_of, nearby_agents
from harness.tune.predict import Option, Predictor
from harness.tune.setups import Baseline, Setup
from harness.tune.space import Space, Thoroughness
from harness.tune.targets import Felt, share_met

MOST_PLANS = 96
"""Plans of the first pass at most."""
ROUNDS = 4
"""In which the best and the smallest change are chosen."""
FINALISTS = 10
TIE = 0.001
"""Of configurations this close to the best, the smallest change is called the best."""
MISSED = 1000.0
BEST_OF_EACH = 4
"""Configurations of the same memory and number of sizes that a picture shows."""


class Effort(NamedTuple):
    """Simulated requests that each part of a search may take.

    space: how thoroughly sizes are searched. few: configurations of each kind that are chosen from.
    """

    screening: int = 6_000_000
    choosing: int = 3_000_000
    predicting: int = 2_000_000
    space: Thoroughness = Thoroughness(8, 300)
    few: int = 12

    def divided(self, by: int) -> Effort:
        """For a simulator that takes so many times as long for a request."""
        if by == 1:
            return self
        spent = (self.screening // by, self.choosing // by, self.predicting // by)
        space = Thoroughness(max(2, self.space.combinations // 2), max(20, self.space.sets // by))
        return Effort(*spent, space, max(3, self.few // 2))


FULL, QUICK = Effort(), Effort(300_000, 100_000, 300_000, Thoroughness(2, 40), few=4)


@dataclass(frozen=True)
class Explored:
    """What a search found. best, smallest: None where nothing saves MARGIN.

    ceiling: the ratio of a server with every size and memory without end; None of a search for agents. options: every
    configuration that was predicted on the last plans, the baseline apart. bounds: what was searched and what was left
    out, in lines. screened: the best of each kind, with their ratios on the first plans. alike: what serves other hours
    better than the proposal, and here does the same on every plan, so that it is not measured. today: what today's
    server makes people feel. felt: ratio and p99 of TTFT, ms, of what was tried and meets the targets, for a picture.
    nearest: where nothing is predicted to meet the targets, what comes nearest. is_missed: today's does not meet them.
    """

    baseline: Setup
    ceiling: DrawnRatio | None
    options: tuple[Option, ...]
    best: Option | None
    smallest: Option | None
    bounds: tuple[str, ...]
    num_setups: int
    num_simulated: int
    screened: tuple[tuple[Setup, float], ...] = field(default=(), repr=False)
    alike: Setup | None = None
    today: Felt | None = None
    felt: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    nearest: Option | None = None
    is_missed: bool = False

    @property
    def alike_in_words(self) -> str:
        """What does the same here as the proposal, which changes less; "" where there is none."""
        return next((f"{each.words} does the same here" for each in self.options if each.setup == self.alike), "")

    def lines(self) -> Iterator[str]:
        """What was found, as lines of text."""
        yield f"{self.num_setups:,} configurations, {self.num_simulated:,} simulations of a plan"
        yield from (f"bounds: {line}" for line in self.bounds)
        if self.ceiling is not None:
            saved = with_error(100 * (1 - self.ceiling.ratio), 100 * self.ceiling.error, 1)
            yield f"most that any configuration could save: {saved} %"
        least = min((option.ratio.ratio for option in self.options), default=1.0)
        width = max((len(option.setup.label) for option in self.options), default=0)
        for option in self.options:
            marks = [name for name, chosen in (("best", self.best), ("smallest", self.smallest)) if chosen == option]
            marks += ["by other plans"] * ("best" in marks and option.ratio.ratio > least)
            marks += ["does the same here, not measured"] * (option.setup == self.alike)
            mark = f"  <- {', '.join(marks)}" if marks else ""
            memory = "" if option.memory_gib is None else f", {option.memory_gib:.1f} GiB"
            ratio = with_error(option.ratio.ratio, option.ratio.error, 4)
            yield f"{option.setup.label:<{width}}  predicted {ratio}{memory}{mark}"

    @property
    def most_saved(self) -> float:
        """The largest predicted saving of a configuration, whether it pays or not; 0 where none saves anything."""
        return max((option.saving for option in self.options), default=0.0)


class Chosen(NamedTuple):
    """What the last plans judge: the best, the smallest change that is as good, and others of each kind.

    alike: the best where it costs the same as the smallest on every plan; ``best`` is then the smallest. nearest: where
    nothing meets the targets, what comes nearest. is_missed: today's server does not meet them.
    """

    best: Setup
    smallest: Setup
    others: tuple[Setup, ...] = ()
    alike: Setup | None = None
    nearest: Setup | None = None
    is_missed: bool = False


class DeviceTime:
    """Judges by the ratio of device time to what runs today, of each number of agents that decides alike.

    What misses the targets is worth MISSED and its shortfall, more than anything that meets them.
    """

    close = 2 * MARGIN

    def __init__(self, plans: Plans, num_deciding: int) -> None:
        self._plans, self._num_deciding = plans, num_deciding

    def value(self, setup: Setup) -> float:
        own, base = (self._plans.device_ns(each, self._num_deciding) for each in (setup, self._plans.base))
        if targets := self._plans.question.targets:
            share = share_met(self._plans.met(setup, self._num_deciding))
            if share < targets.share:
                return MISSED + targets.share - share
        return float((own.sum(axis=1) / base.sum(axis=1)).mean())

    def steps(self, setup: Setup) -> Iterator[npt.NDArray[np.int64]]:
        """Of the numbers of agents that decide, and of all."""
        for count in dict.fromkeys((self._num_deciding, len(self._plans.groups))):
            total = np.zeros(setup.max_num_seqs + 1, dtype=np.int64)
            for group in range(count):
                histogram = self._plans.played(setup, group).histogram[: len(total)]
                total[: len(histogram)] += histogram
            yield total


def explore(
    question: Question, effort: Effort = FULL, *, on_progress: Callable[[float], None] = lambda _share: None
) -> Explored:
    """Search the space of a question.

    Raises SpecError where the workload is too large to be searched, PlanError where the server itself does not hold a
    request.
    """
    effort = effort.divided(question.slowness)
    agents = question.agents or nearby_agents(question.workload)
    if question.agents and agents_of(question.workload) is None:
        raise SpecError(
            "this workload has no number of agents at a time that could be another",
            where="tune.agents",
            hint="Leave it out, or set workload.concurrency",
        )
    # What was asked for decides alike; else the workload's own number, and the others between what is as good.
    num_deciding = len(agents) if question.agents else 1
    space, sample = space_of(question, agents)
    one = sample.num_requests // LEAST_PLANS
    if effort.screening < 40 * one:
        raise SpecError(
            f"{one:,} requests of one repetition are too many for a search",
            where="workload",
            hint="Give fewer sessions: workload.num_sessions",
        )
    count = effort.screening * len(agents) // (space.num_setups(effort.space) * num_deciding * one)
    plans = Plans(question, "search", max(LEAST_PLANS, min(count, MOST_PLANS)), agents)
    values = space.search(DeviceTime(plans, num_deciding), effort.space, lambda share: on_progress(0.6 * share))
    rounds = Rounds(question, agents, num_deciding, one)
    chosen = _chosen(space.base, values, rounds, effort)
    on_progress(0.7)
    others = ", ".join(map(str, sorted(agents)))
    alike = "alike" if question.agents else f"for {agents[0]} first"
    notes = [f"sizes are chosen for {others} agents at a time, {alike}"] * (len(agents) > 1)
    found = concluded(space, chosen, effort, notes)
    simulated = found.num_simulated + plans.num_simulated + rounds.num_simulated
    able = {setup: value for setup, value in values.items() if value < MISSED}
    felt = tuple((value, plans.played(setup).ttft_p99_ms) for setup, value in able.items())
    return replace(found, num_simulated=simulated, screened=_frontier(able), felt=felt)


def space_of(question: Question, agents: Sequence[int]) -> tuple[Space, Plans]:
    """What may be chosen from under these numbers of agents, and the LEAST_PLANS plans that say so."""
    sample = Plans(question, "sample", LEAST_PLANS, agents)
    longest = max(int((group.requests["keep"] + group.requests["new"]).max()) for group in sample.groups)
    return Space(question, sample.width, _endless(question, sample), longest), sample


def _endless(question: Question, sample: Plans) -> Setup:
    """The baseline with memory in which nothing is ever overwritten, however many requests run at once."""
    base = Baseline(question.server).setup
    widest = max(4 * base.max_num_seqs, sample.width)
    most = 1 + max(int(group.plans["num_requests"].max()) for group in sample.groups)
    if base.kv_slots is not None:
        return base._replace(kv_slots=max(base.kv_slots, most + widest))
    config = EngineConfig.from_server(question.server.replica)
    longest = config.blocks_of(question.server.slot_tokens)
    tokens = max(
        int(sum(group.requests[part].sum() for part in ("keep", "new", "generate"))) for group in sample.groups
    )
    blocks = tokens // config.block_tokens + most + (widest + 1) * longest
    return base._replace(num_gpu_blocks=max(base.num_gpu_blocks or 0, blocks))


def _chosen(base: Baseline, values: Mapping[Setup, float], rounds: Rounds, effort: Effort) -> Chosen:
    """Choose on new plans, in rounds: each has more plans for those alone that can still be as good as the best."""
    by_kind: dict[tuple[str, ...], list[Setup]] = {}
    for setup in sorted(values, key=lambda setup: (values[setup], base.size_of(setup))):
        if levers := base.levers(setup):
            by_kind.setdefault(levers, []).append(setup)
    left: list[Setup] = []
    for of_kind in by_kind.values():
        close = [setup for setup in of_kind if values[setup] <= values[of_kind[0]] + MARGIN]
        small = sorted(close, key=base.size_of)
        left += dict.fromkeys([*of_kind[: effort.few], *small[: effort.few]])
    least, nearest, is_missed = base.setup, None, False
    for _ in range(ROUNDS):
        left = rounds.play(left, effort.choosing // ROUNDS)
        is_missed = not rounds.meets(base.setup, 0.0)
        if not left:
            return Chosen(base.setup, base.setup, is_missed=is_missed)
        nearest = None if rounds.targets is None else max(left, key=rounds.share)
        # What may still meet the targets, and of it what surely does: these have the least to beat.
        able = [setup for setup in left if rounds.meets(setup, -SURE)]
        sure = [setup for setup in able if rounds.meets(setup)]
        if not able:
            return Chosen(base.setup, base.setup, nearest=nearest, is_missed=is_missed)
        least = min(sure or able, key=rounds.own_ratio)
        left = [setup for setup in able if rounds.is_close(setup, least)]
    good = [setup for setup in left if rounds.is_as_good(setup, least) and rounds.meets(setup)]
    if not good:
        return Chosen(base.setup, base.setup, nearest=nearest, is_missed=is_missed)
    ratios = {setup: rounds.ratio(setup) for setup in good}
    best = min((setup for setup in good if ratios[setup] <= min(ratios.values()) + TIE), key=base.size_of)
    smallest = min(good, key=base.size_of)
    others = tuple(of_kind[0] for of_kind in by_kind.values())
    if best != smallest and rounds.is_alike(smallest, best):
        return Chosen(smallest, smallest, (best, *others), best, is_missed=is_missed)
    return Chosen(best, smallest, others, is_missed=is_missed)


def concluded(space: Space, chosen: Chosen, effort: Effort, notes: Sequence[str] = ()) -> Explored:
    """The ratios of what was chosen on the last plans, and what pays by them."""
    question, base = space.question, space.base.setup
    named = [chosen.best, chosen.smallest, *([chosen.nearest] if chosen.nearest else []), *chosen.others]
    finalists = list(dict.fromkeys(named))[:FINALISTS]
    shown = [setup for setup in finalists if setup != base]
    predictor = Predictor(question, effort.predicting, len(shown) + 2)
    options = {setup: _option(space, predictor, setup) for setup in shown}
    for setup, option in options.items():
        if setup in chosen[:2] and not question.server.is_routed:
            options[setup] = replace(option, turns=predictor.turns(setup))
    best, smallest = options.get(chosen.best), options.get(chosen.smallest)
    has_gain = best is not None and smallest is not None and max(best.most_saving, smallest.most_saving) >= MARGIN
    if best is None or smallest is None or not (has_gain or chosen.is_missed):
        best = smallest = None
    elif chosen.is_missed and smallest.ratio.ratio <= best.ratio.ratio * (1 + MARGIN):
        # Its gain is that it meets the targets.
        pass
    elif smallest.most_saving < MARGIN or smallest.ratio.ratio > best.ratio.ratio * (1 + MARGIN):
        # What was as good on the plans that chose it need not be on these.
        smallest = best
    ratios = [predictor.ratio(space.least_of_all), *(each.ratio for each in options.values())]
    ceiling = min(ratios, key=lambda drawn: drawn.ratio)
    alike = None if smallest is None else chosen.alike
    bounds, num = (*space.bounds, *notes), space.num_tried
    return Explored(
        base,
        ceiling,
        tuple(options.values()),
        best,
        smallest,
        bounds,
        num,
        predictor.num_simulated,
        alike=alike,
        today=predictor.felt(base),
        nearest=options.get(chosen.nearest) if chosen.nearest and best is None and chosen.is_missed else None,
        is_missed=chosen.is_missed,
    )


def _frontier(values: Mapping[Setup, float]) -> tuple[tuple[Setup, float], ...]:
    """The best of each number of requests at once, memory and number of sizes, with their first ratios."""
    kinds: dict[tuple[object, ...], list[tuple[Setup, float]]] = {}
    for setup, value in sorted(values.items(), key=lambda pair: pair[1]):
        kind = (*setup._replace(decode_buckets=(), others=()), len(setup.decode_buckets))
        if len(of_kind := kinds.setdefault(kind, [])) < BEST_OF_EACH:
            of_kind.append((setup, value))
    return tuple(pair for of_kind in kinds.values() for pair in of_kind)


def _unmeasured(space: Space, setup: Setup) -> str:
    """Which of its sizes, and parts of prompts of which length, have no measured cost."""
    model = space.question.model
    # Without graphs, and with a vLLM's own, a step may have any number of requests up to the limit.
    sizes = (size for each in (setup, space.base.setup) for size in each.decode_buckets or (each.max_num_seqs,))
    words = unmeasured_in_words(model, sizes)
    budget, fitted = setup.value_of("max_num_batched_tokens"), model.fitted_prefill_tokens
    most = min(budget or 0, space.longest)
    parts = (
        f"parts of prompts of more than {fitted[1]:,} tokens were not measured" if fitted and most > fitted[1] else ""
    )
    return "; ".join(filter(None, (words, parts)))


def _option(space: Space, predictor: Predictor, setup: Setup) -> Option:
    base = space.base
    low, high = np.quantile(predictor.ratios(setup), [0.05, 0.95], method="weibull")
    return Option(
        setup,
        base.words(setup),
        predictor.ratio(setup),
        float(low),
        float(high),
        predictor.block_sd(setup),
        predictor.reuse(setup, space.endless),
        base.memory_gib(setup),
        base.compile_s(setup),
        _unmeasured(space, setup),
        felt=predictor.felt(setup),
        flight=predictor.flight(setup),
    )
