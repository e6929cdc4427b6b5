"""Puts into the device trace when a request entered the server's queue, when it was dropped, and what a step decided.

It watches three methods of the vendor's scheduler from outside: each is called once, arguments and result left alone.
Only a traced twin is watched. Next: tests play these records to the harness's engine.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from .pacing import now_ns

MODULE, CLASS = "vllm_rbln.v1.core.optimum_scheduler", "RBLNOptimumScheduler"
MARK = "_twin_traced"
Note = Callable[..., None]


def trace_scheduling(note: Note) -> None:
    """Watch the scheduler class of this process, when its module is loaded; note(kind, start_ns, **fields) writes."""
    scheduler = getattr(sys.modules.get(MODULE), CLASS, None)
    if scheduler is None or hasattr(scheduler, MARK):
        return
    setattr(scheduler, MARK, True)
    scheduler.add_request = _before(scheduler.add_request, functools.partial(_arrival, note))
    scheduler.finish_requests = _before(scheduler.finish_requests, functools.partial(_abort, note))
    scheduler.schedule = _traced_schedule(scheduler.schedule, note)


def _before(original: Callable[..., Any], tell: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def traced(scheduler: Any, subject: Any, *args: Any, **options: Any) -> Any:
        tell(subject)
        return original(scheduler, subject, *args, **options)

    return traced


def _arrival(note: Note, request: Any) -> None:
    note("arrival", now_ns(), request=request.request_id, prompt_tokens=request.num_prompt_tokens)


def _abort(note: Note, requests: object) -> None:
    # Anything else might be an iterator, which reading would empty.
    named = [requests] if isinstance(requests, str) else requests if isinstance(requests, (list, tuple, set)) else ()
    if named:
        note("abort", now_ns(), requests=[str(name) for name in named])


def _traced_schedule(original: Callable[..., Any], note: Note) -> Callable[..., Any]:
    @functools.wraps(original)
    def schedule(scheduler: Any, *args: Any, **options: Any) -> Any:
        start_ns = now_ns()
        output = original(scheduler, *args, **options)
        note(
            "schedule",
            start_ns,
            requests=list(output.num_scheduled_tokens),
            cached_tokens=int(sum(getattr(output, "cached_length", ()) or ())),
            running=[request.request_id for request in scheduler.running],
            waiting=[request.request_id for request in scheduler.waiting],
        )
        return output

    return schedule
