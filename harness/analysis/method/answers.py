"""Whether a run's answers are those of its plan: each request once, of the planned length, ended by that length.

Definitions: docs/method.md, "A run and its invariants".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.analysis.method.stalls import invalid
from harness.records import Finding, Manifest
from harness.records.schema import ABORTED, values_of

if TYPE_CHECKING:
    from harness.plan import Plan

IntArray = NDArray[np.int64]
MAX_NAMED = 3
KEY_BITS = 32
# vllm.v1.engine.FINISH_REASON_STRINGS
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


def check_answers(manifest: Manifest, requests: pa.Table, plan: Plan | None) -> Iterator[Finding]:
    """Whether the requests of the plan were sent, each once, and answered as planned.

    requests: REQUESTS schema. plan: what was to be sent; without it only the manifest's count of requests is known.
    """
    keys, counts = np.unique(_keys(requests), return_counts=True)
    if len(repeated := keys[counts > 1]):
        yield invalid("request-repeated", f"{len(repeated)} requests have several rows, first {_names(repeated)}")
    yield from _check_plan(manifest, requests, keys, plan)
    status = requests.column("status").to_numpy()
    if len(failed := np.flatnonzero((status != "ok") & (status != ABORTED))):
        kinds = Counter(status[failed].tolist())
        which = ", ".join(f"{count} {status}" for status, count in sorted(kinds.items()))
        yield invalid(
            "request-failed",
            f"{len(failed)} of {requests.num_rows} requests were not answered as planned ({which}), "
            f"first {_names(_keys(requests)[failed])}{_words_of_first(requests, failed, status)}",
            "See columns status, http_status and error of the requests table",
        )
    answered = requests.filter(pa.array(status == "ok"))
    generated = answered.column("completion_tokens").fill_null(-1).to_numpy()
    if len(wrong := _keys(answered)[generated != answered.column("planned_generate_tokens").to_numpy()]):
        yield invalid(
            "wrong-length",
            f"{len(wrong)} answers have another number of tokens than planned, first {_names(wrong)}",
            "The server must honour ignore_eos and max_tokens",
        )
    yield from _check_reasons(answered)
    prompt = answered.column("prompt_tokens")
    sent = answered.column("planned_prompt_tokens").to_numpy()
    drifted = prompt.fill_null(-1).to_numpy() != sent
    if drifted.any():
        is_text = plan is not None and plan.prompt_form == "text"
        drift = int((prompt.fill_null(0).to_numpy()[drifted] - sent[drifted]).sum())
        yield Finding(
            code="prompt-drift",
            severity="warning" if is_text else "invalid",
            evidence=f"{drifted.sum()} prompts were counted with {drift:+d} tokens in sum, "
            f"first {_names(_keys(answered)[drifted])}",
            hint="Text prompts are re-tokenised by the server; token-id prompts are exact" if is_text else "",
        )


def _check_reasons(answered: pa.Table) -> Iterator[Finding]:
    """Why answers of the planned length ended, in the server's words: no other word than ``length`` fits."""
    reasons = Counter(reason for (reason,) in values_of(answered, "finish_reason") if reason != "length")
    if not reasons:
        return
    words = [
        f"{count} {reason!r}" + ("" if reason in FINISH_REASONS else " (a word that vLLM does not document)")
        for reason, count in reasons.most_common(MAX_NAMED)
    ]
    yield Finding(
        code="finish-reason",
        severity="warning",
        evidence=f"{reasons.total()} answers have the planned length, but do not state 'length' as their end: "
        + ", ".join(words),
        hint="Requests are sent with ignore_eos and max_tokens, so that only their length ends them",
    )


def _words_of_first(requests: pa.Table, failed: NDArray[Any], status: NDArray[Any]) -> str:
    """What the server or the system said of the first request that failed; empty where nobody said anything."""
    errors = requests.column("error").take(pa.array(failed[status[failed] != "not_sent"]))
    first = next((words for one in errors if (words := one.as_py())), "")
    return f'; the first says "{first}"' if first else ""


def _check_plan(manifest: Manifest, requests: pa.Table, keys: IntArray, plan: Plan | None) -> Iterator[Finding]:
    """keys: of all rows, ascending, without repetition."""
    if plan is None:
        if len(keys) != manifest.planned_requests:
            yield invalid("request-missing", f"{manifest.planned_requests} requests planned, {len(keys)} recorded")
        return
    if plan.hash != manifest.plan_hash:
        yield invalid("plan-mismatch", f"the run names plan {manifest.plan_hash[:12]}, the plan is {plan.hash[:12]}")
    planned = _planned(plan)
    if len(missing := np.setdiff1d(planned[:, 0], keys)):
        yield invalid("request-missing", f"{len(missing)} planned requests have no row, first {_names(missing)}")
    if len(unplanned := np.setdiff1d(keys, planned[:, 0])):
        yield invalid("request-unplanned", f"{len(unplanned)} rows were never planned, first {_names(unplanned)}")
    of_rows = _keys(requests)
    place = np.minimum(np.searchsorted(planned[:, 0], of_rows), len(planned) - 1)
    lengths = [requests.column(name).to_numpy() for name in ("planned_prompt_tokens", "planned_generate_tokens")]
    is_changed = (planned[place, 1] != lengths[0]) | (planned[place, 2] != lengths[1])
    if len(changed := of_rows[is_changed & (planned[place, 0] == of_rows)]):
        yield invalid(
            "plan-mismatch", f"{len(changed)} rows carry other lengths than the plan, first {_names(changed)}"
        )


def _keys(requests: pa.Table) -> IntArray:
    """A number for each (session, request), in their order."""
    session, request = (requests.column(name).to_numpy().astype(np.int64) for name in ("session", "request"))
    return session << KEY_BITS | request


def _planned(plan: Plan) -> IntArray:
    """Key, prompt tokens and generated tokens of each request, by key. Shape (requests, 3)."""
    numbers = (
        number
        for session in plan.sessions
        for place, one in enumerate(session.requests)
        for number in (session.index << KEY_BITS | place, one.prompt_tokens, one.generate_tokens)
    )
    planned = np.fromiter(numbers, np.int64, 3 * plan.num_requests).reshape(-1, 3)
    return planned[np.argsort(planned[:, 0])]


def _names(keys: IntArray) -> str:
    """The first few requests, in words. keys: see ``_keys``."""
    pairs = [divmod(key, 1 << KEY_BITS) for key in keys[:MAX_NAMED].tolist()]
    return ", ".join(f"session {session} request {request}" for session, request in pairs)
