"""Agents that are one process, and spoken to in lines of JSON on its standard streams."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import Self

ANSWER_WITHIN_S = 120


class AppServer:
    """An agent that is spoken to in lines of JSON, as Codex's app server."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self._number = process, 0

    @classmethod
    @contextmanager
    def started(cls, command: list[str], folder: Path, variables: dict[str, str]) -> Generator[Self]:
        """An agent that works in ``folder``, and ends with the block."""
        with (folder / "agent.err").open("w") as errors:
            process = subprocess.Popen(
                ["timeout", str(ANSWER_WITHIN_S), *command],
                cwd=folder / "work",
                env=variables,
                stdin=-1,
                stdout=-1,
                stderr=errors,
                text=True,
            )
            try:
                yield cls(process)
            finally:
                process.terminate()
                process.communicate()

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a request."""
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        return next(message["result"] for message in self._messages() if message.get("id") == self._number)

    def say(self, method: str) -> None:
        """A message without an answer."""
        self._send({"method": method})

    def turn_of_user(self, thread: str, text: str) -> None:
        """Send what a user writes, and wait until the agent has ended its turn."""
        self.ask("turn/start", threadId=thread, input=[{"type": "text", "text": text}])
        self.until_turn_ended(thread)

    def until_turn_ended(self, thread: str) -> None:
        """Read on until a turn of this thread has ended."""
        for message in self._messages():
            if message.get("method") == "turn/completed" and message["params"].get("threadId") == thread:
                return

    def _send(self, message: dict[str, Any]) -> None:
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _messages(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "error" in message and "id" in message:
                raise SystemExit(f"agents: the agent answers {message['error']}")
            yield message
        raise SystemExit("agents: the agent ended")


class AcpAgent(AppServer):
    """An agent that speaks the Agent Client Protocol.

    A process of its own for each turn would add its start to a wait.
    """

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
