"""Bounds of latencies whose tokens the client read late: when each can have come, from the chunks of a run.

Definitions: docs/evidence/client-timing.md, "Chunks read together". Nothing is judged here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.analysis.stats import FloatArray

IntArray = NDArray[np.int64]


class TokenChunks(NamedTuple):
    """Chunks with tokens, by request, in order of arrival; arrays of shape (chunks,).

    row: of its request. at_ns: when it came at the latest, see ``received_ns``. earliest_ns: and at the earliest, which
    is the same where its stamp is exact.
    """

    row: IntArray
    at_ns: IntArray
    num_tokens: IntArray
    earliest_ns: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class LateReads:
    """What the latencies of a run with inexact stamps can be, model ns. TTFT itself is the most that it can be.

    ttft_at_least_ns, tpot_at_least_ns, tpot_at_most_ns: shape (requests,), nan where they are exact. itl_at_least_ns,
    itl_at_most_ns, itl_row: one per token after the first chunk of a request; the request it belongs to.
    """

    ttft_at_least_ns: FloatArray
    tpot_at_least_ns: FloatArray
    tpot_at_most_ns: FloatArray
    itl_at_least_ns: FloatArray
    itl_at_most_ns: FloatArray
    itl_row: IntArray


def late_reads(chunks: TokenChunks, sent_ns: IntArray, tokens: IntArray) -> LateReads | None:
    """The bounds of each time; None where all stamps are exact. sent_ns, tokens: of each request, shape (requests,)."""
    row, at_ns, num_tokens, earliest_ns = chunks
    is_late = earliest_ns < at_ns
    if not is_late.any():
        return None
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    ends = np.append(starts[1:], len(row)) - 1
    having = row[starts]
    later = np.where(tokens[having] > 1, tokens[having] - 1, np.nan)
    ttft_ns, least_ns, most_ns = (np.full(len(sent_ns), np.nan) for _ in range(3))
    ttft_ns[having] = np.where(is_late[starts], earliest_ns[starts] - sent_ns[having], np.nan)
    least_ns[having] = np.where(is_late[ends], np.maximum(0, earliest_ns[ends] - at_ns[starts]) / later, np.nan)
    most_ns[having] = np.where(is_late[starts], (at_ns[ends] - earliest_ns[starts]) / later, np.nan)
    after = np.flatnonzero(np.diff(row, prepend=-1) == 0)
    count = num_tokens[after]
    return LateReads(
        ttft_at_least_ns=ttft_ns,
        tpot_at_least_ns=least_ns,
        tpot_at_most_ns=most_ns,
        itl_at_least_ns=np.repeat(np.maximum(0, earliest_ns[after] - at_ns[after - 1]) / count, count),
        itl_at_most_ns=np.repeat((at_ns[after] - earliest_ns[after - 1]) / count, count),
        itl_row=np.repeat(row[after], count),
    )
