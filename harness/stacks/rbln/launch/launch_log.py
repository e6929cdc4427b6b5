"""Settings in force and step timings, as a server's log and metrics show them.

Requested and effective settings are kept apart; where they differ, a Finding makes the run INVALID. Values of missing
lines are absent, never guessed.
Source: vllm 0.22.0 to 0.31.0; vllm-rbln 0.11.1 to 0.12.1a8 (converter/from_optimum.py, v1/worker/metrics.py, and
v1/metrics/performance.py from 0.12.1 on).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.measure.records import layout
from harness.measure.records.findings import finding
from harness.measure.records.manifest import DeviceMetrics, Finding, LaunchReport
from harness.stacks.rbln.rules.kv_rules import AUTO, RuleSet

_UPDATE = re.compile(r"Updating (\w+\.\w+) from (\S+) to (\S+) based on rbln_config\.json")
_CONFIG = re.compile(r"\b(max_seq_len|enable_prefix_caching|tensor_parallel_size|pipeline_parallel_size)=(\w+)")
# vLLM 0.30 prints its version in a logo; the engine's line has it in every release.
_VERSION = re.compile(r"(?:vLLM server version |V1 LLM engine \(v)([\w.+]+)[,)]")
_POOL = re.compile(r"KV cache size: (\d[\d,]{0,20}) tokens")
_ENGINE = "Initializing a V1 LLM engine"
_OBSERVER = "[CORE STEPS] "
# The API server outlives its engine core for a while and answers every request with an error.
_ENGINE_DEAD = "EngineDeadError: "
# vLLM 0.30 and later log the same about an engine core that they stop themselves.
_STOPPED = "[shutdown] MPClient: engine manager stopped"
_FATAL = re.compile(r"^\(EngineCore[^)]*\) (?:[\w.]+(?:Error|Exception): .*)$")
_TITLE = re.compile(r"\bPERFORMANCE STATISTICS(?: \[([^\]]+)\])?\s*$")
_PHASE = re.compile(
    r"(?:(MODEL \+ SAMPLE|E2E) \()?\b(PREFILL|PADDED DECODE|DECODE)\)? METRICS:(?: (No data) recorded)?"
)
_CALLS = re.compile(r"  Total call counts *: (\d{1,18})\s*$")
_LATENCY = re.compile(r"  Latency \(ms\): (mean .*)$")
_ONE_LATENCY = re.compile(r"  (Mean|Median|P\d+) latency \(ms\) *: (\d{1,18}\.\d+)\s*$")
_AVERAGE = re.compile(r"  Average (host|device|ccl|prepare) time: (\d{1,18}(?:\.\d+)?) us")
CACHE_INFO = "vllm:cache_config_info"
EMULATOR_INFO = "emulator:config_info"
_STATISTIC = re.compile(r"(mean|p\d+|max) (\d{1,18}(?:\.\d+)?)")


@dataclass(slots=True)
class LaunchFacts:
    """Facts for the manifest (see LaunchReport), and facts that only judge the run.

    unread: lines of statistics in an unknown form. engine_error: the last exception that the engine core logged.
    is_stopped: the API server has ended its engine core, as requested. emulator: settings of an emulated engine.
    """

    settings: dict[str, str] = field(default_factory=dict[str, str])
    engine: dict[str, str] = field(default_factory=dict[str, str])
    cache: dict[str, str] = field(default_factory=dict[str, str])
    emulator: dict[str, Any] = field(default_factory=dict[str, Any])
    version: str = ""
    pool_tokens: int | None = None
    device_metrics: DeviceMetrics = field(default_factory=DeviceMetrics)
    observer: list[str] = field(default_factory=list[str])
    unread: list[str] = field(default_factory=list[str])
    engine_error: str = ""
    is_engine_dead: bool = False
    is_stopped: bool = False

    def effective(self, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Keys of a ServerSpec with the values in force; a key without evidence is absent.

        known: values known from other sources than log and metrics.
        """
        values: dict[str, Any] = {**self.emulator, **(known or {})}
        if (limit := _count(self.settings.get("scheduler_config.max_num_seqs"))) is not None:
            values["max_num_seqs"] = limit
        if (length := _count(self.engine.get("max_seq_len"))) is not None:
            values["slot_tokens"] = length
        caching = self.engine.get("enable_prefix_caching", self.cache.get("enable_prefix_caching"))
        if caching in ("True", "False"):
            values["prefix_caching"] = caching == "True"
        region_tokens = values.get("partition_tokens") or values.get("slot_tokens")
        if (slots := self._num_slots(region_tokens)) is not None:
            values["usable_kv_slots"] = slots
        return values

    def _num_slots(self, region_tokens: int | None) -> int | None:
        """Usable slots of the pool: ceil((blocks - 1) / blocks of a slot). region_tokens: tokens of a slot.

        blocks: from the engine's log line, or from the gauge's size in tokens (vllm 0.30 on). The gauge's
        num_gpu_blocks is twice that for an artifact, because the API server adds the engine core's number to the number
        that it had read from the artifact (vllm 0.22.0).
        """
        block_tokens = _count(self.cache.get("block_size"))
        pool_tokens = self.pool_tokens or _count(self.cache.get("kv_cache_size_tokens"))
        if pool_tokens is None or region_tokens is None or block_tokens is None:
            return None
        return -(-(pool_tokens // block_tokens - 1) // max(1, region_tokens // block_tokens))

    def paged(self, requested_blocks: int | None = None) -> dict[str, int]:
        """Blocks of paged KV memory, as the metrics show them: or those of the tokens that the server states.

        So it does for hybrid models, whose kinds of layers share blocks. requested_blocks: kept where it is the number.
        """
        shown = {key: _count(self.cache.get(key)) for key in ("num_gpu_blocks", "block_size")}
        counts = {key: count for key, count in shown.items() if count is not None}
        blocks, tokens = counts.get("num_gpu_blocks"), _count(self.cache.get("kv_cache_size_tokens"))
        if blocks is not None and tokens is not None and requested_blocks != blocks and "block_size" in counts:
            counts["num_gpu_blocks"] = min(blocks, tokens // counts["block_size"] + 1)
        return counts

    @property
    def memory(self) -> dict[str, str]:
        """What the metrics show of KV memory that equal servers have alike; blocks are counted by what was free."""
        return {key: self.cache[key] for key in ("block_size", "cache_dtype") if key in self.cache}

    @property
    def report(self) -> LaunchReport:
        """The part for the manifest."""
        return LaunchReport(
            settings=self.settings,
            engine=self.engine,
            cache_config_info=self.cache,
            vllm=self.version,
            pool_tokens=self.pool_tokens,
            device_metrics=self.device_metrics,
            observer=tuple(self.observer),
            is_emulator=bool(self.emulator),
        )


def _count(text: str | None) -> int | None:
    """A positive number in digits; None for any other text."""
    return int(text) if text and len(text) < 19 and text.isascii() and text.isdigit() and int(text) else None


def read_launch(log: Iterable[str], scrapes: Iterable[str] = (), reports: Iterable[str] = ()) -> LaunchFacts:  # noqa: C901, PLR0912  # one branch per kind of line
    """The facts in a server's log lines, in the lines of scrapes.jsonl, and in its JSON reports of step statistics."""
    facts = LaunchFacts()
    statistics = _Statistics(facts)
    for line in log:
        if "[PFX] " in line or "[BUCKET] " in line:
            continue  # most lines of a long log; not read here
        if match := _UPDATE.search(line):
            facts.settings[match[1]] = match[3]
        elif _ENGINE in line and not facts.engine:
            facts.engine = dict(_CONFIG.findall(line))
            facts.version = facts.version or next(iter(_VERSION.findall(line)), "")
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
        else:
            statistics.take(line)
    for report in reports:
        _read_report(report, facts)
    for line in scrapes:
        if CACHE_INFO in line:
            with suppress(ValueError, KeyError, TypeError, IndexError, RecursionError):
                read_metrics(str(json.loads(line)["body"]), facts)
        if facts.cache:
            break
    return facts


class _Statistics:
    """Reads the step statistics that a worker logs when it ends, in either of two forms."""

    def __init__(self, facts: LaunchFacts) -> None:
        self._facts = facts
        self._title = ""
        self._phase: dict[str, float] | None = None

    def take(self, line: str) -> None:
        if match := _TITLE.search(line):
            self._title, self._phase = match[1] or "all", None
        elif not self._title:
            return
        elif match := _PHASE.search(line):
            tracker = self._facts.device_metrics.setdefault(match[1] or self._title, {})
            self._phase = tracker[match[2].lower()] = {"calls": 0.0} if match[3] else {}
        elif self._phase is not None:
            self._take_number(line, self._phase)

    def _take_number(self, line: str, numbers: dict[str, float]) -> None:
        if match := _CALLS.search(line):
            numbers["calls"] = float(match[1])
        elif match := _LATENCY.search(line):
            parts = match[1].strip().split(" | ")
            statistics = [match for part in parts if (match := _STATISTIC.fullmatch(part))]
            numbers.update((f"{match[1]}_ms", float(match[2])) for match in statistics)
            if len(statistics) < len(parts):
                self._facts.unread.append(line.strip())
        elif match := _ONE_LATENCY.search(line):
            numbers[f"{'p50' if match[1] == 'Median' else match[1].lower()}_ms"] = float(match[2])
        elif match := _AVERAGE.search(line):
            numbers[f"{match[1]}_us"] = float(match[2])
        elif "atency" in line and "(ms)" in line and "Per-request prefill" not in line:
            self._facts.unread.append(line.strip())


def _read_report(text: str, facts: LaunchFacts) -> None:
    """A JSON report of step statistics; used where the log, which may be cut short, has none."""
    try:
        sections = _Report.model_validate_json(text).sections
    except ValidationError as error:
        facts.unread.append(f"a report of step statistics: {error.errors()[0]['msg']}")
        return
    for label, section in sections.items():
        match = re.fullmatch(r"(.+) \((PREFILL|PADDED DECODE|DECODE)\)", label)
        if match is None:
            facts.unread.append(f"a report of step statistics: section {label[:80]!r}")
            continue
        numbers = {"calls": float(section.call_count), "mean_ms": section.mean_latency_ms}
        numbers |= {f"{name}_ms": value for name, value in section.latency_percentiles_ms.items()}
        facts.device_metrics.setdefault(match[1], {}).setdefault(match[2].lower(), numbers)


class _Section(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)
    call_count: int = Field(ge=0, le=2**62)
    mean_latency_ms: float
    latency_percentiles_ms: dict[str, float] = {}


class _Report(BaseModel):
    """metrics.json of VLLM_RBLN_METRICS_DIR. Source: vllm-rbln 0.12.1a8, v1/metrics/performance.py."""

    sections: dict[str, _Section]


def read_metrics(body: str, facts: LaunchFacts) -> None:
    """Take the labels of vLLM's cache_config_info, and of an emulator's config_info, from the body of /metrics."""
    only = "\n".join(line for line in body.splitlines() if CACHE_INFO in line or EMULATOR_INFO in line) + "\n"
    # An answer that is not metrics counts as a scrape without values.
    with suppress(ValueError, KeyError, TypeError, IndexError, RecursionError):
        samples = [sample for family in text_string_to_metric_families(only) for sample in family.samples]
        labels = {sample.name: sample.labels for sample in reversed(samples)}
        settings = {key: json.loads(value) for key, value in labels.get(EMULATOR_INFO, {}).items()}
        facts.cache, facts.emulator = dict(labels.get(CACHE_INFO, {})), settings


def launch_findings(facts: LaunchFacts, *, needs_observer: bool) -> list[Finding]:
    """Findings about the end of the engine, statistics and the observer. Settings are judged with the run."""
    findings: list[Finding] = []
    if facts.is_engine_dead:
        findings.append(
            finding("engine-died", facts.engine_error or "the engine core ended during the run without a message")
        )
    if facts.unread:
        findings.append(
            finding(
                "statistics-unread",
                f"{len(facts.unread)} step statistics are in an unknown form, e.g. {facts.unread[0][:160]!r}",
            )
        )
    observed = " ".join(facts.observer)
    if needs_observer and ("one record per step" not in observed or "stopped after" in observed):
        findings.append(finding("observer-off", observed or "the observer never logged that it is on"))
    return findings


def rules_findings(rules: str, stack: str, served: RuleSet | None, followed: RuleSet) -> list[Finding]:
    """A warning when the release that serves does not follow ``rules``.

    stack: "vllm-rbln 0.12.0" or "vllm 0.32.0"; "": none serves, or it is unknown. served: its rules; None: unknown
    ones. followed: those that predictions take for ``rules``.
    """
    if not stack or (served is not None and rules in (AUTO, served.name)):
        return []
    if served is None:
        evidence = f"the rules of {stack} are unknown; predictions follow {followed.name}"
        hint = "Run harness stack check on its wheel to see what still holds"
    else:
        evidence = f"the server is {stack}, which follows {served.name}; the requested rules are {rules}"
        hint = 'Set server.rules = "auto"'
    return [finding("rules-differ", evidence, do=hint)]


def replicas_findings(label: str, shown: Sequence[LaunchFacts], known: Mapping[str, Any]) -> list[Finding]:
    """A finding for each replica that runs with other settings than one before it: the figures take all for equal.

    A replica is compared with the first whose metrics were read as its own were. The first that answered no scrape, or
    answered one, shares with replica 0 only what both logs show. known: see ``LaunchFacts.effective``.
    """
    settings = [{**each.effective(known), **each.emulator, **each.memory} for each in shown]
    answers = [bool(each.cache or each.emulator) for each in shown]
    findings: list[Finding] = []
    for number, other in enumerate(settings[1:], start=1):
        alike = answers.index(answers[number])
        place = alike if alike < number else 0
        first = settings[place]
        keys = {*first, *other} if place == alike else first.keys() & other
        if differing := sorted(key for key in keys if first.get(key) != other.get(key)):
            named = ", ".join(f"{key} {other.get(key)} for {first.get(key)}" for key in differing)
            hint = f"Start both of {label} alike; server.log of each has its settings"
            findings.append(finding("replicas-differ", f"replica {number} has {named} in replica {place}", do=hint))
    return findings


def read_launch_files(folder: Path, num_servers: int = 1) -> list[LaunchFacts]:
    """``read_launch`` of each server of a run's folder; missing files give no facts."""
    facts: list[LaunchFacts] = []
    for replica in range(num_servers):
        of_server = folder if num_servers == 1 else layout.replica_folder(folder, replica)
        mark = "" if num_servers == 1 else f'"replica": {replica},'
        scrapes = (line for line in _lines(folder / layout.SCRAPES) if mark in line)
        reports = (path.read_text(encoding="utf-8", errors="replace") for path in layout.step_reports(of_server))
        facts.append(read_launch(_lines(of_server / layout.SERVER_LOG), scrapes, reports))
    return facts


def _lines(path: Path) -> Iterable[str]:
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from file
