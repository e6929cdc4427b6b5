"""A wait distribution from any recording that ``harness trace import`` reads: its waits for tools, as quantiles.

Which tool was waited for is not kept of a recording, so that all of them are one. Waits of nothing are counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tomli_w

from harness.clock import NS_PER_MS
from harness.errors import SpecError
from harness.plan.files import write_atomic
from harness.plan.waits import parse_waits
from harness.spec.base import tomllib
from harness.traces.importing import read_recordings


@dataclass(frozen=True, slots=True)
class RecordedWaits:
    """What was counted: waits for tools of more than nothing, those of nothing, and requests without such a wait."""

    source_format: str
    num_waits: int
    num_zero: int
    num_other: int


def import_recorded_waits(sources: Iterable[Path], output: Path, *, name: str, kind: str = "auto") -> RecordedWaits:
    """Write ``output``, the waits for tools of recorded agents as a distribution.

    Raises SpecError as ``read_recordings`` does, and when no tool was waited for.
    """
    chosen, recordings, notes = read_recordings(sources, kind=kind)
    requests = [one for recording in recordings for one in recording.requests]
    waits_ns = [one.wait_ns for one in requests if one.wait_kind == "tool"]
    waited_ms = np.array([wait_ns / NS_PER_MS for wait_ns in waits_ns if wait_ns > 0])
    if not len(waited_ms):
        raise SpecError(
            f"no tool was waited for in {len(requests)} requests of {chosen}",
            where=name,
            hint="Production traces hold arrivals only; take agent logs, spans or a TraceLab release",
        )
    counted = RecordedWaits(chosen, len(waited_ms), len(waits_ns) - len(waited_ms), len(requests) - len(waits_ns))
    p50, p90, p99 = (float(quantile) for quantile in np.percentile(waited_ms, (50, 90, 99)))
    table = {
        "name": name,
        "description": f"waits for tools of recorded agents ({chosen})",
        "provenance": {
            "format": chosen,
            "files": notes.num_files,
            "waits": counted.num_waits,
            "left_out_zero": counted.num_zero,
            "requests_without_a_tool_wait": counted.num_other,
            "quantiles": "numpy.percentile, linear",
        },
        "waits": {
            "law": "mixture",
            "tool": [{"name": "tools", "calls": counted.num_waits, "p50_ms": p50, "p90_ms": p90, "p99_ms": p99}],
        },
    }
    text = tomli_w.dumps(table)
    parse_waits(tomllib.loads(text), where=str(output))  # Never hand out a file that would be refused.
    write_atomic(output, iter([text.encode()]), what="the wait distribution")
    return counted
