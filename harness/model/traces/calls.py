"""Calls of a model, as every reader of an agent's log finds them, and the conversations that they stand in."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

from harness.clock import NS_PER_MS
from harness.model.plan.model import WaitKind
from harness.model.traces.account import SHARE_OF_UNKNOWN, ReadNotes
from harness.model.traces.base import TraceLine, json_records, read_tables
from harness.model.traces.values import EPOCH, Record, instant_ns, list_of, parsed_json, seconds_ns, text_of, tokens_of

Span = tuple[int, int]
# No model call takes less: calls that close within it of one another were written down again, not made.
BURST_NS = 100_000_000
# Rows of one moment may be written in any order.
LATE_NS = 1_000_000_000
TABLES = read_tables(Path(__file__).with_name("labels.toml"))
AT_ONCE, LATE, SHIFTED, BACK, PAST_SUMMARY, REPLAYED, SUMMED, SUMMARY = TABLES["calls"].values()
ASK_A_PERSON, REJECTED, REJECTED_LAST, START_AN_AGENT, END_A_RUN, DECIDED = map(tuple, TABLES["words"].values())
LIKE_ASKING, RAN, NEWS, BY_PROGRAM = map(re.compile, TABLES["patterns"].values())
LAST_NS = instant_ns(datetime.max.isoformat()) or 0  # that a timestamp can name
UNTIMED = -1
UNCOUNTED = "a call before theirs has no token counts"
ATTEMPTS = "attempts that failed, left out"
Message = tuple[bytes, int]  # digest and tokens of one message of a prompt


@dataclass(eq=False, slots=True)
class Call:
    """One call of a model. Instants in ns since 1970, or UNTIMED; lengths in tokens."""

    session: str
    submitted_ns: int  # the latest user message or tool result before it
    end_ns: int  # its last text, reasoning or tool call
    input_tokens: int = 0
    prefix_tokens: int | None = None  # what the provider's cache held of the input; None where that is not counted
    output_tokens: int = 0
    visible_tokens: int = 0  # output that the next prompt can hold
    kind: WaitKind = "tool"  # what it waited for; "none" where that is not known
    ran_ns: Sequence[int | None] = ()  # how long the tools that it waited for say that they ran
    is_allowed: bool = False  # a person was asked whether one of these tools may run
    people_ns: Sequence[int] = ()  # when people said something in its conversation
    is_guessed: bool = False  # nothing shows that a tool ran in its wait
    is_over: bool = False  # its wait holds a summary, a retry or an interruption
    at: str = ""
    # equal for the same call wherever it is logged; None where the log has nothing to tell it by
    identity: Hashable = None
    tool_spans: list[Span] = field(default_factory=list[Span])
    # when the last of its tools and the last person it waited for had answered; None for none
    inputs_ns: tuple[int | None, int | None] = (None, None)
    # sessions of the sub-agents that its tools started, and when that tool had ended; UNTIMED where not known
    children: dict[str, int] = field(default_factory=dict[str, int])
    num_agents: int = 0  # how many sub-agents its tools started that no result names
    parent: str = ""  # the session that started its own, where only that is known
    index: int = 0
    # written to the provider's cache, where that is counted apart; None where the log leaves it out
    created_tokens: int | None = 0
    reasoning_tokens: int = 0
    total_tokens: int | None = None  # the sum of the call's counts, where the log states it
    has_cache_apart: bool = False  # input leaves out what the cache held, by the word of the format
    has_reasoning_apart: bool = False  # output leaves out the reasoning, by the word of the format
    is_unsaid: bool = False  # the format does not say what input holds
    provider: str = ""
    is_unanswered: bool = False  # its log ends after an input that came since
    is_reset: bool = False  # the stream begins anew
    is_summary: bool = False  # it summarised its conversation, and stands in a file of its own
    is_woken: bool = False  # the news of a background agent's end was its input
    # its session runs beside the call that started it, which waits for no end of it but by news
    is_background: bool = False
    joins: bool = False  # a tool of it waits for sub-agents of earlier calls
    row: int = -1  # the number of its row, where a log numbers all of them
    cut: int = 0  # its session goes on from the calls of ``fork_of`` whose rows come before this number
    is_concurrent: bool = False  # its session is no one list: it waited only for the calls that had ended
    agent: str = ""  # calls of other agents share no prompt with it
    messages: list[Message] = field(default_factory=list[Message])
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0
    names: tuple[int, ...] = ()  # names of the whole blocks of its prompt that hold in every recording
    is_prefix_given: bool = False  # the log says itself what its prompt begins with, and no provider's count
    wait_ns: int | None = None  # the wait after the call before, where the log states it
    is_unstated: bool = False  # a tool of its wait states no time, so that a person may have been asked to allow it
    took_ns: int | None = None  # how long it took, where the log states it
    has_end_alone: bool = False  # the log says of it when it ended, and not when it was asked for
    unknown_wait: str = ""  # why it is not known how long the call was waited for; "" where it is
    unknown_end: str = ""  # why it is not known when it ended; "" where it is
    answer_characters: int = 0  # length of its answer as logged, 0 where the log does not hold it
    is_estimated: bool = False  # its output is made from characters, and was counted by nobody
    history: Hashable = None  # equal for calls with the same usage counts before them and in them, whatever the times
    fork_of: str = ""  # the session whose calls its own file begins with
    is_in_burst: bool = False  # it came sooner than a call can
    is_replay: bool = False  # it was only written down again, and is no request of its session
    follows: Call | None = None  # the call of another session that its own goes on from
    rewound_to: Call | None = None  # the call of its session that it goes on from, where that is not the one before it

    @property
    def stream_tokens(self) -> int:
        """Tokens of its prompt and answer that a later prompt can hold."""
        return self.input_tokens + self.visible_tokens


def whose(ended_ns: int, tools_ns: int | None, persons_ns: int | None) -> WaitKind:
    """Whose a wait was, by when tools and persons answered: the one's that took longer, at one instant a person's."""
    if tools_ns is None or persons_ns is None:
        return "tool" if persons_ns is None else "human"
    if persons_ns == tools_ns:
        return "human" if persons_ns - ended_ns >= LATE_NS else "tool"
    return "human" if persons_ns - tools_ns > max(tools_ns - ended_ns, 0) else "tool"


def texts_of(said: object) -> list[str]:
    """The texts of a message's content."""
    return [said] if isinstance(said, str) else [text_of(part, "text") for part in list_of(said)]


Log = list[Call]  # of one conversation in one file, in order


class Conversation:
    """The calls of one conversation in an agent's log, and what came since the last call began."""

    may_ask = True  # a person may be asked whether a tool may run, as far as the log says

    def __init__(self, session: str, notes: ReadNotes) -> None:
        self.session, self.parent, self.notes = session, "", notes
        self.row = ""  # the id of its latest row, which a copy in another file has too
        self.calls: Log = []
        self.people_ns: list[int] = []
        self.is_compacted = False
        # Rows, and those that could not be read: any between two calls, or many, may be what the calls waited for.
        self.num_rows = self.num_unread = self._num_before = self._num_between = 0
        self._inputs: list[tuple[int, bool | None]] = []
        self._hints: list[tuple[int, bool | None]] = []
        self._ran_ns: list[int | None] = []
        self._tools: dict[str, tuple[Call, int, str]] = {}
        self._unanswered, self._answered = set[str](), set[str]()
        self._is_in_doubt = self.is_woken = False  # woken: the program tells that a background agent or task has ended
        self.is_allowed = self.is_strange = False  # a person was asked about a tool; a row says what is not known
        self.is_over = False  # a summary, a retry or an interruption came since the last call
        self.has_tools = True  # the last call called a tool, where no row of its result tells
        self.lost = ""  # why the wait of the next call is not known: a call before it was left out
        self._shift_ns = self._latest_ns = 0
        self._back_to: Call | None = None

    def moved_ns(self, moment_ns: int, least_ns: int | None = None) -> int:
        """An instant by one clock, set on where it went back of a least instant: without one, of the rows before."""
        is_row, least_ns = least_ns is None, self._latest_ns if least_ns is None else least_ns
        if moment_ns + self._shift_ns < least_ns - LATE_NS:
            self.notes.assume(SHIFTED)
            self._shift_ns, self.lost = least_ns - moment_ns, BACK
        self._latest_ns = max(self._latest_ns, moment_ns + self._shift_ns) if is_row else self._latest_ns
        return moment_ns + self._shift_ns

    def row_unknown(self, kind: str, at: str) -> None:
        """A row is of a type that the reader does not know."""
        self.notes.row_unknown(kind, at)
        self.num_unread += 1

    def row_broken(self, reason: str, at: str) -> None:
        """A row cannot be read."""
        self.notes.row_broken(reason, at)
        self.num_unread += 1

    def look(self, row: Record, of: str = "row") -> None:
        """Whose the wait over a row is, that says something that is not known, is not known either."""
        self.is_strange = not self.notes.look(row, of) or self.is_strange

    def take_input(self, moment_ns: int, *, is_human: bool | None, is_hint: bool = False, said: object = "") -> None:
        """What a person said, or a tool's result; None: neither, as of a program. is_hint: counts only by itself."""
        texts = [text for text in texts_of(said) if text.strip()]
        if any(map(NEWS.match, texts)):
            is_human, is_hint, self.is_woken = False, False, True
        elif is_human and texts and all(map(BY_PROGRAM.match, texts)):
            is_human = None
        (self._hints if is_hint else self._inputs).append((moment_ns, is_human))
        self.people_ns += [moment_ns] * (is_human is True)

    def compact(self, at: str) -> None:
        """The next prompt begins anew, with a summary of a call that the log does not hold."""
        self.is_compacted = True
        self.lost = SUMMED
        if self.notes.is_first(self.row or at, at):
            self.notes.leave(SUMMARY, at)

    def add(self, moment_ns: int, identity: Hashable, at: str) -> Call:
        """A row is a call; as ``begin``."""
        self.notes.num_calls += 1
        turn = self.begin(moment_ns)
        turn.identity, turn.at = identity, at
        self.calls.append(turn)
        return turn

    def is_asked(self, moment_ns: int) -> bool:
        """Whether an output of this moment answers what came since the last call, and is no more of that one."""
        return moment_ns - max((at_ns for at_ns, _ in self._inputs), default=moment_ns) >= BURST_NS

    def skip(self, why: str, until_ns: int = LAST_NS) -> None:
        """A call that answered the inputs until then is left out; why: the wait of the next one is not known."""
        self.lost, self._ran_ns = why, []
        self._inputs, self._hints = ([one for one in each if one[0] > until_ns] for each in (self._inputs, self._hints))

    def go_back(self, calls: Log) -> None:
        """The conversation goes on from the last of these calls; without any it begins anew. What was asked is gone."""
        self.skip(self.lost)
        self.notes.assume(PAST_SUMMARY, any(turn.is_reset for turn in self.calls[len(calls) :]))
        self.is_compacted, self._back_to = not calls, calls[-1] if calls else None

    def lose(self, counts: Iterable[object], at: str) -> None:
        """An answer without sound counts: these are null, or no numbers of tokens."""
        if any(each is not None and tokens_of(each) is None for each in counts):
            self.notes.row_broken("an answer with a count that is no number of tokens", at)
        else:
            self.notes.drop_call("answers without token counts", at)
        self.skip(UNCOUNTED)

    def end_without_row(self, at: str) -> None:
        """The program tells that a call was cancelled, or failed, which the log does not hold: if one was asked for."""
        if self._inputs:
            self.notes.leave("calls that were cancelled or failed: the log does not hold them", at)
            self.skip("a call before theirs was cancelled or failed")

    def begin(self, moment_ns: int) -> Call:
        """The call whose first output came at ``moment_ns``; it takes the inputs so far."""
        told = [] if self.lost else [at_ns for at_ns, _ in self._hints]
        inputs, told_ns = self._inputs or self._hints, max(told, default=UNTIMED)
        self.notes.assume(LATE, is_late := told_ns - max((at_ns for at_ns, _ in inputs), default=told_ns) > LATE_NS)
        inputs, self.is_strange = [*inputs, (told_ns, False)] if is_late else inputs, self.is_strange or is_late
        ended_ns = self.calls[-1].end_ns if self.calls else moment_ns
        last_ns = {is_human: at_ns for at_ns, is_human in sorted(inputs, key=lambda each: each[0])}
        tools_ns, persons_ns = last_ns.get(False), last_ns.get(True)
        submitted_ns = max(last_ns.values(), default=ended_ns)
        turn = Call(self.session, submitted_ns, moment_ns, kind=whose(ended_ns, tools_ns, persons_ns))
        # The program goes on by itself behind a summary, by a schedule, or where a hook of it asks for more.
        is_by_itself = self._hints or self.is_compacted or not self.has_tools
        is_alone = tools_ns is None if self._inputs else is_by_itself
        turn.kind = "none" if self.is_strange or (persons_ns is None and is_alone) else turn.kind
        turn.ran_ns, turn.is_allowed, turn.is_over = self._ran_ns, self.is_allowed, self.is_over
        turn.inputs_ns, turn.is_woken, turn.people_ns = (tools_ns, persons_ns), self.is_woken, self.people_ns
        turn.is_unstated = self.may_ask and None in self._ran_ns
        turn.parent, turn.index, turn.is_reset = self.parent, len(self.calls), self.is_compacted
        turn.rewound_to, self._back_to = self._back_to, None
        self.notes.assume(AT_ONCE, bool(self.calls) and tools_ns is not None and tools_ns == persons_ns)
        self._num_between += (self.num_unread - self._num_before) * bool(self.calls)
        self._num_before = self.num_unread
        turn.unknown_wait, self.lost = self.lost or self.doubt(is_last_human=persons_ns == submitted_ns), ""
        self._inputs, self._hints, self._ran_ns, self._unanswered = [], [], [], set()
        self.is_compacted = self._is_in_doubt = self.is_woken = False
        self.is_allowed = self.is_strange = self.is_over = False
        return turn

    def doubt(self, *, is_last_human: bool) -> str:
        """Why the rows since the last call do not tell when the next one was submitted; "" where they do."""
        if self._unanswered and not is_last_human:
            return "the result of a tool before the call is missing"
        if self._is_in_doubt:
            return "the call of a tool whose result came before the call is missing"
        return "" if self._inputs or self._hints else "no row says what the call was asked for"

    def known(self) -> Log:
        """The calls so far; no wait of theirs is known where rows of unknown types came between them."""
        is_much = self.num_unread > SHARE_OF_UNKNOWN * self.num_rows
        why = "their session has rows of unknown types" if self._num_between or is_much else ""
        for turn in self.calls:
            turn.is_unanswered = turn is self.calls[-1] and bool(self._inputs)
            turn.unknown_end = self.lost if turn is self.calls[-1] else ""
            turn.unknown_wait = why or turn.unknown_wait
        return self.calls

    def call(self, name: str, turn: Call, moment_ns: int, tool: str) -> None:
        """This turn called a tool. name: by which its result is known."""
        if name and name in self._answered and name not in self._tools:
            turn.unknown_wait = self.lost = BACK
        self._unanswered.add(name)
        self._tools[name] = (turn, moment_ns, tool)
        turn.num_agents += tool in START_AN_AGENT

    def start(self, name: str, child: str) -> None:
        """The tool that is known by this name started a sub-agent, of this session."""
        if name in self._tools:
            self._tools[name][0].children.setdefault(child, UNTIMED)

    def result(self, name: str, moment_ns: int, said: object = "", ran_ms: object = None) -> Call | None:
        """A tool's result, an input: a person's where one was asked, or did not allow it. Returns the tool's call."""
        found = next(filter(None, map(RAN.match, texts_of(said))), None)
        self._ran_ns.append(seconds_ns(1000 * float(found[1]) if found else ran_ms, NS_PER_MS))
        self._unanswered.discard(name)
        turn, started_ns, tool = self._tools.get(name, (None, 0, ""))
        self.is_allowed = self.is_allowed or (bool(LIKE_ASKING.search(tool)) and tool not in ASK_A_PERSON)
        is_told_again = name in self._answered and bool(self._inputs)
        self._answered.add(name)
        texts = (text.rstrip('\\"}]) \n') for text in texts_of(said))
        is_refused = any(text.startswith(REJECTED) or text.endswith(REJECTED_LAST) for text in texts)
        # A program refuses sooner than a person.
        asked_a_person = tool in ASK_A_PERSON or (is_refused and moment_ns - started_ns >= LATE_NS)
        last = max(self._inputs, key=lambda each: (each[0], each[1] is True)) if is_told_again else (0, asked_a_person)
        self.take_input(moment_ns, is_human=last[1], is_hint=tool in END_A_RUN and not said)
        if turn is None:
            self._is_in_doubt = True
        else:
            turn.tool_spans.append((started_ns, max(moment_ns, started_ns)))
            told = (text_of(parsed_json(one.encode()), "agent_id") for one in texts_of(said) if tool in START_AN_AGENT)
            turn.children |= dict.fromkeys(filter(None, told), UNTIMED)
        return turn


class AgentLog:
    """A file of an agent, row by row. folder: its folder's name; backs: the rows before which the clock went back."""

    folder = ""

    def __init__(self, name: str, notes: ReadNotes) -> None:
        self.name, self.notes = name, notes
        self.backs: set[str] = set()
        self.num_late = self._latest_ns = 0

    def take(self, record: Record, at: str) -> None:
        """Read one row."""
        raise NotImplementedError

    def logs(self) -> Iterable[Log]:
        """The conversations of the rows so far."""
        raise NotImplementedError

    def came_at(self, moment_ns: int) -> None:
        """Count a row that is stamped before the rows above it."""
        self.num_late += moment_ns < self._latest_ns - LATE_NS
        self._latest_ns = max(self._latest_ns, moment_ns)


def logs_of(kind: type[AgentLog], files: Iterable[Path], notes: ReadNotes) -> Iterator[Log]:
    """The conversations of each file; a file whose rows are out of order of time is read again in order."""
    for path in files:
        log = _log(kind, path, notes)
        log = _log(kind, path, notes, num_late=log.num_late) if log.num_late else log
        yield from (calls for calls in log.logs() if calls)
        notes.take_over(log.notes)


def _log(kind: type[AgentLog], path: Path, notes: ReadNotes, *, num_late: int = 0) -> AgentLog:
    log = kind(path.stem, ReadNotes(known=notes.known, told=notes.told))
    log.folder = path.parent.name
    lines = json_records(path, log.notes, None if num_late else notes.progress)
    for _, at, record in _by_time(lines, num_late, log) if num_late else lines:
        log.take(record, at)
    return log


def _by_time(lines: Iterable[TraceLine], num_late: int, log: AgentLog) -> Iterable[TraceLine]:
    """Lines by their time; the clock was set back where two rows are stamped before the one that they come after."""
    stamped: list[tuple[int, TraceLine]] = []
    for line in lines:  # a row without a time stays behind the row before it
        moment_ns = instant_ns(line.record.get("timestamp"))
        stamped.append(((stamped[-1][0] if stamped else 0) if moment_ns is None else moment_ns, line))
    if 2 * sum(one[0] > other[0] for one, other in pairwise(stamped)) > len(stamped):
        stamped.reverse()
    moments, shift_ns, above_ns = dict[str, int](), 0, 0
    is_shuffled = 10 * sum(one[0] > other[0] + LATE_NS for one, other in pairwise(stamped)) > len(stamped)
    is_linked = is_shuffled or any("payload" not in line.record or "ordinal" in line.record for _, line in stamped)
    for place, (moment_ns, (path, at, record)) in enumerate(stamped):
        number = record["ordinal"] if isinstance(record.get("ordinal"), int) else 0
        is_meta = text_of(record, "type") == "session_meta"  # another session's rows, or copies, may be older
        above_ns *= not is_meta
        parent_ns = moments.get(text_of(record, "parentUuid") or f"{number - 1}", 0) if is_linked else above_ns
        latest_ns = max(near_ns for near_ns, _ in stamped[place : place + 2])
        if latest_ns + shift_ns < parent_ns - LATE_NS:
            shift_ns = parent_ns - moment_ns
            log.backs.add(at)
        shifted_ns = min(max(moment_ns + shift_ns, 0), LAST_NS)
        moments[text_of(record, "uuid") or f"{number}"] = shifted_ns
        above_ns = shifted_ns * (not is_meta)
        if shift_ns and instant_ns(record.get("timestamp")) is not None:
            record = record | {"timestamp": (EPOCH + timedelta(microseconds=shifted_ns // 1000)).isoformat()}
        stamped[place] = shifted_ns, TraceLine(path, at, record)
    num_late = sum(one[0] > other[0] for one, other in pairwise(stamped)) if log.backs else num_late
    log.notes.assume("rows out of order of time: their file was sorted", num_late)
    log.notes.assume(SHIFTED, len(log.backs))
    return (line for _, line in sorted(stamped, key=lambda pair: pair[0]))


def mark_replay(log: Log, closed_ns: Sequence[int], start_ns: int, *, is_fork: bool) -> None:
    """Mark the calls at the start of a file that are older than its first row, or were written down again in a burst.

    closed_ns: when each call was complete. A file that is all burst has no times at all.
    """
    num_burst, before_ns = 0, start_ns
    num_older = next((place for place, moment in enumerate(closed_ns) if moment >= start_ns), len(log))
    while num_burst < len(log) and (num_burst < num_older or closed_ns[num_burst] - before_ns < BURST_NS):
        before_ns = max(closed_ns[num_burst], start_ns)
        num_burst += 1
    is_replay = is_fork or num_older > 0 or 2 <= num_burst < len(log)
    for turn in log[:num_burst]:
        turn.is_in_burst, turn.is_replay = True, is_replay
    for turn in log[num_burst : num_burst + is_replay]:
        turn.submitted_ns = max(turn.submitted_ns, start_ns)
