"""OpenHands: event streams (a list of events, an evaluation's ``history``) and conversations of its SDK."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.extras.formats.trajectories import UNSTATED, TrajectoryCalls, Usage, usage_of
from harness.model.traces.account import ReadNotes
from harness.model.traces.base import Lines, by_type, read_tables, trace_format
from harness.model.traces.calls import END_A_RUN, LATE_NS, LIKE_ASKING, START_AN_AGENT, Call, Log
from harness.model.traces.links import of_lines
from harness.model.traces.values import Record, instant_ns, list_of, record_of, records_of, seconds_ns, text_of

TABLES = read_tables(Path(__file__).with_suffix(".toml"))
PASSED, (OBSERVATIONS, REJECTIONS, ENDS_A_CALL, OF_SEVERAL) = by_type(TABLES["passed"]), TABLES["names"].values()


@dataclass
class _Conversation:
    """Events of one conversation, and of its answers by their id the usage, and how long they took."""

    events: list[tuple[str, Record]] = field(default_factory=list[tuple[str, Record]])
    usages: dict[str, Usage] = field(default_factory=dict[str, Usage])
    took_ns: dict[str, int | None] = field(default_factory=dict[str, "int | None"])
    stated: int | None = None
    policy: str = ""  # of confirming: by it a person is asked whether a tool may run

    def take(self, metrics: object) -> None:
        """Read what one model's metrics say of answers by their id."""
        for usage in records_of(metrics, "token_usages"):
            counts, name = usage_of(usage), text_of(usage, "response_id")
            if isinstance(counts, Usage) and name:
                self.usages[name] = counts
        for each in records_of(metrics, "response_latencies"):
            self.took_ns[text_of(each, "response_id")] = seconds_ns(each.get("latency"))


def openhands_logs(lines: Lines, notes: ReadNotes) -> Iterator[Log]:
    """The calls of each conversation: of a folder's events, of a file's list, or of a line's history."""
    conversations: defaultdict[str, _Conversation] = defaultdict(_Conversation)
    for path, at, record in lines:
        folder = path.parent.parent if path.parent.name == "events" else path.parent
        # A history is a list of events, or of pairs of them.
        pairs = (entry if isinstance(entry, list) else [entry] for entry in list_of(record, "history"))
        if "stats" in record:
            notes.part()
            conversations[str(folder)].policy = text_of(record, "confirmation_policy", "kind")
            for metrics in record_of(record, "stats", "usage_to_metrics").values():
                conversations[str(folder)].take(metrics)
        elif of_line := [event for pair in pairs for event in records_of(pair)]:
            notes.num_rows += len(of_line) - 1
            conversations[at].policy = "nobody"
            conversations[at].take(record.get("metrics"))
            conversations[at].events += [(f"{at}, event {place}", event) for place, event in enumerate(of_line)]
        elif "timestamp" in record:
            name, place = (str(folder), f"{folder}, {path.name}") if "kind" in record else (str(path), at)
            conversations[name].events.append((place, record))
        elif record.get("history", 0) in (None, []):
            notes.passes("instance without events", PASSED)
        else:
            notes.row_broken("no event", at)
    for name, conversation in conversations.items():
        # A conversation's state counts its sub-agents' answers too.
        below = [each for other, each in conversations.items() if Path(name) in Path(other).parents]
        of_others = {answer for each in below for answer in each.usages}
        own = (usage.prompt for answer, usage in conversation.usages.items() if answer not in of_others)
        conversation.stated = sum(own) or None
        if log := _steps(conversation, notes).log(name):
            above = Path(name).parent
            log[0].parent = str(above.parent) if above.name == "subagents" else ""
            yield log


def _steps(conversation: _Conversation, notes: ReadNotes) -> TrajectoryCalls:
    """A call for each answer of the model that any event names."""
    steps = TrajectoryCalls(len(conversation.events), notes)
    # is_missed: since the totals were told an answer came whose counts are not known
    answers, totals, stated, is_missed = dict[str, Call](), [0] * 4, 0, False
    calls_at: dict[str, Call | None] = {}  # the last call before an event, on its branch
    for moment_ns, at, event in _in_order(conversation.events, steps):
        answer = text_of(event, "tool_call_metadata", "model_response", "id") or text_of(event, "llm_response_id")
        sums = usage_of(record_of(event, "llm_metrics", "accumulated_token_usage"))  # of all calls so far
        told = [count or 0 for count in sums[:4]] if isinstance(sums, Usage) else None
        step = [now - before for now, before in zip(told or totals, totals, strict=True)]
        totals, stated = told or totals, told[0] if told else stated
        is_of_several, is_missed = is_missed, is_missed and not told
        answer = answer or (at if any(step) and text_of(event, "source") == "agent" else "")
        is_answer = bool(answer) and "observation" not in event and text_of(event, "kind") not in OBSERVATIONS
        kind = text_of(event, "kind") or text_of(event, "action") or text_of(event, "observation")
        above = calls_at.get(text_of(event, "parent_id"), steps.calls[-1] if steps.calls else None)
        counts = usage_of(record_of(event, "tool_call_metadata", "model_response", "usage"))
        counts = counts if isinstance(counts, Usage) else conversation.usages.get(answer, counts)
        if not isinstance(counts, Usage) and is_answer and any(step) and min(step) >= 0:
            notes.assume(OF_SEVERAL if is_of_several else "calls whose usage is the step of the running totals")
            counts = counts if is_of_several else Usage(*step)
        if not is_answer and _is_input(event, kind):
            is_human = text_of(event, "source") == "user" and (conversation.policy != "nobody" or None)
            is_refused = kind in REJECTIONS and text_of(event, "rejection_source") != "hook"
            is_end = text_of(event, "tool_name") in END_A_RUN or kind == "HookExecutionEvent"
            steps.ask(moment_ns, is_human=is_refused or is_human, is_hint=is_end)
        elif answer in answers:
            notes.part()  # one answer may be several actions
        elif is_answer and isinstance(counts, Usage):
            answers[answer] = call = steps.answer(counts, at, moment_ns, conversation.took_ns.get(answer))
            totals = told or [now + (more or 0) for now, more in zip(totals, counts, strict=False)]
            call.identity, call.agent = ("openhands", answer, moment_ns), "condenser" * (kind == "Condensation")
            call.is_unstated = "kind" in event and not conversation.policy
            call.rewound_to, above = above if above not in steps.calls[-2:] else None, call
        elif is_answer or (text_of(event, "source") == "agent" and kind == "message"):
            steps.lose(counts, at)
            is_missed = is_missed or not told
        elif not notes.passes(kind, PASSED):
            steps.unread.unknown(f"event {kind}", at)
            is_missed = is_missed or (not told and text_of(event, "source") == "agent")
        elif kind in (*ENDS_A_CALL, "PauseEvent") or text_of(event, "args", "agent_state") == "paused":
            steps.stop(at, ends_a_call=kind in ENDS_A_CALL)
        else:
            steps.is_over = steps.is_over or kind in ("Condensation", "condensation")
        calls_at[text_of(event, "id")] = above
        steps.look(event)
        steps.look({text_of(event, "key"): event.get("value")}, "state")
        if is_answer and answer in answers:
            tool = text_of(event, "tool_name")
            answers[answer].num_agents += (tool in START_AN_AGENT) + len(record_of(event, "action", "tasks"))
            steps.is_allowed |= bool(LIKE_ASKING.search(tool)) or conversation.policy not in TABLES["policies"]
    notes.hold(f"prompt tokens {UNSTATED}", stated or conversation.stated, (call.input_tokens for call in steps.calls))
    return steps


def _in_order(events: list[tuple[str, Record]], steps: TrajectoryCalls) -> Iterator[tuple[int, str, Record]]:
    """Events with their instants, by their numbers where all have one, else by time."""
    notes = steps.notes
    rows = [(instant_ns(event.get("timestamp")), at, event) for at, event in events]
    for at in (at for moment_ns, at, _ in rows if moment_ns is None):
        steps.unread.broken("an event without its time", at)
    stamped = [(moment_ns, at, event) for moment_ns, at, event in rows if moment_ns is not None]
    numbers = {at: number for at, event in events if (number := _number(event, at)) is not None}
    notes.check_numbers(numbers.values(), "events")
    if len(numbers) == len(rows):
        stamped = notes.in_order(stamped, lambda row: numbers[row[1]], "events out of order of their number")
    else:
        stamped = notes.in_order(stamped, lambda row: row[0], "events out of order of time", LATE_NS)
    for moment_ns, at, event in stamped:  # the machine's clock may be set back, as between two starts
        yield steps.moved_ns(moment_ns), at, event


def _number(event: Record, at: str) -> int | None:
    """Its place among the events: its id, or that in the name of its file; None where neither says one."""
    name = re.search(r"event-(\d{1,12})-[^/]*$", at)
    return number if isinstance(number := event.get("id"), int) else int(name[1]) if name else None


def _is_input(event: Record, kind: str) -> bool:
    """Whether the model is asked again after an event: a person's message, or what came of an action."""
    is_said = kind in ("MessageEvent", "message") or text_of(event, "args", "agent_state") == "running"
    is_told = "observation" in event and kind not in ("agent_state_changed", "recall", "null")
    return kind in OBSERVATIONS or is_told or (is_said and text_of(event, "source") == "user")


FORMAT = trace_format(__file__, "openhands", of_lines(openhands_logs), passed=PASSED)
