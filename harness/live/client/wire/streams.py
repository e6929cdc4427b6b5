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
from harness.live.client.wire import events
from harness.live.client.wire.core import PREPARE, drive, warm_up
from harness.live.client.wire.layout import READY, UNPREPARED
from harness.live.client.wire.memory import refuse_to_write
from harness.live.client.wire.tables import BytesArray, SharedTables, address_of
from harness.plan import TokenStreams

if TYPE_CHECKING:
    from harness.live.client.answer import Answer
    from harness.live.client.wire.layout import RequestState
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
        rows = iter(self.tables.requests)
        for session in self._plan.sessions:
            for place, request in enumerate(session.requests):
                row = next(rows)
                row.session, row.request = session.index, place
                row.keep_tokens, row.prompt_tokens = request.keep_tokens, request.prompt_tokens
                row.generate_tokens, row.wait_ns = request.generate_tokens, request.wait_after_ns
                row.abort_tokens = request.abort_after_tokens
                row.is_last = place == len(session.requests) - 1

    # -- what a script needs -------------------------------------------------------------------------------------

    def prefetch(self, session: int, request: int) -> None:
        """Draw the request's fresh part now."""
        place = self._first_row[session] + request
        row = self.tables.requests[place]
        if self._is_text or row.fresh_at or row.readiness != UNPREPARED:
            return
        row.fresh_tokens, text = text_piece(self._streams.fresh_tokens(session, request))
        self._fresh[place] = text
        row.fresh_at, row.fresh_bytes = address_of(np.frombuffer(text or b" ", dtype=np.uint8)), len(text)

    def prefetch_all(self, sessions: Sequence[int]) -> bool:
        """Draw what fits the budget, first requests of all sessions first; True when that is all."""
        if self._is_text:
            return True
        return prefetch_in_turns(self, [self._plan.sessions[session] for session in sessions])

    def next_prompt(self, session: int, request: int) -> list[bytes]:
        """The prompt that ``prepare`` built, as JSON."""
        if self._is_text:
            return [self._prompts[session]]
        num_bytes = self.tables.requests[self._first_row[session] + request].prompt_bytes
        return [b"[", self._buffers[session][:num_bytes].tobytes(), b"]"]

    def carry(self, session: int, answer: Answer) -> None:
        """Append what the server generated, unless the loop has already done so."""
        if self._is_text:
            self._generated[session].append("".join(answer.texts))
        elif session in self._is_carried:
            self._is_carried.discard(session)
        else:
            num_tokens, text = text_piece(answer.token_ids)
            state = self.tables.sessions[session]
            used = state.used_bytes
            text = (b"," + text) if used and text else text
            if used + len(text) > state.room_bytes:
                refuse_to_write()
            self._buffers[session][used : used + len(text)] = np.frombuffer(text, dtype=np.uint8)
            state.used_bytes = used + len(text)
            state.num_tokens += num_tokens

    def drop(self, session: int) -> None:
        """Forget a stream that nothing will build on, and what was drawn for it."""
        self._generated[session] = []
        self._prompts.pop(session, None)
        self._buffers.pop(session, None)
        self.tables.memory.give_up(f"session {session}")
        # No address may outlive what it points to.
        state = self.tables.sessions[session]
        state.stream_at = state.room_bytes = state.used_bytes = state.num_tokens = state.answer_from = 0
        for place in range(self._first_row[session], self._first_row[session + 1]):
            row = self.tables.requests[place]
            row.fresh_at = row.fresh_bytes = row.prompt_at = row.prompt_bytes = 0
            self._fresh.pop(place, None)

    # -- what the replay needs -----------------------------------------------------------------------------------

    def note_carried(self, session: int) -> None:
        """The loop has appended the answer that is about to be judged."""
        self._is_carried.add(session)

    def forget_fresh(self, row: int) -> None:
        """The row's fresh part is in its session's text, and was sent."""
        self._fresh.pop(row, None)

    def prepare(self, row: int) -> None:
        """Build a row's prompt; everything before it must have been carried. Raises PlanError as ``take_tokens``."""
        state = self.tables.requests[row]
        if self._is_text:
            self._prepare_text(state)
            return
        self.prefetch(state.session, state.request)
        if state.request == 0:
            self._begin_stream(state.session)
        event = drive(self.tables.address, PREPARE, row)
        if event == events.NO_ROOM:
            refuse_to_write()
        if event != events.GO_ON:
            missing = state.keep_tokens - self.tables.sessions[state.session].num_tokens
            raise PlanError(
                f"keeps {state.keep_tokens} tokens of a stream that is {missing} tokens shorter",
                where=f"session {state.session}",
            )

    def _prepare_text(self, row: RequestState) -> None:
        text = json.dumps(self._streams.text_prompt(row.session, row.request, self._generated)).encode()
        self._prompts[row.session] = text
        row.prompt_at, row.prompt_bytes = address_of(np.frombuffer(text, dtype=np.uint8)), len(text)
        row.readiness = READY

    def _begin_stream(self, session: int) -> None:
        """Memory for a session's text, beginning with the text of the session that it continues."""
        plan = self._plan.sessions[session]
        state = self.tables.sessions[session]
        parent = None if plan.continues is None else self.tables.sessions[plan.continues]
        num_tokens = max(item.prompt_tokens + item.generate_tokens for item in plan.requests)
        num_tokens = max(num_tokens, 0 if parent is None else parent.num_tokens)
        buffer = self.tables.memory.table(f"session {session}", (num_tokens + 1) * BYTES_PER_TOKEN, np.uint8)
        state.stream_at, state.room_bytes = address_of(buffer), len(buffer)
        state.used_bytes = state.num_tokens = 0
        if parent is not None and plan.continues in self._buffers:
            buffer[: parent.used_bytes] = self._buffers[plan.continues][: parent.used_bytes]
            state.used_bytes, state.num_tokens = parent.used_bytes, parent.num_tokens
        self._buffers[session] = buffer
