"""How long decode steps really took: intervals between step stamps, where nothing else ran between them.

The log stamps a step when it begins; the interval to the next step is its duration when no prefill lies between and
n and b stay. A server's own report is read as it is. Nothing is modelled.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.clock import NS_PER_MS
from harness.records import SealedRun

IntArray = NDArray[np.int64]


def steady_steps(steps: pa.Table, kv_events: pa.Table) -> tuple[IntArray, IntArray]:
    """(places, durations in ns) of the steps that were followed at once by one of the same n and b, in their order.

    Steps without a stamp give nothing. Source of the order: ``kv_events.step`` counts decode steps logged before.
    """
    stamped = steps.column("log_ns")
    if steps.num_rows < 2 or stamped.null_count:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    n, b = steps.column("n").to_numpy(), steps.column("b").to_numpy()
    is_clean = (n[1:] == n[:-1]) & (b[1:] == b[:-1])
    is_alloc = np.array([kind == "alloc" for kind in kv_events.column("kind").to_pylist()], dtype=np.bool_)
    interrupted = kv_events.column("step").to_numpy()[is_alloc] if kv_events.num_rows else np.zeros(0, dtype=np.int64)
    inside = interrupted[(interrupted >= 1) & (interrupted < steps.num_rows)]
    is_clean[inside - 1] = False
    places = np.flatnonzero(is_clean)
    return places, np.diff(stamped.to_numpy())[places]


def steady_step_ns(steps: pa.Table, kv_events: pa.Table) -> dict[tuple[int, int], IntArray]:
    """Durations of ``steady_steps`` by (n, b), ns."""
    places, durations = steady_steps(steps, kv_events)
    n, b = (steps.column(name).to_numpy()[places] for name in ("n", "b"))
    pairs = sorted({(int(seqs), int(bucket)) for seqs, bucket in zip(n, b, strict=True)})
    return {(seqs, bucket): durations[(n == seqs) & (b == bucket)] for seqs, bucket in pairs}


def run_steady_step_ns(run: SealedRun) -> Mapping[tuple[int, int], IntArray]:
    """Durations of a run's undisturbed decode steps by (n, b), model ns."""
    return steady_step_ns(run.table("steps"), run.table("kv_events"))


def full_bucket_ms(run: SealedRun, bucket: int) -> float | None:
    """Median duration of steps with the bucket exactly full, ms; None when there was none."""
    durations = run_steady_step_ns(run).get((bucket, bucket))
    return None if durations is None or not len(durations) else float(np.median(durations)) / NS_PER_MS


def reported_model_ms(run: SealedRun, bucket: int) -> float | None:
    """The server's own median model time (p50) with the bucket exactly full, ms; None where it did not report one.

    The report (VLLM_RBLN_METRICS) pools all decode steps of a server's life, so it tells of a bucket only when every
    step of the run had it full. Its resolution is 0.01 ms; the paper's Tables S2 and S3 print this figure.
    """
    reported = run.launch.decode_p50_ms("MODEL")
    if reported is None:
        return None
    steps = run.table("steps")
    pairs = set(zip(steps.column("n").to_pylist(), steps.column("b").to_pylist(), strict=True))
    return reported if pairs == {(bucket, bucket)} else None
