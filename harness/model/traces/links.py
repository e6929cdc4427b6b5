"""From calls to recordings, for every reader: who called whom, what a call waited for, what its prompt keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise, takewhile
from pathlib import Path

from harness.clock import NS_PER_MS, NS_PER_S
from harness.model.plan.model import WaitKind, has_ended
from harness.model.traces.account import INCLUDED, NO_PROMPT, PLACEHOLDER_TOKENS, SHORT, DrawnWaits, ReadNotes
from harness.model.traces.base import Lines, Read, json_records
from harness.model.traces.calls import LATE_NS, REPLAYED, SUMMED, TABLES, UNTIMED, AgentLog, Call, Log, logs_of, whose
from harness.model.traces.recording import ANEW, CACHE_GONE, NO_CACHE, RecordedRequest, Recording, hidden_name
from harness.model.traces.values import Record

DEEPEST = 32  # sub-agents of sub-agents
MOST_LOOKED_AT = 64
SIBLINGS_WITHIN_NS = 2_000_000_000
YEAR_NS = 365 * 86_400 * NS_PER_S
YEARS = "more than a year, as of two clocks or in another unit"
ROUNDED_NS = 200_000_000  # instants and waits may be rounded to a tenth of a second
PROGRAM_NS = 250_000_000  # of 253,000 calls of TraceLab (codex_wall_internal_gap) a tenth had a rest above 0.24 s
IN_CIRCLE, REPEATED, UNLINKED, NEAR, FORKED, ALONE, LIKELY, AGAIN, TO_AGENT, *OF_AGENTS = TABLES["agents"].values()
MISSING, STARTED, REVIEWED = OF_AGENTS
FIRST_CACHED, SHARED, AFTER_SUMMARY, BY_MESSAGES, CACHE_LEFT_OUT, AS_PART, HELD, CUT, FALLEN = TABLES["cache"].values()
NO_READING, ADDED_REASONING, HELD_REASONING, BY_SUMS = TABLES["counts"].values()
LAST_BLOCK, WHOLE, OTHER_MODEL = TABLES["blocks"].values()
OVER, UNKNOWN, UNEXPLAINED, ALLOWED, UNSHOWN, PARTLY = TABLES["whose"].values()
GAPS, IN_TURN, UNAWAITED, OUT_OF_ORDER, UNANSWERED, *OF_WAITS = TABLES["waits"].values()
OVERLAPPING, CONTRADICTED, MAY_ASK, BACKWARDS, JOINED_LATE = OF_WAITS


def recordings_of(logs: Iterable[Log], notes: ReadNotes) -> Iterator[Recording]:
    """Every root session with its sub-agents and forks, by first submission; times from the first of all."""
    by_session = _once_each(logs, notes)
    for calls in _by_program(by_session):
        _settle_counts(calls, notes)
        _settle_cache(calls)
    for group in by_session.values():
        pairs = ((one, two) for one, two in pairwise(group) if not two.is_summary)
        notes.assume(OUT_OF_ORDER, sum(one.submitted_ns - two.submitted_ns > LATE_NS for one, two in pairs))
        notes.assume(BACKWARDS, sum(call.submitted_ns - call.end_ns > LATE_NS for call in group))
        # What asked for a summary may have asked for the call behind it, which comes after that.
        group.sort(key=lambda call: (call.end_ns if call.unknown_wait == SUMMED else call.submitted_ns, call.index))
        _check_counts(group, notes)
        _join_summaries(group, notes)
    _adopt(by_session, notes)
    _ask_again(by_session, notes)
    forks = _forks(by_session)
    notes.assume(UNANSWERED, sum(group[-1].is_unanswered and group[-1] not in forks for group in by_session.values()))
    children = {child for group in by_session.values() for call in group for child in call.children}
    children |= {name for names in forks.values() for name in names}
    roots_ns = {name: group[0].submitted_ns for name, group in by_session.items() if name not in children}
    tree = _Tree(by_session, forks, notes)
    first_ns = min(roots_ns.values(), default=0)
    for name in sorted(roots_ns, key=roots_ns.__getitem__):
        yield Recording(hidden_name(name), roots_ns[name] - first_ns, tree.requests(name))
    for name, group in by_session.items():
        if name not in tree.added:
            notes.drop(IN_CIRCLE, group[0].at, len(group))


def _by_program(by_session: dict[str, Log]) -> Iterable[Log]:
    """The calls of each file, together with those of files that share a session with it or that it goes on from."""
    files: dict[str, Log] = {}
    for group in by_session.values():
        names = {call.at.rpartition(", ")[0] for each in group for call in (each, each.follows) if call is not None}
        logs = {id(files[name]): files[name] for name in names & files.keys()}
        log, *others = logs.values() or [[]]
        log += [*(call for other in others for call in other), *group]
        moved = {name for name in files if id(files[name]) in logs} if others else set()
        files |= dict.fromkeys(names | moved, log)
    return {id(log): log for log in files.values()}.values()


def _settle_counts(calls: Log, notes: ReadNotes) -> None:
    """Let input hold what the cache held, and output the reasoning, for each provider of each file: as sums say."""
    by_provider: dict[tuple[str, str], Log] = {}
    for call in calls:
        by_provider.setdefault((call.at.rpartition(", ")[0], call.provider), []).append(call)
    for same in by_provider.values():
        usual = (same[0].has_cache_apart, same[0].has_reasoning_apart)
        others = sorted(((apart, more) for apart in (False, True) for more in (False, True)), key=usual.__ne__)
        fits = [reading for reading in others if all(_fits(call, *reading) for call in same)]
        notes.assume(NO_READING, 0 if fits else sum(not _fits(call, *usual) for call in same))
        is_stated = any(call.total_tokens and _cache_of(call) for call in same) and bool(fits)
        is_cache_apart, is_reasoning_apart = fits[0] if fits else usual
        is_cache_apart = is_cache_apart or any(_cache_of(call) > call.input_tokens for call in same)
        if is_cache_apart and not same[0].has_cache_apart:
            notes.assume(BY_SUMS if is_stated else INCLUDED, len(same))
        elif not is_stated:
            notes.assume(AS_PART, sum(call.is_unsaid and bool(call.prefix_tokens) for call in same))
        one_given = ((call.prefix_tokens is None) != (call.created_tokens is None) for call in same)
        notes.assume(CACHE_LEFT_OUT, sum(one_given) * same[0].has_cache_apart)
        num_reasoned = sum(bool(call.reasoning_tokens) for call in same)
        if not any(call.total_tokens and call.reasoning_tokens for call in same):
            is_reasoning_apart |= any(call.is_unsaid and call.reasoning_tokens > call.output_tokens for call in same)
            why = ADDED_REASONING if is_reasoning_apart else HELD_REASONING
            notes.assume(why, num_reasoned * (is_reasoning_apart or same[0].is_unsaid))
        for call in same:
            call.input_tokens += _cache_of(call) if is_cache_apart else 0
            call.output_tokens += call.reasoning_tokens if is_reasoning_apart else 0
            call.visible_tokens = max(call.output_tokens - call.reasoning_tokens, 0)


def _cache_of(call: Call) -> int:
    return (call.prefix_tokens or 0) + (call.created_tokens or 0)


def _fits(call: Call, is_cache_apart: bool, is_reasoning_apart: bool) -> bool:
    """Whether the sum that a call states is that of its counts, read so."""
    apart = _cache_of(call) * is_cache_apart + call.reasoning_tokens * is_reasoning_apart
    return call.total_tokens in (None, call.input_tokens + call.output_tokens + apart)


def _settle_cache(calls: Log) -> None:
    """Take zeros of a file as not counted, where no call has a cached token and prompts grow by their own answers."""
    if not any(map(_cache_of, calls)) and any(call.prefix_tokens == 0 and not call.is_prefix_given for call in calls):
        sessions: dict[str, Log] = {}
        has_grown = False
        for call in sorted(calls, key=lambda call: (call.submitted_ns, call.index)):
            earlier = sessions.setdefault(call.session, [call.follows] if call.follows else [])
            # After several calls at once it may hold their answers, and no prompt of theirs.
            earlier.append(call)
            before = _waits_for(earlier, len(earlier) - 1)
            has_grown |= len(before) == 1 and before[0].stream_tokens <= call.input_tokens
        for call in calls if has_grown else ():
            call.prefix_tokens = None


def _once_each(logs: Iterable[Log], notes: ReadNotes) -> dict[str, Log]:
    """The calls of each session, every call in the session that made it."""
    calls = _Calls(notes)
    firsts = ((next((turn.submitted_ns for turn in log if not turn.is_replay), log[-1].end_ns), log) for log in logs)
    for _, log in sorted(firsts, key=lambda each: each[0]):  # what a file repeats was made before its own
        calls.take(log)
    return calls.linked()


class _Calls:
    """Every call that was read, once."""

    def __init__(self, notes: ReadNotes) -> None:
        self._notes = notes
        self._known: dict[Hashable, Call] = {}
        self._histories: dict[Hashable, Call] = {}
        self._by_session: dict[str, Log] = {}
        # A session of which every call is another session's, and that session.
        self._alias: dict[str, str] = {}
        self._links: list[tuple[Call, str, int]] = []

    def take(self, log: Log) -> None:
        """Add the calls of a file that no file before it holds."""
        original: Call | None = None
        is_start = True
        for turn in self._with_prompts(log):
            is_likely = turn.is_in_burst or (is_start and turn.fork_of)
            same = self._known.get(turn.identity) or (self._histories.get(turn.history) if is_likely else None)
            if same is not None:
                self._notes.drop(REPEATED, turn.at)
                self._links += [(same, *child) for child in turn.children.items()]
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

    def _with_prompts(self, log: Log) -> Iterator[Call]:
        why = ""
        for turn in log:
            if turn.input_tokens or (turn.has_cache_apart and _cache_of(turn)):
                turn.unknown_wait, why = turn.unknown_wait or why, ""
                yield turn
            else:
                self._notes.drop(NO_PROMPT, turn.at)
                why = "a call before theirs counts no prompt token"

    def _add(self, turn: Call) -> None:
        if turn.identity is not None:
            self._known[turn.identity] = turn
        if turn.history is not None:
            self._histories[turn.history] = turn
        self._by_session.setdefault(turn.session, []).append(turn)

    def linked(self) -> dict[str, Log]:
        """The calls of each session, their sub-agents under the names of the sessions that hold them."""
        for turn, child, ended_ns in self._links:
            if child in self._by_session:
                turn.children.setdefault(child, ended_ns)
        for turn in (turn for group in self._by_session.values() for turn in group if turn.children):
            turn.children = {self._alias.get(child, child): ended_ns for child, ended_ns in turn.children.items()}
        for group in self._by_session.values():
            # A fork whose file repeats nothing goes on from where it says, else from the last call that had ended.
            first, above = group[0], self._by_session.get(group[0].fork_of, [])
            for _ in range(DEEPEST):  # of rows that its parent did not write itself
                above = self._by_session.get(above[0].fork_of, []) if above and 0 < first.cut <= above[0].cut else above
            if first.follows is None and above and group is not above and (first.cut or not first.parent):
                is_said = first.cut > 0 and all(turn.row >= 0 for turn in above)
                ended = (each.row < first.cut if is_said else each.end_ns <= first.submitted_ns for each in above)
                first.follows = next(reversed([each for each, has in zip(above, ended, strict=True) if has]), None)
                self._notes.assume(FORKED, not is_said)
            self._notes.assume(ALONE, first.cut > 0 and not above)
        return self._by_session


def _check_counts(group: Log, notes: ReadNotes) -> None:
    """Replace counts that cannot be of this answer by an estimate, and label what else looks wrong."""
    for turn in group:
        likely_tokens = notes.likely_tokens(turn.output_tokens, turn.answer_characters)
        if likely_tokens != turn.output_tokens:
            turn.output_tokens = turn.visible_tokens = likely_tokens
        elif turn.output_tokens == 0:
            notes.answered(0)
        elif turn.output_tokens <= PLACEHOLDER_TOKENS and turn.is_estimated:
            notes.assume(SHORT)
        elif turn.output_tokens <= PLACEHOLDER_TOKENS and turn.tool_spans:
            notes.assume("answers that call a tool in 1 or 2 tokens: likely placeholders, kept as recorded")
    has_times = max(turn.end_ns for turn in group) > group[0].submitted_ns or any(turn.unknown_end for turn in group)
    if len(group) > 1 and not has_times and any(turn.wait_ns is None for turn in group):
        for turn in group:
            turn.unknown_wait = turn.unknown_wait or "all calls of their session have the same time"


def _join_summaries(group: Log, notes: ReadNotes) -> None:
    """Let a call behind a summary wait for the call that made it; what came before that one asked for it."""
    for before, call in pairwise(group):
        if before.is_summary and call.unknown_wait == SUMMED:
            call.unknown_wait = ""
            notes.left = +(notes.left - Counter([TABLES["calls"]["summary"]]))
            if call.submitted_ns < before.end_ns:
                before.kind, call.kind, call.submitted_ns = call.kind, "none", before.end_ns


def _adopt(by_session: dict[str, Log], notes: ReadNotes) -> None:
    """Link each session that names only its parent to the call that likely started it, by its time."""
    named = {child for group in by_session.values() for call in group for child in call.children}
    asking: dict[str, Log] = {}
    for call in (call for group in by_session.values() for call in group if call.num_agents):
        for name in {call.session, by_session[call.session][0].parent}:
            asking.setdefault(name, []).append(call)
    for name, group in sorted(by_session.items(), key=lambda each: each[1][0].submitted_ns):
        parent, began_ns = group[0].parent, group[0].submitted_ns
        if not parent or name in named:
            continue
        free = [call for call in asking.get(parent, []) if call.session != name and _is_under_way(call, began_ns)]
        free = [call for call in free if len(call.children) < call.num_agents]
        above = by_session.get(parent, []) if parent != name else []
        before = [call for call in above if call.end_ns <= began_ns][-1:]
        starter = max(free or before, key=lambda call: (call.session == parent, call.end_ns), default=None)
        is_sure = starter is not None and _is_under_way(starter, began_ns)
        if starter is None or (starter is above[-1] and not is_sure and group[0].follows is None):
            notes.assume(UNLINKED)
            continue
        notes.assume(NEAR if is_sure else LIKELY)
        starter.children[name] = UNTIMED


def _is_under_way(call: Call, moment_ns: int) -> bool:
    """Whether a call had just ended, or had ended and a tool of it ran."""
    spans = [(call.end_ns, call.end_ns + SIBLINGS_WITHIN_NS), *call.tool_spans]
    return call.end_ns <= moment_ns and any(start_ns <= moment_ns <= end_ns for start_ns, end_ns in spans)


def _ask_again(by_session: dict[str, Log], notes: ReadNotes) -> None:
    """Split the session of a sub-agent where a later call of its parent asked it again."""
    starters = {child: call for group in by_session.values() for call in reversed(group) for child in call.children}
    for name, starter in starters.items():
        parts: list[Log] = [[]]
        for call in by_session.get(name, []):
            if call.kind == "human" and parts[0] and not call.is_concurrent:
                asked = [each for each in by_session[starter.session] if _is_under_way(each, call.submitted_ns)][-1:]
                notes.assume(TO_AGENT, not asked)
                if asked and asked[0] is not starter:
                    (starter,) = asked
                    notes.assume(AGAIN, name not in starter.children)
                    starter.children[f"{name}/{len(parts)}"] = starter.children.pop(name, UNTIMED)
                    call.follows, call.kind, call.inputs_ns = parts[-1][-1], "tool", (None, None)
                    parts.append([])
            parts[-1].append(call)
        if parts[1:]:
            by_session |= {f"{name}/{place}" if place else name: part for place, part in enumerate(parts)}
            for place, call in ((place, call) for place, part in enumerate(parts) for call in part if place):
                call.session = f"{name}/{place}"


def _forks(by_session: dict[str, Log]) -> dict[Call, list[str]]:
    """The sessions that go on from a call of another session, by that call; no sub-agents, no circles."""
    children = {child for group in by_session.values() for turn in group for child in turn.children}
    forks: dict[Call, list[str]] = {}
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
            forks.setdefault(follows, []).append(name)
    return forks


class _Tree:
    """A root session, its sub-agents and forks as one list, each once. added: the sessions of all roots so far."""

    def __init__(self, by_session: dict[str, Log], forks: dict[Call, list[str]], notes: ReadNotes) -> None:
        self._by_session, self._forks, self._notes = by_session, forks, notes
        self._drawn = DrawnWaits(notes)
        pairs = (pair for group in by_session.values() for pair in pairwise(group) if pair[1].kind == "human")
        known = (pair for pair in pairs if not (pair[0].unknown_end or pair[1].unknown_wait or pair[1].is_over))
        self._people_ns = [ns for before, turn in known if 0 < (ns := turn.submitted_ns - before.end_ns) <= YEAR_NS]
        self._requests: list[RecordedRequest] = []
        self._calls: Log = []
        self._afters: list[tuple[int, ...]] = []
        self._places: dict[Call, int] = {}
        # The calls of each session so far, behind those of other sessions that it goes on from.
        self._earlier: dict[str, Log] = {}
        self.added: set[str] = set()

    def requests(self, root: str) -> tuple[RecordedRequest, ...]:
        self._requests, self._calls, self._afters, self._places = [], [], [], {}
        self._add(root, (), {root})
        return tuple(self._requests)

    def _add(self, session: str, started_by: tuple[int, ...], above: set[str]) -> int:
        """Add a session's requests; returns the place of its last one."""
        self.added.add(session)
        group = self._by_session[session]
        follows = group[0].follows
        known = self._earlier[follows.session] if follows is not None and follows in self._places else []
        earlier = self._earlier[session] = _up_to(follows, known)
        due, late = list[int](), set[int]()  # last requests of sub-agents that the next call waits for, or a later one
        running: list[int] = []  # and of those that no call has waited for
        for place, call in enumerate(group):
            before = [self._places[each] for each in _waits_for(group, place)]
            if call.is_woken:
                due += [last for last in running if self._calls[last].end_ns <= call.submitted_ns]
            joined = [last for last in due if not call.is_concurrent or self._calls[last].end_ns <= call.submitted_ns]
            due, running = ([each for each in rest if each not in joined] for rest in (due, running))
            self._notes.assume(JOINED_LATE, len(late.intersection(joined)))
            late.update(due)
            after = tuple(dict.fromkeys((*(before or started_by), *joined)))
            self._requests.append(self._request(call, _up_to(call.rewound_to, earlier), after))
            earlier.append(call)
            self._places[call] = len(self._calls)
            self._calls.append(call)
            self._afters.append(after)
            children = self._add_children(call, above)
            running += children
            if call.joins:
                children = dict.fromkeys(running, _tools_end_ns(call))
            # The parent waited for this child: its wait counts from the end of the last child.
            ended = [last for last, until_ns in children.items() if self._calls[last].end_ns <= until_ns]
            due += [last for last in ended if not self._by_session[self._calls[last].session][0].is_background]
        last_ns = group[-1].submitted_ns
        self._notes.assume(UNAWAITED, sum(self._calls[last].end_ns <= last_ns for last in running))
        return self._places[group[-1]]

    def _add_children(self, call: Call, above: set[str]) -> dict[int, int]:
        """Add the sub-agents and forks of a call; returns the last requests of sub-agents, and their tools' ends."""
        place = self._places[call]
        lasts: dict[int, int] = {}
        children = [self._by_session.get(child, []) for child in call.children]
        for group in sorted(filter(None, children), key=lambda group: group[0].submitted_ns):
            child, began_ns = group[0].session, group[0].submitted_ns
            if child in self.added or len(above) > DEEPEST:
                self._notes.leave(MISSING, call.at)
                continue
            ends = {last: self._calls[last].end_ns for last in lasts}
            in_turn = [last for last, end_ns in ends.items() if 0 <= began_ns - end_ns <= SIBLINGS_WITHIN_NS]
            in_turn = [last for last in in_turn if ends[last] - call.end_ns > SIBLINGS_WITHIN_NS]
            started_by = [max(in_turn, key=ends.__getitem__, default=place)]
            self._notes.assume(IN_TURN, bool(in_turn))
            lasts.pop(started_by[0], None)
            own = [self._places[each] for each in (group[0].follows,) if each in self._places]
            started_by += [last for last in own if not has_ended(self._afters, last, started_by[0])]
            last, ended_ns = self._add(child, tuple(started_by), above | {child}), call.children.get(child, UNTIMED)
            lasts[last] = _tools_end_ns(call) if ended_ns == UNTIMED else ended_ns
        for _ in range(max(children.count([]), call.num_agents - len(children))):
            self._notes.leave(MISSING, call.at)
        for fork in (name for name in self._forks.get(call, ()) if name not in self.added):
            self._add(fork, (place,), above | {fork})
        return lasts

    def _request(self, call: Call, earlier: Log, after: tuple[int, ...]) -> RecordedRequest:
        first_ns = self._calls[0].submitted_ns if self._calls else call.submitted_ns
        ended_ns = max((self._calls[place].end_ns for place in after), default=first_ns)
        stated_ns = call.wait_ns if len(after) == 1 else None
        wait_ns = call.submitted_ns - ended_ns if stated_ns is None else stated_ns
        # What a sub-agent is asked first is its parent's, also where it goes on from a copy of its parent's calls.
        is_asked = self._by_session[call.session][0] is call and bool(call.parent) and call.kind == "human"
        is_start = bool(after) and (is_asked or not earlier)
        kind: WaitKind = call.kind if after and not is_start else "none"
        no_end = next((why for place in after if (why := self._calls[place].unknown_end) and stated_ns is None), "")
        is_reviewed = call.unknown_wait == REVIEWED and len(after) > 1  # by an agent whose end is known
        call.unknown_wait = ("" if is_reviewed else call.unknown_wait) or no_end or YEARS * (wait_ns > YEAR_NS)
        if is_drawn := bool(call.unknown_wait) and bool(after):
            people_ns = self._people_ns if kind == "human" else None
            wait_ns = self._drawn.unknown(call.unknown_wait, call.session, call.index, people_ns)
        elif wait_ns < 0:
            self._notes.assume(OVERLAPPING)
            wait_ns = 0
        elif stated_ns is not None:
            # Where the call before has no length, the wait between the instants holds it too.
            off_ns = stated_ns - (call.submitted_ns - ended_ns)
            has_length = any(self._calls[place].submitted_ns < ended_ns for place in after)
            self._notes.assume(CONTRADICTED, off_ns > ROUNDED_NS or (has_length and off_ns < -ROUNDED_NS))
        self._notes.assume(MAY_ASK, call.is_unstated and kind == "tool" and not is_drawn and wait_ns >= LATE_NS)
        self._notes.assume(GAPS, call.has_end_alone and bool(after) and not is_drawn)
        tools_ns, persons_ns = call.inputs_ns
        if persons_ns is not None and kind == call.kind and len(after) > 1:
            # What came after the last sub-agent had ended was waited for.
            kind = whose(ended_ns, max(tools_ns or 0, ended_ns), persons_ns)
        if is_start and not is_drawn:
            people_ns = (at_ns for place in after[:1] for at_ns in self._calls[place].people_ns)
            kind = "human" if any(ended_ns <= at_ns <= call.submitted_ns for at_ns in people_ns) else "none"
            self._notes.assume(STARTED, kind == "none" and wait_ns >= LATE_NS)
        elif earlier and not is_drawn:
            kind = self._as_shown(call, kind, max(wait_ns, 0), ended_ns if len(after) > 1 else None)
        base, keep = self._kept(call, earlier, after)
        self._notes.assume(CACHE_GONE, any(_has_cache_gone(before, call) for before in earlier[-1:]))
        whole = self._calls[base or 0].input_tokens if earlier and keep and not call.is_reset else 0
        self._notes.assume(FALLEN, call.input_tokens < whole > 2 * keep)
        lengths = (call.input_tokens, keep, max(call.output_tokens, 1))
        names = () if keep else call.names
        return RecordedRequest(base if keep else None, after, max(wait_ns, 0), kind, *lengths, names, is_drawn=is_drawn)

    def _as_shown(self, call: Call, kind: WaitKind, wait_ns: int, joined_ns: int | None) -> WaitKind:
        """Whose a wait was, as far as the files show it. joined_ns: when the last of several calls before had ended."""
        ran_ns, tools_ns = 0 if None in call.ran_ns else sum(filter(None, call.ran_ns)), call.inputs_ns[0]
        if joined_ns is not None and tools_ns is not None:
            ran_ns = max(tools_ns - joined_ns, 0)
        is_tools, rest_ns = kind == "tool" and wait_ns > 0, wait_ns - ran_ns
        reasons = {
            UNKNOWN: kind == "none" and wait_ns > 0,
            OVER: call.is_over and kind != "none",
            UNEXPLAINED: is_tools and ran_ns > 0 and rest_ns > max(LATE_NS, ran_ns),
            ALLOWED: is_tools and call.is_allowed and wait_ns >= LATE_NS,
        }
        if why := next((why for why, holds in reasons.items() if holds), ""):
            self._notes.assume(why)
            return "none"
        is_before_join = not ran_ns and None not in (joined_ns, tools_ns)
        self._notes.assume(UNSHOWN, is_tools and (call.is_guessed or is_before_join))
        if is_tools and ran_ns and rest_ns > PROGRAM_NS:
            self._notes.hold(PARTLY, ran_ns // NS_PER_MS, [wait_ns // NS_PER_MS])
        return kind

    def _is_sure(self, place: int, after: tuple[int, ...]) -> bool:
        """Whether a request has ended, by all that waits for it, when one behind these is sent."""
        return any(place == last or has_ended(self._afters, place, last) for last in after)

    def _kept(self, call: Call, earlier: Log, after: tuple[int, ...]) -> tuple[int | None, int]:
        """(place of the request whose prompt and answer this prompt begins with, how many tokens of them it keeps)."""
        start = max((place for place, each in enumerate(earlier) if each.is_reset), default=0)
        near = earlier[start:][-MOST_LOOKED_AT:] if _tells_prefix(call) or call.is_concurrent else earlier[-1:]
        if not earlier:  # a sub-agent's first call may begin with a prompt of those before it
            near = self._calls[: max(after) + 1][-MOST_LOOKED_AT:] if after and _tells_prefix(call) else []
        elif call.is_reset and not call.prefix_tokens:
            near = []
        best: tuple[int | None, int] = (None, 0)
        for each in reversed(near):
            keep, place = _common(each, call), self._places[each]
            if keep > best[1] and self._is_sure(place, after):
                best = place, keep
        if call.blocks:
            num_kept, running = best[1] // call.block_tokens, self._calls[-MOST_LOOKED_AT:]
            nums = ((num_common(call.blocks, each.blocks), self._places[each]) for each in running)
            unsure = (num for num, place in nums if num > num_kept and not self._is_sure(place, after))
            self._notes.assume(HELD, max(unsure, default=num_kept) - num_kept)
        if call.block_tokens and best[0] is not None:
            before = self._calls[best[0]]
            why = doubt_of(call.blocks, before.blocks)
            self._notes.assume(why, bool(why) and call.input_tokens >= before.stream_tokens)
            self._notes.assume(OTHER_MODEL, before.provider != call.provider)
        elif not earlier or (call.is_reset and call.prefix_tokens):
            what = (AFTER_SUMMARY if earlier else SHARED) if best[1] else FIRST_CACHED
            self._notes.assume(what, bool(call.prefix_tokens) and not call.blocks)
        elif call.prefix_tokens is None and not call.block_tokens:
            self._notes.assume(BY_MESSAGES if call.messages else NO_CACHE if best[1] else ANEW)
        if (earlier or best[1]) and not (call.blocks or call.block_tokens or (call.is_reset and not best[1])):
            self._notes.hold(CUT, call.prefix_tokens, best[1:])
        return best


def _up_to(call: Call | None, earlier: Log) -> Log:
    """The calls up to one of them; all where it is none of them."""
    known = [place for place, each in enumerate(earlier, 1) if call is not None and each.identity == call.identity]
    return earlier[: known[-1]] if known else earlier


def _tools_end_ns(call: Call) -> int:
    return max((end_ns for _, end_ns in call.tool_spans), default=UNTIMED)


def _waits_for(group: Log, place: int) -> Sequence[Call]:
    """The calls of its session that a call waits for: the one before, or the last ones that had ended."""
    call = group[place]
    if not call.is_concurrent:
        return group[max(place - 1, 0) : place]
    ended = [each for each in group[max(0, place - MOST_LOOKED_AT) : place] if each.end_ns <= call.submitted_ns]
    latest_start_ns = max((each.submitted_ns for each in ended), default=0)
    last_end_ns = max((each.end_ns for each in ended), default=0)
    return [each for each in ended if each.end_ns > latest_start_ns or each.end_ns == last_end_ns]


def _tells_prefix(call: Call) -> bool:
    """Whether a call has evidence of its own for what its prompt begins with."""
    return call.prefix_tokens is not None or bool(call.messages or call.blocks)


def _has_cache_gone(before: Call, call: Call) -> bool:
    """Whether a prompt that did not shrink had less cached than the one before read and wrote, as after a long wait."""
    if call.prefix_tokens is None or call.is_prefix_given or call.is_reset or call.is_concurrent:
        return False
    has_grown = call.agent == before.agent and call.input_tokens >= before.input_tokens
    return has_grown and call.prefix_tokens < _cache_of(before)


def _common(before: Call, call: Call) -> int:
    """Tokens of the earlier call's prompt and answer that this prompt begins with."""
    most = min(before.stream_tokens, call.input_tokens)
    if call.agent != before.agent and call.session == before.session:
        return 0
    if call.blocks or call.block_tokens:
        return kept_tokens(call.blocks, before.blocks, call.block_tokens, before.stream_tokens, call.input_tokens)
    if call.prefix_tokens is not None:  # a count between the two shows that the answer's reasoning stayed
        whole = min(before.input_tokens + before.output_tokens, call.input_tokens)
        return call.prefix_tokens if call.prefix_tokens <= whole else most
    if not before.messages or not call.messages:
        return most if call.input_tokens >= before.stream_tokens else 0
    common = num_common(call.messages, before.messages)
    if common == len(before.messages) and len(call.messages) > common:
        return most
    return min(sum(tokens for _, tokens in call.messages[:common]), most)


def kept_tokens(blocks: tuple[int, ...], before: tuple[int, ...], block_tokens: int, streamed: int, prompt: int) -> int:
    """Tokens of the previous prompt and answer, ``streamed`` in all, that a prompt begins with, by their blocks."""
    common = num_common(blocks, before)
    if common == len(before) and prompt >= streamed:
        return streamed
    return min(common * block_tokens, streamed, prompt)


def doubt_of(blocks: tuple[int, ...], before: tuple[int, ...]) -> str:
    """Why it is not sure what a prompt that grew keeps, by the blocks of both: a label, or "" where it is."""
    common = num_common(blocks, before)
    if common == len(before):
        return WHOLE if before else NO_CACHE
    return LAST_BLOCK if 1 < len(before) <= len(blocks) and common == len(before) - 1 else ""


def num_common(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(takewhile(bool, (mine == theirs for mine, theirs in zip(one, other, strict=False))))


def reader_of(kind: type[AgentLog]) -> Read:
    """A reader of recordings from a kind of log."""
    return through_calls(partial(logs_of, kind))


def of_documents(logs: Callable[[Record, str, ReadNotes], Iterable[Log]]) -> Read:
    """A reader of recordings from a reader of the calls of one document, or of a line, at a place."""
    return of_lines(lambda lines, notes: (log for _, at, record in lines for log in logs(record, at, notes) if log))


def of_lines(logs: Callable[[Lines, ReadNotes], Iterable[Log]]) -> Read:
    """A reader of recordings from a reader of the calls of all lines."""
    each = chain.from_iterable
    return through_calls(lambda files, notes: logs(each(json_records(one, notes) for one in files), notes))


def through_calls(logs: Callable[[Iterable[Path], ReadNotes], Iterable[Log]]) -> Read:
    """A reader of recordings from a reader of calls."""
    return lambda files, notes: recordings_of(logs(files, notes), notes)
