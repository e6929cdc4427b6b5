"""What a device costs beside its steps: memory after loading, compiling, the size of an artifact."""

from __future__ import annotations

from pydantic import Field

from harness.model.engine.config import PAGED_BLOCK_TOKENS
from harness.model.spec import ServerShape, Spec

GIB = 1 << 30


class DeviceSpec(Spec):
    """Memory and compile arithmetic. Defaults: Qwen3-4B on 4 devices, vllm-rbln 0.11.1, docs/reference/method.md,
    "Search".

    Compile: compile_base_s + compile_call_s (buckets + 1) fits the observed 349-486 s. Overhead: memory of a device
    beside the KV slots after loading, the largest measured value (6.6-7.0 GiB with 4.5 GiB of KV).
    """

    devices: int = Field(default=4, ge=1)
    kv_bytes_per_token: int = Field(default=147_456, ge=1, description="all layers, keys and values, all devices")
    overhead_gib: float = Field(default=2.6, ge=0, description="per device, beside the KV slots")
    compile_base_s: float = Field(default=42.3, ge=0)
    compile_call_s: float = Field(default=61.33, ge=0)
    artifact_base_gib: float = Field(default=8.276, ge=0)
    artifact_bucket_gib: float = Field(default=0.806, ge=0)

    def memory_gib(self, candidate: ServerShape) -> float:
        """Memory of one device after loading, GiB."""
        kv_tokens = candidate.kv_slots * candidate.slot_tokens
        if candidate.num_gpu_blocks is not None:
            kv_tokens = candidate.num_gpu_blocks * PAGED_BLOCK_TOKENS
        kv_bytes = kv_tokens * self.kv_bytes_per_token
        return kv_bytes / self.devices / GIB + self.overhead_gib

    def compile_s(self, candidate: ServerShape) -> float:
        return self.compile_base_s + self.compile_call_s * (len(candidate.decode_buckets) + 1)

    def artifact_gib(self, candidate: ServerShape) -> float:
        return self.artifact_base_gib + self.artifact_bucket_gib * len(candidate.decode_buckets)
