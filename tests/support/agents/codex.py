"""Codex (npm ``@openai/codex``) against the scripted server: its app server, which the editors use, leads two turns of
a user, a sub-agent, a compaction and a fork in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.agents.scripted_server import Answer, Script, ScriptedServer, ToolCall, compacting, opening
from tests.support.agents.spoken_to import AppServer
from tests.support.agents.tool import offline, pause

NAME, PACKAGE, LICENCE = "codex", "@openai/codex", "Apache-2.0"
FORMAT = "codex"
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
    "small": compacting(shell),
}
COMPACTS_AT = {"model_auto_compact_token_limit": 12_500}


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
