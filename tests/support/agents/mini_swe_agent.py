"""mini-swe-agent (PyPI ``mini-swe-agent``) against the scripted server, in a terminal where a person adds a task."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

from harness.clock import NS_PER_S, MonotonicClock
from tests.support.agents.scripted_server import Answer, Script, ScriptedServer, ToolCall, opening
from tests.support.agents.tool import offline, pause

NAME, LICENCE = "mini-swe-agent", "MIT"
PACKAGES = ("mini-swe-agent",)
FORMAT = "swe-agent"
ENDS_WITHIN_S = 120
WANTS_TO_FINISH = b"Agent wants to finish"
CONFIG = """agent:
  system_template: You work in a folder of three files.
  instance_template: "{{task}}"
  mode: yolo
  cost_limit: 0
environment:
  environment_class: local
model:
  model_name: openai/scripted
  cost_tracking: ignore_errors
  observation_template: "{{output.returncode}}: {{output.output}}"
  model_kwargs:
    api_base: URL
    drop_params: true
"""


def shell(command: str) -> ToolCall:
    """A call of its shell."""
    return ToolCall("bash", {"command": command})


FINISH = shell("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
SCRIPTS = {
    "main": Script(
        (
            *opening(shell, 1.2)[:2],
            Answer("It will break.", (shell("sleep 0.6; echo broken; exit 3"),), failures=("refused", "cut")),
            Answer("The first part is done.", (FINISH,)),
            Answer("Once more.", (shell("sleep 0.9; echo again"),), "human"),
            Answer("All is done.", (FINISH,)),
        )
    )
}


def run(installed: Path, folder: Path, server: ScriptedServer) -> list[Path]:
    """Play the scripts; returns the trajectory that mini-swe-agent left."""
    (folder / "mini.yaml").write_text(CONFIG.replace("URL", server.url))
    target = folder / "run.traj.json"
    more = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_GLOBAL_CONFIG_DIR": str(folder),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "TERM": "xterm",
    }
    command = [str(installed / "bin/mini"), "-c", str(folder / "mini.yaml"), "-o", str(target)]
    command += ["-t", "Look at this folder. script:main"]
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        command, cwd=folder / "work", env=offline(folder) | more, stdin=other_end, stdout=other_end, stderr=other_end
    )
    os.close(other_end)
    try:
        _type_when_asked(terminal, process, ["Once more, please.\r", "\r"])
        process.wait(timeout=ENDS_WITHIN_S)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    return [target]


def _type_when_asked(terminal: int, process: subprocess.Popen[bytes], replies: list[str]) -> None:
    """Type the next reply, some time after each question; the terminal is read to its end."""
    clock, shown = MonotonicClock(), b""
    until_ns = clock.now_ns() + ENDS_WITHIN_S * NS_PER_S
    while process.poll() is None and clock.now_ns() < until_ns:
        try:
            shown += os.read(terminal, 4096)
        except OSError:
            return
        if replies and WANTS_TO_FINISH in shown:
            shown = b""
            pause(3.0)
            os.write(terminal, replies.pop(0).encode())
