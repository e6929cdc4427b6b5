"""The words of text prompts, and how many tokens a server counts for each of them.

A server's tokenizer decides how many words make a prompt of the planned length. Nothing is asked here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

# Frequent short words: one token each, with their leading space, in every large byte-pair vocabulary we know of.
WORDS = tuple(Path(__file__).with_name("words.txt").read_text(encoding="ascii").split())


@dataclass(frozen=True)
class TextSizes:
    """The sizes of text in one server's tokens.

    source: "tokenize" and "usage" name the answers that the sizes are from; "assumed": one token a word.
    word_tokens: of each of ``WORDS`` with its leading space, at least 1; a mean need not be whole. first_tokens: what
    the server adds to a prompt that begins afresh, such as a template's. turn_tokens: what it adds for each further
    turn of a chat.
    """

    source: Literal["assumed", "tokenize", "usage"] = "assumed"
    word_tokens: tuple[float, ...] = (1.0,) * len(WORDS)
    first_tokens: int = 0
    turn_tokens: int = 0

    @property
    def words_per_token(self) -> float:
        """Words that make one token, at the mean."""
        return len(self.word_tokens) / sum(self.word_tokens)

    def to_json(self) -> dict[str, Any]:
        """Plain values from which the same prompts can be made again; ``word_tokens`` in the order of ``WORDS``."""
        return {
            "source": self.source,
            "words_per_token": round(self.words_per_token, 6),
            "first_tokens": self.first_tokens,
            "turn_tokens": self.turn_tokens,
            "word_tokens": list(self.word_tokens),
        }

    def tokens_of(self, text: str) -> float:
        """The tokens of words that are all in ``WORDS``."""
        return float(sum(self.word_tokens[_PLACES[word]] for word in text.split()))

    def fill(self, numbers: NDArray[np.int64], num_tokens: float) -> tuple[list[int], float]:
        """Places in ``WORDS`` that are ``num_tokens`` tokens together, and how many tokens they are too short.

        The words are those drawn (``numbers``) in their order. The last few are chosen by size, so that whole sizes sum
        exactly wherever any words do. A larger ``num_tokens`` gives the same words up to these.
        """
        if num_tokens <= 0 or not len(numbers):
            return [], num_tokens
        ends = np.cumsum(self._sizes[numbers])
        # Two of the largest words are left to the end: enough to choose from.
        count = int(np.searchsorted(ends, num_tokens - 2 * self._largest, side="right"))
        words: list[int] = numbers[:count].tolist()
        sums, whole = self._sums, self._whole
        left = round(num_tokens - (ends[count - 1] if count else 0))
        left = min((total for total, is_sum in enumerate(sums) if is_sum), key=lambda total: (abs(total - left), total))
        while left > 0:
            word = int(numbers[count % len(numbers)])
            if whole[word] > left or not sums[left - whole[word]]:
                fitting = [place for place, size in enumerate(whole) if size <= left and sums[left - size]]
                word = fitting[word % len(fitting)]
            words.append(word)
            left -= whole[word]
            count += 1
        return words, num_tokens - float(self._sizes[words].sum())

    @cached_property
    def _sizes(self) -> NDArray[np.float64]:
        return np.asarray(self.word_tokens, dtype=np.float64)

    @cached_property
    def _whole(self) -> list[int]:
        return [max(1, round(size)) for size in self.word_tokens]

    @cached_property
    def _largest(self) -> int:
        return max(self._whole)

    @cached_property
    def _sums(self) -> list[bool]:
        """Whether words sum to 0, 1, 2, ... tokens, as far as the end of a prompt needs it."""
        sums = [True] + [False] * (4 * self._largest)
        for total in range(1, len(sums)):
            sums[total] = any(size <= total and sums[total - size] for size in set(self._whole))
        return sums


_PLACES = {word: place for place, word in enumerate(WORDS)}
