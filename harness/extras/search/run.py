"""Searches a space in one pass: the figures of every candidate go into one ledger.

Chunks of candidates are computed by the processes of this machine or of a Dask cluster (extra
``rbln-harness[cluster]``). The ledger has the same bytes wherever it is computed, and appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import RecordsError, SpecError
from harness.extras.search.evaluate import LEDGER_SCHEMA, Evaluator
from harness.extras.search.result import SearchResult
from harness.extras.search.space import SpaceSpec
from harness.judge.prereg.freeze import SEARCH_FILE
from harness.model.engine.cost import load_cost_model
from harness.outputs import write_atomic
from harness.processes import parallel_map

LEDGER = "ledger.parquet"
_IDENTITY = b"search"
"""Key of the metadata that says which search a ledger is of."""


@lru_cache(maxsize=2)
def evaluator_of(space_json: str) -> Evaluator:
    """The evaluator of a search space, one per process."""
    return Evaluator(SpaceSpec.model_validate_json(space_json))


def search(
    space: SpaceSpec,
    folder: Path,
    *,
    workers: int | str | None = None,
    on_progress: Callable[[float], None] = lambda _share: None,
) -> SearchResult:
    """Judge every candidate of a space and leave ledger and space in ``folder``; a finished ledger there is read.

    workers: as of ``parallel_map``. on_progress: receives the share of candidates that are done.
    Raises SpecError when the folder holds another search, RecordsError when its ledger is damaged.
    """
    space_json = space.model_dump_json()
    evaluator, path = evaluator_of(space_json), folder / LEDGER
    identity = _identity(space, evaluator)
    if path.is_file():
        ledger = read_ledger(path, identity)
    else:
        # Before the work: a freeze looks here for seeds that were used, of searches that never ended too.
        write_atomic(folder / SEARCH_FILE, [identity], what="the space")
        ledger = _searched(space_json, len(evaluator.candidates), workers, on_progress)
        ledger = ledger.replace_schema_metadata({_IDENTITY: identity})
        write_atomic(path, [_parquet(ledger)], what="the ledger")
    result = SearchResult(space, ledger, evaluator.figures_row(space.baseline.shape, evaluator.groups))
    if result.rows.num_rows == 0:
        raise SpecError(
            "no candidate meets the constraints", where=space.name, hint=f"See the column `excluded` of {LEDGER}"
        )
    return result


def _searched(
    space_json: str, num_candidates: int, workers: int | str | None, on_progress: Callable[[float], None]
) -> pa.Table:
    # Enough chunks for many workers, and large enough that few simulations are done twice.
    size = min(max(-(-num_candidates // 256), 64), 4096)
    chunks = [range(first, min(first + size, num_candidates)) for first in range(0, num_candidates, size)]
    tables: dict[int, pa.Table] = {}

    def compute(chunk: Sequence[int], _progress: object) -> pa.Table:
        # On a worker of a cluster too.
        return pa.Table.from_pylist(evaluator_of(space_json).rows(chunk), schema=LEDGER_SCHEMA)

    for place, rows in parallel_map(compute, chunks, workers=workers):
        tables[place] = rows
        on_progress(sum(each.num_rows for each in tables.values()) / num_candidates)
    return pa.concat_tables([tables[place] for place in range(len(chunks))]).combine_chunks()


def _identity(space: SpaceSpec, evaluator: Evaluator) -> bytes:
    """What a ledger depends on: the space, its plans and its costs."""
    plans = hashlib.sha256("\n".join(plan.hash for plan in evaluator.plans).encode()).hexdigest()
    costs = hashlib.sha256(repr(load_cost_model(space.cost_model)).encode()).hexdigest()
    return json.dumps({"space": space.model_dump(mode="json"), "plans": plans, "cost_model": costs}).encode()


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    return buffer.getvalue()


def read_ledger(path: Path, identity: bytes) -> pa.Table:
    """A ledger from disk; RecordsError when it is damaged, SpecError when it is of another search."""
    try:
        # read_table would load what datasets of many files need.
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            ledger = file.read()
    except (OSError, ValueError, LookupError, pa.ArrowException) as error:
        raise RecordsError("is damaged", where=str(path), hint="Delete it and search again") from error
    if (ledger.schema.metadata or {}).get(_IDENTITY) != identity or not ledger.schema.equals(LEDGER_SCHEMA):
        raise SpecError("this folder holds the ledger of another search", where=str(path), hint="Give another folder")
    return ledger
