"""Every invariant of a run, as findings: what was expected, what was observed, and what to do next.

A finding of severity "invalid" makes a run INVALID; nothing here raises, stops or repairs.
Definitions: docs/reference/method.md, "A run and its invariants".
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from harness.analysis.cost.reconstruct import channel_b, residual_ns
from harness.analysis.cost.step_parts import MAX_DRIFT, step_parts
from harness.analysis.figures import lateness, modelled_of
from harness.analysis.logs.engine_steps import check_step_log
from harness.analysis.logs.replicas import (
    ANSWER_COUNTER,
    FINISHED_COUNTER,
    PROMPT_COUNTER,
    counted_by_replica,
    served_by,
    served_by_counters,
    split_requests,
)
from harness.analysis.reuse import cached_tokens
from harness.analysis.run_tables import (
    CACHED_COUNTER,
    RequestKey,
    aborted_rows,
    counter_increment,
    join_request_id,
    left_answers,
    with_logged_prefills,
)
from harness.analysis.validity.evidence import Evidence
from harness.analysis.validity.plan_answers import check_aborts, check_answers, check_clean_start, check_tolerated
from harness.analysis.validity.server_records import (
    check_counts,
    check_engines,
    check_loaded,
    check_log_lines,
    check_moved_schedule,
    check_running,
    check_same_server,
    check_scrapes,
)
from harness.analysis.validity.stalls import (
    NOTICED_MS,
    check_freezes,
    check_held_tokens,
    check_read_together,
    check_server_stalls,
    check_step_log_stalls,
    limits_of,
)
from harness.clock import NS_PER_MS, NS_PER_S, ScaledClock
from harness.kinds import kind_of_run
from harness.measure.records.findings import finding
from harness.measure.records.manifest import SETTING_DECLARED, Finding, Manifest, table_at
from harness.measure.records.run import SealedRun
from harness.measure.records.schema import ABORTED, rows_where, values_of
from harness.model.engine.config import changed_keys, differences, keys_shown, requested_settings
from harness.model.spec import ServerSpec
from harness.model.spec.server import HARNESS_KEYS, NEWER_KEYS

MAX_CLOCK_STEP_NS = NS_PER_MS


def check_run(run: Evidence) -> list[Finding]:
    """Findings of one run, the invalid ones first."""
    findings = [finding for check in CHECKS for finding in check(run)]
    order = ("invalid", "warning", "info")
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def _check_each_server(run: Evidence) -> Iterator[Finding]:
    """What a server's log says of it alone. Of several replicas each is judged by itself, and named."""
    if run.manifest.num_scraped > 1:
        yield from _check_attribution(run)
    parts = run.derived.parts or (run.derived,)
    for number, own in enumerate(split_requests(run.requests, run.served, len(parts))):
        name = f"replica {number}: " if len(parts) > 1 else ""
        for found in _check_server_log(replace(run, requests=own, derived=parts[number])):
            yield found.model_copy(update={"evidence": f"{name}{found.evidence}"})


def _check_server_log(run: Evidence) -> Iterator[Finding]:
    yield from check_step_log(run.manifest, run.derived.step_log, run.derived.step_log_problem)
    yield from check_log_lines(run)
    yield from _check_server_stalls(run)


def _check_attribution(run: Evidence) -> Iterator[Finding]:
    """Which replica served each request, and how that is known."""
    manifest, requests, derived = run.manifest, run.requests, run.derived
    num_replicas = manifest.num_scraped
    answered = [*values_of(rows_where(requests, "status", "ok"), "session", "request")]
    logged, headed = served_by(requests, run.servers, {}), served_by(requests, (), derived.in_headers)
    known = {"the log of a replica": logged, "a response header": headed}
    if not logged and not headed:
        known["the counters of the replicas"] = served_by_counters(requests, derived.tables["metrics"], num_replicas)
    yield from _check_witnesses(run, logged, headed)
    served: dict[RequestKey, int] = {}
    sources: list[str] = []
    for how, replica_of in known.items():
        if new := [key for key in answered if key in replica_of and key not in served]:
            served.update((key, replica_of[key]) for key in new)
            sources.append(f"{len(new)} by {how}")
    if unknown := len(answered) - len(served):
        # Of somebody else's replicas nothing but sums is shown then.
        yield finding(
            "replica-unknown",
            f"no replica's log, header or counter tells who answered {unknown} of {len(answered)} requests",
            severity="invalid" if manifest.is_ours else "warning",
        )
    shares = ", ".join(
        f"replica {number} {sum(served.get(key) == number for key in answered)}" for number in range(num_replicas)
    )
    yield finding("replicas", f"answered by {shares}; known of {', '.join(sources) or 'none'}")


def _check_witnesses(
    run: Evidence, logged: Mapping[RequestKey, int], headed: Mapping[RequestKey, int]
) -> Iterator[Finding]:
    """Whether headers name the replicas that served: held to the logs, and where there are none to the counters."""
    requests = run.requests
    if other := sorted(key for key in headed if logged.get(key, headed[key]) != headed[key]):
        session, request = other[0]
        yield finding(
            "replicas-disagree",
            f"for {len(other)} of {len(headed)} requests a response header names another replica than the logs: first "
            f"session {session} request {request}, replica {headed[other[0]]} in the header, {logged[other[0]]} in "
            "the log",
        )
    if logged or len(headed) != requests.num_rows - requests["done_ns"].null_count:
        return
    # Under round robin each replica serves as many requests as under swapped names, and seldom as many tokens.
    for what, (counter, column) in _COUNTED.items():
        counted = counted_by_replica(run.derived.tables["metrics"], counter, run.manifest.num_scraped)
        named = [0] * run.manifest.num_scraped
        for session, request, number in values_of(requests, "session", "request", column or "session"):
            if (at := headed.get((session, request))) is not None:
                named[at] += (number or 0) if column else 1
        # Other sums are a finding of their own.
        if counted is not None and sum(named) == sum(counted) and named != counted:
            texts = (", ".join(f"{number:,}" for number in numbers) for numbers in (named, counted))
            evidence = f"{what} by replica: {{}} by response headers, {{}} by counters".format(*texts)
            yield finding("replicas-disagree", evidence)
            return


_COUNTED = {
    "requests": (FINISHED_COUNTER, ""),
    "prompt tokens": (PROMPT_COUNTER, "prompt_tokens"),
    "answer tokens": (ANSWER_COUNTER, "completion_tokens"),
}


def _check_server_stalls(run: Evidence) -> Iterator[Finding]:
    if run.derived.step_log is not None:
        return check_step_log_stalls(run.manifest, run.requests, run.derived.step_log, run.cost_model)
    if run.derived.log_ns_source == "created" and abs(_moved_ns(run.manifest)) > NOTICED_MS * NS_PER_MS:
        # The log's own stamps stand still or jump with the wall clock.
        return iter(())
    steps, kv_events = run.derived.tables["steps"], run.derived.tables["kv_events"]
    return check_server_stalls(run.manifest, run.requests, steps, kv_events, run.cost_model)


def check_experiment(runs: Sequence[SealedRun]) -> list[Finding]:
    """Findings that need several runs: the conditions of a replicate must have had the same input and work.

    Conditions that declare another workload (the background count of the survival experiment) have a plan of their own
    and are compared only with those that declare the same.
    """
    groups: dict[tuple[str, int, str], list[SealedRun]] = {}
    for run in runs:
        changes = run.manifest.requested_condition.get("workload", {})
        # What a request carries besides its prompt changes no plan.
        workload = json.dumps({key: changes[key] for key in changes if key != "request"}, sort_keys=True)
        groups.setdefault((run.experiment, run.replicate, workload), []).append(run)
    findings: list[Finding] = []
    for (_experiment, replicate, _workload), group in sorted(groups.items()):
        findings.extend(_check_same_plan(replicate, group))
        findings.extend(_check_same_work(replicate, [run for run in group if run.is_valid]))
    return findings


def _check_server(manifest: Manifest) -> Iterator[Finding]:
    if not manifest.server.is_alive_until_stop and manifest.num_replicas == 1:
        evidence = f"the server ended before it was told to stop (exit status {manifest.server.exit_status})"
        yield finding("server-died", evidence)


def _check_declared_lines(run: Evidence) -> Iterator[Finding]:
    declared = run.manifest.observation
    has_decoded = bool((run.requests.column("completion_tokens").fill_null(0).to_numpy() > 1).any())
    has_answered = run.requests.column("prompt_tokens").null_count < run.requests.num_rows
    lines = {
        "bucket-log": ("[BUCKET]", run.derived.num_bucket_lines),
        "iteration-log": ("iteration", run.derived.num_iteration_lines),
    }
    name, num_lines = lines.get(declared.steps, ("", 1))
    if has_decoded and not num_lines:
        yield finding("observer-silent", f"the {name} lines that were declared are not in the log")
    if declared.steps != "bucket-log" and run.derived.num_bucket_lines:
        yield finding(
            "patch-undeclared", f"the log has {run.derived.num_bucket_lines} [BUCKET] lines of a patch nobody declared"
        )
    if has_answered and declared.has_kv_log and not run.derived.num_kv_lines:
        yield finding("kv-log-silent", "the [PFX] lines that were declared are not in the log")


def _check_log(run: Evidence) -> Iterator[Finding]:
    derived = run.derived
    if derived.faults:
        yield finding("kv-fault", f"the server reported inconsistent KV bookkeeping: {', '.join(derived.faults[:3])}")
    if derived.failed_copies:
        yield finding(
            "kv-copy-failed",
            f"reused KV could not be copied for {len(derived.failed_copies)} requests: they were prefilled in full, "
            "while the counters keep the hit",
        )
    counts = run.derived.counts
    if counts.unread or counts.fragments or counts.is_tail_ours:
        sample = f", e.g. {counts.unread_samples[0]!r}" if counts.unread_samples else ""
        torn = counts.unread + counts.fragments + counts.is_tail_ours
        yield finding("log-torn", f"{torn} of {counts.lines} log lines were torn or unknown and not read{sample}")
    if run.derived.num_preemptions:
        yield finding(
            "preempted", f"{run.derived.num_preemptions} preemptions: their second prefills are not in channel A"
        )


def _check_decode_tokens(run: Evidence) -> Iterator[Finding]:
    """Whether the steps produced the tokens of the answers. Mixed steps of a vLLM produce some of them."""
    generated = run.requests.column("completion_tokens").fill_null(0).to_numpy().astype(np.int64)
    # Most decode tokens of the answers that the client left.
    left = sum(row["planned_generate_tokens"] - 1 for row in aborted_rows(run.requests))
    if run.derived.step_log is not None:
        logged_tokens = run.derived.step_log.steps["generated_tokens"]
        is_shown = logged_tokens.null_count < len(logged_tokens)
        expected, logged = int(generated.sum()), sum(tokens or 0 for tokens in logged_tokens.to_pylist())
        evidence = f"the step log has {logged} generated tokens, the answers have {expected}"
    else:
        is_shown = run.derived.steps_source != "none"
        # A preempted request is prefilled again, and that prefill, not a decode step, yields its next token.
        expected = int(np.maximum(generated - 1, 0).sum()) - run.derived.num_preemptions
        logged = int(run.derived.tables["steps"].column("n").to_numpy().astype(np.int64).sum())
        evidence = f"the step log has {logged} decode tokens, the answers have {expected} (sum of G - 1)"
        evidence += f" to {expected + left} (with those that were left)" if left else ""
    if is_shown and not expected <= logged <= expected + left:
        yield finding("decode-tokens", evidence)


def _check_reuse(run: Evidence) -> Iterator[Finding]:
    increment = counter_increment(run.derived.tables["metrics"], CACHED_COUNTER)
    reported = cached_tokens(run.requests)
    if reported is None:
        yield _unknown_reuse(run.requests, increment)
        return
    witnesses: dict[str, int] = {"responses": reported}
    # What the counter and the log may hold beside that: the unreported reuse of answers that the client left.
    left = {name: row["planned_prompt_tokens"] for name, row in left_answers(run.requests).items()}
    if increment is not None:
        counted = round(increment)
        witnesses["counter"] = reported if reported < counted <= reported + sum(left.values()) else counted
    elif run.manifest.observation.has_metrics:
        yield finding(
            "counter-missing",
            f"{CACHED_COUNTER} has no value in the scrape before the replay or in the one after it, so reuse "
            "was not held against the server's own count",
        )
    if run.derived.num_kv_lines:
        hits: Counter[str] = Counter()
        events = rows_where(run.derived.tables["kv_events"], "kind", "cache_hit")
        for log_id, tokens in values_of(events, "request_id", "reused_tokens"):
            if not left or join_request_id(log_id, left) is None:
                hits[log_id] += tokens
        witnesses["reuse log"] = sum(hits.values())
        yield from _check_reuse_by_request(run.requests, hits, has_preemptions=run.derived.num_preemptions > 0)
    if len(set(witnesses.values())) > 1:
        named = ", ".join(f"{name} {tokens}" for name, tokens in witnesses.items())
        # The counter and the log count the second admission of a preempted request, the responses do not.
        yield finding(
            "reuse-disagrees",
            f"cached tokens differ: {named}",
            severity="warning" if run.derived.num_preemptions else "invalid",
        )


def _unknown_reuse(requests: pa.Table, increment: float | None) -> Finding:
    columns = values_of(requests, "prompt_tokens", "cached_tokens")
    unknown = sum(prompt is not None and cached is None for prompt, cached in columns)
    counter = "" if increment is None else f", while {CACHED_COUNTER} rose by {increment:,.0f}"
    return finding(
        "reuse-unknown",
        f"{unknown} of {requests.num_rows} answers do not state usage.prompt_tokens_details{counter}: "
        "what they reused is unknown, and so are the prefill of channel A and every figure of reuse",
    )


def _check_reuse_by_request(requests: pa.Table, hits: Mapping[str, int], *, has_preemptions: bool) -> Iterator[Finding]:
    columns = values_of(requests, "response_id", "cached_tokens", "status")
    reported = {name: tokens or 0 for name, tokens, status in columns if name and status != ABORTED}
    logged: Counter[str | None] = Counter()
    joined = {log_id: join_request_id(log_id, reported) for log_id in hits}
    for log_id, response_id in joined.items():
        logged[response_id] += hits[log_id]
    if strangers := [log_id for log_id, response_id in joined.items() if response_id is None]:
        yield finding("request-foreign", f"{len(strangers)} reuse lines join no request, first {strangers[0]}")
    wrong = [response_id for response_id, tokens in reported.items() if logged[response_id] != tokens]
    if wrong and not has_preemptions:
        first = wrong[0]
        yield finding(
            "reuse-disagrees",
            f"{len(wrong)} responses report other reuse than the log, first {first}: response {reported[first]}, "
            f"log {logged[first]}",
        )


def _check_ids(run: Evidence) -> Iterator[Finding]:
    """Every answer has an id of its own: nothing else separates the lines of the reuse log."""
    named = Counter(name for (name,) in values_of(run.requests, "response_id") if name)
    if repeated := [name for name, count in named.items() if count > 1]:
        yield finding(
            "id-repeated",
            f"{len(repeated)} ids stand in several answers, first {repeated[0]!r} in {named[repeated[0]]}",
            severity="invalid" if run.derived.num_kv_lines else "warning",
        )


def _check_lateness(run: Evidence) -> Iterator[Finding]:
    limits = limits_of(run.manifest)
    yield from check_aborts(run.requests, run.plan, run.manifest.clock.scale, limits.rearrival_lag_p99_ms)
    late = lateness(run.requests, run.manifest.clock.scale)
    p99_ms, spread_ms = late.rearrival_p99_ms, late.start_spread_ms
    if p99_ms is not None and p99_ms > limits.rearrival_lag_p99_ms:
        yield finding(
            "rearrival-late",
            f"re-arrivals left up to {p99_ms:.3f} ms late (p99, wall), "
            f"limits.rearrival_lag_p99_ms is {limits.rearrival_lag_p99_ms:g}",
        )
    if spread_ms is not None and spread_ms > limits.start_spread_ms:
        yield finding(
            "start-spread",
            f"sessions started within {spread_ms:.3f} ms (wall), limits.start_spread_ms is {limits.start_spread_ms:g}",
        )
    if late.num_early:
        yield finding("sent-early", f"{late.num_early} requests left before they were due")


def _check_residual(run: Evidence) -> Iterator[Finding]:
    """A and B apart within one run, by the experiment's own limit; without one the summary only tells."""
    limit = limits_of(run.manifest).residual_share
    b_ns = channel_b(run.requests, run.served)
    if limit is None or run.cost_model is None or not b_ns or not run.derived.tables["steps"].num_rows:
        return
    known = with_logged_prefills(run.requests, run.derived.tables["kv_events"])
    a = None if cached_tokens(known) is None else modelled_of(run.servers, known, run.served, run.cost_model)
    if a is None:
        return
    share = residual_ns(b_ns, a.total_ns) / b_ns
    if share > limit:
        yield finding(
            "channels-apart",
            f"channel A explains {a.total_ns / NS_PER_S:.3f} s of {b_ns / NS_PER_S:.3f} s that channel B saw: r/B = "
            f"{share:.3f}, limits.residual_share is {limit:g}",
            do="Calibrate the cost model on this server, or look for what else kept it busy",
            severity="invalid",
        )


def _time_in_steps(run: Evidence) -> Iterator[Finding]:
    """Where the time in flight went, and which steps the cost model prices otherwise than they took."""
    log = run.derived.step_log
    parts = (
        None if log is None else step_parts(log, run.requests, ScaledClock(run.manifest.clock.scale), run.cost_model)
    )
    if parts is None or not parts.b_ns:
        return
    errors = [
        f"{name} {100 * (group.modelled_ns / group.measured_ns - 1):+.0f} % ({group.num_steps:,} steps)"
        for name, group in parts.groups.items()
        if group.modelled_ns is not None and group.measured_ns
    ]
    yield finding(
        "time-in-steps",
        f"of {parts.b_ns / NS_PER_S:.3f} s in flight (B) the engine was in steps for "
        f"{parts.in_steps_ns / NS_PER_S:.3f} s (S), measured inside it, and between steps for "
        f"{parts.between_ns / NS_PER_S:.3f} s"
        + (f"; the cost model's time of a step against the measured: {', '.join(errors)}" if errors else ""),
    )
    if parts.drift is not None and parts.drift > MAX_DRIFT:
        speeds = ", ".join(f"{measured_ns / expected_ns:.2f}" for measured_ns, expected_ns in parts.quarters)
        yield finding(
            "speed-drifted",
            f"decode steps took {speeds} of their expected time in the four quarters of the run: the slowest "
            f"{100 * parts.drift:.0f} % more than the fastest",
        )


def _moved_ns(manifest: Manifest) -> int:
    """By how much the wall clock moved against the monotonic one during the run; 0 where nobody noted it."""
    after_ns = manifest.clock.realtime_minus_monotonic_after_ns
    return 0 if after_ns is None else after_ns - manifest.clock.realtime_minus_monotonic_ns


def _check_clock(run: Evidence) -> Iterator[Finding]:
    moved_ns = _moved_ns(run.manifest)
    if abs(moved_ns) <= MAX_CLOCK_STEP_NS:
        return
    evidence = f"the wall clock moved by {moved_ns / NS_PER_MS:.3f} ms against the monotonic one during the run"
    limit_ns = limits_of(run.manifest).server_stall_ms * NS_PER_MS
    if abs(moved_ns) > limit_ns and run.derived.log_ns_source == "created" and run.derived.step_log is None:
        hint = "Whether the server stood still cannot be told from its log. Keep the clock from being set during runs"
        yield finding("clock-moved", evidence, do=hint, severity="invalid")
        return
    yield finding("clock-moved", evidence)


def _check_same_plan(replicate: int, runs: Sequence[SealedRun]) -> Iterator[Finding]:
    drawn = {run.condition: run.manifest.drawn_hash for run in runs}
    if len(set(drawn.values())) > 1:
        named = ", ".join(f"{condition} {value[:12] or 'none'}" for condition, value in sorted(drawn.items()))
        yield finding("plan-differs", f"replicate {replicate}: conditions were drawn from different plans ({named})")
    sent: dict[str, set[str]] = {}
    for run in runs:
        sent.setdefault(run.manifest.treatment, set()).add(run.manifest.plan_hash)
    for treatment, hashes in sorted(sent.items()):
        if len(hashes) > 1:
            yield finding(
                "plan-differs", f"replicate {replicate}: treatment {treatment} was sent as {len(hashes)} plans"
            )


def _check_same_work(replicate: int, runs: Sequence[SealedRun]) -> Iterator[Finding]:
    # When an answer is left depends on how fast it comes: where one run left it, the others' is no comparison.
    left = {(row["session"], row["request"]) for run in runs for row in aborted_rows(run.table("requests"))}
    columns = ("session", "request", "completion_tokens")
    work = {
        run.condition: {
            (session, request): tokens or 0
            for session, request, tokens in values_of(run.table("requests"), *columns)
            if (session, request) not in left
        }
        for run in runs
    }
    if len({tuple(sorted(lengths.items())) for lengths in work.values()}) > 1:
        named = ", ".join(f"{condition} {sum(lengths.values())}" for condition, lengths in sorted(work.items()))
        yield finding("work-differs", f"replicate {replicate}: conditions generated different tokens ({named})")


# What a served stack says of itself at its start.
_SHOWN_AT_START = frozenset({"max_num_seqs", "slot_tokens", "prefix_caching", "kv_slots"})
# Reported by a finding of their own, or not of the server.
_NOT_HELD = frozenset({"rules", "cost_model"})


def check_settings(manifest: Manifest) -> Iterator[Finding]:
    """Findings on the settings of one run."""
    varied, shown_names = manifest.varied_settings - HARNESS_KEYS, manifest.effective.get("shown", ())
    if not varied and not shown_names:
        return
    server = ServerSpec.model_validate(manifest.requested_server)
    table = table_at(manifest.effective, "server")
    in_force = {name: table[name] for name in shown_names if name in table}
    shown, is_fresh = keys_shown(in_force), kind_of_run(manifest.backend).is_restarted
    # Paged KV memory has no slots.
    at_start = _SHOWN_AT_START - {"kv_slots"} if server.is_paged else _SHOWN_AT_START
    held = varied | ((at_start | shown if is_fresh else changed_keys(server)) - _NOT_HELD)
    for evidence in differences(server, in_force, held):
        yield finding("setting-differs", evidence)
    # Without a newer key nothing is done that would show it.
    wanted = requested_settings(server)
    shown |= {key for key in NEWER_KEYS if wanted.get(key) is None}
    if unshown := varied - shown:
        named = ", ".join(f"{key} = {requested_settings(server)[key]}" for key in sorted(unshown))
        if server.declared:
            yield finding(SETTING_DECLARED, f"declared, not verified: {named}")
        else:
            evidence = f"conditions differ in what nothing shows: {named}"
            yield finding(
                "setting-unshown",
                evidence,
                do="A server without graphs (a CPU, or --enforce-eager) captures no sizes: leave the key out"
                if server.is_vllm and "decode_buckets" in unshown
                else None,
            )
    if unknown := held - varied - shown:
        yield finding("setting-unknown", f"nothing shows {', '.join(sorted(unknown))}", do=None if is_fresh else "")


def _of_manifest(check: Callable[[Manifest], Iterator[Finding]]) -> Callable[[Evidence], Iterator[Finding]]:
    return lambda run: check(run.manifest)


CHECKS: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    *map(_of_manifest, (_check_server, check_settings)),
    check_answers,
    _of_manifest(check_tolerated),
    _check_declared_lines,
    check_scrapes,
    check_same_server,
    check_engines,
    check_running,
    check_loaded,
    check_moved_schedule,
    check_counts,
    _check_log,
    _check_each_server,
    _check_decode_tokens,
    _check_reuse,
    check_clean_start,
    _check_ids,
    _check_lateness,
    _check_residual,
    _time_in_steps,
    _check_clock,
    *map(_of_manifest, (check_freezes, check_held_tokens, check_read_together)),
)
