"""How late the harness itself was: a result of every run, in wall time of the client's machine.

Rows are in model ns; lateness is divided by the clock's scale, because the machine is late in wall time. Nothing here
judges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.clock import NS_PER_MS

# Model ns that converting a wall instant to model time and back may lose.
ROUNDING_NS = 2


@dataclass(frozen=True, slots=True)
class Lateness:
    """Real send minus intended send, wall ms.

    rearrival_ms: ascending, one per sent request that followed another one. start_ms: one per session of the common
    start. num_early: requests that left before they were due.
    """

    rearrival_ms: NDArray[np.float64]
    start_ms: NDArray[np.float64]
    num_early: int

    @property
    def start_spread_ms(self) -> float | None:
        """Latest minus earliest start of the sessions that start together; None when none started."""
        return float(self.start_ms.max() - self.start_ms.min()) if len(self.start_ms) else None

    @property
    def rearrival_p50_ms(self) -> float | None:
        return self.rearrival_quantile_ms(0.5)

    @property
    def rearrival_p99_ms(self) -> float | None:
        return self.rearrival_quantile_ms(0.99)

    def rearrival_quantile_ms(self, quantile: float) -> float | None:
        """The quantile as a value that occurred, the next one up: with few re-arrivals p99 is the largest."""
        if not len(self.rearrival_ms):
            return None
        return float(np.quantile(self.rearrival_ms, quantile, method="higher"))


def lateness(requests: pa.Table, scale: float) -> Lateness:
    """The harness's lateness in one run.

    requests: columns session, request, trigger_ns, due_ns, sent_ns. scale: model ns per wall ns.
    """
    trigger_ns = requests.column("trigger_ns").to_numpy()
    sent = requests.column("sent_ns")
    is_sent = sent.is_valid().to_numpy()
    # int64 throughout: a float64 cannot hold nanoseconds of uptime.
    late_ns = sent.fill_null(0).to_numpy() - requests.column("due_ns").to_numpy()
    first = requests.column("request").to_numpy() == 0
    # A request that was never sent may have no true trigger: it must not move the common start.
    is_start = first & (trigger_ns == trigger_ns[is_sent].min()) if is_sent.any() else first
    wall_ms = late_ns / (scale * NS_PER_MS)
    return Lateness(
        rearrival_ms=np.sort(wall_ms[is_sent & ~is_start]),
        start_ms=wall_ms[is_sent & is_start],
        num_early=int(np.count_nonzero(is_sent & (late_ns < -ROUNDING_NS * max(1.0, scale)))),
    )
