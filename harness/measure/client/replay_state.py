"""The state of a replay: which requests become due after an answer, their bytes, and their rows.

Any client follows it, so that rows mean the same. It opens no socket, reads no clock and never serialises a
prompt again: a session's token-id stream only grows by pieces of text.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections import Counter
from functools import partial
from hashlib import sha256
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from harness.clock import NS_PER_MS
from harness.measure.client.answer import SESSION_TOKEN_HEADER, ReceivedAnswer
from harness.measure.client.prompts import RequestOptions, Values, prompts_of, request_values
from harness.measure.client.rows import ChunkRows, RequestRows
from harness.measure.records.schema import ABORTED
from harness.model.plan.event_queue import return_waits_ns, whole_sessions
from harness.model.plan.model import Followers
from harness.secrets import without_secrets

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from harness.measure.client.target import Target
    from harness.model.plan.model import Plan


OWN_REQUESTS = "rbln-harness-"
"""The ids of all requests begin so: a recorder in the server tells them from those of agents."""
# A working client beats every 50 ms, or 50 ms later where sends leave no time.
PAUSE_NS = 250 * NS_PER_MS
MAX_PAUSES = 1_000


class Due(NamedTuple):
    """A request that became due at ``due_ns`` (clock ns)."""

    due_ns: int
    row: int


class ReplayEvent(NamedTuple):
    """A request has its final row.

    late_ns: clock ns from due to sent; None: never sent.
    """

    session: int
    request: int
    status: str
    late_ns: int | None
    num_finished: int
    num_requests: int


class ReplayState:
    """The plan as a state machine over rows; row = position of a request in plan order.

    Contract with a client: ``release`` once; then for each Due, ``body_parts`` just before it is sent, and one of
    ``complete``, ``leave`` or ``fail`` exactly once; after ``complete``, ``judge`` before the session's next
    ``body_parts``, and ``book`` at any time after that.
    """

    def __init__(
        self, plan: Plan, target: Target, *, keeps_events: bool = True, only: Collection[int] | None = None
    ) -> None:
        """only: the sessions that this process replays, with the sessions that they follow or continue; None: all."""
        self.plan = plan
        mine = range(len(plan.sessions)) if only is None else only
        self._mine = [session for session in plan.sessions if session.index in mine]
        self._num_mine = sum(len(session.requests) for session in self._mine)
        self._keeps_events = keeps_events
        self.stream = target.options.stream
        self.clock = target.clock
        self.rows = RequestRows(plan, target.records)
        self.chunks = ChunkRows(target.records)
        self.is_strict = target.is_strict
        # What was tolerated, each with the number of answers.
        self.tolerated: Counter[str] = Counter()
        self._replica_header = target.replica_header.lower().encode()
        # By request id: what the response's header said.
        self.replicas: dict[str, str] = {}
        # By whole session: what goes back to a router with its next request.
        self._session_tokens: dict[int, str] = {}
        self.nonce = OWN_REQUESTS + os.urandom(4).hex()
        self.num_finished = 0
        self.has_all_fresh = False
        self.finished_events: list[ReplayEvent] = []
        self._beat_ns = 0
        self._pauses: list[tuple[int, int]] = []
        self._prompts = prompts_of(plan, target.text_sizes, target.prompt_ids)
        self._wait_after_ns = [request.wait_after_ns for request in plan.requests]
        self._return_waits_ns, self._whole_sessions = return_waits_ns(plan), whole_sessions(plan).tolist()
        self._generate_tokens = [request.generate_tokens for request in plan.requests]
        self._prompt_tokens = [request.prompt_tokens for request in plan.requests]
        self.abort_after_ns = [request.abort_after_ns for request in plan.requests]
        self.abort_after_tokens = [request.abort_after_tokens for request in plan.requests]
        self._first_row = [0, *accumulate(len(session.requests) for session in plan.sessions)]
        self._has_failed = [False] * len(plan.sessions)
        self._followers = Followers(plan)
        self.is_last = [False] * self.rows.count
        for past_the_end in self._first_row[1:]:
            self.is_last[past_the_end - 1] = True
        self.is_continued = continued_requests(plan)
        for row in range(self.rows.count):
            session, request = self.rows.session[row], self.rows.request[row]
            self.rows.request_id[row] = f"{self.nonce}-{session}-{request}"
        self.needs_token_ids = plan.prompt_form == "token-ids"
        streaming = b'"stream":true,"stream_options":{"include_usage":true}' if self.stream else b'"stream":false'
        is_chat = plan.prompt_form == "chat"
        self.path = "/v1/chat/completions" if is_chat else "/v1/completions"
        prompt_key = "messages" if is_chat else "prompt"
        self._before_prompt = f'{{"model":{json.dumps(target.model)},"{prompt_key}":'.encode()
        # No min_tokens: ignore_eos gives the exact length, and min_tokens kills a bf16 vllm-rbln 0.11.1 engine (its
        # logits processor writes float32 into bfloat16 logits).
        self._request_options = RequestOptions(target.request)
        self._options = b'"ignore_eos":true,"temperature":%b,"seed":%d,"return_token_ids":true,%b' % (
            self._request_options.temperature,
            plan.seed,
            streaming,
        )

    # -- positions ---------------------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        return self.num_finished == self._num_mine

    def rows_table(self) -> pa.Table:
        """The REQUESTS table of the sessions that are replayed here, in plan order."""
        table = self.rows.to_table(self.plan, self.clock)
        if self._num_mine == self.rows.count:
            return table
        first = self._first_row
        return table.take([row for item in self._mine for row in range(first[item.index], first[item.index + 1])])

    # -- who is due --------------------------------------------------------------------------------------------

    def release(self, start_ns: int) -> list[Due]:
        """The first requests of all sessions that follow no other, due from the common start (clock ns) on."""
        return [
            self._make_due(self._first_row[session.index], start_ns, session.start_offset_ns)
            for session in self._mine
            if session.after is None
        ]

    def _start_followers(self, session: int, trigger_ns: int) -> list[Due]:
        return [
            self._make_due(self._first_row[follower], trigger_ns, self.plan.sessions[follower].start_offset_ns)
            for follower in self._followers.completed(session)
        ]

    def _make_due(self, row: int, trigger_ns: int, wait_ns: int) -> Due:
        self.rows.trigger_ns[row] = trigger_ns
        self.rows.due_ns[row] = trigger_ns + wait_ns
        return Due(trigger_ns + wait_ns, row)

    def complete(self, row: int, done_ns: int) -> list[Due]:
        """A 200 answer ended at ``done_ns`` (CLOCK_MONOTONIC): the requests that become due."""
        rows = self.rows
        rows.done_ns[row] = done_ns
        trigger_ns = self.clock.from_monotonic_ns(done_ns)
        if self.is_last[row]:
            return self._start_followers(rows.session[row], trigger_ns)
        due_ns = trigger_ns + self._wait_after_ns[row]
        row += 1
        rows.trigger_ns[row] = trigger_ns
        rows.due_ns[row] = due_ns
        return [Due(due_ns, row)]

    def judge(self, row: int, answer: ReceivedAnswer) -> list[Due]:
        """Give a complete answer its status, and carry its token ids into the session's stream.

        An answer that breaks the plan ends its session. The request that ``complete`` made due must then not be sent
        (``may_send``); returned are the first requests of following sessions, which become due instead.
        """
        session, num_tokens = self.rows.session[row], answer.num_tokens
        status, error = "ok", ""
        if answer.problem:
            status, error = "bad_response", answer.problem
        elif num_tokens != self._generate_tokens[row]:
            status = "wrong_length"
            error = f"{num_tokens} tokens generated, {self._generate_tokens[row]} planned"
        elif answer.prompt_tokens != self._prompt_tokens[row] and self.needs_token_ids:
            # A server that re-tokenises text may count otherwise; the drift is in the row's two columns.
            status = "wrong_length"
            error = f"the server counted {answer.prompt_tokens} prompt tokens, {self._prompt_tokens[row]} were sent"
        self._finish_row(row, status, error)
        if status != "ok":
            done_ns = self.rows.done_ns[row]
            self._fail_rest(row, done_ns)
            return [] if self.is_last[row] else self._start_followers(session, self.clock.from_monotonic_ns(done_ns))
        self._carry(row, answer)
        return []

    def book(self, row: int, answer: ReceivedAnswer) -> None:
        """Write a judged answer into its row and chunks, at any time."""
        is_whole = bool(answer.token_ids) and self.rows.status[row] == "ok"
        self._copy_counts(row, answer, token_digest(answer.token_ids) if is_whole else "")

    def _carry(self, row: int, answer: ReceivedAnswer) -> None:
        """Keep what the server generated where a later prompt contains it, and its router's token of the session."""
        session = self.rows.session[row]
        if answer.session_token:
            self._session_tokens[self._whole_sessions[session]] = answer.session_token
        if self.is_continued[row]:
            self._prompts.carry(session, answer)
        elif self.is_last[row]:
            self._prompts.drop(session)

    def fail(self, row: int, done_ns: int, status: str, error: str, answer: ReceivedAnswer | None = None) -> list[Due]:
        """The request failed at ``done_ns`` (CLOCK_MONOTONIC): its session ends, sessions after it become due."""
        self.rows.done_ns[row] = done_ns
        if answer is not None:
            self._copy_counts(row, answer)
        self._finish_row(row, status, error)
        self._fail_rest(row, done_ns)
        return self._start_followers(self.rows.session[row], self.clock.from_monotonic_ns(done_ns))

    def has_enough(self, row: int, answer: ReceivedAnswer) -> bool:
        """Whether the client has the tokens after which it leaves as planned."""
        return 0 < self.abort_after_tokens[row] <= len(answer.token_ids)

    def leave(self, row: int, done_ns: int, answer: ReceivedAnswer) -> list[Due]:
        """The client left at ``done_ns`` (CLOCK_MONOTONIC), as planned: the requests that become due.

        The session continues from the planned number of tokens. The server's usage is not known.
        """
        rows = self.rows
        due = self.complete(row, done_ns)
        rows.note_texts(row, answer.response_id)
        self.tolerated.update(answer.tolerated)
        self.chunks.extend(row, answer.chunks, answer.not_before)
        self._finish_row(row, ABORTED, "")
        answer.keep_first(self.abort_after_tokens[row])
        self._carry(row, answer)
        return due

    def skip_session(self, row: int, error: str, now_ns: int) -> list[Due]:
        """This row cannot be sent: it and the rest of its session become "not_sent"; sessions after it become due."""
        self._finish_row(row, "not_sent", error)
        self._fail_rest(row, now_ns)
        return self._start_followers(self.rows.session[row], self.clock.from_monotonic_ns(now_ns))

    def stop(self, now_ns: int) -> None:
        """Rows without a final status become "not_sent"; the client has already failed what was in flight."""
        for session in self._mine:
            for row in range(self._first_row[session.index], self._first_row[session.index + 1]):
                if not self.rows.status[row]:
                    self._never_due(row, now_ns)
                    self._finish_row(row, "not_sent", "the replay was stopped")

    def may_send(self, row: int) -> bool:
        """False when the row already has a final status: its session failed after it had become due."""
        return not self.rows.status[row]

    def blocked_by(self, row: int) -> str:
        """Why this row can never be sent, or an empty string."""
        if self.rows.request[row]:
            return ""
        parent = self.plan.sessions[self.rows.session[row]].continues
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
        """A row that never became due gets the instant of this decision, so that no plan is invented."""
        if self.rows.trigger_ns[row] < 0:
            self.rows.trigger_ns[row] = self.rows.due_ns[row] = self.clock.from_monotonic_ns(now_ns)

    def _finish_row(self, row: int, status: str, error: str) -> None:
        rows = self.rows
        rows.status[row] = status
        if error:
            rows.error[row] = without_secrets(error)
        self.num_finished += 1
        if self._keeps_events:
            sent_ns = rows.sent_ns[row]
            late_ns = None if sent_ns < 0 else self.clock.from_monotonic_ns(sent_ns) - rows.due_ns[row]
            named = (rows.session[row], rows.request[row], status)
            self.finished_events.append(ReplayEvent(*named, late_ns, self.num_finished, rows.count))

    def beat(self, now_ns: int) -> None:
        """Call about every 50 ms, between events: notes a late call, and moves full blocks of rows to disk.

        now_ns: CLOCK_MONOTONIC.
        """
        if self._beat_ns and now_ns - self._beat_ns > PAUSE_NS and len(self._pauses) < MAX_PAUSES:
            self._pauses.append((self._beat_ns, now_ns))
        self._beat_ns = now_ns
        self.chunks.spill()
        self.rows.spill()

    @property
    def pauses_ns(self) -> list[list[int]]:
        """[start, duration] in clock ns of each time in which this client did nothing."""
        to_clock = self.clock.from_monotonic_ns
        return [[to_clock(start_ns), to_clock(end_ns) - to_clock(start_ns)] for start_ns, end_ns in self._pauses]

    def _copy_counts(self, row: int, answer: ReceivedAnswer, digest: str = "") -> None:
        rows = self.rows
        rows.note_texts(row, answer.response_id, answer.finish_reason, digest)
        self.tolerated.update(answer.tolerated)
        if answer.replica:
            self.replicas[rows.request_id[row]] = without_secrets(answer.replica)
        num_tokens = answer.num_tokens
        if answer.prompt_tokens is not None:
            rows.prompt_tokens[row] = answer.prompt_tokens
        if answer.cached_tokens is not None:
            rows.cached_tokens[row] = answer.cached_tokens
        if num_tokens is not None:
            rows.completion_tokens[row] = num_tokens
        self.chunks.extend(row, answer.chunks, answer.not_before)

    # -- what is sent ------------------------------------------------------------------------------------------

    def new_answer(self, row: int) -> ReceivedAnswer:
        """An empty answer of the form this replay asks for."""
        keeps_id_text = self.needs_token_ids and self.is_continued[row]
        answer = ReceivedAnswer(self.stream, self.needs_token_ids, keeps_id_text, self.is_strict)
        answer.replica_header = self._replica_header
        return answer

    def prefetch_all(self) -> None:
        """Draw the prompts of the replay, as far as they fit the budget of memory."""
        self.has_all_fresh = self._prompts.prefetch_all([session.index for session in self._mine])

    def prefetch_next(self, row: int) -> None:
        """Prefetch the request that follows in the row's session, if there is one."""
        if not self.is_last[row]:
            self._prompts.prefetch(self.rows.session[row + 1], self.rows.request[row + 1])

    def body_parts(self, row: int) -> list[bytes]:
        """The JSON body of the row's request, to be joined; call once, when the stream before it has been judged."""
        rows = self.rows
        prompt = self._prompts.next_prompt(rows.session[row], rows.request[row])
        rest = b',"%b":%d,"request_id":"%b",%b%b}' % (
            self._request_options.length_key,
            self._generate_tokens[row],
            rows.request_id[row].encode(),
            self._options,
            self._request_options.body(partial(self._values, row)),
        )
        return [self._before_prompt, *prompt, rest]

    def headers(self, row: int) -> dict[str, str]:
        """The further headers of the row's request."""
        token = self._session_tokens.get(self._whole_sessions[self.rows.session[row]])
        headers = self._request_options.headers(partial(self._values, row))
        if token is not None and SESSION_TOKEN_HEADER not in map(str.lower, headers):
            headers[SESSION_TOKEN_HEADER] = token
        return headers

    def _values(self, row: int) -> Values:
        rows = self.rows
        session_id = f"{self.nonce}-{self._whole_sessions[rows.session[row]]}"
        names = session_id, rows.request_id[row]
        lengths = self._prompt_tokens[row], self._generate_tokens[row]
        return request_values(rows.session[row], rows.request[row], names, self._return_waits_ns[row], lengths)


def continued_requests(plan: Plan) -> list[bool]:
    """In plan order: whether what a request generates is part of a later prompt (a truncation may have cut it off)."""
    continued_sessions = {session.continues for session in plan.sessions}
    is_continued: list[bool] = []
    for session in plan.sessions:
        following = zip(session.requests, session.requests[1:], strict=False)
        is_continued += [later.keep_tokens > request.prompt_tokens for request, later in following]
        is_continued.append(session.index in continued_sessions)
    return is_continued


def token_digest(token_ids: Sequence[int]) -> str:
    """SHA-256 of the ids as little-endian int32."""
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return sha256(ids.tobytes()).hexdigest()
