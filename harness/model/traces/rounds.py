"""Rounds of an agent (TraceLab's unit): one model call each, with the inputs before it and the tools after it.

Every agent's log becomes rounds first. Here rounds become recordings: a call that several files hold counts once, and a
session that goes on from another session's call is joined to it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path

from harness.model.plan.model import WaitKind, has_ended
from harness.model.traces.account import INCLUDED, NO_PROMPT, PLACEHOLDER, PLACEHOLDER_TOKENS, ReadNotes, Unread
from harness.model.traces.base import (
    Progress,
    Read,
    Record,
    TraceLine,
    instant_ns,
    is_placeholder,
    json_lines,
    tokens_in,
)
from harness.model.traces.drawn import DrawnWaits
from harness.model.traces.recording import RecordedRequest, Recording, hidden_name

Span = tuple[int, int]
DEEPEST = 32  # sub-agents of sub-agents
IN_CIRCLE = "calls of sub-agents in a circle, or too deep"
# No model call takes less: calls that close within it of one another were written down again, not made.
BURST_NS = 100_000_000
# Rows of one moment may be written in any order.
LATE_NS = 1_000_000_000
ENDS_ROUND = 3
# Tools that ask a person, of Claude Code, Codex and opencode: their result is a person's answer.
ASK_A_PERSON = ("AskUserQuestion", "ExitPlanMode", "request_user_input", "ask_user_question", "question")
REPEATED = "calls that were read before: copied into a resumed or forked session, or given twice"
REPLAYED = "calls of a parent session that is not among the files, repeated at the start of a fork"


@dataclass
class Round:
    """One model call. Instants in ns since 1970, lengths in tokens.

    submitted_ns: the latest user message or tool result before it; end_ns: the last text, reasoning or tool call.
    prefix_tokens: what the provider's cache held of the input. visible_tokens: output that the next prompt can hold.
    children: sessions of the sub-agents that its tools started. parent: the session that started this session, where
    only that is known. is_reset: the stream begins anew. answer_characters: length of its answer as logged, 0 where the
    log does not hold it.
    created_tokens: written to the provider's cache, where that is counted apart. unknown_wait: why it is not known how
    long the call was waited for, "" where it is. joins: a tool of it waits for sub-agents of earlier rounds.
    identity: equal for the same call wherever it is logged, None where the log has nothing to tell it by. history:
    equal for calls with the same usage counts before them and in them, whatever the times. fork_of: the session whose
    rounds this session's file begins with. is_in_burst: it came sooner than a call can. is_replay: it was only written
    down again, and no request of this session. follows: the call of another session that this session goes on from.
    """

    session: str
    submitted_ns: int
    end_ns: int
    input_tokens: int
    prefix_tokens: int
    output_tokens: int
    visible_tokens: int
    is_human: bool = False
    tool_spans: list[Span] = field(default_factory=list[Span])
    children: list[str] = field(default_factory=list[str])
    parent: str = ""
    is_reset: bool = False
    index: int = 0
    answer_characters: int = 0
    at: str = ""
    identity: Hashable = None
    history: Hashable = None
    fork_of: str = ""
    is_in_burst: bool = False
    is_replay: bool = False
    follows: Round | None = None
    created_tokens: int = 0
    unknown_wait: str = ""
    joins: bool = False


Log = list[Round]
"""The rounds of one conversation in one file, in order."""


class Conversation:
    """The rounds of one conversation in an agent's log, and what came since the last round began."""

    def __init__(self, session: str, notes: ReadNotes) -> None:
        self.session, self.parent, self.notes = session, "", notes
        self.rounds: Log = []
        self.is_compacted = False
        self.unread = Unread(notes)
        self._inputs: list[tuple[int, bool]] = []
        self._hints: list[tuple[int, bool]] = []
        self._calls: dict[str, tuple[Round, int, bool]] = {}
        self._unanswered: set[str] = set()
        self._is_in_doubt = False

    def take_input(self, moment_ns: int, *, is_human: bool, is_hint: bool = False) -> None:
        """A user's message, or the result of a tool. is_hint: it counts only where there is no other input."""
        (self._hints if is_hint else self._inputs).append((moment_ns, is_human))

    def add(self, moment_ns: int, identity: Hashable, at: str) -> Round:
        """A row is a call; as ``begin``."""
        self.notes.call()
        turn = self.begin(moment_ns)
        turn.identity, turn.at = identity, at
        self.rounds.append(turn)
        return turn

    def begin(self, moment_ns: int) -> Round:
        """The round whose first output came at ``moment_ns``; it takes the inputs so far."""
        inputs = self._inputs or self._hints
        ended_ns = self.rounds[-1].end_ns if self.rounds else moment_ns
        submitted_ns, is_last_human = max(inputs, default=(ended_ns, False), key=lambda each: each[0])
        tools_ns = max((at_ns for at_ns, is_human in inputs if not is_human), default=0)
        # Of a tool and a person the one that took longer.
        is_human = is_last_human and submitted_ns - tools_ns > tools_ns - ended_ns
        turn = Round(self.session, submitted_ns, moment_ns, 0, 0, 0, 0, is_human)
        turn.parent, turn.index, turn.is_reset = self.parent, len(self.rounds), self.is_compacted
        self.unread.begin(is_first=not self.rounds)
        turn.unknown_wait = self._doubt(is_last_human=is_last_human)
        self._inputs, self._hints, self._unanswered = [], [], set()
        self.is_compacted = self._is_in_doubt = False
        return turn

    def _doubt(self, *, is_last_human: bool) -> str:
        """Why the rows since the last round do not tell when the next one was submitted; "" where they do."""
        if self._unanswered and not is_last_human:
            return "the result of a tool before the call is missing"
        if self._is_in_doubt:
            return "the call of a tool whose result came before the call is missing"
        return "" if self._inputs or self._hints else "no row says what the call was asked for"

    def known(self) -> Log:
        """The rounds so far; no wait of theirs is known where rows of unknown types came between them."""
        for turn in self.rounds:
            turn.unknown_wait = self.unread.why or turn.unknown_wait
        return self.rounds

    def call(self, name: str, turn: Round, moment_ns: int, tool: str) -> None:
        """This turn called a tool. name: by which its result is known."""
        self._calls[name] = (turn, moment_ns, tool in ASK_A_PERSON)
        self._unanswered.add(name)

    def result(self, name: str, moment_ns: int) -> Round | None:
        """The round of the call whose result came at ``moment_ns``, the latest input; None when the call is unknown."""
        self._unanswered.discard(name)
        if name not in self._calls:
            self._is_in_doubt = True
            return None
        turn, started_ns, asked_a_person = self._calls[name]
        if asked_a_person and self._inputs:
            self._inputs[-1] = (self._inputs[-1][0], True)
        turn.tool_spans.append((started_ns, max(moment_ns, started_ns)))
        return turn


class AgentLog:
    """A file of an agent, row by row."""

    def __init__(self, name: str, notes: ReadNotes) -> None:
        self.name, self.notes = name, notes
        self.num_late = 0
        self._latest_ns = 0

    def take(self, record: Record, at: str) -> None:
        """Read one row."""
        raise NotImplementedError

    def logs(self) -> Iterable[Log]:
        """The conversations of the rows so far."""
        raise NotImplementedError

    def time_rank(self, record: Record) -> int:  # noqa: ARG002
        """Which of several rows of the same instant comes first."""
        return 0

    def came_at(self, moment_ns: int) -> None:
        """Count a row that is stamped before the rows above it."""
        self.num_late += moment_ns < self._latest_ns - LATE_NS
        self._latest_ns = max(self._latest_ns, moment_ns)


def logs_of(
    kind: type[AgentLog], files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None
) -> Iterator[Log]:
    """The conversations of each file; a file whose rows are out of order of time is read again in order."""
    for path in files:
        log = kind(path.stem, ReadNotes())
        for at, record in json_lines(path, log.notes, progress):
            log.take(record, at)
        if log.num_late:
            num_late, log = log.num_late, kind(path.stem, ReadNotes())
            for at, record in _by_time(json_lines(path, log.notes), log):
                log.take(record, at)
            log.notes.assume("rows out of order of time: their file was sorted", num_late)
        yield from (rounds for rounds in log.logs() if rounds)
        notes.take_over(log.notes)


def _by_time(lines: Iterable[TraceLine], log: AgentLog) -> Iterator[TraceLine]:
    """Lines by their time; those of one instant in order of the file, or by rank where one of them ends a round."""
    stamped: list[tuple[int, TraceLine]] = []
    for line in lines:  # a row without a time stays behind the row before it
        moment_ns = instant_ns(line.record.get("timestamp"))
        stamped.append(((stamped[-1][0] if stamped else 0) if moment_ns is None else moment_ns, line))
    stamped.sort(key=lambda pair: pair[0])
    for _, group in groupby(stamped, key=lambda pair: pair[0]):
        same = [line for _, line in group]
        ranks = [log.time_rank(line.record) for line in same]
        if ranks.count(ENDS_ROUND) == 1:
            same = [line for _, line in sorted(zip(ranks, same, strict=True), key=lambda pair: pair[0])]
        yield from same


def recordings_of(logs: Iterable[Log], notes: ReadNotes) -> Iterator[Recording]:
    """Every root session with its sub-agents and forks, by first submission; times from the first of all."""
    by_session = _once_each(logs, notes)
    _include_cached(by_session, notes)
    for group in by_session.values():
        group.sort(key=lambda turn: (turn.submitted_ns, turn.index))
        _check_counts(group, notes)
    _adopt(by_session)
    forks = _forks(by_session)
    children = {child for group in by_session.values() for turn in group for child in turn.children}
    children |= {name for names in forks.values() for name in names}
    roots = [name for name in by_session if name not in children]
    roots.sort(key=lambda name: by_session[name][0].submitted_ns)
    first_ns = by_session[roots[0]][0].submitted_ns if roots else 0
    tree = _Tree(by_session, forks, notes)
    for name in roots:
        start_ns = by_session[name][0].submitted_ns
        yield Recording(hidden_name(name), start_ns - first_ns, tree.requests(name))
    for name, group in by_session.items():
        if not tree.has(name):
            notes.drop(IN_CIRCLE, group[0].at, len(group))


def _include_cached(by_session: dict[str, Log], notes: ReadNotes) -> None:
    """Add the cached tokens to prompts of a file that counts them apart, as a call with more of them shows."""
    files: dict[str, Log] = {}
    for turn in (turn for group in by_session.values() for turn in group):
        files.setdefault(turn.at.rpartition(", ")[0], []).append(turn)
    for turns in files.values():
        if any(turn.prefix_tokens > turn.input_tokens for turn in turns):
            notes.assume(INCLUDED, len(turns))
            for turn in turns:
                turn.input_tokens += turn.prefix_tokens + turn.created_tokens


def _once_each(logs: Iterable[Log], notes: ReadNotes) -> dict[str, Log]:
    """The rounds of each session, every call in the session that made it."""
    calls = _Calls(notes)
    for log in sorted(logs, key=_first_own_ns):  # what a file repeats was made before its own
        calls.take(log)
    return calls.linked()


def _first_own_ns(log: Log) -> int:
    return next((turn.submitted_ns for turn in log if not turn.is_replay), log[-1].end_ns)


class _Calls:
    """Every call that was read, once."""

    def __init__(self, notes: ReadNotes) -> None:
        self._notes = notes
        self._known: dict[Hashable, Round] = {}
        self._histories: dict[Hashable, Round] = {}
        self._by_session: dict[str, Log] = {}
        # A session of which every call is another session's, and that session.
        self._alias: dict[str, str] = {}
        self._links: list[tuple[Round, str]] = []

    def take(self, log: Log) -> None:
        """Add the calls of a file that no file before it holds."""
        original: Round | None = None
        is_start = True
        for turn in self._with_prompts(log):
            same = self._original(turn, is_start=is_start)
            if same is not None:
                self._notes.drop(REPEATED, turn.at)
                self._links += [(same, child) for child in turn.children]
                original = same
            elif turn.is_replay:
                self._notes.drop(REPLAYED, turn.at)
            else:
                before = original or (self._known.get(turn.follows.identity) if turn.follows is not None else None)
                turn.follows = before if before is not None and before.session != turn.session else None
                self._add(turn)
                original, is_start = None, False
        if is_start and original is not None:
            self._alias[log[0].session] = original.session

    def _with_prompts(self, log: Log) -> Iterator[Round]:
        why = ""
        for turn in log:
            if turn.input_tokens:
                turn.unknown_wait, why = turn.unknown_wait or why, ""
                yield turn
            else:
                self._notes.drop(NO_PROMPT, turn.at)
                why = "a call before theirs counts no prompt token"

    def _original(self, turn: Round, *, is_start: bool) -> Round | None:
        """The call that this one is a copy of."""
        same = self._known.get(turn.identity)
        if same is None and (turn.is_in_burst or (is_start and turn.fork_of)):
            same = self._histories.get(turn.history)
        return same

    def _add(self, turn: Round) -> None:
        if turn.identity is not None:
            self._known[turn.identity] = turn
        if turn.history is not None:
            self._histories[turn.history] = turn
        self._by_session.setdefault(turn.session, []).append(turn)

    def linked(self) -> dict[str, Log]:
        """The rounds of each session, their sub-agents under the names of the sessions that hold them."""
        for turn, child in self._links:
            if child in self._by_session:
                turn.children.append(child)
        for turn in (turn for group in self._by_session.values() for turn in group if turn.children):
            turn.children = list(dict.fromkeys(self._alias.get(child, child) for child in turn.children))
        for group in self._by_session.values():
            # A fork whose file repeats nothing goes on from the last call that its parent had ended.
            if group[0].fork_of and not group[0].parent and group[0].follows is None:
                above = self._by_session.get(group[0].fork_of, [])
                before = [turn for turn in above if turn.end_ns <= group[0].submitted_ns]
                group[0].follows = before[-1] if before and group is not above else None
        return self._by_session


def _check_counts(group: Log, notes: ReadNotes) -> None:
    """Replace counts that cannot be of this answer by an estimate, and label what else looks wrong."""
    for turn in group:
        if is_placeholder(turn.output_tokens, turn.answer_characters):
            turn.output_tokens = turn.visible_tokens = tokens_in(turn.answer_characters)
            notes.assume(PLACEHOLDER)
        elif turn.output_tokens == 0:
            notes.answered(0)
        elif turn.output_tokens <= PLACEHOLDER_TOKENS and turn.tool_spans:
            notes.assume("answers that call a tool in 1 or 2 tokens: likely placeholders, kept as recorded")
    has_times = max(turn.end_ns for turn in group) > group[0].submitted_ns
    if len(group) > 1 and not has_times:
        for turn in group:
            turn.unknown_wait = "all rounds of their session have the same time"


def _adopt(by_session: dict[str, Log]) -> None:
    """Link each session that names only its parent to the parent's last round that had ended before it began."""
    for name, group in by_session.items():
        above = by_session.get(group[0].parent, [])
        before = [turn for turn in above if turn.end_ns <= group[0].submitted_ns]
        if before and group[0].parent != name:
            before[-1].children.append(name)


def _forks(by_session: dict[str, Log]) -> dict[int, list[str]]:
    """The sessions that go on from a round of another session, by the id of that round; no sub-agents, no circles."""
    children = {child for group in by_session.values() for turn in group for child in turn.children}
    forks: dict[int, list[str]] = {}
    above: dict[str, str] = {}
    for name, group in by_session.items():
        follows = group[0].follows
        if follows is None or name in children:
            continue
        ancestor = follows.session
        while ancestor in above:
            ancestor = above[ancestor]
        if ancestor != name:
            above[name] = follows.session
            forks.setdefault(id(follows), []).append(name)
    return forks


class _Tree:
    """A root session, its sub-agents and forks as one list, in which a request comes after all that it waits for.

    A session that was added once is added no second time, under no root.
    """

    def __init__(self, by_session: dict[str, Log], forks: dict[int, list[str]], notes: ReadNotes) -> None:
        self._by_session, self._forks, self._notes = by_session, forks, notes
        self._drawn = DrawnWaits(notes)
        self._requests: list[RecordedRequest] = []
        self._places: dict[int, int] = {}  # by the id of a round
        self._added: set[str] = set()

    def requests(self, root: str) -> tuple[RecordedRequest, ...]:
        self._requests, self._places = [], {}
        self._add(root, (), 0, {root})
        return tuple(self._requests)

    def has(self, session: str) -> bool:
        """Whether a recording has this session's requests."""
        return session in self._added

    def _add(self, session: str, started_by: tuple[int, ...], started_ns: int, above: set[str]) -> tuple[int, int]:
        """Add a session's requests; returns (place, end) of its last one."""
        self._added.add(session)
        group = self._by_session[session]
        base, stream_tokens = self._goes_on_from(group[0], started_by)
        after, ended_ns = started_by, started_ns
        running: list[tuple[int, int]] = []  # (last request, end) of sub-agents that no round has waited for
        for place, turn in enumerate(group):
            keep = 0 if turn.is_reset else min(turn.prefix_tokens, stream_tokens, turn.input_tokens)
            is_first = place == 0 and not started_by
            wait_ns = 0 if is_first else turn.submitted_ns - ended_ns
            if is_drawn := bool(turn.unknown_wait) and not is_first:
                wait_ns = self._drawn.unknown(turn.unknown_wait, session, place)
            elif wait_ns < 0:
                # It did not wait for a round that ended later, so it starts at once.
                self._notes.assume("overlapping rounds start at once")
                wait_ns = 0
            kind: WaitKind = "human" if turn.is_human else "tool"
            if place == 0 and base is None:
                kind = "none"
            lengths = (turn.input_tokens, keep, max(turn.output_tokens, 1))
            request = RecordedRequest(base if keep else None, after, wait_ns, kind, *lengths, is_drawn=is_drawn)
            self._requests.append(request)
            base = place_of_turn = self._places[id(turn)] = len(self._requests) - 1
            stream_tokens = turn.input_tokens + turn.visible_tokens
            after, ended_ns = (place_of_turn,), turn.end_ns
            num_before = 0 if turn.joins else len(running)
            for child in turn.children:
                if child in self._added or child not in self._by_session or len(above) > DEEPEST:
                    self._notes.leave("sub-agents without a recording, or in a circle", turn.at)
                    continue
                last, child_end_ns = self._add(child, (place_of_turn,), turn.end_ns, above | {child})
                running.append((last, child_end_ns))
            for last, child_end_ns in running[num_before:]:
                if any(end >= child_end_ns for _, end in turn.tool_spans):
                    # The parent waited for this child: its wait counts from the end of the last child.
                    after, ended_ns = (*after, last), max(ended_ns, child_end_ns)
                    running.remove((last, child_end_ns))
            for fork in (name for name in self._forks.get(id(turn), ()) if name not in self._added):
                self._add(fork, (place_of_turn,), turn.end_ns, above | {fork})
        return after[0], ended_ns

    def _goes_on_from(self, first: Round, started_by: tuple[int, ...]) -> tuple[int | None, int]:
        """(place of the request whose stream a session's first round continues, length of that stream)."""
        follows = first.follows
        place = -1 if follows is None else self._places.get(id(follows), -1)
        afters = [*(request.after for request in self._requests), started_by]
        if follows is None or place < 0 or not has_ended(afters, place, len(self._requests)):
            return None, 0
        return place, follows.input_tokens + follows.visible_tokens


def reader_of(kind: type[AgentLog]) -> Read:
    """A reader of recordings from a kind of log."""
    return through_rounds(partial(logs_of, kind))


def through_rounds(logs: Callable[[Iterable[Path], ReadNotes, Progress | None], Iterable[Log]]) -> Read:
    """A reader of recordings from a reader of rounds."""
    return lambda files, notes, progress: recordings_of(logs(files, notes, progress), notes)
