"""Rows of agent logs in which every text that a person, a tool or a path could have is one secret."""

from __future__ import annotations

from typing import Any

SECRET = "s3cr3t"


def at(seconds: float) -> str:
    return f"2026-03-01T10:{int(seconds) // 60:02d}:{seconds % 60:06.3f}Z"


def assistant(name: str, seconds: float, usage: tuple[int, int, int, int], *parts: dict[str, Any], **more: Any) -> Any:
    keys = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    message = {"id": name, "model": "m", "content": list(parts), "usage": dict(zip(keys, usage, strict=True))}
    return {"type": "assistant", "sessionId": SECRET, "timestamp": at(seconds), "message": message, **more}


def text() -> dict[str, Any]:
    return {"type": "text", "text": SECRET}


def tool(call: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": "Task", "input": {"command": SECRET}}


def user(seconds: float, content: Any = SECRET, **more: Any) -> dict[str, Any]:
    return {
        "type": "user",
        "sessionId": SECRET,
        "timestamp": at(seconds),
        "cwd": f"/home/{SECRET}",
        "message": {"role": "user", "content": content},
        **more,
    }


def result(call: str, seconds: float, agent: str = "") -> dict[str, Any]:
    more = {"toolUseResult": {"agentId": agent, "stdout": SECRET}} if agent else {}
    return user(seconds, [{"type": "tool_result", "tool_use_id": call, "content": SECRET}], **more)
