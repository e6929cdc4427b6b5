"""How often an answer is withheld wrongly, and how often a wrong cost file is noticed, at the noise of a real server.

Runs are drawn: what the steps cost scatters a little between runs of the same plan, and time in flight over modelled
time scatters more, as the paper's ten restarts of one input do. No server runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from benchmarks.figure import Figure
from harness.analysis.compare.channels import Comparison, compare
from harness.analysis.compare.ratio import Family, Verdict
from harness.analysis.compare.stopping import PairedBlocks, looks_at
from harness.analysis.cost.agreement import MAX_TAU, Agreement
from harness.analysis.cost.reconstruct import ChannelA
from harness.analysis.figures import Lateness, ReuseFigures, RunFigures
from harness.analysis.stats import FloatArray
from harness.clock import NS_PER_S
from harness.model.spec.sections import StopSpec
from harness.tune.confirm import looks_within

EXPERIMENTS, SEED = 2_000, 20261125
NUM_BLOCKS = (3, 6, 12)
CHANGES = (0.0, -0.03, -0.1)
# What a cost file says, and what is true, where f of the changed sizes is 4 % too low in it.
REVERSED = (-0.033, 0.009)
RUN_S = 30.0
BUDGET = 24
WITHHELD = (Agreement.DIFFER, Agreement.CANNOT_TELL)


class Noise(NamedTuple):
    """A server's noise between runs of one plan: deviations of ln A and of ln(B / A); r/B of its runs."""

    name: str
    a_sd: float
    b_over_a_sd: float
    residual_share: float


NOISES = (Noise("N = 6", 0.0004, 0.019, 0.0377), Noise("N = 8", 0.008, 0.0065, 0.0372))

TEMPLATE = RunFigures(
    experiment="drawn",
    condition="",
    replicate=0,
    is_valid=True,
    treatment="",
    baseline="base",
    a=None,
    b_ns=0,
    has_steps=True,
    steps_by_n_b={},
    prompt_tokens=1,
    computed_prefill_tokens=1,
    cached_tokens=0,
    reuse=ReuseFigures(),
    evictions=None,
    waiting_session_ns=None,
    lateness=Lateness(np.zeros(0), np.zeros(0), 0),
    num_requests=1,
    num_failed=0,
    num_aborted=0,
    generated_tokens=1,
)


def side_of(noise: Noise, change_a: float, change_b: float, plans: FloatArray, rng: np.random.Generator) -> FloatArray:
    """ns of A and of B of runs of these plans, shape (runs, 2)."""
    a = np.log(RUN_S * NS_PER_S) + plans + rng.normal(0, noise.a_sd, len(plans))
    b = a - math.log1p(-noise.residual_share) + rng.normal(0, noise.b_over_a_sd, len(plans))
    return np.exp(np.column_stack([a + math.log1p(change_a), b + math.log1p(change_b)]))


def drawn_sides(
    noise: Noise, changes: tuple[float, float], num_blocks: int, rng: np.random.Generator
) -> list[list[RunFigures]]:
    """An experiment whose condition changes A and B by these shares, with plans of different sizes."""
    plans = rng.normal(0, 0.1, num_blocks)
    return [
        [
            replace(TEMPLATE, replicate=place, unit=place, a=ChannelA(round(a_ns), 0), b_ns=round(b_ns))
            for place, (a_ns, b_ns) in enumerate(side_of(noise, *of_side, plans, rng).tolist())
        ]
        for of_side in (changes, (0.0, 0.0))
    ]


def drawn_comparison(
    noise: Noise, changes: tuple[float, float], num_blocks: int, rng: np.random.Generator
) -> Comparison:
    """The comparison of ``drawn_sides``."""
    compared = compare("base", *drawn_sides(noise, changes, num_blocks, rng))
    assert compared is not None, "every block has both sides"
    return compared


class Shares(NamedTuple):
    """Shares of experiments by what is said of the channels; by_tau: withheld by the paper's tolerance, capped."""

    by_word: Counter[Agreement]
    by_tau: int
    num: int

    def of(self, *words: Agreement) -> float:
        return sum(self.by_word[word] for word in words) / self.num

    @property
    def error(self) -> float:
        withheld = self.of(*WITHHELD)
        return math.sqrt(max(withheld * (1 - withheld), 0.25 / self.num) / self.num)


def shares(noise: Noise, changes: tuple[float, float], num_blocks: int, num: int, seed: int = SEED) -> Shares:
    """What is said of ``num`` drawn experiments."""
    rng = np.random.default_rng([seed, num_blocks])
    made = [drawn_comparison(noise, changes, num_blocks, rng) for _ in range(num)]
    by_tau = 0
    for compared in made:
        assert compared.channels is not None, "drawn runs have both channels"
        tau = compared.channels.tau
        by_tau += compared.channels.difference > tau or tau > MAX_TAU
    return Shares(Counter(compared.agreement for compared in made), by_tau, num)


class Wrong(NamedTuple):
    """Of experiments whose truth is dearer: shares that say cheaper; that say so and that B would have noticed."""

    cheaper: float
    vouched: float
    silent: float


def wrong_signs(noise: Noise, num_blocks: int, num: int, seed: int = SEED) -> Wrong:
    """What is said of ``num`` experiments whose cost file turns the sign, REVERSED."""
    rng = np.random.default_rng([seed, num_blocks])
    said: Counter[Agreement] = Counter()
    for _ in range(num):
        compared = drawn_comparison(noise, REVERSED, num_blocks, rng)
        interval = compared.main.interval
        is_cheaper = interval is not None and interval.high < 1 and not compared.agreement.is_missing
        said[compared.agreement] += is_cheaper
    total = said.total()
    return Wrong(total / num, (total - said[Agreement.SILENT]) / num, said[Agreement.SILENT] / num)


def bench_channels(num_experiments: int = EXPERIMENTS) -> Iterator[Figure]:
    """Answers withheld although both channels changed alike, then those withheld where a cost file turns the sign."""
    yield from _wrong_signs(num_experiments)
    yield from _sequences(num_experiments // 5)
    for noise in NOISES:
        for num_blocks in NUM_BLOCKS:
            for change in CHANGES:
                found = shares(noise, (change, change), num_blocks, num_experiments)
                yield Figure(
                    f"withheld wrongly, {noise.name}, {num_blocks} blocks, {change:+.0%}",
                    f"{found.of(*WITHHELD):.3f}",
                    "<= 0.05",
                    f"agree {found.of(Agreement.AGREE):.3f}, no conflict {found.of(Agreement.NO_CONFLICT):.3f}, silent "
                    f"{found.of(Agreement.SILENT):.3f}; the paper's tolerance {found.by_tau / found.num:.3f}; Monte "
                    f"Carlo error {found.error:.3f}",
                )
    for noise in (*NOISES, Noise("emulator", 1e-4, 5e-4, 0.01)):
        for num_blocks in NUM_BLOCKS:
            found = shares(noise, REVERSED, num_blocks, num_experiments)
            yield Figure(
                f"wrong sign withheld, {noise.name}, {num_blocks} blocks",
                f"{found.of(*WITHHELD):.3f}",
                "",
                f"agree {found.of(Agreement.AGREE):.3f}; the paper's tolerance {found.by_tau / found.num:.3f}",
            )


def _wrong_signs(num_experiments: int) -> Iterator[Figure]:
    """How often the wrong word stands without the words that B cannot tell."""
    noises = (Noise("B noise .02", 0.0005, 0.02, 0.0377), *NOISES)
    for noise in noises:
        for num_blocks in NUM_BLOCKS:
            found = wrong_signs(noise, num_blocks, num_experiments)
            yield Figure(
                f"wrong sign, {noise.name}, {num_blocks} blocks: cheaper, B would notice",
                f"{found.vouched:.3f}",
                "<= 0.05",
                f"cheaper in all {found.cheaper:.3f}: beside {found.silent:.3f} stands that B cannot tell",
            )


class Ended(NamedTuple):
    """Shares of sequences that say cheaper, and that would have said it, were the channels not asked."""

    cheaper: float
    without: float


def sequences(noise: Noise, changes: tuple[float, float], num: int, stop: StopSpec, seed: int = SEED) -> Ended:
    """How stopping rules end on a device, where B is asked at each look."""
    rng = np.random.default_rng([seed, stop.budget])
    counts: Counter[str] = Counter()
    family = Family(is_checked=True, looks=stop.preset_looks)
    for _ in range(num):
        own, base = drawn_sides(noise, changes, stop.budget, rng)
        pairs = list(zip(own, base, strict=True))
        blocks = PairedBlocks("base", pairs, "a", family, is_predicted=False, is_measured=True)
        compared = blocks.compared(stop.budget)
        assert compared is not None, "every block has both sides"
        assert compared.a is not None, "drawn runs have both channels"
        looks = [look for look in looks_at(compared.a.of_blocks, stop) if look.verdict.is_answer]
        counts["without"] += bool(looks) and looks[0].verdict is Verdict.LOWER
        told = next((look for look in looks if not blocks.why_open(look, stop.margin)), None)
        counts["cheaper"] += told is not None and told.verdict is Verdict.LOWER
    return Ended(*(counts[name] / num for name in ("cheaper", "without")))


def _sequences(num_experiments: int) -> Iterator[Figure]:
    every = StopSpec(margin=0.005, budget=BUDGET)
    presets = [StopSpec(margin=0.01, budget=budget, looks=tuple(looks_within(budget))) for budget in (6, 12, BUDGET)]
    for noise in (Noise("B noise .02", 0.0005, 0.02, 0.0377), *NOISES):
        for name, changes in {"reversed": REVERSED, "true": (-0.033, -0.033)}.items():
            for stop in (every, *presets):
                found = sequences(noise, changes, num_experiments, stop)
                looks = "every block" if stop is every else f"tune, {stop.budget} plans"
                yield Figure(
                    f"sequence, {noise.name}, {name} costs, {looks}: cheaper",
                    f"{found.cheaper:.3f}",
                    "<= 0.05" if name == "reversed" else "",
                    f"B not asked {found.without:.3f}; {num_experiments} sequences",
                )
