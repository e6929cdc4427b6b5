"""A simulator one can read in a minute: the oracle stepped once at a time over a sorted list of arrivals."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.model.engine import CostModel, EngineConfig
from harness.model.plan.blocks import BlockKeys
from harness.model.plan.model import Plan
from tests.support.oracle import Oracle, PaperOracle


@dataclass
class NaiveRun:
    """Times in ns. requests: (session, request) -> cached, arrival, admitted, first token, completed.

    aborted: tokens that the client had received of each answer it left.
    """

    requests: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    aborted: dict[tuple[int, int], int] = field(default_factory=dict)
    steps: list[tuple[int, str, int, int]] = field(default_factory=list)  # start, kind, n, duration
    evictions: list[tuple[int, int, str]] = field(default_factory=list)  # start of the step, slot, caller
    decode_ns: int = 0
    prefill_ns: int = 0
    wait_session_ns: int = 0


def naive_run(plan: Plan, config: EngineConfig, cost: CostModel) -> NaiveRun:
    """Simulate ``plan`` under the vendor's rules or the paper's, one engine step after another."""
    run = NaiveRun()
    keys = BlockKeys(plan)
    oracle = _oracle_of(config)
    keys_of: dict[tuple[int, int], int] = {}
    arrivals = [(session.start_offset_ns, session.index, 0) for session in plan.sessions if session.after is None]
    names: dict[int, tuple[int, int]] = {}
    now = 0

    def root_of(session: int) -> int:
        before = plan.sessions[session].continues
        return session if before is None else root_of(before)

    def ended(session: int) -> bool:
        last = (session, len(plan.sessions[session].requests) - 1)
        return last in run.requests and run.requests[last][4] >= 0

    def arrive(arrival: tuple[int, int, int]) -> None:
        arrivals.remove(arrival)
        at, session, number = arrival
        request = plan.request(session, number)
        handle = len(names)
        names[handle], keys_of[session, number] = (session, number), handle
        run.requests[session, number] = [0, at, -1, -1, -1]
        stream = keys.stream(session, number).tolist()
        oracle.submit(handle, request.prompt_tokens, request.generate_tokens, stream, session=root_of(session))

    def over(session: int, number: int, at: int) -> None:
        run.requests[session, number][4] = at
        plan_session = plan.sessions[session]
        if number + 1 < len(plan_session.requests):
            arrivals.append((at + plan_session.requests[number].wait_after_ns, session, number + 1))
        else:
            arrivals.extend(
                (at + follower.start_offset_ns, follower.index, 0)
                for follower in plan.sessions
                if session in follower.predecessors and all(ended(before) for before in follower.predecessors)
            )

    def leave(at: int, session: int, number: int) -> None:
        handle = keys_of[session, number]
        run.aborted[session, number] = oracle.requests[handle].output_tokens
        record = run.requests[session, number]
        record[3] = -1 if run.aborted[session, number] == 0 else record[3]
        oracle.abort(handle)
        over(session, number, at)

    def is_under_way(key: tuple[int, int]) -> bool:
        return key in run.requests and run.requests[key][4] < 0

    def leaves() -> list[tuple[int, int, int]]:
        return sorted(
            (run.requests[key][1] + plan.request(*key).abort_after_ns, *key)
            for key in run.requests
            if is_under_way(key) and plan.request(*key).abort_after_ns
        )

    while arrivals or oracle.requests:
        if not oracle.requests:
            now = max(now, min(arrivals)[0])
        for arrival in sorted(entry for entry in arrivals if entry[0] <= now):
            arrive(arrival)
        step = oracle.schedule()
        run.evictions += [(now, slot, caller) for slot, caller in step.evicted]
        if step.kind == "PREFILL":
            duration = cost.prefill_ns(step.computed_tokens, sum(step.cached_lengths))
            record = run.requests[names[step.requests[0]]]
            if record[2] < 0:
                record[0], record[2], record[3] = sum(step.cached_lengths), now, now + duration
            run.prefill_ns += duration
            run.wait_session_ns += (len(oracle.running) - 1) * duration
        elif step.kind == "DECODE":
            num_seqs = len(step.requests)
            duration = cost.decode_step_ns(config.bucket_of(num_seqs), num_seqs, step.context_tokens)
            run.decode_ns += duration
        else:
            assert step.preempted, "stuck"
            duration = 1_000_000
        if step.kind != "IDLE":
            run.steps.append((now, step.kind.lower(), len(step.requests), duration))
        now += duration
        while True:  # what happens while the step runs: at one instant those who leave come first
            acts = [(at, 0, session, number) for at, session, number in leaves() if at <= now]
            acts += [(at, 1, session, number) for at, session, number in arrivals if at < now]
            if not acts:
                break
            at, kind, session, number = min(acts)
            if kind == 0:
                leave(at, session, number)
            else:
                arrive((at, session, number))
        for handle in oracle.finish_step():
            over(*names[handle], now)
        for key in sorted(run.requests):
            if (
                is_under_way(key)
                and oracle.requests[keys_of[key]].output_tokens == plan.request(*key).abort_after_tokens > 0
            ):
                leave(now, *key)
    return run


def _oracle_of(config: EngineConfig) -> Oracle:
    if not config.rule_set.has_inner_blocks:
        return PaperOracle(config.max_num_seqs, config.kv_slots, config.slot_tokens, config.rule_set)
    return Oracle(
        config.max_num_seqs,
        config.kv_slots,
        config.slot_tokens,
        slot_tokens=config.region_tokens,
        prefix_caching=config.prefix_caching,
        active_limit=config.active_limit,
        rules=config.rule_set,
    )
