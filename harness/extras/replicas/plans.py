"""Plans out of the tables that simulations read."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compiled.records import record_as_dict
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.sim.kernel import arrays as layout


def plans_of(arrays: layout.PlanArrays) -> list[Plan]:
    """The plans in these tables. Names of blocks are the numbers of their chains, which are equal where those are."""
    return [_plan_of(arrays, place) for place in range(len(arrays.plans))]


def _plan_of(arrays: layout.PlanArrays, place: int) -> Plan:
    plan = record_as_dict(arrays.plans, place)
    first = plan["first_session"]
    rows = [record_as_dict(arrays.sessions, first + session) for session in range(plan["num_sessions"])]
    before: list[list[int]] = [[] for _ in rows]
    for session, row in enumerate(rows):
        for follower in arrays.followers[row["first_follower"] :][: row["num_followers"]].tolist():
            before[follower].append(session)
    return Plan(
        source="simulated",
        seed=0,
        replicate=0,
        treatment="as-drawn",
        shared_prefix_tokens=plan["shared_prefix"],
        token_id_range=(0, 2),
        sessions=tuple(_session_of(arrays, session, row, before[session]) for session, row in enumerate(rows)),
        block_tokens=plan["named_tokens"],
    )


def _session_of(arrays: layout.PlanArrays, index: int, row: dict[str, int], before: Sequence[int]) -> SessionPlan:
    after = row["after"]
    requests = arrays.requests[row["first_request"] :][: row["num_requests"]]
    columns = ("keep", "new", "generate", "wait_ns", "abort_ns", "abort_tokens")
    return SessionPlan(
        index,
        row["start_ns"],
        None if after < 0 else after,
        None if row["continues"] < 0 else row["continues"],
        tuple(
            RequestPlan(keep, new, generate, wait_ns, abort_after_ns=abort_ns, abort_after_tokens=abort_tokens)
            for keep, new, generate, wait_ns, abort_ns, abort_tokens in zip(
                *(requests[name].tolist() for name in columns), strict=True
            )
        ),
        also_after=tuple(session for session in before if session != after),
        start_kind="tool" if row["is_start_waited"] else "none",
        blocks=tuple(arrays.names[row["first_name"] :][: row["num_names"]].tolist()),
    )
