"""SWE-agent's ``.traj`` files, and those of mini-swe-agent. Of texts only lengths are read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from harness.clock import NS_PER_S
from harness.extras.formats.trajectories import STOPPED, UNSTATED, TrajectoryCalls, Usage, usage_of
from harness.model.traces.account import CHARACTERS_PER_TOKEN, FILE, ReadNotes
from harness.model.traces.base import trace_format
from harness.model.traces.calls import Log
from harness.model.traces.links import of_documents
from harness.model.traces.values import Record, instant_ns, record_of, records_of, seconds_ns, text_of, tokens_of

SAID = ("content", "tool_calls")
INPUTS = ("system", "user", "tool", "developer")
PASSED = {"exit": "why the run ended", "autosubmission": "what the program submits at a limit, without the model"}
INTERRUPTION = "UserInterruption"
BY_PERSON = (INTERRUPTION, "UserNewTask", "UserRejection")
# Sums of a run, and what they count.
STATED = {"api_calls": "calls", "tokens_sent": "prompt tokens", "tokens_received": "output tokens"}


def swe_agent_logs(document: Record, at: str, notes: ReadNotes) -> Iterator[Log]:
    """The calls of a trajectory, or of each attempt of a run that tries several times; the run's sums count all."""
    attempts = {f"{at}, attempt {num}": one for num, one in enumerate(records_of(document, "attempts"))}
    found = [_trajectory(one, place, notes) for place, one in (attempts or {at: document}).items()]
    notes.num_rows += max(len(attempts) - 1, 0)
    calls = [call for steps, _ in found for call in steps.calls]
    # A reviewer's calls, and those whose answer could not be used, are in no row.
    counted = {"api_calls": sum(num for _, num in found)}
    counted |= {"tokens_sent": sum(call.input_tokens for call in calls)}
    counted |= {"tokens_received": sum(call.output_tokens for call in calls)}
    for name, what in STATED.items():
        given = (record_of(one, "info", "model_stats").get(name) for one in (document, *attempts.values()))
        of_run, *of_attempts = map(tokens_of, given)
        stated = sum(filter(None, of_attempts)) if of_run is None else of_run
        notes.hold(f"{what} {UNSTATED}", stated or None, [counted[name]])
    yield from (steps.log(place) for (steps, _), place in zip(found, attempts or [at], strict=True))


def _trajectory(document: Record, at: str, notes: ReadNotes) -> tuple[TrajectoryCalls, int]:
    """The calls of one trajectory that have lengths, and how many it has."""
    if messages := records_of(document, "messages"):
        notes.num_rows += len(messages) - 1
        return _of_messages(document, messages, at, notes), sum(map(_has_answer, messages))
    steps = _of_steps(document, at, notes)
    if not steps.calls:
        notes.row_broken("no trajectory with the messages or the usage of its calls", at)
    return steps, len(steps.calls)


def _of_steps(document: Record, at: str, notes: ReadNotes) -> TrajectoryCalls:
    """SWE-agent's calls: the wait before one is the execution time of the step before it."""
    found = TrajectoryCalls(at, notes)
    given = records_of(document, "trajectory")
    steps = [step for step in given if step.get("query") != [{}]]
    # Where the model has called a tool without a text, only what was made of the call is there.
    answers = (_length([step], "response", "tool_calls") or _length([step], "thought", "action") for step in steps)
    queries = (_length(records_of(step, "query") or records_of(step, "messages"), *SAID) for step in steps)
    lengths = [*zip(queries, answers, strict=True)]
    if not steps or not all(sent for sent, _ in lengths):
        return found
    notes.num_rows += len(given) - 1
    for _ in given[len(steps) :]:
        notes.passes("autosubmission", PASSED)
    stats = record_of(document, "info", "model_stats")
    sent, received = tokens_of(stats.get("tokens_sent")), tokens_of(stats.get("tokens_received"))
    totals = [sum(each) for each in zip(*lengths, strict=True)]
    is_counted = all((sent, received, *totals)) and stats.get("api_calls", len(steps)) == len(steps)
    how = "by characters, so that they sum to the tokens that the run, or each attempt, counted"
    notes.assume(f"lengths {how if is_counted else 'estimated from characters, 4 to a token'}", len(steps))
    pairs = zip(totals, (sent, received), strict=True)
    per_token = [total / tokens if is_counted and tokens else CHARACTERS_PER_TOKEN for total, tokens in pairs]
    of_run = at.partition(", attempt")[1:], sent, received, repr(document.get("environment"))
    rest = [0.0, 0.0]  # what rounding left of the steps before, so that the sums are those that were counted
    for place, (asked, answered) in enumerate(lengths):
        wait_ns = seconds_ns(steps[place - 1].get("execution_time")) if place else None
        found.has_tools = wait_ns is not None
        exact = [length / per + more for length, per, more in zip((asked, answered), per_token, rest, strict=True)]
        prompt, generate = (max(round(each), 1) for each in exact)
        rest = [exact[0] - prompt, exact[1] - generate]
        call = found.answer(Usage(prompt, generate), f"{at}, step {place}", None)
        call.wait_ns, call.identity = wait_ns, (*of_run, place, asked, answered)
        call.is_estimated = True
    return found


def _length(messages: Iterable[Record], *names: str) -> int:
    """Characters of messages: of these values, texts as they are and others as JSON; without files in base64."""
    values = (message.get(name) for message in messages for name in names)
    return sum(len(FILE.sub("", value if isinstance(value, str) else json.dumps(value))) for value in values if value)


def _role(message: Record) -> str:
    """Who wrote a message, also in the form of OpenAI's Responses API."""
    by_form = {"response": "assistant", "function_call_output": "tool"}
    return text_of(message, "role") or by_form.get(text_of(message, "object") or text_of(message, "type"), "")


def _has_answer(message: Record) -> bool:
    """Whether a message is an answer, or tells of one that the program could not read."""
    return _role(message) == "assistant" or bool(record_of(message, "extra", "response"))


def _of_messages(document: Record, messages: list[Record], at: str, notes: ReadNotes) -> TrajectoryCalls:
    """mini-swe-agent's calls: an answer is complete at its message's time, and asked for at that of the one before."""
    steps = TrajectoryCalls(at, notes)
    steps.num_rows = len(messages)
    latest_ns, is_typed, stamped = 0, False, list[tuple[int, int | None, Record]]()
    for message in messages:  # a message without a time stays behind the one before it
        stamp = record_of(message, "extra").get("timestamp", message.get("timestamp"))
        moment_ns = instant_ns(stamp) if isinstance(stamp, str) else notes.date_ns(seconds_ns(stamp), NS_PER_S)
        latest_ns = latest_ns if moment_ns is None else moment_ns
        stamped.append((latest_ns, moment_ns, message))
    in_order = notes.in_order(stamped, lambda each: each[0], "messages out of order of time")
    for place, (last_ns, moment_ns, message) in enumerate(in_order):
        extra, role = record_of(message, "extra"), _role(message)
        if notes.passes(role, PASSED):
            steps.skip(steps.lost)  # the run asks for no answer any more
            continue
        if role not in ("assistant", *INPUTS):
            steps.row_unknown(f"role {role}", f"{at}, message {place}")
        elif _has_answer(message):
            is_error = role != "assistant"  # the program keeps its error, often without a time, and asks again
            _answer(steps, message, f"{at}, message {place}", moment_ns or (last_ns or None if is_error else None))
            if is_error and moment_ns:
                steps.take_input(moment_ns, is_human=False)
            steps.lost = steps.lost or ("an answer before theirs has no time" if is_error and not moment_ns else "")
        else:
            # What a person adds has no time of its own: it was typed before the observation beside it was written, but
            # for an interruption, after it. What came of a command that a person runs is taken as the person's.
            is_by_person = place < 2 or is_typed or text_of(extra, "interrupt_type") in BY_PERSON
            is_error = not is_by_person and bool(text_of(extra, "interrupt_type"))  # of the program, which asks again
            steps.ask(moment_ns, is_human=None if is_error else role == "user" and is_by_person)
            steps.lost = steps.lost or STOPPED * (not moment_ns and text_of(extra, "interrupt_type") == INTERRUPTION)
            is_typed = role == "user" and "actions" in extra
            steps.is_allowed = text_of(document, "info", "config", "agent", "mode") in ("confirm", "human")
        steps.look(message)
    return steps


def _answer(steps: TrajectoryCalls, message: Record, at: str, moment_ns: int | None) -> None:
    """The call of a message that holds a response."""
    response = record_of(message, "extra", "response") or message
    counts, answer = usage_of(record_of(response, "usage")), text_of(response, "id")
    if not isinstance(counts, Usage):
        steps.lose(counts, at)
        return
    call = steps.answer(counts, at, moment_ns)
    call.identity = ("mini-swe-agent", answer, moment_ns, counts) if answer or moment_ns else None
    call.answer_characters = _length([message], *SAID)


FORMAT = trace_format(__file__, "swe-agent", of_documents(swe_agent_logs), passed=PASSED)
