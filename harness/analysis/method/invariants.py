"""Every invariant of a run, as findings: what was expected, what was found, and the next move.

A finding of severity "invalid" makes a run INVALID; nothing here raises, stops or repairs.
Definitions: docs/method.md, "A run and its invariants".
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from harness.analysis.method.aborted import (
    aborted_rows,
    check_aborts,
    most_decode_tokens,
    response_id_of,
    with_logged_prefills,
)
from harness.analysis.method.lateness import lateness
from harness.analysis.method.reconstruct import StepCost, channel_a, channel_b, join_request_id, residual_ns
from harness.analysis.method.reuse import cached_tokens, is_reuse_known
from harness.analysis.method.settings import check_settings
from harness.clock import NS_PER_MS, NS_PER_S
from harness.records import Finding, Manifest, SealedRun
from harness.records.schema import ABORTED
from harness.spec import LimitsSpec

if TYPE_CHECKING:
    from harness.analysis.logs.derive import Derived
    from harness.plan import Plan

CACHED_COUNTER = "vllm:prompt_tokens_cached_total"
MAX_NAMED = 3
MAX_CLOCK_STEP_NS = NS_PER_MS


def check_run(
    manifest: Manifest,
    *,
    requests: pa.Table,
    derived: Derived,
    plan: Plan | None = None,
    cost_model: StepCost | None = None,
) -> list[Finding]:
    """Findings of one run, the invalid ones first.

    requests: REQUESTS schema. derived: of the same run. plan: what was to be sent; without it, the planned columns of
    ``requests`` and the manifest's own counts stand for it. cost_model: prices channel A where a limit asks for it.
    """
    findings = [
        *_check_server(manifest),
        *check_settings(manifest),
        *_check_answers(manifest, requests, plan),
        *_check_observation(manifest, requests, derived),
        *_check_decode_tokens(requests, derived),
        *_check_reuse(manifest, requests, derived),
        *_check_ids(requests, derived),
        *_check_lateness(manifest, requests, plan),
        *_check_residual(manifest, requests, derived, cost_model),
        *_check_clock(manifest),
        *check_freezes(manifest),
    ]
    order = ("invalid", "warning", "info")
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def check_experiment(runs: Sequence[SealedRun]) -> list[Finding]:
    """Findings that need several runs: the conditions of a replicate must have had the same input and work.

    Conditions that declare another workload (the background count of the survival experiment) have a plan of their own
    and are compared only with those that declare the same.
    """
    groups: dict[tuple[str, int, str], list[SealedRun]] = {}
    for run in runs:
        groups.setdefault((run.experiment, run.replicate, _workload_changes(run)), []).append(run)
    findings: list[Finding] = []
    for (_experiment, replicate, _workload), group in sorted(groups.items()):
        findings.extend(_check_same_plan(replicate, group))
        findings.extend(_check_same_work(replicate, [run for run in group if run.is_valid]))
    return findings


def _workload_changes(run: SealedRun) -> str:
    """What the run's condition changes in the experiment's workload, as text that compares."""
    return json.dumps(run.manifest.requested_condition.get("workload", {}), sort_keys=True)


def _check_server(manifest: Manifest) -> Iterator[Finding]:
    if not manifest.server.is_alive_until_stop:
        evidence = f"the server ended before it was told to stop (exit status {manifest.server.exit_status})"
        yield _invalid("server-died", evidence, "Read the end of server.log")


def _check_answers(manifest: Manifest, requests: pa.Table, plan: Plan | None) -> Iterator[Finding]:
    rows = requests.select(
        ["session", "request", "status", "planned_generate_tokens", "completion_tokens", "planned_prompt_tokens",
         "prompt_tokens"]
    ).to_pylist()  # fmt: skip
    keys = Counter((row["session"], row["request"]) for row in rows)
    if repeated := [key for key, count in keys.items() if count > 1]:
        yield _invalid("request-repeated", f"{len(repeated)} requests have several rows, first {_name(repeated)}")
    yield from _check_plan(manifest, keys, rows, plan)
    if failed := [row for row in rows if row["status"] not in ("ok", ABORTED)]:
        kinds = Counter(row["status"] for row in failed)
        which = ", ".join(f"{count} {status}" for status, count in sorted(kinds.items()))
        yield _invalid(
            "request-failed",
            f"{len(failed)} of {len(rows)} requests were not answered as planned ({which}), first {_names(failed)}",
            "See columns status, http_status and error of the requests table",
        )
    answered = [row for row in rows if row["status"] == "ok"]
    if wrong := [row for row in answered if row["completion_tokens"] != row["planned_generate_tokens"]]:
        yield _invalid(
            "wrong-length",
            f"{len(wrong)} answers have another number of tokens than planned, first {_names(wrong)}",
            "The server must honour ignore_eos and max_tokens",
        )
    if drifted := [row for row in answered if row["prompt_tokens"] != row["planned_prompt_tokens"]]:
        is_text = plan is not None and plan.prompt_form == "text"
        drift = sum((row["prompt_tokens"] or 0) - row["planned_prompt_tokens"] for row in drifted)
        yield Finding(
            code="prompt-drift",
            severity="warning" if is_text else "invalid",
            evidence=f"{len(drifted)} prompts were counted with {drift:+d} tokens in sum, first {_names(drifted)}",
            hint="Text prompts are re-tokenised by the server; token-id prompts are exact" if is_text else "",
        )


def _check_plan(
    manifest: Manifest, keys: Mapping[tuple[int, int], int], rows: Sequence[Mapping[str, Any]], plan: Plan | None
) -> Iterator[Finding]:
    if plan is None:
        if len(keys) != manifest.planned_requests:
            yield _invalid("request-missing", f"{manifest.planned_requests} requests planned, {len(keys)} recorded")
        return
    if plan.hash != manifest.plan_hash:
        yield _invalid("plan-mismatch", f"the run names plan {manifest.plan_hash[:12]}, the plan is {plan.hash[:12]}")
    planned = {
        (session.index, index): (request.prompt_tokens, request.generate_tokens)
        for session in plan.sessions
        for index, request in enumerate(session.requests)
    }
    if missing := sorted(planned.keys() - keys.keys()):
        yield _invalid("request-missing", f"{len(missing)} planned requests have no row, first {_name(missing)}")
    if unplanned := sorted(keys.keys() - planned.keys()):
        yield _invalid("request-unplanned", f"{len(unplanned)} rows were never planned, first {_name(unplanned)}")
    lengths = ((row, planned.get((row["session"], row["request"]))) for row in rows)
    changed = [
        row
        for row, plan_lengths in lengths
        if plan_lengths and plan_lengths != (row["planned_prompt_tokens"], row["planned_generate_tokens"])
    ]
    if changed:
        yield _invalid(
            "plan-mismatch", f"{len(changed)} rows carry other lengths than the plan, first {_names(changed)}"
        )


def _check_observation(manifest: Manifest, requests: pa.Table, derived: Derived) -> Iterator[Finding]:
    declared = manifest.observation
    has_decoded = any((tokens or 0) > 1 for tokens in requests.column("completion_tokens").to_pylist())
    has_answered = any(tokens is not None for tokens in requests.column("prompt_tokens").to_pylist())
    if has_decoded and declared.steps == "bucket-log" and not derived.num_bucket_lines:
        yield _invalid("observer-silent", "the [BUCKET] lines that were declared are not in the log", _PATCH_HINT)
    if has_decoded and declared.steps == "iteration-log" and not derived.num_iteration_lines:
        yield _invalid("observer-silent", "the iteration lines that were declared are not in the log", _PATCH_HINT)
    if declared.steps != "bucket-log" and derived.num_bucket_lines:
        yield _invalid(
            "patch-undeclared", f"the log has {derived.num_bucket_lines} [BUCKET] lines of a patch nobody declared"
        )
    if has_answered and declared.has_kv_log and not derived.num_kv_lines:
        yield _invalid("kv-log-silent", "the [PFX] lines that were declared are not in the log", _DEBUG_HINT)
    if declared.has_metrics and not derived.tables["metrics"].num_rows:
        yield _invalid("metrics-missing", f"none of {derived.num_scrapes} scrapes has a readable body with samples")
    elif derived.num_failed_scrapes:
        evidence = f"{derived.num_failed_scrapes} of {derived.num_scrapes} scrapes have no readable body"
        yield Finding(code="scrape-failed", severity="warning", evidence=evidence)
    if derived.faults:
        yield _invalid("kv-fault", f"the server reported inconsistent KV bookkeeping: {', '.join(derived.faults[:3])}")
    if derived.failed_copies:
        yield _invalid(
            "kv-copy-failed",
            f"reused KV could not be copied for {len(derived.failed_copies)} requests: they were prefilled in full, "
            "while the counters keep the hit",
            "Read the traceback in server.log",
        )
    counts = derived.counts
    if counts.unread or counts.fragments or counts.is_tail_ours:
        sample = f", e.g. {counts.unread_samples[0]!r}" if counts.unread_samples else ""
        torn = counts.unread + counts.fragments + counts.is_tail_ours
        yield Finding(
            code="log-torn",
            severity="warning",
            evidence=f"{torn} of {counts.lines} log lines were torn or unknown and not read{sample}",
            hint="The counts below tell whether steps are missing",
        )
    if derived.num_preemptions:
        yield Finding(
            code="preempted",
            severity="warning",
            evidence=f"{derived.num_preemptions} preemptions: their second prefills are not in channel A",
            hint="Use at least as many KV slots as the limit",
        )


def _check_decode_tokens(requests: pa.Table, derived: Derived) -> Iterator[Finding]:
    if derived.steps_source == "none":
        return
    generated = [tokens for tokens in requests.column("completion_tokens").to_pylist() if tokens]
    # A preempted request is prefilled again, and that prefill, not a decode step, yields its next token.
    expected = sum(tokens - 1 for tokens in generated) - derived.num_preemptions
    logged = sum(derived.tables["steps"].column("n").to_pylist())
    most = expected + most_decode_tokens(requests)
    if not expected <= logged <= most:
        yield _invalid(
            "decode-tokens",
            f"the step log has {logged} decode tokens, the answers have {expected} (sum of G - 1)"
            + (f" to {most} (with those that were left)" if most > expected else ""),
            "Lines of the log were lost, or something else used the server",
        )


def _check_reuse(manifest: Manifest, requests: pa.Table, derived: Derived) -> Iterator[Finding]:
    increment = counter_increment(derived.tables["metrics"], CACHED_COUNTER)
    if not is_reuse_known(requests):
        yield _unknown_reuse(requests, increment)
        return
    told = cached_tokens(requests) or 0
    witnesses: dict[str, int] = {"responses": told}
    # What the counter and the log may hold beside that: the reuse of answers that were left, which nobody told.
    left = {response_id_of(row): row["planned_prompt_tokens"] for row in aborted_rows(requests)}
    if increment is not None:
        witnesses["counter"] = told if told < round(increment) <= told + sum(left.values()) else round(increment)
    elif manifest.observation.has_metrics:
        yield Finding(
            code="counter-missing",
            severity="warning",
            evidence=f"{CACHED_COUNTER} has no value in the scrape before the replay or in the one after it, so reuse "
            "was not held against the server's own count",
        )
    if derived.num_kv_lines:
        hits = {name: hit for name, hit in _hits(derived).items() if join_request_id(name, left) is None}
        witnesses["reuse log"] = sum(hits.values())
        yield from _check_reuse_by_request(requests, hits, has_preemptions=derived.num_preemptions > 0)
    if len(set(witnesses.values())) > 1:
        named = ", ".join(f"{name} {tokens}" for name, tokens in witnesses.items())
        # The counter and the log count the second admission of a preempted request, the responses do not.
        severity = "warning" if derived.num_preemptions else "invalid"
        yield Finding(code="reuse-disagrees", severity=severity, evidence=f"cached tokens differ: {named}")


def _unknown_reuse(requests: pa.Table, increment: float | None) -> Finding:
    columns = (requests.column(name).to_pylist() for name in ("prompt_tokens", "cached_tokens"))
    unknown = sum(prompt is not None and cached is None for prompt, cached in zip(*columns, strict=True))
    counter = "" if increment is None else f", while {CACHED_COUNTER} rose by {increment:,.0f}"
    return Finding(
        code="reuse-unknown",
        severity="warning",
        evidence=f"{unknown} of {requests.num_rows} answers do not state usage.prompt_tokens_details{counter}: "
        "what they reused is unknown, and so are the prefill of channel A and every figure of reuse",
        hint="Start the server with --enable-prompt-tokens-details",
    )


def _check_reuse_by_request(requests: pa.Table, hits: Mapping[str, int], *, has_preemptions: bool) -> Iterator[Finding]:
    columns = (requests.column(name).to_pylist() for name in ("response_id", "cached_tokens", "status"))
    told = {name: tokens or 0 for name, tokens, status in zip(*columns, strict=True) if name and status != ABORTED}
    logged: dict[str, int] = {}
    strangers: list[str] = []
    for log_id, tokens in hits.items():
        response_id = join_request_id(log_id, told)
        if response_id is None:
            strangers.append(log_id)
        else:
            logged[response_id] = logged.get(response_id, 0) + tokens
    if strangers:
        yield _invalid("request-foreign", f"{len(strangers)} reuse lines join no request, first {strangers[0]}")
    wrong = [response_id for response_id, tokens in told.items() if logged.get(response_id, 0) != tokens]
    if wrong and not has_preemptions:
        first = wrong[0]
        yield _invalid(
            "reuse-disagrees",
            f"{len(wrong)} responses report other reuse than the log, first {first}: response {told[first]}, "
            f"log {logged.get(first, 0)}",
        )


def _check_ids(requests: pa.Table, derived: Derived) -> Iterator[Finding]:
    """Every answer has an id of its own: the lines of the reuse log are told apart by nothing else."""
    named = Counter(one for one in requests.column("response_id").to_pylist() if one)
    if repeated := [name for name, count in named.items() if count > 1]:
        yield Finding(
            code="id-repeated",
            severity="invalid" if derived.num_kv_lines else "warning",
            evidence=f"{len(repeated)} ids stand in several answers, first {repeated[0]!r} in {named[repeated[0]]}",
            hint="Reuse by request cannot be checked where the server names its answers alike",
        )


def _hits(derived: Derived) -> dict[str, int]:
    events = derived.tables["kv_events"]
    columns = [events.column(name).to_pylist() for name in ("kind", "request_id", "reused_tokens")]
    hits: dict[str, int] = {}
    for kind, log_id, tokens in zip(*columns, strict=True):
        if kind == "cache_hit":
            hits[log_id] = hits.get(log_id, 0) + tokens
    return hits


def counter_increment(metrics: pa.Table, name: str) -> float | None:
    """Last minus first scraped value of a counter, summed over its labels; None unless scraped before and after.

    NaN and infinity are no values.
    """
    by_scrape: dict[int, float] = {}
    reasons: dict[int, str] = {}
    columns = [metrics.column(column).to_pylist() for column in ("scrape", "reason", "name", "value")]
    for scrape, reason, metric, value in zip(*columns, strict=True):
        if metric == name:
            by_scrape[scrape] = by_scrape.get(scrape, 0.0) + value
            reasons[scrape] = reason
    before = [scrape for scrape, reason in reasons.items() if reason == "before"]
    after = [scrape for scrape, reason in reasons.items() if reason == "after"]
    increment = by_scrape[max(after)] - by_scrape[min(before)] if before and after else math.nan
    return increment if math.isfinite(increment) else None


def _check_lateness(manifest: Manifest, requests: pa.Table, plan: Plan | None) -> Iterator[Finding]:
    limits = LimitsSpec.model_validate(manifest.requested.get("limits", {}))
    yield from check_aborts(requests, plan, manifest.clock.scale, limits.rearrival_lag_p99_ms)
    late = lateness(requests, manifest.clock.scale)
    p99_ms = late.rearrival_quantile_ms(0.99)
    if p99_ms is not None and p99_ms > limits.rearrival_lag_p99_ms:
        yield _invalid(
            "rearrival-late",
            f"re-arrivals left up to {p99_ms:.3f} ms late (p99, wall), the limit is {limits.rearrival_lag_p99_ms:g} ms",
            "Run on an idler machine, or raise limits.rearrival_lag_p99_ms and say so",
        )
    spread_ms = late.start_spread_ms
    if spread_ms is not None and spread_ms > limits.start_spread_ms:
        yield _invalid(
            "start-spread",
            f"sessions started within {spread_ms:.3f} ms (wall), the limit is {limits.start_spread_ms:g} ms",
            "Run on an idler machine, or raise limits.start_spread_ms and say so",
        )
    if late.num_early:
        yield _invalid("sent-early", f"{late.num_early} requests left before they were due")


def _check_residual(
    manifest: Manifest, requests: pa.Table, derived: Derived, cost_model: StepCost | None
) -> Iterator[Finding]:
    """A and B apart within one run, by the experiment's own limit; without one the summary only tells."""
    limit = LimitsSpec.model_validate(manifest.requested.get("limits", {})).residual_share
    b_ns = channel_b(requests)
    if limit is None or cost_model is None or not b_ns or not derived.tables["steps"].num_rows:
        return
    kv_events = derived.tables["kv_events"]
    known = with_logged_prefills(requests, kv_events)
    if not is_reuse_known(known):
        return
    a_ns = channel_a(derived.tables["steps"], known, cost_model, kv_events).total_ns
    share = residual_ns(b_ns, a_ns) / b_ns
    if share > limit:
        yield _invalid(
            "channels-apart",
            f"channel A explains {a_ns / NS_PER_S:.3f} s of {b_ns / NS_PER_S:.3f} s that channel B saw: r/B = "
            f"{share:.3f}, the limit is {limit:g}",
            "Calibrate the cost model on this server, or look for what else kept it busy",
        )


def _check_clock(manifest: Manifest) -> Iterator[Finding]:
    after_ns = manifest.clock.realtime_minus_monotonic_after_ns
    if after_ns is None:
        return
    moved_ns = after_ns - manifest.clock.realtime_minus_monotonic_ns
    if abs(moved_ns) > MAX_CLOCK_STEP_NS:
        yield Finding(
            code="clock-moved",
            severity="warning",
            evidence=f"the wall clock moved by {moved_ns / NS_PER_MS:.3f} ms against the monotonic one during the run",
            hint="Log stamps are off by up to that; counts and both channels are not affected",
        )


def check_freezes(manifest: Manifest) -> Iterator[Finding]:
    """What the machine did to the client: stalls that touched a request, receives that waited for it, a lost meter.

    Runs without a client on this machine (simulated ones, and those recorded before it was noted) say nothing of it.
    """
    limits = LimitsSpec.model_validate(manifest.requested.get("limits", {}))
    audit = manifest.client_audit
    stall_ms, lag_ms = audit.get("touching_stall_max_ms"), audit.get("stamp_lag_max_ms")
    if audit.get("is_stall_meter_complete") is False:
        yield Finding(
            code="stall-meter-lost",
            severity="invalid" if limits.needs_stall_meter else "warning",
            evidence="the stall meter ended before the run did: whether the host stalled is not known",
            hint="Something ended that process; limits.needs_stall_meter = false keeps such runs, and says so",
        )
    if stall_ms is not None and stall_ms > limits.stall_ms:
        yield _invalid(
            "host-stalled",
            f"the host stood still for {stall_ms:.0f} ms (wall) while requests were due or under way, "
            f"the limit is {limits.stall_ms:g} ms",
            "Run on an idler machine, or raise limits.stall_ms and say so",
        )
    if lag_ms is not None and lag_ms > limits.stamp_lag_ms:
        yield _invalid(
            "client-stalled",
            f"what had arrived waited up to {lag_ms:.0f} ms (wall) for the client, "
            f"the limit is {limits.stamp_lag_ms:g} ms",
            "Run on an idler machine, or raise limits.stamp_lag_ms and say so",
        )


def _check_same_plan(replicate: int, runs: Sequence[SealedRun]) -> Iterator[Finding]:
    drawn = {run.condition: run.manifest.drawn_hash for run in runs}
    if len(set(drawn.values())) > 1:
        told = ", ".join(f"{condition} {value[:12] or 'none'}" for condition, value in sorted(drawn.items()))
        yield _invalid("plan-differs", f"replicate {replicate}: conditions were drawn from different plans ({told})")
    sent: dict[str, set[str]] = {}
    for run in runs:
        sent.setdefault(run.manifest.treatment, set()).add(run.manifest.plan_hash)
    for treatment, hashes in sorted(sent.items()):
        if len(hashes) > 1:
            yield _invalid(
                "plan-differs", f"replicate {replicate}: treatment {treatment} was sent as {len(hashes)} plans"
            )


def _check_same_work(replicate: int, runs: Sequence[SealedRun]) -> Iterator[Finding]:
    work = {run.condition: _decode_work(run.table("requests")) for run in runs}
    # When an answer is left depends on how fast it comes: where one run left it, the others' is no comparison.
    left = {(row["session"], row["request"]) for run in runs for row in aborted_rows(run.table("requests"))}
    work = {name: {key: tokens for key, tokens in own.items() if key not in left} for name, own in work.items()}
    if len({tuple(sorted(lengths.items())) for lengths in work.values()}) > 1:
        told = ", ".join(f"{condition} {sum(lengths.values())}" for condition, lengths in sorted(work.items()))
        yield _invalid("work-differs", f"replicate {replicate}: conditions generated different tokens ({told})")


def _decode_work(requests: pa.Table) -> dict[tuple[int, int], int]:
    columns = [requests.column(name).to_pylist() for name in ("session", "request", "completion_tokens")]
    return {(session, request): tokens or 0 for session, request, tokens in zip(*columns, strict=True)}


_PATCH_HINT = "Check that the observer is installed in the server's environment and its log level is on"
_DEBUG_HINT = "The server must log at level DEBUG for vllm_rbln.v1.core.prefix_cache_manager"


def _invalid(code: str, evidence: str, hint: str = "") -> Finding:
    return Finding(code=code, severity="invalid", evidence=evidence, hint=hint)


def _name(keys: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"session {session} request {request}" for session, request in keys[:MAX_NAMED])


def _names(rows: Sequence[Mapping[str, Any]]) -> str:
    return _name([(row["session"], row["request"]) for row in rows])
