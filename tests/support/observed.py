"""Holds what was observed of a run to the stand-in device's own trace and to the server's log, step for step."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from harness.analysis.logs.engine_steps import observed_log, unlike_observed
from harness.measure.records.run import SealedRun

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
