"""Servers of tests are asked with patience, and need no rest.

What the harness asks a server or a process of its own may take a minute: it answers or refuses at once, and where the
machine is busy or stands still, it does so late. After a warm-up a run goes on at once. No record of a test need
outlive a loss of power: none waits for the disk.
"""

from __future__ import annotations

import os

from harness import processes
from harness.clock import NS_PER_S
from harness.measure.client import connection, host
from harness.measure.server import ask, clean_start, life, process, provenance, tokenizer, warm_up
from harness.stacks.rbln.launch import device_watch

A_MINUTE_S = 60


def be_patient() -> None:
    """From now on questions of this process have a minute, and nothing waits for the disk or after a warm-up."""
    clean_start.DEADLINE_S = tokenizer.DEADLINE_S = A_MINUTE_S
    ask.SCRAPE_TIMEOUT_S = ask.END_SCRAPE_TIMEOUT_S = life.ANSWER_TIMEOUT_S = A_MINUTE_S
    process.HEALTH_TIMEOUT_S = provenance.COMMAND_TIMEOUT_S = A_MINUTE_S
    connection.CONNECT_TIMEOUT_S = host.READY_TIMEOUT_S = host.END_TIMEOUT_S = A_MINUTE_S
    processes.END_TIMEOUT_S = device_watch.TIMEOUT_S = A_MINUTE_S
    process.STOP_MARGIN_NS = A_MINUTE_S * NS_PER_S
    warm_up.SETTLE_NS = 0
    os.fsync = os.fstat  # which fails as it does
