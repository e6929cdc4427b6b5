"""Every parser that reads what somebody else wrote, as data: a name, texts that it accepts, and how it is called.

A target answers with a value or a HarnessError, within seconds, whatever it is given. Nothing is mutated here.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from harness.analysis.logs.glance import glance
from harness.analysis.logs.parse import metrics_table, parse_log
from harness.errors import HarnessError
from harness.extras.cases.cases import simulate_jsonl
from harness.extras.formats.waits import summarise_tracelab
from harness.extras.other_stacks.steps import read_steps, step_tables
from harness.extras.peers.results import peer_side
from harness.extras.search.space import load_space
from harness.judge.prereg.frozen import parse_preregistration, read_frozen
from harness.judge.prereg.ledger import read_chain
from harness.judge.prereg.publish import check
from harness.judge.prereg.repository import Commit
from harness.measure.client.answer import describe_error_body
from harness.measure.emulator.config import load_config, parse_config
from harness.measure.emulator.protocol import ApiError, ChatRequest, CompletionRequest, checked_prompt, parse_request
from harness.measure.records import layout
from harness.measure.records.manifest import Manifest, load_manifest
from harness.measure.records.store import RunStore
from harness.model.engine.cost import load_cost_model
from harness.model.experiment import build_plan
from harness.model.plan.files import read_plan, write_plan
from harness.model.plan.model import Plan
from harness.model.plan.waits import load_waits
from harness.model.spec import WorkloadSpec, load_experiment
from harness.model.spec.changes import override_table, recorded_changes, recorded_command
from harness.model.spec.rules import load_rule
from harness.model.traces.importing import import_trace
from harness.model.traces.lower import Lowering, sessions_of
from harness.model.traces.recording import read_trace
from harness.redact import redacted_text
from harness.stacks.rbln.launch.artifacts import CONFIG_FILE, read_artifact
from harness.stacks.rbln.launch.device_watch import exporter_report
from harness.stacks.rbln.launch.devices import parse_devices
from harness.stacks.rbln.launch.launch_log import read_launch
from harness.stacks.rbln.launch.patch_audit import audit
from harness.stacks.rbln.launch.patches import patched_text
from harness.stacks.rbln.launch.releases import load_table
from harness.stacks.rbln.launch.sources import open_sources
from harness.stacks.vllm.core_steps import COLUMNS, DEVICE_COLUMNS
from harness.stacks.vllm.step_log import read_step_log
from tests.extras.formats.test_swe_agent import trajectory
from tests.model.traces.test_importing_mutated_links import RECORDINGS
from tests.support.checkout import ROOT
from tests.support.readings import drawn_stream, read_in_every_way
from tests.support.sound_traces import SOUND
from tests.support.step_files import SAMPLES

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
    "prefill_chunk_size": 128,
    "_compile_cfgs": [{"compiled_model_name": "decoder_batch_8"}],
}
AT = "2026-01-01T00:00:00+00:00"
ENTRY = {"event": "start", "number": 0, "experiment": "e", "condition": "c", "replicate": 0, "host": "h", "at_utc": AT}
METRICS = '# TYPE a counter\na_total{x="1"} 5.0\nRBLN_DEVICE_STATUS:TEMPERATURE{name="rbln0",uuid="u"} 41.0\n'

_TIMES = {"ttfts": [0.1, 0.2], "itls": [[0.01], [0.02, 0.01]], "latencies": [0.2, 0.3], "errors": ["", ""]}
_REQUEST = {"time_to_first_token_ms": 100.0, "request_latency": 0.3, "output_tokens": 2}
RESULTS = tuple(
    json.dumps(result).encode()
    for result in (
        {**_TIMES, "output_lens": [2, 3], "duration": 1.5},
        {"benchmarks": [{"requests": {"successful": [_REQUEST]}, "duration": 1.5}]},
    )
)


class Target(NamedTuple):
    """One parser. seeds: what it accepts; enter: calls it with a file that holds the bytes.

    dress: gives a changed text the hashes that its writer would have given it, so that it comes past them.
    draw: makes the texts where changed seeds would not do.
    """

    name: str
    seeds: tuple[bytes, ...]
    enter: Callable[[Path], object]
    dress: Callable[[bytes], bytes] | None = None
    draw: Callable[[random.Random], bytes] | None = None


COST = {"f_s": {"1": 0.01, "2": 0.02}, "prefill": {"per_chunk_s": 0.02}}
CONFIG = {"buckets": [1, 2], "limit": 2, "slots": 2, "slot_tokens": 8192}
ASKS = [{"new_tokens": 20, "generate": 3, "wait_s": 0.1}, {"new_tokens": 8, "generate": 2, "wait_s": 0.0}]
CASE = {"id": "a", "sessions": [{"requests": ASKS}, {"after": 0, "requests": ASKS}], "config": CONFIG, "cost": COST}
REQUEST = {
    "model": "m",
    "prompt": [1, 2, 3],
    "max_tokens": 4,
    "stream": True,
    "stream_options": {"include_usage": True},
}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True}
EMULATOR = {"server": {"kv_slots": 16, "decode_buckets": [1, 2, 8]}, "port": 0, "fault": ["crash-after-steps=3"]}
OTHER_DOCUMENTS = {
    "otel": [{"spans": RECORDINGS["otel"]()}],
    "swe-agent": [trajectory(tokens_sent=2700, tokens_received=60, api_calls=3)],
}
TOOL = {"tool_name": "Bash", "tool_internal_latency_ms": 5.5, "tool_wall_latency_ms": 7}
WHEEL = (
    b"vllm_rbln/__init__.py\n\nx = 1\n\nvllm_rbln-0.12.0.dist-info/METADATA\n\n"
    b"Metadata-Version: 2.1\nName: vllm-rbln\nVersion: 0.12.0\nRequires-Dist: vllm==0.30.0\n"
)
STEP = [
    *(0, 1, 2, 3, 4, [0], 20, [[0, "r", 1, 20, 0, 20]], [], [], 1, 0, 0, 5, 1, None, None, None),
    *(1, 2, 1, 1, 0, 3, None, [[1, "c"]], 1, 15, 900),
]
SOURCE = "import logging\nlogger = logging.getLogger(__name__)\ndef f(a, b=1):\n    c = a + b\n    return c\n"
PATCHED = "import logging\na = 1\nb = 2\n"
PATCH = "--- a/f.py\n+++ b/f.py\n@@ -1,3 +1,4 @@\n import logging\n a = 1\n+log.info(a)\n b = 2\n"
SEAL = re.compile(rb'"seal": ?"[^"]*"')


def _shipped(folder: str, pattern: str = "*.toml") -> tuple[bytes, ...]:
    """The smallest shipped files of one kind."""
    files = sorted((PLANS / folder).glob(pattern), key=lambda path: path.stat().st_size)
    return tuple(path.read_bytes()[:20_000] for path in files[:4])


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
    """The bytes as the body of a ledger's first commit."""
    return read_chain([Commit("1" * 40, 0, "0" * 40, _text(path))], "0" * 40)


def _manifest(path: Path) -> object:
    """With everything that others read from a manifest."""
    manifest = load_manifest(path)
    return [getattr(manifest, name) for name, one in vars(Manifest).items() if isinstance(one, property)]


def _resealed(content: bytes) -> bytes:
    """A manifest with the seal that fits it."""
    found = list(SEAL.finditer(content))
    if not found:
        return content
    before, after = content[: found[-1].start()], content[found[-1].end() :]
    seal = hashlib.sha256(before + b'"seal": ""' + after).hexdigest().encode()
    return before + b'"seal": "' + seal + b'"' + after


def _store(path: Path) -> object:
    folder = path.parent / "runs" / "e" / "c" / "0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / layout.MANIFEST).write_bytes(path.read_bytes())
    return RunStore(path.parent / "runs").sealed()


def _glance(path: Path) -> object:
    """The bytes as the log and the scrapes of a run that is going on."""
    content = path.read_bytes()
    for name in (layout.SERVER_LOG, layout.SCRAPES):
        (path.parent / name).write_bytes(content)
    return glance(path.parent)


def _archive() -> bytes:
    """The files of an archive with the names of a published one: name, content, ... between blank lines."""
    names = ("proof.json", "frozen.json", "verdict.json", "runs/e/c/0/manifest.json", "ro-crate-metadata.json")
    return b"\n\n".join(part for name in names for part in (name.encode(), b"{}"))


def _packed(content: bytes) -> bytes:
    """Names and contents as an archive whose checksums fit."""
    parts = content.split(b"\n\n")
    files = {name.decode("utf-8", "replace")[:200]: data for name, data in zip(parts[::2], parts[1::2], strict=False)}
    files["SHA256SUMS"] = "".join(
        f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()
    ).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in files.items():
            archive.writestr(name.replace("\0", "") or "?", data)
    return packed.getvalue()


STATEMENTS = (
    b"select condition, count(*) as n from valid_requests group by all order by n desc limit 3",
    b"explain analyze select sum(num_tokens) over (partition by session) from chunks join requests using (session)",
    b"with x as (from latencies) pivot x on prefix in ('first', 'reused') using avg(ttft_ns)",
    b"copy (select 1 as x) to 'out.csv'; attach 'x.db'; select * from read_text('/dev/zero')",
)


def _queried(path: Path) -> object:
    return RunStore(path.parent / "no-runs").query(_text(path), timeout_s=0.5)


def _plan() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        plan = build_plan(WorkloadSpec(num_sessions=2, requests_per_session=2), 1, 0)
        return write_plan(plan, Path(folder) / "plan.jsonl").read_bytes()


def _asked(kind: Any, path: Path) -> object:
    """A request's body; what the emulator refuses, it answers."""
    try:
        return checked_prompt(parse_request(kind, path.read_bytes(), "application/json"), 8192)
    except ApiError as error:
        return error


def _wheel(path: Path) -> object:
    wheel = path.with_suffix(".whl")
    path.replace(wheel)
    return open_sources(wheel)


def _streams(path: Path) -> object:
    content = path.read_bytes()
    return read_in_every_way(content, random.Random(zlib.crc32(content)))


def _scraped(path: Path) -> object:
    return metrics_table(path.read_bytes().splitlines())


def _launched(path: Path) -> object:
    facts = read_launch(_lines(path), _lines(path), [_text(path)])
    return facts.effective(), facts.report


def _logs() -> tuple[bytes, ...]:
    """Windows of a few lines of each golden log."""
    logs = [path.read_bytes().splitlines(keepends=True) for path in sorted(GOLDEN.glob("*.log"))]
    return tuple(b"".join(lines[at : at + 8]) for lines in logs for at in range(0, len(lines), 8))


def _of_people() -> Iterator[Target]:
    """What people write, or were given by others."""
    yield Target("experiment", _shipped("experiments"), load_experiment)
    yield Target("rule", _shipped("rules"), lambda path: load_rule(str(path)))
    yield Target("cost model", _shipped("costs"), load_cost_model)
    yield Target("waits", _shipped("waits"), lambda path: load_waits(str(path)))
    yield Target("search space", _shipped("spaces"), load_space)
    traces = tuple(b"".join(seed.splitlines(keepends=True)[:8]) for seed in _shipped("traces", "*.jsonl"))
    yield Target("trace file", traces, read_trace)
    yield Target("plan", (_plan(),), read_plan)
    yield Target("simulation cases", _json(CASE), lambda path: list(simulate_jsonl(_lines(path))))
    yield Target(
        "overrides", (b"server.kv_slots=16\nworkload.waits='none'",), lambda path: override_table({}, _lines(path))
    )
    secret = b'--set\nserver.env={HF_TOKEN="S"}\n-H\nA: Bearer x'
    yield Target("command line", (secret,), lambda path: recorded_command(_lines(path)))
    changes = b'server.env={HF_TOKEN="S"}\nserver.kv_slots=16'
    yield Target("changes", (changes,), lambda path: recorded_changes(_lines(path)))
    urls = (b"https://u:p@h/x?token=s --api-key K", b'{"HF_TOKEN": "S", "a": ["Bearer x"]}')
    yield Target("texts with secrets", urls, lambda path: redacted_text(_text(path)))
    yield Target("emulator configuration", _json(EMULATOR), lambda path: parse_config(load_config(path), where="x"))
    yield Target("release facts", _json({"releases": {}, "facts": []}), load_table)
    yield Target("patch", (PATCH.encode(),), lambda path: patched_text(_text(path), "f.py", PATCHED))
    patched = SOURCE.replace("    return c", '    logger.info("c %d", c)\n    return c')
    yield Target("patched source", (patched.encode(),), lambda path: audit(SOURCE, _text(path), where="x"))
    yield Target("release wheel", (WHEEL,), _wheel, _packed)


def _of_servers() -> Iterator[Target]:
    """What servers, devices and their tools say, and what clients ask the emulator."""
    scrape = {"at_ns": 5, "reason": "before", "status": 200, "body": METRICS}
    glanced = {"at_ns": 5, "body": 'vllm:generation_tokens_total{a="b"} 5\nvllm:num_requests_running 2\n'}
    yield Target("server log", _logs(), lambda path: list(parse_log([path.read_bytes()])))
    yield Target("launch log", _logs(), _launched)
    yield Target("log and scrapes of a run that goes on", (*_logs()[:4], *_json(glanced)), _glance)
    yield Target("scrapes", _json(scrape), _scraped)
    yield Target("exporter", (METRICS.encode(),), lambda path: exporter_report(_text(path)))
    yield Target("rbln-smi", _json(SMI), lambda path: parse_devices(_text(path)))
    yield Target("artifact", _json(ARTIFACT), _artifact)
    columns = [*COLUMNS[:-1], *DEVICE_COLUMNS, *COLUMNS[-1:]]
    header = {"vllm_core_steps": 1, "columns": columns, "engine": 0, "effective": {}, "absent": []}
    observed = b"".join(line + b"\n" for line in _json(header, STEP, [1, *STEP[1:]]))
    yield Target("observer", (observed,), lambda path: read_step_log(path.read_bytes()))
    for name, sample in SAMPLES.items():
        yield Target(f"steps, {name}", (sample,), lambda path: step_tables(read_steps(path.read_bytes())))
    yield Target("streams of answers", (drawn_stream(random.Random(1)),), _streams, draw=drawn_stream)
    errors = (b'{"error": {"message": "x", "code": 4}}', b"<html>no</html>")
    yield Target("error body", errors, lambda path: describe_error_body(path.read_bytes()))
    yield Target("completion request", _json(REQUEST), partial(_asked, CompletionRequest))
    yield Target("chat request", _json(CHAT), partial(_asked, ChatRequest))


def _of_records() -> Iterator[Target]:
    """What a run, a freeze or an archive holds."""
    with zipfile.ZipFile(ROOT / "tests/measure/records/sealed/layout-3.zip") as sealed:
        old = sealed.read("tiny/base/0/manifest.json")
    manifest = Manifest(experiment="e", condition="c", replicate=0, plan_hash="p", planned_requests=0)
    yield Target("manifest", (manifest.to_json().encode(), old), _manifest, _resealed)
    yield Target("runs folder", (manifest.to_json().encode(),), _store, _resealed)
    frozen = {"format": "harness-preregistration/1", "name": "x", "digest": "", "experiment": {"name": "x"}}
    yield Target("frozen file", _json(frozen), lambda path: parse_preregistration(read_frozen(path), where=str(path)))
    yield Target("ledger", _json(ENTRY), _chain)
    yield Target("published archive", (_archive(),), check, _packed)
    yield Target("bytes of a published archive", (_packed(_archive()),), check)
    yield Target("query", STATEMENTS, _queried)


def _of_agents() -> Iterator[Target]:
    """A few sessions of every format of recorded agents, with sub-agents where it has them."""
    for kind, sound in SOUND.items():
        seeds = ["\n".join(sound()).encode(), b"\n".join(_json(*RECORDINGS[kind]())) if kind in RECORDINGS else b""]
        seeds += _json(*OTHER_DOCUMENTS.get(kind, ()))
        yield Target(f"recording, {kind}", tuple(filter(None, seeds)), partial(_recording, kind))
    rounds = b"\n".join(_json(*(json.loads(row) | {"tools": [TOOL]} for row in SOUND["tracelab"]())))
    yield Target("latencies of a release", (rounds,), summarise_tracelab)
    yield Target("result of another benchmark", RESULTS, _peer_result)


def _recording(kind: str, path: Path) -> object:
    """All the way to a plan. A file that is refused leaves no trace behind."""
    output = path.with_name("trace.jsonl")
    output.unlink(missing_ok=True)
    try:
        import_trace([path], output, name="t", kind=kind)
    except HarnessError:
        assert not output.exists(), "refused, and half written"
        raise
    trace = read_trace(output)
    sessions, block_tokens, _ = sessions_of(trace.recordings, trace.head.block_tokens, Lowering(), random.Random(1))
    return Plan("trace", 1, 0, "as-drawn", 0, (1000, 150_000), sessions, block_tokens=block_tokens)


def _peer_result(path: Path) -> object:
    """Only files of its suffix are results."""
    named = path.with_name(f"{path.name}.json")
    named.write_bytes(path.read_bytes())
    return peer_side([named])


def targets() -> Iterator[Target]:
    """All of them."""
    yield from (*_of_people(), *_of_servers(), *_of_records(), *_of_agents())
