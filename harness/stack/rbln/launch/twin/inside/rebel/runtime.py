# pyright: basic, reportMissingImports=false
"""Compiled models and runtimes: one for prefill, one per decoder batch size, all on the same device memory.

A compiled file of the twin is a small JSON table of shapes. Tensors are read, never stored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from twin_device.device import Device, DeviceShape
from twin_device.scheduling import trace_scheduling
from twin_device.settings import read_settings

UNLIKELY, CERTAIN = -30.0, 30.0
_DEVICES: dict[str, Device] = {}


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
