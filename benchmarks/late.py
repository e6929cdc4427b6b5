"""Does a client that reads late say so? Replays through a stamping proxy, beside busy processes and on a quiet machine.

``python -m benchmarks late``: 20 replays beside two busy processes for each core, then 5 without them.
Each is judged as a run is. The server is the null server: a token to each of 16 sessions every 4 ms.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from statistics import fmean, median
from typing import NamedTuple

from benchmarks.figure import Figure
from benchmarks.wire import Seen, wire
from harness.analysis.validity.stalls import check_read_together
from harness.clock import NS_PER_MS
from harness.measure.client.null_server import NullServer, NullServerConfig
from harness.measure.client.run import ReplayResult, replay
from harness.measure.client.self_audit import null_target
from harness.measure.records.manifest import Manifest
from harness.model.plan.build import draw_plan
from harness.model.plan.model import Plan
from harness.model.spec import ClientSpec, WorkloadSpec
from harness.processes import num_cores

NUM_BUSY, NUM_QUIET = 20, 5
NUM_TOKENS, TOKEN_INTERVAL_MS = 40, 4
FAR_MS, NEAR_MS = 5.0, 0.2
WORKLOAD = WorkloadSpec.model_validate(
    {
        "num_sessions": 16,
        "requests_per_session": 3,
        "waits": "none",
        "prompt_tokens": {"distribution": "fixed", "value": 300},
        "generate_tokens": {"distribution": "fixed", "value": NUM_TOKENS},
    }
)


class LateRun(NamedTuple):
    """A replay beside the wire. apart_ms: mean of its TTFT less the wire's. bound_ms: what the client allows for it.

    severity: of its finding ``read-together``, "invalid" or "warning"; "" without one.
    """

    apart_ms: float
    bound_ms: float
    severity: str

    @property
    def is_held(self) -> bool:
        """Whether the run says of itself what the wire shows."""
        return abs(self.apart_ms) <= FAR_MS or bool(self.severity)


@contextmanager
def busy_cores(num_processes: int) -> Generator[None]:
    """So many processes that never rest."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def late_run(plan: Plan) -> LateRun:
    """One replay through the proxy, beside what the proxy saw."""
    config = NullServerConfig(token_interval_ns=TOKEN_INTERVAL_MS * NS_PER_MS, keeps_stamps=False)
    with NullServer(config) as server, wire(f"http://{server.host}:{server.port}") as proxy:
        port = int(proxy.url.rpartition(":")[2])
        result = replay(plan, null_target("127.0.0.1", port, ClientSpec()))
    return beside_wire(result, proxy.seen(NUM_TOKENS))


def beside_wire(result: ReplayResult, seen: list[Seen]) -> LateRun:
    """A replay beside the wire."""
    of_wire_ms = {each.request_id: each.ttft_ms for each in seen}
    first_ns: dict[tuple[int, int], int] = {}
    for chunk in result.chunks.to_table().to_pylist():
        first_ns.setdefault((chunk["session"], chunk["request"]), chunk["kernel_ns"] or chunk["received_ns"])
    apart_ms = [
        (first_ns[row["session"], row["request"]] - row["sent_ns"]) / NS_PER_MS - of_wire_ms[row["request_id"]]
        for row in result.requests.to_pylist()
    ]
    findings = check_read_together(Manifest.model_construct(client_audit=result.audit, requested={}))
    facts = result.audit["read_together"]["first"]
    return LateRun(fmean(apart_ms), facts["sum_ms"] / facts["num"], next((each.severity for each in findings), ""))


def bench_late() -> Iterator[Figure]:
    """TTFT beside the wire's: what differs by more than 5 ms is marked, and on a quiet machine nothing differs."""
    plans = [draw_plan(WORKLOAD, 1, seed) for seed in range(NUM_BUSY + NUM_QUIET)]
    with busy_cores(2 * num_cores()):
        busy = [late_run(plan) for plan in plans[:NUM_BUSY]]
    quiet = [late_run(plan) for plan in plans[NUM_BUSY:]]
    far = [run for run in busy if abs(run.apart_ms) > FAR_MS]
    invalid = [run for run in far if run.severity == "invalid"]
    yield Figure(
        "busy: runs that say what the wire shows",
        f"{sum(run.is_held for run in busy)} of {len(busy)}",
        f"{len(busy)} of {len(busy)}",
        f"{len(far)} differ by more than {FAR_MS:g} ms: {len(invalid)} of them INVALID, "
        f"{sum(bool(run.severity) for run in far) - len(invalid)} more with the finding",
    )
    yield _apart("busy: TTFT less the wire's", busy, "")
    yield _apart("quiet: TTFT less the wire's", quiet, f"<= {NEAR_MS} ms")


def _apart(name: str, runs: list[LateRun], mark: str) -> Figure:
    apart, bounds = [run.apart_ms for run in runs], [run.bound_ms for run in runs]
    value = f"{median(apart):.3f} ms [{min(apart):.3f} .. {max(apart):.3f}]"
    note = f"the client's bound: {median(bounds):.3f} ms [{min(bounds):.3f} .. {max(bounds):.3f}]"
    return Figure(name, value, mark, f"mean of a run, median and range of {len(runs)} runs; {note}")
