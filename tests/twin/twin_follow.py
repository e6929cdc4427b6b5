"""Plays a server's log to the engine: requests arrive in the server's order, and every line must be the engine's too.

A request is submitted before the step that admits it, in the order of admission; queued requests that the server
cannot admit change nothing. Next: ``test_conformance`` asks for no difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from harness.emulator.logs import kv_event_line
from harness.engine import DECODE, EngineConfig, Scheduler, load_cost_model
from harness.plan import Plan
from harness.plan.blocks import block_keys

MESSAGE = re.compile(r"(\[(?:PFX|BUCKET)\] .*)$")
REQUEST_ID = re.compile(r"REQUEST=(\S+)")
ADMITTED = re.compile(r"\[PFX\] \[ALLOC\] REQUEST=(\S+) ")
BUCKET = "[BUCKET] "


@dataclass
class Followed:
    """steps, lines: compared. difference: the first line that is not the engine's, with the engine's; else empty."""

    prefills: int = 0
    decodes: int = 0
    lines: int = 0
    evictions: int = 0
    difference: str = ""
    admissions: list[str] = field(default_factory=list[str])


def log_messages(log: str) -> list[str]:
    """The messages about KV memory and buckets, in the order the engine process wrote them."""
    return [match[1] for line in log.splitlines() if (match := MESSAGE.search(line))]


def follow(
    messages: list[str], config: EngineConfig, plan: Plan, place_of: Callable[[str], tuple[int, int]]
) -> Followed:
    """Compare every message. place_of: (session, request) of an engine's request id."""
    scheduler = Scheduler(config, load_cost_model("paper"))
    names: list[str] = []
    seen = Followed()
    at = 0

    def compare(expected: list[str]) -> bool:
        nonlocal at
        for line in expected:
            actual = messages[at] if at < len(messages) else "(end of the log)"
            if line != actual:
                seen.difference = f"message {at}: server {actual!r}, engine {line!r}"
                return False
            at += 1
            seen.lines += 1
            seen.evictions += "[EVICTION]" in line
        return True

    while at < len(messages) or scheduler.has_work:
        admitted = _admitted_next(messages, at)
        if admitted is not None and admitted not in names:
            session, request = place_of(admitted)
            planned = plan.request(session, request)
            keys = block_keys(plan, session, request)
            scheduler.submit(len(names), planned.prompt_tokens, planned.generate_tokens, keys)
            names.append(admitted)
            seen.admissions.append(admitted)
        step = scheduler.schedule()
        lines = [_line(event, names) for event in step.kv_events]
        if step.kind == DECODE:
            lines.append(f"[BUCKET] request_nums={step.num_seqs} padded_batch_size={step.bucket}")
            seen.decodes += 1
        else:
            seen.prefills += 1
        if not compare(lines):
            return seen
        scheduler.finish_step()
        if not compare([_line(event, names) for event in scheduler.take_kv_events()]):
            return seen
    return seen


def _admitted_next(messages: list[str], at: int) -> str | None:
    """The request that the step beginning at message ``at`` admits; None for a decode step."""
    for message in messages[at:]:
        if message.startswith(BUCKET):
            return None
        if match := ADMITTED.match(message):
            return match[1]
    return None


def _line(event: object, names: list[str]) -> str:
    handle = event.request  # type: ignore[attr-defined]
    return kv_event_line(event, names[handle] if handle >= 0 else "")[1]  # type: ignore[arg-type]
