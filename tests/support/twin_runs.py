"""Runs on the twin, for tests: an experiment of one condition, performed by the same code as ``harness run``."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from harness.extras.twin.inside.twin_device import EMPTY, draw, fold
from harness.measure.records.run import SealedRun
from harness.model.plan.model import Plan
from harness.model.plan.tokens import TokenStreams
from harness.model.spec import ExperimentSpec
from harness.runner import run_experiment
from tests.support.experiments import UNHURRIED


def expected_tokens(prompt: Sequence[int], count: int, low: int, high: int) -> list[int]:
    """The ``count`` tokens that a device without faults generates after ``prompt``."""
    number, total = EMPTY, 0
    for position, token in enumerate(prompt):
        number = fold(number, int(token), position)
        total += number
    tokens: list[int] = []
    for position in range(len(prompt), len(prompt) + count):
        tokens.append(draw(total, low, high))
        number = fold(number, tokens[-1], position)
        total += number
    return tokens


def run_on_twin(folder: Path, name: str, workload: dict[str, Any], server: dict[str, Any] | None = None) -> SealedRun:
    """One run of ``workload``, sealed. Wall time: some 20 s to start the server, then the replay in real time."""
    spec = ExperimentSpec.model_validate(
        {
            "name": name,
            "backend": "twin",
            "replicates": 1,
            "base_seed": 20261123,
            "workload": workload,
            "server": {"start_timeout_s": 300.0, "stop_grace_s": 30.0, **(server or {})},
            # A shared machine wakes the client late; this is about decisions, not about time.
            "limits": UNHURRIED,
            "condition": [{"name": "only"}],
        }
    )
    (run,) = run_experiment(spec, runs_root=folder).runs
    return run


def counters(run: SealedRun, at: str) -> dict[str, float]:
    """Samples of the scrape taken "before" or "after" the replay, by name, summed over labels."""
    totals: dict[str, float] = defaultdict(float)
    for line in run.file("scrapes.jsonl").read_text(encoding="utf-8").splitlines():
        scrape = json.loads(line)
        if scrape["reason"] == at:
            totals.clear()
            for family in text_string_to_metric_families(scrape["body"]):
                for sample in family.samples:
                    totals[sample.name] += sample.value
    return totals


def increase(run: SealedRun, name: str) -> float:
    """How much a counter grew during the replay."""
    return counters(run, "after")[name] - counters(run, "before")[name]


def device_trace(run: SealedRun, kind: str = "") -> list[dict[str, Any]]:
    """The stand-in's own records in order: of one kind, or all."""
    lines = run.file("device_trace.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if not kind or record["kind"] == kind]


class Turn(NamedTuple):
    """One request: the tokens sent, and those that come back when nothing is ever reused wrongly."""

    prompt: list[int]
    answer: list[int]


def faultless_turns(plan: Plan, low: int, high: int) -> dict[tuple[int, int], Turn]:
    """Every request of a plan, by session and place in it."""
    streams = TokenStreams(plan)
    generated: dict[int, list[list[int]]] = defaultdict(list)
    turns: dict[tuple[int, int], Turn] = {}
    for session in plan.sessions:
        for index, request in enumerate(session.requests):
            prompt = streams.prompt(session.index, index, generated).tolist()
            answer = expected_tokens(prompt, request.generate_tokens, low, high)
            generated[session.index].append(answer)
            turns[session.index, index] = Turn(prompt, answer)
    return turns
