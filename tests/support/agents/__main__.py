"""``python -m tests.support.agents``: installs the newest releases, plays the scripts, and prints how imports differ.

Exit code 1 where a count differs, a request is missing, or a wait differs by more than ``truth.WITHIN_S``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.agents import codex, gemini_cli, mini_swe_agent, opencode, pydantic_ai, qwen_code
from tests.support.agents.scripted_server import ScriptedServer, serving
from tests.support.agents.tool import install
from tests.support.agents.truth import WAIT, SeenRequest, differences, requests_seen, truth_of

MODULES = (codex, mini_swe_agent, opencode, qwen_code, gemini_cli, pydantic_ai)
AGENTS: dict[str, ModuleType] = {module.NAME: module for module in MODULES}
# Words, ids, numbers and stamps; a path, a sentence and a command are none.
PLAIN = re.compile(r"[\w.:+@$#-]{0,80}")
LEFT_OUT = "left out: {} characters"


def play(agent: ModuleType, folder: Path) -> tuple[str, list[Path], list[SeenRequest], ScriptedServer]:
    """(release, logs, what the server saw, the server) of one agent."""
    installed = folder / "installed"
    installed.mkdir(parents=True)
    release = install(agent, installed)
    with serving(agent.SCRIPTS) as server:
        logs = agent.run(installed, folder, server)
    return release, logs, requests_seen(server.attempts, agent.SCRIPTS), server


def held(agent: ModuleType, folder: Path, keep: Path | None) -> bool:
    """Play one agent, print what differs, and say whether nothing does."""
    release, logs, seen, server = play(agent, folder)
    if keep is not None:
        kept = keep / f"{agent.NAME}-{release}"
        kept.mkdir(parents=True, exist_ok=True)
        above = os.path.commonpath([log.parent for log in logs])
        for log in logs:
            write_without_texts(log, kept / log.relative_to(above))
        (kept / "truth.json").write_text(json.dumps(truth_of(agent.NAME, release, agent.FORMAT, seen), indent=1) + "\n")
    found, off_s = differences(seen, logs, agent.FORMAT)
    failed = sum(request.failed_attempts for request in seen)
    print(f"{agent.NAME} {release}: {len(seen)} requests, {failed} failed attempts before them, {len(logs)} logs")
    for line in [*found, *(f"asked beyond the scripts: {what}" for what in server.unknown)]:
        print(f"  {line}")
    if any(one.what == WAIT for one in found):
        print("  (stamps of a log are of the agent's own process, which a busy machine keeps waiting: hold it quiet)")
    if off_s:
        print(f"  {len(off_s)} waits: the import reads {min(off_s):+.3f} to {max(off_s):+.3f} s beside the server's")
    missing = sum(len(script.answers) for script in agent.SCRIPTS.values()) - len(seen)
    if missing:
        print(f"  {missing} answers of the scripts were never asked for")
    return not (found or missing or server.unknown)


def without_texts(value: Any) -> Any:
    """The value with every text replaced by its length, unless it is one word."""
    if isinstance(value, dict):
        return {_text(key): without_texts(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_texts(inner) for inner in value]
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    if PLAIN.fullmatch(text):
        return text
    return LEFT_OUT.format(len(text))


def write_without_texts(source: Path, target: Path) -> None:
    """A log of JSON lines, or of one document, without texts."""
    text = source.read_text()
    lines = [json.loads(line) for line in text.splitlines()] if source.suffix == ".jsonl" else [json.loads(text)]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps(without_texts(line)) + "\n" for line in lines))


def main() -> int:
    """Every agent, or those that are named."""
    parser = argparse.ArgumentParser(prog="agents", description=__doc__)
    parser.add_argument("agents", nargs="*", metavar="AGENT", help=", ".join(AGENTS))
    parser.add_argument("--keep", type=Path, help="folder for the logs without their texts, and the truth beside them")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        results = [held(AGENTS[name], Path(folder) / name, chosen.keep) for name in chosen.agents or AGENTS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
