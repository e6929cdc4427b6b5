# pyright: basic, reportMissingImports=false
"""More columns of a step of vllm-rbln's engine core: its device calls and its slots of KV memory.

``core`` loads this module for a scheduler of vllm-rbln alone. A wrapper calls the original exactly once, arguments and
result unchanged; the first error of an addition ends the observer. An unknown stack is refused with a log line, and its
steps are recorded without these columns.
Source: vllm-rbln 0.11.0 to 0.12.0 (optimum path), optimum-rbln 0.11.1.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from . import LOG, now_ns, version

COLUMNS = (
    "device_start_ns",  # first device call; null when there was none
    "device_end_ns",  # last device call has returned
    "device_ns",  # inside device calls: a prefill is one call per chunk
    "device_calls",
    "copy_ns",  # copying KV of a reused prefix
    "executed_ns",  # execute_model() has returned
    "dummy_slot",  # null: none was requested
    "evictions",  # [slot, caller]; caller is "request", "dummy" or "preempt"
    "slots_held",  # mapped to running or finished requests, after schedule(); null without prefix caching
    "slots_free",
)
"""Before ``observer_ns``. Here ``padded_tokens`` is the batch size of a decode step, and ``unpadded_tokens`` its n."""
_BLANK = dict.fromkeys(COLUMNS) | {"device_ns": 0, "device_calls": 0, "copy_ns": 0}
KNOWN_VERSIONS = ("0.11.", "0.12.")
PREFIX_CACHE = "vllm_rbln.v1.core.prefix_cache_manager.optimum_prefix_cache_manager"
RUNNER = "vllm_rbln.v1.worker.optimum_model_runner"
MODEL = "vllm_rbln.model_executor.models.optimum.model_base"
RUNTIME = "optimum.rbln.utils.runtime_utils"


def device_of(scheduler: Any) -> Device | None:
    """The device beneath a scheduler, observed from now on; None, and a log line, where the stack is unknown."""
    try:
        device = Device(scheduler)
    except Exception as error:
        LOG.warning("[CORE STEPS] not observing the device: %s: %s", type(error).__name__, error)
        return None
    LOG.info("[CORE STEPS] one record per step, with its device (vllm-rbln %s)", device.header["vllm_rbln"])
    return device


class Device:
    """The wrappers and the current step: the engine core runs one step at a time, in one thread.

    columns, header: more of the file's header. error: the first error; afterwards only the original functions run.
    """

    columns = COLUMNS

    def __init__(self, scheduler: Any) -> None:
        release = version("vllm-rbln")
        if not release.startswith(KNOWN_VERSIONS):
            known = ", ".join(f"{prefix}x" for prefix in KNOWN_VERSIONS)
            raise LookupError(f"vllm-rbln {release or '(no version)'} is not one of {known}")
        runner, runtime = _class(RUNNER, "RBLNOptimumModelRunner"), _class(RUNTIME, "RBLNPytorchRuntime")
        decoder = _class(MODEL, "RBLNOptimumDecoderMixin")
        chooser = next((name for name in ("decode_layout", "preprocess_for_decoder") if hasattr(decoder, name)), "")
        copiers = [name for name in ("copy_cached_kv_blocks", "_copy_cached_kv_blocks") if hasattr(decoder, name)]
        needed = [(runner, "execute_model"), (runtime, "forward"), (decoder, chooser or "decode_layout")]
        prefix_cache = getattr(scheduler.kv_cache_manager, "prefix_cache_manager", None)
        self.error: Exception | None = None
        self.header: dict[str, Any] = {"vllm_rbln": release, "num_slots": None}
        self._num_free: Callable[[], int] | None = None
        self._caller = "request"
        if prefix_cache is not None:
            slots = _class(PREFIX_CACHE, "RBLNPrefixKVCacheManager")
            needed += [(slots, name) for name in ("get_dummy_block", "_evict_block", "free_request")]
            self.header["num_slots"] = int(prefix_cache._config.num_ob)
            self._num_free = prefix_cache._allocator.get_free_count
        if missing := [f"{owner.__name__}.{name}" for owner, name in needed if not hasattr(owner, name)]:
            raise LookupError(f"vllm-rbln {release} has no {', '.join(missing)}")
        self._begin()
        self._wrap(runner, "execute_model", self._executed)
        self._wrap(runtime, "forward", self._called)
        for owner in _owners(decoder, chooser):
            self._wrap(owner, chooser, self._laid_out if chooser == "decode_layout" else self._preprocessed)
        for name in copiers[:1]:
            self._wrap(decoder, name, self._copied)
        if prefix_cache is not None:
            self._name_caller(slots, "get_dummy_block", "dummy")
            self._name_caller(slots, "free_request", "preempt")
            self._wrap_evict(slots)

    def _begin(self) -> None:
        """Count for the next step."""
        self._b = 0
        self._step: dict[str, Any] = {**_BLANK, "evictions": []}

    def decided(self, output: Any, *, is_prefill: bool) -> None:
        """Note the slots of a step that was decided."""
        step = self._step
        if output.dummy_block is not None and not is_prefill:
            step["dummy_slot"] = int(output.dummy_block)
        if self._num_free is not None:
            free = self._num_free()
            step["slots_held"], step["slots_free"] = self.header["num_slots"] - free, free

    def ended(self, record: dict[str, Any]) -> Iterable[Any]:
        """The values of the step that ended; a decode's size goes into ``record``. Raises a wrapper's first error."""
        if self.error is not None:
            raise self.error
        step = self._step
        if record["requests"] and not record["admitted"]:
            if not self._b:
                raise LookupError("no known function laid out a decode step")
            record["unpadded_tokens"], record["padded_tokens"] = len(record["requests"]), self._b
        self._begin()
        return step.values()

    def _note(self, note: Callable[..., Any], *told: Any) -> Any:
        """What ``note`` returns; nothing from the first error on."""
        if self.error is None:
            try:
                return note(*told)
            except Exception as error:
                self.error = error
        return None

    def _wrap(self, owner: Any, name: str, note: Callable[[int, Any], None]) -> None:
        """Call ``note(began_ns, output)`` after each call of ``name``. A base class keeps its function."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(target: Any, *args: Any, **options: Any) -> Any:
            began_ns = now_ns()
            output = original(target, *args, **options)
            self._note(note, began_ns, output)
            return output

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
        original, num_free = owner._evict_block, self._num_free
        assert num_free is not None

        @functools.wraps(original)
        def _evict_block(manager: Any, block_id: Any, *args: Any, **options: Any) -> Any:
            before = self._note(num_free)
            output = original(manager, block_id, *args, **options)
            after = self._note(num_free)
            # A block without a mapping is skipped; nothing is evicted.
            if None not in (before, after) and after > before:
                self._note(lambda: self._step["evictions"].append((int(block_id), self._caller)))
            return output

        owner._evict_block = _evict_block

    def _executed(self, _began_ns: int, _output: Any) -> None:
        self._step["executed_ns"] = now_ns()

    def _called(self, began_ns: int, _output: Any) -> None:
        step, ended_ns = self._step, now_ns()
        if not step["device_calls"]:
            step["device_start_ns"] = began_ns
        step["device_end_ns"] = ended_ns
        step["device_ns"] += ended_ns - began_ns
        step["device_calls"] += 1

    def _copied(self, began_ns: int, _output: Any) -> None:
        self._step["copy_ns"] += now_ns() - began_ns

    def _laid_out(self, _began_ns: int, layout: Any) -> None:
        self._b = int(layout[0])

    def _preprocessed(self, _began_ns: int, inputs: Any) -> None:
        self._b = int(inputs["padded_batch_size"] or 0)


def _class(module: str, name: str) -> Any:
    loaded = getattr(sys.modules.get(module), name, None)
    if loaded is None:
        raise LookupError(f"the server has not loaded {module}.{name} (the optimum path of vllm-rbln)")
    return loaded


def _owners(mixin: Any, name: str) -> list[Any]:
    """``mixin`` and every subclass that defines ``name`` itself: some models lay out their batch differently."""
    owners, frontier = [mixin], [mixin]
    while frontier:
        frontier = [child for parent in frontier for child in parent.__subclasses__()]
        owners += [child for child in frontier if name in vars(child) and child not in owners]
    return owners
