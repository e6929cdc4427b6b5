"""ATIF, the Agent Trajectory Interchange Format of Harbor (harborframework.com/docs/trajectory-format)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.extras.formats.trajectories import UNSTATED, TrajectoryCalls, Usage, usage_of
from harness.model.traces.account import ReadNotes
from harness.model.traces.base import Lines, trace_format
from harness.model.traces.calls import LIKE_ASKING, UNTIMED, Log
from harness.model.traces.links import UNLINKED, of_lines
from harness.model.traces.values import Record, instant_ns, record_of, records_of, text_of, tokens_of

DEEPEST, MOST_STEPS, VERSION = 16, 1 << 20, "ATIF-"
ASKING = ("user", "system")
HELD_TO = "1.7"
NOT_THERE = "trajectories that go on in a file that is not among these"
PASSED = {"no call": "a step of the agent that asked no model"}


def atif_logs(lines: Lines, notes: ReadNotes) -> Iterator[Log]:
    """The calls of each trajectory, and of the trajectories of sub-agents within it."""
    logs: list[tuple[Path, Log, list[str], Record]] = []
    firsts, begun = dict[Path, Log](), dict[Path, Log]()  # of files: their own trajectory, and the one that names them
    for path, at, document in lines:
        found = list(_logs(document, at, notes, 0))
        firsts[path.resolve()] = first = next((log for log, *_ in found if log), [])
        more = text_of(document, "continued_trajectory_ref")
        begun |= {(path.parent / more).resolve(): first} if first and more else {}
        logs += ((path.parent, *each) for each in found)
    notes.assume(NOT_THERE, sum(path not in firsts for path in begun))
    above = {id(firsts[path]): first for path, first in begun.items() if firsts.get(path)}
    names = {path: log[0].session for path, log in firsts.items() if log}
    sessions = {log[0].session: log for _, log, *_ in logs if log}
    for _, log, started, _ in logs:
        before = above.get(id(log), [])
        for call in before[-1:]:
            call.children |= dict.fromkeys(started, UNTIMED)
            call.tool_spans.append((call.end_ns, max(log[0].submitted_ns, call.end_ns)))
        notes.assume(UNLINKED, len(started) * (not before))
    for folder, log, *_ in logs:
        for call in log:
            of_refs = [[names.get((folder / key).resolve(), key) for key in ref.split("\n")] for ref in call.children]
            found = (next((name for name in keys if name in sessions), keys[0]) for keys in of_refs)
            call.children = dict.fromkeys(found, UNTIMED)
    for _, log, _, totals in logs:
        segments = [log]
        while id(segments[-1]) in above and len(segments) <= len(above):
            segments.append(above[id(segments[-1])])
        _hold(totals, log, [call for each in segments for call in each], sessions, notes)
        if segments[1:]:  # the program itself goes on, with a summary
            log[0].kind, log[0].inputs_ns = "none", (None, None)
        for call in log:
            call.index, call.session = call.index + MOST_STEPS * len(segments), segments[-1][0].session
        yield from [log] if log else []


def _hold(totals: Record, own: Log, joined: Log, sessions: Mapping[str, Log], notes: ReadNotes) -> None:
    """Hold what a trajectory states to its own calls, or with those before, or with sub-agents: programs sum any."""
    readings = [own, joined, [*own], [*joined]]
    for every in readings[2:]:
        seen = {call.session for call in every}
        for call in every:  # it grows
            every += (each for name in call.children.keys() - seen for each in sessions.get(name, []))
            seen |= call.children.keys()
    for total, name in (("prompt", "input"), ("completion", "output"), ("cached", "prefix")):
        sums = [sum(getattr(call, f"{name}_tokens") or 0 for call in calls) for calls in readings]
        stated = tokens_of(totals.get(f"total_{total}_tokens"))
        notes.hold(f"{total} tokens {UNSTATED}", stated, [stated if stated in sums else sums[0]])


def _logs(document: Record, at: str, notes: ReadNotes, depth: int) -> Iterator[tuple[Log, list[str], Record]]:
    """The calls of each trajectory of a document, the sub-agents before the first, and the sums that it states."""
    session = text_of(document, "trajectory_id") or text_of(document, "session_id") or at
    rows = records_of(document, "steps")
    if not text_of(document, "schema_version").startswith(VERSION) or not rows:
        notes.row_broken("no ATIF trajectory", at)
        return
    notes.num_rows += len(rows) - 1
    notes.check_release("ATIF", text_of(document, "schema_version").removeprefix(VERSION), HELD_TO)
    yield *_steps(rows, session, at, notes), record_of(document, "final_metrics")
    for place, child in enumerate(records_of(document, "subagent_trajectories") if depth < DEEPEST else ()):
        notes.num_rows += 1
        yield from _logs(child, f"{at}, sub-agent {place}", notes, depth + 1)


def _steps(given: list[Record], session: str, at: str, notes: ReadNotes) -> tuple[Log, list[str]]:
    """The calls of a trajectory's own steps, and the sub-agents that it names before the first of them."""
    rows = notes.in_order(given, _number, "steps out of order of their id")
    notes.check_numbers([*map(_number, rows)], "steps")
    steps, started = TrajectoryCalls(session, notes), list[str]()
    steps.num_rows = len(rows)
    said = {kind: {text_of(step, "timestamp") for step in rows if text_of(step, "source") == kind} for kind in ASKING}
    for step in rows:
        place, moment_ns = f"{at}, step {_number(step)}", instant_ns(step.get("timestamp"))
        if step.get("is_copied_context") is True:
            notes.leave("steps that are copied from another trajectory", place, 1)
        elif text_of(step, "source") in ASKING:
            # A program writes both at once, as when it made a summary: no person, and no tool.
            is_by_program = bool(steps.calls) and all(text_of(step, "timestamp") in each for each in said.values())
            is_human, is_result = text_of(step, "source") == "user", bool(record_of(step, "observation"))
            steps.ask(moment_ns, is_human=is_human if not is_by_program and (is_human or is_result) else None)
            for call in steps.calls[-1:]:
                call.children |= dict.fromkeys(_children(step), UNTIMED)
            started += [] if steps.calls else _children(step)
        elif text_of(step, "source") != "agent":
            steps.row_unknown(f"source {text_of(step, 'source')}", place)
        elif tokens_of(step.get("llm_call_count")) == 0:
            notes.pass_over(f"no call: {PASSED['no call']}")
        elif not isinstance(counts := usage_of(record_of(step, "metrics")), Usage):
            steps.lose(counts, place)
        else:
            call = steps.answer(counts, place, moment_ns)
            call.answer_characters = len(text_of(step, "message")) + len(text_of(step, "reasoning_content"))
            call.identity = at.partition(", sub-agent")[1:], moment_ns or (session, _number(step)), *counts[:3]
            call.children, call.is_unstated = dict.fromkeys(_children(step), UNTIMED), True
            notes.assume("steps that are several calls, taken as one", (tokens_of(step.get("llm_call_count")) or 1) > 1)
        is_summed = text_of(step, "source") == "system" and bool(_children(step))  # by agents of the program
        steps.is_over = steps.is_over or is_summed or "context_management" in record_of(step, "extra")
        steps.has_tools = steps.has_tools or bool(records_of(step, "tool_calls") or record_of(step, "observation"))
        steps.look(step)
        tools = " ".join(text_of(tool, "function_name") for tool in records_of(step, "tool_calls"))
        steps.is_allowed = steps.is_allowed or LIKE_ASKING.search(tools) is not None
    return steps.log(session), started


def _number(step: Record) -> int:
    return number if isinstance(number := step.get("step_id"), int) else 0


def _children(step: Record) -> list[str]:
    """What names the trajectory of each sub-agent that a step started: lines of ids and a path."""
    results = records_of(step, "observation", "results")
    references = (each for result in results for each in records_of(result, "subagent_trajectory_ref"))
    keys = ("trajectory_id", "trajectory_path", "session_id")
    names = ("\n".join(filter(None, (text_of(each, key) for key in keys))) for each in references)
    return [name for name in names if name]


FORMAT = trace_format(__file__, "atif", of_lines(atif_logs), passed=PASSED, held_to=f"ATIF {HELD_TO}")
