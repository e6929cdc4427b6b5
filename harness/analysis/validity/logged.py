"""Whether the log can be what the server did: step sizes, slots of requests, lines of prefills.

Definitions: docs/reference/method.md, "A run and its invariants".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.analysis.run_tables import join_request_id
from harness.analysis.validity.evidence import Evidence
from harness.errors import SpecError
from harness.measure.records.manifest import Finding, Manifest, invalid
from harness.measure.records.schema import rows_where, values_of
from harness.model.engine.config import EngineConfig
from harness.model.spec import ServerSpec

if TYPE_CHECKING:
    from harness.analysis.logs.derived import Derived
    from harness.stacks.vllm.step_log import StepLog

IntArray = NDArray[np.int64]
_LOST = "Lines of the log were lost or changed: measure again, and keep server.log"


def check_log_lines(run: Evidence) -> Iterator[Finding]:
    """Findings about the lines of a run's log. requests: REQUESTS schema."""
    if run.derived.step_log is not None:
        yield from _check_graph_sizes(run.derived.step_log)
    elif run.derived.steps_source == "bucket-log":
        yield from _check_compiled_sizes(run.derived.tables["steps"], run.manifest.decode_buckets)
    if run.derived.num_kv_lines and _logs_slots(run.manifest):
        yield from _check_slots(run.requests, run.derived)


def _logs_slots(manifest: Manifest) -> bool:
    """Whether the log tells slots apart. Under the paper's rules no slot has a line of its own."""
    try:
        return EngineConfig.from_server(ServerSpec.model_validate(manifest.requested_server).replica).has_inner_blocks
    except (SpecError, ValueError):
        return True


def smallest_size(sizes: tuple[int, ...], n: IntArray) -> IntArray:
    """The smallest size that holds each n; 0 where none does. sizes: in any order."""
    ascending = np.array(sorted(set(sizes)), dtype=np.int64)
    return np.append(ascending, 0)[np.searchsorted(ascending, n)]


def _check_compiled_sizes(steps: pa.Table, sizes: tuple[int, ...]) -> Iterator[Finding]:
    if not sizes:
        return
    n, b = (steps[name].to_numpy().astype(np.int64) for name in ("n", "b"))
    wrong = np.flatnonzero(smallest_size(sizes, n) != b)
    if len(wrong):
        first = wrong[0]
        yield invalid(
            "step-size",
            f"{len(wrong):,} of {len(n):,} decode steps have a size that is not the smallest of {sorted(sizes)} for "
            f"their requests, first step {first}: [BUCKET] request_nums={n[first]} padded_batch_size={b[first]}",
            "Give the compiled sizes in server.decode_buckets; if they are right, lines of the log were changed",
        )


def _check_graph_sizes(log: StepLog) -> Iterator[Finding]:
    """The size of a step with a graph is the smallest captured one; a step without a graph has no padding.

    Drafts change the captured sizes after the header was written. Between data-parallel engines a step is padded to the
    largest of them, and without a graph tensor-parallel ones may pad to a multiple of their number. A header without
    sizes says nothing of steps with a graph.
    Source: vLLM 0.30.0, v1/cudagraph_dispatcher.py and v1/worker/gpu_model_runner.py.
    """
    if log.effective.get("num_speculative_tokens") is not None or (log.effective.get("data_parallel_size") or 1) != 1:
        return
    sizes = tuple(log.settings.get("decode_buckets", ()))
    ranks = log.effective.get("tensor_parallel_size") or 1
    steps = log.decode_steps
    n, b = (steps[name].to_numpy().astype(np.int64) for name in ("n", "b"))
    is_unpadded = (b == n) | (b == -(-n // ranks) * ranks)
    is_eager = np.array([mode in (None, "NONE") for mode in steps["runtime_mode"].to_pylist()], dtype=np.bool_)
    is_smallest = smallest_size(sizes, n) == b if sizes else np.ones(len(n), dtype=np.bool_)
    wrong = np.flatnonzero(~np.where(is_eager, is_unpadded, is_smallest))
    if len(wrong):
        first = int(wrong[0])
        yield invalid(
            "step-size",
            f"{len(wrong):,} of {len(n):,} decode steps have a size that vLLM would not choose from "
            f"{sorted(sizes) or 'no captured sizes'}, first step {first} with {n[first]} requests in size {b[first]}, "
            f"graph mode {steps['runtime_mode'][first].as_py()}",
            "Lines of the step log were changed, or its header is of another server",
        )


def _check_slots(requests: pa.Table, derived: Derived) -> Iterator[Finding]:
    slots = derived.slots
    if slots.num_contradictions:
        evidence = f"{slots.num_contradictions:,} lines contradict those before them, first: {slots.first}"
        yield invalid("slots-inconsistent", evidence, _LOST)
    if slots.num_prefill_lines and slots.num_unprefilled:
        yield invalid(
            "prefill-missing",
            f"{slots.num_unprefilled:,} requests were given slots, and the log has no line of their prefill, first "
            f"{slots.first_unprefilled}",
            _LOST,
        )
    answered = [name for name, status in values_of(requests, "response_id", "status") if name and status == "ok"]
    allocated = rows_where(derived.tables["kv_events"], "kind", "alloc").column("request_id").unique().to_pylist()
    named = dict.fromkeys(answered)
    given = {join_request_id(log_id, named) for log_id in allocated}
    if lacking := [name for name in named if name not in given]:
        yield invalid(
            "slots-inconsistent",
            f"{len(lacking):,} answers have no line that gives them slots, first {lacking[0]}",
            _LOST,
        )
