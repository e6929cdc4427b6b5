"""Neighbours and duets: what busy devices beside one cost it, and what exchanging conditions between devices cancels.

Channel B throughout: channel A prices steps by a model that knows of no neighbour. Nothing is decided here.
Definitions: docs/device-factor.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from harness.analysis.catalogue import Analysis, Rows, of_tables, table
from harness.analysis.catalogue.costs import cost_table
from harness.analysis.decisions.verdicts import ExperimentRuns
from harness.table import Cell

AT_ONCE = "the blocks of a round ran at once by plan: a round is one datum, whatever the number of its devices"


@table(
    "neighbours",
    "Channel B beside so many busy neighbours against the same plan alone; all: with a 95 % t interval over rounds",
)
def neighbours_table(experiment: ExperimentRuns) -> Rows:
    """One row per condition and device, and one over all: how much longer with so many busy neighbours than alone."""
    for condition, baseline in experiment.compared():
        compared = experiment.compare(condition, baseline)
        if compared is None or compared.b.devices is None:
            continue
        busy = float(np.mean([run.neighbours for run in experiment.figures(condition)]))
        named: dict[str, Cell] = {"condition": condition, "neighbours": busy}
        for one in compared.b.devices.devices:
            yield {**named, "device": one.device, "blocks": one.num_blocks, "longer_%": 100 * math.expm1(one.mean)}
        if compared.b.devices.estimate is not None:
            interval = compared.b.devices.estimate.interval(lambda value: 100 * math.expm1(value))
            ends = {"longer_%": interval.estimate, "low_%": interval.low, "high_%": interval.high}
            yield {**named, "device": "all", "blocks": len(compared.replicates), **ends}


@table(
    "duets",
    "100 ln of channel B over the baseline's on each device, and its mean over devices that exchanged conditions "
    "at once; sd: over rounds. The mean scatters less than its parts where they shared a host's noise",
)
def duet_table(experiment: ExperimentRuns) -> Rows:
    """One row per round: the effect on each device, and their mean, in which the host's noise of a period cancels."""
    for condition, baseline in experiment.compared():
        rounds: dict[int, dict[str, float]] = {}
        for own, base in experiment.pairs(condition, baseline):
            rounds.setdefault(own.unit, {})[own.device] = 100 * math.log(own.b_ns / base.b_ns)
        columns: dict[str, list[float]] = {}
        for number, by_device in sorted(rounds.items()):
            changes = {**by_device, "mean": float(np.mean(list(by_device.values())))}
            for name, value in changes.items():
                columns.setdefault(name, []).append(value)
            yield {"condition": condition, "round": number, **_percent(changes)}
        if len(rounds) > 1:
            sds = {name: float(np.std(values, ddof=1)) for name, values in columns.items()}
            yield {"condition": condition, "round": "sd", **_percent(sds)}


def _percent(values: Mapping[str, float]) -> dict[str, Cell]:
    return {f"{name}_%": value for name, value in values.items()}


ANALYSES = (
    Analysis(
        "neighbours",
        "what busy devices of the same host cost a device",
        of_tables(neighbours_table, cost_table, notes=(AT_ONCE,)),
    ),
    Analysis(
        "duet",
        "two conditions at once on two devices that then change places",
        of_tables(duet_table, cost_table, notes=(AT_ONCE,)),
    ),
)
