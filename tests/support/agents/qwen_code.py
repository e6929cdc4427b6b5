"""Qwen Code (npm ``@qwen-code/qwen-code``) against the scripted server: a user asks, goes on, lets a helper count,
forks the session and compacts it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.agents.scripted_server import FIRST, Answer, Script, ScriptedServer, ToolCall, opening
from tests.support.agents.spoken_to import AcpAgent
from tests.support.agents.tool import offline, pause

NAME, PACKAGE, LICENCE = "qwen-code", "@qwen-code/qwen-code", "Apache-2.0"
FORMAT = "qwen-code"
SETTINGS = {
    "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
    "security": {"auth": {"selectedType": "openai"}},
    "privacy": {"usageStatisticsEnabled": False},
    "ui": {"enableFollowupSuggestions": False},
    "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
}


def shell(command: str) -> ToolCall:
    """A call of its shell."""
    return ToolCall("run_shell_command", {"command": command, "description": "Runs a step", "is_background": False})


HELPER = {
    "description": "Count files",
    "prompt": "Count the files. script:child",
    "subagent_type": "general-purpose",
    "run_in_background": False,
}
# The first request of each session comes seconds after its row: the agent computes what it sends.
SCRIPTS = {
    "first": FIRST,
    "main": Script(
        (
            *opening(shell, 1.2),
            Answer("The first part is done."),
            Answer("A helper counts.", (ToolCall("agent", HELPER),), "human"),
            Answer("The helper has counted.", joins="child"),
            Answer("<state_snapshot>A helper counted. script:main</state_snapshot>", after="human", takes_s=0.8),
            Answer("Once more.", (shell("sleep 0.9; echo again"),), "human", is_fresh=True),
            Answer("All is done."),
        )
    ),
    "child": Script(
        (Answer("I count.", (shell("sleep 1.2; ls | wc -l"),), "none", is_late=True), Answer("There are 3 files.")),
        started_by="main",
    ),
    "fork": Script(
        (Answer("Here.", (shell("sleep 0.7; echo forked"),), "human", is_late=True), Answer("The other way is done.")),
        continues="main",
    ),
}


def run(installed: Path, folder: Path, server: ScriptedServer) -> list[Path]:
    """Play the scripts; returns the sessions that Qwen Code left."""
    variables = offline(folder) | {"OPENAI_BASE_URL": server.url, "OPENAI_MODEL": "scripted"}
    home = folder / ".qwen"
    home.mkdir()
    (home / "settings.json").write_text(json.dumps(SETTINGS))
    qwen = str(installed / "node_modules/.bin/qwen")
    command = [qwen, "--acp", "--yolo", "--auth-type", "openai", "-m", "scripted"]
    with AcpAgent.started(command, folder, variables) as agent:
        agent.begin()
        agent.turn_of_user(agent.new_session(folder / "work"), "Say a word. script:first")
        session = agent.new_session(folder / "work")
        agent.turn_of_user(session, "Look at this folder. script:main")
        pause(3.0)
        agent.turn_of_user(session, "Let a helper count the files. script:main")
        pause(1.5)
        fork = agent.ask("qwen/control/session/branch", sessionId=session, cwd=str(folder / "work"))
        fork = fork["newSessionId"]
        agent.ask("session/load", sessionId=fork, cwd=str(folder / "work"), mcpServers=[])
        agent.turn_of_user(fork, "Now the other way. script:fork")
        agent.turn_of_user(session, "/compress")
        pause(2.0)
        agent.turn_of_user(session, "Once more. script:main")
    return sorted(home.glob("projects/**/*.jsonl"))
