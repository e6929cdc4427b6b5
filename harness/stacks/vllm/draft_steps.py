"""What the steps of a server with speculative decoding show: tokens drafted, accepted and padded, and graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from harness.stacks.vllm.step_log import StepLog


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """Sums over the decode steps of a server that drafts. num_drafts: requests with drafts, over all steps.

    accepted_at: of them, how many accepted the first draft, the first two, and so on. num_padded: requests that were
    admitted with drafts which the model always rejects; they are in the others. tokens, padded_tokens: of the steps
    whose padding is shown. eager: steps without a graph, by (requests, tokens).
    """

    num_steps: int
    num_drafts: int
    draft_tokens: int
    accepted_at: tuple[int, ...]
    num_padded: int
    tokens: int
    padded_tokens: int
    eager: Mapping[tuple[int, int], int]

    @property
    def accepted_tokens(self) -> int:
        """Drafts that were accepted."""
        return sum(self.accepted_at)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of the drafted requests that accepted at least so many drafts, from one on; () where none drafted.

        Requests padded at their admission are left out: their drafts are no guess of the drafter.
        """
        num_real = self.num_drafts - self.num_padded
        return tuple(number / num_real for number in self.accepted_at) if num_real > 0 else ()


def draft_figures(log: StepLog) -> DraftFigures | None:
    """The sums of a log; None of a server without drafts, and where no engine core wrote them."""
    steps = [step for core in log.cores for step in core.steps if step.drafts]
    if not log.num_drafts or not steps:
        return None
    num_drafts = draft_tokens = num_padded = tokens = padded = num_steps = 0
    accepted_at = [0] * log.num_drafts
    eager = Counter[tuple[int, int]]()
    for step in steps:
        padded_ids = step.padded_ids
        for name, drafts, accepted in zip(step.request_ids, step.drafts, step.accepted, strict=False):
            if drafts and accepted is not None:
                num_drafts, draft_tokens = num_drafts + 1, draft_tokens + drafts
                num_padded += name in padded_ids
                for place in range(min(accepted, log.num_drafts)):
                    accepted_at[place] += 1
        if step.details is None or step.details.context_requests or not step.details.generation_requests:
            continue
        num_steps += 1
        if (size := step.values["padded_tokens"]) is not None:
            tokens, padded = tokens + sum(step.tokens), padded + size
        if log.has_graphs and step.values["runtime_mode"] == "NONE":
            eager[len(step.tokens), sum(step.tokens)] += 1
    by_size = dict(sorted(eager.items()))
    return DraftFigures(num_steps, num_drafts, draft_tokens, tuple(accepted_at), num_padded, tokens, padded, by_size)
