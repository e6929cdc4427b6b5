"""Whether an INVALID run will fail again when it is repeated: all its requests failed alike, or its settings differ."""

from __future__ import annotations

import re

from harness.records import SealedRun
from harness.records.schema import ABORTED

ANSWERED = ("ok", ABORTED)
# Reasons that no repetition changes.
LASTING = ("setting-differs:", "setting-unshown:", "metrics-missing:")
_NUMBERS = re.compile(r"\b[\da-f-]*\d[\da-f-]*\b", re.IGNORECASE)


def failed_alike(run: SealedRun) -> str:
    """How every request of a run failed, in the words of the first; "" where one was answered, or they differ.

    Numbers and ids in the words may differ.
    """
    if run.is_valid:
        return ""
    rows = run.table("requests").select(["status", "error"]).to_pylist()
    sent = [row for row in rows if row["status"] != "not_sent"]
    kinds = {(row["status"], _NUMBERS.sub("#", row["error"])) for row in sent}
    if len(kinds) != 1 or sent[0]["status"] in ANSWERED:
        return ""
    return f"{sent[0]['status']}: {sent[0]['error']}" if sent[0]["error"] else str(sent[0]["status"])


def will_fail_again(run: SealedRun) -> bool:
    """Whether nothing that a repetition changes made this run INVALID."""
    return any(reason.startswith(LASTING) for reason in run.invalid_reasons) or bool(failed_alike(run))
