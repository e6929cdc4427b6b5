"""Adds scheduling to the device trace: arrivals in the server's queue, aborts, and the decision of each step.

Three methods of the vendor's scheduler are wrapped: each is called once, arguments and result unchanged. Only a traced
twin is wrapped.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from .device import now_ns

MODULE, CLASS = "vllm_rbln.v1.core.optimum_scheduler", "RBLNOptimumScheduler"
MARK = "_twin_traced"
Note = Callable[..., None]


def trace_scheduling(note: Note) -> None:
    """Wrap the scheduler class of this process if its module is loaded; note(kind, start_ns, **fields) writes."""
    scheduler = getattr(sys.modules.get(MODULE), CLASS, None)
    if scheduler is None or hasattr(scheduler, MARK):
        return
    setattr(scheduler, MARK, True)
    scheduler.add_request = _traced_arrival(scheduler.add_request, note)
    scheduler.finish_requests = _traced_abort(scheduler.finish_requests, note)
    scheduler.schedule = _traced_schedule(scheduler.schedule, note)


def _traced_arrival(original: Callable[..., Any], note: Note) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_request(scheduler: Any, request: Any, *args: Any, **options: Any) -> Any:
        note("arrival", now_ns(), request=request.request_id, prompt_tokens=request.num_prompt_tokens)
        return original(scheduler, request, *args, **options)

    return add_request


def _traced_abort(original: Callable[..., Any], note: Note) -> Callable[..., Any]:
    @functools.wraps(original)
    def finish_requests(scheduler: Any, *args: Any, **options: Any) -> Any:
        start_ns = now_ns()
        dropped = original(scheduler, *args, **options)
        # Several requests are freed in the order of a set of strings, which only the return value shows.
        if dropped:
            # vLLM 0.22 and 0.24 return (id, client) pairs, 0.30 and later the requests.
            names = [item[0] if isinstance(item, tuple) else item.request_id for item in dropped]
            note("abort", start_ns, requests=names)
        return dropped

    return finish_requests


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
