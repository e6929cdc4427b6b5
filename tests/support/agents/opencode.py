"""opencode (npm ``opencode-ai``) against the scripted server: its own server leads two turns of a user, a sub-agent, a
fork and a compaction; its log is what ``opencode export`` writes."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.agents.scripted_server import Answer, Script, ScriptedServer, ToolCall, compacting, opening
from tests.support.agents.tool import offline, pause, run_quietly

NAME, PACKAGE, LICENCE = "opencode", "opencode-ai", "MIT"
FORMAT = "opencode"
ANSWER_WITHIN_S = 120
MODEL = {"providerID": "scripted", "modelID": "scripted"}


def shell(command: str) -> ToolCall:
    """A call of its shell."""
    return ToolCall("bash", {"command": command, "description": "Runs a step", "timeout": 60_000})


HELPER = {"description": "Count files", "prompt": "Count the files. script:child", "subagent_type": "general"}
SCRIPTS = {
    "main": Script(
        (
            *opening(shell, 2.2),
            Answer("The first part is done.", failures=("refused",)),
            Answer("A helper counts.", (ToolCall("task", HELPER),), "human"),
            Answer("The helper has counted.", joins="child"),
            Answer("Summary: a helper counted the files. script:main", after="human", takes_s=0.8),
            Answer("Once more.", (shell("sleep 0.9; echo again"),), "human", is_fresh=True),
            Answer("All is done."),
        )
    ),
    "child": Script(
        (Answer("I count.", (shell("sleep 1.2; ls | wc -l"),), "none"), Answer("There are 3 files.")), started_by="main"
    ),
    "fork": Script(
        (Answer("Here.", (shell("sleep 0.7; echo forked"),), "human"), Answer("The other way is done.")),
        continues="main",
    ),
    "small": compacting(shell, "On I go."),
}


def config_of(url: str) -> dict[str, Any]:
    """Its settings: one model and one of few tokens, no titles from it, no network."""
    models = {
        name: {"name": name, "limit": {"context": context, "output": 2_000}, "tool_call": True}
        for name, context in (("scripted", 200_000), ("small", 12_500))
    }
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "scripted", "options": {"baseURL": url, "apiKey": "none"}}
    return {
        "autoupdate": False,
        "share": "disabled",
        "snapshot": False,
        "model": "scripted/scripted",
        "permission": "allow",
        "agent": {"title": {"disable": True}},
        "provider": {"scripted": provider | {"models": models}},
    }


def run(installed: Path, folder: Path, server: ScriptedServer) -> list[Path]:
    """Play the scripts; returns the exported sessions."""
    variables = offline(folder) | {
        "OPENCODE_CONFIG_CONTENT": json.dumps(config_of(server.url)),
        "OPENCODE_DISABLE_AUTOUPDATE": "true",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "true",
        "OPENCODE_DISABLE_MODELS_FETCH": "true",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "true",
        "XDG_DATA_HOME": str(folder / "data"),
    }
    binary = str(installed / "node_modules/.bin/opencode")
    with _serve(binary, folder, variables) as url:
        session = _ask(url, "session", {})["id"]
        _turn_of_user(url, session, "Look at this folder. script:main")
        pause(3.0)
        _turn_of_user(url, session, "Let a helper count the files. script:main")
        pause(1.5)
        fork = _ask(url, f"session/{session}/fork", {})["id"]
        _turn_of_user(url, fork, "Now the other way. script:fork")
        _ask(url, f"session/{session}/summarize", MODEL)
        pause(2.0)
        _turn_of_user(url, session, "Once more. script:main")
        _turn_of_user(url, _ask(url, "session", {})["id"], "Look at this folder. script:small", model="small")
        sessions = [one["id"] for one in _ask(url, "session")]
    logs: list[Path] = []
    for name in sessions:
        logs.append(folder / f"{name}.json")
        text = run_quietly([binary, "export", name], cwd=folder / "work", env=variables)
        logs[-1].write_text(text[text.index("{") :])
    return logs


def _turn_of_user(url: str, session: str, text: str, model: str = "scripted") -> None:
    body = {"model": MODEL | {"modelID": model}, "parts": [{"type": "text", "text": text}]}
    _ask(url, f"session/{session}/message", body)


def _ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The answer of opencode's own server: GET without a body, else POST."""
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/{path}", content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_WITHIN_S) as answer:
        return json.load(answer)


@contextmanager
def _serve(binary: str, folder: Path, variables: dict[str, str]) -> Generator[str]:
    """The address of opencode's server."""
    with (folder / "opencode.err").open("w") as errors:
        process = subprocess.Popen(
            [binary, "serve"], cwd=folder / "work", env=variables, stdin=-3, stdout=-1, stderr=errors, text=True
        )
        try:
            found = next(filter(None, (re.search(r"http://\S+", line) for line in process.stdout)), None)
            if found is None:
                raise SystemExit(f"agents: opencode's server did not start: {(folder / 'opencode.err').read_text()}")
            yield found[0]
        finally:
            process.terminate()
            process.communicate()
