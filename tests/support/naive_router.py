"""A second opinion on the routing policies, written from docs/guides/routers.md: all that was sent is searched."""

from __future__ import annotations

import random

from harness.extras.replicas.policies import KEPT_BLOCKS, MOST_LEAD, RoutedRequest, policy_named


class NaiveRouter:
    """open: requests at each replica that are not over. sent: blocks that each was sent, the latest last, by the whole
    beginning of the prompt. most: blocks that are remembered of each replica."""

    def __init__(self, policy: str, num_replicas: int, most: int = KEPT_BLOCKS) -> None:
        self.policy, self.num, self.most = policy, num_replicas, most
        self.open = [0] * num_replicas
        self.last = -1
        self.homes: dict[str, int] = {}
        self.sent: list[list[int]] = [[] for _ in range(num_replicas)]

    def ask(self, session: str, blocks: list[int]) -> int:
        """The replica that gets a request."""
        in_turn = [(self.last + step) % self.num for step in range(1, self.num + 1)]
        fewest = min(self.open)
        least_loaded = next(replica for replica in in_turn if self.open[replica] == fewest)
        if self.policy == "round-robin":
            chosen = in_turn[0]
        elif self.policy == "least-requests":
            chosen = least_loaded
        elif self.policy == "session-affinity":
            chosen = self.homes.get(session, least_loaded) if session else least_loaded
            self.homes[session] = chosen
        else:
            chosen = self._by_prompt(blocks, in_turn, least_loaded)
        self.open[chosen] += 1
        self.last = chosen
        return chosen

    def _by_prompt(self, blocks: list[int], in_turn: list[int], least_loaded: int) -> int:
        known: list[int] = []
        for sent in self.sent:
            num = 0
            while num < len(blocks) and blocks[num] in sent:
                num += 1
            known.append(num)
        most = [replica for replica in in_turn if known[replica] == max(known)]
        fewest = min(self.open[replica] for replica in most)
        best = next(replica for replica in most if self.open[replica] == fewest)
        is_crowded = self.open[best] > self.open[least_loaded] + MOST_LEAD
        chosen = best if known[best] and not is_crowded else least_loaded
        for block in blocks:
            if block in self.sent[chosen]:
                self.sent[chosen].remove(block)
            self.sent[chosen].append(block)
        self.sent[chosen] = self.sent[chosen][-self.most :]
        return chosen


def differences(policy: str, seed: int, num_requests: int) -> list[tuple[int, int]]:
    """Decisions of a drawn history that differ: (policy, second opinion)."""
    rng = random.Random(seed)
    num_replicas = rng.randrange(2, 5)
    ours, theirs = NaiveRouter(policy, num_replicas), policy_named(policy, num_replicas)
    prompts = {session: [rng.randrange(10**6) for _ in range(rng.randrange(1, 9))] for session in range(12)}
    shared = [rng.randrange(10**6) for _ in range(3)]
    going: list[int] = []
    different: list[tuple[int, int]] = []
    for _ in range(num_requests):
        session = rng.randrange(12)
        if rng.random() < 0.2:
            prompts[session] = [*prompts[session][: rng.randrange(9)], rng.randrange(10**6)]
        blocks = [*shared[: rng.randrange(4)], *prompts[session]]
        name = "" if session == 11 else str(session)
        chosen, again = theirs.route(RoutedRequest(name, blocks)), ours.ask(name, blocks)
        if chosen != again:
            different.append((chosen, again))
            return different
        going.append(chosen)
        while going and rng.random() < 0.52:
            over = going.pop(rng.randrange(len(going)))
            theirs.finished(over)
            ours.open[over] -= 1
    return different
