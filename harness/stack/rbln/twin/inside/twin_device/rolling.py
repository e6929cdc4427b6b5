"""What KV memory would hold, as one number per position: a hash of every token up to there, in order.

The next token is drawn from the sum of a sequence's numbers, as attention reads every position: one wrong, missing or
stale position changes every token after it. No randomness.
"""

from __future__ import annotations

from collections.abc import Sequence

MASK = (1 << 64) - 1
EMPTY = 0x9E3779B97F4A7C15
"""What a sequence's first position builds on."""
UNWRITTEN = 0
"""What a position holds that nobody wrote since the device started."""


def fold(before: int, token: int, position: int) -> int:
    """The number at ``position`` when ``token`` stands there and ``before`` is the number of the position before."""
    value = (before ^ ((token + 1) * 0xD6E8FEB86659FD93) ^ ((position + 1) * 0xA0761D6478BD642F)) & MASK
    value = ((value ^ (value >> 32)) * 0xE7037ED1A0B428DB) & MASK
    value = ((value ^ (value >> 29)) * 0x8EBC6AF09C88C6E3) & MASK
    return (value ^ (value >> 32)) or 1


def draw(total: int, low: int, high: int) -> int:
    """The token in [low, high) that follows a sequence whose numbers sum to ``total``, modulo 2**64."""
    return low + fold(total & MASK, 0, 0) % (high - low)


def expected_tokens(prompt: Sequence[int], count: int, low: int, high: int) -> list[int]:
    """The ``count`` tokens that a faultless device generates after ``prompt``."""
    number, total = EMPTY, 0
    for position, token in enumerate(prompt):
        number = fold(number, int(token), position)
        total += number
    tokens: list[int] = []
    for position in range(len(prompt), len(prompt) + count):
        tokens.append(draw(total, low, high))
        number = fold(number, tokens[-1], position)
        total += number
    return tokens
