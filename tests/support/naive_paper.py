"""The paper's simulator as one reads it in section 4-1: floats for costs, lists for slots, one step at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from harness.model.plan.model import Plan

F_S = {1: 0.009870, 2: 0.010420, 4: 0.010825, 8: 0.012970}
ALPHA_S, BETA_S = 0.000501, 0.0000413


def f_s(bucket: int) -> float:
    """Straight lines between the measured buckets; the last one goes on above 8."""
    known = sorted(F_S)
    low, high = next(((a, b) for a, b in pairwise(known) if a <= bucket <= b), known[-2:])
    return F_S[low] + (F_S[high] - F_S[low]) * (bucket - low) / (high - low)


def prefill_s(computed: int) -> float:
    return -(-computed // 128) * (0.021206 + 6.399e-7 * computed)


@dataclass
class Entry:
    """A KV slot: whose, how long a prompt, and whether it may be evicted ("active" until a release takes effect)."""

    session: int
    prompt: int
    number: int
    state: str = "active"


@dataclass
class PaperRun:
    """Seconds. reused: tokens by (session, request)."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    reused: dict[tuple[int, int], int] = field(default_factory=dict)


def paper_run(plan: Plan, limit: int, slots: int, buckets: tuple[int, ...], *, is_dummy: bool = False) -> PaperRun:
    """Simulate a plan of sessions that all start at once, under the paper's rules."""
    run = PaperRun()
    waiting = [(0.0, session.index, 0) for session in plan.sessions]
    running: list[list[int]] = []  # session, request, tokens left
    entries: list[Entry] = []
    owners: dict[tuple[int, int], Entry] = {}
    now, number = 0.0, 0

    def settle() -> None:
        for entry in entries:
            if entry.state == "pending":
                entry.state = "inactive"

    def admit(session: int, prompt: int) -> int | None:
        nonlocal number
        taken = 1 if is_dummy and 0 < len(running) < limit else 0
        while len(entries) + taken >= slots:
            inactive = [entry for entry in entries if entry.state == "inactive"]
            if not inactive:
                break
            entries.remove(min(inactive, key=lambda entry: entry.number))
        has_room = len(entries) + taken < slots
        settle()
        if not has_room:
            return None
        longest = max((entry.prompt for entry in entries if entry.session == session), default=0)
        entries.append(Entry(session, prompt, number))
        number += 1
        return min(longest, prompt - 1) // 128 * 128

    while waiting or running:
        due = sorted(entry for entry in waiting if round(entry[0], 9) <= round(now, 9))
        if not running and not due:
            now = min(waiting)[0]
            continue
        admitted = None
        if due and len(running) < limit:
            _, session, index = due[0]
            prompt = plan.request(session, index).prompt_tokens
            admitted = admit(session, prompt)
            if admitted is None and not running:
                admitted = admit(session, prompt)
        if admitted is not None:
            waiting.remove(due[0])
            spent = prefill_s(prompt - admitted)
            run.prefill_s += spent
            run.reused[session, index] = admitted
            owners[session, index] = entries[-1]
            running.append([session, index, plan.request(session, index).generate_tokens])
            batch = running[-1:]
        else:
            bucket = min(bucket for bucket in buckets if bucket >= len(running))
            spent = f_s(bucket) + ALPHA_S + BETA_S * len(running)
            run.decode_s += spent
            batch = list(running)
        now += spent
        for request in batch:
            request[2] -= 1
            if request[2] == 0:
                session, index = request[:2]
                running.remove(request)
                owners[session, index].state = "pending"
                requests = plan.sessions[session].requests
                if index + 1 < len(requests):
                    waiting.append((now + requests[index].wait_after_ns / 1e9, session, index + 1))
    return run
