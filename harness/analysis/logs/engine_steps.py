"""The step log of a vLLM server in a run: its pure decode steps as the run's steps, and what to know about the others.

A decode step whose padding the server did not show is in no table. Nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa

from harness.clock import ScaledClock
from harness.errors import RecordsError
from harness.measure.records import layout, schema
from harness.measure.records.findings import finding
from harness.measure.records.manifest import WARMED_UP, Finding, Manifest, table_at
from harness.measure.records.run import SealedRun, once_per_run
from harness.model.engine.cost import attended_tokens
from harness.stacks.vllm.graph_flags import flags_of_header, graph_flags
from harness.stacks.vllm.graph_rules import covering_sizes as covering_graphs
from harness.stacks.vllm.step_log import StepLog, draft_figures, load_step_log, merged, numbered_through


def read_run_steps(folder: Path, since_ns: int = 0) -> tuple[StepLog | None, str]:
    """The step log in a run's folder, and why it cannot be read; (None, "") for a run without one.

    Of several replicas that of the first: they are equal in all that a header shows.
    The records of its engine cores where there are any, else those of its API server, which alone knows how many
    data-parallel engines there are. since_ns: CLOCK_MONOTONIC; what came before it is left out.
    """
    folder = next(iter(layout.replica_folders(folder)), folder)
    try:
        stamped, received = (
            [load_step_log(path) for path in layout.engine_files(folder / name)]
            for name in (layout.CORE_STEPS, layout.STEP_LOG)
        )
    except RecordsError as error:
        return None, error.what
    if not stamped and not received:
        return None, ""
    log = _since(merged(stamped or received), since_ns)
    declared = max(each.num_declared_engines for each in (*stamped, *received))
    return replace(log, effective={**log.effective, "data_parallel_size": declared}), ""


@once_per_run
def step_log_of(run: SealedRun) -> StepLog | None:
    """The step log of a sealed run, of several replicas all of them as one; None where it cannot be read."""
    logs = step_logs_of(run)
    if len(logs) == 1:
        return logs[0]
    known = [log for log in logs if log is not None]
    return numbered_through(known) if len(known) == len(logs) else None


@once_per_run
def step_logs_of(run: SealedRun) -> list[StepLog | None]:
    """The step log of each server of a sealed run; None for one that has none that can be read."""
    step_files(run)
    since_ns = measured_since_ns(run.manifest)
    num_servers = run.manifest.num_replicas
    folders = [layout.replica_folder(run.path, number) for number in range(num_servers)]
    return [read_run_steps(folder, since_ns)[0] for folder in (folders if num_servers > 1 else [run.path])]


@once_per_run
def observed_log(run: SealedRun) -> StepLog | None:
    """What the observer inside a vllm-rbln server recorded, beside the steps of its log; None for a run without one.

    Raises RecordsError for a file of an earlier version, and for one that lacks steps.
    """
    path = run.file(layout.OBSERVER)
    if not path.exists():
        return None
    log = load_step_log(path)
    if any(core.steps and core.steps[-1].values["step"] >= len(core.steps) + core.num_unended for core in log.cores):
        raise RecordsError(f"lacks steps; {log.num_damaged} lines are damaged", where=str(path))
    return log


def unlike_observed(run: SealedRun) -> str:
    """How the run's (n, b) of decode steps differ from those that its observer saw; "" where they do not, or none are.

    The steps of a run of vllm-rbln are those of its log: the observer reads them a second time.
    """
    log = observed_log(run)
    if log is None or not log.decode_steps.num_rows:
        return ""
    seen, logged = (list(schema.values_of(table, "n", "b")) for table in (log.decode_steps, run.table("steps")))
    at = next((at for at, pair in enumerate(zip(seen, logged, strict=False)) if pair[0] != pair[1]), len(seen))
    if seen == logged:
        return ""
    return f"{len(seen)} decode steps observed, {len(logged)} in the log, (n, b) the same for the first {at}"


def measured_since_ns(manifest: Manifest) -> int:
    """The end of the server's warm-up, CLOCK_MONOTONIC; 0 for a run without one."""
    warmed_up_ns = manifest.timings.get(WARMED_UP)
    return 0 if warmed_up_ns is None else ScaledClock(manifest.clock.scale).to_monotonic_ns(warmed_up_ns)


def _since(log: StepLog, since_ns: int) -> StepLog:
    """The steps that began, and the requests that came, at an instant or later."""
    if not since_ns:
        return log
    stamps = schema.values_of(log.steps, "began_ns", "at_ns")
    began = (at_ns if began_ns is None else began_ns for began_ns, at_ns in stamps)
    cores = (
        replace(
            core,
            steps=tuple(step for step in core.steps if step.values["schedule_ns"] >= since_ns),
            requests=core.requests.filter(_is_since(core.requests["admitted_ns"].to_pylist(), since_ns)),
        )
        for core in log.cores
    )
    return replace(log, steps=log.steps.filter(_is_since(began, since_ns)), cores=tuple(cores))


def _is_since(instants_ns: Iterable[int], since_ns: int) -> pa.Array:
    return pa.array([instant_ns >= since_ns for instant_ns in instants_ns], pa.bool_())


def step_files(run: SealedRun) -> list[Path]:
    """The places of a sealed run's step logs, once they are known to be as sealed."""
    names = in_each_server(run, layout.STEP_LOG, layout.CORE_STEPS)
    paths = [path for name in names for path in layout.engine_files(run.path / name)]
    of_engines = [str(path.relative_to(run.path)) for path in paths]
    return [run.file(name) for name in dict.fromkeys([*names, *of_engines])]


def in_each_server(run: SealedRun, *names: str) -> list[str]:
    """The names of a server's files in the folder of each replica; as they are for one server."""
    folders = [folder.relative_to(run.path) for folder in layout.replica_folders(run.path)]
    return [str(folder / name) for folder in folders or [Path()] for name in names]


def steps_table(log: StepLog, clock: ScaledClock) -> pa.Table:
    """The pure decode steps of a step log, in the schema of the run's steps."""
    steps = log.decode_steps
    log_ns = [clock.from_monotonic_ns(at_ns) for at_ns in steps["at_ns"].to_pylist()]
    columns = [np.arange(len(log_ns), dtype=np.int32), pa.array(log_ns, pa.int64()), steps["n"], steps["b"]]
    return schema.conform("steps", pa.table(columns, names=schema.STEPS.names))


def step_spans(log: StepLog) -> list[tuple[int, int] | None]:
    """(first, last) instant of every step: from the end of the step before it, or from its own beginning if later.

    None where the engine was idle before and the log does not show when the step began, and for several engines. With
    asynchronous scheduling see ``_without_launches``.
    """
    if len(log.engines) > 1:
        return [None] * log.steps.num_rows
    spans: list[tuple[int, int] | None] = []
    before_ns = running = None
    for at_ns, began_ns, still_running in schema.values_of(log.steps, "at_ns", "began_ns", "running"):
        # A step that is decided while another runs begins when that ends.
        since_ns = before_ns if running else began_ns
        if since_ns is not None and before_ns is not None:
            since_ns = max(since_ns, before_ns)
        spans.append(None if since_ns is None else (since_ns, at_ns))
        before_ns, running = at_ns, still_running
    return _without_launches(log, spans) if log.effective.get("async_scheduling") else spans


def _without_launches(log: StepLog, spans: list[tuple[int, int] | None]) -> list[tuple[int, int] | None]:
    """The spans, with the launch of a step in its own and not in that of the decode step before it.

    The engine launches the next step before it takes the output of this one. A step of prompts is launched without a
    graph, for up to tens of milliseconds, and the decode step before it seems to last as long. Such a decode step is
    given the median of its size between decode steps, where there is one; the rest is the step's after it.
    Source: vLLM 0.30.0, step_with_batch_queue of v1/engine/core.py; seen on an H100 (docs/evidence/gpu-measured.md).
    """
    kinds = list(zip(log.steps["kind"].to_pylist(), log.steps["b"].to_pylist(), strict=True))
    lengths: dict[int | None, list[int]] = {}
    for before, (kind, b), after, span in zip(kinds, kinds[1:], kinds[2:], spans[1:], strict=False):
        if kind == before[0] == after[0] == "decode" and span is not None:
            lengths.setdefault(b, []).append(span[1] - span[0])
    usual = {b: round(median(of_size)) for b, of_size in lengths.items()}
    moved = list(spans)
    for place, ((kind, b), (after, _b)) in enumerate(pairwise(kinds)):
        span, following = spans[place], spans[place + 1]
        if kind != "decode" or after not in ("prefill", "mixed") or b not in usual or span is None or following is None:
            continue
        ends_ns = span[0] + usual[b]
        if ends_ns < span[1] == following[0]:
            moved[place], moved[place + 1] = (span[0], ends_ns), (ends_ns, following[1])
    return moved


def decode_contexts(log: StepLog) -> list[float] | None:
    """Summed sequence lengths of the decodes of every step; None: not shown.

    As the engine core had them; else from the KV memory in use before the step. Requests end anywhere in their last
    block: half a block each is taken off. Where parts of a prompt are in memory too, each running request counts for
    its mean.
    """
    if log.cores:
        known = log.steps["decode_context"].to_pylist()
        return None if None in known else [float(context) for context in known]
    num_blocks, block_size = (log.effective.get(name) for name in ("num_gpu_blocks", "block_size"))
    if not isinstance(num_blocks, int) or not isinstance(block_size, int) or log.steps["kv_usage"].null_count:
        return None
    contexts = [0.0]
    rows = schema.values_of(log.steps, "kv_usage", "running", "generation_requests")
    for (kv_usage, running, _n), (_usage, _running, n) in pairwise(rows):
        # One block is a placeholder. A decode step adds a token to each.
        mean = kv_usage * (num_blocks - 1) * block_size / running - (block_size - 1) / 2 + 1 if running else 0.0
        contexts.append((n or 0) * mean)
    return contexts[: log.steps.num_rows]


def attended_by_step(log: StepLog) -> list[int]:
    """``attended_tokens`` of the parts of prompts in every step; 0 where the log does not show them.

    An engine core shows every part. Else the log has sums of a step, which are exact where one prompt is computed at a
    time. Where several begin in a step, each counts for their mean; at most the last of a step is taken as unfinished.
    """
    if len(log.cores) == 1:
        parts = [() if step.details is None else step.details.parts for step in log.cores[0].steps]
        return [sum(attended_tokens(before, tokens) for before, tokens in of_step) for of_step in parts]
    names = ("context_requests", "context_tokens", "generation_requests", "generated_tokens", "prefix_hits")
    open_tokens, attended = 0, list[int]()
    for parts, tokens, decodes, generated, hits in schema.values_of(log.steps, *names):
        if not parts or not tokens:
            attended.append(0)
            continue
        num_new = parts - bool(open_tokens)
        each, found = tokens // parts, (hits or 0) // max(1, num_new)
        rest = tokens - each * (parts - 1)
        # The open prompt comes first; a prompt that stays open is the last.
        befores = [open_tokens] * (parts > num_new) + [found] * num_new
        sizes = [each] * (parts - 1) + [rest]
        attended.append(sum(map(attended_tokens, befores, sizes)))
        is_open = generated is not None and generated - (decodes or 0) < parts
        open_tokens = befores[-1] + sizes[-1] if is_open else 0
    return attended


def check_step_log(manifest: Manifest, log: StepLog | None, problem: str) -> Iterator[Finding]:
    """Findings about a run's step log. problem: why it cannot be read."""
    if problem:
        yield finding("step-log-unread", f"the step log {problem}")
    elif log is not None:
        yield from _findings(log, manifest)
    elif manifest.observation.steps == "step-log":
        evidence = "the step log that was declared was not written"
        yield finding("observer-silent", evidence, do="Read server.log for lines of [STEP LOG]")


def _findings(log: StepLog, manifest: Manifest) -> Iterator[Finding]:
    if _is_of_another_clock(log, manifest):
        yield finding("step-log-clock", "the step log has steps from before or after the run")
    if log.num_damaged:
        yield finding(
            "step-log-damaged",
            f"{log.num_damaged} lines of the step log are damaged and left out, first {log.first_damaged!r}",
        )
    if manifest.planned_requests and manifest.num_replicas == 1 and not log.steps.num_rows:
        yield finding(
            "steps-missing", "the step log has no step of this run", do="Name the file that this server writes"
        )
    yield from _check_engines(log, manifest)
    if log.unknown_rules:
        yield finding(
            "rules-unknown",
            f"the scheduler's rules were never held to this: {log.unknown_rules}. Predictions of this server are not "
            "known to hold",
        )
    if log.unseen:
        yield finding("steps-unseen", "; ".join(log.unseen))
    counts = log.num_by_kind
    others = ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()) if kind != "decode")
    if others:
        cost = log.cost_us
        who = "observing them in the engine core" if log.cores else "the step log"
        evidence = f"n, b and padding are of {counts.get('decode', 0):,} pure decode steps; beside them {others}"
        yield finding("steps-apart", evidence + (f"; {who} took {cost['p50']:.0f} us a step (median)" if cost else ""))
    if log.num_drafts:
        yield from _check_drafts(log)
    elif eager := log.eager_by_n:
        yield eager_finding(eager, manifest.decode_buckets, log.decode_steps.num_rows)


def _check_drafts(log: StepLog) -> Iterator[Finding]:
    """What a server that drafts did, in tokens: acceptance by position, padding, and steps without a graph."""
    figures = draft_figures(log)
    if figures is None or not figures.num_steps:
        return
    rates = ", ".join(f"{rate:.3f}" for rate in figures.acceptance)
    evidence = (
        f"{figures.num_steps:,} decode steps with drafts: of {figures.draft_tokens:,} drafted tokens "
        f"{figures.accepted_tokens:,} were accepted"
    )
    evidence += f"; accepted at least 1 to {len(figures.acceptance)} drafts: {rates}" if rates else ""
    if figures.num_padded:
        evidence += f"; beside them {figures.num_padded:,} admissions padded with drafts that are always rejected"
    if figures.padded_tokens:
        share = 100 * (1 - figures.tokens / figures.padded_tokens)
        evidence += f"; {share:.2f} % of {figures.padded_tokens:,} computed tokens were padding"
    is_drawn = log.acceptance == "synthetic"
    rule = "acceptance was synthetic" if is_drawn else "by a real drafter, on prompts that are random tokens"
    yield finding("steps-drafts", f"{evidence}; {rule}")
    if not figures.eager:
        return
    batches = ", ".join(f"{n} ({tokens} tokens, {count:,} steps)" for (n, tokens), count in figures.eager.items())
    share = 100 * sum(figures.eager.values()) / figures.num_steps
    try:
        sizes = covering_graphs(graph_flags(flags_of_header({"vllm": log.vllm, "effective": log.effective})))
    except ValueError:
        sizes = None
    named = " ".join(map(str, sizes or ()))
    do = f"Capture them too: --cudagraph-capture-sizes {named}" if sizes else "`harness server sizes` lists the graphs"
    evidence = f"{share:.1f} % of the decode steps ran without a graph although graphs are on: n = {batches}"
    yield finding("steps-eager", evidence, do=do)


def _check_engines(log: StepLog, manifest: Manifest) -> Iterator[Finding]:
    """Whether every engine's steps are there, all of them, with the stamps of its own core."""
    name = layout.CORE_STEPS if log.cores else layout.STEP_LOG
    if len(log.engines) < log.num_declared_engines:
        missing = [engine for engine in range(log.num_declared_engines) if engine not in log.engines]
        files = ", ".join(f"{name}.{engine}" if engine else name for engine in missing)
        yield finding(
            "steps-missing",
            f"the server has {log.num_declared_engines} data-parallel engines, each with a step log; there is none of "
            f"engine {', '.join(map(str, missing))} ({files})",
        )
    if lost := sum(core.num_missing for core in log.cores):
        yield finding("steps-missing", f"{lost:,} steps are not in {name}", do="Lines of the file were lost")
    if not log.cores and "core_steps" in table_at(manifest.server.facts, "launch", "files"):
        yield finding(
            "core-steps-silent",
            "no engine core stamped its steps: their times are those of messages to the API server, which bunch",
        )


def _is_of_another_clock(log: StepLog, manifest: Manifest) -> bool:
    first_ns, last_ns = (manifest.timings.get(name) for name in ("server_start_ns", "server_stopped_ns"))
    if first_ns is None or last_ns is None or not log.steps.num_rows:
        return False
    clock = ScaledClock(manifest.clock.scale)
    first, last = (clock.from_monotonic_ns(log.steps["at_ns"][place].as_py()) for place in (0, -1))
    return not first_ns <= first <= last <= last_ns


def eager_finding(eager_by_n: Mapping[int, int], captured: tuple[int, ...], num_steps: int) -> Finding:
    """Which batch sizes no captured graph covered, and the capture list or ``max_num_seqs`` that would."""
    sizes = ", ".join(f"{n} ({count:,} steps)" for n, count in eager_by_n.items())
    share = sum(eager_by_n.values()) / num_steps
    wanted = covering_sizes(eager_by_n, captured)
    hint = f"Capture them too: server.decode_buckets = {list(wanted)}"
    if captured and min(eager_by_n) > captured[-1]:
        hint += f"; or lower server.max_num_seqs to {captured[-1]}"
    evidence = (
        f"{100 * share:.1f} % of the decode steps ran without a graph although graphs are on: no captured size of "
        f"{list(captured)} covers n = {sizes}"
    )
    return finding("steps-eager", evidence, do=hint)


def covering_sizes(eager_by_n: Mapping[int, int], captured: tuple[int, ...]) -> tuple[int, ...]:
    """The captured sizes and every size that ran without a graph."""
    return tuple(sorted({*captured, *eager_by_n}))
