"""Draws many plans straight into the tables of the compiled simulator, without a Plan object for each.

Replicates of a drawn workload differ only in lengths and waits, so one plan gives the shape of all. The numbers are
those that ``build_plan`` draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from harness.compiled.records import IntArray
from harness.experiment import build_plan
from harness.plan import draw_requests, is_waited, wait_cap_ns
from harness.sim.kernel import arrays as layout
from harness.sim.simulate import plan_arrays
from harness.spec import Treatment, WorkloadSpec

_Table = TypeVar("_Table")


class Input(NamedTuple):
    """One plan: the replicate of a workload under a base seed."""

    workload: WorkloadSpec
    base_seed: int
    replicate: int


def input_arrays(inputs: Sequence[Input], treatment: Treatment = "as-drawn") -> layout.PlanArrays:
    """The plans of these inputs end to end, in their order, under a treatment.

    Raises SpecError when a wait distribution is unknown or its file is wrong.
    """
    places: dict[tuple[WorkloadSpec, int], list[int]] = {}
    for place, (workload, base_seed, _) in enumerate(inputs):
        places.setdefault((workload, base_seed), []).append(place)
    parts: dict[int, layout.PlanArrays] = {}
    for (workload, base_seed), of_workload in places.items():
        plans = _replicates(workload, base_seed, [inputs[place].replicate for place in of_workload], treatment)
        parts.update(zip(of_workload, plans, strict=True))
    return joined([parts[place] for place in range(len(inputs))])


def _replicates(
    workload: WorkloadSpec, base_seed: int, replicates: Sequence[int], treatment: Treatment
) -> Iterator[layout.PlanArrays]:
    """The plans of one workload and base seed, one by one."""
    if workload.source != "drawn":
        for replicate in replicates:
            yield plan_arrays([build_plan(workload, base_seed, replicate).with_treatment(treatment)])
        return
    shape = plan_arrays([build_plan(workload, base_seed, replicates[0])])
    drawn = draw_requests(workload, base_seed, replicates)
    waits_ns = _treated(np.minimum(drawn.wait_ns, wait_cap_ns(workload)), is_waited(workload), treatment)
    for place in range(len(replicates)):
        requests = shape.requests.copy()
        requests["keep"][:] = drawn.keep_tokens[place]
        requests["new"][:] = drawn.new_tokens[place]
        requests["generate"][:] = drawn.generate_tokens[place]
        requests["wait_ns"][:] = waits_ns[place]
        yield shape._replace(requests=requests)


def _treated(wait_ns: IntArray, waited: npt.NDArray[np.bool_], treatment: Treatment) -> IntArray:
    """The waits of several plans under a treatment, as ``Plan.with_treatment`` has them; shape (plans, requests)."""
    if treatment == "no-waits":
        return np.zeros_like(wait_ns)
    if treatment == "equal-waits" and waited.any():
        num_waits = int(waited.sum())
        mean_ns, remainder = np.divmod(wait_ns[:, waited].sum(axis=1, keepdims=True), num_waits)
        wait_ns[:, waited] = mean_ns + (np.arange(num_waits) < remainder)
    return wait_ns


def joined(parts: Sequence[layout.PlanArrays]) -> layout.PlanArrays:
    """Plans end to end."""
    counts = np.array([[len(table) for table in part] for part in parts])
    num_plans, num_sessions = counts[:, 0], counts[:, 1]
    _, first_session, first_request, first_follower, first_name = (counts.cumsum(axis=0) - counts).T
    plans = _end_to_end([part.plans for part in parts])
    sessions = _end_to_end([part.sessions for part in parts])
    plans["first_session"][:] += np.repeat(first_session, num_plans)
    plans["first_request"][:] += np.repeat(first_request, num_plans)
    sessions["first_request"][:] += np.repeat(first_request, num_sessions)
    sessions["first_follower"][:] += np.repeat(first_follower, num_sessions)
    sessions["first_name"][:] += np.repeat(first_name, num_sessions)
    requests = _end_to_end([part.requests for part in parts])
    followers, names = _end_to_end([part.followers for part in parts]), _end_to_end([part.names for part in parts])
    return layout.PlanArrays(plans, sessions, requests, followers, names)


def _end_to_end(tables: Sequence[_Table]) -> _Table:
    arrays = cast("Sequence[npt.NDArray[np.void]]", tables)
    # Without a given type, numpy searches a common type for every pair of tables.
    return cast("_Table", np.concatenate(arrays, dtype=arrays[0].dtype))
