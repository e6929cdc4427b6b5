"""OpenHands: event streams (a list of events, an evaluation's ``history``) and conversations of its SDK."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from harness.extras.formats.trajectories import UNSTATED, TrajectoryCalls, Usage, usage_of
from harness.model.traces.account import ReadNotes
from harness.model.traces.base import Lines, by_type, read_tables, trace_format
from harness.model.traces.calls import END_A_RUN, LATE_NS, LIKE_ASKING, START_AN_AGENT, Call, Log
from harness.model.traces.links import of_lines
from harness.model.traces.values import Record, instant_ns, list_of, record_of, records_of, seconds_ns, text_of

TABLES = read_tables(Path(__file__).with_suffix(".toml"))
PASSED, NAMES, LABELS = by_type(TABLES["passed"]), TABLES["names"], TABLES["labels"]


def openhands_logs(lines: Lines, notes: ReadNotes) -> Iterator[Log]:
    """The calls of each conversation: of a folder's events, of a file's list, or of a line's history."""
    conversations: defaultdict[str, _Conversation] = defaultdict(lambda: _Conversation("", notes))
    for path, at, record in lines:
        folder = path.parent.parent if path.parent.name == "events" else path.parent
        # A history is a list of events, or of pairs of them.
        pairs = (entry if isinstance(entry, list) else [entry] for entry in list_of(record, "history"))
        if "stats" in record:
            notes.part()
            conversations[str(folder)].policy = text_of(record, "confirmation_policy", "kind")
            for metrics in record_of(record, "stats", "usage_to_metrics").values():
                conversations[str(folder)].take_metrics(metrics)
        elif of_line := [event for pair in pairs for event in records_of(pair)]:
            notes.num_rows += len(of_line) - 1
            conversations[at].policy = "nobody"
            conversations[at].take_metrics(record.get("metrics"))
            conversations[at].events += [(f"{at}, event {place}", event) for place, event in enumerate(of_line)]
        elif "timestamp" in record:
            name, place = (str(folder), f"{folder}, {path.name}") if "kind" in record else (str(path), at)
            conversations[name].events.append((place, record))
        elif record.get("history", 0) in (None, []):
            notes.leave(LABELS["no_events"], at, 1)
        else:
            notes.row_broken("no event", at)
    for name, conversation in conversations.items():
        # A conversation's state counts its sub-agents' answers too.
        below = [each for other, each in conversations.items() if Path(name) in Path(other).parents]
        for answer in {answer for each in below for answer in each.usages}:
            conversation.usages.pop(answer, None)
        if log := conversation.log(name):
            above = Path(name).parent
            log[0].parent = str(above.parent) if above.name == "subagents" else ""
            yield log


class _Conversation(TrajectoryCalls):
    """The events of a conversation, and its calls: one for each answer of the model that any event tells of."""

    def __init__(self, session: str, notes: ReadNotes) -> None:
        super().__init__(session, notes)
        self.events: list[tuple[str, Record]] = []
        self.policy = ""  # of confirming: by it a person is asked whether a tool may run
        # Of answers by their id: the usage, and how long they took.
        self.usages, self._took_ns = dict[str, Usage](), dict[str, int | None]()
        self._answers, self._named, self._num_nameless = dict[str, Call](), set[str](), 0
        self._calls_at: dict[str, Call | None] = {}  # the last call before an event, on its branch
        self._totals, self._told = [0] * 4, [0] * 4  # of all calls so far, and as an event last told them
        self._is_missed = False  # since then an answer came whose counts are not known

    def take_metrics(self, metrics: object) -> None:
        """Read what one model's metrics say of answers by their id."""
        for usage in records_of(metrics, "token_usages"):
            counts, name = usage_of(usage), text_of(usage, "response_id")
            if isinstance(counts, Usage) and name:
                self.usages[name] = counts
        for each in records_of(metrics, "response_latencies"):
            self._took_ns[text_of(each, "response_id")] = seconds_ns(each.get("latency"))

    def log(self, session: str) -> Log:
        """The calls, held to the sums that the files state: of one model, or of all."""
        for moment_ns, at, event in self._in_order():
            self._take(moment_ns, at, event)
        unnamed, usages = self.usages.keys() - self._named, self.usages.values()
        for _ in range(len(unnamed) - self._num_nameless if len(unnamed) < len(usages) else 0):
            self.notes.leave(LABELS["in_no_event"], self.events[0][0])
        prompts = max(self._told[0], sum(usage.prompt for usage in usages))
        answers = max(self._told[1], sum(usage.generate for usage in usages))
        self.notes.hold(f"prompt tokens {UNSTATED}", prompts or None, (call.input_tokens for call in self.calls))
        self.notes.hold(f"output tokens {UNSTATED}", answers or None, (call.output_tokens for call in self.calls))
        return super().log(session)

    def _in_order(self) -> Iterator[tuple[int, str, Record]]:
        """Events with their instants, by their numbers where all have one, else by time."""
        rows = [(instant_ns(event.get("timestamp")), at, event) for at, event in self.events]
        self.num_rows = len(rows)
        for at in (at for moment_ns, at, _ in rows if moment_ns is None):
            self.row_broken("an event without its time", at)
        stamped = [(moment_ns, at, event) for moment_ns, at, event in rows if moment_ns is not None]
        numbers = {at: number for at, event in self.events if (number := _number(event, at)) is not None}
        self.notes.check_numbers(numbers.values(), "events")
        if len(numbers) == len(rows):
            stamped = self.notes.in_order(stamped, lambda row: numbers[row[1]], "events out of order of their number")
        else:
            stamped = self.notes.in_order(stamped, lambda row: row[0], "events out of order of time", LATE_NS)
        for moment_ns, at, event in stamped:  # the machine's clock may be set back, as between two starts
            yield self.moved_ns(moment_ns), at, event

    def _take(self, moment_ns: int, at: str, event: Record) -> None:
        kind = text_of(event, "kind") or text_of(event, "action") or text_of(event, "observation")
        name = text_of(event, "tool_call_metadata", "model_response", "id") or text_of(event, "llm_response_id")
        step, is_agents = self._step(event), text_of(event, "source") == "agent"
        # The program could make no action of an answer, and asks again.
        is_unusable = is_agents and kind == "error" and not name and event.get("cause") is None
        is_told = bool(name or (is_agents and (any(step) or kind == "message"))) and "observation" not in event
        states = {text_of(event, *path) for path in NAMES["states"]}
        above = self._calls_at.get(text_of(event, "parent_id"), self.calls[-1] if self.calls else None)
        # The model is asked again after a person's message, or with what came of an action.
        is_asking = kind in ("MessageEvent", "message") or text_of(event, "args", "agent_state") == "running"
        is_result = "observation" in event and kind not in ("agent_state_changed", "recall", "null")
        num_calls = len(self.calls)
        self._named.add(name)
        if is_unusable or (is_told and kind not in NAMES["observations"]):
            self._num_nameless += not name
            self._answer(event, name or at, moment_ns, at, step)
            if is_unusable:
                self.take_input(moment_ns, is_human=None)
        elif kind in NAMES["observations"] or is_result or (is_asking and text_of(event, "source") == "user"):
            is_human = text_of(event, "source") == "user" and (self.policy != "nobody" or None)
            is_refused = kind in NAMES["rejections"] and text_of(event, "rejection_source") != "hook"
            is_end = text_of(event, "tool_name") in END_A_RUN or kind == "HookExecutionEvent"
            self.ask(moment_ns, is_human=is_refused or is_human, is_hint=is_end)
        elif not self.notes.passes(kind, PASSED):
            self.row_unknown(f"event {kind}", at)
            self._is_missed = self._is_missed or is_agents
        elif kind in (*NAMES["end_a_call"], "PauseEvent") or text_of(event, "args", "agent_state") == "paused":
            self.stop(at, ends_a_call=kind in NAMES["end_a_call"])
        elif "error" in states and "LLM" in text_of(event, "extras", "reason"):
            self.end_without_row(at)
        self._is_missed = self._is_missed and not step
        for call in self.calls[num_calls:]:
            call.rewound_to, above = above if above not in self.calls[-2:] else None, call
        self._calls_at[text_of(event, "id")] = above
        self.look(event)
        self.look({text_of(event, "key"): event.get("value")}, "state")
        self.is_over = self.is_over or not {kind, *states}.isdisjoint(NAMES["interrupts"])
        self.is_allowed = self.is_allowed or not states.isdisjoint(NAMES["asks_a_person"])

    def _step(self, event: Record) -> list[int]:
        """How far the running totals of all calls went on, where an event tells them."""
        sums = usage_of(record_of(event, "llm_metrics", "accumulated_token_usage"))
        if not isinstance(sums, Usage):
            return []
        before, self._told = self._totals, [count or 0 for count in sums[:4]]
        self._totals = self._told
        return [now - earlier for now, earlier in zip(self._told, before, strict=True)]

    def _answer(self, event: Record, name: str, moment_ns: int, at: str, step: list[int]) -> None:
        """An answer is a call; it may be several actions."""
        if name in self._answers:
            self.notes.part()
        elif isinstance(counts := self._counts(event, name, step), Usage):
            self._answers[name] = call = self.answer(counts, at, moment_ns, self._took_ns.get(name))
            sums = [now + (more or 0) for now, more in zip(self._totals, counts, strict=False)]
            self._totals = self._totals if step else sums
            call.agent = "condenser" * (text_of(event, "kind") == "Condensation")
            call.identity, call.is_unstated = ("openhands", name, moment_ns), "kind" in event and not self.policy
        else:
            self.lose(counts, at)
            self._is_missed = True
            return
        tool = text_of(event, "tool_name")
        self._answers[name].num_agents += (tool in START_AN_AGENT) + len(record_of(event, "action", "tasks"))
        self.is_allowed |= bool(LIKE_ASKING.search(tool)) or self.policy not in TABLES["policies"]

    def _counts(self, event: Record, name: str, step: list[int]) -> Usage | list[object]:
        """The counts of an answer: its event's, or by its id the usage's, else the step of the running totals."""
        counts = usage_of(record_of(event, "tool_call_metadata", "model_response", "usage"))
        counts = counts if isinstance(counts, Usage) else self.usages.get(name, counts)
        if isinstance(counts, Usage) or not any(step) or min(step) < 0:
            return counts
        self.notes.assume(LABELS["of_several" if self._is_missed else "steps"])
        return counts if self._is_missed else Usage(*step)


def _number(event: Record, at: str) -> int | None:
    """Its place among the events: its id, or that in the name of its file; None where neither says one."""
    name = re.search(r"event-(\d{1,12})-[^/]*$", at)
    return number if isinstance(number := event.get("id"), int) else int(name[1]) if name else None


FORMAT = trace_format(__file__, "openhands", of_lines(openhands_logs), passed=PASSED)
