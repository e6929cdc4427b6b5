"""Servers of tests are asked with patience, and need no rest.

What the harness asks a server before a run may take a minute: a server of a test answers or refuses at once, and where
the machine is busy, that once comes late. After a warm-up a run goes on at once. No record of a test need outlive a
loss of power: none waits for the disk.
"""

from __future__ import annotations

import os

from harness.measure.server import clean_start, tokenizer, warm_up

A_MINUTE_S = 60.0


def be_patient() -> None:
    """From now on questions of this process have a minute, and nothing waits for the disk or after a warm-up."""
    clean_start.DEADLINE_S = tokenizer.DEADLINE_S = A_MINUTE_S
    warm_up.SETTLE_NS = 0
    os.fsync = os.fstat  # which fails as it does
