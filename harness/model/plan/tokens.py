"""Token ids and words of a plan's prompts: a pure function of (plan seed, session, request, position).

Counts are exact and prompts unique by construction: no two sessions share an aligned run of tokens that the plan does
not declare shared. Nothing is kept: each request's ids are computed when needed, so a plan of any size fits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.errors import PlanError
from harness.model.plan.model import Plan, TokenIdRange
from harness.model.plan.words import WORDS, TextSizes

TokenArray = NDArray[np.int32]
Generated = Sequence[Sequence[int] | TokenArray]  # one session's returned ids, by request

# Every 32nd stream position starts a mark: a number of the request's own, in as many digits as that takes. An aligned
# 128-token block of a session's own tokens holds four whole marks, so it equals no other session's.
MARK_PERIOD = 32

GOLDEN = 0x9E3779B97F4A7C15  # splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014)
MASK64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """The splitmix64 finaliser: a bijection of 64-bit integers that scatters every input bit."""
    value = (value + GOLDEN) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def _mix64_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class PromptIds(NamedTuple):
    """How the prompts of one run differ from those of its plan; lengths and what sessions share stay the same.

    seed: of this run alone, for a server whose cache outlives the run; None: the prompts of the plan.
    token_id_range: [low, high), where the server's model knows fewer ids than the plan; None: the plan's.
    """

    seed: int | None = None
    token_id_range: TokenIdRange | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values from which the same prompts can be made again; what is as in the plan is left out."""
        return {name: value for name, value in self._asdict().items() if value is not None}


AS_PLANNED = PromptIds()


def stream_key(plan: Plan, seed: int | None = None) -> int:
    """64-bit key of a plan's token streams, from (seed, replicate) alone: all treatments send the same tokens.

    seed: of one run, see ``PromptIds``.
    """
    of_run = "" if seed is None else f"/run{seed}"
    text = f"{plan.seed}:r{plan.replicate}/tokens{of_run}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


class Piece(NamedTuple):
    """The first ``num_tokens`` of what one earlier request sent afresh, or got back."""

    session: int
    request: int
    is_generated: bool
    num_tokens: int


def kept_pieces(plan: Plan, session: int, request: int) -> list[Piece]:
    """What the ``keep_tokens`` of a request consist of, in stream order; none is empty."""
    pieces: list[Piece] = []
    kept = plan.request(session, request).keep_tokens
    while kept > 0:
        if request == 0:
            ancestor = plan.sessions[session].continues
            assert ancestor is not None  # check_plan: only a continued stream has something to keep
            session, request = ancestor, len(plan.sessions[ancestor].requests)
        request -= 1
        earlier = plan.request(session, request)
        if kept > earlier.prompt_tokens:
            pieces.append(Piece(session, request, True, kept - earlier.prompt_tokens))
        kept = min(kept, earlier.prompt_tokens)
        if kept > earlier.keep_tokens:
            pieces.append(Piece(session, request, False, kept - earlier.keep_tokens))
        kept = min(kept, earlier.keep_tokens)
    return pieces[::-1]


class TokenStreams:
    """The prompts of one plan, request by request.

    Ids lie in ``plan.token_id_range``. The first ``shared_prefix_tokens`` ids of a stream that begins afresh are the
    same in every session. text_sizes: of the server that texts and chats are for. ids: of one run, where they are not
    those of the plan.
    """

    def __init__(self, plan: Plan, text_sizes: TextSizes | None = None, ids: PromptIds = AS_PLANNED) -> None:
        self._plan = plan
        self._text_sizes = text_sizes or TextSizes()
        self._key = stream_key(plan, ids.seed)
        low, high = ids.token_id_range or plan.token_id_range
        self._low, self._span = low, high - low
        self._most_requests = max(len(session.requests) for session in plan.sessions)
        named = max((name for session in plan.sessions for name in session.blocks), default=-1)
        highest = self._mark(plan.num_sessions, 0) if named < 0 else self._mark(plan.num_sessions + 1, 0) + named
        self._marks = _Marks(highest, self._span, self._key)
        self._word_marks = _Marks(highest, len(WORDS), self._key)

    def fresh_tokens(self, session: int, request: int) -> TokenArray:
        """The request's new ids: int32, shape (new_tokens,)."""
        return (self._fresh(session, request, self._span, self._marks) + self._low).astype(np.int32)

    def prompt(self, session: int, request: int, generated: Mapping[int, Generated]) -> TokenArray:
        """The whole prompt, int32 (prompt_tokens,), from ``generated[session][request]`` ids of all it builds on.

        Raises PlanError when fewer ids were returned than the prompt keeps.
        """
        parts: list[TokenArray] = []
        for piece in kept_pieces(self._plan, session, request):
            if not piece.is_generated:
                parts.append(self.fresh_tokens(piece.session, piece.request)[: piece.num_tokens])
                continue
            returned = generated.get(piece.session, ())
            ids = np.asarray(returned[piece.request] if piece.request < len(returned) else (), dtype=np.int32)
            if len(ids) < piece.num_tokens:
                raise PlanError(
                    f"its prompt keeps {piece.num_tokens} tokens generated by session {piece.session}, request "
                    f"{piece.request}, which returned {len(ids)}",
                    where=f"session {session}, request {request}",
                    hint="Pass the ids of every earlier request, exactly as the server returned them",
                )
            parts.append(ids[: piece.num_tokens])
        return np.concatenate([*parts, self.fresh_tokens(session, request)])

    def _fresh(self, session: int, request: int, span: int, marks: _Marks) -> NDArray[np.int64]:
        planned = self._plan.request(session, request)
        start, stop = planned.keep_tokens, planned.prompt_tokens
        numbers = self._draw(session, request, start, stop, span)
        marks.write(numbers, start, self._mark(session, request))
        if start == 0 and self._plan.shared_prefix_tokens:
            shared = self._draw(self._plan.num_sessions, 0, 0, min(self._plan.shared_prefix_tokens, stop), span)
            marks.write(shared, 0, self._mark(self._plan.num_sessions, 0))
            numbers[: len(shared)] = shared
        if request == 0 and start == 0:
            for place, name in enumerate(self._plan.sessions[session].blocks):
                self._write_block(numbers, place * self._plan.block_tokens, name, span, marks)
        return numbers

    def _write_block(self, numbers: NDArray[np.int64], start: int, name: int, span: int, marks: _Marks) -> None:
        """Overwrite ``block_tokens`` numbers from ``start`` with those of a named block."""
        stop = start + self._plan.block_tokens
        block = self._draw(self._plan.num_sessions + 1 + name, 0, start, stop, span)
        marks.write(block, start, self._mark(self._plan.num_sessions + 1, 0) + name)
        numbers[start:stop] = block

    def _mark(self, session: int, request: int) -> int:
        """The number of a request; the one after the last session's marks the shared prefix."""
        return session * self._most_requests + request

    def _draw(self, session: int, request: int, start: int, stop: int, span: int) -> NDArray[np.int64]:
        """Numbers in [0, span) for the stream positions start .. stop-1."""
        key = mix64(mix64(self._key ^ session) ^ request)
        counters = np.arange(start, stop, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(key)
        return (_mix64_array(counters) % np.uint64(span)).astype(np.int64)

    def fresh_text(self, session: int, request: int, num_tokens: int | None = None) -> str:
        """The request's new words, each with a leading space: as many as the server counts as its new tokens.

        num_tokens: the first of them only. What the server adds to the prompt is part of the count. Words that several
        sessions share are filled on their own, so that their text is the same in each.
        """
        numbers = self._fresh(session, request, len(WORDS), self._word_marks)
        stop = len(numbers) if num_tokens is None else num_tokens
        sizes, is_afresh = self._text_sizes, self._plan.request(session, request).keep_tokens == 0
        left = -float(sizes.first_tokens if is_afresh else sizes.turn_tokens)
        words: list[int] = []
        start = 0
        for end in (*self._shared_ends(session, request, len(numbers)), len(numbers)):
            end = min(end, stop)
            some, left = sizes.fill(numbers[start:end], left + end - start)
            words += some
            start = end
        return "".join(f" {WORDS[word]}" for word in words or numbers[:1].tolist())

    def _shared_ends(self, session: int, request: int, num_tokens: int) -> list[int]:
        """Where the parts of a stream that begins afresh end that other sessions may have too."""
        if self._plan.request(session, request).keep_tokens:
            return []
        size, blocks = self._plan.block_tokens, self._plan.sessions[session].blocks if request == 0 else ()
        ends = {self._plan.shared_prefix_tokens, *(size * place for place in range(1, len(blocks) + 1))}
        return sorted(end for end in ends if 0 < end < num_tokens)

    def text_prompt(self, session: int, request: int, generated: Mapping[int, Sequence[str]]) -> str:
        """The whole prompt as text, from ``generated[session][request]`` texts of all it builds on.

        What a truncation cuts out of generated text is cut by characters, in proportion to the planned tokens.
        """
        return "".join(text for _, text in self._text_pieces(session, request, generated))

    def chat_messages(self, session: int, request: int, generated: Mapping[int, Sequence[str]]) -> list[dict[str, str]]:
        """The prompt as messages: the plan's words are the user's, generated text is the assistant's.

        generated, and what a truncation cuts: as in ``text_prompt``. The last message is the user's.
        """
        messages: list[dict[str, str]] = []
        for is_generated, text in self._text_pieces(session, request, generated):
            role = "assistant" if is_generated else "user"
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += text
            else:
                messages.append({"role": role, "content": text})
        return messages

    def _text_pieces(
        self, session: int, request: int, generated: Mapping[int, Sequence[str]]
    ) -> Iterator[tuple[bool, str]]:
        """Whether the server generated it, and the text of each piece of a prompt."""
        for piece in kept_pieces(self._plan, session, request):
            if piece.is_generated:
                text = generated[piece.session][piece.request]
                planned_tokens = self._plan.request(piece.session, piece.request).generate_tokens
                yield True, text[: len(text) * piece.num_tokens // planned_tokens]
            else:
                yield False, self.fresh_text(piece.session, piece.request, piece.num_tokens)
        yield False, self.fresh_text(session, request)


class _Marks:
    """Writes a request's number into its tokens, as digits in base ``span``, scrambled by the plan's key."""

    def __init__(self, highest: int, span: int, key: int) -> None:
        self._span, self._key = span, key
        self._num_digits = 1
        while span**self._num_digits <= highest:
            self._num_digits += 1
        if self._num_digits > MARK_PERIOD:
            raise PlanError(f"{span} ids cannot tell {highest} requests apart", where="token_id_range", hint="Widen it")

    def write(self, numbers: NDArray[np.int64], start: int, mark: int) -> None:
        """Overwrite the mark positions of ``numbers``, which sit at stream positions start, start+1, ..."""
        for digit in range(self._num_digits):
            mark, value = divmod(mark, self._span)
            # The same shift for all requests, so that distinct numbers stay distinct.
            numbers[(digit - start) % MARK_PERIOD :: MARK_PERIOD] = (value + mix64(self._key + digit)) % self._span
