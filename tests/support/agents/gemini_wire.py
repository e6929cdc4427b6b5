"""Gemini's API (``generateContent``) in the words of the scripted server: its requests as chats, and its answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.agents.scripted_server import Answer


def as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """The request as a chat; the parts of a message stay as they are."""
    said = ({"role": each.get("role", "user"), "content": each.get("parts", [])} for each in body["contents"])
    return {"instructions": body.get("systemInstruction"), "tools": body.get("tools"), "messages": list(said)}


def document(answer: Answer, tokens: Sequence[int]) -> dict[str, Any]:
    """The answer as one document. Candidates leave out the reasoning, as Gemini counts."""
    prompt, cached, output = tokens
    counts = {
        "promptTokenCount": prompt,
        "candidatesTokenCount": output - answer.hidden_tokens,
        "cachedContentTokenCount": cached,
        "thoughtsTokenCount": answer.hidden_tokens,
        "totalTokenCount": prompt + output,
    }
    parts: list[dict[str, Any]] = [{"text": answer.text}] if answer.text else []
    parts += [{"functionCall": {"name": call.name, "args": call.arguments}} for call in answer.calls]
    return _chunk(parts) | {"usageMetadata": counts}


def events(answer: Answer, tokens: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The chunks of an answer: its reasoning, and all else with the usage."""
    if answer.hidden_tokens:
        yield _chunk([{"text": "**So**", "thought": True}], "")
    yield document(answer, tokens)


def _chunk(parts: list[dict[str, Any]], reason: str = "STOP") -> dict[str, Any]:
    more = {"finishReason": reason} if reason else {}
    return {"candidates": [{"index": 0, "content": {"role": "model", "parts": parts}, **more}]}
