"""The prompts of a replay in memory that the compiled loop appends to: a session's token ids as one growing text.

The interpreter draws fresh parts ahead and builds what the loop cannot (first requests, continued streams, text
prompts); the loop carries generated ids on. Nothing is serialised twice. Next: ``core`` sends from these texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from harness.errors import PlanError
from harness.live.client.prompts import prefetch_in_turns, text_piece
from harness.live.client.wire import layout as at
from harness.live.client.wire.core import PREPARE, drive, warm_up
from harness.live.client.wire.layout import BytesArray, SharedTables, address_of
from harness.live.client.wire.memory import refuse_to_write
from harness.plan import TokenStreams

if TYPE_CHECKING:
    from harness.live.client.answer import Answer
    from harness.plan import Plan

# An id below 2**31 and its comma.
BYTES_PER_TOKEN = 11


class WireStreams:
    """Implements ``prompts.Prompts`` for the epoll client, and ``prepare`` beside it."""

    def __init__(self, plan: Plan) -> None:
        warm_up()
        self._plan = plan
        self._streams = TokenStreams(plan)
        self._is_text = plan.prompt_form == "text"
        self._first_row = [0]
        for session in plan.sessions:
            self._first_row.append(self._first_row[-1] + len(session.requests))
        self.tables = SharedTables(len(plan.sessions), self._first_row[-1])
        self._fill_rows()
        # What the addresses in the tables point to.
        self._fresh: dict[int, bytes] = {}
        self._buffers: dict[int, BytesArray] = {}
        self._prompts: dict[int, bytes] = {}
        self._generated: dict[int, list[str]] = {session.index: [] for session in plan.sessions}
        self._is_carried: set[int] = set()

    def _fill_rows(self) -> None:
        row = 0
        lines = self.tables.row
        for session in self._plan.sessions:
            for place, request in enumerate(session.requests):
                line = lines[row]
                line[at.Q_SESSION], line[at.Q_REQUEST] = session.index, place
                line[at.Q_KEEP_TOKENS], line[at.Q_PROMPT_TOKENS] = request.keep_tokens, request.prompt_tokens
                line[at.Q_GENERATE_TOKENS], line[at.Q_WAIT_NS] = request.generate_tokens, request.wait_after_ns
                line[at.Q_IS_LAST] = place == len(session.requests) - 1
                row += 1

    # -- what a script needs -------------------------------------------------------------------------------------

    def prefetch(self, session: int, request: int) -> None:
        """Draw the request's fresh part now."""
        row = self._first_row[session] + request
        line = self.tables.row[row]
        if self._is_text or line[at.Q_FRESH] or line[at.Q_STATE] != at.UNPREPARED:
            return
        num_tokens, text = text_piece(self._streams.fresh_tokens(session, request))
        self._fresh[row] = text
        line[at.Q_FRESH] = address_of(np.frombuffer(text or b" ", dtype=np.uint8))
        line[at.Q_FRESH_BYTES], line[at.Q_FRESH_TOKENS] = len(text), num_tokens

    def prefetch_all(self, sessions: Sequence[int]) -> bool:
        """Draw what fits the budget, first requests of all sessions first; True when that is all."""
        if self._is_text:
            return True
        return prefetch_in_turns(self, [self._plan.sessions[session] for session in sessions])

    def next_prompt(self, session: int, request: int) -> list[bytes]:
        """The prompt that ``prepare`` built, as JSON."""
        line = self.tables.row[self._first_row[session] + request]
        if self._is_text:
            return [self._prompts[session]]
        return [b"[", self._buffers[session][: line[at.Q_PROMPT_BYTES]].tobytes(), b"]"]

    def carry(self, session: int, answer: Answer) -> None:
        """Append what the server generated, unless the loop has already done so."""
        if self._is_text:
            self._generated[session].append("".join(answer.texts))
        elif session in self._is_carried:
            self._is_carried.discard(session)
        else:
            num_tokens, text = text_piece(answer.token_ids)
            line = self.tables.sess[session]
            used = int(line[at.S_BYTES])
            text = (b"," + text) if used and text else text
            if used + len(text) > line[at.S_ROOM]:
                refuse_to_write()
            self._buffers[session][used : used + len(text)] = np.frombuffer(text, dtype=np.uint8)
            line[at.S_BYTES] = used + len(text)
            line[at.S_TOKENS] += num_tokens

    def drop(self, session: int) -> None:
        """Forget a stream that nothing will build on, and what was drawn for it."""
        self._generated[session] = []
        self._prompts.pop(session, None)
        self._buffers.pop(session, None)
        self.tables.memory.give_up(f"session {session}")
        # No address may outlive what it points to.
        line = self.tables.sess[session]
        line[at.S_STREAM] = line[at.S_ROOM] = line[at.S_BYTES] = line[at.S_TOKENS] = line[at.S_ANSWER_AT] = 0
        first, end = self._first_row[session], self._first_row[session + 1]
        for column in (at.Q_FRESH, at.Q_FRESH_BYTES, at.Q_PROMPT, at.Q_PROMPT_BYTES):
            self.tables.row[first:end, column] = 0
        for row in range(first, end):
            self._fresh.pop(row, None)

    # -- what the replay needs -----------------------------------------------------------------------------------

    def note_carried(self, session: int) -> None:
        """The loop has appended the answer that is about to be judged."""
        self._is_carried.add(session)

    def forget_fresh(self, row: int) -> None:
        """The row's fresh part is in its session's text, and was sent."""
        self._fresh.pop(row, None)

    def prepare(self, row: int) -> None:
        """Build a row's prompt; everything before it must have been carried. Raises PlanError as ``take_tokens``."""
        session, request = (int(self.tables.row[row, column]) for column in (at.Q_SESSION, at.Q_REQUEST))
        if self._is_text:
            self._prepare_text(row, session, request)
            return
        self.prefetch(session, request)
        if request == 0:
            self._begin_stream(session)
        event = drive(self.tables.reg, PREPARE, row)
        if event == at.E_NO_ROOM:
            refuse_to_write()
        if event != at.GO_ON:
            keep_tokens, has_tokens = int(self.tables.row[row, at.Q_KEEP_TOKENS]), int(self.tables.sess[session, 4])
            raise PlanError(
                f"keeps {keep_tokens} tokens of a stream that is {keep_tokens - has_tokens} tokens shorter",
                where=f"session {session}",
            )

    def _prepare_text(self, row: int, session: int, request: int) -> None:
        text = json.dumps(self._streams.text_prompt(session, request, self._generated)).encode()
        self._prompts[session] = text
        line = self.tables.row[row]
        line[at.Q_PROMPT], line[at.Q_PROMPT_BYTES] = address_of(np.frombuffer(text, dtype=np.uint8)), len(text)
        line[at.Q_STATE] = at.READY

    def _begin_stream(self, session: int) -> None:
        """Memory for a session's text, beginning with the text of the session that it continues."""
        plan = self._plan.sessions[session]
        line = self.tables.sess[session]
        parent = None if plan.continues is None else self.tables.sess[plan.continues]
        num_tokens = max(item.prompt_tokens + item.generate_tokens for item in plan.requests)
        num_tokens = max(num_tokens, 0 if parent is None else int(parent[at.S_TOKENS]))
        buffer = self.tables.memory.table(f"session {session}", (num_tokens + 1) * BYTES_PER_TOKEN, np.uint8)
        line[at.S_STREAM], line[at.S_ROOM] = address_of(buffer), len(buffer)
        line[at.S_BYTES] = line[at.S_TOKENS] = 0
        if parent is not None and plan.continues in self._buffers:
            used = int(parent[at.S_BYTES])
            buffer[:used] = self._buffers[plan.continues][:used]
            line[at.S_BYTES], line[at.S_TOKENS] = used, parent[at.S_TOKENS]
        self._buffers[session] = buffer
