"""Searches the configurations of a server for the one that costs least device time for a workload.

Three sets of plans that share no seed: the first passes over all configurations, the second chooses among the best,
and the third gives the printed ratios, so that none of them is too good because it was chosen. Nothing is run here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from harness.analysis.compare.drawn import DrawnRatio
from harness.errors import HarnessError, PlanError, SpecError
from harness.judge.planning.deciding import unmeasured_in_words
from harness.model.engine.config import EngineConfig
from harness.model.spec.server import ROUTER_POLICIES
from harness.tune.plans import LEAST_PLANS, MARGIN, Plans, Question, Rounds, agents_of, nearby_agents
from harness.tune.predict import Option, Predictor
from harness.tune.setups import (
    MORE_SIZES,
    MOST_RUNGS,
    MOST_SIZES,
    Baseline,
    Setup,
    best_for_steps,
    ladder,
    limits_up_to,
    neighbours,
    sets_of_sizes,
)

MOST_PLANS = 96
"""Plans of the first pass at most."""
ROUNDS = 4
"""In which the best and the smallest change are chosen."""
FINALISTS = 10
TIE = 0.001
"""Of configurations this close to the best, the smallest change is called the best."""
BEST_OF_EACH = 4
"""Configurations of the same memory and number of sizes that a picture shows."""


class Effort(NamedTuple):
    """Simulated requests that each part of a search may take, and for how many pairs and sets sizes are searched."""

    screening: int = 4_000_000
    choosing: int = 3_000_000
    predicting: int = 2_000_000
    pairs: int = 8
    sets: int = 600
    few: int = 12

    def divided(self, by: int) -> Effort:
        """For a simulator that takes so many times as long for a request."""
        if by == 1:
            return self
        spent = (self.screening // by, self.choosing // by, self.predicting // by)
        return Effort(*spent, max(1, self.pairs // 2), max(20, self.sets // by), max(3, self.few // 2))


FULL, QUICK = Effort(), Effort(300_000, 100_000, 300_000, pairs=2, sets=40, few=4)


@dataclass(frozen=True)
class Explored:
    """What a search found. best, smallest: None where nothing saves MARGIN.

    ceiling: the ratio of a server with every size and memory without end. options: every configuration that was
    predicted on the last plans, the baseline apart. bounds: what was searched, and why no further, in lines. screened:
    the best of each kind, with their ratios on the first plans. alike: what serves other hours better than the
    proposal, and here does the same on every plan, so that it is not measured.
    """

    baseline: Setup
    ceiling: DrawnRatio
    options: tuple[Option, ...]
    best: Option | None
    smallest: Option | None
    bounds: tuple[str, ...]
    num_setups: int
    num_simulated: int
    screened: tuple[tuple[Setup, float], ...] = field(default=(), repr=False)
    alike: Setup | None = None

    @property
    def alike_in_words(self) -> str:
        """What does the same here as the proposal, which changes less; "" where there is none."""
        return next((f"{each.words} does the same here" for each in self.options if each.setup == self.alike), "")

    @property
    def most_saved(self) -> float:
        """The largest predicted saving of a configuration, whether it pays or not; 0 where none saves anything."""
        return max((option.saving for option in self.options), default=0.0)


class Chosen(NamedTuple):
    """What the last plans judge: the best, the smallest change that is as good, and others of each kind.

    alike: the best where it costs the same as the smallest on every plan; ``best`` is then the smallest.
    """

    best: Setup
    smallest: Setup
    others: tuple[Setup, ...] = ()
    alike: Setup | None = None


def explore(
    question: Question,
    effort: Effort = FULL,
    *,
    also: Iterable[Setup] = (),
    on_progress: Callable[[float], None] = lambda _share: None,
) -> Explored:
    """Search the space of a question.

    also: configurations whose ratio is wanted beside those that are found, and that a proposal must beat.
    Raises SpecError where the workload is too large to be searched, PlanError where the server itself does not hold a
    request.
    """
    search = _Search(question, effort.divided(question.slowness))
    chosen = search.choose(search.ranked(on_progress))
    on_progress(0.7)
    return search.conclude(chosen, tuple(also))


class _Search:
    """One search; see ``explore``. score: of each configuration, its ratio on the first plans, infinite for none."""

    def __init__(self, question: Question, effort: Effort) -> None:
        self.question, self.effort = question, effort
        self.base = Baseline(question.server)
        self.agents = question.agents or nearby_agents(question.workload)
        self.bounds = [misfit] if (misfit := self.base.misfit(question.memory_gib)) else []
        self.scores: dict[Setup, float] = {}
        self.pairs: list[Setup] = []
        if question.agents and agents_of(question.workload) is None:
            raise SpecError(
                "this workload has no number of agents at a time that could be another",
                where="tune.agents",
                hint="Leave it out, or set workload.concurrency",
            )
        one = Plans(question, "search", 1, self.agents)
        self.rounds = Rounds(question, self.agents, one.num_requests)
        # A ladder of memory, of requests at once and a set of sizes for some of them.
        count = effort.screening // (300 * one.num_requests)
        if effort.screening < 40 * one.num_requests:
            raise SpecError(
                f"{one.num_requests:,} requests of one repetition are too many for a search",
                where="workload",
                hint="Give fewer sessions: workload.num_sessions",
            )
        self.plans = Plans(question, "search", max(LEAST_PLANS, min(count, MOST_PLANS)), self.agents)
        self.most_sizes = question.most_sizes or min(len(self.base.setup.decode_buckets) + MORE_SIZES, MOST_SIZES)
        self.endless = self._endless(one)

    def _endless(self, one: Plans) -> Setup:
        """The baseline with memory in which nothing is ever overwritten, however many requests run at once."""
        base, most = self.base.setup, 1 + max(len(group.requests) for group in one.groups)
        widest = max(4 * base.max_num_seqs, self.plans.width)
        if base.kv_slots is not None:
            return base._replace(kv_slots=max(base.kv_slots, most + widest))
        config = EngineConfig.from_server(self.question.server.replica)
        longest = config.paged.blocks_of(self.question.server.slot_tokens)
        tokens = max(
            int(sum(group.requests[part].sum() for part in ("keep", "new", "generate"))) for group in one.groups
        )
        blocks = tokens // config.block_tokens + most + (widest + 1) * longest
        return base._replace(num_gpu_blocks=max(base.num_gpu_blocks or 0, blocks))

    def score(self, setup: Setup) -> float:
        """The ratio to the baseline on the first plans, of each number of agents alike; infinite where it is none."""
        if setup not in self.scores:
            self.scores[setup] = self._ratio(setup)
        return self.scores[setup]

    def _ratio(self, setup: Setup) -> float:
        return self._unbounded_ratio(setup) if self._fits(setup) else math.inf

    def _unbounded_ratio(self, setup: Setup) -> float:
        """The ratio, whether or not the memory that there is holds it."""
        try:
            return float((self.plans.device_ns(setup).sum(axis=1) / self.plans.base_ns.sum(axis=1)).mean())
        except (PlanError, SpecError):
            if setup == self.base.setup:
                raise
        return math.inf

    def _fits(self, setup: Setup) -> bool:
        """Whether the memory that there is holds it."""
        most, needed, today = (
            self.question.memory_gib,
            self.base.memory_gib(setup),
            self.base.memory_gib(self.base.setup),
        )
        return most is None or needed is None or today is None or needed <= max(most, today)

    def ranked(self, on_progress: Callable[[float], None]) -> list[Setup]:
        """The first pass: every configuration that it plays, best first."""
        self.score(self.base.setup)
        self.pairs = self._pairs()
        chosen = self._best_pairs(self.pairs)
        for place, pair in enumerate(chosen, 1):
            on_progress(0.2 + 0.4 * place / len(chosen))
            self._search_sizes(pair)
        if "prefix_caching" in self.question.levers:
            best = min(self.scores, key=lambda setup: self.scores[setup])
            # For the workload's own number of agents, by which the smallest change is chosen.
            own_ns = {pair: float(self.plans.device_ns(pair)[0].sum()) for pair in self.pairs}
            close = [pair for pair in self.pairs if own_ns[pair] <= min(own_ns.values()) * (1 + MARGIN)]
            for setup in dict.fromkeys([self.base.setup, best, *chosen[:1], *close]):
                self.score(setup._replace(prefix_caching=not setup.prefix_caching))
        playable = [setup for setup, score in self.scores.items() if math.isfinite(score)]
        return sorted(playable, key=lambda setup: (self.scores[setup], self.base.size_of(setup)))

    def _pairs(self) -> list[Setup]:
        """Requests at once, each with a memory and each with a policy of the router, the sizes as they follow."""
        base, levers = self.base.setup, self.question.levers
        memory = "kv_slots" if base.kv_slots is not None else "num_gpu_blocks"
        limits = [base.max_num_seqs]
        if "max_num_seqs" in levers:
            most = self.plans.width if memory in levers else max(4 * base.max_num_seqs, self.plans.width)
            limits = limits_up_to(base.max_num_seqs, most)
        implied = [self._implied(limit) for limit in limits]
        pairs = [base, *self._climb(implied[1:], "max_num_seqs", "requests at once")]
        if memory in levers:
            rungs = list(ladder(getattr(base, memory), getattr(self.endless, memory)))[1:MOST_RUNGS]
            for start in implied:
                # Fewer than one for each request would leave a request without memory.
                more = [start._replace(**{memory: rung}) for rung in rungs if rung > getattr(start, memory)]
                where = f"{memory} at {start.max_num_seqs} requests at once" if len(limits) > 1 else memory
                pairs += self._climb(more, memory, where)
        if "router" in levers:
            pairs += [pair._replace(policy=policy) for pair in pairs for policy in ROUTER_POLICIES]
        return [pair for pair in dict.fromkeys(pairs) if math.isfinite(self.score(pair))]

    def _implied(self, limit: int) -> Setup:
        """The baseline at another limit, with its largest sizes where it would have more than ``tune.most_sizes``."""
        implied = self.base.implied(limit)
        if implied == self.base.setup:
            return implied
        return implied._replace(decode_buckets=implied.decode_buckets[-(self.question.most_sizes or limit) :])

    def _climb(self, rungs: Sequence[Setup], key: str, where: str) -> list[Setup]:
        """The rungs, up to the first that reuses all that can be reused, or the last that the memory holds.

        key: of [server], in which they differ. where: the ladder in words, for the bounds.
        """
        try:
            most, now = (self.plans.cached_tokens(setup) for setup in (self.endless, self.base.setup))
        except HarnessError:
            return []
        is_memory = key != "max_num_seqs"
        if now >= most and is_memory:
            self.bounds.append(f"{where}: every return finds its KV already")
            return []
        taken, why = list[Setup](), ""
        for rung in rungs:
            if not self._fits(rung):
                memory = f"{self.base.memory_gib(rung):.1f} GiB of {self.question.memory_gib:g} GiB per device"
                why = f"; more do not fit ({memory})"
                break
            if not math.isfinite(self.score(rung)):
                continue
            taken.append(rung)
            # Up to as many as there are sessions, more requests at once save steps whatever is reused.
            is_wide = is_memory or rung.max_num_seqs >= self.plans.width
            if is_wide and self.plans.cached_tokens(rung) >= most:
                why = ", where every return finds its KV" if most else ", as many as there are agents at a time"
                break
        if taken or why:
            self.bounds.append(f"{where}: up to {getattr([self.base.setup, *taken][-1], key)}{why}")
        return taken

    def _best_pairs(self, pairs: Sequence[Setup]) -> list[Setup]:
        """The pairs that can be best: by what they would cost with every size; the baseline's first."""
        if "decode_buckets" not in self.question.levers:
            return []
        least = {pair: self._ratio(self._with_every_size(pair)) for pair in pairs}
        good = sorted(pairs, key=lambda pair: (round(least[pair], 3), self.base.size_of(pair)))
        close = [pair for pair in good if least[pair] <= least[good[0]] * (1 + 2 * MARGIN)]
        alone = min(close, key=self.base.size_of)
        return list(dict.fromkeys([self.base.setup, alone, *good[: self.effort.pairs]]))

    def _with_every_size(self, pair: Setup) -> Setup:
        most = min(pair.max_num_seqs, self.plans.width)
        return pair._replace(decode_buckets=tuple(sorted({*range(1, most + 1), pair.max_num_seqs})))

    def _search_sizes(self, pair: Setup) -> None:
        """Sets of sizes at one number of requests at once and one memory: all, or those that its steps ask for."""
        limit, width = pair.max_num_seqs, self.plans.width
        own = self._implied(limit).decode_buckets
        more = [size for size in range(1, min(limit, width) + 1) if size not in own]
        # One more size than today, evenly where there are many.
        places = np.linspace(0, len(more) - 1, min(len(more), self.effort.few))
        sets = [tuple(sorted({*own, more[round(place)]})) for place in places]
        every = sets_of_sizes(limit, width, self.most_sizes, self.effort.sets)
        for sizes in [each for each in sets if len(each) <= (self.question.most_sizes or limit)] + (every or []):
            self.score(pair._replace(decode_buckets=sizes))
        for sizes in [] if every is not None else self._built(pair):
            best = sizes
            # Steepest descent from the set that the present steps ask for.
            for _ in range(4):
                near = [best, *(other for other in neighbours(best, limit) if other[-1] == limit)]
                step = min(near, key=lambda each: self.score(pair._replace(decode_buckets=each)))
                if step == best:
                    break
                best = step

    def _built(self, pair: Setup) -> list[tuple[int, ...]]:
        """The best sets for the steps of this pair with every size."""
        every, limit = self._with_every_size(pair), pair.max_num_seqs
        histogram = np.zeros(limit + 1, dtype=np.int64)
        for group in range(len(self.agents)):
            counts = self.plans.played(every, group).histogram[: limit + 1]
            histogram[: len(counts)] += counts
        step_ns = self.question.model.decode_step_ns
        cost_ns = [[step_ns(max(size, 1), number) for number in range(size + 1)] for size in range(limit + 1)]
        sets = best_for_steps(histogram.tolist(), cost_ns, limit, self.most_sizes)
        return [sizes for sizes in sets if len(sizes) >= 2]

    def choose(self, ranked: Sequence[Setup]) -> Chosen:
        """Choose on new plans, in rounds: each has more plans for those alone that can still be as good as the best."""
        by_kind: dict[tuple[str, ...], list[Setup]] = {}
        for setup in ranked:
            if levers := self.base.levers(setup):
                by_kind.setdefault(levers, []).append(setup)
        left: list[Setup] = []
        for of_kind in by_kind.values():
            close = [setup for setup in of_kind if self.scores[setup] <= self.scores[of_kind[0]] + MARGIN]
            small = sorted(close, key=self.base.size_of)
            left += dict.fromkeys([*of_kind[: self.effort.few], *small[: self.effort.few]])
        best = self.base.setup
        for _ in range(ROUNDS):
            if not (left := self.rounds.play(left, self.effort.choosing // ROUNDS)):
                return Chosen(self.base.setup, self.base.setup)
            ratios = {setup: self.rounds.ratio(setup) for setup in left}
            tied = [setup for setup in left if ratios[setup] <= min(ratios.values()) + TIE]
            best = min(tied, key=self.base.size_of)
            left = [setup for setup in left if self.rounds.is_close(setup, best)]
        smallest = min((each for each in left if self.rounds.is_as_good(each, best)), key=self.base.size_of)
        others = tuple(of_kind[0] for of_kind in by_kind.values())
        if best != smallest and self.rounds.is_alike(smallest, best):
            return Chosen(smallest, smallest, (best, *others), best)
        return Chosen(best, smallest, others)

    def conclude(self, chosen: Chosen, also: Sequence[Setup]) -> Explored:
        """The ratios of what was chosen, and of ``also``, on the last plans, and what pays by them."""
        base = self.base.setup
        finalists = list(dict.fromkeys([chosen.best, chosen.smallest, *chosen.others]))[:FINALISTS]
        shown = [setup for setup in dict.fromkeys([*finalists, *also]) if setup != base]
        predictor = Predictor(self.question, self.effort.predicting, len(shown) + 2)
        has_sizes = bool("decode_buckets" in self.question.levers and base.decode_buckets)
        options = {setup: self._option(predictor, setup) for setup in shown}
        asked = max((options[setup].saving + MARGIN for setup in also if setup in options), default=-math.inf)
        for setup, option in options.items():
            # What saves no more than what was asked for is not proposed: nobody asks what would overturn it.
            if setup in chosen[:2] and option.saving >= asked and not self.question.server.is_routed:
                options[setup] = replace(option, turns=predictor.turns(setup))
        best, smallest = options.get(chosen.best), options.get(chosen.smallest)
        if best is None or smallest is None or max(best.saving, smallest.saving) < MARGIN:
            best = smallest = None
        elif smallest.saving < MARGIN or smallest.ratio.ratio > best.ratio.ratio * (1 + MARGIN):
            # What was as good on the plans that chose it need not be on these.
            smallest = best
        ratios = [predictor.ratio(self._ceiling(has_sizes=has_sizes)), *(each.ratio for each in options.values())]
        ceiling = min(ratios, key=lambda drawn: drawn.ratio)
        simulated = self.plans.num_simulated + predictor.num_simulated + self.rounds.num_simulated
        agents = ", ".join(map(str, sorted(self.agents)))
        notes = [f"sizes are chosen for {agents} agents at a time"] * (len(self.agents) > 1)
        notes += [f"at most {self.most_sizes} compiled sizes"] * has_sizes
        num_setups = sum(map(math.isfinite, self.scores.values()))
        bounds = tuple(dict.fromkeys([*self.bounds, *notes]))
        options = tuple(options.values())
        alike = None if smallest is None else chosen.alike
        return Explored(base, ceiling, options, best, smallest, bounds, num_setups, simulated, self._frontier(), alike)

    def _ceiling(self, *, has_sizes: bool) -> Setup:
        """Of all numbers of requests at once and policies, the best with every size and memory without end."""
        memory = {"kv_slots": self.endless.kv_slots, "num_gpu_blocks": self.endless.num_gpu_blocks}
        ends = [pair._replace(**memory) for pair in self.pairs]
        ends = [self._with_every_size(end) for end in ends] if has_sizes else ends
        return min(dict.fromkeys(ends), key=self._unbounded_ratio)

    def _frontier(self) -> tuple[tuple[Setup, float], ...]:
        """The best of each number of requests at once, memory and number of sizes, with their first ratios."""
        kinds: dict[tuple[object, ...], list[tuple[Setup, float]]] = {}
        for setup, score in sorted(self.scores.items(), key=lambda pair: pair[1]):
            kind = (*setup._replace(decode_buckets=()), len(setup.decode_buckets))
            if len(of_kind := kinds.setdefault(kind, [])) < BEST_OF_EACH and math.isfinite(score):
                of_kind.append((setup, score))
        return tuple(pair for of_kind in kinds.values() for pair in of_kind)

    def _option(self, predictor: Predictor, setup: Setup) -> Option:
        low, high = np.quantile(predictor.ratios(setup), [0.05, 0.95], method="weibull")
        sizes = (*setup.decode_buckets, *self.base.setup.decode_buckets)
        return Option(
            setup,
            self.base.words(setup),
            predictor.ratio(setup),
            float(low),
            float(high),
            predictor.block_sd(setup),
            predictor.reuse(setup, self.endless),
            self.base.memory_gib(setup),
            self.base.compile_s(setup),
            unmeasured_in_words(self.question.model, sizes),
        )
