"""Records of runs: Arrow schemas, the writer that seals them, and the store that reads them.

Only sealed runs are visible. They are plain Parquet and JSON that any tool can read.
"""

from harness.measure.records.manifest import (
    ClockRecord,
    DerivedEntry,
    EarlierTry,
    FileEntry,
    Finding,
    FleetRecord,
    Manifest,
    Observation,
    PreregistrationRecord,
    ServerRecord,
)
from harness.measure.records.run import (
    SealedRun,
    by_condition,
    declared_by,
    kind_of,
    once_per_run,
    origin_of,
    served_by,
)
from harness.measure.records.store import RunStore
from harness.measure.records.writer import RawFile, RunWriter, earlier_tries, keep_for_retry
from harness.run_key import RunKey
