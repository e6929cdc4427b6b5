"""Names of 128-token blocks: which requests begin with the same tokens, known without making a token.

A key names a whole prefix, as the server's chained block hashes do: two requests of a plan share key i if and only if
their first (i+1) * block_tokens tokens are the same by construction (up to a 64-bit collision).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.model.plan.model import Plan, RequestPlan
from harness.model.plan.tokens import MASK64, mix64, stream_key

KeyArray = NDArray[np.int64]
BLOCK_TOKENS = 128
NAMED_BLOCK = 1 << 63  # set in no origin of a request: session << 33 stays below it


class _Segment(NamedTuple):
    """A run of tokens from one origin. prefix_key names the stream up to ``start``."""

    start: int
    stop: int
    origin: int
    prefix_key: int

    def key_at(self, position: int) -> int:
        """Key of the stream's first ``position`` tokens, start < position <= stop.

        A truncated segment and a longer one agree on every position that both have, so cutting needs no re-keying.
        """
        return mix64(mix64(self.prefix_key ^ self.origin) ^ (position - self.start))


class _Stream:
    """One session's stream so far: its segments, and the keys of its full blocks. ahead: see ``BlockKeys``."""

    def __init__(self, segments: list[_Segment], keys: list[int], block_tokens: int, ahead: int) -> None:
        self._segments, self.keys, self._block_tokens, self._ahead = segments, keys, block_tokens, ahead

    def copy(self) -> _Stream:
        return _Stream(self._segments.copy(), self.keys.copy(), self._block_tokens, self._ahead)

    @property
    def num_tokens(self) -> int:
        return self._segments[-1].stop if self._segments else 0

    def cut(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` only."""
        while self._segments and self._segments[-1].start >= num_tokens:
            self._segments.pop()
        if self._segments:
            self._segments[-1] = self._segments[-1]._replace(stop=num_tokens)
        del self.keys[max(num_tokens - self._ahead, 0) // self._block_tokens :]

    def extend(self, num_tokens: int, origin: int, stream_seed: int) -> None:
        """Append ``num_tokens`` tokens of one origin."""
        if num_tokens == 0:
            return
        start = self.num_tokens
        prefix_key = self._segments[-1].key_at(start) if self._segments else stream_seed
        segment = _Segment(start, start + num_tokens, origin, prefix_key)
        self._segments.append(segment)
        first = (len(self.keys) + 1) * self._block_tokens + self._ahead
        self.keys.extend(_signed(segment.key_at(end)) for end in range(first, segment.stop + 1, self._block_tokens))


class _Prefix(NamedTuple):
    """Where a request's keys lie: the first so many of a session's key array number ``branch``."""

    branch: int
    prompt_blocks: int
    stream_blocks: int


class BlockKeys:
    """The block keys of one plan, computed session by session when first needed.

    ahead: so many tokens after its block does a key name too; a stream has its last key that much later.
    """

    def __init__(self, plan: Plan, block_tokens: int = BLOCK_TOKENS, ahead: int = 0) -> None:
        self._plan = plan
        self._block_tokens, self._ahead = block_tokens, ahead
        self._seed = stream_key(plan)
        # A truncation starts a new branch; without one all requests of a session share a single array.
        self._branches: dict[int, list[KeyArray]] = {}
        self._prefixes: dict[int, list[_Prefix]] = {}
        self._ends: dict[int, _Stream] = {}
        self._continued = {session.continues for session in plan.sessions if session.continues is not None}

    def prompt(self, session: int, request: int) -> KeyArray:
        """Keys of the prompt's full blocks: int64, shape (prompt_tokens // block_tokens,)."""
        prefix = self._of(session)[request]
        return self._branches[session][prefix.branch][: prefix.prompt_blocks]

    def stream(self, session: int, request: int) -> KeyArray:
        """Keys of prompt and generated text: int64, shape ((prompt_tokens + generate_tokens) // block_tokens,)."""
        prefix = self._of(session)[request]
        return self._branches[session][prefix.branch][: prefix.stream_blocks]

    def _of(self, session: int) -> list[_Prefix]:
        if session not in self._prefixes:
            self._work_out(session)
        return self._prefixes[session]

    def _work_out(self, session: int) -> None:
        ancestor = self._plan.sessions[session].continues
        if ancestor is None:
            stream = _Stream([], [], self._block_tokens, self._ahead)
        else:
            self._of(ancestor)
            stream = self._ends[ancestor].copy()
        branches: list[KeyArray] = []
        prefixes: list[_Prefix] = []
        for position, request in enumerate(self._plan.sessions[session].requests):
            if request.keep_tokens < stream.num_tokens:
                if prefixes:
                    branches.append(_frozen(stream.keys))
                stream.cut(request.keep_tokens)
            self._send(stream, session, position, request)
            prompt_blocks = len(stream.keys)
            stream.extend(request.generate_tokens, self._origin(session, position, is_generated=True), self._seed)
            prefixes.append(_Prefix(len(branches), prompt_blocks, len(stream.keys)))
        branches.append(_frozen(stream.keys))
        self._branches[session], self._prefixes[session] = branches, prefixes
        if session in self._continued:
            self._ends[session] = stream

    def _send(self, stream: _Stream, session: int, position: int, request: RequestPlan) -> None:
        shared = min(self._plan.shared_prefix_tokens, request.new_tokens) if request.keep_tokens == 0 else 0
        stream.extend(shared, self._origin(self._plan.num_sessions, 0, is_generated=False), self._seed)
        named = 0
        if position == 0 and request.keep_tokens == 0:
            for name in self._plan.sessions[session].blocks:
                stream.extend(self._plan.block_tokens, mix64(NAMED_BLOCK ^ name), self._seed)
                named += self._plan.block_tokens
        origin = self._origin(session, position, is_generated=False)
        stream.extend(request.new_tokens - shared - named, origin, self._seed)

    @staticmethod
    def _origin(session: int, request: int, *, is_generated: bool) -> int:
        return (session << 33 | request << 1 | is_generated) & MASK64


def _signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key


def _frozen(keys: list[int]) -> KeyArray:
    array = np.array(keys, dtype=np.int64)
    array.flags.writeable = False
    return array


def token_block_keys(tokens: NDArray[np.int32], block_tokens: int = BLOCK_TOKENS, ahead: int = 0) -> KeyArray:
    """Keys of the full blocks of real token ids: int64, shape ((len(tokens) - ahead) // block_tokens,).

    Key i names the first (i+1) * block_tokens + ahead ids. Not the values of ``BlockKeys``: do not mix the two.
    """
    num_blocks = (len(tokens) - ahead) // block_tokens
    if num_blocks <= 0:
        return np.zeros(0, dtype=np.int64)
    blocks = np.asarray(tokens[: num_blocks * block_tokens], dtype=np.int64).astype(np.uint64)
    # A polynomial with odd, position-dependent coefficients, then a bijective scatter: one word per block.
    words = (blocks.reshape(num_blocks, block_tokens) + np.uint64(1)) * _coefficients(block_tokens)
    chain, keys = 0, np.empty(num_blocks, dtype=np.int64)
    for index, word in enumerate(words.sum(axis=1, dtype=np.uint64).tolist()):
        chain = mix64(chain ^ mix64(word))
        key, end = chain, (index + 1) * block_tokens
        for token in tokens[end : end + ahead].tolist():
            key = mix64(key ^ mix64(token + 1))
        keys[index] = _signed(key)
    return keys


@lru_cache(maxsize=8)
def _coefficients(block_tokens: int) -> NDArray[np.uint64]:
    """Odd 64-bit multipliers, one per position of a block."""
    return np.array([mix64(position) | 1 for position in range(block_tokens)], dtype=np.uint64)
