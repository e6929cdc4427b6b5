"""A Plan: what every session sends, in tokens, and how long it waits; the same for all conditions of a replicate.

Plans are values: checked when made, named by the hash of their canonical form, never edited, only derived. A plan
never holds an instant of execution: it fixes inputs, not the times they produce.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from harness.errors import PlanError

if TYPE_CHECKING:
    from harness.model.spec import PromptForm, Treatment

TokenIdRange = tuple[int, int]
FORMAT = "harness-plan/1"
WaitKind = Literal["none", "tool", "human"]
WAIT_KINDS: tuple[WaitKind, ...] = get_args(WaitKind)
HEADER = (
    *("source", "seed", "replicate", "treatment", "drawn_parent", "prompt_form", "shared_prefix_tokens"),
    *("token_id_range", "num_sessions", "num_requests"),
)
REQUEST_COLUMNS = ("keep_tokens", "new_tokens", "generate_tokens", "wait_after_ns")


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request. Its prompt is the first ``keep_tokens`` of the session's token stream so far, then fresh ones.

    The stream so far is everything earlier requests of the session sent and got back, in order; after this request
    it is this prompt plus ``generate_tokens`` generated ones. A re-arrival keeps all of it; fewer is a truncation.
    wait_after_ns: the wait that follows, in model ns; on a session's last request it is kept, never waited.
    wait_kind: for what it waits, where a recording says so.
    abort_after_ns, abort_after_tokens: the client leaves so long after sending it, unless the answer has ended by then,
    or once it has so many tokens of the answer; 0: it stays. The wait that follows begins when the client leaves.
    """

    keep_tokens: int
    new_tokens: int
    generate_tokens: int
    wait_after_ns: int = 0
    wait_kind: WaitKind = "none"
    abort_after_ns: int = 0
    abort_after_tokens: int = 0

    @property
    def is_abortable(self) -> bool:
        """Whether the client may leave before the answer has ended."""
        return self.abort_after_ns > 0 or self.abort_after_tokens > 0

    @property
    def prompt_tokens(self) -> int:
        return self.keep_tokens + self.new_tokens

    @property
    def stream_tokens(self) -> int:
        """Length of the session's stream once this request is over.

        Of an answer that the client leaves, only what it has received for certain: inputs must not depend on speed.
        """
        return self.prompt_tokens + (self.abort_after_tokens if self.is_abortable else self.generate_tokens)


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """One session: its requests, in order, and when it starts.

    It starts ``start_offset_ns`` after the common start, or, with ``after`` = k, that long after session k completed
    its last request; ``also_after`` names more sessions that must have completed theirs (a join of sub-agents). With
    ``continues`` = k its stream begins as the whole stream of session k, which must have finished before: k is one of
    those, or one that they waited for.
    start_kind: what start_offset_ns waits for; a "tool" or "human" start is a wait of the session's agent.
    blocks: names of the whole blocks of ``Plan.block_tokens`` tokens that a fresh stream begins with; equal names are
    equal tokens in every session.
    """

    index: int
    start_offset_ns: int
    after: int | None
    continues: int | None
    requests: tuple[RequestPlan, ...]
    also_after: tuple[int, ...] = ()
    start_kind: WaitKind = "none"
    blocks: tuple[int, ...] = ()

    @property
    def predecessors(self) -> tuple[int, ...]:
        """Every session that must have completed before this one starts; () for one that starts by itself."""
        return () if self.after is None else (self.after, *self.also_after)

    @property
    def is_start_waited(self) -> bool:
        """Whether start_offset_ns is a wait of an agent, as the waits between its requests are."""
        return self.after is not None and self.start_kind != "none"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan:
    """The input of one replicate. Equal plans have equal hashes, whatever object holds them.

    seed: the base seed; with ``replicate`` it names all draws. token_id_range: [low, high), prompt ids lie in it.
    drawn_parent: hash of the as-drawn plan this one is a treatment of, "" for that plan itself.
    provenance: where the numbers come from, for people and reports; part of the hash.
    block_tokens: size of the blocks that sessions name, 0 where none does.
    Raises PlanError when the parts contradict each other.
    """

    source: str
    seed: int
    replicate: int
    treatment: Treatment
    shared_prefix_tokens: int
    token_id_range: TokenIdRange
    sessions: tuple[SessionPlan, ...]
    provenance: Mapping[str, str | int | float] = field(default_factory=dict[str, "str | int | float"])
    prompt_form: PromptForm = "token-ids"
    drawn_parent: str = ""
    block_tokens: int = 0
    _hash: list[str] = field(default_factory=list[str], init=False, repr=False)

    def __post_init__(self) -> None:
        check_plan(self)

    def __repr__(self) -> str:
        draw = f"{self.source}, seed {self.seed}, replicate {self.replicate}, {self.treatment}"
        return f"Plan {self.hash[:12]} ({draw}): {self.num_sessions} sessions, {self.num_requests} requests"

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of the canonical form: everything that decides what is sent, and the provenance."""
        if not self._hash:
            digest = hashlib.sha256()
            for line in canonical_lines(self):
                digest.update(line)
            self._hash.append(digest.hexdigest())
        return self._hash[0]

    @property
    def drawn_hash(self) -> str:
        """Hash of the as-drawn plan: the same for all treatments of one draw."""
        return self.drawn_parent or self.hash

    @property
    def num_sessions(self) -> int:
        return len(self.sessions)

    @property
    def num_requests(self) -> int:
        return sum(len(session.requests) for session in self.sessions)

    @property
    def requests(self) -> Iterator[RequestPlan]:
        """All requests, session by session."""
        return chain.from_iterable(session.requests for session in self.sessions)

    @property
    def num_abortable(self) -> int:
        """Requests whose answer the client may leave before its end."""
        return sum(request.is_abortable for request in self.requests)

    @property
    def num_waits(self) -> int:
        """Waits that are really waited: between the requests of each session, and before an agent goes on."""
        return self.num_requests - len(self.sessions) + sum(session.is_start_waited for session in self.sessions)

    @property
    def total_wait_ns(self) -> int:
        """Sum of the waits that are really waited."""
        return sum(self.waited_ns())

    def waited_ns(self) -> Iterator[int]:
        """The waits that are really waited, by session and request."""
        return (wait_ns for _, wait_ns in self._waits())

    def waits_by_kind_ns(self) -> dict[WaitKind, list[int]]:
        """The waits that are really waited, by what they wait for; kinds without one are left out."""
        waits_ns: dict[WaitKind, list[int]] = {}
        for kind, wait_ns in self._waits():
            waits_ns.setdefault(kind, []).append(wait_ns)
        return waits_ns

    def _waits(self) -> Iterator[tuple[WaitKind, int]]:
        for session in self.sessions:
            if session.is_start_waited:
                yield session.start_kind, session.start_offset_ns
            for request in session.requests[:-1]:
                yield request.wait_kind, request.wait_after_ns

    def request(self, session: int, request: int) -> RequestPlan:
        """One request by its two indices; raises IndexError when there is none."""
        return self.sessions[session].requests[request]

    def with_treatment(self, treatment: Treatment) -> Plan:
        """The same draw with its waits as drawn, removed, or all equal; never a re-draw.

        "no-waits" sets every wait to 0. "equal-waits" replaces each waited wait by the mean over the plan, and the
        remainder of the division goes, 1 ns each, to the first ones, so that the total is preserved to the ns.
        Raises PlanError when this plan is itself a treated one: what was drawn is not in it any more.
        """
        if treatment == self.treatment:
            return self
        if self.treatment != "as-drawn":
            raise PlanError(
                f"a plan with treatment {self.treatment!r} cannot be made {treatment!r}",
                where=f"plan {self.hash[:12]}",
                hint=f"Derive it from the plan as drawn, {self.drawn_hash[:12]}",
            )
        sessions = _without_waits(self.sessions) if treatment == "no-waits" else _with_equal_waits(self)
        return replace(self, treatment=treatment, sessions=sessions, drawn_parent=self.hash)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)


def _without_waits(sessions: tuple[SessionPlan, ...]) -> tuple[SessionPlan, ...]:
    return tuple(
        replace(
            session,
            start_offset_ns=0 if session.is_start_waited else session.start_offset_ns,
            requests=tuple(replace(request, wait_after_ns=0) for request in session.requests),
        )
        for session in sessions
    )


def _with_equal_waits(plan: Plan) -> tuple[SessionPlan, ...]:
    num_waits = plan.num_waits
    if num_waits == 0:
        return plan.sessions
    mean_ns, remainder = divmod(plan.total_wait_ns, num_waits)
    waits_ns = (mean_ns + (place < remainder) for place in range(num_waits))
    return tuple(
        replace(
            session,
            start_offset_ns=next(waits_ns) if session.is_start_waited else session.start_offset_ns,
            requests=(
                *(replace(request, wait_after_ns=next(waits_ns)) for request in session.requests[:-1]),
                session.requests[-1],
            ),
        )
        for session in plan.sessions
    )


def check_plan(plan: Plan) -> None:
    """Refuse a plan whose parts contradict each other; raises PlanError naming session and request."""
    low, high = plan.token_id_range
    if low < 0 or high - low < 2:
        _refuse("plan", f"token_id_range [{low}, {high}) holds fewer than two ids", "Give a wider range")
    if plan.shared_prefix_tokens < 0:
        _refuse("plan", f"shared_prefix_tokens is negative ({plan.shared_prefix_tokens})", "Give 0 or more")
    if plan.shared_prefix_tokens and plan.block_tokens:
        what = f"it has a shared prefix of {plan.shared_prefix_tokens} tokens and named blocks"
        _refuse("plan", what, "Name the blocks of the prefix too, in every session")
    if not plan.sessions:
        _refuse("plan", "it has no session", "Give num_sessions of at least 1")
    if plan.prompt_form != "token-ids" and any(request.abort_after_tokens for request in plan.requests):
        _refuse(
            "plan",
            f"{plan.prompt_form} prompts do not tell how many tokens were kept of an answer",
            "Abort after a time instead",
        )
    stream_tokens: list[int] = []
    afters = [session.predecessors for session in plan.sessions]
    for position, session in enumerate(plan.sessions):
        _check_start(plan, afters, position)
        begins_with = 0 if session.continues is None else stream_tokens[session.continues]
        stream_tokens.append(_check_requests(session, begins_with))


def _check_start(plan: Plan, afters: Sequence[tuple[int, ...]], position: int) -> None:
    session, where = plan.sessions[position], f"session {position}"
    if session.index != position:
        _refuse(where, f"its index is {session.index}", "Number the sessions 0, 1, 2, ... in order")
    if session.start_offset_ns < 0:
        _refuse(where, f"start_offset_ns is negative ({session.start_offset_ns})", "Give 0 or more")
    if wrong := [before for before in session.predecessors if not 0 <= before < position]:
        _refuse(where, f"it starts after session {wrong[0]}", "Let it follow a session with a lower index")
    if session.also_after and session.after is None:
        _refuse(where, "it has also_after without after", "Name the first of them in after")
    if session.blocks and (session.continues is not None or len(session.blocks) * plan.block_tokens > _fresh(session)):
        _refuse(where, f"{len(session.blocks)} named blocks are not the beginning of a fresh prompt", "Name fewer")
    if session.continues is not None and not has_ended(afters, session.continues, position):
        _refuse(
            where,
            f"it continues session {session.continues}, which need not be finished when it starts",
            "Continue the session named by `after`, or one earlier in that chain",
        )


def has_ended(afters: Sequence[tuple[int, ...]], earlier: int, place: int) -> bool:
    """Whether ``earlier`` must have ended when ``place`` starts. afters: what each waits for, all at lower places."""
    open_places = list(afters[place])
    seen: set[int] = set()
    while open_places:
        before = open_places.pop()
        if before == earlier:
            return True
        if before > earlier and before not in seen:
            seen.add(before)
            open_places.extend(afters[before])
    return False


def _fresh(session: SessionPlan) -> int:
    """Prompt tokens of a session's first request; 0 where it has none or keeps some."""
    return 0 if not session.requests or session.requests[0].keep_tokens else session.requests[0].prompt_tokens


def _check_requests(session: SessionPlan, begins_with: int) -> int:
    """Length of the session's stream at its end; ``begins_with``: its length before the first request."""
    if not session.requests:
        _refuse(f"session {session.index}", "it has no request", "Give it at least one")
    stream_tokens = begins_with
    for position, request in enumerate(session.requests):
        if problem := _request_problem(request, stream_tokens):
            _refuse(f"session {session.index}, request {position}", *problem)
        stream_tokens = request.stream_tokens
    return stream_tokens


def _request_problem(request: RequestPlan, stream_tokens: int) -> tuple[str, str] | None:
    """(what is wrong, what to do) of a request after a stream of so many tokens; None for a sound one."""
    if request.wait_after_ns < 0:
        return f"its wait is negative ({request.wait_after_ns} ns)", "Give 0 or more"
    if request.keep_tokens > stream_tokens:
        what = f"it keeps {request.keep_tokens} tokens of a stream that has {stream_tokens}"
        return what, f"Keep at most {stream_tokens}"
    if abort_problem := _abort_problem(request):
        return abort_problem, "Give a time or fewer tokens than it generates"
    if min(request.keep_tokens, request.new_tokens) < 0 or min(request.generate_tokens, request.prompt_tokens) < 1:
        return f"its lengths make no request: {request}", "Give a prompt and a generation of at least 1 token"
    return None


def _abort_problem(request: RequestPlan) -> str:
    after_ns, after_tokens = request.abort_after_ns, request.abort_after_tokens
    if after_ns and after_tokens:
        return "it is aborted after a time and after a number of tokens"
    if min(after_ns, after_tokens) < 0 or (after_tokens and after_tokens >= request.generate_tokens):
        return f"it is aborted after {after_ns} ns or {after_tokens} of {request.generate_tokens} tokens"
    return ""


def _refuse(where: str, what: str, hint: str) -> NoReturn:
    raise PlanError(what, where=where, hint=hint)


def canonical_lines(plan: Plan, plan_hash: str | None = None) -> Iterator[bytes]:
    """The plan as lines of UTF-8, each with its newline; the header carries ``plan_hash`` when it is given.

    The hash of a plan is that of these lines without it.
    """
    header: dict[str, Any] = {"format": FORMAT}
    if plan_hash is not None:
        header["hash"] = plan_hash
    header |= {name: getattr(plan, name) for name in HEADER}
    header |= {"provenance": dict(sorted(plan.provenance.items())), "requests": REQUEST_COLUMNS}
    if plan.block_tokens:
        header["block_tokens"] = plan.block_tokens
    yield _line(header)
    for session in plan.sessions:
        yield _line(_session_record(session))


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _session_record(session: SessionPlan) -> dict[str, Any]:
    record: dict[str, Any] = {"session": session.index, "start_offset_ns": session.start_offset_ns}
    if session.after is not None:
        record["after"] = session.after
    if session.also_after:
        record["also_after"] = session.also_after
    if session.continues is not None:
        record["continues"] = session.continues
    if session.blocks:
        record["blocks"] = session.blocks
    kinds = [session.start_kind, *(request.wait_kind for request in session.requests)]
    if any(kind != "none" for kind in kinds):
        # One letter each: what the start waits for, then what is waited for after each request.
        record["kinds"] = "".join(kind[0] for kind in kinds)
    if any(request.is_abortable for request in session.requests):
        # Place, time and number of tokens of each; a plan without any keeps its bytes.
        record["aborts"] = [
            (place, request.abort_after_ns, request.abort_after_tokens)
            for place, request in enumerate(session.requests)
            if request.is_abortable
        ]
    record["requests"] = [
        (request.keep_tokens, request.new_tokens, request.generate_tokens, request.wait_after_ns)
        for request in session.requests
    ]
    return record


class Followers:
    """A session starts when the last of its predecessors has completed; each session completes once."""

    def __init__(self, plan: Plan) -> None:
        self._num_missing = [len(set(session.predecessors)) for session in plan.sessions]
        self._followers: list[list[int]] = [[] for _ in plan.sessions]
        for session in plan.sessions:
            for before in set(session.predecessors):
                self._followers[before].append(session.index)

    def completed(self, session: int) -> list[int]:
        """Sessions that nothing holds back any more once ``session`` has completed, in plan order."""
        ready: list[int] = []
        for follower in self._followers[session]:
            self._num_missing[follower] -= 1
            if self._num_missing[follower] == 0:
                ready.append(follower)
        return ready
