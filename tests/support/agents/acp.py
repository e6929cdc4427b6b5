"""Agents that speak the Agent Client Protocol: one process, whose client sends what a user writes.

A process of its own for each turn would add its start to a wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.agents.codex import AppServer


class AcpAgent(AppServer):
    """An agent on its standard streams."""

    def _send(self, message: dict[str, Any]) -> None:
        super()._send({"jsonrpc": "2.0", **message})

    def _messages(self) -> Iterator[dict[str, Any]]:
        """What the agent says; what it asks of an editor is refused, since it waits for an answer."""
        for message in super()._messages():
            if "method" in message and "id" in message:
                self._send({"id": message["id"], "error": {"code": -32601, "message": "not known"}})
            yield message

    def begin(self) -> None:
        """The first thing that is said."""
        self.ask("initialize", protocolVersion=1, clientCapabilities={})

    def new_session(self, folder: Path) -> str:
        """The id of a new session."""
        return self.ask("session/new", cwd=str(folder), mcpServers=[])["sessionId"]

    def turn_of_user(self, thread: str, text: str) -> None:
        """Send what a user writes, and wait until the agent has ended its turn."""
        self.ask("session/prompt", sessionId=thread, prompt=[{"type": "text", "text": text}])
