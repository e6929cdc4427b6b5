# pyright: basic, reportMissingImports=false
"""A stand-in for Rebellions' closed device runtime: the calls of optimum-rbln and vllm-rbln 0.11.1 to 0.12.1.

It compiles and computes nothing: ``twin_device`` is the device behind it. A compiled file of the twin is a small JSON
table of shapes. Tensors are read, never stored.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from twin_device import Device, DeviceShape, read_settings

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
