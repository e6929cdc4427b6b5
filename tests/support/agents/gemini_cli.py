"""Gemini CLI (npm ``@google/gemini-cli``) against the scripted server: a user lets a helper count."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.agents.scripted_server import FIRST, Answer, Script, ScriptedServer, ToolCall, opening
from tests.support.agents.spoken_to import AcpAgent
from tests.support.agents.tool import offline, pause

NAME, PACKAGE, LICENCE = "gemini-cli", "@google/gemini-cli", "Apache-2.0"
FORMAT = "gemini-cli"
SETTINGS = {
    "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
    "security": {"auth": {"selectedType": "gemini-api-key"}},
    "privacy": {"usageStatisticsEnabled": False},
}


def shell(command: str) -> ToolCall:
    """A call of its shell."""
    return ToolCall("run_shell_command", {"command": command, "description": "Runs a step"})


HELPER = {"agent_name": "generalist", "prompt": "Count the files. script:child"}
SCRIPTS = {
    "first": FIRST,
    "main": Script(
        (
            *opening(shell, 2.2),
            Answer("The first part is done."),
            Answer("A helper counts.", (ToolCall("invoke_agent", HELPER),), "human"),
            Answer("The helper has counted.", joins="child"),
        )
    ),
    "child": Script(
        (
            Answer("I count.", (shell("sleep 1.2; ls | wc -l"),), "none"),
            Answer("", (ToolCall("complete_task", {"result": {"response": "There are 3 files."}}),)),
        ),
        started_by="main",
    ),
}


def run(installed: Path, folder: Path, server: ScriptedServer) -> list[Path]:
    """Play the scripts; returns the sessions that Gemini CLI left."""
    variables = offline(folder) | {
        "GEMINI_API_KEY": "none",
        "GOOGLE_GEMINI_BASE_URL": server.url.removesuffix("/v1"),
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
    }
    home = folder / ".gemini"
    home.mkdir()
    (home / "settings.json").write_text(json.dumps(SETTINGS))
    gemini = str(installed / "node_modules/.bin/gemini")
    command = [gemini, "--acp", "--yolo", "--skip-trust", "-m", "gemini-2.5-flash"]
    with AcpAgent.started(command, folder, variables) as agent:
        agent.begin()
        agent.turn_of_user(agent.new_session(folder / "work"), "Say a word. script:first")
        session = agent.new_session(folder / "work")
        agent.turn_of_user(session, "Look at this folder. script:main")
        pause(3.0)
        agent.turn_of_user(session, "Let a helper count the files. script:main")
    return sorted((home / "tmp").glob("*/chats/**/*.jsonl"))
