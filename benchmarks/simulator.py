"""How fast the simulator and the search are on one core, beside their marks and a naive Python walk of the same plans.

Counts CPU time of this process, since machines are shared. Judges nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from benchmarks import SIX_SESSIONS
from benchmarks.figure import Figure, cpu_s, in_turns, per_cpu_s
from harness.analysis.compare.drawn import DrawnCosts
from harness.clock import NS_PER_S, process_cpu_ns
from harness.extras.search.evaluate import Evaluator
from harness.extras.search.run import evaluator_of, search
from harness.extras.search.space import load_space
from harness.judge.prereg import predict_experiment
from harness.model.engine.config import EngineConfig, new_state
from harness.model.engine.cost import load_cost_model
from harness.model.experiment import build_plan, resolve
from harness.model.plan.model import Plan
from harness.model.sim.kernel.arrays import PlanArrays, new_outcome, new_scratch
from harness.model.sim.plans import plan_arrays
from harness.model.sim.simulate import run_batch
from harness.model.spec import PerturbationSpec, WorkloadSpec, load_experiment
from harness.model.traces.lower import Lowering, sessions_of
from harness.model.traces.recording import RecordedRequest, Recording
from tests.support.naive import naive_run

MARKS = {
    "paper": ">= 3,000 times the naive walk",
    "vendor-0.11.1": ">= 800 times the naive walk",
    "vendor-0.12.0": ">= 800 times the naive walk",
}
SIZES = (1_000, 10_000, 100_000, 1_000_000)
REPEATS = 5
MOST_BYTES = 200
TRACE_REQUESTS = 12_031
# So many of a trace's sessions the naive walk takes: it needs milliseconds for each.
NAIVE_SESSIONS = 60


def simulator_figures() -> Iterator[Figure]:
    """Everything this file measures; about 90 s of one core."""
    yield from rates()
    yield from whole_search()
    yield from drawn()
    yield from linearity()
    yield from recorded()


def small_plans() -> list[Plan]:
    """N = 6 to 10, two requests each, 60 plans of each N in turn."""
    return [
        build_plan(WorkloadSpec(source="paper", num_sessions=n), 20260910, block)
        for block in range(60)
        for n in range(6, 11)
    ]


def rates() -> Iterator[Figure]:
    """Simulated runs per second under each rule set, and of the naive walk, on the same plans."""
    plans = small_plans()
    arrays, model = plan_arrays(plans), load_cost_model("paper")
    for rules, mark in MARKS.items():
        config = EngineConfig(8, (1, 2, 4, 8), 8, rules=rules)
        run_batch(arrays, config, model)

        def sample(config: EngineConfig = config) -> float:
            # Short samples: on a shared machine only the best of several is undisturbed.
            return max(per_cpu_s(lambda: len(run_batch(arrays, config, model).totals), 0.02) for _ in range(4))

        measured = in_turns(sample, lambda rules=rules: naive_rate(rules, plans[:5]), 12, "the naive walk", "more")
        note = f"the naive walk makes {max(measured.reference):,.0f} /s"
        yield Figure(f"simulated runs, rules {rules}", f"{max(measured.samples):,.0f} /s", mark, note, measured)


def naive_rate(rules: str, plans: list[Plan]) -> float:
    """Runs per CPU second of the tests' own simulators; best of three, as the other side has it."""
    model, config = load_cost_model("paper"), EngineConfig(8, (1, 2, 4, 8), 8, rules=rules)

    def walk() -> int:
        for plan in plans:
            naive_run(plan, config, model)
        return len(plans)

    return max(per_cpu_s(walk, 0.05) for _ in range(3))


def whole_search() -> Iterator[Figure]:
    """The paper's search: plans built, 2,077 candidates x 54 plans, ledger written; and with nothing shared."""
    plans = small_plans()[:5]
    for rules in ("paper", "vendor-0.12.0"):
        kept = load_space("paper").model_copy(update={"rules": rules})
        simulations: list[int] = []

        def shared(kept: Any = kept, simulations: list[int] = simulations) -> None:
            # Another title is another search: a process keeps what it has simulated for one.
            renamed = kept.model_copy(update={"title": f"{kept.title} {process_cpu_ns()}"})
            with TemporaryDirectory() as folder:
                search(renamed, Path(folder), workers=1)
            simulations.append(evaluator_of(renamed.model_dump_json()).num_simulated)

        def unshared(kept: Any = kept, simulations: list[int] = simulations) -> None:
            evaluator = Evaluator(kept, is_sharing=False)
            for candidate in kept.candidates():
                evaluator.evaluate(candidate, evaluator.groups)
            simulations.append(evaluator.num_simulated)

        for work, name in ((unshared, f"the paper's search, rules {rules}"), (shared, f"  ledger included, {rules}")):
            measured = in_turns(
                lambda work=work: cpu_s(work),
                lambda rules=rules: 112_158 / naive_rate(rules, plans),
                REPEATS,
                "the naive walk of each, from its rate",
            )
            note = f"{simulations[-1]:,} simulations{' for the same ledger' if work is shared else ''}"
            yield Figure(name, f"{min(measured.samples):.2f} s", "<= 1 s", note, measured)


def drawn() -> Iterator[Figure]:
    """Twelve perturbed draws of every run of six-sessions.toml, and the intervals of its comparisons."""
    spec = load_experiment(SIX_SESSIONS)
    planned = resolve(spec.model_copy(update={"prediction": PerturbationSpec(draws=12)}))
    pairs = [(each.name, spec.baseline_of(each)) for each in spec.condition if spec.baseline_of(each) != each.name]

    def draw() -> None:
        predictions = predict_experiment(planned)
        for name, base in pairs:
            own, other = (DrawnCosts.of(list(predictions[each].values())) for each in (name, base))
            own.interval_to(other)

    def naive() -> None:
        for run in planned:
            naive_run(run.plan, EngineConfig.from_server(run.server), run.cost_model)

    draw()
    measured = in_turns(lambda: cpu_s(draw), lambda: 12 * cpu_s(naive), REPEATS, "twelve naive walks of each run")
    yield Figure(
        "twelve draws of twelve runs, with intervals",
        f"{min(measured.samples) * 1000:.0f} ms",
        "< 50 ms",
        f"{12 * len(planned)} simulations, {len(pairs)} ratios",
        measured,
    )


def closed_population(num_requests: int) -> WorkloadSpec:
    """Ten users who ask so often in all, ten times in a session."""
    return WorkloadSpec(num_sessions=num_requests // 10, concurrency=10, requests_per_session=10)


def linearity() -> Iterator[Figure]:
    """Time per request in one plan of up to a million requests, a closed population of ten users; the sizes in turn."""
    model = load_cost_model("paper")
    arrays = [plan_arrays([build_plan(closed_population(size), 1, 0)]) for size in SIZES]
    for rules in ("paper", "vendor-0.12.0"):
        config = EngineConfig(8, (1, 2, 4, 8), 8, rules=rules)
        run_batch(arrays[0], config, model)

        def once(config: EngineConfig = config) -> list[float]:
            # A small plan is over in a millisecond: many of it make one sample.
            return [
                1 / per_cpu_s(lambda plans=plans, config=config: len(run_batch(plans, config, model).requests), 0.02)
                for plans in arrays
            ]

        spent_s = np.array([once() for _ in range(REPEATS)])
        slopes = 1 + np.polyfit(np.log(SIZES), np.log(spent_s.T), 1)[0]
        error = slopes.std(ddof=1) / REPEATS**0.5
        yield Figure(
            f"us per request, rules {rules}",
            ", ".join(f"{each * 1e6:.2f}" for each in np.median(spent_s, axis=0)),
            "exponent <= 1",
            f"plans of {', '.join(f'{size:,}' for size in SIZES)} requests; exponent {slopes.mean():.3f} +- {error:.3f}"
            f" (standard error of {REPEATS}); {state_bytes(arrays[-1], config, SIZES[-1]):.0f} bytes a request beside"
            f" the plan (mark: <= {MOST_BYTES})",
        )


def state_bytes(arrays: PlanArrays, config: EngineConfig, num_requests: int) -> float:
    """Bytes of all tables of a simulation beside its plan, a request."""
    tables = (*new_state(config, num_requests), *new_scratch(arrays), *new_outcome(arrays, config))
    return sum(cast("Any", table).nbytes for table in tables) / num_requests


def recorded() -> Iterator[Figure]:
    """A made-up production trace of as many requests as Mooncake's conversation trace, on 8,192-token slots."""
    rng = random.Random(20260910)
    recordings = [made_up_arrival(rng, place) for place in range(TRACE_REQUESTS)]
    model, config = load_cost_model("paper"), EngineConfig(8, (1, 2, 4, 8), 8)
    for divisor in (16, 4):
        how = Lowering(shrink=divisor, max_context_tokens=8000, arrivals="recorded")
        sessions, block_tokens, _ = sessions_of(recordings, 512, how, rng)
        plan = trace_of(sessions, block_tokens)
        head = trace_of(sessions[:NAIVE_SESSIONS], block_tokens)
        arrays = plan_arrays([plan])
        measured = in_turns(
            lambda arrays=arrays, plan=plan: plan.num_requests / cpu_s(lambda: run_batch(arrays, config, model)),
            lambda head=head: head.num_requests / cpu_s(lambda: naive_run(head, config, model)),
            REPEATS,
            f"the naive walk of its first {head.num_requests} requests",
            "more",
        )
        rate, tokens = max(measured.samples), sum(r.generate_tokens for s in plan.sessions for r in s.requests)
        yield Figure(
            f"a recorded trace at scale 1/{divisor}",
            f"{rate:,.0f} requests/s",
            ">= 500,000 /s",
            f"{plan.num_requests:,} requests, {1e6 / rate:.2f} us each, "
            f"{1e9 * plan.num_requests / rate / tokens:.1f} ns per generated token; "
            f"{state_bytes(arrays, config, plan.num_requests):.0f} bytes a request beside the plan",
            measured,
        )


def trace_of(sessions: Any, block_tokens: int) -> Plan:
    """The plan of a trace's sessions."""
    return Plan("trace", 1, 0, "as-drawn", 0, (1000, 150_000), sessions, block_tokens=block_tokens)


def made_up_arrival(rng: random.Random, place: int) -> Recording:
    """Lengths of a chat service: long prompts that share their first blocks with others, answers of some hundreds."""
    prompt = min(int(rng.lognormvariate(9, 1)), 120_000) + 1
    shared = min(rng.randrange(4), prompt // 512)
    blocks = (*range(shared), *(1000 + 1000 * place + at for at in range(shared, prompt // 512)))
    request = RecordedRequest(None, (), 0, "none", prompt, 0, rng.randint(20, 700), blocks)
    return Recording(str(place), place * NS_PER_S // 3, (request,))
