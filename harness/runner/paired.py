"""Compares two sealed runs of one plan, with and without observation: tokens, steps and the cost of observing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.analysis.logs.engine_steps import observed_log, step_log_of, unlike_observed
from harness.analysis.run_tables import RequestKey
from harness.analysis.stats import Bootstrap, Interval, StatisticName, bootstrap_interval
from harness.errors import RecordsError, SpecError, faults_of
from harness.kinds import kind_named
from harness.measure.records.run import SealedRun
from harness.model.experiment import resolve
from harness.model.spec import ConditionSpec, ExperimentSpec
from harness.runner.experiment import checked, run_experiment, what_to_do
from harness.runner.progress import ProgressSink, StopFlag, silent
from harness.table import interval_text

PLAIN, OBSERVED = "plain", "observed"
INTERVAL_SEED = 20261121
CHECK_SEED = 20270404


@dataclass(frozen=True, slots=True)
class PairOutcome:
    """is_same: every request was answered with identical tokens, and the decode work was equal."""

    is_same: bool
    lines: tuple[str, ...]


def paired_spec(spec: ExperimentSpec, backend: str | None = None) -> ExperimentSpec:
    """An experiment with the first condition of ``spec`` in two forms: plain, and with patch and observer.

    A vLLM itself has an observer alone. Raises SpecError for a backend with nothing to observe from inside.
    """
    kind = kind_named(backend or spec.backend)
    has_patch = kind.has_stack
    if not has_patch and not kind.has_observer:
        raise SpecError(
            f"backend {kind.name!r} starts no vllm-rbln or vLLM to observe",
            where="server patch check",
            hint="Use --backend rbln on an NPU server, --backend vllm, or --backend twin anywhere",
        )
    first = spec.condition[0]
    table: dict[str, Any] = spec.model_dump(exclude={"condition", "baseline"})
    server = {key: value for key, value in first.server.items() if key not in {"patch", "observer"}}
    pair = [
        ConditionSpec(
            name=name,
            treatment=first.treatment,
            workload=first.workload,
            server={**server, **({"patch": patch} if has_patch else {}), "observer": name == OBSERVED},
        )
        for name, patch in ((PLAIN, "none"), (OBSERVED, "overlay"))
    ]
    return ExperimentSpec.model_validate(
        {
            **table,
            "name": f"{spec.name}-check"[:64],
            "backend": kind.name,
            "replicates": 1,
            "rules": (),
            # A plan of the experiment itself would be one that its freeze has to refuse.
            "base_seed": CHECK_SEED,
            "condition": [condition.model_dump() for condition in pair],
        }
    )


def check_pair(asked: ExperimentSpec, pair: ExperimentSpec, runs_root: Path) -> None:
    """Where the pair cannot be run, every fault of the experiment itself, by the names of its own conditions."""
    if faults_of(lambda: checked(resolve(pair))):
        what_to_do(asked, runs_root, resume=True, retry_invalid=False, authorization=None)


def run_paired(
    spec: ExperimentSpec,
    runs_root: Path,
    *,
    resume: bool = False,
    on_progress: ProgressSink = silent,
    stop: StopFlag | None = None,
) -> PairOutcome | None:
    """Perform both runs of a ``paired_spec`` and compare them; None when the user stopped before both were sealed.

    resume: compare runs that are sealed already, and perform only what is missing.
    """
    outcome = run_experiment(spec, runs_root=runs_root, resume=resume, on_progress=on_progress, stop=stop)
    runs = {run.condition: run for run in outcome.runs}
    if outcome.was_interrupted and set(runs) != {PLAIN, OBSERVED}:
        return None
    if set(runs) != {PLAIN, OBSERVED}:
        raise RecordsError("one of the two runs is missing", where=str(runs_root / spec.name), hint="Run it again")
    return compare_pair(runs[PLAIN], runs[OBSERVED])


def compare_pair(plain: SealedRun, observed: SealedRun) -> PairOutcome:
    """Compare two sealed runs of one plan, the second one observed."""
    rows = [_tokens(run) for run in (plain, observed)]
    different = sorted(key for key in rows[0].keys() | rows[1].keys() if rows[0].get(key) != rows[1].get(key))
    num_empty = sum(digest == "" for digest in rows[0].values())
    steps = [
        [(row["n"], row["b"]) for row in run.table("steps").select(["n", "b"]).to_pylist()] for run in (plain, observed)
    ]
    sums = [_num_decoded(run) for run in (plain, observed)]
    # Arrivals are in real time: requests may be grouped into other steps, but the work must be equal.
    same_order = steps[0] == steps[1]
    lines = [
        f"tokens: {len(rows[0]) - len(different)} of {len(rows[0])} answers identical"
        + (f", first different {different[0]}" if different else "")
        + (f"; {num_empty} answers without token ids" if num_empty else ""),
        f"decode tokens: {sums[0]} plain, {sums[1]} observed; "
        + (
            "the same batches in the same order"
            if same_order
            else f"in {len(steps[0])} and {len(steps[1])} steps: requests arrive in real time, so batches may differ"
        ),
    ]
    if unlike := unlike_observed(observed):
        lines.append(f"observer and log of the observed run differ: {unlike}")
    lines += _costs(plain, observed)
    for run in (plain, observed):
        lines += [f"{run.condition} is INVALID: {reason}" for reason in run.invalid_reasons]
    is_same = not (different or num_empty or unlike) and sums[0] == sums[1] and plain.is_valid and observed.is_valid
    lines.append(
        "the same: observing changed neither an answer nor the decode work"
        if is_same
        else "NOT shown to be the same: see above; do not measure with this observer before that is explained"
    )
    return PairOutcome(is_same, tuple(lines))


def _num_decoded(run: SealedRun) -> int:
    """Tokens that the steps decoded. Of a vLLM itself all that they generated: its mixed steps decode too."""
    log = step_log_of(run)
    tokens = run.table("steps")["n"] if log is None else log.steps["generated_tokens"]
    return sum(tokens.drop_null().to_pylist())


def _tokens(run: SealedRun) -> dict[RequestKey, str]:
    table = run.table("requests").select(["session", "request", "token_digest"]).to_pylist()
    return {(row["session"], row["request"]): row["token_digest"] or "" for row in table}


def _costs(plain: SealedRun, observed: SealedRun) -> list[str]:
    """The cost of observing: the observer's measurement, and the token period with and without it."""
    lines: list[str] = []
    log = observed_log(observed) or step_log_of(observed)
    # The cost of a step is in the record of the step after it.
    costs_us = [cost / 1000 for cost in log.steps["logger_ns"].to_pylist()[1:]] if log is not None and log.cores else []
    if log is not None and costs_us:
        named = ", ".join(f"{count} {kind}" for kind, count in sorted(log.num_by_kind.items()))
        median, mean = (_interval(costs_us, "steps", name) for name in ("median", "mean"))
        lines.append(
            f"observer: {_bounds(median, 'us')} a step (median), {_bounds(mean, 'us')} (mean), "
            f"{max(costs_us):.0f} us longest; {named} steps"
        )
    periods = [_token_periods_ms(run) for run in (plain, observed)]
    # A device without modelled time has periods of 0, which have no percentage.
    both = sorted(place for place in periods[0].keys() & periods[1].keys() if periods[0][place] > 0)
    if both:
        changes = [100 * (periods[1][place] / periods[0][place] - 1) for place in both]
        change = _interval(changes, "answers", "median")
        before, after = (float(np.median([of_run[place] for place in both])) for of_run in periods)
        ends = interval_text(change.low, change.high, 2, " %, ", "+f")
        lines.append(
            f"token period: medians {before:.3f} ms plain, {after:.3f} ms observed; of each answer against itself, "
            f"median change {change.estimate:+.2f} % [{ends} %] (95 % bootstrap interval, {len(both)} answers)"
        )
    else:
        lines.append("token period: not known, as no answer of both runs has tokens that the client read one by one")
    for tracker, timed in (("MODEL", "the model's call"), ("SAMPLER", "sampling")):
        p50 = [run.launch.decode_p50_ms(tracker) for run in (plain, observed)]
        if None not in p50:
            lines.append(f"{timed} in a decode step, by vllm-rbln ({tracker}), p50: {p50[0]} and {p50[1]} ms")
    return lines


def _interval(values: Sequence[float], unit: str, statistic: StatisticName) -> Interval:
    return bootstrap_interval(values, Bootstrap(INTERVAL_SEED, 2_000), unit=unit, statistic=statistic)


def _bounds(interval: Interval, unit: str) -> str:
    return f"{interval.estimate:.0f} [{interval_text(interval.low, interval.high, 0, ', ')}] {unit}"


def _token_periods_ms(run: SealedRun) -> dict[RequestKey, float]:
    """Median time between chunks of each answer with at least three chunks."""
    chunks = run.table("chunks").select(["session", "request", "received_ns"])
    columns = [np.asarray(chunks[name]) for name in ("session", "request", "received_ns")]
    order = np.lexsort(columns[::-1])
    session, request, received_ns = (column[order] for column in columns)
    same = (session[1:] == session[:-1]) & (request[1:] == request[:-1])
    gaps: defaultdict[RequestKey, list[float]] = defaultdict(list)
    for at in np.flatnonzero(same):
        gaps[int(session[at]), int(request[at])].append(float(received_ns[at + 1] - received_ns[at]) / 1e6)
    return {place: float(np.median(of_answer)) for place, of_answer in gaps.items() if len(of_answer) > 1}
