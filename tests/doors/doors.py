"""Every parser that reads what somebody else wrote, as data: a name, texts that it accepts, and how it is called.

A door answers with a value or a HarnessError, within seconds, whatever it is given. Nothing is mutated here.
Next: ``__main__`` knocks for as long as it is told; ``test_doors`` knocks a little in every run of the tests.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from harness.analysis.logs.derive import metrics_table
from harness.analysis.logs.parse import parse_log
from harness.engine.cost import load_cost_model
from harness.live.artifacts import CONFIG_FILE, read_artifact
from harness.live.devices.exporter import device_samples, exporter_readings
from harness.live.devices.smi import parse_devices
from harness.live.launch_log import read_launch
from harness.plan import build_plan, read_plan, write_plan
from harness.plan.traces.file import read_trace
from harness.plan.traces.importing import read_recordings
from harness.plan.waits import load_waits
from harness.prereg.frozen import load_preregistration
from harness.prereg.ledger import object_hash, read_chain
from harness.prereg.publish import check
from harness.records import Manifest, RunStore
from harness.records.manifest import load_manifest
from harness.sim.search.space import load_space
from harness.spec import WorkloadSpec, load_experiment
from harness.spec.recorded import recorded_changes, recorded_command
from harness.spec.rules import load_rule
from tests.support.checkout import ROOT
from tests.support.mutated_traces import RECORDS

PLANS = ROOT / "plans"
GOLDEN = ROOT / "tests" / "support" / "golden"
SMI = {
    "KMD_version": "2.0.1",
    "devices": [{"npu": 0, "name": "RBLN-CA25", "device": "rbln0", "uuid": "u", "pci": {"bus_id": "0000:01:00.0"}}],
}
ARTIFACT = {
    "batch_size": 8,
    "decoder_batch_sizes": [1, 2, 4, 8],
    "max_seq_len": 32768,
    "kvcache_num_blocks": 9,
    "kvcache_block_size": 32768,
    "_compile_cfgs": [{"compiled_model_name": "decoder_batch_8"}],
}
ENTRY = {"event": "start", "number": 0, "experiment": "e", "condition": "c", "replicate": 0, "host": "h", "at_utc": "t"}
METRICS = '# TYPE a counter\na_total{x="1"} 5.0\nRBLN_DEVICE_STATUS:TEMPERATURE{name="rbln0",uuid="u"} 41.0\n'


class Door(NamedTuple):
    """One parser. seeds: what it accepts; enter: calls it with a file that holds the bytes."""

    name: str
    seeds: tuple[bytes, ...]
    enter: Callable[[Path], object]


def _shipped(folder: str, pattern: str = "*.toml") -> tuple[bytes, ...]:
    """The smallest shipped files of one kind."""
    files = sorted((PLANS / folder).glob(pattern), key=lambda path: path.stat().st_size)
    return tuple(path.read_bytes()[:20_000] for path in files[:3])


def _json(*values: Any) -> tuple[bytes, ...]:
    return tuple(json.dumps(value).encode() for value in values)


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace")


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _artifact(path: Path) -> object:
    path.with_name(CONFIG_FILE).write_bytes(path.read_bytes())
    return read_artifact(path.parent)


def _chain(path: Path) -> object:
    """The bytes as the first commit of a ledger, by their true name."""
    content = path.read_bytes()
    return read_chain([(object_hash("commit", content, "0" * 40), content)], "0" * 40)


def _store(path: Path) -> object:
    folder = path.parent / "runs" / "e" / "c" / "0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_bytes(path.read_bytes())
    return RunStore(path.parent / "runs").sealed()


def _archive() -> bytes:
    """An archive with the names of a published one."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in ("proof.json", "frozen.json", "verdict.json", "runs/e/c/0/manifest.json"):
            archive.writestr(name, "{}")
        sums = "".join(f"{hashlib.sha256(b'{}').hexdigest()}  {name}\n" for name in archive.namelist())
        archive.writestr("SHA256SUMS", sums)
    return packed.getvalue()


def _plan() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        plan = build_plan(WorkloadSpec(num_sessions=2, requests_per_session=2), 1, 0)
        return write_plan(plan, Path(folder) / "plan.jsonl").read_bytes()


def doors() -> Iterator[Door]:
    """All of them."""
    manifest = Manifest(experiment="e", condition="c", replicate=0, plan_hash="p", planned_requests=0)
    commit = f"tree {'0' * 40}\nparent {'0' * 40}\nauthor a <b> 1 +0000\ncommitter a <b> 1 +0000\n\nstart\n\n"
    logs = tuple(path.read_bytes()[:6000] for path in sorted(GOLDEN.glob("*.log")))
    scrape = {"at_ns": 5, "reason": "before", "status": 200, "body": METRICS}
    yield Door("experiment", _shipped("experiments"), load_experiment)
    yield Door("rule", _shipped("rules"), lambda path: load_rule(str(path)))
    yield Door("cost model", _shipped("costs"), load_cost_model)
    yield Door("waits", _shipped("waits"), lambda path: load_waits(str(path)))
    yield Door("search space", _shipped("spaces"), load_space)
    yield Door(
        "trace file",
        tuple(b"".join(seed.splitlines(keepends=True)[:8]) for seed in _shipped("traces", "*.jsonl")),
        read_trace,
    )
    yield Door("plan", (_plan(),), read_plan)
    yield Door("manifest", (manifest.to_json().encode(),), load_manifest)
    yield Door("runs folder", (manifest.to_json().encode(),), _store)
    yield Door(
        "frozen file", _json({"format": "harness-preregistration/1", "name": "x", "digest": ""}), load_preregistration
    )
    yield Door("ledger", ((commit + json.dumps(ENTRY)).encode(),), _chain)
    yield Door("published archive", (_archive(),), check)
    yield Door("server log", logs, lambda path: list(parse_log([path.read_bytes()])))
    yield Door("launch log", logs, lambda path: read_launch(_lines(path), _lines(path), [_text(path)]))
    yield Door("scrapes", _json(scrape), lambda path: metrics_table(path.read_bytes().splitlines()))
    yield Door("exporter", (METRICS.encode(),), lambda path: exporter_readings(device_samples(_text(path))))
    yield Door("rbln-smi", _json(SMI), lambda path: parse_devices(_text(path)))
    yield Door("artifact", _json(ARTIFACT), _artifact)
    yield Door(
        "command line",
        (b'--set\nserver.env={HF_TOKEN="S"}\n-H\nA: Bearer x',),
        lambda path: recorded_command(_lines(path)),
    )
    yield Door(
        "changes", (b'server.env={HF_TOKEN="S"}\nserver.kv_slots=16',), lambda path: recorded_changes(_lines(path))
    )
    for kind, seed in _recordings().items():
        yield Door(f"recording, {kind}", (seed,), partial(_recording, kind))


def _recording(kind: str, path: Path) -> object:
    return read_recordings([path], kind=kind)


def _recordings() -> dict[str, bytes]:
    """A few lines of every format of recorded agents."""
    lines = {kind: [make(at) for at in range(6)] for kind, make in RECORDS.items() if kind not in ("csv", "otel")}
    return {kind: b"\n".join(json.dumps(one).encode() for one in records) for kind, records in lines.items()}
