"""Spans as calls, tools and agents: which spans are calls of a model, and how many tokens each has."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from harness.extras.formats.otlp import DETAILS, TABLES
from harness.model.traces.account import FILE, SHARE_OF_UNKNOWN, TYPE_NAME, ReadNotes, tokens_in
from harness.model.traces.base import by_type
from harness.model.traces.calls import ASK_A_PERSON, DECIDED, LIKE_ASKING, Call, Message
from harness.model.traces.values import Record, instant_ns, list_of, parsed_json, record_of, text_of, tokens_of

HELD_TO = "1.37.0"
PASSED, NAMES = by_type(TABLES["passed"]), TABLES["counts"]
CHATS, TOOLS, AGENTS, PERSONS, OPERATIONS, MODELS, PROVIDERS, CONVERSATIONS, *NAMED = TABLES["names"].values()
AGENT_NAMES, TOOL_NAMES, FINISH_REASONS = NAMED
COUNTS, LABELS = frozenset(by_type(NAMES)), TABLES["labels"]
ERRORS = {"2", "ERROR", "STATUS_CODE_ERROR", "STATUSCODE.ERROR"}  # a status, in any form
PATTERNS = {name: re.compile(pattern) for name, pattern in TABLES["patterns"].items()}
# Two services tokenise one prompt with a few tokens' difference.
SLACK_TOKENS, SLACK_SHARE = 16, 0.02


@dataclass(eq=False)
class Span:
    """One span or record. role: "call", "tool", "agent", "person" (who asked), or "" for any other.

    is_named: its operation is one of a call; is_unread: it is a call that cannot be read, or may be one; is_bare: it is
    a call without counts, and one within it may have them; is_failed: it is a call that failed; is_final: its answer
    ends a run by the reason that it gives; is_allowed: a person was asked whether the tool may run; rank: 0 of a span,
    1 of a log's record, 2 of one that may stand beside such a record.
    """

    trace: str
    span: str
    parent: str
    at: str
    role: str
    conversation: str
    start_ns: int
    end_ns: int
    has_times: bool
    is_named: bool
    call: Call | None = None
    is_unread: bool = False
    is_bare: bool = False
    is_failed: bool = False
    is_final: bool = False
    is_allowed: bool = False
    session: str = ""
    agent: str = ""
    service: str = ""
    clock: str = ""
    rank: int = 0
    num_within: int = 0

    @property
    def value(self) -> tuple[object, ...]:
        """What two copies of a span have in common."""
        counts = (self.call.input_tokens, self.call.output_tokens) if self.call else ()
        return (self.conversation or self.trace, self.span, self.start_ns, self.end_ns, *counts)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Of the messages of its prompt."""
        return tuple(digest for digest, _ in self.call.messages) if self.call else ()

    def wraps(self, other: Span) -> bool:
        """Whether the other span is the same call, in this one's time."""
        return self.start_ns <= other.start_ns and other.end_ns <= self.end_ns and self.value[4:] == other.value[4:]

    def sums(self, others: Sequence[Span]) -> bool:
        """Whether its counts are those of the other spans together, but for a few tokens."""
        calls = [other.call for other in others if other.call]
        if self.call is None or not _is_near(self.call.output_tokens, sum(call.output_tokens for call in calls)):
            return False
        return any(_is_near(one, other) for one, other in product(_prompts([self.call]), _prompts(calls)))

    def is_beside(self, other: Span) -> bool:
        """Whether both are of one conversation, as far as they say; records of logs may have no trace."""
        return not self.conversation or not other.conversation or self.conversation == other.conversation


def _prompts(calls: Sequence[Call]) -> tuple[int, int]:
    """Prompt tokens of all calls, as input that holds what the cache held, and as input beside it."""
    tokens = sum(call.input_tokens for call in calls)
    return tokens, tokens + sum((call.prefix_tokens or 0) + (call.created_tokens or 0) for call in calls)


def _is_near(tokens: int, others: int) -> bool:
    return abs(tokens - others) <= max(SLACK_TOKENS, SLACK_SHARE * others)


def doubt(calls: Sequence[Span], spans: Sequence[Span]) -> str:
    """Why no wait between calls of a trace is known, that has these spans; "" where all are."""
    unread = [(span.start_ns, span.end_ns if span.has_times else 1 << 63) for span in spans if span.is_unread]
    last_ns, first_ns = max(span.start_ns for span in calls), min(span.end_ns for span in calls)
    is_between = any(start < last_ns and end > first_ns for start, end in unread)
    return LABELS["unread"] if is_between or len(unread) > SHARE_OF_UNKNOWN * len(spans) else ""


def read_span(record: Record, at: str, notes: ReadNotes) -> Span:
    """The span of a record, with its call where it is one; what cannot be read is counted."""
    attributes = _attributes(record)
    notes.check_release("the semantic conventions", text_of(record, "schema").rpartition("/")[2], HELD_TO)
    # Phoenix moves OpenInference's kind there; that of OpenTelemetry says nothing of an operation.
    kind, has_model = text_of(record, "span_kind").lower(), any(map(attributes.get, MODELS))
    operation = _named(attributes, OPERATIONS).lower().strip('"') or (kind if kind in (*CHATS, *PASSED) else "")
    has_counts = any(name in attributes for name in COUNTS)
    operation = operation or "execute_tool" * bool(not (has_model or has_counts) and _named(attributes, TOOL_NAMES))
    status = {str(each).upper() for each in (record.get("status"), *record_of(record, "status").values())}
    has_failed = bool(status & ERRORS or text_of(attributes, "error.type"))
    tells = has_counts and has_model if operation else has_counts or has_model
    is_call = operation in CHATS or (operation not in PASSED and tells)
    decision = text_of(attributes, "decision")
    is_tool, is_asked = operation in TOOLS, _named(attributes, TOOL_NAMES) in ASK_A_PERSON or decision == "reject"
    is_person = operation in PERSONS or (is_tool and is_asked)
    role = "call" if is_call else "person" if is_person else "tool" if is_tool else "agent" * (operation in AGENTS)
    given = ((record.get(f"{name}_ns"), record.get(f"{name}_time")) for name in ("start", "end"))
    start_ns, end_ns = (ns if isinstance(ns, int) else instant_ns(text) for ns, text in given)
    has_times = start_ns is not None and end_ns is not None and 0 <= start_ns <= end_ns
    trace, name, parent = (_id(text_of(record, key)) for key in ("trace_id", "span_id", "parent_span_id"))
    times = (start_ns or 0, end_ns or 0, has_times)
    span = Span(trace, name, parent, at, role, _named(attributes, CONVERSATIONS), *times, operation in CHATS)
    words = "" if is_asked else f"{text_of(record, 'name')} {operation} {_named(attributes, TOOL_NAMES)}"
    span.is_allowed = decision in DECIDED or LIKE_ASKING.search(words) is not None
    span.rank = 0 if name else 1 + (record.get("event") == DETAILS)
    span.agent, span.service = _named(attributes, AGENT_NAMES), text_of(record, "resource_attributes", "service.name")
    notes.assume(LABELS["linked"], not span.parent and bool(list_of(record, "links")))
    if not isinstance(record.get("attributes"), dict) and not span.span:
        notes.row_broken("no span", at)
    elif operation == "api_request" and "output_tokens" in attributes:
        notes.drop_call(LABELS["of_claude"], at)
    elif "codex.usage.total_tokens" in attributes:  # its span is of the last event of an answer
        notes.drop_call(LABELS["of_codex"], at)
    elif not is_call:
        if not notes.passes(operation or "no operation", PASSED):
            notes.row_unknown(f"operation {operation}", at)
            span.is_unread = has_model
    elif not has_times:
        notes.row_broken("a chat span without its times", at)
        span.is_unread = True
    elif has_failed and not any(tokens_of(attributes.get(name)) for name in COUNTS):
        span.is_failed = True
        notes.drop_call(LABELS["failed"], at)
    elif isinstance(call := _call(record, span, notes), str):
        span.is_bare, span.is_unread = call == LABELS["no_counts"], call != LABELS["no_counts"]
        if span.is_unread:
            notes.row_broken(call, at)
    else:
        notes.num_calls += 1
        notes.assume(LABELS["failed_with_counts"], has_failed)
        span.call = call
    return span


def _id(given: str) -> str:
    """An id in hex, also where a store writes its bytes in base64, as Tempo does."""
    return base64.b64decode(given.translate({45: "+", 95: "/"})).hex() if PATTERNS["bytes"].fullmatch(given) else given


def _attributes(record: Record) -> Record:
    """A span's attributes, with the counts that a text of an object holds; Claude Code's by the conventions' names."""
    attributes = record_of(record, "attributes")
    texts = ((name, text) for name, text in attributes.items() if "usage" in name.lower() and isinstance(text, str))
    told = {f"{name}.{key}": int(num) for name, text in texts for key, num in PATTERNS["counted"].findall(text)}
    bare = TABLES["bare"] if attributes.get("span.type") == "llm_request" else {}
    return {bare.get(name, name): value for name, value in (attributes | told).items()}


def _call(record: Record, span: Span, notes: ReadNotes) -> Call | str:
    """The call of a span with times; else what is wrong with its counts."""
    attributes = _attributes(record)
    messages = _messages(attributes)
    counts = {what: _count(attributes, names) for what, names in NAMES.items()}
    if -1 in counts.values():
        return "a chat span with a count that is no number of tokens"
    prompt, generate = counts["prompt"], counts["generate"]
    characters = _characters_of(attributes)
    if not (prompt or counts["cached"]) or generate is None:
        if not (prompt or messages) or (generate is None and not characters):
            return LABELS["no_counts"]
        notes.assume(LABELS["estimated"])
        generate = generate or tokens_in(characters)
        prompt = prompt or sum(tokens for _, tokens in messages)
    for name in filter(PATTERNS["like_count"].search, attributes.keys() - COUNTS):
        if tokens_of(attributes[name]) is not None and TYPE_NAME.fullmatch(name):
            notes.assume(f"counts by a name that is not known, {name}: not read")
    call = Call("", span.start_ns, span.end_ns, prompt or 0, counts["cached"], generate, at=span.at)
    call.messages, call.agent, call.answer_characters = messages, span.service, characters
    call.created_tokens, call.reasoning_tokens = counts["created"] or 0, counts["reasoning"] or 0
    call.total_tokens, call.has_end_alone = counts["total"] or None, span.start_ns == span.end_ns
    call.provider = _named(attributes, PROVIDERS) or span.service
    call.is_unsaid = call.is_concurrent = True
    call.is_estimated = not counts["generate"]
    span.is_final = any(PATTERNS["final"].fullmatch(str(attributes.get(name))) for name in FINISH_REASONS)
    reasons = " ".join(str(attributes.get(name, "")).lower() for name in FINISH_REASONS)
    notes.look({"finish": re.findall(r"[\w-]+", reasons)}, "span")
    notes.assume(LABELS["unnamed"], not span.is_named and bool(_named(attributes, OPERATIONS)))
    notes.assume(LABELS["several"], (tokens_of(attributes.get("gen_ai.request.choice.count")) or 1) > 1)
    return call


def _named(attributes: Record, names: Iterable[str]) -> str:
    """The first text or whole number by these names, as a text; "" where there is none."""
    values = map(attributes.get, names)
    return next((str(value) for value in values if isinstance(value, (str, int)) and value != ""), "")


def _count(attributes: Record, names: Iterable[str]) -> int | None:
    """The first of these counts; None where there is none, -1 where its value is no number of tokens."""
    value = next((attributes[name] for name in names if attributes.get(name) is not None), None)
    return None if value is None else -1 if (count := tokens_of(value)) is None else count


def _characters_of(attributes: Record) -> int:
    """Length of an answer's texts and of the arguments of its calls, without the form around them; 0 where none are."""
    if answer := text_of(attributes, "gen_ai.output.text"):
        return len(answer)
    messages = attributes.get("gen_ai.output.messages")
    parsed = parsed_json(messages.encode("utf-8", "replace")) if isinstance(messages, str) else messages
    parts = [part for message in list_of(parsed) for part in (message, *list_of(message, "parts"))]
    values = (record_of(part).get(key) for part in parts for key in ("content", "text", "arguments"))
    return sum(len(value if isinstance(value, str) else json.dumps(value)) for value in values if value)


def _messages(attributes: Record) -> list[Message]:
    """What is compared between prompts: a digest of each message, and how long it is without files in base64."""
    value = attributes.get("gen_ai.input.messages")
    parts = list_of(parsed_json(value.encode("utf-8", "replace")) if isinstance(value, str) else value)
    if not parts:
        numbered: dict[int, list[object]] = {}
        for name in sorted(attributes):
            if found := PATTERNS["message_of"].match(name):
                numbered.setdefault(int(found[1]), []).append((name[found.end() :], attributes[name]))
        parts = [numbered[place] for place in sorted(numbered)]
    return [(hashlib.sha256(one.encode()).digest()[:16], tokens_in(len(FILE.sub("", one)))) for one in map(repr, parts)]
