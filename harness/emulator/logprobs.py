"""Log probabilities in the shapes of vLLM 0.22. The emulated model is certain of every token: the numbers say nothing.

The drawn token has probability one; as many other tokens as were asked for share a floor. Reading them costs no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.emulator.tokens import FIRST_WORD, NUM_WORDS, decode

CERTAIN, UNLIKELY = 0.0, -60.0
MOST_LOGPROBS = 20
"""vLLM's default for ``--max-logprobs``."""


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """num_top: alternatives to list per token, 0 for none. as_ids: tokens are named ``token_id:N``."""

    num_top: int
    is_chat: bool
    as_ids: bool = False

    def of(self, tokens: Sequence[int], first_offset: int = 0) -> dict[str, Any]:
        """The ``logprobs`` field of some tokens; first_offset: characters of text before them."""
        return self._of_chat(tokens) if self.is_chat else self._of_completion(tokens, first_offset)

    def _of_completion(self, tokens: Sequence[int], first_offset: int) -> dict[str, Any]:
        names = [self._name(token) for token in tokens]
        offsets: list[int] = []
        for name in names:
            offsets.append(first_offset)
            first_offset += len(name)
        # The token itself is listed even when no alternative was asked for.
        tops = [
            {self._name(one): value for one, value in self._ranked(token, max(1, self.num_top))} for token in tokens
        ]
        return {
            "text_offset": offsets,
            "token_logprobs": [CERTAIN] * len(names),
            "tokens": names,
            "top_logprobs": tops,
        }

    def _of_chat(self, tokens: Sequence[int]) -> dict[str, Any]:
        entries = [
            {
                **self._entry(token, CERTAIN),
                "top_logprobs": [self._entry(*pair) for pair in self._ranked(token, self.num_top)],
            }
            for token in tokens
        ]
        return {"content": entries}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = decode([token], skip_special_tokens=False)
        return {"token": self._name(token), "logprob": logprob, "bytes": list(text.encode())}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else decode([token], skip_special_tokens=False)

    @staticmethod
    def _ranked(token: int, count: int) -> list[tuple[int, float]]:
        """``token`` and the words that follow it in the vocabulary, ``count`` in all."""
        others = [(FIRST_WORD + (token + place) % NUM_WORDS, UNLIKELY) for place in range(1, count)]
        return [(token, CERTAIN), *others][:count]
