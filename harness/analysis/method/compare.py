"""One condition against its baseline: ratios of what is comparable, their intervals, and whether both channels agree.

Totals are compared only where both did the same work, else cost per generated token. Agreement means something only
below MAX_TAU; what lies above is "cannot tell".
Definitions: docs/method.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from harness.analysis.method.devices import DeviceEffect, log_ratio_effect, log_ratio_interval
from harness.analysis.method.figures import RunFigures
from harness.analysis.method.reconstruct import agreement_tolerance, channel_agreement, cost_ratio, residual_ns
from harness.analysis.method.stats import Interval
from harness.records import Finding

# Channels that differ by more are never said to agree, however far apart the baseline's own are: the paper's effects
# are 1 to 14 %, and a tolerance of that size would call anything agreement.
MAX_TAU = 0.05


class Verdict(str, Enum):
    """Whether the two channels say the same of a comparison."""

    AGREE = "agree"
    DIFFER = "differ"
    CANNOT_TELL = "cannot tell"
    PREDICTED = "predicted"


class Work(NamedTuple):
    """What a condition was asked for and gave, summed over the replicates that are compared."""

    num_requests: int
    prompt_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One condition against its baseline over ``replicates`` on both channels.

    ratio_a, ratio_b: ratios of sums; per generated token where ``is_same_work`` is false, as are intervals and
    per_replicate, (replicate, ratio A, ratio B). request_ratio_a, request_ratio_b: per request. residual_share:
    r_BASE / B_BASE. intervals: of the mean log ratio over replicates; None below three. is_predicted: simulated, so
    that both channels are one model's. devices_a, devices_b: where several devices made the replicates, which are then
    whose means the intervals are of.
    """

    baseline: str
    replicates: tuple[int, ...]
    ratio_a: float
    ratio_b: float
    request_ratio_a: float
    request_ratio_b: float
    work: Work
    baseline_work: Work
    residual_share: float
    published_tau: float
    per_replicate: tuple[tuple[int, float | None, float | None], ...]
    interval_a: Interval | None = None
    interval_b: Interval | None = None
    is_predicted: bool = False
    devices_a: DeviceEffect | None = None
    devices_b: DeviceEffect | None = None

    @property
    def tau(self) -> float:
        """The paper's tolerance max(0.02, r_BASE / B_BASE), never above MAX_TAU."""
        return min(self.published_tau, MAX_TAU)

    @property
    def difference(self) -> float:
        """|ratio_A - ratio_B|."""
        return channel_agreement(self.ratio_a, self.ratio_b, self.tau).difference

    @property
    def verdict(self) -> Verdict:
        """What may be said of the channels; "cannot tell" where the baseline's own lie further apart than MAX_TAU."""
        if self.is_predicted:
            return Verdict.PREDICTED
        published, capped = (
            channel_agreement(self.ratio_a, self.ratio_b, tau) for tau in (self.published_tau, self.tau)
        )
        if self.published_tau > MAX_TAU and published.is_agreed:
            return Verdict.CANNOT_TELL
        return Verdict.AGREE if capped.is_agreed else Verdict.DIFFER

    @property
    def is_agreed(self) -> bool:
        return self.verdict is Verdict.AGREE

    @property
    def is_same_work(self) -> bool:
        return self.work == self.baseline_work


def compare(
    baseline: str, own: Sequence[RunFigures], base: Sequence[RunFigures], *, is_predicted: bool = False
) -> Comparison | None:
    """Compare valid runs of a condition with those of its baseline, over the replicates that both have.

    None without a common replicate, without channel A of one of them, or where the baseline cost nothing.
    """
    others = {(run.replicate, run.device): run for run in base}
    found = ((run, others.get((run.replicate, run.device))) for run in own)
    pairs = sorted(((run, other) for run, other in found if other is not None), key=_replicate)
    if not pairs or any(run.a is None for pair in pairs for run in pair):
        return None
    own_runs, base_runs = [run for run, _ in pairs], [run for _, run in pairs]
    base_a_ns, base_b_ns = (sum(map(of, base_runs)) for of in (_a_ns, _b_ns))
    work, base_work = _work(own_runs), _work(base_runs)
    if not base_a_ns or not base_b_ns or not all(work) or not all(base_work):
        return None
    by_token = [_tokens(runs) if work != base_work else [1.0] * len(pairs) for runs in (own_runs, base_runs)]
    per_unit = sum(by_token[1]) / sum(by_token[0])
    per_request = base_work.num_requests / work.num_requests
    ratio_a, ratio_b = (cost_ratio(map(of, own_runs), map(of, base_runs)) for of in (_a_ns, _b_ns))
    a, b = (
        [
            [of(run) / units for run, units in zip(runs, by_token[side], strict=True)]
            for side, runs in enumerate((own_runs, base_runs))
        ]
        for of in (_a_ns, _b_ns)
    )
    return Comparison(
        baseline=baseline,
        replicates=tuple(run.replicate for run in own_runs),
        ratio_a=ratio_a * per_unit,
        ratio_b=ratio_b * per_unit,
        request_ratio_a=ratio_a * per_request,
        request_ratio_b=ratio_b * per_request,
        work=work,
        baseline_work=base_work,
        residual_share=residual_ns(base_b_ns, base_a_ns) / base_b_ns,
        published_tau=agreement_tolerance(base_a_ns, base_b_ns),
        per_replicate=tuple((run.replicate, _ratio(a, place), _ratio(b, place)) for place, run in enumerate(own_runs)),
        interval_a=log_ratio_interval(a[0], a[1], own_runs),
        interval_b=log_ratio_interval(b[0], b[1], own_runs),
        is_predicted=is_predicted,
        devices_a=log_ratio_effect(a[0], a[1], own_runs),
        devices_b=log_ratio_effect(b[0], b[1], own_runs),
    )


def _replicate(pair: tuple[RunFigures, RunFigures]) -> int:
    return pair[0].replicate


def _a_ns(run: RunFigures) -> int:
    return 0 if run.a is None else run.a.total_ns


def _b_ns(run: RunFigures) -> int:
    return run.b_ns


def _work(runs: Sequence[RunFigures]) -> Work:
    return Work(
        sum(run.num_requests for run in runs),
        sum(run.prompt_tokens for run in runs),
        sum(run.generated_tokens for run in runs),
    )


def _tokens(runs: Sequence[RunFigures]) -> list[float]:
    return [float(run.generated_tokens) for run in runs]


def _ratio(costs: Sequence[Sequence[float]], place: int) -> float | None:
    return costs[0][place] / costs[1][place] if costs[1][place] else None


def check_channels(runs: Sequence[RunFigures]) -> list[Finding]:
    """What the channels of single runs say against their cost model, or about what it was fitted on."""
    findings: list[Finding] = []
    for run in runs:
        if run.is_valid and run.r_ns is not None and run.r_ns < 0:
            findings.append(
                Finding(
                    code="residual-negative",
                    severity="warning",
                    evidence=f"{run.label}: channel A exceeds channel B by {-run.r_ns / 1e9:.6f} s",
                    hint="The cost model asks more than the server took: calibrate it on this server",
                )
            )
        if run.is_valid and run.r_ns is not None and run.r_ns > MAX_TAU * run.b_ns:
            findings.append(
                Finding(
                    code="channels-apart",
                    severity="warning",
                    evidence=f"{run.label}: channel A explains {(run.b_ns - run.r_ns) / 1e9:.3f} s of "
                    f"{run.b_ns / 1e9:.3f} s that channel B saw; r/B = {run.r_ns / run.b_ns:.3f}, above {MAX_TAU:g}",
                    hint="No comparison with it can say that the channels agree. Calibrate the cost model on this "
                    "server; limits.residual_share makes such runs INVALID",
                )
            )
        if run.a is not None and run.a.context_problem:
            findings.append(
                Finding(
                    code="context-unknown",
                    severity="warning",
                    evidence=f"{run.label}: steps were priced without their contexts ({run.a.context_problem})",
                    hint="Turn the [PFX] log on, or use a cost model without a context term",
                )
            )
        if run.a is not None and (run.a.num_extrapolated_steps or run.a.num_extrapolated_prefills):
            findings.append(
                Finding(
                    code="cost-extrapolated",
                    severity="info",
                    evidence=f"{run.label}: {run.a.num_extrapolated_steps} steps and {run.a.num_extrapolated_prefills} "
                    "prefills lie outside what the cost model was fitted on",
                )
            )
    return findings
