"""How much memory a replay needs: the growth of a process of its own, so that nothing else is in the figure."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.figure import resident_bytes
from harness.clock import NS_PER_S
from harness.errors import ServerError
from harness.measure.client.run import ReplayResult, replay
from harness.measure.client.self_audit import null_target
from harness.model.plan.model import Plan
from harness.model.spec import ClientSpec

REQUEST_TIMEOUT_NS = 120 * NS_PER_S
# Writing 5 makes the kernel count the peak from now on (proc_pid_clear_refs(5)).
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


def require_answered(result: ReplayResult) -> None:
    """ServerError with the first problem, unless every request was answered as planned."""
    failed = [error for error in result.requests["error"].to_pylist() if error]
    if failed:
        raise ServerError(f"{len(failed)} requests failed, the first with: {failed[0]}", where="null server")


def replay_growth_bytes(small: Plan, plan: Plan, host: str, port: int) -> int:
    """Peak resident bytes of a replay above those before it, prompts and finished tables included.

    small: replayed first, for all that is there once in a process: libraries, compiled code.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_growth_bytes, small, plan, host, port).result()


def _growth_bytes(small: Plan, plan: Plan, host: str, port: int) -> int:
    target = null_target(host, port, ClientSpec(), request_timeout_ns=REQUEST_TIMEOUT_NS)
    replay(small, target)
    CLEAR_REFS.write_text(RESET_PEAK)
    before = resident_bytes("VmRSS")
    result = replay(plan, target)
    growth = resident_bytes("VmHWM") - before
    require_answered(result)
    return growth
