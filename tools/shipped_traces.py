"""Writes the traces that ship with the harness (plans/traces): small synthetic workloads from fixed seeds.

They are not recordings; the distributions below are round numbers typical of coding, research and support agents. The
output is the same bytes every time.

    python tools/shipped_traces.py
"""

from __future__ import annotations

import random
from pathlib import Path

from harness.model.plan.model import WaitKind
from harness.model.traces.recording import RecordedRequest, Recording, TraceHead, write_trace

NS_PER_S = 1_000_000_000
FOLDER = Path(__file__).resolve().parent.parent / "plans" / "traces"


class Agent:
    """A trace in the making: requests are added in order, each after its predecessors."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.requests: list[RecordedRequest] = []

    def ask(
        self,
        after: tuple[int, ...],
        base: int | None,
        new: tuple[int, int],
        answer: tuple[int, int],
        wait: tuple[WaitKind, float, float] = ("none", 0, 0),
    ) -> int:
        """Add a request; returns its index. wait: kind, median seconds, standard deviation of its log."""
        kind, median_s, sigma = wait
        wait_s = median_s * self.rng.lognormvariate(0, sigma) if median_s else 0.0
        kept = self.requests[base] if base is not None else None
        keep = kept.prompt_tokens + kept.generate_tokens if kept is not None else 0
        prompt = keep + self.rng.randint(*new)
        request = RecordedRequest(
            base, after, round(wait_s * 1000) * NS_PER_S // 1000, kind, prompt, keep, self.rng.randint(*answer)
        )
        self.requests.append(request)
        return len(self.requests) - 1


def coding_agent(rng: random.Random) -> Agent:
    """Many short tool calls, some test runs, and a question to the user."""
    agent = Agent(rng)
    last = agent.ask((), None, (900, 1500), (60, 160))
    for turn in range(rng.randint(5, 9)):
        slow = rng.random() < 0.25
        wait: tuple[WaitKind, float, float] = ("tool", 12.0 if slow else 0.4, 0.7)
        if turn == 3:
            wait = ("human", 25.0, 0.6)
        last = agent.ask((last,), last, (40, 420), (30, 180), wait)
    return agent


def research_agent(rng: random.Random) -> Agent:
    """A plan, two to four parallel sub-agents with separate contexts, and a summary that waits for all."""
    agent = Agent(rng)
    plan = agent.ask((), None, (500, 900), (80, 160))
    ends: list[int] = []
    for _ in range(rng.randint(2, 4)):
        last = agent.ask((plan,), None, (250, 500), (40, 90), ("tool", 0.2, 0.5))
        for _ in range(rng.randint(1, 3)):
            last = agent.ask((last,), last, (300, 900), (40, 120), ("tool", 2.5, 0.8))
        ends.append(last)
    summary = agent.ask(tuple(ends), plan, (300, 700), (120, 240), ("tool", 0.5, 0.5))
    agent.ask((summary,), summary, (20, 60), (40, 120), ("human", 20.0, 0.5))
    return agent


def support_agent(rng: random.Random) -> Agent:
    """A short dialogue: the user thinks between most turns, look-ups are quick."""
    agent = Agent(rng)
    last = agent.ask((), None, (600, 800), (30, 90))
    for turn in range(rng.randint(3, 6)):
        wait: tuple[WaitKind, float, float] = ("tool", 0.8, 0.5) if turn % 2 else ("human", 15.0, 0.5)
        last = agent.ask((last,), last, (15, 120), (30, 110), wait)
    return agent


SHIPPED = {
    "coding-agent": (coding_agent, 12),
    "research-agent": (research_agent, 8),
    "customer-support": (support_agent, 16),
}


def main() -> None:
    for name, (make, count) in SHIPPED.items():
        rng = random.Random(f"rbln-harness/{name}")
        recordings = [
            Recording(f"{name}-{place}", place * 2 * NS_PER_S, tuple(make(rng).requests)) for place in range(count)
        ]
        labels = ("made up, no recording is behind it",)
        print(write_trace(FOLDER / f"{name}.jsonl", TraceHead(name, "made", "together", 0, {}, {}, labels), recordings))


if __name__ == "__main__":
    main()
