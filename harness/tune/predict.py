"""What a configuration is predicted to cost: on plans that chose nothing, with jitter and uncertain costs.

Nothing is run here.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import numpy as np

from harness.analysis.compare.drawn import DrawnCosts, DrawnRatio
from harness.judge.planning.deciding import NO_CHANGE, BreakEven, CostChange, break_even, deciding_sizes
from harness.model.engine.config import EngineConfig
from harness.model.plan.build import derive_seed
from harness.model.sim.draws import Draws, artifact_key, jittered_draw, perturbed, simulator_of
from harness.model.sim.kernel.arrays import SimOutcome
from harness.model.spec import ServerSpec
from harness.table import with_error
from harness.tune.plans import SEED_RANGE, FloatArray, Question, drawn_plans
from harness.tune.setups import Setup
from harness.tune.targets import Felt, counts_of, felt_of, in_flight_ns, share_met

REPLICATES = 6
"""Plans of one imagined experiment."""
LEAST_DRAWS, MOST_DRAWS = 19, 100
"""Of 19 draws the least and the most hold 90 % of experiments; of fewer no order statistics do."""


@dataclass(frozen=True)
class Option:
    """A configuration with its predicted ratio to the baseline, on plans that chose nothing.

    ratio: mean device time over draws, with its 95 % error. low, high: of 90 % of experiments of REPLICATES plans.
    block_sd: of one plan, as a share of the mean cost, which decides how many plans a measurement takes.
    reuse: share of the reusable tokens that are reused. memory_gib, compile_s: see Baseline.
    unmeasured: which of its sizes have no measured cost, in words. felt: times to tokens, and the share within targets.
    """

    setup: Setup
    words: str
    ratio: DrawnRatio
    low: float
    high: float
    block_sd: float
    reuse: float
    memory_gib: float | None
    compile_s: float | None
    unmeasured: str = ""
    turns: BreakEven | None = None
    felt: Felt | None = None
    flight: tuple[float, float] | None = None

    @property
    def saving(self) -> float:
        return 1 - self.ratio.ratio

    @property
    def most_saving(self) -> float:
        """What it saves at most, its error counted in."""
        return self.saving + self.ratio.error

    @property
    def percent(self) -> str:
        """What it is predicted to save: "12.3 +- 0.4 %"."""
        return f"{with_error(100 * self.saving, 100 * self.ratio.error, 1)} %"

    @property
    def sentence(self) -> str:
        """What it changes, what that is predicted to save, how sure that is, and given which costs."""
        given = f"; {self.unmeasured}" if self.unmeasured else ""
        turns = "" if self.turns is None or self.turns.change is None else f"; {self.turns}"
        return f"{self.words}: predicted to save {self.percent}{given}{turns}"


class Predictor:
    """Ratios on the last plans, which are new for each imagined experiment, with jitter and uncertain costs.

    num_requests: simulated ones that all configurations may take together.
    """

    def __init__(self, question: Question, num_requests: int, num_setups: int) -> None:
        self._question, self._base = question, Setup.of(question.server)
        seed = derive_seed(question.seed, "tune/prediction") % SEED_RANGE
        one = drawn_plans(question.workload, question.treatment, seed, 1)
        each = len(one.requests) * REPLICATES * num_setups
        self.draws = max(LEAST_DRAWS, min(num_requests // each, MOST_DRAWS))
        self._perturbation = replace(question.perturbation, seed=seed)
        self._arrays = drawn_plans(question.workload, question.treatment, seed, REPLICATES * self.draws)
        self._known: dict[tuple[Setup, CostChange], tuple[FloatArray, int]] = {}
        self._felt: dict[Setup, Felt] = {}
        self._flight_ns: dict[Setup, FloatArray] = {}
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
            outcome = simulator_of(server)(draws, config)
            self.num_simulated += len(draws.arrays.plans)
            device_ns = outcome.device_ns.astype(np.float64)
            if costs == NO_CHANGE:
                self._felt[setup] = self._felt_of(draws, outcome, server)
                self._flight_ns[setup] = in_flight_ns(draws.arrays, outcome)
            self._known[key] = device_ns.reshape(self.draws, REPLICATES), int(outcome.totals["cached_tokens"].sum())
        return self._known[key]

    def _felt_of(self, draws: Draws, outcome: SimOutcome, server: ServerSpec) -> Felt:
        model, targets = self._question.model, self._question.targets
        share = None if targets is None else share_met(counts_of(draws.arrays, outcome, targets.slo, server, model))
        return felt_of(draws.arrays, outcome, server, model, share)

    def felt(self, setup: Setup) -> Felt:
        """What a configuration makes people feel."""
        self._play(setup)
        return self._felt[setup]

    def ratios(self, setup: Setup, costs: CostChange = NO_CHANGE) -> FloatArray:
        """The cost ratio of each imagined experiment."""
        base = costs.seen_by(self._base.decode_buckets)
        return np.asarray(self._play(setup, costs)[0].sum(axis=1) / self._play(self._base, base)[0].sum(axis=1))

    def block_sd(self, setup: Setup) -> float:
        """Spread between plans of their difference from the ratio of sums, as a share of the mean cost of one."""
        own, base = self._play(setup)[0], self._play(self._base)[0]
        return float((own - own.mean() / base.mean() * base).std() / own.mean())

    def flight(self, setup: Setup) -> tuple[float, float]:
        """The ratio of the time in flight (B), and the spread between plans of their difference from it."""
        for each in (setup, self._base):
            self._play(each)
        own, base = self._flight_ns[setup], self._flight_ns[self._base]
        ratio = float(own.mean() / base.mean())
        return ratio, float((own - ratio * base).std() / own.mean())

    def ratio(self, setup: Setup) -> DrawnRatio:
        own, base = (DrawnCosts(self._play(each)[0].sum(axis=1)) for each in (setup, self._base))
        ratio = own.ratio_to(base)
        assert ratio is not None, "both sides have the same draws"
        return ratio

    def reuse(self, setup: Setup, endless: Setup) -> float:
        """Tokens reused, as a share of those that memory without end reuses."""
        most = self._play(endless._replace(prefix_caching=True))[1]
        return self._play(setup)[1] / most if most else 1.0

    def turns(self, setup: Setup) -> BreakEven | None:
        """How far the deciding costs may be off; None where the draws do not tell it from the baseline."""
        if not self.ratio(setup).shows_effect:
            return None
        sizes = deciding_sizes(setup.decode_buckets, self._base.decode_buckets)
        return BreakEven(sizes, break_even(lambda change: float(self.ratios(setup, CostChange(sizes, change)).mean())))
