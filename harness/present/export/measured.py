"""One sealed run as every format takes it: its requests with their latencies, its serving figures, its origin.

All figures are those of ``harness.analysis``. Instants are nanoseconds since 1970: the wall clock at the start of
the replay, and model time from there on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.analysis.serving import Rate, ServingFigures, latencies, requests_in_window, serving_figures, token_chunks
from harness.analysis.stats import quantiles
from harness.clock import NS_PER_S
from harness.measure.records.manifest import table_at
from harness.measure.records.run import SealedRun, origin_of
from harness.measure.records.schema import ABORTED, values_of

# Columns of the requests table that a request has unchanged.
AS_RECORDED = ("session", "request_id", "response_id", "status", "http_status", "finish_reason", "cached_tokens")
LATENCIES = ("ttft_ns", "tpot_ns", "e2e_ns", "queue_ns")
BOUNDS = ("ttft_at_least_ns", "tpot_at_least_ns", "tpot_at_most_ns")
UNIX_NS = "ns since 1970"
PERCENTILES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)


def _column(meaning: str, unit: str = "") -> Any:
    """A field that is also a column of the tables of requests."""
    return field(metadata={"meaning": meaning, "unit": unit})


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRequest:
    """One request that was sent. Latencies in model ns, None where they were not observed.

    Requests outside the measurement window enter no figure.
    """

    session: int = _column("which session of the plan, from 0")
    turn: int = _column("which request of that session, from 0")
    request_id: str = _column("id that the client sent along")
    response_id: str = _column("id that the server answered with")
    status: str = _column("ok or aborted (the client left, as planned)")
    http_status: int | None = _column("status of the response")
    finish_reason: str = _column("why the answer ended, in the server's word")
    trigger_ns: int = _column("end of what it waited for", UNIX_NS)
    due_ns: int = _column("when it should leave", UNIX_NS)
    sent_ns: int = _column("when it left", UNIX_NS)
    head_ns: int | None = _column("head of the response", UNIX_NS)
    done_ns: int = _column("end of the response", UNIX_NS)
    prompt_tokens: int = _column("prompt", "tokens")
    cached_tokens: int | None = _column("reused part of it; null where unknown", "tokens")
    output_tokens: int = _column("generated tokens", "tokens")
    max_tokens: int = _column("answer of the plan", "tokens")
    wait_ns: int = _column("planned tool wait after it", "ns")
    is_in_window: bool = _column("whether it was due in the measurement window")
    prefix: str = _column("first, reused, recomputed or unknown; empty outside the figures")
    ttft_ns: float | None = _column("from sending to its first token", "ns")
    tpot_ns: float | None = _column("mean time between its tokens after the first", "ns")
    e2e_ns: float | None = _column("sent until the end of the response", "ns")
    queue_ns: float | None = _column("from sending to its admission, by the log", "ns")
    ttft_at_least_ns: float | None = _column("ttft_ns if its chunk came as early as it can; null where exact", "ns")
    tpot_at_least_ns: float | None = _column("tpot_ns if its last chunk came as early as it can; null: exact", "ns")
    tpot_at_most_ns: float | None = _column("tpot_ns if its first chunk came as early as it can; null: exact", "ns")
    token_ns: NDArray[np.int64] = _column("instant of each token", UNIX_NS)  # noqa: RUF009  # makes a field
    itl_ns: NDArray[np.float64] = _column("gap before each token after the first", "ns")  # noqa: RUF009  # makes a field

    @property
    def is_answered(self) -> bool:
        return self.status == "ok"

    @property
    def name(self) -> str:
        """ "s3r1": the second turn of the fourth session."""
        return f"s{self.session}r{self.turn}"


@dataclass(frozen=True)
class MeasuredRun:
    """One valid run. requests: by session and turn.

    wall_ns: what is added to an instant of the run, so that it counts from 1970. model, host, port: of the server;
    empty and 0 where none served.
    """

    run: SealedRun
    wall_ns: int
    requests: tuple[MeasuredRequest, ...]
    figures: ServingFigures | None
    model: str
    host: str
    port: int

    @cached_property
    def window(self) -> list[MeasuredRequest]:
        """The requests of the measurement window."""
        return [request for request in self.requests if request.is_in_window]

    @cached_property
    def answered(self) -> list[MeasuredRequest]:
        """Those of the window that the figures are over."""
        return [request for request in self.window if request.is_answered]

    @cached_property
    def left(self) -> list[MeasuredRequest]:
        """Those of the window that the client left, as planned."""
        return [request for request in self.window if not request.is_answered]

    @cached_property
    def start_ns(self) -> int:
        """The first send of the window."""
        return min((request.sent_ns for request in self.window), default=0)

    @cached_property
    def end_ns(self) -> int:
        """The last end of the window."""
        return max((request.done_ns for request in self.window), default=0)

    @property
    def span_s(self) -> float:
        """From the first send to the last end."""
        return (self.end_ns - self.start_ns) / NS_PER_S

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all answered prompts."""
        return sum(request.prompt_tokens for request in self.answered)

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(request.output_tokens for request in self.answered)

    def over_answered(self, name: str, unit: int = 1) -> Summary | None:
        """The summary of an attribute of the answered requests, or of its elements, in this unit."""
        values = [getattr(request, name) for request in self.answered]
        return summary(np.concatenate([np.empty(0), *values]) if name == "itl_ns" else values, unit)

    def rate(self, name: str) -> float | None:
        """The mean of a rate of the serving figures; None where it is not known."""
        rate: Rate | None = getattr(self.figures, name, None)
        return None if rate is None else rate.mean

    @cached_property
    def metadata(self) -> dict[str, str]:
        """What names the run and says where its figures are from."""
        manifest = self.run.manifest
        return {
            "experiment": manifest.experiment,
            "condition": manifest.condition,
            "replicate": str(manifest.replicate),
            "backend": manifest.kind.name,
            "origin": origin_of([self.run]),
            "time_scale": str(manifest.time_scale),
            "plan_hash": manifest.plan_hash,
            "seal": manifest.seal,
            "harness": manifest.packages.get("rbln-harness", ""),
        }


def measured(run: SealedRun) -> MeasuredRun:
    """The run with every request that was sent."""
    launch = table_at(run.manifest.server.facts, "launch")
    start_ns = run.manifest.timings.get("replay_start_ns", 0)
    start_wall_ns = round(start_ns / run.manifest.time_scale) + run.manifest.clock.realtime_minus_monotonic_ns
    return MeasuredRun(
        run=run,
        wall_ns=start_wall_ns - start_ns,
        requests=tuple(_requests(run, start_wall_ns - start_ns)),
        figures=serving_figures(run.condition, [run]),
        model=str(launch.get("model", "")),
        host=str(launch.get("host", "")),
        port=int(launch.get("port", 0) or 0),
    )


def _requests(run: SealedRun, wall_ns: int) -> Iterable[MeasuredRequest]:
    sent = run.table("requests").sort_by([("session", "ascending"), ("request", "ascending")])
    window = set(values_of(requests_in_window(run), "session", "request"))
    known = latencies(run)
    answered = {key: row for row, key in enumerate(zip(known.session.tolist(), known.turn.tolist(), strict=True))}
    gaps = _grouped(known.itl_ns, known.itl_row, len(answered))
    chunks = token_chunks(run, sent)
    row_of_token, at_ns = (np.repeat(values, chunks.num_tokens) for values in (chunks.row, chunks.at_ns))
    tokens = _grouped(at_ns, row_of_token, sent.num_rows)
    for place, row in enumerate(sent.to_pylist()):
        if row["sent_ns"] is None or row["done_ns"] is None:
            continue
        key = (row["session"], row["request"])
        figure = answered.get(key)
        latency: dict[str, Any] = dict.fromkeys((*LATENCIES, *BOUNDS))
        if figure is not None:
            values = [float(getattr(known, name)[figure]) for name in LATENCIES]
            values += [math.nan if known.late is None else float(getattr(known.late, name)[figure]) for name in BOUNDS]
            names = (*LATENCIES, *BOUNDS)
            latency |= {name: value for name, value in zip(names, values, strict=True) if not math.isnan(value)}
        yield MeasuredRequest(
            **{name: row[name] for name in AS_RECORDED},
            **{name: row[name] + wall_ns for name in ("trigger_ns", "due_ns", "sent_ns", "done_ns")},
            **latency,
            turn=row["request"],
            head_ns=None if row["response_head_ns"] is None else row["response_head_ns"] + wall_ns,
            prompt_tokens=row["planned_prompt_tokens"] if row["prompt_tokens"] is None else row["prompt_tokens"],
            output_tokens=len(tokens[place]) if row["status"] == ABORTED else row["completion_tokens"] or 0,
            max_tokens=row["planned_generate_tokens"],
            wait_ns=row["planned_wait_ns"],
            is_in_window=key in window,
            prefix="" if figure is None else str(known.prefix[figure]),
            token_ns=tokens[place] + wall_ns,
            itl_ns=np.empty(0) if figure is None else gaps[figure],
        )


def _grouped(values: NDArray[Any], rows: NDArray[np.int64], num_rows: int) -> list[NDArray[Any]]:
    """The values of each row, in their order."""
    order = np.argsort(rows, kind="stable")
    return np.split(values[order], np.searchsorted(rows[order], np.arange(1, num_rows))) if num_rows else []


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, spread and percentiles of one figure over the requests of a run."""

    count: int
    mean: float
    std: float
    low: float
    high: float
    total: float
    percentiles: dict[float, float]

    def at(self, q: float) -> float:
        return self.percentiles[q]


def in_unit(value_ns: float | None, unit_ns: int) -> float | None:
    """A duration in this unit; None where it was not observed."""
    return None if value_ns is None else value_ns / unit_ns


def summary(values: Iterable[float | None], unit: int = 1) -> Summary | None:
    """The summary of what was observed, in this unit; None where nothing was."""
    known = np.array([value for value in values if value is not None], dtype=np.float64) * (1 / unit)
    if not len(known):
        return None
    return Summary(
        count=len(known),
        mean=float(known.mean()),
        std=float(known.std()),
        low=float(known.min()),
        high=float(known.max()),
        total=float(known.sum()),
        percentiles=dict(zip(PERCENTILES, quantiles(known, PERCENTILES), strict=True)),
    )
