"""The emulated model: a toy tokenizer, and the next token as a pure function of all tokens before it.

The same prompt always gives the same answer, whether its KV was reused or not. No token depends on time or load.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]

# Qwen3's numbers, so that ids look the same as on the real stack.
VOCAB_SIZE = 151_936
END_OF_TEXT, CHAT_START, EOS = 151_643, 151_644, 151_645
SPECIAL_TOKENS = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": CHAT_START, "<|im_end|>": EOS}
SPECIAL_TEXTS = {token: text for text, token in SPECIAL_TOKENS.items()}

# Ids 0..255 are bytes; the rest of the vocabulary are words: a space and four letters, counted in base 26.
FIRST_WORD = 256
NUM_WORDS = END_OF_TEXT - FIRST_WORD
WORD_LETTERS = 4
PIECES = re.compile(r"<\|(?:endoftext|im_start|im_end)\|>| [a-z]{4}")

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that multiplying modulo 2**64 loses nothing
_POWERS_LENGTH = 1 << 15


@lru_cache(maxsize=1 << 16)
def word_text(token: int) -> str:
    """The text of word token ``token``; text and tokens of words map one to one."""
    index, letters = token - FIRST_WORD, ""
    for _ in range(WORD_LETTERS):
        index, digit = divmod(index, 26)
        letters = chr(ord("a") + digit) + letters
    return " " + letters


def word_token(text: str) -> int | None:
    """The token of a space and four letters; None when the vocabulary ends before it."""
    index = 0
    for letter in text[1:]:
        index = index * 26 + ord(letter) - ord("a")
    return FIRST_WORD + index if index < NUM_WORDS else None


def encode(text: str) -> list[int]:
    """Token ids of ``text``: special tokens, words, and UTF-8 bytes for everything between them.

    ``encode(decode(ids)) == ids`` for every generated answer, so a text client that sends an answer back re-uses it.
    """
    tokens: list[int] = []
    position = 0
    for match in PIECES.finditer(text):
        tokens.extend(text[position : match.start()].encode())
        position, piece = match.end(), match.group()
        token = SPECIAL_TOKENS.get(piece) if piece[0] == "<" else word_token(piece)
        tokens.extend(piece.encode() if token is None else (token,))
    tokens.extend(text[position:].encode())
    return tokens


def decode(tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Text of ``tokens``; bytes that are no UTF-8 become the replacement character."""
    if len(tokens) == 1 and FIRST_WORD <= tokens[0] < END_OF_TEXT:
        return word_text(tokens[0])  # one generated token, the usual case
    parts: list[str] = []
    pending = bytearray()
    for token in tokens:
        if token < FIRST_WORD:
            pending.append(token)
            continue
        if pending:
            parts.append(pending.decode(errors="replace"))
            pending.clear()
        if token < END_OF_TEXT:
            parts.append(word_text(token))
        elif not skip_special_tokens:
            parts.append(SPECIAL_TEXTS.get(token, ""))
    if pending:
        parts.append(pending.decode(errors="replace"))
    return "".join(parts)


def chat_prompt(messages: Sequence[tuple[str, str]], *, add_generation_prompt: bool = True) -> str:
    """The prompt text of a conversation of (role, content) pairs, in the ChatML form that Qwen3 uses."""
    turns = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return turns + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def _powers() -> npt.NDArray[np.uint64]:
    powers = np.full(_POWERS_LENGTH, _MULTIPLIER, dtype=np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


_POWERS = _powers()


class ContextHash(NamedTuple):
    """A rolling hash of a token context, and the law that draws the next token from it."""

    state: int

    @classmethod
    def of(cls, prompt: TokenArray, seed: int) -> ContextHash:
        """The hash of a whole prompt; ``seed`` is the server's, so two servers may disagree on purpose."""
        head, state = prompt, seed & _MASK
        for start in range(0, len(head), _POWERS_LENGTH - 1):
            block = head[start : start + _POWERS_LENGTH - 1].astype(np.uint64) + np.uint64(1)
            with np.errstate(over="ignore"):
                sum_of_block = int(np.sum(block * _POWERS[: len(block)][::-1]))
            state = (state * int(_POWERS[len(block)]) + sum_of_block) & _MASK
        return cls(state)

    def after(self, token: int) -> ContextHash:
        """The hash of the context one token longer."""
        return ContextHash((self.state * _MULTIPLIER + token + 1) & _MASK)

    def draw(self) -> int:
        """64 well-mixed bits of this context (splitmix64's finaliser)."""
        bits = (self.state + 0x9E3779B97F4A7C15) & _MASK
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
        return bits ^ (bits >> 31)

    def next_token(self) -> int:
        """The greedy next token: always a word, never a special token."""
        return FIRST_WORD + self.draw() % NUM_WORDS

    def wants_eos(self, rate: float) -> bool:
        """Whether the next token is EOS under the seeded law: with probability ``rate``, by this context alone."""
        return rate > 0 and (self.draw() >> 11) * 2.0**-53 < rate
