"""How long an answer will be and why it ends, decided when the request arrives.

Lengths are exact: without a stop condition an answer has ``max_tokens`` tokens; with one, the tokens are drawn ahead to
find where it strikes. The scheduler never sees more than the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.emulator.core import FinishReason
from harness.emulator.tokens import EOS, ContextHash, decode


@dataclass(frozen=True, slots=True)
class StopConditions:
    """What may end an answer before its limit. ``eos_rate``: chance that a token is EOS, 0 with ignore_eos."""

    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    stop_texts: Sequence[str] = ()
    keep_stop_text: bool = False
    eos_rate: float = 0.0
    cut_short_by: int = 0

    @property
    def must_look_ahead(self) -> bool:
        return bool(self.stop_token_ids or self.stop_texts or self.eos_rate)


@dataclass(frozen=True, slots=True)
class PlannedAnswer:
    """The end of an answer. ``tokens``: the answer itself when it was drawn ahead, else empty.

    text_limit: characters of text that may be shown, -1 for all (a stop text is not shown, nor what follows it).
    """

    num_tokens: int
    reason: FinishReason = "length"
    stop_reason: int | str | None = None
    tokens: tuple[int, ...] = ()
    text_limit: int = -1


def plan_answer(context: ContextHash, max_tokens: int, conditions: StopConditions) -> PlannedAnswer:
    """The answer to a prompt: as long as ``max_tokens`` unless a stop condition strikes after ``min_tokens``."""
    answer = PlannedAnswer(max_tokens)
    if conditions.must_look_ahead:
        answer = _look_ahead(context, max_tokens, conditions)
    if conditions.cut_short_by:
        # The fault "early-stop": a server that breaks its promise of min_tokens.
        num_tokens = max(1, answer.num_tokens - conditions.cut_short_by)
        return PlannedAnswer(num_tokens, "stop", None, answer.tokens[:num_tokens], answer.text_limit)
    return answer


def _look_ahead(context: ContextHash, max_tokens: int, conditions: StopConditions) -> PlannedAnswer:
    tokens: list[int] = []
    text = ""
    stops = set(conditions.stop_token_ids)
    while len(tokens) < max_tokens:
        may_stop = len(tokens) + 1 >= conditions.min_tokens
        token = EOS if may_stop and context.wants_eos(conditions.eos_rate) else context.next_token()
        context = context.after(token)
        tokens.append(token)
        text += decode([token])
        if not may_stop:
            continue
        if token == EOS or token in stops:
            return PlannedAnswer(len(tokens), "stop", None if token == EOS else token, tuple(tokens))
        for stop_text in conditions.stop_texts:
            if (place := text.find(stop_text)) >= 0:
                limit = place + len(stop_text) if conditions.keep_stop_text else place
                return PlannedAnswer(len(tokens), "stop", stop_text, tuple(tokens), limit)
    return PlannedAnswer(max_tokens, tokens=tuple(tokens))
