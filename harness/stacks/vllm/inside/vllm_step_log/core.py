# pyright: basic, reportMissingImports=false
"""A vLLM plugin that observes the scheduler inside the engine core and writes a line of JSON per engine step.

It changes nothing in the server: a wrapper calls the original exactly once, arguments and result unchanged, and its
additions run inside a guard that switches the observer off at its first error. Every attribute but the scheduled tokens
may be absent. Without VLLM_CORE_STEPS_FILE or VLLM_SESSIONS_FILE it does nothing.
Source: vllm 0.30.0 to 0.33.0 (v1/core/sched/scheduler.py, async_scheduler.py and output.py, v1/engine/core.py).
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from . import (
    DRAFTS,
    LOG,
    LineFile,
    class_of,
    engine_file,
    header_of,
    is_there,
    kv_of,
    now_ns,
    plain,
    sessions,
    value_at,
)

FILE_VARIABLE = "VLLM_CORE_STEPS_FILE"
FORMAT = 1
COLUMNS = (
    "step",
    "schedule_ns",  # schedule() is called
    "scheduled_ns",  # schedule() has returned
    "update_ns",  # update_from_output() is called: the result of the model is there
    "end_ns",  # update_from_output() has returned; null when it was never called
    "requests",  # handles in the order of the batch; null: those of the line before
    "tokens",  # of each request; one number when all have as many
    # [handle, id, queued_ns, tokens of the request, cached tokens, prompt tokens]; cached null: not known, and the
    # whole request is scheduled
    "admitted",
    "preempted",  # handles
    "finished",  # handles; between the schedule() before and this one
    "running",  # requests, after schedule()
    "waiting",
    "skipped_waiting",  # null from 0.31 on, where waiting holds them too
    "free_blocks",  # of KV memory, after schedule()
    "generated_tokens",
    "unpadded_tokens",
    "padded_tokens",
    "runtime_mode",
    "observer_ns",  # time of the observer itself, since the line before
)
DRAFT_COLUMNS = (
    "drafts",  # tokens drafted for each request; one number when all have as many
    "accepted",  # of them; null of a request that has ended or samples nothing, and of a step that never ended
)
"""Of a server that decodes speculatively, before ``observer_ns``."""
AMONG_OTHERS = "_DP"
"""In the name of an engine core's process that stands beside others. That of a dense model counts itself alone."""
MAX_PENDING = 64
"""Steps that were scheduled and have not ended. Two with asynchronous scheduling, one per stage of a pipeline."""
MAX_QUEUED = 100_000
"""Requests whose arrival is remembered until they are admitted."""
MARK = "_vllm_step_log_wraps"
ATTRIBUTE = "_vllm_step_log_observer"
NOTED = {"add_request": "added", "schedule": "scheduled", "update_from_output": "updated"}
"""What the engine core calls of its scheduler, and what observers are told afterwards."""
NOTED_BEFORE = {"update_from_output": "sampled"}
"""What observers are told before: the lists of sampled tokens are cut in place where an answer stops."""


def register() -> None:
    """Entry point of ``vllm.general_plugins``: called in every process of the server, possibly more than once.

    The engine core asks its configuration for the class of its scheduler; that class is then observed.
    """
    if not wanted():
        return
    try:
        from vllm.config.scheduler import SchedulerConfig

        choose = SchedulerConfig.get_scheduler_cls
        if hasattr(choose, MARK):
            return

        @functools.wraps(choose)
        def chosen(self: Any) -> Any:
            scheduler_class = choose(self)
            observe(scheduler_class)
            return scheduler_class

        setattr(chosen, MARK, True)
        SchedulerConfig.get_scheduler_cls = chosen
    except Exception as error:
        LOG.warning("[CORE STEPS] not observing: %s: %s", type(error).__name__, error)


def wanted() -> list[tuple[str, Callable[[Any], Any]]]:
    """(title in the log, observer) of each record that a variable switches on."""
    kinds = {FILE_VARIABLE: ("CORE STEPS", Observer), sessions.FILE_VARIABLE: ("SESSIONS", sessions.SessionObserver)}
    return [kind for variable, kind in kinds.items() if os.environ.get(variable)]


class Watch:
    """The observers of one scheduler. A subclass that calls the function of its base makes one step, not two."""

    def __init__(self, scheduler: Any) -> None:
        self.is_inside = False
        self.observers: list[Any] = []
        for title, make in wanted():
            try:
                self.observers.append(make(scheduler))
            except Exception as error:
                LOG.warning("[%s] not observing: %s: %s", title, type(error).__name__, error)

    def fail(self, observer: Any, error: Exception) -> None:
        """Stop an observer: it is told no more."""
        self.observers = [each for each in self.observers if each is not observer]
        observer.stop(error)


def observe(scheduler_class: Any) -> None:
    """Wrap what the engine core calls of a scheduler class; every scheduler made of it writes its own records."""
    try:
        if hasattr(scheduler_class.schedule, MARK):
            return
        for name in ("__init__", *NOTED):
            getattr(scheduler_class, name)
        _wrap_init(scheduler_class)
        for name, note in NOTED.items():
            _wrap(scheduler_class, name, note)
        # Where it is absent, the next step shows who has ended.
        if hasattr(scheduler_class, "finish_requests"):
            _wrap(scheduler_class, "finish_requests", "dropped")
    except Exception as error:
        LOG.warning("[CORE STEPS] not observing: %s: %s", type(error).__name__, error)


def _wrap_init(owner: Any) -> None:
    original = owner.__init__

    @functools.wraps(original)
    def made(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if not hasattr(self, ATTRIBUTE):
            setattr(self, ATTRIBUTE, Watch(self))

    owner.__init__ = made


def _wrap(owner: Any, name: str, note: str) -> None:
    """Call ``note`` of each observer with (began_ns, scheduler, arguments, output) after each call from outside."""
    original, before = getattr(owner, name), NOTED_BEFORE.get(name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        watch = getattr(self, ATTRIBUTE, None)
        if watch is None or not watch.observers or watch.is_inside:
            return original(self, *args, **options)
        watch.is_inside = True
        began_ns = now_ns()
        if before is not None:
            tell(watch, before, began_ns, self, args or tuple(options.values()), None)
        try:
            output = original(self, *args, **options)
        finally:
            watch.is_inside = False
        tell(watch, note, began_ns, self, args or tuple(options.values()), output)
        return output

    setattr(wrapped, MARK, True)
    setattr(owner, name, wrapped)


def tell(watch: Watch, note: str, *told: Any) -> None:
    """Tell each observer that has this note; one that fails is told no more."""
    for observer in watch.observers:
        try:
            if (noted := getattr(observer, note, None)) is not None:
                noted(*told)
        except Exception as error:
            watch.fail(observer, error)


class Observer:
    """The records of one scheduler. Its engine core calls it from one thread."""

    def __init__(self, scheduler: Any) -> None:
        config = value_at(scheduler, "vllm_config")
        engine = value_at(config, "parallel_config.data_parallel_index") or 0
        self._file = LineFile(engine_file(os.environ[FILE_VARIABLE], engine))
        self._has_drafts = bool(value_at(config, DRAFTS))
        self._accepted: list[int | None] | None = None
        self._device = _device_of(scheduler)
        more = (*(DRAFT_COLUMNS if self._has_drafts else ()), *getattr(self._device, "columns", ()))
        names = {"vllm_core_steps": FORMAT, "columns": (*COLUMNS[:-1], *more, *COLUMNS[-1:]), "engine": engine}
        header = {**names, "scheduler": class_of(scheduler), **header_of(config), **getattr(self._device, "header", {})}
        header["effective"]["data_parallel_external_lb"] = value_at(config, "parallel_config.data_parallel_external_lb")
        header["effective"] |= kv_of(scheduler)
        header["effective"]["is_data_parallel"] = AMONG_OTHERS in multiprocessing.current_process().name
        self._file.write(header)
        self._handles: dict[str, int] = {}
        self._num_handles = 0
        self._queued_ns: dict[str, int] = {}
        self._pending: deque[tuple[Any, dict[str, Any]]] = deque()
        # Of the step that was scheduled last; and the requests of the record that was written last.
        self._ids: list[str] | None = None
        self._batch: list[int] = []
        self._written: list[int] | None = None
        self._num_steps = 0
        self._observer_ns = 0
        self._has_absent = False
        # vllm-rbln: cached tokens of the request that it prefills.
        self._copied: int | None = None
        self._free_blocks = value_at(scheduler, "kv_cache_manager.block_pool.get_num_free_blocks")

    def stop(self, error: Exception) -> None:
        """Log the first error; afterwards only the original functions run."""
        self._pending.clear()
        if self._device is not None:
            self._device.error = error
        LOG.warning("[CORE STEPS] stopped after %d steps: %s: %s", self._num_steps, type(error).__name__, error)

    # -- what is noted after a call of the function that a name says ---------------------------------------------

    def added(self, began_ns: int, _scheduler: Any, arguments: Any, _output: Any) -> None:
        """A request was put into the queue."""
        name = value_at(arguments[0], "request_id")
        if isinstance(name, str) and len(self._queued_ns) < MAX_QUEUED:
            self._queued_ns.setdefault(name, began_ns)

    def scheduled(self, began_ns: int, scheduler: Any, _arguments: Any, output: Any) -> None:
        """A step was decided."""
        ended_ns = now_ns()
        if len(self._pending) >= MAX_PENDING:
            self._write(self._pending.popleft()[1])
        tokens: dict[str, int] = output.num_scheduled_tokens
        counts = list(tokens.values())
        # In this order: a name of a request that has ended may be used again.
        finished = self._finished(names) if (names := getattr(output, "finished_req_ids", None)) else []
        preempted = self._known(names) if (names := getattr(output, "preempted_req_ids", None)) else []
        copied = getattr(output, "cached_length", None)
        self._copied = None if copied is None else int(sum(copied))
        admitted = self._admitted(scheduler, output)
        if admitted and self._copied:
            # vllm-rbln prefills one request a step, whole, and schedules its cached tokens too.
            counts[0] -= self._copied
        ids = list(tokens)
        if ids != self._ids:
            self._ids = ids
            handles = self._handles
            self._batch = [handles[name] if name in handles else self._new(name, admitted) for name in ids]
        record = {
            "step": self._num_steps,
            "schedule_ns": began_ns,
            "scheduled_ns": ended_ns,
            "update_ns": None,
            "end_ns": None,
            "requests": self._batch,
            "tokens": _shortened(counts),
            "admitted": admitted,
            "preempted": preempted,
            "finished": finished,
            "running": _length(getattr(scheduler, "running", None)),
            "waiting": _length(getattr(scheduler, "waiting", None)),
            "skipped_waiting": _length(getattr(scheduler, "skipped_waiting", None)),
            "free_blocks": None if self._free_blocks is None else self._free_blocks(),
            "generated_tokens": None,
            "unpadded_tokens": None,
            "padded_tokens": None,
            "runtime_mode": None,
        }
        if self._has_drafts:
            drafted = output.scheduled_spec_decode_tokens
            record |= {"drafts": _shortened([len(drafted.get(name, ())) for name in ids]), "accepted": None}
        if self._device is not None:
            self._device.decided(output, is_prefill=bool(admitted))
        self._num_steps += 1
        self._pending.append((output, record))
        self._observer_ns += now_ns() - ended_ns

    def sampled(self, _began_ns: int, scheduler: Any, arguments: Any, _output: Any) -> None:
        """The result of the model is there, as it was sampled."""
        if not self._has_drafts:
            return
        began_ns = now_ns()
        scheduled, result = arguments[:2]
        tokens, places, requests = result.sampled_token_ids, result.req_id_to_index, scheduler.requests
        self._accepted = []
        for name in scheduled.num_scheduled_tokens:
            request = requests.get(name)
            is_over = request is None or request.is_finished()
            known = tokens[places[name]] if tokens and not is_over and name in places else ()
            has_drafts = bool(scheduled.scheduled_spec_decode_tokens.get(name))
            self._accepted.append(0 if not has_drafts else len(known) - 1 if len(known) else None)
        self._observer_ns += now_ns() - began_ns

    def updated(self, began_ns: int, scheduler: Any, arguments: Any, outputs: Any) -> None:
        """A step has ended: its record is written."""
        ended_ns = now_ns()
        scheduled, model_output = arguments[:2]
        while self._pending:
            step, record = self._pending.popleft()
            if step is scheduled:
                break
            self._write(record)
        else:
            raise LookupError("a step ended that was not scheduled")
        graph = getattr(model_output, "cudagraph_stats", None)
        record["update_ns"], record["end_ns"] = began_ns, ended_ns
        record["generated_tokens"] = _num_generated(outputs)
        if graph is not None:
            record["unpadded_tokens"] = plain(value_at(graph, "num_unpadded_tokens"))
            record["padded_tokens"] = plain(value_at(graph, "num_padded_tokens"))
            record["runtime_mode"] = plain(value_at(graph, "runtime_mode"))
        if self._has_drafts and self._accepted is not None:
            record["accepted"] = _shortened(self._accepted)
        self._write(record, () if self._device is None else self._device.ended(record))
        if not self._has_absent:
            self._has_absent = True
            self._file.write({"absent": _absent(scheduler, scheduled, model_output)})
        self._observer_ns += now_ns() - ended_ns

    def _admitted(self, scheduler: Any, output: Any) -> list[list[Any]]:
        """The requests that begin, or begin again after a preemption, with this step."""
        admitted = []
        for new in getattr(output, "scheduled_new_reqs", None) or ():
            prompt = value_at(new, "prompt_token_ids")
            length = value_at(new, "prompt_len") if prompt is None else len(prompt)
            admitted.append(self._admission(scheduler, new.req_id, value_at(new, "num_computed_tokens"), length))
        resumed = getattr(getattr(output, "scheduled_cached_reqs", None), "resumed_req_ids", None)
        if resumed:
            computed = value_at(output, "scheduled_cached_reqs.num_computed_tokens") or ()
            known = dict(zip(output.scheduled_cached_reqs.req_ids, computed, strict=False))
            admitted += [self._admission(scheduler, name, known.get(name), None) for name in resumed]
        return admitted

    def _admission(self, scheduler: Any, name: str, cached: Any, prompt: Any) -> list[Any]:
        handle = self._handles.get(name)
        if handle is None:
            handle = self._handles[name] = self._num_handles
            self._num_handles += 1
            # A handle is new: the batch is not that of the step before, whatever its names are.
            self._ids = None
        request = (value_at(scheduler, "requests") or {}).get(name)
        if prompt is None:
            prompt = value_at(request, "num_prompt_tokens")
        cached = cached if self._copied is None else self._copied
        # Without the tokens computed before it, nobody knows which step ends its prompt.
        tokens = None if cached is None else value_at(request, "num_tokens")
        return [handle, name, self._queued_ns.pop(name, None), tokens, cached, prompt]

    def _new(self, name: str, admitted: list[list[Any]]) -> int:
        """The handle of a request whose admission was not seen."""
        handle = self._handles[name] = self._num_handles
        self._num_handles += 1
        admitted.append([handle, name, self._queued_ns.pop(name, None), None, None, None])
        return handle

    def _known(self, names: Any) -> list[int]:
        return sorted(self._handles[name] for name in names if name in self._handles)

    def _finished(self, names: Any) -> list[int]:
        finished = self._known(names)
        for name in names:
            self._handles.pop(name, None)
            self._queued_ns.pop(name, None)
        if finished:
            self._ids = None
        return finished

    def _write(self, record: dict[str, Any], of_device: Any = None) -> None:
        batch = record["requests"]
        if batch is self._written:
            record["requests"] = None
        self._written = batch
        if of_device is None:
            of_device = [None] * len(getattr(self._device, "columns", ()))
        values = [*record.values(), *of_device, self._observer_ns]
        text = repr(values)
        if "'" in text or '"' in text:
            self._file.write(values)
        else:
            # Most records are numbers alone; an encoder of JSON takes longer for them.
            self._file.write_bytes((text.replace("None", "null").replace(" ", "") + "\n").encode())
        self._observer_ns = 0


def _device_of(scheduler: Any) -> Any:
    """What the device of vllm-rbln adds to a step; None of other stacks, and where it is not known."""
    if not class_of(scheduler).startswith("vllm_rbln."):
        return None
    from .device import device_of

    return device_of(scheduler)


def _shortened(counts: list[Any]) -> Any:
    """One number for a list of equal numbers."""
    return counts[0] if counts and counts.count(counts[0]) == len(counts) else counts


def _length(queue: Any) -> int | None:
    try:
        return None if queue is None else len(queue)
    except TypeError:
        return None


def _num_generated(outputs: Any) -> int | None:
    try:
        return sum(len(output.new_token_ids) for one in outputs.values() for output in one.outputs)
    except Exception:  # another form of outputs
        return None


def _absent(scheduler: Any, scheduled: Any, model_output: Any) -> list[str]:
    """Columns that this vLLM cannot fill."""
    places = {
        "admitted": (scheduled, "scheduled_new_reqs"),
        "preempted": (scheduled, "preempted_req_ids"),
        "finished": (scheduled, "finished_req_ids"),
        "running": (scheduler, "running"),
        "waiting": (scheduler, "waiting"),
        "free_blocks": (scheduler, "kv_cache_manager.block_pool.get_num_free_blocks"),
        "padded_tokens": (model_output, "cudagraph_stats"),
    }
    return [name for name, (owner, place) in places.items() if not is_there(owner, place)]
