"""Wraps the few functions of vllm-rbln that every engine step calls, and writes a header line and an array per step.

A wrapper calls the original exactly once, arguments and result unchanged. Its additions run inside a guard that
switches the observer off at its first error. An unknown version is refused. All instants are CLOCK_MONOTONIC ns, the
clock of vLLM's events. Values are copied when read; no object of the server is kept.
Source: vllm-rbln 0.11.0 to 0.12.0 (optimum path), optimum-rbln 0.11.1.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from . import LOG

now_ns = time.monotonic_ns  # noqa: TID251 - runs inside the server, where the harness's clock is not

FORMAT = 1
COLUMNS = (
    "step",
    "schedule_ns",  # schedule() is called
    "scheduled_ns",  # schedule() has returned
    "device_start_ns",  # first device call; 0 when there was none
    "device_end_ns",  # last device call has returned
    "device_ns",  # inside device calls: a prefill is one call per chunk
    "device_calls",
    "copy_ns",  # copying KV of a reused prefix
    "executed_ns",  # execute_model() has returned
    "end_ns",  # update_from_output() has returned
    "kind",  # "prefill", "decode", "idle"
    "n",
    "b",
    "requests",  # in batch order
    "prompt_tokens",  # of a prefill: tokens of the request, generated ones of a resumed request included
    "cached_tokens",
    "computed_tokens",
    "dummy_slot",  # -1: none was requested
    "evictions",  # [slot, caller]; caller is "request", "dummy" or "preempt"
    "preempted",
    "slots_held",  # mapped to running or finished requests, after schedule(); -1 without prefix caching
    "slots_free",
    "running",
    "waiting",
    "observer_ns",  # time of the observer itself, in the previous step
)
KNOWN_VERSIONS = ("0.11.", "0.12.")
PREFIX_CACHE = "vllm_rbln.v1.core.prefix_cache_manager.optimum_prefix_cache_manager"
RUNNER = "vllm_rbln.v1.worker.optimum_model_runner"
MODEL = "vllm_rbln.model_executor.models.optimum.model_base"
RUNTIME = "optimum.rbln.utils.runtime_utils"
ATTACHED = "_rbln_observer_attached"


class StepFile:
    """Append-only. A record is written when its step ends, because the server may be killed at any time."""

    def __init__(self, path: str, header: Mapping[str, Any]) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._encode = json.JSONEncoder(separators=(",", ":")).encode
        self.append({"observer_format": FORMAT, "columns": COLUMNS, **header})

    def append(self, value: Any) -> None:
        line = (self._encode(value) + "\n").encode()
        if os.write(self._descriptor, line) != len(line):
            raise OSError("the record was written only in part")


class NotObservable(Exception):  # noqa: N818 - a reason, not a fault
    """The functions of this stack are unknown; the message is for the log."""


def attach(scheduler: Any, path: str) -> None:
    """Observe the engine core of ``scheduler``; an unknown stack is refused with a log line."""
    scheduler_class = type(scheduler)
    if hasattr(scheduler_class, ATTACHED):
        return
    try:
        points = find_points(scheduler)
    except NotObservable as reason:
        LOG.warning("[OBSERVER] not observing: %s", reason)
        return
    header = {
        "pid": os.getpid(),
        "vllm_rbln": _version("vllm-rbln"),
        "vllm": _version("vllm"),
        "max_num_seqs": int(getattr(scheduler, "max_num_running_reqs", -1)),
        "num_slots": points["num_slots"],
        "attached_ns": now_ns(),
    }
    file = StepFile(path, header)
    setattr(scheduler_class, ATTACHED, True)
    Observer(points, file).wrap()
    LOG.info("[OBSERVER] one record per step (vllm-rbln %s) in %s", header["vllm_rbln"], path)


def find_points(scheduler: Any) -> dict[str, Any]:
    """The classes to wrap, by role; NotObservable names what is missing."""
    version = _version("vllm-rbln")
    if not version.startswith(KNOWN_VERSIONS):
        raise NotObservable(f"vllm-rbln {version or '(no version)'} is not one of 0.11.x, 0.12.x")
    decoder = _class(MODEL, "RBLNOptimumDecoderMixin")
    chooser = next((name for name in ("decode_layout", "preprocess_for_decoder") if hasattr(decoder, name)), "")
    copier = next((name for name in ("copy_cached_kv_blocks", "_copy_cached_kv_blocks") if hasattr(decoder, name)), "")
    prefix_cache = getattr(scheduler.kv_cache_manager, "prefix_cache_manager", None)
    points: dict[str, Any] = {
        "scheduler": type(scheduler),
        "runner": _class(RUNNER, "RBLNOptimumModelRunner"),
        "decoder": decoder,
        "chooser": chooser,
        "copier": copier,
        "runtime": _class(RUNTIME, "RBLNPytorchRuntime"),
        "prefix_cache": None if prefix_cache is None else _class(PREFIX_CACHE, "RBLNPrefixKVCacheManager"),
        "num_slots": -1,
    }
    needed = [("scheduler", "schedule"), ("scheduler", "update_from_output"), ("runner", "execute_model")]
    needed += [("runtime", "forward")]
    if prefix_cache is not None:
        needed += [("prefix_cache", name) for name in ("get_dummy_block", "_evict_block", "free_request")]
        points["num_slots"] = int(prefix_cache._config.num_ob)
        prefix_cache._allocator.get_free_count()
    missing = [f"{points[role].__name__}.{name}" for role, name in needed if not hasattr(points[role], name)]
    missing += [] if chooser else ["RBLNOptimumDecoderMixin.decode_layout"]
    if missing:
        raise NotObservable(f"vllm-rbln {version} has no {', '.join(missing)}")
    return points


def _class(module: str, name: str) -> Any:
    loaded = getattr(sys.modules.get(module), name, None)
    if loaded is None:
        raise NotObservable(f"the server has not loaded {module}.{name} (the optimum path of vllm-rbln)")
    return loaded


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


class Observer:
    """The wrappers and the current step: the engine core runs one step at a time, in one thread."""

    def __init__(self, points: dict[str, Any], file: StepFile) -> None:
        self._points = points
        self._file = file
        self._is_on = True
        self._caller = "request"
        self._observer_ns = 0
        self._step = self._new_step(0)

    def _new_step(self, number: int) -> dict[str, Any]:
        """The record of the next step; its values are in the order of ``COLUMNS``."""
        step: dict[str, Any] = dict.fromkeys(COLUMNS, 0)
        step.update(step=number, evictions=[], observer_ns=self._observer_ns)
        self._observer_ns = 0
        return step

    def wrap(self) -> None:
        """Put the wrappers in place."""
        points = self._points
        self._wrap(points["scheduler"], "schedule", self._scheduled)
        self._wrap(points["scheduler"], "update_from_output", self._updated)
        self._wrap(points["runner"], "execute_model", self._executed)
        self._wrap(points["runtime"], "forward", self._device_called)
        chosen = self._laid_out if points["chooser"] == "decode_layout" else self._preprocessed
        for owner in _owners(points["decoder"], points["chooser"]):
            self._wrap(owner, points["chooser"], chosen)
        if points["copier"]:
            self._wrap(points["decoder"], points["copier"], self._copied)
        if points["prefix_cache"] is not None:
            self._name_caller(points["prefix_cache"], "get_dummy_block", "dummy")
            self._name_caller(points["prefix_cache"], "free_request", "preempt")
            self._wrap_evict(points["prefix_cache"])

    def _wrap(self, owner: Any, name: str, note: Callable[[int, Any, Any], None]) -> None:
        """Call ``note(began_ns, object, output)`` after each call of ``name``, until it raises for the first time."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(target: Any, *args: Any, **options: Any) -> Any:
            began_ns = now_ns()
            output = original(target, *args, **options)
            if self._is_on:
                try:
                    note(began_ns, target, output)
                except Exception as error:
                    self._fail(error)
            return output

        # On the class itself; a base class keeps its function.
        setattr(owner, name, wrapped)

    def _name_caller(self, owner: Any, name: str, caller: str) -> None:
        """Name ``caller`` as the cause of what is evicted during ``name``."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(target: Any, *args: Any, **options: Any) -> Any:
            self._caller = caller
            try:
                return original(target, *args, **options)
            finally:
                self._caller = "request"

        setattr(owner, name, wrapped)

    def _wrap_evict(self, owner: Any) -> None:
        original = owner._evict_block

        @functools.wraps(original)
        def _evict_block(manager: Any, block_id: Any, *args: Any, **options: Any) -> Any:
            free_before = manager._allocator.get_free_count()
            output = original(manager, block_id, *args, **options)
            if self._is_on:
                try:
                    # A block without a mapping is skipped; nothing is evicted.
                    if manager._allocator.get_free_count() > free_before:
                        self._step["evictions"].append((int(block_id), self._caller))
                except Exception as error:
                    self._fail(error)
            return output

        owner._evict_block = _evict_block

    def _fail(self, error: Exception) -> None:
        """Log the first error; afterwards only the original functions run."""
        if self._is_on:
            self._is_on = False
            LOG.warning("[OBSERVER] stopped after step %d: %s: %s", self._step["step"], type(error).__name__, error)

    # -- what is noted after a call of the function that a name says ---------------------------------------------

    def _scheduled(self, began_ns: int, scheduler: Any, output: Any) -> None:
        ended_ns = now_ns()
        self._step.update(schedule_ns=began_ns, scheduled_ns=ended_ns, **self._decision(scheduler, output))
        self._observer_ns += now_ns() - ended_ns

    def _updated(self, _began_ns: int, _scheduler: Any, _outputs: Any) -> None:
        self._finish(now_ns())

    def _executed(self, _began_ns: int, _runner: Any, _output: Any) -> None:
        self._step["executed_ns"] = now_ns()

    def _device_called(self, began_ns: int, _runtime: Any, _output: Any) -> None:
        step, ended_ns = self._step, now_ns()
        if not step["device_calls"]:
            step["device_start_ns"] = began_ns
        step["device_end_ns"] = ended_ns
        step["device_ns"] += ended_ns - began_ns
        step["device_calls"] += 1

    def _copied(self, began_ns: int, _model: Any, _output: Any) -> None:
        self._step["copy_ns"] += now_ns() - began_ns

    def _laid_out(self, _began_ns: int, _model: Any, layout: Any) -> None:
        self._step["b"] = int(layout[0])

    def _preprocessed(self, _began_ns: int, _model: Any, inputs: Any) -> None:
        self._step["b"] = int(inputs["padded_batch_size"] or 0)

    def _decision(self, scheduler: Any, output: Any) -> dict[str, Any]:
        """The columns that a decision of schedule() shows."""
        tokens: dict[str, int] = output.num_scheduled_tokens
        is_prefill = bool(output.scheduled_new_reqs) or bool(output.scheduled_cached_reqs.resumed_req_ids)
        prompt = sum(tokens.values()) if is_prefill else 0
        cached = int(sum(output.cached_length)) if is_prefill else 0
        dummy = output.dummy_block
        free = self._num_free(scheduler)
        return {
            "kind": "prefill" if is_prefill else "decode" if tokens else "idle",
            "n": len(tokens),
            "requests": list(tokens),
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "computed_tokens": prompt - cached,
            "dummy_slot": -1 if dummy is None or is_prefill else int(dummy),
            "preempted": list(output.preempted_req_ids or ()),
            "slots_held": -1 if free < 0 else self._points["num_slots"] - free,
            "slots_free": free,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting) + len(getattr(scheduler, "skipped_waiting", ())),
        }

    def _num_free(self, scheduler: Any) -> int:
        if self._points["prefix_cache"] is None:
            return -1
        return int(scheduler.kv_cache_manager.prefix_cache_manager._allocator.get_free_count())

    def _finish(self, ended_ns: int) -> None:
        """Write the record of the step that has just ended."""
        step = self._step
        if not step["schedule_ns"]:
            return
        if step["kind"] != "decode":
            step["b"] = step["n"]
        elif not step["b"]:
            raise NotObservable("no known function laid out a decode step")
        step["end_ns"] = ended_ns
        self._file.append(list(step.values()))
        self._observer_ns += now_ns() - ended_ns
        self._step = self._new_step(step["step"] + 1)


def _owners(mixin: Any, name: str) -> list[Any]:
    """``mixin`` and every subclass that defines ``name`` itself: some models lay out their batch differently."""
    owners, frontier = [mixin], [mixin]
    while frontier:
        frontier = [child for parent in frontier for child in parent.__subclasses__()]
        owners += [child for child in frontier if name in vars(child) and child not in owners]
    return owners
