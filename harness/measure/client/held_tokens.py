"""How late first tokens are because something between server and client collects tokens. It reads rows alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.clock import NS_PER_MS
from harness.measure.records.schema import RowStream

IntArray = NDArray[np.int64]

# Chunks that come within this time came together: what a proxy has collected may take several reads.
TOGETHER_NS = NS_PER_MS
# So many together, at the beginning or in the mean, are no server's work: a busy one sends two or three at once.
LEAST_TOGETHER = 4


def held_facts(chunks: RowStream, requests: pa.Table) -> dict[str, Any]:
    """The answers whose first token came together with later ones, and how late it may be for that.

    chunks: CHUNKS schema, all chunks of a request in one batch; both tables in wall time. held_first: num_answers with
    at least LEAST_TOGETHER chunks that brought tokens, num_held of them, and mean_ms, the mean over all of them of the
    time that the first token was held. Where the first k of c chunks came at once, k - 1 were made before: each in the
    time that a later chunk took, or, where all came at once, in at most a c-th of the time since the send.
    """
    columns = (_keys(requests), requests["sent_ns"].fill_null(0).to_numpy())
    sent_ns = dict(zip(*(column.tolist() for column in columns), strict=True))
    num_answers = num_held = 0
    held_ns = 0.0
    for batch in chunks.batches():
        rows = batch.filter(pa.array(batch["num_tokens"].to_numpy() > 0))
        if not rows.num_rows:
            continue
        keys, at_ns = _keys(rows), rows["received_ns"].to_numpy()
        starts = np.flatnonzero(np.diff(keys, prepend=-1))
        counts = np.diff(np.append(starts, len(keys)))
        first_ns, last_ns = at_ns[starts], at_ns[starts + counts - 1]
        is_first = at_ns <= np.repeat(first_ns + TOGETHER_NS, counts)
        begins_read, begins_group = (np.diff(at_ns, prepend=0) > gap_ns for gap_ns in (0, TOGETHER_NS))
        begins_read[starts] = begins_group[starts] = True
        together, first_reads, groups = (
            np.add.reduceat(flags, starts, dtype=np.int64) for flags in (is_first, is_first & begins_read, begins_group)
        )
        since_ns = last_ns - np.array([sent_ns[key] for key in keys[starts].tolist()], dtype=np.int64)
        later = counts - together
        each_ns = np.where(later > 0, (last_ns - first_ns) / np.maximum(later, 1), since_ns / counts)
        is_bunched = (together >= LEAST_TOGETHER) | (counts >= LEAST_TOGETHER * groups)
        # A server that is fast sends one after the other.
        is_held = is_bunched & (together >= 2 * first_reads)
        num_answers += int((counts >= LEAST_TOGETHER).sum())
        num_held += int(is_held.sum())
        held_ns += float(((together - 1) * each_ns)[is_held].sum())
    mean_ms = held_ns / max(1, num_answers) / NS_PER_MS
    return {"held_first": {"num_answers": num_answers, "num_held": num_held, "mean_ms": mean_ms}}


def _keys(rows: pa.Table | pa.RecordBatch) -> IntArray:
    """One number for each request."""
    return (rows["session"].to_numpy().astype(np.int64) << 32) + rows["request"].to_numpy()
