"""What would help sessions behind a router: their home, or more KV memory; and which layout of a device budget is best.

Everything here is predicted on the plans of runs or of an experiment; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from harness.extras.replicas.figures import ReplicaFigures, Tables, compare_policies, figures_of
from harness.extras.replicas.policies import SessionAffinity, policy_named
from harness.extras.replicas.simulated import check_simulated_router
from harness.extras.replicas.virtual import play_replicas
from harness.measure.records.run import SealedRun
from harness.model.engine import CostModel, EngineConfig
from harness.model.plan.model import Plan
from harness.model.spec import ServerSpec
from harness.model.spec.server import default_buckets

AS_IT_IS = "as it is"
ORIGIN = "Simulated: no server and no router was measured."


class Planned(NamedTuple):
    """A plan and the costs that it is played with."""

    plan: Plan
    cost_model: CostModel


class Layout(NamedTuple):
    """Replicas of one shape behind a policy."""

    name: str
    server: ServerSpec
    num_replicas: int
    policy: str

    def play(self, runs: Sequence[Planned]) -> list[ReplicaFigures]:
        """The figures of each plan on this layout."""
        return [
            figures_of(
                play_replicas(run.plan, self.server, run.cost_model, policy_named(self.policy, self.num_replicas))
            )
            for run in runs
        ]


def what_helps(runs: Sequence[SealedRun]) -> Tables:
    """A condition's replicas as they are, with sessions at home, and with half as much KV memory more.

    Raises SpecError for a router that is not modelled.
    """
    server = runs[0].server
    policy, count = server.door.policy, server.num_replicas
    check_simulated_router(server)
    plans = [Planned(plan, run.cost_model) for run in runs if (plan := run.plan_if_readable) is not None]
    layouts = [Layout(AS_IT_IS, server.replica, count, policy)]
    if policy != SessionAffinity.name:
        layouts.append(Layout("sessions at home", server.replica, count, SessionAffinity.name))
    layouts.append(Layout("half as much KV memory more", _with_memory(server.replica), count, policy))
    return compare_policies({layout.name: layout.play(plans) for layout in layouts}, ORIGIN, "change")


def _with_memory(server: ServerSpec) -> ServerSpec:
    if server.is_paged:
        num_blocks = EngineConfig.from_server(server).paged.num_gpu_blocks
        return server.model_copy(update={"num_gpu_blocks": num_blocks * 3 // 2})
    return server.model_copy(update={"kv_slots": -(-server.num_kv_slots * 3 // 2)})


def sentence(figures: Sequence[ReplicaFigures]) -> str:
    """Whether routing or memory loses more of what returning sessions could reuse."""
    reusable = sum(each.reusable_tokens for each in figures)
    if not reusable:
        return "No session returned with anything to reuse."
    routing = sum(each.lost_by_routing_tokens for each in figures) / reusable
    eviction = sum(each.lost_by_eviction_tokens for each in figures) / reusable
    more, less = ("routing", "memory") if routing >= eviction else ("memory", "routing")
    return (
        f"Of what returning sessions could reuse, routing loses {routing:.2f} and eviction {eviction:.2f}: "
        f"{more} loses more than {less}."
    )


def layouts_of(server: ServerSpec, counts: Sequence[int], policies: Sequence[str]) -> Iterator[Layout]:
    """Every way to cut a server into equal replicas, with each policy; its positions and KV memory are the budget.

    Compiled sizes of a replica: its limit, the half of it, and so on; and every size, where there are eight or fewer.
    """
    for count in counts:
        limit, slots = server.max_num_seqs // count, server.num_kv_slots // count
        if limit < 1 or slots < limit or server.max_num_seqs % count or server.num_kv_slots % count:
            continue
        sizes = {default_buckets(limit), *([tuple(range(1, limit + 1))] if limit <= 8 else [])}
        for buckets in sorted(sizes, key=len):
            shape = {"max_num_seqs": limit, "decode_buckets": buckets, "kv_slots": slots}
            own = ServerSpec.model_validate({**server.replica.model_dump(), **shape})
            named = "{" + ",".join(map(str, buckets)) + "}"
            for policy in policies if count > 1 else policies[:1]:
                behind = f", {policy}" if count > 1 else ""
                yield Layout(f"{count} x {named}/{limit}, {slots} slots{behind}", own, count, policy)
