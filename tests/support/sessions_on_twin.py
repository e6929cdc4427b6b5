"""A vllm-rbln twin records the sessions that the harness plays: are they imported as they were planned?

``python -m tests.support.sessions_on_twin VERSION FOLDER [KIND]`` starts the twin of that vllm-rbln and prints what was
found. KIND: see ``KINDS``; "short" runs without the harness's own observer, as a server of others does.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from harness.measure.records.run import SealedRun
from harness.model.traces.importing import import_trace
from harness.model.traces.recording import TraceFile, read_trace
from harness.stacks.vllm.step_log import INSIDE
from tests.support.observed import observed_steps
from tests.support.sessions_on_vllm import as_of_agents, lengths_imported, lengths_planned
from tests.support.twin_runs import run_on_twin

SESSIONS = "sessions.jsonl"
Range = tuple[int, int]


class Kind(NamedTuple):
    """Sessions of 3 turns, ranges of their tokens, and more of [server]."""

    num_sessions: int
    prompt: Range
    more: dict[str, Any]
    new: Range = (50, 150)
    generated: Range = (20, 60)

    @property
    def workload(self) -> dict[str, Any]:
        names = {"prompt_tokens": self.prompt, "new_tokens": self.new, "generate_tokens": self.generated}
        ranges = {name: {"distribution": "uniform", "low": low, "high": high} for name, (low, high) in names.items()}
        return {"num_sessions": self.num_sessions, "requests_per_session": 3, "waits": "none", **ranges}


KINDS = {
    "usual": Kind(6, (150, 400), {}),
    # More sessions than slots: slots are evicted.
    "many": Kind(14, (150, 400), {}),
    # Prompts and answers that often fill no block of 128 tokens.
    "short": Kind(20, (60, 200), {"observer": False}, new=(20, 60)),
    "uncached": Kind(6, (150, 400), {"prefix_caching": False}),
}


def record(version: str, folder: Path, kind: Kind, variables: dict[str, str] | None = None) -> SealedRun:
    """The sealed run. The recorder's file is ``SESSIONS`` in the folder. variables: more of the environment."""
    env = {"PYTHONPATH": os.fspath(INSIDE), "VLLM_SESSIONS_FILE": str(folder / SESSIONS), **(variables or {})}
    return run_on_twin(folder, "sessions", kind.workload, {"environment": version, "env": env, **kind.more})


def imported(folder: Path) -> TraceFile:
    """The sessions of the recorder's file."""
    as_of_agents(folder / SESSIONS)
    import_trace([folder / SESSIONS], folder / "trace.jsonl", name="recorded")
    return read_trace(folder / "trace.jsonl")


def num_whole(run: SealedRun, trace: TraceFile) -> int:
    """Planned sessions that were imported with all turns and lengths."""
    return (Counter(lengths_planned(run.plan)) & Counter(map(lengths_imported, trace.recordings))).total()


def cached_tokens(folder: Path) -> list[int | None]:
    """Of each request that ended, in the order in which they were queued."""
    lines = [json.loads(line) for line in (folder / SESSIONS).read_text().splitlines()]
    ended = sorted((line for line in lines if "end" in line), key=lambda line: line["end"])
    return [line["cached_tokens"] for line in ended]


def cached_by_observer(run: SealedRun) -> list[int]:
    """The same, as the records of steps have them: one request a prefill, first come first served."""
    return [step["cached_tokens"] for step in observed_steps(run) if step["kind"] == "prefill"]


def main(version: str, folder: str, name: str = "usual") -> int:
    """Run, and print."""
    place, kind = Path(folder), KINDS[name]
    place.mkdir(parents=True)
    run = record(version, place, kind)
    trace = imported(place)
    cached = cached_tokens(place)
    print(f"{version} {name}: {num_whole(run, trace)} of {kind.num_sessions} sessions of 3 turns imported whole")
    if kind.more.get("observer", True):
        seen = cached_by_observer(run)
        differ = sum(mine != theirs for mine, theirs in zip(cached, seen, strict=True))
        print(f"cached tokens: {differ} of {len(seen)} requests differ from the observer's; {sum(seen)} in all")
    print("labels:", *trace.head.labels, sep="\n  ")
    return 0 if run.is_valid else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
