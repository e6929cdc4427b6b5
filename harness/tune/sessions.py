"""The goal "sessions": the most agents at a time whose targets in [slo] hold, predicted by bisection and then measured.

A number of agents holds where the wanted share of requests meets every target of a request, and the same share of
sessions the target of a session. Nothing is run here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tomli_w

from harness.analysis.serving import is_good, latencies, requests_in_window
from harness.analysis.sessions import session_times
from harness.analysis.stats import t_quantile
from harness.errors import SpecError
from harness.measure.records.run import SealedRun
from harness.model.plan.build import derive_seed
from harness.model.spec import ExperimentSpec, SloSpec
from harness.tune.capacity import ALPHA, Capacity, Point, Share, Verdict, most_shown
from harness.tune.confirm import base_condition, plain_table, server_of
from harness.tune.plans import SEED_RANGE, agents_key, agents_of
from harness.tune.targets import Counts, parts_of

LEAST_PLANS, MOST_PLANS = 12, 1_000
"""Measured plans of each number of agents."""
ROUNDS = 6
"""Measurements at most: the boundary and one step beyond, further out where these did not decide, then between."""
STEP_SHARE = 0.1
SKEWER = 1.25
"""Runs are more skewed than a sample of them shows."""


def check_goal(spec: ExperimentSpec) -> None:
    """SpecError where the goal cannot be searched for this experiment."""
    slo, server = spec.slo, server_of(spec)
    workload = spec.workload_of(base_condition(spec))
    if not (slo.is_set or slo.session_s):
        raise SpecError(
            "no target is set that could hold", where="tune.goal", hint="Set slo.ttft_ms, slo.itl_ms or slo.session_s"
        )
    if server.is_routed:
        raise SpecError("is searched for one server, not behind a router", where="tune.goal", hint='Say goal = "cost"')
    if agents_of(workload) is None:
        raise SpecError(
            "this workload has no number of agents at a time",
            where="tune.goal",
            hint="Set workload.concurrency, or workload.num_sessions of sessions that start together",
        )


def counts_of_run(run: SealedRun, slo: SloSpec) -> Counts:
    """What met its target in a sealed run; what was not answered met none."""
    requests = sessions = None
    if slo.is_set:
        requests = int(is_good(latencies(run), slo).sum()), len(requests_in_window(run))
    if slo.session_s is not None and (times := session_times(run)) is not None:
        sessions = times.num_within(slo.session_s), len(times.session)
    return Counts(requests, sessions)


def share_of(pairs: Sequence[tuple[int, int]], alpha: float) -> Share:
    """A share of sums over runs, of each run one draw: by Student's t, wider on the side of the rare runs (Johnson's
    correction for skewness), and never narrower than runs can show of which none is worse."""
    total, num = sum(of for _, of in pairs), len(pairs)
    share = sum(met for met, _ in pairs) / total
    if num < 2:
        return Share(share, 0.0, 1.0)
    left = np.array([(met - share * of) * num / total for met, of in pairs])
    sd, t = float(left.std(ddof=1)), t_quantile(1 - 2 * alpha, num - 1)
    half = t * sd / math.sqrt(num)
    shift = SKEWER * float((left**3).mean()) / sd**2 * (1 + 2 * t * t) / (6 * num) if sd else 0.0
    most = most_shown(num, alpha)
    low, high = min(most, share - half + min(shift, 0.0)), max(1 - most, share + half + max(shift, 0.0))
    return Share(share, max(0.0, low), min(1.0, high))


def point_of(agents: int, counts: Sequence[Counts], share: float) -> Point:
    """What the runs of one number of agents show. A number fails by either target, which share the error."""
    alpha = ALPHA / max(1, len(parts_of(counts)))
    requests, sessions = (
        None if None in column else share_of([pair for pair in column if pair is not None], alpha)
        for column in ([each.requests for each in counts], [each.sessions for each in counts])
    )
    shares = [each for each in (requests, sessions) if each is not None]
    verdict: Verdict = "open"
    if any(each.high < share for each in shares):
        verdict = "fails"
    elif all(each.low >= share for each in shares):
        verdict = "holds"
    return Point(agents, verdict, requests, sessions, len(counts))


def plans_needed(slo: SloSpec, share: float) -> int:
    """Plans by which a number of agents that misses no target is shown to hold, and half as many again."""
    alpha = ALPHA / (1 + bool(slo.is_set and slo.session_s))
    return max(LEAST_PLANS, math.ceil(1.5 * math.log(alpha) / math.log(share)))


def next_points(capacity: Capacity, most: int) -> list[int]:
    """The numbers of agents to measure next: the predicted boundary and one step beyond, then further out, until a
    number holds and a number fails; then between these, from both sides towards what is not told.

    Empty where nothing is left to measure.
    """
    start, step = max(capacity.predicted, 1), max(1, round(STEP_SHARE * capacity.predicted))
    known = {point.agents for point in capacity.points}
    if not known:
        return sorted({start, min(start + step, most)})
    wider = step * 2 ** (len(known) // 2)
    wanted: list[int] = []
    if capacity.high is not None and 0 < capacity.low < capacity.high:
        wanted = _between(capacity.low, capacity.high, sorted(known))
    if not capacity.low:
        wanted.append(max(1, min(known) - wider))
    if capacity.high is None:
        wanted.append(min(most, max(known) + wider))
    return [agents for agents in wanted if agents not in known]


def _between(low: int, high: int, known: Sequence[int]) -> list[int]:
    """Numbers that narrow an interval: in its thirds, else half way to those within it that are not told."""
    if within := [agents for agents in known if low < agents < high]:
        return [(low + within[0]) // 2, (within[-1] + high + 1) // 2]
    third = round((high - low) / 3)
    return sorted({low + third, high - third})


def round_text(
    spec: ExperimentSpec, wanted: Mapping[str, tuple[Mapping[str, Any], Sequence[int]]], plans: int, number: int
) -> str:
    """The experiment file of one measurement. wanted: by name the changed keys of [server] and numbers of agents."""
    own = spec.workload_of(base_condition(spec))
    conditions: list[dict[str, Any]] = [
        {
            "name": f"{name}-{agents}",
            "treatment": base_condition(spec).treatment,
            "server": keys,
            "workload": {agents_key(own): agents},
        }
        for name, (keys, points) in wanted.items()
        for agents in points
    ]
    table = plain_table(spec)
    table |= {
        "name": f"{spec.name[:52]}-agents-{number}",
        "title": f"{spec.title or spec.name}: agents at a time",
        "question": "How many agents at a time meet their targets?",
        "replicates": plans,
        "base_seed": derive_seed(spec.base_seed, f"tune/agents/{number}") % SEED_RANGE,
        "condition": conditions,
    }
    return "# Written by `harness tune`: new plans at these numbers of agents.\n" + tomli_w.dumps(table)
