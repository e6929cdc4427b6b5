"""What a server said about itself: settings in force, read back from its log and its metrics, and its own step timings.

Requested and effective are kept apart; where they differ, a Finding makes the run INVALID. Lines that are not there are
absent, never guessed. Next: the runner puts the facts into the manifest and the findings beside the invariants.
Source: vllm 0.22.0, vllm-rbln 0.11.1 (converter/from_optimum.py, v1/worker/metrics.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from harness.records import Finding

_UPDATE = re.compile(r"Updating (\w+\.\w+) from (\S+) to (\S+) based on rbln_config\.json")
_CONFIG = re.compile(r"\b(max_seq_len|enable_prefix_caching|tensor_parallel_size|pipeline_parallel_size)=(\w+)")
_VERSION = re.compile(r"vLLM server version (\S+?),")
_POOL = re.compile(r"KV cache size: ([\d,]+) tokens")
_ENGINE = "Initializing a V1 LLM engine"
_OBSERVER = "[OBSERVER] "
# The API server outlives its engine core for a while and answers every request with an error.
_ENGINE_DEAD = "EngineDeadError: "
# From vLLM 0.30 on it also says so of an engine core that it has just stopped itself.
_STOPPED = "[shutdown] MPClient: engine manager stopped"
_FATAL = re.compile(r"^\(EngineCore[^)]*\) (?:[\w.]+(?:Error|Exception): .*)$")
_TITLE = re.compile(r"FINAL PERFORMANCE STATISTICS(?: \[(\w+)\])?\s*$")
_PHASE = re.compile(r"\b(PREFILL|PADDED DECODE|DECODE) METRICS:(?: (No data) recorded)?")
_CALLS = re.compile(r"  Total call counts: (\d+)")
_LATENCY = re.compile(r"  Latency \(ms\): (mean .*)$")
_AVERAGE = re.compile(r"  Average (host|device|ccl|prepare) time: ([\d.]+) us")


@dataclass(slots=True)
class LaunchFacts:
    """settings: last value of each setting the server said to have changed. engine: from its first configuration line.

    cache: labels of vllm:cache_config_info. pool_tokens: of the whole KV pool, vLLM's null block included.
    device_metrics: tracker ("MODEL", "SAMPLER") -> phase -> numbers; latencies in ms, averages in us. observer: the
    observer's own lines. engine_error: the last exception that the engine core itself named.
    is_stopped: the API server has ended its engine core, as asked.
    """

    settings: dict[str, str] = field(default_factory=dict[str, str])
    engine: dict[str, str] = field(default_factory=dict[str, str])
    cache: dict[str, str] = field(default_factory=dict[str, str])
    version: str = ""
    pool_tokens: int | None = None
    device_metrics: dict[str, dict[str, dict[str, float]]] = field(
        default_factory=dict[str, "dict[str, dict[str, float]]"]
    )
    observer: list[str] = field(default_factory=list[str])
    engine_error: str = ""
    is_engine_dead: bool = False
    is_stopped: bool = False

    @property
    def effective(self) -> dict[str, Any]:
        """Keys of a ServerSpec with the values in force; a key that nothing told of is absent."""
        found: dict[str, Any] = {}
        if (limit := self.settings.get("scheduler_config.max_num_seqs")) is not None:
            found["max_num_seqs"] = int(limit)
        if (length := self.engine.get("max_seq_len")) is not None:
            found["slot_tokens"] = int(length)
        if (caching := self.engine.get("enable_prefix_caching")) is not None:
            found["prefix_caching"] = caching == "True"
        if (slots := self._num_slots(found.get("slot_tokens"))) is not None:
            found["usable_kv_slots"] = slots
        return found

    def _num_slots(self, slot_tokens: int | None) -> int | None:
        """Slots that the pool hands out: ceil((blocks - 1) / blocks of a slot); eager attention only.

        blocks: from the engine's own line. The gauge's num_gpu_blocks is twice that for an artifact, because the API
        server adds what the engine core reports to what it had read from the artifact already (vllm 0.22.0).
        """
        block_tokens = self.cache.get("block_size", "")
        if self.pool_tokens is None or slot_tokens is None or not block_tokens.isdigit():
            return None
        blocks = self.pool_tokens // int(block_tokens)
        return math.ceil((blocks - 1) / max(1, slot_tokens // int(block_tokens)))

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "engine": self.engine,
            "cache_config_info": self.cache,
            "vllm": self.version,
            "pool_tokens": self.pool_tokens,
            "device_metrics": self.device_metrics,
            "observer": self.observer,
        }


def read_launch(log: Iterable[str], scrapes: Iterable[str] = ()) -> LaunchFacts:
    """The facts in a server's log lines and in the lines of scrapes.jsonl."""
    facts = LaunchFacts()
    tracker, phase = "", ""
    for line in log:
        if match := _UPDATE.search(line):
            facts.settings[match[1]] = match[3]
        elif _ENGINE in line and not facts.engine:
            facts.engine = dict(_CONFIG.findall(line))
        elif (match := _VERSION.search(line)) and not facts.version:
            facts.version = match[1]
        elif match := _POOL.search(line):
            facts.pool_tokens = int(match[1].replace(",", ""))
        elif _STOPPED in line:
            facts.is_stopped = True
        elif _ENGINE_DEAD in line and not facts.is_stopped:
            facts.is_engine_dead = True
        elif match := _FATAL.match(line):
            facts.engine_error = line.strip()
        elif _OBSERVER in line:
            facts.observer.append(line[line.index(_OBSERVER) :].strip())
        elif match := _TITLE.search(line):
            tracker, phase = match[1] or "all", ""
            facts.device_metrics.setdefault(tracker, {})
        elif tracker:
            phase = _read_metric(line, facts.device_metrics[tracker], phase)
    facts.cache = _cache_info(scrapes)
    return facts


def _read_metric(line: str, phases: dict[str, dict[str, float]], phase: str) -> str:
    """Take one line of the final statistics in; the phase that the next lines are about."""
    if match := _PHASE.search(line):
        phase = match[1].lower()
        phases[phase] = {"calls": 0.0} if match[2] else {}
    elif phase and (match := _CALLS.search(line)):
        phases[phase]["calls"] = float(match[1])
    elif phase and (match := _LATENCY.search(line)):
        for part in match[1].split(" | "):
            name, value = part.split()
            phases[phase][f"{name}_ms"] = float(value)
    elif phase and (match := _AVERAGE.search(line)):
        phases[phase][f"{match[1]}_us"] = float(match[2])
    return phase


def _cache_info(scrapes: Iterable[str]) -> dict[str, str]:
    """Labels of vllm:cache_config_info in the first scrape that has it."""
    for line in scrapes:
        try:
            body = str(json.loads(line).get("body", ""))
        except ValueError:
            continue
        if "vllm:cache_config_info" not in body:
            continue
        only = "\n".join(one for one in body.splitlines() if "cache_config_info" in one) + "\n"
        for family in text_string_to_metric_families(only):
            for sample in family.samples:
                return {key: str(value) for key, value in sample.labels.items()}
    return {}


def launch_findings(requested: Mapping[str, Any], facts: LaunchFacts, *, needs_observer: bool) -> list[Finding]:
    """Differences between what was asked for and what is in force, each INVALID.

    requested: a dumped ServerSpec. A setting that the server never told is a warning, because it cannot be compared.
    """
    effective = facts.effective
    limit = int(requested["max_num_seqs"])
    slots = int(requested["kv_slots"] or limit)
    # Below the limit one slot is set aside for padding for good.
    expected: dict[str, Any] = {
        "max_num_seqs": limit,
        "slot_tokens": int(requested["slot_tokens"]),
        "prefix_caching": bool(requested["prefix_caching"]),
        "usable_kv_slots": slots if slots >= limit else slots - 1,
    }
    findings = [
        Finding(
            code="setting-differs",
            severity="invalid",
            evidence=f"{key}: requested {wanted}, in force {effective[key]}",
            hint="Change [server] or the artifact so that they agree",
        )
        for key, wanted in expected.items()
        if key in effective and effective[key] != wanted
    ]
    if untold := sorted(expected.keys() - effective.keys()):
        findings.append(
            Finding(
                code="setting-unknown",
                severity="warning",
                evidence=f"the server never told {', '.join(untold)}",
                hint="Check that INFO lines of vllm and vllm_rbln are in server.log",
            )
        )
    if facts.is_engine_dead:
        findings.insert(
            0,
            Finding(
                code="engine-died",
                severity="invalid",
                evidence=facts.engine_error or "the engine core ended during the run and said nothing",
                hint="Read server.log where the first EngineDeadError stands",
            ),
        )
    said = " ".join(facts.observer)
    if needs_observer and ("one record per step" not in said or "stopped after" in said):
        findings.append(
            Finding(
                code="observer-off",
                severity="invalid",
                evidence=said or "the observer never said that it is on",
                hint="Set server.observer = false to measure without it",
            )
        )
    return findings


def read_launch_files(folder: Path) -> LaunchFacts:
    """``read_launch`` of a run's folder; files that are not there give no facts."""
    return read_launch(_lines(folder / "server.log"), _lines(folder / "scrapes.jsonl"))


def _lines(path: Path) -> Iterable[str]:
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from file
