"""Writes a package tree with vllm-rbln's names and nothing of its work, for tests of the observer without the stack."""

from __future__ import annotations

from pathlib import Path

VLLM = """
class SchedulerConfig:
    def get_scheduler_cls(self):
        from vllm_rbln.v1.core.optimum_scheduler import RBLNOptimumScheduler

        return RBLNOptimumScheduler
"""
SCHEDULER = """
from types import SimpleNamespace as Space


class Output:
    def __init__(self, tokens, new, cached, dummy):
        self.num_scheduled_tokens = tokens
        self.scheduled_new_reqs = new
        self.scheduled_cached_reqs = type("Cached", (), {"resumed_req_ids": set()})
        self.cached_length = cached
        self.cached_block_table = []
        self.preempted_req_ids = set()
        self.dummy_block = dummy


class Base:
    def update_from_output(self, output, made):
        return {"tokens": made}


class RBLNOptimumScheduler(Base):
    def __init__(self, slots=2, limit=4):
        from vllm_rbln.v1.core.prefix_cache_manager.optimum_prefix_cache_manager import RBLNPrefixKVCacheManager

        self.max_num_running_reqs = limit
        self.requests, self.running, self.waiting, self.skipped_waiting = {}, [], [], []
        self.kv_cache_manager = type("Manager", (), {})()
        self.kv_cache_manager.prefix_cache_manager = RBLNPrefixKVCacheManager(slots)

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request.request_id)

    def schedule(self):
        slots = self.kv_cache_manager.prefix_cache_manager
        if self.waiting:
            name = self.waiting.pop(0)
            if not slots._allocator.get_free_count():
                slots._evict_block(slots.held[0])
            slots.take(name)
            self.running.append(name)
            new = Space(req_id=name, prompt_token_ids=[7] * 300, num_computed_tokens=0)
            return Output({name: 300}, [new], [128], None)
        if not self.running:
            return Output({}, [], [], None)
        dummy = slots.get_dummy_block() if len(self.running) < self.max_num_running_reqs else None
        return Output({name: 1 for name in self.running}, [], [], dummy)
"""
PREFIX_CACHE = """
class Allocator:
    def __init__(self, free):
        self.free = free

    def get_free_count(self):
        return len(self.free)


class RBLNPrefixKVCacheManager:
    def __init__(self, slots):
        self._config = type("Config", (), {"num_ob": slots})
        self._allocator = Allocator(list(range(slots)))
        self.held = []

    def take(self, name):
        self.held.append(self._allocator.free.pop(0))

    def _evict_block(self, block_id):
        if block_id in self.held:
            self.held.remove(block_id)
            self._allocator.free.append(block_id)

    def get_dummy_block(self):
        if not self._allocator.free:
            self._evict_block(self.held[0])
        return self._allocator.free[0]

    def free_request(self, request_id, preemption=False):
        if preemption:
            self._evict_block(self.held[-1])
"""
MODEL = """
class RBLNOptimumDecoderMixin:
    def preprocess_for_decoder(self, n):
        return {"padded_batch_size": 1 if n == 1 else 4}

    def copy_cached_kv_blocks(self):
        return "copied"
"""
RUNNER = """
class RBLNOptimumModelRunner:
    def __init__(self, model, runtime):
        self.model, self.runtime = model, runtime

    def execute_model(self, output):
        if output.scheduled_new_reqs:
            self.model.copy_cached_kv_blocks()
            return [self.runtime.forward("chunk"), self.runtime.forward("chunk")]
        if output.num_scheduled_tokens:
            inputs = self.model.preprocess_for_decoder(len(output.num_scheduled_tokens))
            return [self.runtime.forward(inputs["padded_batch_size"])]
        return []
"""
RUNTIME = """
class RBLNPytorchRuntime:
    def forward(self, value):
        if value == "broken":
            raise RuntimeError("device error")
        return ("out", value)
"""


def write_little_stack(root: Path, version: str = "0.11.1", *, without: str = "") -> Path:
    """The tree below ``root``, which is returned. without: a name that this version of the stack calls differently."""
    files = {
        "vllm/config/scheduler.py": VLLM,
        "vllm_rbln/v1/core/optimum_scheduler.py": SCHEDULER,
        "vllm_rbln/v1/core/prefix_cache_manager/optimum_prefix_cache_manager.py": PREFIX_CACHE,
        "vllm_rbln/v1/worker/optimum_model_runner.py": RUNNER,
        "vllm_rbln/model_executor/models/optimum/model_base.py": MODEL,
        "optimum/rbln/utils/runtime_utils.py": RUNTIME,
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(without, "renamed_by_a_new_version") if without else text)
    described = root / f"vllm_rbln-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-rbln\nVersion: {version}\n")
    return root
