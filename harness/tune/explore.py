"""Searches the configurations of a server for the one that costs least device time for a workload.

Three sets of plans that share no seed: the first passes over all configurations, the second chooses among the best,
and the third gives the printed ratios, so that none of them is too good because it was chosen. Nothing is run here.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.analysis.compare.drawn import DrawnCosts, DrawnRatio
from harness.errors import HarnessError, PlanError, SpecError
from harness.judge.planning.deciding import (
    NO_CHANGE,
    BreakEven,
    CostChange,
    break_even,
    deciding_sizes,
    unmeasured_in_words,
)
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import CostModel
from harness.model.experiment import build_plan
from harness.model.plan.build import derive_seed
from harness.model.sim.draws import (
    Draws,
    Perturbation,
    artifact_key,
    jitter,
    jittered_draw,
    nominal,
    perturbed,
    simulator_of,
)
from harness.model.sim.kernel import arrays as layout
from harness.model.sim.plans import Input, input_arrays, joined, plan_arrays
from harness.model.sim.simulate import run_batch
from harness.model.spec import ServerSpec, Treatment, WorkloadSpec
from harness.tune.setups import (
    LEVERS,
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

FloatArray = npt.NDArray[np.float64]
MARGIN = 0.01
"""A saving below this share is none."""
AS_GOOD = 0.0075
"""What a change may cost more than the best to be as good; below MARGIN, as it is estimated from few plans."""
REPLICATES = 6
"""Plans of one imagined experiment."""
SEED_RANGE = 2**31
BEST_OF_EACH = 4
"""Configurations of the same memory and number of sizes that a picture shows."""
LEAST_PLANS, MOST_PLANS, MOST_CHOICE_PLANS = 4, 96, 400
ROUNDS = 4
"""In which the best and the smallest change are chosen."""
MOST_DRAWS = 100
FINALISTS = 10
TIE = 0.001
"""Of configurations this close to the best, the smallest change is called the best."""
POLICIES = ("round-robin", "least-requests", "session-affinity", "prefix-aware")


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


FULL, QUICK = Effort(), Effort(300_000, 200_000, 300_000, pairs=2, sets=40, few=4)
PAGED_SLOWNESS, ROUTED_SLOWNESS = 5, 3


@dataclass(frozen=True)
class Question:
    """What is searched: a server with its costs, the sessions it serves, and what may change.

    perturbation: sizes of what repeats differ in. agents: numbers of sessions at a time that sizes are chosen for, the
    workload's own first. memory_gib: of one device, None: no limit. seed: of all plans.
    """

    server: ServerSpec
    model: CostModel
    workload: WorkloadSpec
    treatment: Treatment
    perturbation: Perturbation
    levers: tuple[str, ...]
    agents: tuple[int, ...] = ()
    memory_gib: float | None = None
    most_sizes: int = 0
    seed: int = 1

    @property
    def slowness(self) -> int:
        """How many times as long its simulator takes for a request as that of KV slots."""
        return ROUTED_SLOWNESS if self.server.is_routed else PAGED_SLOWNESS if self.server.is_paged else 1


@dataclass(frozen=True)
class Option:
    """A configuration with its predicted ratio to the baseline, on plans that chose nothing.

    ratio: mean device time over draws, with its 95 % error. low, high: of 90 % of experiments of REPLICATES plans.
    block_sd: of the log ratio of one plan, which decides how many plans a measurement takes.
    reuse: share of the reusable tokens that are reused. unmeasured: which of its sizes have no measured cost, in words.
    """

    setup: Setup
    words: str
    ratio: DrawnRatio
    low: float
    high: float
    block_sd: float
    reuse: float
    memory_gib: float
    compile_s: float
    unmeasured: str = ""
    turns: BreakEven | None = None

    @property
    def saving(self) -> float:
        return 1 - self.ratio.ratio

    @property
    def is_known(self) -> bool:
        """Whether the draws tell it from the baseline."""
        return self.ratio.shows_effect

    @property
    def sentence(self) -> str:
        """What it changes, what that is predicted to save, how sure that is, and given which costs."""
        given = f"; {self.unmeasured}" if self.unmeasured else ""
        turns = "" if self.turns is None or self.turns.change is None else f"; {self.turns}"
        saving, error = 100 * self.saving, 100 * self.ratio.error
        return f"{self.words}: predicted to save {saving:.1f} +- {error:.1f} %{given}{turns}"


@dataclass(frozen=True)
class Explored:
    """What a search found. best, smallest: None where nothing saves MARGIN.

    ceiling: the ratio of a server with every size and memory without end. options: every configuration that was
    predicted on the last plans, the baseline apart. bounds: what was searched, and why no further, in lines. screened:
    the best of each kind, with their ratios on the first plans.
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

    @property
    def proposal(self) -> Option | None:
        """The smallest change that is as good as the best; None: keep the baseline."""
        return self.smallest

    @property
    def most_saved(self) -> float:
        """The largest predicted saving of a configuration, whether it pays or not; 0 where none saves anything."""
        return max((option.saving for option in self.options), default=0.0)


class _Played(NamedTuple):
    """One configuration on the plans of a group, in sums of each plan."""

    device_ns: FloatArray
    cached_tokens: int
    histogram: npt.NDArray[np.int64]


class Plans:
    """The plans of a question in groups by agents at a time, each with the client's jitter, and what was played."""

    def __init__(self, question: Question, part: str, count: int, agents: Sequence[int]) -> None:
        self._question = question
        seed = derive_seed(question.seed, f"tune/{part}") % SEED_RANGE
        key = zlib.crc32(part.encode())
        self.groups = [
            jitter(
                drawn_plans(at_a_time(question.workload, number), question.treatment, seed, count),
                question.perturbation,
                key,
                place,
            )
            for place, number in enumerate(agents)
        ]
        self.num_requests = sum(len(group.requests) for group in self.groups)
        self._widths = [_width(group) for group in self.groups]
        self.num_simulated = 0
        self._played: dict[tuple[object, ...], _Played] = {}

    @property
    def width(self) -> int:
        """Most sessions at once in any plan."""
        return max(self._widths)

    def played(self, setup: Setup, group: int = 0) -> _Played:
        """One configuration on one group; PlanError where a request does not fit."""
        server = setup.on(self._question.server)
        config = EngineConfig.from_server(server.replica)
        key = (group, *(self._shared(config, group) or (setup,)))
        if key not in self._played:
            arrays = self.groups[group]
            self.num_simulated += len(arrays.plans)
            if self._question.slowness > 1:
                outcome = simulator_of(server)(nominal(arrays, self._question.model), config)
            else:
                outcome = run_batch(arrays, config, self._question.model)
            totals = outcome.totals
            device_ns = np.asarray(totals["decode_ns"] + totals["prefill_ns"], dtype=np.float64)
            self._played[key] = _Played(device_ns, int(totals["cached_tokens"].sum()), outcome.histogram.sum(axis=0))
        return self._played[key]

    def _shared(self, config: EngineConfig, group: int) -> tuple[object, ...]:
        """What decides on these plans; configurations that agree in it give equal figures. Empty: everything does."""
        if self._question.slowness > 1:
            return ()
        width = self._widths[group]
        limit = min(config.max_num_seqs, width + 1)
        largest = next(place for place, size in enumerate(config.decode_buckets) if size >= min(limit, width))
        server = (config.num_usable_slots, config.is_full, config.prefix_caching)
        return (limit, *server, config.decode_buckets[: largest + 1])

    def device_ns(self, setup: Setup) -> FloatArray:
        """Device time of each plan, the groups one after another."""
        return np.concatenate([self.played(setup, group).device_ns for group in range(len(self.groups))])

    def cached_tokens(self, setup: Setup) -> int:
        """Tokens reused by the workload's own number of agents."""
        return self.played(setup).cached_tokens


def _width(arrays: layout.PlanArrays) -> int:
    """Most sessions at once in any of these plans: the leaves of the "after" forest."""
    is_leaf = arrays.sessions["num_followers"] == 0
    spans = zip(arrays.plans["first_session"].tolist(), arrays.plans["num_sessions"].tolist(), strict=True)
    return max(int(is_leaf[first : first + size].sum()) for first, size in spans)


def drawn_plans(workload: WorkloadSpec, treatment: Treatment, seed: int, count: int) -> layout.PlanArrays:
    """New plans of a workload; a recording that is replayed whole gives the same plan each time."""
    if workload.source == "trace":
        first, second = (build_plan(workload, seed, replicate) for replicate in (0, 1))
        if first.hash == second.hash:
            return joined([plan_arrays([first.with_treatment(treatment)])] * count)
    return input_arrays([Input(workload, seed, replicate) for replicate in range(count)], treatment)


def agents_of(workload: WorkloadSpec) -> int | None:
    """Sessions at a time, where a number in the workload says it."""
    if workload.concurrency is not None:
        return workload.concurrency
    is_plain = workload.source in ("drawn", "paper") and not workload.group and not workload.start_offset_s
    return workload.num_sessions if is_plain else None


def nearby_agents(workload: WorkloadSpec) -> tuple[int, ...]:
    """The sessions at a time, and a quarter less and more: what is compiled serves other hours too."""
    number = agents_of(workload)
    if number is None:
        return (0,)
    around = {number, max(1, number - round(number / 4)), number + round(number / 4)}
    return (number, *sorted(around - {number}))


def at_a_time(workload: WorkloadSpec, agents: int) -> WorkloadSpec:
    """The workload with so many sessions at a time; 0: as it is."""
    own = agents_of(workload)
    if agents in (0, own) or own is None:
        return workload
    key = "num_sessions" if workload.concurrency is None else "concurrency"
    return workload.model_copy(update={key: agents})


def explore(
    question: Question,
    effort: Effort = FULL,
    *,
    also: Iterable[Setup] = (),
    on_progress: Callable[[float], None] = lambda _share: None,
) -> Explored:
    """Search the space of a question.

    also: configurations whose ratio is wanted beside those that are found. Raises SpecError where the workload is too
    large to be searched, PlanError where the server itself does not hold a request.
    """
    return _Search(question, effort.divided(question.slowness), tuple(also), on_progress).run()


class _Search:
    """One search; see ``explore``."""

    def __init__(
        self, question: Question, effort: Effort, also: tuple[Setup, ...], on_progress: Callable[[float], None]
    ) -> None:
        self.question, self.effort, self.also, self.on_progress = question, effort, also, on_progress
        self.base = Baseline(question.server)
        self.agents = question.agents or nearby_agents(question.workload)
        self.bounds: list[str] = []
        self._scores: dict[Setup, float] = {}
        self.rounds: _Rounds | None = None
        if question.agents and agents_of(question.workload) is None:
            raise SpecError(
                "this workload has no number of agents at a time that could be another",
                where="tune.agents",
                hint="Leave it out, or set workload.concurrency",
            )
        one = Plans(question, "search", 1, self.agents)
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
        """The baseline with memory in which nothing is ever overwritten."""
        base, most = self.base.setup, 1 + max(len(group.requests) for group in one.groups)
        if base.kv_slots is not None:
            return base._replace(kv_slots=max(base.kv_slots, most + base.max_num_seqs))
        config = EngineConfig.from_server(self.question.server.replica)
        longest = config.paged.blocks_of(self.question.server.slot_tokens)
        tokens = max(
            int((group.requests["keep"] + group.requests["new"] + group.requests["generate"]).sum())
            for group in one.groups
        )
        blocks = tokens // config.block_tokens + most + (base.max_num_seqs + 1) * longest
        return base._replace(num_gpu_blocks=max(base.num_gpu_blocks or 0, blocks))

    def run(self) -> Explored:
        base = self.base.setup
        self.score(base)
        pairs = self._pairs()
        self.on_progress(0.2)
        chosen = self._best_pairs(pairs)
        for place, pair in enumerate(chosen):
            self._search_sizes(pair)
            self.on_progress(0.2 + 0.4 * (place + 1) / len(chosen))
        self._search_others(chosen)
        ranked = sorted(self._scores, key=lambda setup: (self._scores[setup], self.base.size_of(setup)))
        best, smallest, finalists = self._choose(ranked)
        self.on_progress(0.7)
        return self._conclude(ranked, finalists, best, smallest)

    def score(self, setup: Setup) -> float:
        """The ratio to the baseline on the first plans, of each number of agents alike; infinite where it is none."""
        if setup not in self._scores:
            self._scores[setup] = self._ratio(self.plans, setup)
        return self._scores[setup]

    def _ratio(self, plans: Plans, setup: Setup) -> float:
        if not self.fits(setup):
            return math.inf
        try:
            ratios = [
                plans.played(setup, group).device_ns.sum() / plans.played(self.base.setup, group).device_ns.sum()
                for group in range(len(plans.groups))
            ]
        except PlanError:
            if setup == self.base.setup:
                raise
            return math.inf
        except SpecError:
            return math.inf
        return float(np.mean(ratios))

    def fits(self, setup: Setup) -> bool:
        """Whether the memory that there is holds it."""
        most = self.question.memory_gib
        if most is None or setup == self.base.setup:
            return True
        return self.base.memory_gib(setup) <= max(most, self.base.memory_gib(self.base.setup))

    def _pairs(self) -> list[Setup]:
        """Requests at once, each with a memory and each with a policy of the router, the sizes as they follow."""
        base, levers = self.base.setup, self.question.levers
        has_memory = "kv_slots" in levers or "num_gpu_blocks" in levers
        limits = [base.max_num_seqs]
        if "max_num_seqs" in levers:
            most = self.plans.width if has_memory else max(4 * base.max_num_seqs, self.plans.width)
            limits = limits_up_to(base.max_num_seqs, most)
        pairs = [base]
        if len(limits) > 1:
            pairs += self._climb([self.base.implied(limit) for limit in limits[1:]], "requests at once")
        if has_memory:
            name = "kv_slots" if base.kv_slots is not None else "num_gpu_blocks"
            start, most = getattr(base, name), getattr(self.endless, name)
            for limit in limits:
                implied = self.base.implied(limit)
                rungs = [implied._replace(**{name: number}) for number in list(ladder(start, most))[1:MOST_RUNGS]]
                # Fewer than one for each request would leave a request without memory.
                rungs = [rung for rung in rungs if getattr(rung, name) > getattr(implied, name)]
                what = f"{name} at {limit} requests at once" if len(limits) > 1 else name
                pairs += self._climb(rungs, what)
        if "router" in levers:
            pairs += [pair._replace(policy=policy) for pair in pairs for policy in POLICIES]
        pairs = list(dict.fromkeys(pairs))
        return [pair for pair in pairs if math.isfinite(self.score(pair))]

    def _climb(self, rungs: Sequence[Setup], what: str) -> list[Setup]:
        """The rungs, up to the first that reuses all that can be reused, or the last that the memory holds."""
        taken: list[Setup] = []
        try:
            most = self.plans.cached_tokens(self.endless)
            now = self.plans.cached_tokens(self.base.setup)
        except HarnessError:
            return taken
        is_memory = not what.startswith("requests")
        if now >= most and is_memory:
            self.bounds.append(f"{what}: every return finds its KV already")
            return taken
        for rung in rungs:
            if not self.fits(rung):
                memory = self.base.memory_gib(rung)
                self.bounds.append(
                    f"{what}: up to {_rung(taken[-1] if taken else self.base.setup, what)}; more do not fit "
                    f"({memory:.1f} GiB of {self.question.memory_gib:g} GiB per device)"
                )
                return taken
            if not math.isfinite(self.score(rung)):
                continue
            taken.append(rung)
            # Up to as many as there are sessions, more requests at once save steps whatever is reused.
            is_wide = is_memory or rung.max_num_seqs >= self.plans.width
            if is_wide and self.plans.cached_tokens(rung) >= most:
                self.bounds.append(f"{what}: up to {_rung(rung, what)}, where every return finds its KV")
                return taken
        if taken:
            self.bounds.append(f"{what}: up to {_rung(taken[-1], what)}")
        return taken

    def _best_pairs(self, pairs: Sequence[Setup]) -> list[Setup]:
        """The pairs that can be best: by what they would cost with every size; the baseline's first."""
        base = self.base.setup
        if "decode_buckets" not in self.question.levers:
            return []
        least = {pair: self._ratio(self.plans, self._with_every_size(pair)) for pair in pairs}
        good = sorted(pairs, key=lambda pair: (round(least[pair], 3), self.base.size_of(pair)))
        best = least[good[0]]
        close = [pair for pair in good if least[pair] <= best * (1 + 2 * MARGIN)]
        alone = min(close, key=self.base.size_of)
        return list(dict.fromkeys([base, alone, *good[: self.effort.pairs]]))

    def _with_every_size(self, pair: Setup) -> Setup:
        most = min(pair.max_num_seqs, self.plans.width)
        return pair._replace(decode_buckets=tuple(sorted({*range(1, most + 1), pair.max_num_seqs})))

    def _search_sizes(self, pair: Setup) -> None:
        """Sets of sizes at one number of requests at once and one memory: all, or those that its steps ask for."""
        limit, width = pair.max_num_seqs, self.plans.width
        base_sizes = self.base.implied(limit).decode_buckets
        for size in _thinned(
            [size for size in range(1, min(limit, width) + 1) if size not in base_sizes], self.effort.few
        ):
            self.score(pair._replace(decode_buckets=tuple(sorted({*base_sizes, size}))))
        if (sets := sets_of_sizes(limit, width, self.most_sizes, self.effort.sets)) is not None:
            for sizes in sets:
                self.score(pair._replace(decode_buckets=sizes))
            return
        for sizes in self._built(pair):
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
        played = [self.plans.played(every, group).histogram for group in range(len(self.plans.groups))]
        histogram = np.zeros(limit + 1, dtype=np.int64)
        for counts in played:
            histogram[: min(len(counts), limit + 1)] += counts[: limit + 1]
        model = self.question.model
        cost_ns = [
            [model.decode_step_ns(max(size, 1), min(number, size)) for number in range(size + 1)]
            for size in range(limit + 1)
        ]
        sets = best_for_steps(histogram.tolist(), cost_ns, limit, self.most_sizes)
        return [sizes for sizes in sets if len(sizes) >= 2]

    def _search_others(self, chosen: Sequence[Setup]) -> None:
        """Prefix caching on or off, at the baseline and at the best so far."""
        if "prefix_caching" not in self.question.levers:
            return
        best = min(self._scores, key=lambda setup: self._scores[setup])
        for setup in dict.fromkeys([self.base.setup, best, *chosen[:1]]):
            self.score(setup._replace(prefix_caching=not setup.prefix_caching))

    def _choose(self, ranked: Sequence[Setup]) -> tuple[Setup, Setup, list[Setup]]:
        """The best, the smallest change that is as good, and all that the last plans judge, one of each kind at least.

        On new plans, in rounds: each round has more plans for those alone that can still be as good as the best.
        """
        base = self.base.setup
        by_kind: dict[tuple[str, ...], list[Setup]] = {}
        for setup in ranked:
            if setup != base and math.isfinite(self._scores[setup]):
                by_kind.setdefault(self.base.levers(setup), []).append(setup)
        left: list[Setup] = []
        for of_kind in by_kind.values():
            close = [setup for setup in of_kind if self._scores[setup] <= self._scores[of_kind[0]] + MARGIN]
            small = sorted(close, key=self.base.size_of)
            left += dict.fromkeys([*of_kind[: self.effort.few], *small[: self.effort.few]])
        if not left:
            return base, base, []
        self.rounds = _Rounds(self.question, self.agents, base)
        best = left[0]
        for _ in range(ROUNDS):
            left = self.rounds.play(left, self.effort.choosing // ROUNDS)
            least = min(map(self.rounds.ratio, left))
            best = min((each for each in left if self.rounds.ratio(each) <= least + TIE), key=self.base.size_of)
            left = [setup for setup in left if self.rounds.is_close(setup, best)]
        smallest = min((each for each in left if self.rounds.is_as_good(each, best)), key=self.base.size_of)
        firsts = [of_kind[0] for of_kind in by_kind.values()]
        return best, smallest, list(dict.fromkeys([best, smallest, *firsts]))[:FINALISTS]

    def _conclude(self, ranked: Sequence[Setup], finalists: Sequence[Setup], chosen: Setup, smaller: Setup) -> Explored:
        shown = [*finalists, *(setup for setup in self.also if setup != self.base.setup)]
        shown = list(dict.fromkeys(shown))
        predictor = _Predictor(self.question, self.effort, len(shown) + 2)
        every = self._with_every_size(self.endless) if "decode_buckets" in self.question.levers else self.endless
        if self.question.server.is_paged and not self.base.setup.decode_buckets:
            every = self.endless
        ceiling = predictor.ratio(every)
        options = [self._option(predictor, setup, with_turns=place < 2) for place, setup in enumerate(shown)]
        by_setup = {option.setup: option for option in options}
        best = smallest = None
        if finalists:
            best, smallest = by_setup[chosen], by_setup[smaller]
            if smallest.saving < MARGIN and best.saving < MARGIN:
                best = smallest = None
            elif smallest.saving < MARGIN or smallest.ratio.ratio > best.ratio.ratio * (1 + MARGIN):
                # What was as good on the plans that chose it need not be on these.
                smallest = best
        simulated = self.plans.num_simulated + predictor.num_simulated
        simulated += 0 if self.rounds is None else self.rounds.num_simulated
        agents = ", ".join(map(str, sorted(self.agents)))
        notes = [f"sizes are chosen for {agents} agents at a time"] * (len(self.agents) > 1)
        notes += [f"at most {self.most_sizes} compiled sizes"] * ("decode_buckets" in self.question.levers)
        return Explored(
            self.base.setup,
            ceiling,
            tuple(options),
            best,
            smallest,
            tuple(dict.fromkeys([*self.bounds, *notes])),
            sum(math.isfinite(score) for score in self._scores.values()),
            simulated,
            self._frontier(ranked),
        )

    def _frontier(self, ranked: Sequence[Setup]) -> tuple[tuple[Setup, float], ...]:
        """The best of each number of requests at once, memory and number of sizes, with their first ratios."""
        kept: dict[tuple[object, ...], int] = {}
        shown: list[tuple[Setup, float]] = []
        for setup in ranked:
            key = (*setup._replace(decode_buckets=()), len(setup.decode_buckets))
            kept[key] = kept.get(key, 0) + 1
            if kept[key] <= BEST_OF_EACH and math.isfinite(self._scores[setup]):
                shown.append((setup, self._scores[setup]))
        return tuple(shown)

    def _option(self, predictor: _Predictor, setup: Setup, *, with_turns: bool) -> Option:
        ratios = predictor.ratios(setup)
        low, high = np.quantile(ratios, [0.05, 0.95], method="weibull")
        sizes = (*setup.decode_buckets, *self.base.setup.decode_buckets)
        turns = predictor.turns(setup) if with_turns and not self.question.server.is_routed else None
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
            turns,
        )


class _Rounds:
    """Configurations on plans that grow: each round has new ones, the same for all configurations that take part."""

    def __init__(self, question: Question, agents: Sequence[int], base: Setup) -> None:
        self._question, self._agents, self._base = question, agents, base
        self._rounds: list[Plans] = []

    @property
    def num_simulated(self) -> int:
        return sum(plans.num_simulated for plans in self._rounds)

    def play(self, setups: Sequence[Setup], num_requests: int) -> list[Setup]:
        """One more round of about so many simulated requests; the configurations that hold its requests."""
        one = Plans(self._question, "choice", 1, self._agents).num_requests
        count = max(LEAST_PLANS, min(num_requests // (one * (len(setups) + 1)), MOST_CHOICE_PLANS))
        self._rounds.append(Plans(self._question, f"choice-{len(self._rounds) + 1}", count, self._agents))
        return [setup for setup in setups if self._holds(setup)]

    def _holds(self, setup: Setup) -> bool:
        try:
            self._rounds[-1].device_ns(setup)
        except HarnessError:
            return False
        return True

    def _shares(self, setup: Setup) -> FloatArray:
        """Device time of each plan, 1: the baseline's mean; shape (numbers of agents, plans)."""
        own, base = (
            np.array(
                [
                    np.concatenate([plans.played(each, group).device_ns for plans in self._rounds])
                    for group in range(len(self._agents))
                ]
            )
            for each in (setup, self._base)
        )
        return own / base.mean(axis=1, keepdims=True)

    def ratio(self, setup: Setup) -> float:
        """To the baseline, of each number of agents alike."""
        return float(self._shares(setup).mean())

    def _behind(self, setup: Setup, best: Setup, groups: int) -> tuple[float, float]:
        """How much more than the best it costs for the first numbers of agents, as a share, and the standard error."""
        own, least = self._shares(setup)[:groups], self._shares(best)[:groups]
        differences = own - least
        error = math.sqrt(float(differences.var(axis=1, ddof=1).sum()) / differences.shape[1]) / len(differences)
        return float(differences.mean() / least.mean()), error / float(least.mean())

    def is_close(self, setup: Setup, best: Setup) -> bool:
        """Whether it can still be the best, or as good for the workload's own number of agents."""
        more, error = self._behind(setup, best, len(self._agents))
        own, own_error = self._behind(setup, best, 1)
        return more - 2 * error <= 0 or own - 2 * own_error <= AS_GOOD

    def is_as_good(self, setup: Setup, best: Setup) -> bool:
        """Whether it costs little more for the workload's own number of agents, its standard error counted in."""
        more, error = self._behind(setup, best, 1)
        return more + error <= AS_GOOD


class _Predictor:
    """Ratios on the last plans, which are new for each imagined experiment, with jitter and uncertain costs."""

    def __init__(self, question: Question, effort: Effort, num_setups: int) -> None:
        self._question, self._base = question, Setup.of(question.server)
        seed = derive_seed(question.seed, "tune/prediction") % SEED_RANGE
        one = drawn_plans(question.workload, question.treatment, seed, 1)
        each = len(one.requests) * REPLICATES * num_setups
        self.draws = max(12, min(effort.predicting // each, MOST_DRAWS))
        self._perturbation = replace(question.perturbation, seed=seed)
        self._arrays = drawn_plans(question.workload, question.treatment, seed, REPLICATES * self.draws)
        self._known: dict[tuple[Setup, CostChange], tuple[FloatArray, int]] = {}
        self.num_simulated = 0

    def _play(self, setup: Setup, costs: CostChange = NO_CHANGE) -> tuple[FloatArray, int]:
        """(device time, shape (imagined experiments, plans), tokens reused in all of them)."""
        key = (setup, costs)
        if key not in self._known:
            server = setup.on(self._question.server)
            config = EngineConfig.from_server(server.replica)
            truths = [
                perturbed(costs.of(self._question.model), self._perturbation, number, artifact_key(config))
                for number in range(self.draws)
            ]
            models = [truth for truth in truths for _ in range(REPLICATES)]
            draws: Draws = jittered_draw(self._arrays, models, self._perturbation, zlib.crc32(repr(setup).encode()))
            totals = simulator_of(server)(draws, config).totals
            self.num_simulated += len(draws.arrays.plans)
            device_ns = np.asarray(totals["decode_ns"] + totals["prefill_ns"], dtype=np.float64)
            self._known[key] = device_ns.reshape(self.draws, REPLICATES), int(totals["cached_tokens"].sum())
        return self._known[key]

    def ratios(self, setup: Setup, costs: CostChange = NO_CHANGE) -> FloatArray:
        """The cost ratio of each imagined experiment."""
        base = costs.seen_by(self._base.decode_buckets)
        return np.asarray(self._play(setup, costs)[0].sum(axis=1) / self._play(self._base, base)[0].sum(axis=1))

    def block_sd(self, setup: Setup) -> float:
        """Spread of the log ratio between the plans of one imagined experiment."""
        return float(np.sqrt(np.log(self._play(setup)[0] / self._play(self._base)[0]).var(axis=1, ddof=1).mean()))

    def ratio(self, setup: Setup) -> DrawnRatio:
        own, base = (DrawnCosts(self._play(each)[0]) for each in (setup, self._base))
        ratio = own.ratio_to(base)
        assert ratio is not None, "both sides have the same draws"
        return ratio

    def reuse(self, setup: Setup, endless: Setup) -> float:
        """Tokens reused, as a share of those that memory without end reuses."""
        most = self._play(endless)[1]
        return self._play(setup)[1] / most if most else 1.0

    def turns(self, setup: Setup) -> BreakEven | None:
        """How far the deciding costs may be off; None where the draws do not tell it from the baseline."""
        if not self.ratio(setup).shows_effect:
            return None
        sizes = deciding_sizes(setup.decode_buckets, self._base.decode_buckets)
        return BreakEven(sizes, break_even(lambda change: float(self.ratios(setup, CostChange(sizes, change)).mean())))


def _rung(setup: Setup, what: str) -> str:
    if what.startswith("requests"):
        return str(setup.max_num_seqs)
    return str(setup.kv_slots if setup.kv_slots is not None else setup.num_gpu_blocks)


def _thinned(values: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of these, evenly."""
    if len(values) <= most:
        return list(values)
    return [values[place] for place in sorted({round(place) for place in np.linspace(0, len(values) - 1, most)})]


def in_order_of_ease(levers: Iterable[str]) -> list[str]:
    """Keys in the order in which a change of them is easier to make."""
    return sorted(levers, key=LEVERS.index)
