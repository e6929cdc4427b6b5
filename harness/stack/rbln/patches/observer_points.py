"""Whether the observer's hooks fit a vllm-rbln, by its source alone: in a wheel, or installed, on any machine.

Nothing is imported or run, so it can be asked before an upgrade. The observer itself refuses a stack whose hooks are
missing when a server starts.
Source: rbln_observer/observe.py of ``harness.stack.rbln.observer``; vllm-rbln 0.11.0 to 0.12.1a8, optimum-rbln 0.11.0
to 0.12.0.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.stack.rbln.observer import OBSERVE_FILE

Read = Callable[[str], "str | None"]
"""The source of a file below site-packages; None when it is not there."""


@dataclass(frozen=True, slots=True)
class HookPoint:
    """One function that the observer wraps. names: what versions call it. arguments: what it must take, by name."""

    path: str
    owner: str
    names: tuple[str, ...]
    arguments: tuple[str, ...] = ()


PREFIX_CACHE = "vllm_rbln/v1/core/prefix_cache_manager/optimum_prefix_cache_manager.py"
MODEL = "vllm_rbln/model_executor/models/optimum/model_base.py"
SCHEDULER = "vllm_rbln/v1/core/optimum_scheduler.py"
POINTS = (
    HookPoint(SCHEDULER, "RBLNOptimumScheduler", ("schedule",)),
    HookPoint("vllm_rbln/v1/worker/optimum_model_runner.py", "RBLNOptimumModelRunner", ("execute_model",)),
    HookPoint(MODEL, "RBLNOptimumDecoderMixin", ("decode_layout", "preprocess_for_decoder"), ("block_tables",)),
    HookPoint(MODEL, "RBLNOptimumDecoderMixin", ("copy_cached_kv_blocks", "_copy_cached_kv_blocks")),
    HookPoint(PREFIX_CACHE, "RBLNPrefixKVCacheManager", ("get_dummy_block",)),
    HookPoint(PREFIX_CACHE, "RBLNPrefixKVCacheManager", ("free_request",), ("request_id", "preemption")),
    HookPoint(PREFIX_CACHE, "RBLNPrefixKVCacheManager", ("_evict_block",), ("block_id",)),
)
RUNTIME = HookPoint("optimum/rbln/utils/runtime_utils.py", "RBLNPytorchRuntime", ("forward",))
"""Of optimum-rbln, so not in a wheel of vllm-rbln."""
OUTPUT_FIELDS = ("cached_length", "dummy_block")
"""What vllm-rbln adds to vLLM's scheduler output, as the observer reads it."""


def known_versions() -> tuple[str, ...]:
    """How the versions begin that the observer takes, from its own source: it runs where the harness is not."""
    for node in ast.parse(OBSERVE_FILE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KNOWN_VERSIONS":
            return tuple(ast.literal_eval(node.value))
    raise LookupError(f"{OBSERVE_FILE} names no KNOWN_VERSIONS")


def missing_hooks(read: Read, points: Sequence[HookPoint] = POINTS) -> list[str]:
    """What of ``points`` a stack lacks, as clauses; empty when the observer fits."""
    missing = [problem for point in points if (problem := _problem(point, read(point.path)))]
    source = read(SCHEDULER) or ""
    return missing + [f"{SCHEDULER} has no {name}" for name in OUTPUT_FIELDS if source and f"{name}:" not in source]


def _problem(point: HookPoint, source: str | None) -> str:
    if source is None:
        return f"{point.path} is not there"
    functions = _functions(source, point.owner)
    if functions is None:
        return f"{point.path} has no class {point.owner}"
    found = next((functions[name] for name in point.names if name in functions), None)
    if found is None:
        return f"{point.owner} has no {' or '.join(point.names)}"
    known = {one.arg for one in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)}
    lacking = [name for name in point.arguments if name not in known]
    return f"{point.owner}.{found.name} takes no {', '.join(lacking)}" if lacking else ""


def _functions(source: str, owner: str) -> dict[str, ast.FunctionDef] | None:
    """The functions of a class by name; None when there is no such class, or no Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            return {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
    return None
