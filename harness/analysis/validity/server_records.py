"""Whether the log and the scrapes can be what the server did: step sizes, slots, prefills, and what it counted.

Definitions: docs/reference/method.md, "A run and its invariants".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from harness.analysis.run_tables import (
    EXTERNAL_COUNTER,
    MOVED_COUNTER,
    PREEMPTED_COUNTER,
    counter_increment,
    counts_of,
    join_request_id,
)
from harness.analysis.stats import IntArray
from harness.analysis.validity.evidence import Evidence
from harness.analysis.validity.stalls import limits_of
from harness.clock import NS_PER_S
from harness.errors import SpecError, printable
from harness.measure.records.findings import finding
from harness.measure.records.manifest import Finding, Manifest
from harness.measure.records.schema import ABORTED, rows_where, values_of
from harness.model.engine.config import EngineConfig
from harness.model.spec import ServerSpec
from harness.stacks.vllm.step_log import draft_figures

if TYPE_CHECKING:
    from harness.analysis.logs.parse import Derived
    from harness.stacks.vllm.step_log import StepLog


def check_log_lines(run: Evidence) -> Iterator[Finding]:
    """Findings about the lines of a run's log. requests: REQUESTS schema."""
    if run.derived.step_log is not None:
        yield from _check_graph_sizes(run.derived.step_log)
        yield from _check_drafts(run.derived.step_log, run)
    elif run.derived.steps_source == "bucket-log":
        yield from _check_compiled_sizes(run.derived.tables["steps"], run.manifest.decode_buckets)
    if run.derived.num_kv_lines and _logs_slots(run.manifest):
        yield from _check_slots(run.requests, run.derived)


def _logs_slots(manifest: Manifest) -> bool:
    """Whether the log tells slots apart. Under the paper's rules no slot has a line of its own."""
    try:
        return EngineConfig.from_server(ServerSpec.model_validate(manifest.requested_server).replica).has_inner_blocks
    except (SpecError, ValueError):
        return True


def smallest_size(sizes: tuple[int, ...], n: IntArray) -> IntArray:
    """The smallest size that holds each n; 0 where none does. sizes: in any order."""
    ascending = np.array(sorted(set(sizes)), dtype=np.int64)
    return np.append(ascending, 0)[np.searchsorted(ascending, n)]


def _check_compiled_sizes(steps: pa.Table, sizes: tuple[int, ...]) -> Iterator[Finding]:
    if not sizes:
        return
    n, b = (steps[name].to_numpy().astype(np.int64) for name in ("n", "b"))
    wrong = np.flatnonzero(smallest_size(sizes, n) != b)
    if len(wrong):
        first = wrong[0]
        yield finding(
            "step-size",
            f"{len(wrong):,} of {len(n):,} decode steps have a size that is not the smallest of {sorted(sizes)} for "
            f"their requests, first step {first}: [BUCKET] request_nums={n[first]} padded_batch_size={b[first]}",
        )


def _check_graph_sizes(log: StepLog) -> Iterator[Finding]:
    """The size of a step with a graph is the smallest captured one; a step without a graph has no padding.

    Drafts change the captured sizes after the header was written. Between data-parallel engines a step is padded to the
    largest of them, and without a graph tensor-parallel ones may pad to a multiple of their number. A header without
    sizes says nothing of steps with a graph.
    Source: vLLM 0.30.0, v1/cudagraph_dispatcher.py and v1/worker/gpu_model_runner.py.
    """
    if log.effective.get("num_speculative_tokens") is not None or (log.effective.get("data_parallel_size") or 1) != 1:
        return
    sizes = tuple(log.settings.get("decode_buckets", ()))
    ranks = log.effective.get("tensor_parallel_size") or 1
    steps = log.decode_steps
    n, b = (steps[name].to_numpy().astype(np.int64) for name in ("n", "b"))
    is_unpadded = (b == n) | (b == -(-n // ranks) * ranks)
    is_eager = np.array([mode in (None, "NONE") for mode in steps["runtime_mode"].to_pylist()], dtype=np.bool_)
    is_smallest = smallest_size(sizes, n) == b if sizes else np.ones(len(n), dtype=np.bool_)
    wrong = np.flatnonzero(~np.where(is_eager, is_unpadded, is_smallest))
    if len(wrong):
        first = int(wrong[0])
        yield finding(
            "step-size",
            f"{len(wrong):,} of {len(n):,} decode steps have a size that vLLM would not choose from "
            f"{sorted(sizes) or 'no captured sizes'}, first step {first} with {n[first]} requests in size {b[first]}, "
            f"graph mode {steps['runtime_mode'][first].as_py()}",
            do="Lines of the step log were changed, or its header is of another server",
        )


def _check_drafts(log: StepLog, run: Evidence) -> Iterator[Finding]:
    """What the steps drafted and accepted is what the server counted; a grammar takes drafts out of its count."""
    figures = draft_figures(log)
    counts = {} if figures is None else counts_of(run.derived.tables["metrics"])
    if figures is None or "draft_tokens" not in counts:
        return
    stepped = (figures.num_drafts, figures.accepted_tokens)
    counted = (counts.get("drafts"), counts.get("accepted_draft_tokens"))
    if stepped != counted or counts["draft_tokens"] > figures.draft_tokens:
        yield finding(
            "drafts-differ",
            f"its steps show {figures.num_drafts:,} drafted requests, {figures.draft_tokens:,} drafted and "
            f"{figures.accepted_tokens:,} accepted tokens; its metrics {counts.get('drafts', 0):,}, "
            f"{counts['draft_tokens']:,} and {counts.get('accepted_draft_tokens', 0):,}",
        )


def _check_slots(requests: pa.Table, derived: Derived) -> Iterator[Finding]:
    slots = derived.slots
    if slots.num_contradictions:
        evidence = f"{slots.num_contradictions:,} lines contradict those before them, first: {slots.first}"
        yield finding("slots-inconsistent", evidence)
    if slots.num_prefill_lines and slots.num_unprefilled:
        yield finding(
            "prefill-missing",
            f"{slots.num_unprefilled:,} requests were given slots, and the log has no line of their prefill, first "
            f"{slots.first_unprefilled}",
        )
    answered = [name for name, status in values_of(requests, "response_id", "status") if name and status == "ok"]
    allocated = rows_where(derived.tables["kv_events"], "kind", "alloc").column("request_id").unique().to_pylist()
    named = dict.fromkeys(answered)
    given = {join_request_id(log_id, named) for log_id in allocated}
    if lacking := [name for name in named if name not in given]:
        yield finding(
            "slots-inconsistent", f"{len(lacking):,} answers have no line that gives them slots, first {lacking[0]}"
        )


NOTICED_MOVED_SHARE = 0.01
PROCESS_START, START_SLACK_S = "process_start_time_seconds", 1.5
# Their labels are settings, versions and models, which a server does not change while it lives.
SETTINGS_INFO = ("vllm:cache_config_info", "emulator:config_info", "python_info")
MODEL_SAMPLE = "vllm:num_requests_running"
_ENGINE = re.compile(r'(?:^|,)engine="([^"]*)"')


def check_scrapes(run: Evidence) -> Iterator[Finding]:
    """Whether the scrapes could be read, and whether they hold the counts of other models too."""
    if run.derived.other_models:
        named = ", ".join(map(printable, run.derived.other_models))
        left = " ".join(run.derived.tables["metrics"]["labels"].unique().to_pylist())
        is_summed = f'model_name="{run.derived.other_models[0]}"' in left
        what = (
            "several models and none by the run's name, so all are summed"
            if is_summed
            else "other models too, which are left out"
        )
        yield finding("other-models", f"the metrics count {what}: {named}")
    do, severity = (None, "invalid") if limits_of(run.manifest).needs_metrics else ("", "warning")
    if run.manifest.observation.has_metrics and not run.derived.tables["metrics"].num_rows:
        evidence = f"none of {run.derived.num_scrapes} scrapes has a readable body with samples"
        yield finding("metrics-missing", evidence, do=do, severity=severity)
    elif run.derived.num_failed_scrapes:
        evidence = f"{run.derived.num_failed_scrapes} of {run.derived.num_scrapes} scrapes have no readable body"
        readable = set(run.derived.tables["metrics"]["scrape"].unique().to_pylist())
        ends = {"first": 0, "last": run.derived.num_scrapes - 1}
        if lost := [name for name, scrape in ends.items() if scrape not in readable]:
            evidence += f", the {' and the '.join(lost)} among them"
            yield finding("scrape-failed", evidence, do=do, severity=severity)
        else:
            yield finding("scrape-failed", evidence)


def check_same_server(run: Evidence) -> Iterator[Finding]:
    """Whether one process with the same settings and models answered every scrape."""
    metrics, counters = run.derived.tables["metrics"], run.derived.counters
    if counters.num_fallen:
        evidence = f"{counters.num_fallen:,} counters fell between two scrapes, first {counters.first}"
        yield finding("server-replaced", evidence)
    clock = run.manifest.clock
    moved_ns = (clock.realtime_minus_monotonic_after_ns or 0) - clock.realtime_minus_monotonic_ns
    # A process may compute its start from the wall clock, in whole seconds, at each scrape.
    slack_s = START_SLACK_S + (0 if clock.realtime_minus_monotonic_after_ns is None else abs(moved_ns) / NS_PER_S)
    started: dict[str, float] = {}
    for labels, value in values_of(rows_where(metrics, "name", PROCESS_START), "labels", "value"):
        if abs(value - started.setdefault(labels, value)) > slack_s:
            evidence = f"{PROCESS_START} changed from {started[labels]:.2f} to {value:.2f}: another process answered"
            yield finding("server-replaced", evidence)
            break
    for name in (*SETTINGS_INFO, MODEL_SAMPLE):
        yield from _changed_labels(name, rows_where(metrics, "name", name))


def check_engines(run: Evidence) -> Iterator[Finding]:
    """Whether several engines answer behind one address, each with a KV pool of its own."""
    samples = rows_where(run.derived.tables["metrics"], "name", MODEL_SAMPLE)
    labels = samples["labels"].unique().to_pylist()
    engines = sorted({match[1] for text in labels if (match := _ENGINE.search(text))})
    if len(engines) > 1:
        log = run.derived.step_log
        are_told = log is not None and bool(log.cores) and all("requests" not in core.absent for core in log.cores)
        known = (
            "The step logs of the engine cores say which served each request, and the ceilings of reuse go by it"
            if are_told
            else "No row says which engine served it, so that the ceilings of "
            "reuse, which know one pool, are too high for sessions that moved from one engine to another"
        )
        yield finding(
            "engines-several",
            f"{len(engines)} engines ({', '.join(engines)}) answer behind this address: each has a KV pool of its own, "
            f"and the server's counts are summed over them. {known}",
            do="" if are_told else None,
        )


def check_running(run: Evidence) -> Iterator[Finding]:
    """Whether more requests ran at once than the limit permits that was declared and that nothing shows."""
    server, shown = ServerSpec.model_validate(run.manifest.requested_server), run.manifest.effective.get("shown") or ()
    if not server.declared or "max_num_seqs" in shown:
        return
    samples = values_of(rows_where(run.derived.tables["metrics"], "name", MODEL_SAMPLE), "value")
    most = max((value for (value,) in samples if not math.isnan(value)), default=0)
    if most > server.max_num_seqs:
        evidence = f"max_num_seqs: declared {server.max_num_seqs}, and {most:.0f} requests ran at once in one engine"
        yield finding("setting-differs", evidence)


def check_loaded(run: Evidence) -> Iterator[Finding]:
    """Whether KV came from a second memory, which no cost model prices."""
    loaded = counter_increment(run.derived.tables["metrics"], EXTERNAL_COUNTER)
    if loaded:
        price = run.manifest.server_spec.get("offload_block_us")
        how = "is in B and S, not in A" if price is None else f"counts in A as {price:g} us a block"
        yield finding(
            "kv-loaded", f"{loaded:,.0f} tokens of KV were loaded from a second memory, the time of which {how}"
        )


def _changed_labels(name: str, samples: pa.Table) -> Iterator[Finding]:
    """Whether samples of this name have other labels in one scrape than in the first that has any."""
    by_scrape: dict[int, set[str]] = {}
    for scrape, labels in values_of(samples, "scrape", "labels"):
        by_scrape.setdefault(scrape, set()).add(labels)
    first, *others = by_scrape.values() or [set[str]()]
    if other := next((labels for labels in others if labels != first), None):
        gone, come = (", ".join(sorted(labels)) or "nothing" for labels in (first - other, other - first))
        evidence = f"the labels of {name} changed during the run, from {gone} to {come}"
        yield finding("server-replaced", evidence)


def check_counts(run: Evidence) -> Iterator[Finding]:
    """Whether the server counted what the client was answered, each sum by itself. requests: REQUESTS schema.

    Answers that the client left may be in each sum, up to what was planned of them. A prompt that was computed again
    after a preemption is counted again, so that prompts are then not held against their sum. Failed requests make a run
    INVALID by themselves, and nobody knows how the server counted them.
    """
    status = run.requests["status"].to_pylist()
    if not set(status) <= {"ok", ABORTED}:
        return
    metrics = run.derived.tables["metrics"]
    left = run.requests.filter(pa.array([one == ABORTED for one in status], pa.bool_()))
    preempted = counter_increment(metrics, PREEMPTED_COUNTER)
    expected = {
        "vllm:prompt_tokens_total": ("prompt_tokens", "planned_prompt_tokens"),
        "vllm:generation_tokens_total": ("completion_tokens", "planned_generate_tokens"),
        "vllm:request_success_total": (None, None),
    }
    for counter, (answered, planned) in expected.items():
        counted = counter_increment(metrics, counter)
        if counted is None or (answered == "prompt_tokens" and preempted):
            continue
        least = len(status) - left.num_rows if answered is None else sum(run.requests[answered].drop_null().to_pylist())
        most = least + (left.num_rows if planned is None else sum(left[planned].to_pylist()))
        if not least <= round(counted) <= most:
            span = f"{least:,}" if most == least else f"{least:,} to {most:,}"
            yield finding("counts-differ", f"{counter} rose by {counted:,.0f}, and the answers have {span}")
    if preempted is not None and run.derived.num_kv_lines and round(preempted) != run.derived.num_preemptions:
        evidence = (
            f"{PREEMPTED_COUNTER} rose by {preempted:,.0f}, and the log has {run.derived.num_preemptions} preemptions"
        )
        yield finding("counts-differ", evidence, do="Lines of the log were lost")


def check_moved_schedule(run: Evidence) -> Iterator[Finding]:
    """Whether stalls of an emulator's host moved its schedule: then its steps are not those of the modelled server."""
    moved_s = counter_increment(run.derived.tables["metrics"], MOVED_COUNTER)
    begin_ns, end_ns = (run.manifest.timings.get(name) for name in ("replay_start_ns", "replay_end_ns"))
    if not moved_s or begin_ns is None or end_ns is None:
        return
    span_s = (end_ns - begin_ns) / NS_PER_S
    share, limit = moved_s / span_s if span_s > 0 else math.inf, limits_of(run.manifest).schedule_moved_share
    if share < min(NOTICED_MOVED_SHARE, limit):
        return
    yield finding(
        "schedule-moved",
        f"the emulator's host stalled: its schedule moved by {moved_s:.3f} of {span_s:.3f} model s "
        f"({100 * share:.1f} %); from {100 * limit:.1f} % on a run is INVALID",
        severity="invalid" if share >= limit else "warning",
    )
