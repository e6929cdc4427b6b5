"""The measures of runs and conditions as gauges, in two texts: without times, and with the times of the runs.

Names end in their unit, in base units. Every gauge has the label ``origin``: what was simulated or emulated says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.registry import Collector

from harness.analysis.compare.answer import Answer
from harness.analysis.compare.measures import MEASURES, OF_SIMULATIONS, Measure, value_over
from harness.analysis.stats import grouped
from harness.analysis.summary import summarise
from harness.clock import NS_PER_S
from harness.measure.records.run import SealedRun, origin_of
from harness.present.export.formats import Format

NO_ROOM = (
    "requests and steps: a gauge is one figure of a run or of a condition",
    "why a run is INVALID: invalid runs are left out",
)
BOARD = Path(__file__).with_name("grafana.json")
OF_RUN, OF_CONDITION, OF_RATIO = "harness_run_", "harness_condition_", "harness_cost_ratio"
# Ends of column names, and what stands for them in base units: the end, and how many column units make one.
_UNITS = {
    "_s_per_token": ("_seconds_per_token", 1),
    "_per_s": ("_per_second", 1),
    "_per_h": ("_per_second", 3600),
    "_ms": ("_seconds", 1000),
    "_s": ("_seconds", 1),
}
_SERIES = ("experiment", "condition", "backend", "origin")


def metric_name(measure: Measure) -> str:
    """The measure's name with its base unit, without a prefix: ttft_p50_seconds."""
    for end, (unit, _) in _UNITS.items():
        if measure.column.endswith(end):
            return measure.column.removesuffix(end).lower() + unit
    return measure.column.lower()


def metric_value(measure: Measure, runs: Sequence[SealedRun]) -> float | None:
    """The measure over these runs in its base unit; None where a run does not show it."""
    value = value_over(measure, runs)
    per_unit = next((factor for end, (_, factor) in _UNITS.items() if measure.column.endswith(end)), 1)
    return None if value is None else value / per_unit


class RunGauges(Collector):
    """Gauges of sealed runs of one experiment. has_times: each sample has the time at which its last run ended."""

    def __init__(self, runs: Sequence[SealedRun], *, has_times: bool) -> None:
        self._runs, self._has_times = runs, has_times
        self._conditions: Mapping[str, list[SealedRun]] = grouped(runs, lambda run: run.condition)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        count = GaugeMetricFamily(f"{OF_CONDITION}runs", "Valid sealed runs of the condition", labels=_SERIES)
        for runs in self._conditions.values():
            self._add(count, runs, len(runs))
        yield count
        for measure in MEASURES.values():
            # The same figure as B, under the name that simulations have for it.
            if measure.name not in OF_SIMULATIONS:
                yield self._of_runs(measure)
                yield self._of_conditions(measure)
        yield from self._ratios()

    def _of_runs(self, measure: Measure) -> GaugeMetricFamily:
        labels = (*_SERIES, "replicate")
        family = GaugeMetricFamily(f"{OF_RUN}{metric_name(measure)}", f"{_meaning(measure)}, one run", labels=labels)
        for run in self._runs:
            self._add(family, [run], metric_value(measure, [run]), str(run.replicate))
        return family

    def _of_conditions(self, measure: Measure) -> GaugeMetricFamily:
        made = "over its runs" if measure.quantile is None else "mean over runs of each run's quantile"
        meaning = f"{_meaning(measure)}, {made}"
        family = GaugeMetricFamily(f"{OF_CONDITION}{metric_name(measure)}", meaning, labels=_SERIES)
        for runs in self._conditions.values():
            self._add(family, runs, metric_value(measure, runs))
        return family

    def _ratios(self) -> Iterator[GaugeMetricFamily]:
        labels = (*_SERIES, "baseline", "channel", "verdict")
        parts = {
            "": "Cost of the condition over that of its baseline: below 1 is cheaper",
            "_low": "Lower end of the interval of that ratio",
            "_high": "Upper end of the interval of that ratio",
        }
        families = {
            part: GaugeMetricFamily(f"{OF_RATIO}{part}", meaning, labels=labels) for part, meaning in parts.items()
        }
        for answer in summarise(self._runs).answers:
            runs, interval = self._conditions[answer.condition], answer.interval
            of_answer = (answer.baseline, answer.channel.upper(), _verdict(answer))
            self._add(families[""], runs, answer.ratio, *of_answer)
            self._add(families["_low"], runs, None if interval is None else interval.low, *of_answer)
            self._add(families["_high"], runs, None if interval is None else interval.high, *of_answer)
        yield from families.values()

    def _add(self, family: GaugeMetricFamily, runs: Sequence[SealedRun], value: float | None, *more: str) -> None:
        """A sample, unless its value is not known."""
        if value is not None:
            first = runs[0].manifest
            labels = (first.experiment, first.condition, first.kind.name, origin_of(runs), *more)
            family.add_metric(labels, value, max(map(_end_s, runs)) if self._has_times else None)


def _verdict(answer: Answer) -> str:
    """What the ratio shows; empty beside the main channel, where nothing is judged."""
    if not answer.is_main:
        return ""
    return "withheld" if answer.comparison.agreement.is_missing else answer.label


def _meaning(measure: Measure) -> str:
    """The meaning without its unit, which the name has in another size: Median time to first token."""
    meaning = measure.meaning.removesuffix(", ms").removesuffix(", s")
    return meaning[0].upper() + meaning[1:]


def _end_s(run: SealedRun) -> float:
    """When the replay ended, by the wall clock, s since 1970."""
    manifest = run.manifest
    end_ns = manifest.timings.get("replay_end_ns", 0) / manifest.time_scale
    return (end_ns + manifest.clock.realtime_minus_monotonic_ns) / NS_PER_S


def text_of(runs: Sequence[SealedRun]) -> bytes:
    """Prometheus' text format without times, as node_exporter's textfile collector and a push gateway take it."""
    return generate_latest(RunGauges(runs, has_times=False))  # pyright: ignore[reportArgumentType]  # collects alone


def history_of(runs: Sequence[SealedRun]) -> bytes:
    """OpenMetrics with the times of the runs, as ``promtool tsdb create-blocks-from openmetrics`` takes it."""
    return openmetrics(RunGauges(runs, has_times=True))


def board(_runs: Sequence[SealedRun]) -> Any:
    """The Grafana board for these metrics, to be imported as it is."""
    return json.loads(BOARD.read_text(encoding="utf-8"))


FORMAT = Format(
    "prometheus", NO_ROOM, of_all={"metrics.prom": text_of, "openmetrics.txt": history_of, "grafana.json": board}
)
