# pyright: basic, reportMissingImports=false
"""A stand-in for Rebellions' closed device runtime: the calls of optimum-rbln and vllm-rbln 0.11.1 to 0.12.1.

It compiles and computes nothing: ``twin_device`` is the device behind it. A compiled file of the twin is a small JSON
table of shapes. Tensors are read, never stored.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from twin_device import Device, DeviceShape, now_ns, read_settings

try:
    __version__ = metadata.version("rebel-compiler")
except metadata.PackageNotFoundError:
    # A twin without metadata of the stand-in.
    __version__ = "0.11.1"

UNLIKELY, CERTAIN = -30.0, 30.0
_DEVICES: dict[str, Device] = {}


def get_npu_name(device_id: int = 0) -> str | None:
    """The device's name, None for an unknown device."""
    settings = read_settings()
    return settings.npu_name if 0 <= device_id < settings.num_npus else None


def npu_is_available(device_id: int = 0) -> bool:
    """Whether the device exists."""
    return get_npu_name(device_id) is not None


def device_count() -> int:
    """Number of devices that the machine claims to have."""
    return read_settings().num_npus


def manual_seed(seed: int) -> None:
    """Nothing here is random."""
    del seed


class CompileContext:
    """Passed around by the stack, never read here."""

    def __init__(self, use_weight_sharing: bool = False, use_global_ctx: bool = False, **options: object) -> None:
        self.use_weight_sharing = use_weight_sharing
        self.use_global_ctx = use_global_ctx
        self.options = options


class RBLNCompiledModel:
    """The shapes of a compiled graph, read from its file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.shapes: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        if self.shapes.get("made_by") != "twin":
            raise ValueError(f"{path}: a real compiled model needs the real runtime")

    def device(self) -> Device:
        """The device of all graphs of this artifact, created at first use."""
        key = str(self.path.parent.resolve())
        if key not in _DEVICES:
            shape = DeviceShape(
                num_slots=self.shapes["num_slots"],
                slot_tokens=self.shapes["slot_tokens"],
                chunk_tokens=self.shapes["chunk_tokens"],
                low=self.shapes["token_low"],
                high=self.shapes["token_high"],
            )
            _DEVICES[key] = Device(read_settings(), shape)
            if _DEVICES[key].is_traced:
                trace_scheduling(_DEVICES[key].note)
        return _DEVICES[key]


def compile(*_: object, **__: object) -> RBLNCompiledModel:  # noqa: A001 - the runtime's own name
    """Always refused: compiling needs the real runtime."""
    raise NotImplementedError(
        "the stand-in runtime does not compile; write an artifact with `harness server twin artifact`"
    )


compile_from_torch = compile


class Runtime:
    """A graph on the device, with the call signature that optimum-rbln uses."""

    def __init__(self, compiled_model: RBLNCompiledModel, tensor_type: str = "pt", **options: Any) -> None:
        if tensor_type != "pt":
            raise ValueError(f"tensor_type {tensor_type!r}")
        self.options = options
        # The device does no arithmetic; on few shared cores a second thread only delays tensor fills.
        torch.set_num_threads(1)
        self._shapes = compiled_model.shapes
        self._device = compiled_model.device()

    def __call__(self, *inputs: torch.Tensor, out: list[torch.Tensor] | None = None) -> torch.Tensor:
        if self._shapes["phase"] == "prefill":
            return self._prefill(*inputs, out=out)
        return self._decode(*inputs)

    def _prefill(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        query_position: torch.Tensor,
        *,
        out: list[torch.Tensor] | None,
    ) -> torch.Tensor:
        """ids, positions: shape (1, chunk); table: shape (slots per sequence,); after query_position is padding."""
        count = int(query_position) + 1
        token = self._device.prefill_chunk(table.reshape(-1).tolist(), int(positions[0, 0]), ids[0, :count].tolist())
        logits = torch.empty(1, 1, self._shapes["vocab_size"]) if out is None else out[0]
        _write_logits(logits, [token])
        return logits

    def _decode(self, ids: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        """ids, positions: shape (b, 1); tables: shape (b, slots per sequence). Logits of shape (b, 1, vocab)."""
        batch = self._shapes["batch_size"]
        if ids.shape != (batch, 1) or positions.shape != (batch, 1):
            raise ValueError(f"decoder of batch {batch} called with {tuple(ids.shape)} ids")
        tokens = self._device.decode(tables.tolist(), positions[:, 0].tolist(), ids[:, 0].tolist())
        logits = torch.empty(batch, 1, self._shapes["vocab_size"])
        _write_logits(logits, tokens)
        return logits

    def _copy_kv_cache(self, source: int, target: int, num_tokens: int) -> None:
        self._device.copy(source, target, num_tokens)


def _write_logits(logits: torch.Tensor, tokens: list[int]) -> None:
    logits.fill_(UNLIKELY)
    for row, token in enumerate(tokens):
        logits[row, -1, token] = CERTAIN


# The sampling operators that the real compiler registers with torch. Sampling always takes the most likely token and
# ignores temperature, k and p, so that tokens are predictable.
_LIBRARY = torch.library.Library("rbln", "FRAGMENT")
_LIBRARY.define("argmax(Tensor logits) -> Tensor")
_LIBRARY.define("top_k_top_p(Tensor probs, Tensor? k, Tensor? p) -> Tensor")


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    # Equal to argmax, and twice as fast on bfloat16.
    return logits.max(dim=-1).indices


def _top_k_top_p(probs: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    del k, p
    # Warm-up passes rows of NaN; any token is accepted for them.
    return probs.nan_to_num().max(dim=-1).indices


def _one_per_row(logits: torch.Tensor, *_: object) -> torch.Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=torch.int64)


_LIBRARY.impl("argmax", _argmax, "CPU")
_LIBRARY.impl("top_k_top_p", _top_k_top_p, "CPU")
torch.library.register_fake("rbln::argmax", _one_per_row, lib=_LIBRARY)
torch.library.register_fake("rbln::top_k_top_p", _one_per_row, lib=_LIBRARY)


def _empty_cache() -> None:
    """There is no cache."""


# A real server has an accelerator from torch-rbln and empties its caches at shutdown. The CPU build of torch raises
# there, which would end the engine process with a traceback. vLLM 0.30 also empties the host's cache.
if not torch.accelerator.is_available():
    torch.accelerator.empty_cache = _empty_cache
    torch.accelerator.empty_host_cache = _empty_cache


def rbln_backend(graph: torch.fx.GraphModule, inputs: Sequence[Any], **_: object) -> Callable[..., Any]:
    """The backend of torch.compile for the sampler: the traced graph unchanged, on the CPU."""
    del inputs
    return graph.forward


def aligned_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **_: object) -> torch.Tensor:
    """A host buffer that the real runtime reaches by DMA; here an uninitialised tensor."""
    return torch.empty(shape, dtype=dtype)


SUBMODULES: dict[str, dict[str, object]] = {
    "compile_context": {"CompileContext": CompileContext},
    "core": {},
    "core.torch_compile": {"rbln_backend": rbln_backend},
    "kv_cache": {"aligned_tensor": aligned_tensor},
    # Read from vllm-rbln 0.12.1 on. The profiler is called only where its flag is on.
    "flags": {"RBLN_PROFILER": False},
    "profiler": {},
}
"""The runtime's modules that the stack imports by name, with what it takes from them."""

for _name, _content in SUBMODULES.items():
    _module = ModuleType(f"{__name__}.{_name}")
    vars(_module).update(_content)
    _parent, _, _last = _module.__name__.rpartition(".")
    sys.modules[_module.__name__] = _module
    setattr(sys.modules[_parent], _last, _module)


SCHEDULER_MODULE, SCHEDULER_CLASS = "vllm_rbln.v1.core.optimum_scheduler", "RBLNOptimumScheduler"
TRACED_MARK = "_twin_traced"
Note = Callable[..., None]


def trace_scheduling(note: Note) -> None:
    """Add arrivals, aborts and the decision of each step to the device trace; note(kind, start_ns, **fields) writes.

    Four methods of the vendor's scheduler are wrapped: each is called once, arguments and result unchanged.
    """
    scheduler = getattr(sys.modules.get(SCHEDULER_MODULE), SCHEDULER_CLASS, None)
    if scheduler is None or hasattr(scheduler, TRACED_MARK):
        return
    setattr(scheduler, TRACED_MARK, True)
    scheduler.add_request = _traced_arrival(scheduler.add_request, note)
    step = _OpenStep()
    scheduler.finish_requests = _traced_abort(scheduler.finish_requests, note, step)
    scheduler.schedule = _traced_schedule(scheduler.schedule, note, step)
    scheduler.update_from_output = _traced_end(scheduler.update_from_output, step)


class _OpenStep:
    """The step that runs: the number of its schedule() call; None between steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.call: int | None = None


def _traced_arrival(original: Callable[..., Any], note: Note) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_request(scheduler: Any, request: Any, *args: Any, **options: Any) -> Any:
        note("arrival", now_ns(), request=request.request_id, prompt_tokens=request.num_prompt_tokens)
        return original(scheduler, request, *args, **options)

    return add_request


def _traced_abort(original: Callable[..., Any], note: Note, step: _OpenStep) -> Callable[..., Any]:
    @functools.wraps(original)
    def finish_requests(scheduler: Any, *args: Any, **options: Any) -> Any:
        start_ns = now_ns()
        dropped = original(scheduler, *args, **options)
        # Several requests are freed in the order of a set of strings, which only the return value shows.
        if dropped:
            # vLLM 0.22 and 0.24 return (id, client) pairs, 0.30 and later the requests.
            names = [item[0] if isinstance(item, tuple) else item.request_id for item in dropped]
            note("abort", start_ns, requests=names, step=step.call)
        return dropped

    return finish_requests


def _traced_end(original: Callable[..., Any], step: _OpenStep) -> Callable[..., Any]:
    @functools.wraps(original)
    def update_from_output(scheduler: Any, *args: Any, **options: Any) -> Any:
        try:
            return original(scheduler, *args, **options)
        finally:
            step.call = None

    return update_from_output


def _traced_schedule(original: Callable[..., Any], note: Note, step: _OpenStep) -> Callable[..., Any]:
    @functools.wraps(original)
    def schedule(scheduler: Any, *args: Any, **options: Any) -> Any:
        start_ns = now_ns()
        output = original(scheduler, *args, **options)
        step.call, step.num_steps = step.num_steps, step.num_steps + 1
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
