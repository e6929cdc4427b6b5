"""OpenTelemetry GenAI spans and log records: calls of models, the tools between them, and agents within agents."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, pairwise, takewhile
from pathlib import Path

from harness.extras.formats.otel_spans import HELD_TO, LABELS, PASSED, PATTERNS, Span, doubt, read_span
from harness.extras.formats.otlp import spans_in
from harness.model.traces.account import ReadNotes
from harness.model.traces.base import Lines, trace_format
from harness.model.traces.calls import BURST_NS, LATE_NS, UNTIMED, Log, whose
from harness.model.traces.links import MOST_LOOKED_AT, of_lines
from harness.model.traces.values import Record, record_of


def otel_logs(lines: Lines, notes: ReadNotes) -> Iterator[Log]:
    """The calls of each conversation (else trace), and of each agent that a call of another one started."""
    tree, places = _Tree(notes), dict[Path, int]()
    for path, at, document in lines:
        tree.read(document, at, f"{places.setdefault(path, len(places))}/")
    yield from tree.logs()


class _Tree:
    """The spans of all files by their parents."""

    def __init__(self, notes: ReadNotes) -> None:
        self._notes = notes
        self._spans: dict[tuple[str, str], Span] = {}
        self._calls, self._others = list[Span](), list[Span]()
        self._seen: set[tuple[object, ...]] = set()
        self._short, self._of_trace = dict[str, set[str]](), dict[str, list[Span]]()
        # The calls of each agent or tool, by its span; those of no agent by their trace.
        self._runs, self._by_end = dict[tuple[str, str], list[Span]](), dict[tuple[str, str], list[Span]]()

    def read(self, document: Record, at: str, scope: str) -> None:
        """Read a document. scope: sets the short names of its file apart from those of other files."""
        records = list(spans_in(document, self._notes))
        self._notes.num_rows += len(records) - 1
        for place, record in enumerate(records):
            span = read_span(record, f"{at} span {place}", self._notes)
            self._notes.look({"attribute": [*filter(PATTERNS["name"].match, record_of(record, "attributes"))]}, "span")
            is_known = span.value in self._seen
            self._seen.add(span.value)
            if span.trace and not PATTERNS["global"].search(span.trace):
                span.trace, span.clock = f"{scope}{span.trace}", scope
            if span.conversation and not PATTERNS["global"].search(span.conversation):
                self._short.setdefault(span.conversation, set()).add(scope)
                span.conversation = f"{scope}{span.conversation}"
                span.clock = span.clock if span.trace else scope
            known = self._spans.get((span.trace, span.span)) if span.span else None
            if span.call is not None and (is_known or (known and known.call)):
                self._notes.drop("calls in spans that came before" if is_known else LABELS["other_values"], span.at)
                continue
            if span.span:
                self._spans.setdefault((span.trace, span.span), span)
            (self._others if span.call is None else self._calls).append(span)

    def logs(self) -> Iterator[Log]:
        """The calls of each session, linked to the calls that started it."""
        self._notes.assume(LABELS["short_names"], sum(len(scopes) > 1 for scopes in self._short.values()))
        self._settle_bare()
        self._calls = self._once_each()
        self._one_clock()
        self._calls.sort(key=lambda span: (span.start_ns, span.end_ns))
        self._end_before_tools()
        traces: dict[str, list[Span]] = {}
        for place, span in enumerate(self._calls):
            earlier = self._calls[max(0, place - MOST_LOOKED_AT) : place]
            is_twice = any(each.service != span.service and each.wraps(span) for each in earlier)
            self._notes.assume(LABELS["twice"], is_twice)
            run = self._run(span)
            if span.call is not None:
                agents = (each.agent for each in (span, *self._above(span)) if each.agent)
                span.call.agent = next(agents, span.call.agent)
            self._runs.setdefault((span.trace, run.span if run else ""), []).append(span)
            traces.setdefault(span.trace, []).append(span)
            self._notes.assume(LABELS["orphans"], bool(self._root(span).parent))
            self._notes.assume(LABELS["skewed"], next(self._above(span), span).start_ns - span.start_ns > LATE_NS)
        is_each_alone = len(traces) > 1 and all(len(spans) == 1 for spans in traces.values())
        is_said = any(each.conversation for span in self._calls for each in (span, *self._above(span)))
        self._notes.assume(LABELS["alone"], len(traces) * (is_each_alone and not is_said))
        for name, spans in traces.items():
            why = doubt(spans, self._of_trace[name])
            for call in (span.call for span in spans if span.call):
                call.unknown_wait = why
        self._by_end = {run: sorted(spans, key=lambda span: span.end_ns) for run, spans in self._runs.items()}
        for span in (*self._calls, *self._others):
            self._root(span).num_within += span.role in ("call", "tool") and not span.is_bare
        self._name_sessions()
        self._add_tools()
        sessions: dict[str, list[Span]] = {}
        for span in self._calls:
            sessions.setdefault(span.session, []).append(span)
        for spans in sessions.values():
            self._tell_waits(spans)
            yield [span.call for span in spans if span.call]

    def _one_clock(self) -> None:
        """Count the instants of files with short names from the first of each, where there are several."""
        firsts: dict[str, int] = {}
        for span in self._calls:
            firsts[span.clock] = min(firsts.get(span.clock, span.start_ns), span.start_ns)
        if len(firsts) > 1:
            self._notes.assume("files whose instants are counted from the first of each", len(firsts))
            for span in (*self._calls, *self._others):
                by_ns = min(firsts.values()) - firsts.get(span.clock, 0)
                span.start_ns, span.end_ns = span.start_ns + by_ns, span.end_ns + by_ns
                if span.call is not None:
                    span.call.submitted_ns, span.call.end_ns = span.start_ns, span.end_ns

    def _above(self, span: Span) -> Iterator[Span]:
        """The spans around one, the nearest first."""
        seen = {id(span)}
        while (above := self._spans.get((span.trace, span.parent))) is not None and id(above) not in seen:
            seen.add(id(above))
            yield above
            span = above

    def _root(self, span: Span) -> Span:
        return [span, *self._above(span)][-1]

    def _run(self, span: Span) -> Span | None:
        """The nearest agent or tool around a span."""
        return next((each for each in self._above(span) if each.role in ("agent", "tool")), None)

    def _settle_bare(self) -> None:
        """A chat without counts tells of the call within it, else it cannot be read."""
        around = {id(above) for span in self._calls for above in self._above(span)}
        for span in self._others:
            if span.is_bare and id(span) in around:
                self._notes.drop_call(LABELS["wraps"], span.at)
            elif span.is_bare:
                self._notes.row_broken(LABELS["no_counts"], span.at)
                span.is_unread = True
        for span in (*self._calls, *self._others):
            self._of_trace.setdefault(span.trace, []).append(span)

    def _once_each(self) -> list[Span]:
        """Calls without those that another span tells too: two instrumentations of one call, or sums of several."""
        out: dict[int, str] = {id(each): LABELS["logged"] for each in self._logged()}
        within: dict[int, tuple[Span, list[Span]]] = {}
        for span in (each for each in self._calls if id(each) not in out):
            around = [each for each in self._above(span) if each.role in ("call", "tool")]
            wrapping = takewhile(lambda each: each.role == "call", around)  # around a tool another call stands
            out |= {id(each): LABELS["around"] for each in wrapping if each.call and not each.is_named}
            if around and around[0].call:
                within.setdefault(id(around[0]), (around[0], []))[1].append(span)
        for above, spans in within.values():
            if above.sums(spans):
                is_within = len(spans) == 1 and above.is_named and not spans[0].is_named
                why = "within" if is_within else "sums" if spans[1:] else "wraps"
                out[id(spans[0] if is_within else above)] = LABELS[why]
            self._notes.assume(LABELS["nested"], len(spans) * (id(above) not in out and not above.sums(spans)))
        for span in self._calls:
            if id(span) in out:
                self._notes.drop(out[id(span)], span.at)
        return [span for span in self._calls if id(span) not in out]

    def _logged(self) -> Iterator[Span]:
        """Records of logs, which have no id, that tell of a call that a span, or a record of lower rank, tells too."""
        told: dict[object, list[Span]] = {}
        for span in self._calls:
            for rank in range(span.rank + 1, 3):
                told.setdefault((rank, span.value[4]), []).append(span)
        for span in self._calls:
            others = told.get((span.rank, span.value[4]), [])
            near = (each for each in others if abs(each.end_ns - span.end_ns) <= LATE_NS and each.is_beside(span))
            if found := next((each for each in near if not each.rank or each.value[5] == span.value[5]), None):
                others.remove(found)
                yield span

    def _end_before_tools(self) -> None:
        """End each call that is open while its own tools run where the first of them began."""
        kept, firsts = set(map(id, self._calls)), dict[int, int]()
        siblings: dict[tuple[str, str], list[Span]] = {}
        for span in self._calls:  # by their start
            siblings.setdefault((span.trace, span.parent), []).append(span)
        for tool in self._others:
            around = next((each for each in self._above(tool) if each.role in ("call", "agent", "tool")), None)
            around = _holder(siblings.get((tool.trace, tool.parent), []), tool) or around
            is_in_tool = around is not None and around.role == "tool" and not (tool.role or tool.is_allowed)
            self._notes.assume(LABELS["inside"], is_in_tool and tool.end_ns - tool.start_ns >= LATE_NS)
            if tool.role == "tool" and tool.has_times and id(around) in kept:
                firsts[id(around)] = min(firsts.get(id(around), tool.start_ns), tool.start_ns)
        for span in self._calls:
            first_ns = firsts.get(id(span), span.end_ns)
            if span.call is not None and span.start_ns <= first_ns < span.end_ns:
                span.end_ns = span.call.end_ns = first_ns
                self._notes.assume(LABELS["open"])

    def _starter(self, span: Span, first_ns: int) -> Span | None:
        """The last call that had ended before ``first_ns``, of the nearest agent around a span that had any."""
        runs = [each for each in self._above(span) if each.role in ("agent", "tool")]
        for name in (*(run.span for run in runs), ""):
            calls = self._by_end.get((span.trace, name), [])
            place = bisect_right(calls, first_ns, key=lambda each: each.end_ns)
            ended = reversed(calls[max(0, place - MOST_LOOKED_AT) : place])
            if (last := next((each for each in ended if name or each.is_beside(span)), None)) is not None:
                return last
        return None

    def _name_sessions(self) -> None:
        """A run that a call started is a session of its own; all others are of their conversation, else trace."""
        runs = {key: self._spans.get(key) for key in self._runs}
        starters = {key: run and self._starter(run, self._runs[key][0].start_ns) for key, run in runs.items()}
        at_once = self._at_once([key for key, run in runs.items() if run and not starters[key] and run.role == "agent"])
        for (trace, name), spans in self._runs.items():
            run, starter = runs[trace, name], starters[trace, name]
            for span in spans:
                conversation = next((each.conversation for each in (span, *self._above(span)) if each.conversation), "")
                span.session = conversation or trace if starter is None else f"{trace}/{name}"
                span.session += at_once.get((trace, name), "")
            if run is not None and starter is not None and starter.call is not None:
                tool = above if (above := self._run(run)) and above.role == "tool" else run
                self._notes.assume(LABELS["started"], tool.role != "tool")
                starter.call.children[f"{trace}/{name}"] = tool.end_ns if tool.has_times else UNTIMED
        names = self._joined_by_messages()
        for span in self._calls:
            span.session = names.get(span.session, span.session)
            if span.call is not None:
                span.call.session = span.session

    def _at_once(self, agents: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
        """Names for those of agents that no call started which another one of their trace overlaps in time."""
        found: set[tuple[str, str]] = set()
        last: dict[str, tuple[int, tuple[str, str]]] = {}  # of each trace the one that ends last so far
        for key in sorted(agents, key=lambda key: self._runs[key][0].start_ns):
            ended_ns, before = last.get(key[0], (-1, key))
            if self._runs[key][0].start_ns < ended_ns:
                found |= {key, before}
            run, earlier = self._spans[key], self._spans[before]
            is_said = any(each.conversation for each in (run, earlier, self._runs[key][0]))
            is_apart = run.agent != earlier.agent and self._root(run) is not self._root(earlier)
            self._notes.assume(LABELS["following"], is_apart and not is_said and key not in found)
            last[key[0]] = max((ended_ns, before), (self._by_end[key][-1].end_ns, key))
        self._notes.assume(LABELS["apart"], len(found))
        agents_of = {key: (key[0], self._spans[key].agent) for key in found}
        counts = Counter(agents_of.values())
        return {key: f"/{each[1] if each[1] and counts[each] == 1 else key[1]}" for key, each in agents_of.items()}

    def _joined_by_messages(self) -> dict[str, str]:
        """Other names for traces whose first prompt goes on from the last prompt of an earlier trace."""
        names: dict[str, str] = {}
        last: dict[tuple[bytes, ...], Span] = {}
        traces: dict[str, list[Span]] = {}
        for span in self._calls:
            if span.session == span.trace and not span.conversation:
                traces.setdefault(span.trace, []).append(span)
        for trace, spans in traces.items():  # by their first calls
            digests = spans[0].digests
            found = [last[digests[:size]] for size in range(len(digests) - 1, 0, -1) if digests[:size] in last]
            before = next((each for each in found if each.end_ns <= spans[0].start_ns), None)
            if before is not None:
                self._notes.assume(LABELS["joined"])
                names[trace] = names.get(before.trace, before.trace)
                del last[before.digests]
            if spans[-1].digests:
                last[spans[-1].digests] = spans[-1]
        return names

    def _add_tools(self) -> None:
        """Give each tool, and each agent that no tool ran, to the call that it came after."""
        for span in self._others:
            run = self._run(span)
            is_known = (span.trace, span.span) in self._runs or (run is not None and run.role == "tool")
            if span.has_times and (span.role == "tool" or (span.role == "agent" and not is_known)):
                calls = self._by_end.get((span.trace, run.span if run else ""), [])
                under_way = (each for each in calls if each.start_ns <= span.start_ns)
                starter = self._starter(span, span.start_ns) or next(under_way, None)
                if starter is not None and starter.call is not None:
                    starter.call.tool_spans.append((span.start_ns, span.end_ns))

    def _tell_waits(self, spans: list[Span]) -> None:
        """Say whose each wait was: a tool's where one ran in it, a person's before a new root span or their prompt."""
        has_tools = any(span.call.tool_spans for span in spans if span.call)
        # An answer to a tool that asks a person is of its trace; a record of a log need not be.
        traces = {each.trace for each in spans}
        beside = [span for span in self._others if span.is_beside(spans[0]) and (not span.span or span.trace in traces)]
        asked = {span.end_ns for span in beside if span.role == "person"}
        allowed = {span.end_ns for span in beside if span.is_allowed}
        failed = sorted((span for span in beside if span.is_failed), key=lambda span: -span.start_ns)
        # When the first attempt was made within spans around one call: it waited for nothing that ended later.
        around = Counter((span.trace, span.parent) for span in spans if span.parent)
        tried_in = {(each.trace, each.parent): each.start_ns for each in failed if around[each.trace, each.parent] == 1}
        if (first := spans[0]).call is not None:
            tried_ns = [each.start_ns for each in failed if self._run(each) is self._run(first)]
            first.call.submitted_ns = min([first.start_ns, *tried_ns])
        for place, span in enumerate(spans[1:], 1):
            earlier = spans[max(0, place - MOST_LOOKED_AT) : place]
            began_ns = min(tried_in.get((span.trace, span.parent), span.start_ns), span.start_ns)
            ended_ns = max((each.end_ns for each in earlier if each.end_ns <= began_ns), default=None)
            self._notes.assume(LABELS["beside"], earlier[-1].wraps(span))
            if span.call is not None and span.clock != earlier[-1].clock:
                self._notes.assume(f"calls whose order is not known: {LABELS['other_clock']}")
                span.call.unknown_wait = span.call.unknown_wait or LABELS["other_clock"]
            if ended_ns is None or span.call is None:
                continue
            tools = (tool for each in earlier if each.call for tool in each.call.tool_spans)
            last_ns = span.start_ns + BURST_NS  # a tool that goes on is not waited for
            over = (each for each in tools if each[0] < span.start_ns and ended_ns < each[1] <= last_ns)
            ran = sorted((max(start_ns, ended_ns), end_ns) for start_ns, end_ns in over)
            tool_ns = max((end_ns for _, end_ns in ran), default=ended_ns)
            root, before = self._root(span), self._root(earlier[-1])
            # A root around one call alone may be its request, wrapped: then the call before must have ended a run.
            is_run = [each.role == "agent" or (each.role != "call" and each.num_within > 1) for each in (before, root)]
            has_ended = is_run[0] and before.has_times and before.end_ns <= root.start_ns
            is_turn = is_run[1] or has_ended or earlier[-1].is_final
            is_turn = is_turn and root is not before and root.start_ns >= ended_ns
            persons = {moment_ns for moment_ns in asked if ended_ns <= moment_ns <= span.start_ns}
            asked_ns = max(persons | ({root.start_ns} if is_turn else set()), default=None)
            # An attempt that failed is a part of the call that was made instead.
            tried_ns = [each.start_ns for each in failed if self._run(each) is self._run(span)]
            first_ns = min([at_ns for at_ns in tried_ns if at_ns >= ended_ns] + [span.start_ns])
            asked_last_ns = max(tool_ns, asked_ns or 0)
            span.call.submitted_ns = max(first_ns, min(asked_last_ns, span.start_ns))
            if first_ns < span.call.submitted_ns:
                span.call.unknown_wait = span.call.unknown_wait or LABELS["asked_again"]
            if tool_ns > ended_ns or asked_ns is not None:
                span.call.inputs_ns = (tool_ns if tool_ns > ended_ns else None, asked_ns)
                span.call.kind = whose(ended_ns, *span.call.inputs_ns)
                span.call.is_allowed = any(ended_ns < end <= span.start_ns for end in allowed)
                told = zip(ran, accumulate((end_ns for _, end_ns in ran), max, initial=0), strict=False)
                span.call.ran_ns = [max(end_ns - max(start_ns, before_ns), 0) for (start_ns, end_ns), before_ns in told]
                self._notes.assume(LABELS["rooted"], is_turn and not persons and span.call.kind == "human")
            else:
                span.call.is_guessed = not (has_tools or asked) and span.trace == earlier[-1].trace
                span.call.kind = "tool" if span.call.is_guessed else "none"


def _holder(calls: list[Span], tool: Span) -> Span | None:
    """Of calls in order of their start, the one that was under way, alone, from a tool's start to its end."""
    place = bisect_right(calls, tool.start_ns, key=lambda each: each.start_ns)
    is_alone = all(one.end_ns <= two.start_ns for one, two in pairwise(calls[max(place - 2, 0) : place + 1]))
    return calls[place - 1] if place and is_alone and tool.end_ns <= calls[place - 1].end_ns else None


FORMAT = trace_format(__file__, "otel", of_lines(otel_logs), passed=PASSED, held_to=f"semantic conventions {HELD_TO}")
