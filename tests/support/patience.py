"""Runs of tests are asked with patience, need no rest, and do not repeat what another test tries.

What the harness asks a server or a process of its own may take a minute: it answers or refuses at once, and where the
machine is busy or stands still, it does so late. After a warm-up a run goes on at once. No record of a test need
outlive a loss of power: none waits for the disk. Beside a verdict few pairs of plans are simulated.
``tests/measure/server/test_ask.py`` tries the process that scrapes, ``tests/measure/client/test_self_audit.py`` the
audit before each run, ``tests/judge/planning/test_rare_plans.py`` as many pairs as a user has.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import processes
from harness.clock import NS_PER_S, ScaledClock
from harness.judge.planning import rare_plans
from harness.measure.client import connection, host
from harness.measure.client.self_audit import self_audit
from harness.measure.server import ask, clean_start, life, process, provenance, tokenizer, warm_up
from harness.measure.server.ask import NO_HEADERS, Get, Reply, ask_metrics
from harness.model.plan.model import Plan
from harness.model.spec import ClientSpec
from harness.runner import run
from harness.stacks.rbln.launch import device_watch

A_MINUTE_S = 60
_kept: dict[str, dict[str, Any]] = {}


def be_patient() -> None:
    """From now on runs of this process have a minute for each question, one audit, and scrapes without a process."""
    clean_start.DEADLINE_S = tokenizer.DEADLINE_S = A_MINUTE_S
    ask.SCRAPE_TIMEOUT_S = ask.END_SCRAPE_TIMEOUT_S = life.ANSWER_TIMEOUT_S = A_MINUTE_S
    process.HEALTH_TIMEOUT_S = provenance.COMMAND_TIMEOUT_S = A_MINUTE_S
    connection.CONNECT_TIMEOUT_S = host.READY_TIMEOUT_S = host.END_TIMEOUT_S = A_MINUTE_S
    processes.END_TIMEOUT_S = device_watch.TIMEOUT_S = A_MINUTE_S
    process.STOP_MARGIN_NS = A_MINUTE_S * NS_PER_S
    warm_up.SETTLE_NS = 0
    rare_plans.PAIRS = rare_plans.LEAST_PAIRS
    os.fsync = os.fstat  # which fails as it does
    run.self_audit = audited_once
    run.asking_process = asking_here


def audited_once(plan: Plan, options: ClientSpec, clock: ScaledClock, records: Path | None = None) -> dict[str, Any]:
    """As ``self_audit``; of each client, all figures but the instant are those of its first audit here."""
    name = options.model_dump_json()
    if name not in _kept:
        _kept[name] = self_audit(plan, options, clock, records)
    return {**_kept[name], "at_ns": clock.now_ns()}


@contextmanager
def asking_here(url: str, headers: Mapping[str, str] = NO_HEADERS) -> Generator[Get]:
    """As ``asking_process``, in the thread that asks: its requests hold up a replay for milliseconds."""
    place = url

    def get(deadline_s: float) -> Reply:
        nonlocal place
        reply, place = ask_metrics(place, deadline_s=deadline_s, headers=headers)
        return reply

    yield get
