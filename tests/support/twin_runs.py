"""Runs on the twin, by the same code as ``harness run``; and what was observed, held to the device and to the log."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from harness.analysis.logs.engine_steps import observed_log, unlike_observed
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


BUCKET = re.compile(r"\[BUCKET\] request_nums=(\d+) padded_batch_size=(\d+)")
EVICTION = re.compile(r"\[PFX\] \[EVICTION\] OB=(\d+)")


@dataclass(frozen=True)
class Compared:
    """How much was compared. observer_us: what observing took, microseconds a step (median, mean)."""

    decodes: int
    prefills: int
    chunks: int
    evictions: int
    observer_us: tuple[float, float]

    def __str__(self) -> str:
        usual, average = self.observer_us
        return (
            f"{self.decodes} decode steps, {self.prefills} prefills of {self.chunks} chunks, {self.evictions} evictions"
            f"; observer {usual:.1f} us a step (median), {average:.1f} us (mean)"
        )


def observed_steps(run: SealedRun) -> list[dict[str, Any]]:
    """The records of the observer, and of each: kind, n, b, and of a prefill its cached and computed tokens."""
    log = observed_log(run)
    assert log.num_damaged == 0
    return [
        {
            **step.values,
            "kind": kind,
            "requests": list(step.request_ids),
            "n": len(step.request_ids),
            "b": step.values["padded_tokens"],
            "cached_tokens": step.values["admitted"][0][4] if kind == "prefill" else 0,
            "computed_tokens": sum(step.tokens),
        }
        for step, kind in zip(log.cores[0].steps, log.steps["kind"].to_pylist(), strict=True)
    ]


def bucket_lines(run: SealedRun) -> list[tuple[int, int]]:
    """(n, b) of every line that the patch logged."""
    return [(int(n), int(b)) for n, b in BUCKET.findall(run.file("server.log").read_text(encoding="utf-8"))]


def check_observed(run: SealedRun, trace_path: Path) -> Compared:
    """Every record of the observer is what the device and the log say."""
    trace = [json.loads(line) for line in trace_path.read_text(encoding="utf-8").splitlines()]
    steps = observed_steps(run)
    decodes = [row for row in steps if row["kind"] == "decode"]
    calls = [call for call in trace if call["kind"] == "decode"]
    assert [(row["n"], row["b"]) for row in decodes] == [(call["n"], call["b"]) for call in calls]
    assert [(row["n"], row["b"]) for row in decodes] == bucket_lines(run)
    assert unlike_observed(run) == ""
    for row, call in zip(decodes, calls, strict=True):
        _check_times(row, call, call)
        assert call["padding_slot"] in (-1, row["dummy_slot"])
    prefills = [row for row in steps if row["kind"] == "prefill"]
    chunks = [call for call in trace if call["kind"] == "prefill"]
    assert sum(row["device_calls"] for row in prefills) == len(chunks)
    at = 0
    for row in prefills:
        own = chunks[at : at + row["device_calls"]]
        at += row["device_calls"]
        assert sum(call["num_tokens"] for call in own) == row["computed_tokens"]
        assert own[0]["cached_tokens"] == row["cached_tokens"]
        _check_times(row, own[0], own[-1])
    logged = EVICTION.findall(run.file("server.log").read_text(encoding="utf-8"))
    assert [str(slot) for row in steps for slot, _caller in row["evictions"]] == logged
    costs_us = [row["observer_ns"] / 1000 for row in steps[1:]]
    return Compared(len(decodes), len(prefills), len(chunks), len(logged), (median(costs_us), mean(costs_us)))


def _check_times(row: dict[str, Any], first: dict[str, Any], last: dict[str, Any]) -> None:
    """The device was called and done within the step; a paced decode is dated back to when it was due.

    On a host that lags, a decode was due before its step was even scheduled.
    """
    assert row["schedule_ns"] < row["device_end_ns"]
    assert last["end_ns"] <= row["device_end_ns"]
    if first["kind"] != "decode":
        assert row["schedule_ns"] < row["device_start_ns"] <= first["start_ns"] <= row["device_end_ns"]
