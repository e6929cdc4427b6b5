"""The same plan with and without observation: are the tokens the same, are the steps, and what does observing cost?

Both runs are ordinary sealed runs; nothing but them is looked at. Next: ``harness patch check`` prints the lines.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.analysis.observer import OBSERVER_FILE, load_observer
from harness.errors import RecordsError
from harness.live.patch_check import OBSERVED, PLAIN
from harness.records import SealedRun
from harness.runner.experiment import run_experiment
from harness.runner.progress import ProgressSink, silent
from harness.spec import ExperimentSpec


@dataclass(frozen=True, slots=True)
class PairOutcome:
    """is_same: every request was answered with identical tokens, and the decode work was equal."""

    is_same: bool
    lines: tuple[str, ...]


def run_paired(spec: ExperimentSpec, runs_root: Path, *, on_progress: ProgressSink = silent) -> PairOutcome:
    """Perform both runs of a ``paired_spec`` and compare them."""
    outcome = run_experiment(spec, runs_root=runs_root, on_progress=on_progress)
    runs = {run.condition: run for run in outcome.runs}
    if set(runs) != {PLAIN, OBSERVED}:
        raise RecordsError("one of the two runs is missing", where=str(runs_root / spec.name), hint="Run it again")
    return compare_pair(runs[PLAIN], runs[OBSERVED])


def compare_pair(plain: SealedRun, observed: SealedRun) -> PairOutcome:
    """Compare two sealed runs of one plan, the second one observed."""
    rows = [_tokens(run) for run in (plain, observed)]
    different = sorted(key for key in rows[0].keys() | rows[1].keys() if rows[0].get(key) != rows[1].get(key))
    num_empty = sum(digest == "" for digest in rows[0].values())
    steps = [_decode_steps(run) for run in (plain, observed)]
    sums = [sum(n for n, _ in one) for one in steps]
    # Arrivals are in real time, so that the grouping of requests into steps may differ; the work may not.
    same_order = steps[0] == steps[1]
    lines = [
        f"tokens: {len(rows[0]) - len(different)} of {len(rows[0])} answers identical"
        + (f", first different {different[0]}" if different else "")
        + (f"; {num_empty} answers without token ids" if num_empty else ""),
        f"decode tokens: {sums[0]} plain, {sums[1]} observed; steps (n in order) "
        + ("identical" if same_order else f"differ ({len(steps[0])} and {len(steps[1])} steps, as timing has it)"),
    ]
    lines += _costs(plain, observed)
    for run in (plain, observed):
        lines += [f"{run.condition} is INVALID: {reason}" for reason in run.invalid_reasons]
    is_same = not different and not num_empty and sums[0] == sums[1] and plain.is_valid and observed.is_valid
    return PairOutcome(is_same, tuple(lines))


def _tokens(run: SealedRun) -> dict[tuple[int, int], str]:
    table = run.table("requests").select(["session", "request", "token_digest"]).to_pylist()
    return {(row["session"], row["request"]): row["token_digest"] or "" for row in table}


def _decode_steps(run: SealedRun) -> list[tuple[int, int]]:
    return [(row["n"], row["b"]) for row in run.table("steps").select(["n", "b"]).to_pylist()]


def _costs(plain: SealedRun, observed: SealedRun) -> list[str]:
    """What observing took: the observer's own account, and the token period with and without."""
    lines: list[str] = []
    path = observed.path / OBSERVER_FILE
    if path.is_file():
        records = load_observer(path)
        cost = records.cost_us
        kinds = Counter(records.steps["kind"].to_pylist())
        named = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        if cost:
            lines.append(
                f"observer: {cost['p50']:.0f} us a step (median), {cost['mean']:.0f} us mean, {cost['max']:.0f} us "
                f"longest; {named} steps"
            )
    periods = [_token_period_ms(run) for run in (plain, observed)]
    if all(periods):
        change = periods[1] / periods[0] - 1
        lines.append(f"token period (median): {periods[0]:.3f} ms plain, {periods[1]:.3f} ms observed ({change:+.2%})")
    for tracker in ("MODEL", "SAMPLER"):
        p50 = [_metric(run, tracker) for run in (plain, observed)]
        if None not in p50:
            lines.append(f"{tracker} decode p50: {p50[0]} ms plain, {p50[1]} ms observed")
    return lines


def _token_period_ms(run: SealedRun) -> float:
    """Median time between two chunks of one answer, over all answers; 0 when nothing was streamed."""
    chunks = run.table("chunks").select(["session", "request", "received_ns"])
    if chunks.num_rows < 2:
        return 0.0
    columns = [np.asarray(chunks[name]) for name in ("session", "request", "received_ns")]
    order = np.lexsort(columns[::-1])
    session, request, received_ns = (column[order] for column in columns)
    same = (session[1:] == session[:-1]) & (request[1:] == request[:-1])
    gaps = np.diff(received_ns)[same]
    return float(np.median(gaps)) / 1e6 if len(gaps) else 0.0


def _metric(run: SealedRun, tracker: str) -> Any:
    launch: dict[str, Any] = run.manifest.effective.get("launch", {})
    return launch.get("device_metrics", {}).get(tracker, {}).get("decode", {}).get("p50_ms")
