"""What the harness asks a server before a run may take a minute in tests.

A server of a test answers or refuses at once; where the machine is busy, that once comes late.
"""

from __future__ import annotations

from harness.measure.server import clean_start, tokenizer

A_MINUTE_S = 60.0


def be_patient() -> None:
    """From now on questions of this process have a minute, not ten seconds."""
    clean_start.DEADLINE_S = tokenizer.DEADLINE_S = A_MINUTE_S
