"""Sealed runs for tests of reports and exports: simulated ones, sealed again as a test wants them.

The product's own simulator makes their tables; changed are facts of the manifest, and what a server or client may lack.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harness.measure.records import layout
from harness.measure.records.disk import known_entry
from harness.measure.records.manifest import Finding
from harness.measure.records.run import SealedRun
from harness.measure.records.writer import RunWriter
from harness.model.spec import ExperimentSpec
from harness.runner import run_experiment

MS = 1_000_000
START_NS = 5_000_000_000
LATEST_SEND_US = 90


@dataclass
class Shape:
    """What a run looks like. waits: whether there are tool waits. slowdown: of all instants, not of the modelled steps.

    manifest: facts of its manifest that replace others; files: further files, by name.
    """

    experiment: str = "demo"
    title: str = "Bucket intervention at N=6: {1,2,4,8} against {1,2,4,6,8}"
    condition: str = "base-waits"
    replicate: int = 0
    baseline: str = "base-waits"
    num_sessions: int = 6
    num_requests: int = 2
    buckets: tuple[int, ...] = (1, 2, 4, 8)
    waits: bool = True
    time_scale: float = 4.0
    backend: str = "emulator"
    has_chunks: bool = True
    has_audit: bool = True
    has_steps: bool = True
    states_reuse: bool = True
    slowdown: int = 1
    fails: bool = False
    invalid_reasons: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    manifest: dict[str, Any] = field(default_factory=dict[str, Any])
    files: dict[str, str] = field(default_factory=dict[str, str])


@cache
def _simulated(num_sessions: int, num_requests: int, buckets: tuple[int, ...], waits: bool) -> tuple[SealedRun, ...]:
    """Three replicates, whose files last as long as the process."""
    workload = {"num_sessions": num_sessions, "requests_per_session": num_requests, "waits": "tracelab-v0.0.2"}
    treatment = "as-drawn" if waits else "no-waits"
    table: dict[str, Any] = {
        "name": "demo",
        "question": "Does a fitting bucket pay?",
        "backend": "sim",
        "replicates": 3,
        "base_seed": 20260101,
        "workload": workload,
        "server": {"max_num_seqs": buckets[-1]},
        "condition": [{"name": "only", "treatment": treatment, "server": {"decode_buckets": buckets}}],
    }
    folder = Path(tempfile.mkdtemp(prefix="report-runs-"))
    atexit.register(shutil.rmtree, folder)
    return run_experiment(ExperimentSpec.model_validate(table), runs_root=folder).require_valid().runs


def seal_run(root: Path, shape: Shape | None = None) -> SealedRun:
    """Write and seal one run of ``shape``."""
    shape = shape or Shape()
    run = _simulated(shape.num_sessions, shape.num_requests, shape.buckets, shape.waits)[shape.replicate]
    requests = _requests(run, shape)
    writer = RunWriter(root, shape.experiment, shape.condition, shape.replicate, requests.num_rows)
    with writer:
        writer.write("requests", requests)
        if shape.has_chunks:
            writer.write("chunks", _moved(run.table("chunks"), shape))
        if shape.has_steps:
            for name in ("steps", "kv_events"):
                writer.write(name, _moved(run.table(name), shape))
        for name, text in shape.files.items():
            (writer.folder / name).write_text(text)
        return writer.seal(_manifest(run, requests, shape), shape.invalid_reasons)


def seal_demo(root: Path, *, num_replicates: int = 3, **changes: Any) -> list[SealedRun]:
    """Four conditions, as the demo has them: two grids, with tool waits and without."""
    runs: list[SealedRun] = []
    for replicate in range(num_replicates):
        for waits in (True, False):
            for grid, buckets in (("base", (1, 2, 4, 8)), ("bucket6", (1, 2, 4, 6, 8))):
                condition = f"{grid}-{'waits' if waits else 'nowaits'}"
                baseline = "base-nowaits" if condition == "bucket6-nowaits" else "base-waits"
                facts = {"condition": condition, "replicate": replicate, "baseline": baseline}
                runs.append(seal_run(root, Shape(**facts, buckets=buckets, waits=waits, **changes)))
    return runs


def _moved(table: pa.Table, shape: Shape) -> pa.Table:
    """With instants as of a run that began at ``START_NS``."""
    for place, name in enumerate(table.column_names):
        if name.endswith("_ns") and not name.startswith("planned"):
            instants = [ns if ns is None else START_NS + ns * shape.slowdown for ns in table[name].to_pylist()]
            table = table.set_column(place, table.schema.field(name), pa.array(instants, pa.int64()))
    return table


def _requests(run: SealedRun, shape: Shape) -> pa.Table:
    table = _moved(run.table("requests"), shape)
    rng = np.random.default_rng(shape.replicate)
    rows = table.to_pylist()
    for row, late_us in zip(rows, rng.integers(1, LATEST_SEND_US, len(rows)).tolist(), strict=True):
        row["sent_ns"] += late_us * 1000
        row["cached_tokens"] = row["cached_tokens"] if shape.states_reuse else None
    if shape.fails:
        failed = {"status": "http_error", "http_status": 500, "error": "HTTP 500", "completion_tokens": None}
        rows[-1].update(failed, response_head_ns=None)
    return pa.Table.from_pylist(rows, schema=table.schema)


def _manifest(run: SealedRun, requests: pa.Table, shape: Shape) -> dict[str, Any]:
    simulated = run.manifest
    audit: dict[str, Any] = {"client": "epoll", "stream": True, "num_early_sends": 0}
    if shape.has_audit:
        audit |= {
            "cpu_s": 0.41,
            "cpu_others_s": 1.25,
            "num_stalls": 1,
            "stall_max_ms": 2.3,
            "stall_intervals_ns": [[requests["sent_ns"][0].as_py() - MS, 2 * MS]],
            "self_audit": {"floor_rearrival_lag_ms": [0.02, 0.03, 0.03, 0.05, 0.09]},
        }
    # How many conditions are compared, the runs of a test say.
    experiment = simulated.requested["experiment"] | {"name": shape.experiment, "title": shape.title, "condition": []}
    facts: dict[str, Any] = {
        "baseline": shape.baseline,
        "backend": shape.backend,
        "plan_hash": simulated.plan_hash,
        "drawn_hash": simulated.drawn_hash,
        "treatment": simulated.treatment,
        "findings": shape.findings,
        "requested": simulated.requested | {"experiment": experiment, "spec_source": "plans/experiments/demo.toml"},
        "clock": {"scale": shape.time_scale},
        "client_audit": audit,
        "provenance": {
            "argv": ["harness", "run", "plans/experiments/demo.toml"],
            "host": {"cpu_model": "x86", "cpu_count": 2},
            "packages": {"rbln-harness": "0.1.0"},
        },
        "timings": {"replay_start_ns": START_NS, "replay_end_ns": max(requests["done_ns"].to_pylist())},
    }
    return facts | shape.manifest


def as_sealed(run: SealedRun, folder: Path) -> SealedRun:
    """``run`` with the files of ``folder`` for its own; nothing is written."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    listed = [name for name in names if name != layout.MANIFEST and not name.startswith(layout.DERIVED)]
    files = {name: known_entry(folder / name) for name in listed}
    return replace(run, path=folder, manifest=run.manifest.model_copy(update={"files": files}))
