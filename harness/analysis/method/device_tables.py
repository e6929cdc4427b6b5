"""What a fleet's devices gave, as tables: how fast each was, and each comparison on each of them; none with one device.

Values of ``speeds`` and ``compare`` alone, in per cent where they are shares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from harness.analysis.method.compare import Comparison
from harness.analysis.method.devices import DeviceEffect
from harness.analysis.method.speeds import Speeds
from harness.records import FleetRecord, SealedRun
from harness.table import Cell, Table, table_of

SPEEDS_CAPTION = (
    "B over A, conditions' means taken out: how much longer each device took than the median of the others, with its "
    "95 % interval and Holm's p; what each of its replicates adds; devices that were busy beside it, on the mean"
)
EFFECTS_CAPTION = (
    "Cost ratio to the baseline on each device (geometric mean of its blocks), then over all of them with its 95 % "
    "interval; p: that the effect is the same on every device"
)


def device_tables(found: Speeds | None, compared: Mapping[str, Comparison | None]) -> list[Table]:
    """Both tables of an experiment; compared: by condition. Empty where fewer than two devices made it."""
    effects = table_of(
        "effect by device",
        EFFECTS_CAPTION,
        [row for name, one in compared.items() if one is not None for row in _effect_rows(name, one)],
    )
    tables = [*([] if found is None else [table_of("devices", SPEEDS_CAPTION, _speed_rows(found))]), effects]
    return [table for table in tables if table.rows]


def places_table(runs: Iterable[SealedRun]) -> Table:
    """What the runs of each device say of it: serial and card, temperatures, neighbours, cores of its client."""
    by_place: dict[tuple[str, int], list[FleetRecord]] = {}
    for run in runs:
        if (fleet := run.manifest.fleet) is not None:
            by_place.setdefault((fleet.host, fleet.device), []).append(fleet)
    rows = [_place_row(host, device, found) for (host, device), found in sorted(by_place.items())]
    caption = (
        "What its runs say of each device; neighbours: least and most that were busy beside a run; a dash: not told"
    )
    return table_of("what the devices told", caption, rows)


def _place_row(host: str, device: int, found: Sequence[FleetRecord]) -> dict[str, Cell]:
    heat = [degrees for one in found if one.temperature_c is not None for degrees in one.temperature_c]
    busy = [len(one.neighbours) for one in found]
    factors = [one.emulated_factor for one in found if one.emulated_factor is not None]
    return {
        "device": f"dev{device}",
        "host": host,
        "runs": len(found),
        "neighbours": f"{min(busy)} to {max(busy)}",
        "uuid": ", ".join(sorted({one.uuid for one in found} - {""})) or None,
        "card": ", ".join(sorted({one.card for one in found} - {""})) or None,
        "temperature_C": f"{min(heat):g} to {max(heat):g}" if heat else None,
        "client_cores": ",".join(str(core) for core in found[0].client_cores) or None,
        "emulated_factor": f"{min(factors):.4f} to {max(factors):.4f}" if factors else None,
    }


def _speed_rows(found: Speeds) -> Iterator[Mapping[str, Cell]]:
    for one in found.devices:
        slower = [None, None, None] if one.slower is None else [100 * math.expm1(value) for value in one.slower]
        yield {
            "device": one.device,
            "blocks": len(one.values),
            "slower_%": slower[0],
            "low_%": slower[1],
            "high_%": slower[2],
            "p_holm": one.p,
            "drift_%_per_replicate": None if one.drift is None else 100 * math.expm1(one.drift.value),
            "neighbours": one.neighbours,
            "emulated": "yes" if one.is_emulated else "no",
        }


def _effect_rows(condition: str, compared: Comparison) -> Iterator[Mapping[str, Cell]]:
    for channel, effect in (("A", None if compared.a is None else compared.a.devices), ("B", compared.b.devices)):
        if effect is not None:
            yield from _rows_of(f"{condition} / {compared.baseline}", channel, effect)


def _rows_of(comparison: str, channel: str, effect: DeviceEffect) -> Sequence[Mapping[str, Cell]]:
    named: dict[str, Cell] = {"comparison": comparison, "channel": channel}
    rows: list[dict[str, Cell]] = [
        {**named, "device": one.device, "blocks": one.num_blocks, "ratio": math.exp(one.mean)} for one in effect.devices
    ]
    p = None if effect.interaction is None else effect.interaction.p
    for device, estimate in (("all", effect.estimate), ("these alone", effect.these)):
        interval = None if estimate is None else estimate.interval()
        if interval is not None:
            rows.append(
                {
                    **named,
                    "device": device,
                    "blocks": sum(one.num_blocks for one in effect.devices),
                    "ratio": interval.estimate,
                    "low": interval.low,
                    "high": interval.high,
                    "p_interaction": p if device == "all" else None,
                }
            )
    return rows
