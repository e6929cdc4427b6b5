"""Evidence that patch and observer only observe: proofs on files, hooks, and the experiment with and without them.

Everything is decided by source text, in a wheel or installed, so it can be checked before an upgrade. Nothing is
imported, applied or started. The observer itself refuses a stack with missing hooks when a server starts.
Source: ``rbln_observer/observe.py``; vllm-rbln 0.11.0 to 0.12.1a8, optimum-rbln 0.11.0 to 0.12.0.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import SpecError
from harness.kinds import kind_named
from harness.spec import ConditionSpec, ExperimentSpec
from harness.stack.rbln.launch.patches.shipped import (
    Patch,
    patch_status,
    read,
    require_pristine,
    sha256,
    shipped_patches,
)
from harness.stack.rbln.launch.releases.sources import Read, open_sources
from harness.stack.rbln.launch.serving import OBSERVER_FOLDER


@dataclass(frozen=True, slots=True)
class HookPoint:
    """A function that the observer wraps. names: its name by version. arguments: that it must accept, by name."""

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
"""Part of optimum-rbln, so not in a wheel of vllm-rbln."""
OUTPUT_FIELDS = ("cached_length", "dummy_block")
"""Fields that vllm-rbln adds to vLLM's scheduler output and the observer reads."""


def known_versions() -> tuple[str, ...]:
    """Prefixes of the versions that the observer accepts, read from its source: it runs outside the harness."""
    source = OBSERVER_FOLDER / "rbln_observer" / "observe.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KNOWN_VERSIONS":
            return tuple(ast.literal_eval(node.value))
    raise LookupError(f"{source} names no KNOWN_VERSIONS")


def missing_hooks(read: Read, points: Sequence[HookPoint] = POINTS) -> list[str]:
    """Missing hooks of ``points``, as clauses; empty when the observer fits."""
    missing = [problem for point in points if (problem := _problem(point, read(point.path)))]
    source = read(SCHEDULER) or ""
    return missing + [f"{SCHEDULER} has no {name}" for name in OUTPUT_FIELDS if source and f"{name}:" not in source]


def _problem(point: HookPoint, source: str | None) -> str:
    if source is None:
        return f"{point.path} is not there"
    functions = _functions(source, point.owner)
    if functions is None:
        return f"{point.path} has no class {point.owner}"
    function = next((functions[name] for name in point.names if name in functions), None)
    if function is None:
        return f"{point.owner} has no {' or '.join(point.names)}"
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    known = {argument.arg for argument in arguments}
    lacking = [name for name in point.arguments if name not in known]
    return f"{point.owner}.{function.name} takes no {', '.join(lacking)}" if lacking else ""


def _functions(source: str, owner: str) -> dict[str, ast.FunctionDef] | None:
    """The functions of a class by name; None without the class, or when the source is not Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    return None


PLAIN, OBSERVED = "plain", "observed"


def verify_installed(site_packages: Path) -> str:
    """Prove the patch that fits an installed package, and check the observer's hooks; returns one line.

    SpecError when no patch fits.
    """
    status = patch_status(site_packages)
    proof = _proof(require_pristine(status), read(status.target), status.target)
    hooks = _hooks(open_sources(site_packages).read, (*POINTS, RUNTIME))
    return f"{status.target}: {status.state}; {proof}; {hooks}"


def verify_wheel(wheel: Path) -> str:
    """Prove the patch that fits the package in a wheel, and check the observer's hooks; nothing is installed."""
    source = open_sources(wheel).read
    patch, why = fitting_patch(source)
    if patch is None:
        raise SpecError(why, where=str(wheel))
    before = (source(patch.target) or "").encode()
    return f"{_proof(patch, before, wheel / patch.target)}; {_hooks(source, POINTS)}"


def fitting_patch(source: Read) -> tuple[Patch | None, str]:
    """The patch made for exactly the file of a release; or None, and why none fits."""
    reasons: list[str] = []
    for patch in shipped_patches():
        text = source(patch.target)
        if text is None:
            reasons.append(f"{patch.target} is not there")
        elif sha256(text.encode()) == patch.sha256_before:
            return patch, ""
        else:
            reasons.append(f"no patch fits {patch.target}, SHA-256 {sha256(text.encode())[:16]}")
    return None, reasons[-1] if reasons else "this release ships no patches"


def why_no_observer(source: Read, version: str) -> str:
    """Why the observer refuses a release; "" when it fits."""
    known = known_versions()
    if not version.startswith(known):
        return f"it takes {', '.join(f'{prefix}x' for prefix in known)} only"
    return "; ".join(missing_hooks(source))


def _proof(patch: Patch, before: bytes, where: Path) -> str:
    after = patch.apply(before, where)
    lines = ", ".join(f"line {added.line} {added.format!r}" for added in patch.audit(before, after))
    return f"{patch.path.parent.name}/{patch.name} agrees in all three hashes and adds only logging: {lines}"


def _hooks(read: Read, points: Sequence[HookPoint]) -> str:
    missing = missing_hooks(read, points)
    if missing:
        return f"the observer does NOT fit: {'; '.join(missing)}"
    return f"the observer's {len(points)} hooks fit"


def paired_spec(spec: ExperimentSpec, backend: str | None = None) -> ExperimentSpec:
    """An experiment with the first condition of ``spec`` in two forms: plain, and with patch and observer.

    Raises SpecError for a backend with nothing to patch.
    """
    kind = kind_named(backend or spec.backend)
    if not kind.has_stack:
        raise SpecError(
            f"backend {kind.name!r} starts no vllm-rbln to patch and observe",
            where="server patch check",
            hint="Use --backend rbln on an NPU server, or --backend twin anywhere",
        )
    first = spec.condition[0]
    table: dict[str, Any] = spec.model_dump(exclude={"condition", "baseline"})
    server = {key: value for key, value in first.server.items() if key not in {"patch", "observer"}}
    pair = [
        ConditionSpec(
            name=name,
            treatment=first.treatment,
            workload=first.workload,
            server={**server, "patch": patch, "observer": name == OBSERVED},
        )
        for name, patch in ((PLAIN, "none"), (OBSERVED, "overlay"))
    ]
    return ExperimentSpec.model_validate(
        {
            **table,
            "name": f"{spec.name}-check"[:64],
            "backend": kind.name,
            "replicates": 1,
            "rules": (),
            "condition": [condition.model_dump() for condition in pair],
        }
    )
