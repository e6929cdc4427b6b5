"""How far predictions of a recorded vLLM server hold: the replay of what it recorded, in lines for ``tune --from``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from harness.errors import HarnessError
from harness.extras.formats.vllm_sessions import read_requests
from harness.extras.sessions.commands import lines_of, replay_files, unusual_requests
from harness.model.traces.base import ReadNotes
from harness.stacks.vllm.step_log import unknown_rules

SESSIONS_MARK, STEPS_MARK = "vllm_sessions", "vllm_core_steps"
UNKNOWN = "how far its scheduler's rules hold for this server is unknown: "


def verdict_of(recording: Path) -> list[str]:
    """Lines on the replay of a file of sessions; none for a file of another format.

    The steps of the same engine core are looked for beside it.
    """
    header = _first_record(recording)
    if SESSIONS_MARK not in header:
        return []
    steps = next(_steps_beside(recording, header), None)
    if steps is None:
        effective: Any = header.get("effective")
        rules = unknown_rules(effective, header.get("scheduler")) if isinstance(effective, dict) else ""
        requests = read_requests([recording], ReadNotes(), is_moved=False)
        why = "; ".join(filter(None, (rules, *unusual_requests(requests))))
        where = recording.parent.resolve()
        what = f"no steps of it lie beside {recording.name}: no file in {where} is of the same process"
        first = [f"the rules are unknown here: {why}"] if why else []
        return [*first, f"{UNKNOWN}{what} (VLLM_CORE_STEPS_FILE={recording.stem}.core_steps.jsonl)"]
    try:
        found, config = replay_files([recording], steps)
    except HarnessError as error:
        return [f"{UNKNOWN}{error}"]
    return [f"replay of {recording.name} with {steps.name}:", *lines_of(found, config, "")]


def timed_steps_of(recording: Path) -> Path | None:
    """The file of timed steps of the same engine core, where one lies beside a file of sessions."""
    header = _first_record(recording)
    return next(_steps_beside(recording, header), None) if SESSIONS_MARK in header else None


def _steps_beside(recording: Path, header: dict[str, Any]) -> Iterator[Path]:
    """Files of steps in the same folder that the same process wrote of the same engine."""
    for path in sorted(recording.parent.glob("*")):
        record = _first_record(path)
        if STEPS_MARK in record and all(record.get(key) == header.get(key) for key in ("pid", "engine")):
            yield path


def _first_record(path: Path) -> dict[str, Any]:
    """The object in the first line of a file; empty where there is none."""
    try:
        with path.open("rb") as file:
            record = json.loads(file.readline(1 << 20))
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", record) if isinstance(record, dict) else {}
