"""A model server whose answers are written beforehand, for real agents on loopback, and the account of what it saw.

It speaks ``/v1/responses``, ``/v1/chat/completions`` and Gemini's API. A conversation is known by the ``script:NAME``
that ends what its user wrote; a tool's length, a failed attempt and a count of tokens stand in the script. No model
runs.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from harness.clock import NS_PER_S, MonotonicClock
from tests.support.raw_server import CHUNKED_HEAD, CLOSE, KEEP, Asked, RawServer, Reply, chunked, whole

CLOCK = MonotonicClock()
CHARACTERS_PER_TOKEN = 4
MARK, LAST_MARK = re.compile(r"script:([a-z-]+)"), re.compile(r"script:([a-z-]+)\s*$")
AGENT = re.compile(r"""agent_id\\*":\s*\\*"([\w-]+)""")
Kind = Literal["none", "human", "tool"]
Failure = Literal["refused", "cut"]
Event = dict[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """A call of one of the agent's tools. "$agent" in its arguments is the id of the sub-agent that was started last.

    namespace: of its name, where the agent's tools have one.
    """

    name: str
    arguments: dict[str, Any]
    namespace: str = ""


@dataclass(frozen=True)
class Answer:
    """One answer. after: what its request waited for. failures: how the attempts before it end. takes_s: from the
    request to the answer's end. hidden_tokens: of reasoning. is_fresh: its prompt was made anew, as after a compaction.
    joins: the scripts of sub-agents that the request waited for. is_late: its agent computes between what it logs
    and the request, so that the log has a shorter wait.
    """

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    after: Kind = "tool"
    failures: tuple[Failure, ...] = ()
    takes_s: float = 0.3
    hidden_tokens: int = 0
    is_fresh: bool = False
    joins: str = ""
    is_late: bool = False


@dataclass(frozen=True)
class Script:
    """A conversation's answers, in order. continues: the script that it is a fork of. started_by: the script whose
    tool started it."""

    answers: tuple[Answer, ...]
    continues: str = ""
    started_by: str = ""


def opening(shell: Callable[[str], ToolCall], second_s: float, says: str = "It will break.") -> tuple[Answer, ...]:
    """How most conversations begin: one tool, two at once, and one that fails. second_s: how long the later of two."""
    return (
        Answer("I look around first.", (shell("sleep 1.5; echo seen"),), "none", hidden_tokens=24),
        Answer("Two things at once.", (shell("sleep 1.0; echo one"), shell(f"sleep {second_s}; echo two"))),
        Answer(says, (shell("sleep 0.6; echo broken; exit 3"),), hidden_tokens=12),
    )


def compacting(shell: Callable[[str], ToolCall], says: str = "") -> Script:
    """It compacts by itself, between a tool's result and the next answer. says: what it answers then."""
    return Script(
        (
            Answer("I look. " + "y " * 6000, (shell("sleep 1.5; echo seen"),), "none"),
            Answer("Summary: it was looked at. script:small", takes_s=0.8),
            Answer(says, (shell("sleep 0.9; echo again"),), "none", is_fresh=True),
            Answer("All is done."),
        )
    )


FIRST = Script((Answer("A word.", after="none"),))
"""What a process does slowly once."""


@dataclass(frozen=True)
class Attempt:
    """A request as the server saw it. Instants in ns of its clock; lengths in tokens, 0 where it failed."""

    script: str
    place: int
    after: Kind
    received_ns: int
    ended_ns: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    failed: Failure | Literal[""] = ""


@dataclass
class _State:
    """How far a conversation is. prompt: its last one that was answered."""

    place: int = 0
    failed: int = 0
    prompt: str = ""


@dataclass
class ScriptedServer:
    """The scripts, and every attempt so far. unknown: requests of no script, or beyond a script's end."""

    scripts: dict[str, Script]
    port: int = 0
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    unknown: list[str] = field(default_factory=list[str])
    tools: list[str] = field(default_factory=list[str])
    _states: dict[str, _State] = field(default_factory=dict[str, _State])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def next_answer(self, body: dict[str, Any]) -> tuple[str, int, Answer, Failure | Literal[""], list[int]] | None:
        """(script, place, answer, how this attempt fails, [prompt, cached, output] tokens); None: of no script."""
        name, prompt = marked(body), rendered(body)
        with self._lock:
            state = self._states.setdefault(name, _State())
            script = self.scripts.get(name)
            if script is None or state.place >= len(script.answers):
                self.unknown.append(f"{name or 'no script'}, request {state.place + 1}: {prompt[-300:]}")
                return None
            answer = for_agent(script.answers[state.place], prompt)
            if state.failed < len(answer.failures):
                state.failed += 1
                return name, state.place, answer, answer.failures[state.failed - 1], [0, 0, 0]
            before = state.prompt
            if not state.place and script.continues:
                before = self._states[script.continues].prompt
            cached = 0 if answer.is_fresh else common_characters(before, prompt)
            state.prompt, state.failed, state.place = prompt, 0, state.place + 1
            tokens = [tokens_in(len(prompt)), cached // CHARACTERS_PER_TOKEN, output_tokens(answer)]
            return name, state.place - 1, answer, "", tokens


def rendered(body: dict[str, Any]) -> str:
    """The prompt as one text: equal beginnings are equal tokens."""
    parts = [body.get("instructions"), body.get("tools"), *(body.get("input") or body.get("messages") or [])]
    return "\n".join(json.dumps(part) for part in parts)


def marked(body: dict[str, Any]) -> str:
    """The script that ends what a user wrote last; where none does, as after a compaction, the first anywhere."""
    said = [(item, text) for item in body.get("input") or body["messages"] for text in _texts(item)]
    texts = [text for item, text in said if item.get("role") == "user"]
    last = [found[1] for text in texts if (found := LAST_MARK.search(text))]
    anywhere = MARK.search("\n".join([*texts, *(text for _, text in said)]))
    return last[-1] if last else anywhere[1] if anywhere else ""


def _texts(item: dict[str, Any]) -> list[str]:
    content = item.get("content") or ""
    return [content] if isinstance(content, str) else [part.get("text", "") for part in content]


def for_agent(answer: Answer, prompt: str) -> Answer:
    """The answer with the id of the sub-agent that its prompt names last."""
    ids = AGENT.findall(prompt)
    if not ids:
        return answer
    named = [json.loads(json.dumps(call.arguments).replace("$agent", ids[-1])) for call in answer.calls]
    calls = [replace(call, arguments=arguments) for call, arguments in zip(answer.calls, named, strict=True)]
    return replace(answer, calls=tuple(calls))


def common_characters(one: str, other: str) -> int:
    """How many characters two texts begin with together."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)


def tokens_in(characters: int) -> int:
    """Tokens of so many characters, at least 1."""
    return max(characters // CHARACTERS_PER_TOKEN, 1)


def output_tokens(answer: Answer) -> int:
    """Tokens of an answer, those of its reasoning included."""
    calls = [json.dumps([call.name, call.arguments]) for call in answer.calls]
    return tokens_in(len(answer.text) + sum(map(len, calls))) + answer.hidden_tokens


def responses_events(name: str, answer: Answer, tokens: Sequence[int]) -> Iterator[Event]:
    """The events of ``/v1/responses``."""
    response = {"id": f"resp-{name}", "object": "response", "created_at": 0, "model": "scripted", "output": []}
    yield {"type": "response.created", "response": response | {"status": "in_progress"}}
    items: list[Event] = []
    if answer.hidden_tokens:
        items.append({"type": "reasoning", "id": f"rs-{name}", "summary": [], "content": [], "encrypted_content": "x"})
    if answer.text:
        content = [{"type": "output_text", "text": answer.text, "annotations": []}]
        items.append({"type": "message", "id": f"msg-{name}", "role": "assistant", "content": content})
    for place, call in enumerate(answer.calls):
        item = {"type": "function_call", "id": f"fc-{name}-{place}", "call_id": f"call-{name}-{place}"}
        item |= {"namespace": call.namespace} if call.namespace else {}
        items.append(item | {"name": call.name, "arguments": json.dumps(call.arguments)})
    for place, item in enumerate(items):
        yield {"type": "response.output_item.added", "output_index": place, "item": item | {"status": "in_progress"}}
        if item["type"] == "message":
            delta = {"item_id": item["id"], "output_index": place, "content_index": 0, "delta": answer.text}
            yield {"type": "response.output_text.delta", **delta}
        yield {"type": "response.output_item.done", "output_index": place, "item": item | {"status": "completed"}}
    prompt, cached, output = tokens
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": answer.hidden_tokens},
        "total_tokens": prompt + output,
    }
    done = response | {"status": "completed", "output": items, "usage": usage}
    yield {"type": "response.completed", "response": done}


def chat_usage(answer: Answer, tokens: Sequence[int]) -> Event:
    """The usage object of ``/v1/chat/completions``."""
    prompt, cached, output = tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": answer.hidden_tokens},
    }


def chat_message(name: str, answer: Answer) -> Event:
    """The message of ``/v1/chat/completions``."""
    message: Event = {"role": "assistant", "content": answer.text or None}
    if answer.calls:
        message["tool_calls"] = [
            {
                "index": place,
                "id": f"call-{name}-{place}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for place, call in enumerate(answer.calls)
        ]
    return message


def chat_document(name: str, answer: Answer, tokens: Sequence[int]) -> Event:
    """The answer of ``/v1/chat/completions`` in one document."""
    choice = {"index": 0, "message": chat_message(name, answer), "finish_reason": _reason(answer)}
    base = {"id": f"chat-{name}", "object": "chat.completion", "created": 0, "model": "scripted"}
    return base | {"choices": [choice], "usage": chat_usage(answer, tokens)}


def chat_events(name: str, answer: Answer, tokens: Sequence[int]) -> Iterator[Event]:
    """The chunks of ``/v1/chat/completions``."""
    base = {"id": f"chat-{name}", "object": "chat.completion.chunk", "created": 0, "model": "scripted"}
    yield base | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    delta = chat_message(name, answer)
    yield base | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield base | {"choices": [{"index": 0, "delta": {}, "finish_reason": _reason(answer)}]}
    yield base | {"choices": [], "usage": chat_usage(answer, tokens)}


def _reason(answer: Answer) -> str:
    return "tool_calls" if answer.calls else "stop"


def gemini_as_chat(body: Event) -> Event:
    """A request of Gemini's ``generateContent`` as a chat; the parts of a message stay as they are."""
    said = ({"role": each.get("role", "user"), "content": each.get("parts", [])} for each in body["contents"])
    return {"instructions": body.get("systemInstruction"), "tools": body.get("tools"), "messages": list(said)}


def gemini_document(answer: Answer, tokens: Sequence[int]) -> Event:
    """The answer as one document. Candidates leave out the reasoning, as Gemini counts."""
    prompt, cached, output = tokens
    counts = {
        "promptTokenCount": prompt,
        "candidatesTokenCount": output - answer.hidden_tokens,
        "cachedContentTokenCount": cached,
        "thoughtsTokenCount": answer.hidden_tokens,
        "totalTokenCount": prompt + output,
    }
    parts: list[Event] = [{"text": answer.text}] if answer.text else []
    parts += [{"functionCall": {"name": call.name, "args": call.arguments}} for call in answer.calls]
    return _gemini_chunk(parts) | {"usageMetadata": counts}


def gemini_events(answer: Answer, tokens: Sequence[int]) -> Iterator[Event]:
    """The chunks of an answer: its reasoning, and all else with the usage."""
    if answer.hidden_tokens:
        yield _gemini_chunk([{"text": "**So**", "thought": True}], "")
    yield gemini_document(answer, tokens)


def _gemini_chunk(parts: list[Event], reason: str = "STOP") -> Event:
    more = {"finishReason": reason} if reason else {}
    return {"candidates": [{"index": 0, "content": {"role": "model", "parts": parts}, **more}]}


def _reply(scripted: ScriptedServer, asked: Asked) -> Reply:
    """The next answer of the script that the request belongs to; to a GET the list of models."""
    if asked.method == "GET":
        return _document({"object": "list", "data": [{"id": "scripted", "object": "model"}], "models": []})
    received_ns, body = CLOCK.now_ns(), asked.fields
    body = gemini_as_chat(body) if "contents" in body else body
    scripted.tools += [name for tool in body.get("tools") or () if (name := _tool(tool)) not in scripted.tools]
    found = scripted.next_answer(body)
    if found is None:
        return _document({"error": {"message": "no script has an answer to this", "type": "invalid_request"}}, 400)
    script, place, answer, failure, tokens = found
    until_ns = received_ns + round(answer.takes_s * NS_PER_S)
    if failure == "refused":
        busy = {"error": {"message": "overloaded, as the script says", "type": "server_error"}}
        pieces = _at(until_ns, _document(busy, 503).pieces)
    else:
        pieces = _answered(asked, f"{script}-{place}", answer, tokens, until_ns)
        pieces = pieces if failure != "cut" or _is_streamed(asked) else _at(until_ns, [])

    def seen() -> Iterator[bytes]:
        # A stream that is cut ends after its head and its first event.
        yield from islice(pieces, 2) if failure == "cut" else pieces
        if failure == "cut":
            CLOCK.sleep_until_ns(until_ns)
        scripted.attempts.append(
            Attempt(script, place, answer.after, received_ns, CLOCK.now_ns(), *tokens, failed=failure)
        )

    return Reply(seen(), CLOSE if failure == "cut" else KEEP)


def _is_streamed(asked: Asked) -> bool:
    return bool(asked.fields.get("stream")) or ":stream" in asked.path or asked.path.endswith("/responses")


def _answered(asked: Asked, name: str, answer: Answer, tokens: Sequence[int], until_ns: int) -> Iterator[bytes]:
    """The answer in the words of the API that was asked."""
    if asked.path.endswith("/responses"):
        return _stream(list(responses_events(name, answer, tokens)), until_ns, named=True)
    if "contents" in asked.fields:
        events, document = list(gemini_events(answer, tokens)), gemini_document(answer, tokens)
    else:
        events, document = list(chat_events(name, answer, tokens)), chat_document(name, answer, tokens)
    if _is_streamed(asked):
        return _stream(events, until_ns, named=False)
    return _at(until_ns, _document(document).pieces)


def _document(value: Event, status: int = 200) -> Reply:
    return Reply([whole(json.dumps(value), b"Content-Type: application/json", status=status)])


def _at(until_ns: int, pieces: Iterable[bytes]) -> Iterator[bytes]:
    CLOCK.sleep_until_ns(until_ns)
    yield from pieces


def _stream(events: list[Event], until_ns: int, *, named: bool) -> Iterator[bytes]:
    """The head and the first event at once, the others at ``until_ns``."""
    texts = [(f"event: {event['type']}\n" if named else "") + f"data: {json.dumps(event)}\n\n" for event in events]
    ends = [] if named or "candidates" in events[0] else ["data: [DONE]\n\n"]
    first, *others = chunked(text.encode() for text in [*texts, *ends])
    yield CHUNKED_HEAD
    yield first
    yield from _at(until_ns, others)


def _tool(tool: dict[str, Any]) -> str:
    return tool.get("name") or tool.get("function", {}).get("name") or tool.get("type", "")


@contextmanager
def serving(scripts: dict[str, Script]) -> Generator[ScriptedServer]:
    """A server of these scripts on a free port of loopback."""
    scripted = ScriptedServer(scripts)
    with RawServer(lambda asked: _reply(scripted, asked)) as server:
        scripted.port = server.port
        yield scripted
