"""Whether a run's answers are those of its plan: each request once, of the planned length, from a clean cache.

Usage comes with the end of an answer, so the length and reuse of an answer that the client left are unknown, and none
of it is guessed. A server that is not restarted has a cache that outlives a run; before one that is, a router may
change prompts. Definitions: docs/reference/method.md, "A run and its invariants"; docs/reference/method-sessions.md,
"Answers that the client leaves".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.analysis.run_tables import KEY_BITS, ROUNDING_NS, aborted_rows, request_keys
from harness.analysis.stats import IntArray
from harness.analysis.validity.evidence import Evidence
from harness.clock import NS_PER_MS
from harness.kinds import kind_of_run
from harness.measure.records.findings import finding, tolerated
from harness.measure.records.manifest import Finding, Manifest, table_at
from harness.measure.records.schema import ABORTED, rows_where, values_of

if TYPE_CHECKING:
    from harness.model.plan.model import Plan

MAX_NAMED = 3
# The status of HTTP for a request with too many bytes.
TOO_LARGE = 413
_DRIFT_HINTS = {
    "text": "The server tokenises the text again, answers in it included; token-id prompts are exact",
    "chat": "The server's chat template adds tokens to each message, and the server tokenises the text again: lengths "
    "are those of usage, and whether an answer's tokens come back unchanged in the next prompt is not known",
}
_SIZED_BY = {
    "tokenize": "Words were sized by the server's tokenizer",
    "usage": "Words were sized by the usage of longer prompts",
    "assumed": "Words were taken as one token each, because the server did not tell their sizes",
}
# Share of a prompt's planned tokens.
MOST_DRIFT = 0.01
# vllm.v1.engine.FINISH_REASON_STRINGS
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


def check_answers(run: Evidence) -> Iterator[Finding]:
    """Whether the requests of the plan were sent, each once, and answered as planned.

    requests: REQUESTS schema. plan: what was to be sent; without it only the manifest's count of requests is known.
    """
    keys, counts = np.unique(run.keys, return_counts=True)
    if len(repeated := keys[counts > 1]):
        yield finding("request-repeated", f"{len(repeated)} requests have several rows, first {_names(repeated)}")
    yield from _check_plan(run, keys)
    status = run.requests.column("status").to_numpy()
    if len(failed := np.flatnonzero((status != "ok") & (status != ABORTED))):
        kinds = Counter(status[failed].tolist())
        which = ", ".join(f"{count} {status}" for status, count in sorted(kinds.items()))
        yield finding(
            "request-failed",
            f"{len(failed)} of {run.requests.num_rows} requests were not answered as planned ({which}), "
            f"first {_names(run.keys[failed])}{_words_of_first(run.requests, failed, status)}",
            do="A proxy limits the size of requests: raise that (nginx: client_max_body_size), or shorten the prompts"
            if TOO_LARGE in run.requests.column("http_status").to_numpy()[failed[:1]]
            else None,
        )
    answered = run.requests.filter(pa.array(status == "ok"))
    generated = answered.column("completion_tokens").fill_null(-1).to_numpy()
    if len(wrong := request_keys(answered)[generated != answered.column("planned_generate_tokens").to_numpy()]):
        yield finding(
            "wrong-length", f"{len(wrong)} answers have another number of tokens than planned, first {_names(wrong)}"
        )
    yield from _check_reasons(answered)
    yield from _check_prompts(answered, run.plan, run.manifest.client_audit.get("text_sizes", {}))


def _check_prompts(answered: pa.Table, plan: Plan | None, sizes: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether prompts were counted as planned. sizes: of text, as the manifest has them; empty for token ids."""
    counted = answered.column("prompt_tokens").fill_null(0).to_numpy()
    sent = answered.column("planned_prompt_tokens").to_numpy()
    drifted = counted != sent
    if not drifted.any():
        return
    form = plan.prompt_form if plan is not None else "token-ids"
    drift, planned = int((counted - sent)[drifted].sum()), int(sent[drifted].sum())
    which = f"first {_names(request_keys(answered)[drifted])}"
    evidence = f"{drifted.sum()} prompts were counted with {drift:+d} tokens in sum ({planned} planned), {which}"
    if form not in _DRIFT_HINTS:
        yield finding("prompt-drift", evidence)
        return
    shares = np.abs(counted - sent) / np.maximum(sent, 1)
    num_far = int((shares > MOST_DRIFT).sum())
    evidence += f"; {num_far} of them differ by more than {100 * MOST_DRIFT:.0f} %, at most {100 * shares.max():.1f} %"
    if sizes:
        evidence += (
            f". {_SIZED_BY.get(sizes.get('source', ''), '')} ({sizes.get('words_per_token', 1):.3g} words a token)"
        )
    smallest = min(sizes.get("word_tokens", ()), default=1)
    if num_far and sizes.get("source") == "usage":
        evidence += ". That is a mean by the letters of a word: which words are longer is not known"
    elif num_far and smallest > 1:
        evidence += f". The shortest word is {smallest:g} tokens: shorter parts of a prompt cannot be exact"
    if num_far and (added := sizes.get("turn_tokens", 0)):
        evidence += f". The chat template adds {added} tokens to each turn: a shorter turn cannot be exact"
    yield finding("prompt-drift", evidence, do=_DRIFT_HINTS[form], severity="warning" if num_far else "info")


def check_tolerated(manifest: Manifest) -> Iterator[Finding]:
    """What the server's answers contained that vLLM's do not, and that no figure depends on: one finding each."""
    for code, num_answers in sorted(manifest.client_audit.get("tolerated", {}).items()):
        yield Finding(code=f"tolerated-{code}", severity="info", evidence=f"{tolerated(code)} ({num_answers} answers)")


def _check_reasons(answered: pa.Table) -> Iterator[Finding]:
    """Why answers of the planned length ended, in the server's words: no other word than ``length`` fits."""
    reasons = Counter(reason for (reason,) in values_of(answered, "finish_reason") if reason != "length")
    if not reasons:
        return
    words = [
        f"{count} {reason!r}" + ("" if reason in FINISH_REASONS else " (a word that vLLM does not document)")
        for reason, count in reasons.most_common(MAX_NAMED)
    ]
    yield finding(
        "finish-reason",
        f"{reasons.total()} answers have the planned length, but do not state 'length' as their end: "
        + ", ".join(words),
    )


def _words_of_first(requests: pa.Table, failed: NDArray[Any], status: NDArray[Any]) -> str:
    """The error text of the first request that failed; empty where there is none."""
    errors = requests.column("error").take(pa.array(failed[status[failed] != "not_sent"]))
    first = next((text for error in errors if (text := error.as_py())), "")
    return f'; the first says "{first}"' if first else ""


def _check_plan(run: Evidence, keys: IntArray) -> Iterator[Finding]:
    """keys: of all rows, ascending, without repetition."""
    if run.plan is None:
        if len(keys) != run.manifest.planned_requests:
            yield finding("request-missing", f"{run.manifest.planned_requests} requests planned, {len(keys)} recorded")
        return
    if run.plan.hash != run.manifest.plan_hash:
        yield finding(
            "plan-mismatch", f"the run names plan {run.manifest.plan_hash[:12]}, the plan is {run.plan.hash[:12]}"
        )
    planned = _planned(run.plan)
    if len(missing := np.setdiff1d(planned[:, 0], keys)):
        yield finding("request-missing", f"{len(missing)} planned requests have no row, first {_names(missing)}")
    if len(unplanned := np.setdiff1d(keys, planned[:, 0])):
        yield finding("request-unplanned", f"{len(unplanned)} rows were never planned, first {_names(unplanned)}")
    of_rows = run.keys
    place = np.minimum(np.searchsorted(planned[:, 0], of_rows), len(planned) - 1)
    lengths = [run.requests.column(name).to_numpy() for name in ("planned_prompt_tokens", "planned_generate_tokens")]
    is_changed = (planned[place, 1] != lengths[0]) | (planned[place, 2] != lengths[1])
    if len(changed := of_rows[is_changed & (planned[place, 0] == of_rows)]):
        yield finding(
            "plan-mismatch", f"{len(changed)} rows carry other lengths than the plan, first {_names(changed)}"
        )


def _planned(plan: Plan) -> IntArray:
    """Key, prompt tokens and generated tokens of each request, by key. Shape (requests, 3)."""
    numbers = (
        number
        for session in plan.sessions
        for place, request in enumerate(session.requests)
        for number in (session.index << KEY_BITS | place, request.prompt_tokens, request.generate_tokens)
    )
    planned = np.fromiter(numbers, np.int64, 3 * plan.num_requests).reshape(-1, 3)
    return planned[np.argsort(planned[:, 0])]


def _names(keys: IntArray) -> str:
    """The first few requests, in words. keys: see ``request_keys``."""
    pairs = [divmod(key, 1 << KEY_BITS) for key in keys[:MAX_NAMED].tolist()]
    return ", ".join(f"session {session} request {request}" for session, request in pairs)


def check_aborts(requests: pa.Table, plan: Plan | None, scale: float, limit_ms: float) -> Iterator[Finding]:
    """Whether the client left what it was to leave, and when; what the checks of lengths and reuse leave out.

    scale: model ns per wall ns. limit_ms: the most that leaving may come late, wall (p99).
    """
    left = {(row["session"], row["request"]): row for row in aborted_rows(requests)}
    if left:
        yield finding(
            "left-as-planned",
            f"the client left {len(left)} answers as planned: their usage is unknown, so that the checks of "
            "lengths, of decode tokens and of cached tokens leave them out",
        )
    if plan is None:
        return
    planned = {
        (session.index, place): request for session in plan.sessions for place, request in enumerate(session.requests)
    }
    if strangers := [key for key in left if key not in planned or not planned[key].is_abortable]:
        yield _invalid("abort-unplanned", f"{len(strangers)} answers were left that the plan stays for", strangers[0])
    ended = set(values_of(rows_where(requests, "status", "ok"), "session", "request"))
    if missed := [key for key in sorted(ended) if key in planned and planned[key].abort_after_tokens]:
        yield _invalid("abort-missed", f"{len(missed)} answers ended that the client was to leave", missed[0])
    late_ms = {
        key: (row["done_ns"] - row["sent_ns"] - planned[key].abort_after_ns) / (scale * NS_PER_MS)
        for key, row in left.items()
        if key in planned and planned[key].abort_after_ns
    }
    early_ms = -ROUNDING_NS * max(1.0, scale) / (scale * NS_PER_MS)
    if early := [key for key, late in late_ms.items() if late < early_ms]:
        yield _invalid("abort-early", f"the client left {len(early)} answers before their instant", early[0])
    if late_ms and (p99_ms := float(np.quantile(list(late_ms.values()), 0.99, method="higher"))) > limit_ms:
        evidence = (
            f"the client left up to {p99_ms:.3f} ms late (p99, wall), the limit of re-arrivals is {limit_ms:g} ms"
        )
        yield _invalid("abort-late", evidence, max(late_ms, key=lambda key: late_ms[key]))


def _invalid(code: str, evidence: str, key: tuple[int, int]) -> Finding:
    return finding(code, f"{evidence}, first session {key[0]} request {key[1]}")


# On servers that match single tokens, the first ids of two prompts may be equal by chance.
CHANCE_TOKENS = 4
# Text that is sized by a mean is longer or shorter by a few percent (MOST_DRIFT and above are findings).
TEXT_MARGIN = 1.1


def check_clean_start(run: Evidence) -> Iterator[Finding]:
    """The finding ``cache-not-clean``; nothing is judged without the plan, or where reuse is not reported."""
    is_fresh = kind_of_run(run.manifest.backend).is_restarted
    if run.plan is None:
        return
    # A server adds words to every prompt, and nobody told their number.
    is_told = table_at(run.manifest.client_audit, "text_sizes").get("first_tokens")
    if is_fresh and run.plan.prompt_form == "chat" and not is_told:
        return
    explained = _explained(run.manifest, run.plan)
    columns = values_of(run.requests, "session", "request", "cached_tokens", "prompt_tokens")
    first = [row for row in columns if (row[0], row[1]) in explained and row[2] is not None]
    stale = [row for row in first if row[2] > explained[row[0], row[1]] + CHANCE_TOKENS]
    if not stale:
        return
    session, request, cached, _prompt = stale[0]
    found, prompts = sum(row[2] for row in first), sum(row[3] or 0 for row in first)
    yield finding(
        "cache-not-clean",
        f"{len(stale)} of {len(first)} first requests found tokens that nothing of this run had sent: {found:,} of "
        f"{prompts:,} tokens were cached, first session {session} request {request} with {cached:,} where the plan "
        f"explains {explained[session, request]:,}",
        do="Something changes the prompts on their way, or the cache matches what is not equal: measure without routers"
        if is_fresh
        else None,
    )


def _explained(manifest: Manifest, plan: Plan) -> dict[tuple[int, int], int]:
    """For each request that begins a stream afresh the tokens that other requests of the run may have cached."""
    held = Counter(name for session in plan.sessions for name in set(session.blocks))
    shared: dict[tuple[int, int], int] = {}
    for session in plan.sessions:
        for place, request in enumerate(session.requests):
            if request.keep_tokens or (place == 0 and session.continues is not None):
                continue
            names = session.blocks if place == 0 else ()
            alone = next((at for at, name in enumerate(names) if held[name] == 1), len(names))
            shared[session.index, place] = max(plan.shared_prefix_tokens, alone * plan.block_tokens)
    if plan.prompt_form == "token-ids":
        return shared
    # A server adds the same words to every prompt, whatever the run.
    added = table_at(manifest.client_audit, "text_sizes").get("first_tokens", 0)
    return {key: math.ceil(TEXT_MARGIN * tokens) + added for key, tokens in shared.items()}
