"""What configurations take before and besides their runs: compile time, sizes, device memory (Tables XIV and XV).

Layout only. Source: the paper, 5-5, "Compile Cost and Memory Usage".
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from harness.sim.search.space import Candidate, DeviceSpec
from harness.stack.rbln.compile import list_artifacts
from harness.study.paper_sums import loaded_memory_gib
from harness.study.paper_tables.cells import NONE, decimals, text
from harness.study.paper_tables.source import NotRunError, Source
from harness.study.paper_tables.table import Rows

SATURATION_SLOTS = (16, 24, 32)
GIB = 1 << 30
# Only a host that can compile for the NPU has this package; the twin's stand-in has not.
COMPILER = "rebel-compiler"


def compile_cost(source: Source) -> Rows:
    made = list_artifacts(source.artifacts) if source.artifacts is not None else []
    if not made:
        raise NotRunError("harness compile (on a host with the NPU's compiler), then harness tables --artifacts FOLDER")
    return [
        (
            _compiled_as(folder.name, record.get("spec", {})),
            text(len(record.get("spec", {}).get("decoder_batch_sizes", ()))),
            f"{decimals(record.get('seconds'), 0)} s",
            f"{decimals(int(record.get('size_bytes', 0)) / GIB, 3)} GiB",
        )
        for folder, record in made
    ]


def _compiled_as(name: str, spec: Mapping[str, Any]) -> str:
    buckets = ",".join(str(bucket) for bucket in sorted(spec.get("decoder_batch_sizes", ())))
    return f"Slot {spec.get('kvcache_num_blocks') or spec.get('batch_size')}, {{{buckets}}} ({name})"


def who_compiled(source: Source) -> str:
    """Whether the NPU's compiler made the artifacts of Table XIV."""
    made = [] if source.artifacts is None else list_artifacts(source.artifacts)
    records = [record for _folder, record in made]
    num_stand_ins = sum(COMPILER not in record.get("versions", {}) for record in records)
    if num_stand_ins:
        return (
            f"No NPU compiler was run for {num_stand_ins} of {len(records)} artifacts: stand-ins of the twin, whose "
            "time and size say nothing of a device."
        )
    return "As the artifacts' own records say."


@cache
def _device() -> DeviceSpec:
    return DeviceSpec()


def memory(source: Source) -> Rows:
    found: list[tuple[str, ...]] = []
    for slots in SATURATION_SLOTS:
        candidate = Candidate(slots, (1, 4, 6, 8, 10, slots), slots, 8192)
        kv_gib = _device().memory_gib(candidate) - _device().overhead_gib
        found.append((str(slots), f"{kv_gib:.2f} GiB", _loaded(source, slots)))
    return found


def _loaded(source: Source, slots: int) -> str:
    runs = source.runs("saturation") if source.has("saturation") else []
    spans = [loaded_memory_gib(run) for run in runs if run.server.num_kv_slots == slots]
    known = [span for span in spans if span is not None]
    return f"{min(low for low, _ in known):.1f}-{max(high for _, high in known):.1f} GiB" if known else NONE
