"""What each session does next: prompts as kept bytes, rows, and who becomes due when an answer is complete.

Both replay clients follow this one script, so their rows mean the same. It opens no socket, reads no clock and never
re-serialises a prompt: a session's token-id stream only grows by pieces of text. Next: ``wire`` and ``portable`` send
what it hands out.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from harness.clock import ScaledClock
from harness.live.client_answer import Answer
from harness.live.client_prompts import prompts_of
from harness.live.client_rows import ChunkRows, RequestRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.plan import Plan


class Due(NamedTuple):
    """A request that became due at ``due_ns`` (clock ns)."""

    due_ns: int
    row: int


class ReplayEvent(NamedTuple):
    """One more request has its final row. Told to ``on_event`` from a thread that cannot hold the replay up."""

    session: int
    request: int
    status: str
    num_finished: int
    num_requests: int


class Script:
    """The plan as a state machine over rows; row = position of a request in plan order.

    Contract with a client: ``release`` once; then for each Due, ``body`` just before it is sent, and ``complete`` or
    ``fail`` exactly once; ``settle`` after ``complete`` and before the session's next ``body``.
    """

    def __init__(self, plan: Plan, *, model: str, stream: bool, clock: ScaledClock, tells: bool = True) -> None:
        self.plan = plan
        self._tells = tells
        self.stream = stream
        self.clock = clock
        self.rows = RequestRows(plan)
        self.chunks = ChunkRows()
        self.nonce = os.urandom(4).hex()
        self.num_finished = 0
        self.has_all_fresh = False
        self.finished_events: list[ReplayEvent] = []
        self._prompts = prompts_of(plan)
        self._requests = [request for session in plan.sessions for request in session.requests]
        self._first_row = [0]
        for session in plan.sessions:
            self._first_row.append(self._first_row[-1] + len(session.requests))
        self._has_failed = [False] * len(plan.sessions)
        self._followers: list[list[int]] = [[] for _ in plan.sessions]
        self._keeps_stream = [False] * len(plan.sessions)
        for session in plan.sessions:
            if session.after is not None:
                self._followers[session.after].append(session.index)
            if session.continues is not None:
                self._keeps_stream[session.continues] = True
        for row in range(self.rows.count):
            session, request = self.rows.session[row], self.rows.request[row]
            self.rows.request_id[row] = f"{self.nonce}-{session}-{request}"
        self._needs_token_ids = plan.prompt_form == "token-ids"
        self._body_start = f'{{"model":{json.dumps(model)},"prompt":'.encode()
        streaming = b'"stream":true,"stream_options":{"include_usage":true}' if stream else b'"stream":false'
        # No min_tokens: ignore_eos gives the exact length, and min_tokens kills a bf16 vllm-rbln 0.11.1 engine (its
        # logits processor writes float32 into bfloat16 logits).
        self._body_end = (
            b',"max_tokens":%%d,"ignore_eos":true,"temperature":0,"seed":%d,"return_token_ids":true,'
            b'"request_id":"%%b",%b}' % (plan.seed, streaming)
        )

    # -- positions ---------------------------------------------------------------------------------------------

    @property
    def num_sessions(self) -> int:
        return len(self.plan.sessions)

    @property
    def is_finished(self) -> bool:
        return self.num_finished == self.rows.count

    def is_last_of_session(self, row: int) -> bool:
        return row + 1 == self._first_row[self.rows.session[row] + 1]

    def parent_of(self, row: int) -> int | None:
        """The session whose stream this row's session continues, for its first request only."""
        return None if self.rows.request[row] else self.plan.sessions[self.rows.session[row]].continues

    # -- who is due --------------------------------------------------------------------------------------------

    def release(self, start_ns: int) -> list[Due]:
        """The first requests of all sessions that follow nobody, due from the common start (clock ns) on."""
        return [
            self._make_due(self._first_row[session.index], start_ns, session.start_offset_ns)
            for session in self.plan.sessions
            if session.after is None
        ]

    def _start_followers(self, session: int, trigger_ns: int) -> list[Due]:
        return [
            self._make_due(self._first_row[follower], trigger_ns, self.plan.sessions[follower].start_offset_ns)
            for follower in self._followers[session]
        ]

    def _make_due(self, row: int, trigger_ns: int, wait_ns: int) -> Due:
        self.rows.trigger_ns[row] = trigger_ns
        self.rows.due_ns[row] = trigger_ns + wait_ns
        return Due(trigger_ns + wait_ns, row)

    def complete(self, row: int, done_ns: int) -> list[Due]:
        """A 200 answer ended at ``done_ns`` (CLOCK_MONOTONIC): what it makes due.

        Its content is judged by ``settle``.
        """
        self.rows.done_ns[row] = done_ns
        trigger_ns = self.clock.from_monotonic_ns(done_ns)
        if self.is_last_of_session(row):
            return self._start_followers(self.rows.session[row], trigger_ns)
        return [self._make_due(row + 1, trigger_ns, self._requests[row].wait_after_ns)]

    def settle(self, row: int, answer: Answer) -> list[Due]:
        """Judge a complete answer, write its row and carry its token ids on.

        An answer that breaks the plan ends its session: what ``complete`` made due of it must not be sent
        (``may_send``), and what is returned, the sessions that follow, becomes due instead.
        """
        rows, session, planned = self.rows, self.rows.session[row], self._requests[row]
        self._copy_counts(row, answer)
        status, error = "ok", ""
        if answer.problem:
            status, error = "bad_response", answer.problem
        elif answer.num_tokens != planned.generate_tokens:
            status = "wrong_length"
            error = f"{answer.num_tokens} tokens generated, {planned.generate_tokens} planned"
        elif answer.prompt_tokens != planned.prompt_tokens and self.plan.prompt_form == "token-ids":
            # A server that re-tokenises text may count otherwise; the drift is in the row's two columns.
            status = "wrong_length"
            error = f"the server counted {answer.prompt_tokens} prompt tokens, {planned.prompt_tokens} were sent"
        self._finish_row(row, status, error)
        if status != "ok":
            self._fail_rest(row, rows.done_ns[row])
            is_last = self.is_last_of_session(row)
            return [] if is_last else self._start_followers(session, self.clock.from_monotonic_ns(rows.done_ns[row]))
        if answer.token_ids:
            rows.token_digest[row] = token_digest(answer.token_ids)
        if self._is_continued(row):
            self._prompts.carry(session, answer)
        elif self.is_last_of_session(row):
            self._prompts.drop(session)
        return []

    def fail(self, row: int, done_ns: int, status: str, error: str, answer: Answer | None = None) -> list[Due]:
        """The request came to nothing at ``done_ns`` (CLOCK_MONOTONIC); its session ends, sessions after it go on."""
        self.rows.done_ns[row] = done_ns
        if answer is not None:
            self._copy_counts(row, answer)
        self._finish_row(row, status, error)
        self._fail_rest(row, done_ns)
        return self._start_followers(self.rows.session[row], self.clock.from_monotonic_ns(done_ns))

    def skip_session(self, row: int, error: str, now_ns: int) -> list[Due]:
        """This row cannot be sent at all: it and the rest of its session become "not_sent"; sessions after it go on."""
        self._finish_row(row, "not_sent", error)
        self._fail_rest(row, now_ns)
        return self._start_followers(self.rows.session[row], self.clock.from_monotonic_ns(now_ns))

    def stop(self, now_ns: int) -> None:
        """Everything without a final row becomes "not_sent"; the client has already failed what was in flight."""
        for row in range(self.rows.count):
            if not self.rows.status[row]:
                self._never_due(row, now_ns)
                self._finish_row(row, "not_sent", "the replay was stopped")

    def may_send(self, row: int) -> bool:
        """False when the row already has a final status: its session failed after it had become due."""
        return not self.rows.status[row]

    def blocked_by(self, row: int) -> str:
        """Why this row can never be sent, or an empty string."""
        parent = self.parent_of(row)
        if parent is not None and self._has_failed[parent]:
            return f"session {parent}, which it continues, failed"
        return ""

    def _fail_rest(self, row: int, now_ns: int) -> None:
        session = self.rows.session[row]
        self._has_failed[session] = True
        self._prompts.drop(session)
        for later in range(row + 1, self._first_row[session + 1]):
            self._never_due(later, now_ns)
            self._finish_row(later, "not_sent", f"request {self.rows.request[row]} of its session failed")

    def _never_due(self, row: int, now_ns: int) -> None:
        """A row that never became due: both instants say when that was decided, so that neither is a made-up plan."""
        if self.rows.trigger_ns[row] < 0:
            self.rows.trigger_ns[row] = self.rows.due_ns[row] = self.clock.from_monotonic_ns(now_ns)

    def _finish_row(self, row: int, status: str, error: str) -> None:
        rows = self.rows
        rows.status[row], rows.error[row] = status, error
        self.num_finished += 1
        if self._tells:
            event = ReplayEvent(rows.session[row], rows.request[row], status, self.num_finished, rows.count)
            self.finished_events.append(event)

    def _copy_counts(self, row: int, answer: Answer) -> None:
        rows = self.rows
        rows.response_id[row], rows.finish_reason[row] = answer.response_id, answer.finish_reason
        rows.cached_tokens[row] = answer.cached_tokens
        if answer.prompt_tokens is not None:
            rows.prompt_tokens[row] = answer.prompt_tokens
        if answer.num_tokens is not None:
            rows.completion_tokens[row] = answer.num_tokens
        self.chunks.extend(row, answer.chunks)

    # -- what is sent ------------------------------------------------------------------------------------------

    def _is_continued(self, row: int) -> bool:
        """True when what this request generates is part of a later prompt; a truncation may have cut it off."""
        if self.is_last_of_session(row):
            return self._keeps_stream[self.rows.session[row]]
        return self._requests[row + 1].keep_tokens > self._requests[row].prompt_tokens

    def new_answer(self) -> Answer:
        """An empty answer of the form this replay asks for."""
        return Answer(self.stream, self._needs_token_ids)

    def prefetch_all(self) -> None:
        """Draw what the whole replay will send, as far as that fits in memory."""
        self.has_all_fresh = self._prompts.prefetch_all()

    def prefetch_next(self, row: int) -> bool:
        """Prefetch the request that follows in the row's session, if there is one; False: nothing left to do."""
        if not self.is_last_of_session(row):
            self._prompts.prefetch(self.rows.session[row + 1], self.rows.request[row + 1])
        return False

    def body(self, row: int) -> bytes:
        """The JSON body of the row's request; call once, after everything before it in its stream is settled."""
        length = self._requests[row].generate_tokens
        end = self._body_end % (length, self.rows.request_id[row].encode())
        return b"".join(
            (self._body_start, self._prompts.next_prompt(self.rows.session[row], self.rows.request[row]), end)
        )


def token_digest(token_ids: Sequence[int]) -> str:
    """SHA-256 of the ids as little-endian int32."""
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return sha256(ids.tobytes()).hexdigest()
