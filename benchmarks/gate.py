"""How often the gate is wrong: false "worse" at its limits, passes beside the power that is promised, false passes.

Pairs of experiments are drawn from simulated runs: each pair replays one drawn plan twice, with client and steps
perturbed anew. Whatever the two sides differ in is set, so that the true ratio is known. No server runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from benchmarks import SIX_SESSIONS
from benchmarks.figure import Figure
from harness.analysis.compare.measures import Value
from harness.analysis.cost.reconstruct import union_ns
from harness.analysis.stats import FloatArray, quantile
from harness.clock import NS_PER_MS, NS_PER_S
from harness.compiled.records import Records
from harness.extras.cases.cases import outcome_of_plan
from harness.extras.paper.bucket_change import padding_of_histogram
from harness.judge.decisions.gate import FIGURES, GateRun, GateTest, GateVerdict, gate_policy, judge
from harness.judge.planning.power import PlannedTest
from harness.measure.records.manifest import Manifest
from harness.model.engine.config import EngineConfig
from harness.model.experiment import PlannedRun, resolve
from harness.model.sim.draws import draw, perturbation_of, run_draws
from harness.model.sim.kernel.arrays import RequestResult
from harness.model.sim.plans import plan_arrays
from harness.model.spec import ExperimentSpec, load_experiment

EXPERIMENTS, POPULATION, SEED = 1_000, 400, 20261123
NUM_BLOCKS = (3, 6, 12)
# Blocks at each look of a gate that is extended, as after "cannot tell".
LOOKS = (6, 12, 18, 24, 30)
# Long enough that a dozen runs carry a p99: 120 requests a run.
REQUESTS_PER_SESSION = 20
Values = Mapping[str, Value]


class Block(NamedTuple):
    """Figures of one plan replayed twice, and the requests of a replay."""

    sides: tuple[Values, Values]
    num_requests: int


def gate_experiment() -> ExperimentSpec:
    """Six sessions, long ones, its first condition alone."""
    spec = load_experiment(SIX_SESSIONS)
    workload = spec.workload.model_copy(update={"requests_per_session": REQUESTS_PER_SESSION})
    return spec.model_copy(update={"workload": workload, "condition": spec.condition[:1]})


def simulated_blocks(spec: ExperimentSpec, num_blocks: int) -> list[Block]:
    """Blocks of an experiment's first condition, each with two replays that differ by chance alone."""
    runs = next(iter(resolve(spec.model_copy(update={"replicates": num_blocks})).by_condition.values()))
    first = runs[0]
    arrays, config = plan_arrays([run.plan for run in runs]), EngineConfig.from_server(first.server)
    of_device = perturbation_of(spec.prediction, first.cost_file)
    perturbation = replace(of_device, decode_sd=0.0, bucket_sd=0.0, prefill_sd=0.0, artifact_sd=0.0)
    drawn = draw(arrays, config, first.cost_model, perturbation, (0, 1))
    outcome = run_draws(drawn, config)

    def values(place: int) -> Values:
        of_plan = outcome_of_plan(drawn.arrays, outcome, place)
        totals = of_plan.totals
        histogram = {n: int(count) for n, count in enumerate(of_plan.histogram[0]) if count}
        padded, slots = padding_of_histogram(histogram, {n: config.bucket_of(n) for n in histogram})
        return _values(runs[place % num_blocks], of_plan.requests) | {
            "reuse": Value(float(totals["computed_tokens"][0]), len(of_plan.requests)),
            "padding": Value(slots, slots - padded),
        }

    num_requests = len(drawn.arrays.requests) // (2 * num_blocks)
    return [Block((values(place), values(num_blocks + place)), num_requests) for place in range(num_blocks)]


def _values(run: PlannedRun, requests: Records[RequestResult]) -> dict[str, Value]:
    """The figures that the requests of one simulated plan show."""
    tokens = np.array([request.generate_tokens for session in run.plan.sessions for request in session.requests])
    arrival, first, done = (requests[name] for name in ("arrival_ns", "first_token_ns", "completed_ns"))
    tpot_ns = (done - first)[tokens > 1] / (tokens[tokens > 1] - 1)
    flying_ns = union_ns(zip(arrival.tolist(), done.tolist(), strict=True))
    return {
        "cost": Value(flying_ns / NS_PER_S, float(tokens.sum())),
        "ttft_p50": Value(quantile(first - arrival, 0.5) / NS_PER_MS),
        "ttft_p99": Value(quantile(first - arrival, 0.99) / NS_PER_MS),
        "tpot": Value(float(tpot_ns.mean()) / NS_PER_MS),
    }


@dataclass(frozen=True, slots=True)
class Share:
    """Verdicts of many experiments: of the whole gate, and of each figure."""

    verdicts: tuple[GateVerdict, ...]
    tests: tuple[tuple[GateTest, ...], ...]

    def of(self, verdict: GateVerdict) -> float:
        return self.verdicts.count(verdict) / len(self.verdicts)

    def of_figure(self, name: str, verdict: GateVerdict) -> float:
        verdicts = [test.verdict for tests in self.tests for test in tests if test.figure == name]
        return verdicts.count(verdict) / len(verdicts)

    @property
    def passes_with_open_figures(self) -> int:
        """Gates that passed although a figure had not: there must be none."""
        pairs = zip(self.verdicts, self.tests, strict=True)
        return sum(
            verdict is GateVerdict.PASS and any(test.verdict is not GateVerdict.PASS for test in tests)
            for verdict, tests in pairs
        )


Sides = tuple[list[GateRun], list[GateRun]]


def drawn_sides(
    rng: np.random.Generator, blocks: Sequence[Block], num_blocks: int, ratios: Mapping[str, float]
) -> Sides:
    """A pair of experiments of blocks drawn from these, where each figure's true ratio is the one given."""
    new, base = list[GateRun](), list[GateRun]()
    places, is_swapped = rng.integers(0, len(blocks), num_blocks), rng.integers(0, 2, num_blocks)
    for number, (place, swapped) in enumerate(zip(places.tolist(), is_swapped.tolist(), strict=True)):
        block, manifest = blocks[place], _manifest(number)
        changed = {
            name: value._replace(amount=value.amount * ratios[name]) for name, value in block.sides[swapped].items()
        }
        new.append(GateRun(manifest, "", number, block.num_requests, changed))
        base.append(GateRun(manifest, "", number, block.num_requests, block.sides[1 - swapped]))
    return new, base


@lru_cache(maxsize=64)
def _manifest(number: int) -> Manifest:
    return Manifest(experiment="drawn", condition="base", replicate=number, plan_hash=str(number), planned_requests=1)


def gated(
    blocks: Sequence[Block], num_blocks: int, ratios: Mapping[str, float], num_experiments: int, seed: int = SEED
) -> Share:
    """The gate over so many pairs of experiments, each looked at once."""
    rng, policy = np.random.default_rng(seed), gate_policy()
    results = [judge(*drawn_sides(rng, blocks, num_blocks, ratios), policy) for _ in range(num_experiments)]
    return Share(tuple(result.verdict for result in results), tuple(result.tests for result in results))


class Extended(NamedTuple):
    """Shares of gates, looked at after each extension until pass or worse, that ever said so; of each figure, of pass.

    stopped: the mean number of blocks at the end.
    """

    passed: float
    worse: float
    passed_figure: Mapping[str, float]
    stopped: float


def extended(
    blocks: Sequence[Block],
    ratios: Mapping[str, float],
    num_experiments: int,
    *,
    are_looks_counted: bool = True,
) -> Extended:
    """Gates that are extended after each "cannot tell". are_looks_counted: False for the rule of a single look."""
    rng = np.random.default_rng(SEED)
    policies = [gate_policy(look=number if are_looks_counted else 1) for number in range(1, len(LOOKS) + 1)]
    passed = dict.fromkeys(policies[0].limits, 0)
    verdicts: list[GateVerdict] = []
    ends: list[int] = []
    for _ in range(num_experiments):
        new, base = drawn_sides(rng, blocks, LOOKS[-1], ratios)
        ever, result = set[str](), None
        for look, policy in zip(LOOKS, policies, strict=True):
            result = judge(new[:look], base[:look], policy)
            ever |= {test.figure for test in result.tests if test.verdict is GateVerdict.PASS}
            if result.verdict is not GateVerdict.CANNOT_TELL or look == LOOKS[-1]:
                ends.append(look)
                break
        assert result is not None
        verdicts.append(result.verdict)
        for name in ever:
            passed[name] += 1
    shares = {name: count / num_experiments for name, count in passed.items()}
    counts = [verdicts.count(verdict) / num_experiments for verdict in (GateVerdict.PASS, GateVerdict.WORSE)]
    return Extended(counts[0], counts[1], shares, float(np.mean(ends)))


def log_ratios_sd(blocks: Sequence[Block], name: str) -> float:
    """Standard deviation of a block's log ratio, sides at random."""
    values: FloatArray = np.array([math.log(new[name].amount / base[name].amount) for (new, base), _ in blocks])
    return float(np.sqrt(np.mean(values**2)))


def bench_gate(num_experiments: int = EXPERIMENTS, population: int = POPULATION) -> Iterator[Figure]:
    """False verdicts and passes of the gate over simulated pairs of experiments, by the number of blocks."""
    blocks = simulated_blocks(gate_experiment(), population)
    limits, alpha = gate_policy().limits, gate_policy().alpha
    error = math.sqrt(alpha * (1 - alpha) / num_experiments)
    num_open = 0
    for num_blocks in NUM_BLOCKS:
        note = f"{num_blocks} blocks, {num_experiments:,} pairs of experiments, Monte Carlo error {error:.3f}"
        at_limit = gated(blocks, num_blocks, limits, num_experiments)
        share = at_limit.of(GateVerdict.WORSE)
        yield Figure("false worse, every true ratio at its limit", f"{share:.3f}", f"<= {alpha}", note)
        equal = gated(blocks, num_blocks, dict.fromkeys(limits, 1.0), num_experiments)
        yield Figure("false worse, every true ratio 1", f"{equal.of(GateVerdict.WORSE):.3f}", f"<= {alpha}", note)
        for name in limits:
            if FIGURES[name].num_needed > num_blocks * blocks[0].num_requests:
                continue
            yield _false_pass(at_limit, name, note)
            yield _power(equal, name, num_blocks, blocks)
        num_open += sum(share.passes_with_open_figures for share in (at_limit, equal))
        shares = ", ".join(f"{verdict.value} {equal.of(verdict):.3f}" for verdict in GateVerdict)
        yield Figure("whole gate, every true ratio 1", shares, "", note)
    yield Figure("passes with a figure that cannot be told", f"{num_open}", "0", "of all of these")
    yield from _tails(num_experiments)
    yield from _extensions(blocks, limits, num_experiments // 2, alpha)


def _tails(num_experiments: int) -> Iterator[Figure]:
    """False passes of a figure at its limit whose ratios are skewed, beside those of symmetric ones."""
    rng, policy = np.random.default_rng(SEED), gate_policy(["cost"])
    shapes: Mapping[str, Callable[[tuple[int, int]], FloatArray]] = {
        "normal": rng.standard_normal,
        "exponential": lambda size: rng.exponential(1.0, size) - 1,
        "log-normal, sigma 1": lambda size: rng.lognormal(0.0, 1.0, size) - math.exp(0.5),
        "one pair in ten hit": lambda size: 0.1 * rng.standard_normal(size) + 3.0 * ((rng.random(size) < 0.1) - 0.1),
    }
    for name, drawn in shapes.items():
        shares: list[str] = []
        for num_blocks in NUM_BLOCKS:
            ratios = policy.limits["cost"] * (1 + 0.01 * drawn((num_experiments, num_blocks)))
            passed = 0
            for of_experiment in ratios.tolist():
                sides = [
                    [GateRun(_manifest(k), "", k, 1000, {"cost": Value(10 * one)}) for k, one in enumerate(amounts)]
                    for amounts in (of_experiment, [1.0] * num_blocks)
                ]
                passed += judge(sides[0], sides[1], policy).verdict is GateVerdict.PASS
            shares.append(f"{passed / num_experiments:.3f}")
        note = f"{', '.join(map(str, NUM_BLOCKS))} blocks, {num_experiments:,} pairs of experiments each"
        yield Figure(f"false pass at its limit, {name}", ", ".join(shares), "", note)


def _extensions(
    blocks: Sequence[Block], limits: Mapping[str, float], num_experiments: int, alpha: float
) -> Iterator[Figure]:
    """Gates that are asked again after more blocks, up to four times, with and without the count of looks."""
    error = math.sqrt(alpha * (1 - alpha) / num_experiments)
    note = f"looks at {', '.join(map(str, LOOKS))} blocks, {num_experiments:,} gates, Monte Carlo error {error:.3f}"
    for are_counted, how, mark in ((True, "", f"<= {alpha}"), (False, " if looks are not counted", "")):
        at_limit = extended(blocks, limits, num_experiments, are_looks_counted=are_counted)
        yield Figure(f"ever false worse, every true ratio at its limit{how}", f"{at_limit.worse:.3f}", mark, note)
        for name, share in at_limit.passed_figure.items():
            yield Figure(f"ever false pass of {name}{how}", f"{share:.3f}", mark, note)
    equal = extended(blocks, dict.fromkeys(limits, 1.0), num_experiments)
    shares = f"pass {equal.passed:.3f}, worse {equal.worse:.3f}, {equal.stopped:.1f} blocks"
    yield Figure("extended gate, every true ratio 1", shares, "", note)


def _false_pass(share: Share, name: str, note: str) -> Figure:
    false = share.of_figure(name, GateVerdict.PASS)
    return Figure(f"false pass of {name}, true ratio at its limit", f"{false:.3f}", "<= 0.05", note)


def _power(share: Share, name: str, num_blocks: int, blocks: Sequence[Block]) -> Figure:
    """Passes of a figure at a true ratio of 1, beside what a t test of normal log ratios promises."""
    policy, sd = gate_policy(), log_ratios_sd(blocks, name)
    promised = (
        PlannedTest(sd, policy.alpha).power(num_blocks, -math.log(policy.limits[name]), "superiority") if sd else 1.0
    )
    passed = share.of_figure(name, GateVerdict.PASS)
    return Figure(
        f"pass of {name}, true ratio 1",
        f"{passed:.3f}",
        "",
        f"{num_blocks} blocks; promised {promised:.3f}, sd {sd:.4f}",
    )
