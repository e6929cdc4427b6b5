"""What a request says: its prompt as JSON text, the further members of its body, and its HTTP headers.

Each session's stream grows by pieces, each serialised once. Token-id prompts carry the server's ids forward exactly;
text prompts and chat messages carry its text, for servers that tokenise it again. There is no socket and no clock here.
Values of environment variables are in no record: they are noted as secrets.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import PlanError, SpecError
from harness.model.plan.tokens import AS_PLANNED, PromptIds, TokenStreams
from harness.model.spec.workload import PLACEHOLDER, RequestSpec
from harness.secrets import environment_secret

if TYPE_CHECKING:
    from harness.measure.client.answer import ReceivedAnswer
    from harness.model.plan.model import Plan
    from harness.model.plan.words import TextSizes

# About 60 MB of text. Larger plans draw the rest during the run, while nothing is due.
PREFETCH_TOKENS = 10_000_000


class TextPiece(NamedTuple):
    """``num_tokens`` token ids as comma-separated decimal text."""

    num_tokens: int
    text: bytes


class TokenIdPrompts:
    """Each stream is a list of pieces; a prompt is one join of them. ``session``, ``request``: plan indices."""

    def __init__(self, plan: Plan, ids: PromptIds = AS_PLANNED) -> None:
        self._plan = plan
        self._streams = TokenStreams(plan, ids=ids)
        self._pieces: list[list[TextPiece]] = [[] for _ in plan.sessions]
        self._fresh: dict[tuple[int, int], TextPiece] = {}
        self._num_prompted = array("i", [0]) * len(plan.sessions)
        self._keep_tokens = [[request.keep_tokens for request in session.requests] for session in plan.sessions]

    def prefetch(self, session: int, request: int) -> None:
        """Draw the request's fresh part now, so that ``next_prompt`` has little left to compute."""
        if request >= self._num_prompted[session] and (session, request) not in self._fresh:
            self._fresh[session, request] = text_piece(self._streams.fresh_tokens(session, request))

    def prefetch_all(self, sessions: Sequence[int]) -> bool:
        """Draw the first requests of these sessions, then the second, and so on, within the budget.

        Returns whether everything was drawn.
        """
        left = PREFETCH_TOKENS
        plans = [self._plan.sessions[session] for session in sessions]
        for request in range(max(len(session.requests) for session in plans)):
            for session in plans:
                if request < len(session.requests):
                    self.prefetch(session.index, request)
                    left -= session.requests[request].new_tokens
                if left < 0:
                    return False
        return True

    def next_prompt(self, session: int, request: int) -> list[bytes]:
        """The JSON value of the request's prompt in parts; once per request, after everything before it was carried."""
        keep_tokens = self._keep_tokens[session][request]
        prompt: list[TextPiece] = []
        if keep_tokens:
            parent = self._plan.sessions[session].continues if request == 0 else session
            known = [] if parent is None else self._pieces[parent]
            prompt = take_tokens(known, keep_tokens, where=f"session {session}")
        self._num_prompted[session] = request + 1
        fresh = self._fresh.pop((session, request), None)
        prompt.append(fresh or text_piece(self._streams.fresh_tokens(session, request)))
        self._pieces[session] = prompt
        parts = [b"["]
        for num_tokens, text in prompt:
            if num_tokens:
                parts += (text, b",")
        if len(parts) > 1:
            parts.pop()
        parts.append(b"]")
        return parts

    def carry(self, session: int, answer: ReceivedAnswer) -> None:
        """Append what the server generated to the session's stream."""
        # The decimal text of most ids was made while the answer was still coming in.
        self._pieces[session].append(TextPiece(len(answer.token_ids), ",".join(answer.id_texts).encode()))

    def drop(self, session: int) -> None:
        """Forget a stream that nothing will build on."""
        self._pieces[session] = []


class TextPrompts:
    """As ``TokenIdPrompts``, in words or chat messages; ``TokenStreams`` says how a stream is cut and continued."""

    def __init__(self, plan: Plan, text_sizes: TextSizes, ids: PromptIds = AS_PLANNED) -> None:
        streams = TokenStreams(plan, text_sizes, ids)
        self._prompt = streams.chat_messages if plan.prompt_form == "chat" else streams.text_prompt
        self._generated: dict[int, list[str]] = {session.index: [] for session in plan.sessions}

    def prefetch(self, session: int, request: int) -> None:
        """Text prompts are built when they are needed; nothing to draw ahead."""

    def prefetch_all(self, sessions: Sequence[int]) -> bool:
        del sessions
        return True

    def next_prompt(self, session: int, request: int) -> list[bytes]:
        # Answers that no later prompt contains are not carried: keep the others at the place of their request.
        texts = self._generated[session]
        texts.extend([""] * (request - len(texts)))
        return [json.dumps(self._prompt(session, request, self._generated)).encode()]

    def carry(self, session: int, answer: ReceivedAnswer) -> None:
        self._generated[session].append("".join(answer.texts))

    def drop(self, session: int) -> None:
        self._generated[session] = []


def prompts_of(plan: Plan, text_sizes: TextSizes, ids: PromptIds = AS_PLANNED) -> TokenIdPrompts | TextPrompts:
    """The prompts of a plan in the form it asks for. text_sizes: of the server they are for. ids: of one run."""
    return TokenIdPrompts(plan, ids) if plan.prompt_form == "token-ids" else TextPrompts(plan, text_sizes, ids)


def text_piece(token_ids: Sequence[int] | NDArray[np.int32]) -> TextPiece:
    """Token ids as the text that represents them in every prompt."""
    ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
    return TextPiece(len(ids), ",".join(map(str, ids)).encode())


def take_tokens(pieces: Sequence[TextPiece], num_tokens: int, *, where: str) -> list[TextPiece]:
    """The first ``num_tokens`` of a stream as a new list; only a piece that is cut is copied.

    Raises PlanError when the stream is shorter.
    """
    taken: list[TextPiece] = []
    left = num_tokens
    for piece in pieces:
        if left < piece.num_tokens:
            if left:
                taken.append(TextPiece(left, b",".join(piece.text.split(b",", left)[:left])))
            return taken
        taken.append(piece)
        left -= piece.num_tokens
    if left:
        raise PlanError(f"keeps {num_tokens} tokens of a stream that is {left} tokens shorter", where=where)
    return taken


Values = Mapping[str, int | float | str | None]


class RequestOptions:
    """The options of a replay's requests.

    Raises SpecError where an environment variable is missing.
    """

    def __init__(self, spec: RequestSpec) -> None:
        self.length_key = b"max_completion_tokens" if spec.max_completion_tokens else b"max_tokens"
        self.temperature = f"{spec.temperature:g}".encode()
        names = {match[3] for text in spec.headers.values() for match in PLACEHOLDER.finditer(text) if match[2]}
        self._environment = {f"env:{name}": _variable(name) for name in sorted(names)}
        self._body, self._headers = spec.extra_body, spec.headers
        is_filled = bool(PLACEHOLDER.search(json.dumps(spec.extra_body)))
        self._constant_body = None if is_filled else _members(spec.extra_body)
        self._constant_headers = None if spec.headers else ""

    def body(self, values: Callable[[], Values]) -> bytes:
        """The further members of the JSON body, each with a comma before it."""
        return _members(_filled(self._body, values())) if self._constant_body is None else self._constant_body

    def headers(self, values: Callable[[], Values]) -> dict[str, str]:
        """The further headers; those whose value is one placeholder without a value are left out."""
        if self._constant_headers is not None:
            return {}
        known = {**values(), **self._environment}
        filled = {name: _filled(text, known) for name, text in self._headers.items()}
        return {name: str(text) for name, text in filled.items() if text is not None}


def request_values(
    session: int, turn: int, names: tuple[str, str], wait_ns: int | None, lengths: tuple[int, int]
) -> Values:
    """What placeholders stand for. names: of the session and the request. wait_ns: None for a session's last request.
    lengths: prompt and answer."""
    return {
        "session": session,
        "turn": turn,
        "session_id": names[0],
        "request_id": names[1],
        "expected_wait_s": None if wait_ns is None else wait_ns / NS_PER_S,
        "expected_wait_ms": None if wait_ns is None else wait_ns / NS_PER_MS,
        "prompt_tokens": lengths[0],
        "generate_tokens": lengths[1],
    }


def _members(body: Mapping[str, Any]) -> bytes:
    return b"".join(f",{json.dumps(name)}:{json.dumps(value)}".encode() for name, value in body.items())


def _filled(value: Any, values: Values) -> Any:
    """The value with its placeholders filled in; a text that is one placeholder becomes what stands for it."""
    if isinstance(value, str):
        whole = PLACEHOLDER.fullmatch(value)
        if whole and not whole[1]:
            return values[_name_of(whole)]
        return PLACEHOLDER.sub(lambda match: _text_for(match, values), value)
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {_as_text(_filled(name, values)): _filled(item, values) for name, item in items}
    if isinstance(value, list | tuple):
        return [_filled(item, values) for item in cast("list[Any]", value)]
    return value


def _text_for(placeholder: re.Match[str], values: Values) -> str:
    literal = placeholder[1]
    return f"{{{literal}}}" if literal else _as_text(values[_name_of(placeholder)])


def _name_of(placeholder: re.Match[str]) -> str:
    return (placeholder[2] or "") + placeholder[3]


def _as_text(value: object) -> str:
    return "none" if value is None else str(value)


def _variable(name: str) -> str:
    text = environment_secret(name)
    if not text:
        raise SpecError(
            f"the environment has no usable text in {name}", where="workload.request.headers", hint=f"export {name}=..."
        )
    return text
