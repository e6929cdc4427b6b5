"""Codex (npm ``@openai/codex``) against the scripted server: its app server, which the editors use, leads two turns of
a user, a sub-agent, a compaction and a fork in one process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import Self

from tests.support.agents.scripted_server import Answer, Script, ScriptedServer, ToolCall, opening
from tests.support.agents.tool import offline, pause

NAME, PACKAGE, LICENCE = "codex", "@openai/codex", "Apache-2.0"
FORMAT = "codex"
ANSWER_WITHIN_S = 120
CONFIG = """model = "scripted"
model_provider = "scripted"
approval_policy = "never"
sandbox_mode = "danger-full-access"
model_reasoning_effort = "low"
[features]
apps = false
[model_providers.scripted]
name = "scripted"
base_url = "{url}"
wire_api = "responses"
"""


def shell(command: str) -> ToolCall:
    """A call of Codex's shell."""
    return ToolCall("exec_command", {"cmd": command, "yield_time_ms": 30_000})


def of_agents(name: str, **arguments: Any) -> ToolCall:
    """A call of Codex's tool for sub-agents."""
    return ToolCall(name, arguments, "multi_agent_v1")


SCRIPTS = {
    "main": Script(
        (
            *opening(shell, 2.2, ""),
            Answer("The first part is done.", failures=("refused", "cut")),
            Answer("A helper counts.", (of_agents("spawn_agent", message="Count the files. script:child"),), "human"),
            Answer("", (of_agents("wait_agent", targets=["$agent"], timeout_ms=60_000),)),
            Answer("The helper has counted.", joins="child"),
            Answer("Summary: a helper counted the files. script:main", after="human", takes_s=0.8),
            Answer("", (shell("sleep 0.9; echo again"),), "human", is_fresh=True),
            Answer("All is done."),
        )
    ),
    "child": Script(
        (Answer("", (shell("sleep 1.2; ls | wc -l"),), "none"), Answer("There are 3 files.")), started_by="main"
    ),
    "fork": Script(
        (Answer("", (shell("sleep 0.7; echo forked"),), "human"), Answer("The other way is done.")), continues="main"
    ),
    "small": Script(  # it compacts by itself, between a tool's result and the next answer
        (
            Answer("I look. " + "y " * 6000, (shell("sleep 1.5; echo seen"),), "none"),
            Answer("Summary: it was looked at. script:small", takes_s=0.8),
            Answer("", (shell("sleep 0.9; echo again"),), "none", is_fresh=True),
            Answer("All is done."),
        )
    ),
}
COMPACTS_AT = {"model_auto_compact_token_limit": 12_500}


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


def run(installed: Path, folder: Path, server: ScriptedServer) -> list[Path]:
    """Play the scripts; returns the logs that Codex left."""
    home = folder / "home"
    home.mkdir()
    (home / "config.toml").write_text(CONFIG.format(url=server.url))
    variables = offline(folder) | {"CODEX_HOME": str(home)}
    command = [str(installed / "node_modules/.bin/codex"), "app-server"]
    with AppServer.started(command, folder, variables) as codex:
        codex.ask("initialize", clientInfo={"name": "scripted", "version": "1"})
        codex.say("initialized")
        thread = codex.ask("thread/start")["thread"]["id"]
        codex.turn_of_user(thread, "Look at this folder. script:main")
        pause(3.0)
        codex.turn_of_user(thread, "Let a helper count the files. script:main")
        pause(1.5)
        fork = codex.ask("thread/fork", threadId=thread)["thread"]["id"]
        codex.turn_of_user(fork, "Now the other way. script:fork")
        codex.ask("thread/compact/start", threadId=thread)
        codex.until_turn_ended(thread)
        pause(2.0)
        codex.turn_of_user(thread, "Once more. script:main")
        small = codex.ask("thread/start", config=COMPACTS_AT)["thread"]["id"]
        codex.turn_of_user(small, "Look at this folder. script:small")
    return sorted(home.glob("sessions/**/rollout-*.jsonl"))
