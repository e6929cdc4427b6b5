"""The shipped patches, the state of the installed package, and the overlay: a patched copy for PYTHONPATH.

Installed files are only read. A manifest names every valid hash. A patch is audited each time it is used. Whether patch
and observer fit a release is decided by its source text, in a wheel or installed, so before an upgrade; the observer
itself refuses a stack with missing hooks when a server starts.
Source: ``vllm_step_log/device.py``; vllm-rbln 0.11.0 to 0.12.1a8, optimum-rbln 0.11.0 to 0.12.0.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

from harness.errors import ServerError, SpecError
from harness.model.spec import load_toml
from harness.stacks.rbln.launch.patch_audit import AddedLine, audit
from harness.stacks.rbln.launch.sources import Read, function_statements, open_sources
from harness.stacks.vllm.inside.vllm_step_log.device import KNOWN_VERSIONS

_PACKAGE = Path(__file__).resolve().parents[3]
PATCH_ROOTS = (_PACKAGE.parent / "patches", _PACKAGE / "_data" / "patches")
"""In the checkout, and inside an installed wheel."""
OVERLAY_FILE = "overlay.json"
TRACE_OF_PATCH = b"[BUCKET] request_nums="
_HASHES = ("sha256_before", "sha256_patch", "sha256_after")

State = Literal["pristine", "patched", "unknown", "absent"]
"""State of the installed file. patched: it has the patch's line, however added."""


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch for one content of a file. target: path below site-packages. Hashes: SHA-256, hex."""

    name: str
    path: Path
    package: str
    versions: tuple[str, ...]
    target: str
    observes: str
    sha256_before: str
    sha256_patch: str
    sha256_after: str

    @property
    def hashes(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in _HASHES}

    def record(self, version: str) -> dict[str, Any]:
        """The record for a run's manifest. version: of the package that it is applied to."""
        return {"mode": "overlay", "name": self.name, "target": self.target, "version": version, **self.hashes}

    def text(self) -> str:
        """The diff, as released; SpecError when its hash differs from the manifest."""
        content = read(self.path)
        require_hash(content, self.sha256_patch, self.path, "Restore the patch from the release")
        return content.decode()

    def apply(self, before: bytes, where: Path) -> bytes:
        """``before`` with the patch applied: hashes checked, change audited. where: named in errors."""
        hint = f"It was made for {self.package} {', '.join(self.versions)}; install one of these"
        require_hash(before, self.sha256_before, where, hint)
        after = patched_text(self.text(), self.target, before.decode()).encode()
        require_hash(after, self.sha256_after, self.path, "Restore manifest and patch from the release")
        self.audit(before, after)
        return after

    def audit(self, before: bytes, after: bytes) -> tuple[AddedLine, ...]:
        """The logging calls that the patch adds; PatchAuditError when it changes anything else."""
        return audit(before.decode(), after.decode(), where=f"{self.path.parent.name}/{self.path.name}")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": f"{self.path.parent.name}/{self.path.name}", "versions": list(self.versions)}


@dataclass(frozen=True, slots=True)
class PatchStatus:
    """State of an installed package. patch: fits a pristine file."""

    state: State
    target: Path
    version: str
    found_sha256: str
    patch: Patch | None
    advice: str


@dataclass(frozen=True, slots=True)
class OverlayRecord:
    """A shadow copy. path: goes on PYTHONPATH. tree_sha256: covers every file of the installed original."""

    path: Path
    patch: Patch
    version: str
    tree_sha256: str
    num_files: int
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """For the manifest; the folder by name only, because its place has no effect."""
        return {**self.patch.record(self.version), "overlay": self.path.name, "tree_sha256": self.tree_sha256}


def shipped_patches(root: Path | None = None) -> tuple[Patch, ...]:
    """Every patch below ``root`` (default: those of this release), as their manifests declare them."""
    folder = root or next((place for place in PATCH_ROOTS if place.is_dir()), None)
    if folder is None:
        raise ServerError("the patches of this release are missing", hint="Install the harness again")
    return tuple(patch for path in sorted(folder.glob("*/manifest.toml")) for patch in _load_manifest(path))


def _load_manifest(path: Path) -> list[Patch]:
    try:
        table = load_toml(path)
        return [
            Patch(
                path=path.parent / str(entry["file"]),
                package=str(table["package"]),
                versions=tuple(map(str, table["versions"])),
                **{name: str(entry[name]) for name in ("name", "target", "observes", *_HASHES)},
            )
            for entry in table["patch"]
        ]
    except (KeyError, TypeError) as error:
        raise SpecError(
            f"is not a patch manifest ({error!r})", where=str(path), hint="Restore it from the release"
        ) from error


def patched_text(diff: str, target: str, before: str) -> str:
    """``before`` with a diff of the single file ``target`` applied exactly: no fuzz, no offset.

    SpecError names the first line that differs from the diff.
    """
    where = f"the patch of {target}"
    try:
        files = PatchSet(diff)
    except (UnidiffParseError, ValueError) as error:
        raise SpecError(f"is not a unified diff ({' '.join(str(error).split())})", where=where) from error
    if [(file.source_file, file.target_file) for file in files] != [(f"a/{target}", f"b/{target}")]:
        raise SpecError(f"changes {', '.join(file.path for file in files) or 'no file'}", where=where)
    # Only a newline ends a line: Python source may hold form feeds, which splitlines() cuts at.
    lines = io.StringIO(before, newline="\n").readlines()
    for hunk in reversed(files[0]):
        # A hunk without old lines goes in after the line that it names.
        start = hunk.source_start - (hunk.source_length > 0)
        expected = [line.value for line in hunk.source_lines()]
        for number, line in enumerate(expected, start):
            actual = lines[number] if 0 <= number < len(lines) else "the end of the file"
            if actual != line:
                raise SpecError(
                    f"line {number + 1} is {actual.rstrip()!r}, the patch expects {line.rstrip()!r}",
                    where=target,
                    hint="Use the patch made for this version",
                )
        lines[start : start + len(expected)] = [line.value for line in hunk.target_lines()]
    return "".join(lines)


def patch_status(site_packages: Path) -> PatchStatus:
    """What stands in ``site_packages`` where the patch would go. Reads only."""
    candidates = shipped_patches()
    target = site_packages / candidates[0].target
    version = installed_version(site_packages, candidates[0].package)
    return status_of(read(target) if target.is_file() else None, target, version, candidates)


def status_of(content: bytes | None, target: Path, version: str, candidates: Sequence[Patch]) -> PatchStatus:
    """The status of a file with this content (None: it is missing) in a package of this version.

    candidates: the patches for it. target: named in errors.
    """
    if content is None:
        return PatchStatus("absent", target, version, "", None, f"Install {candidates[0].package} there")
    digest = sha256(content)
    fitting = [patch for patch in candidates if patch.sha256_before == digest]
    if fitting:
        # The hash decides; the version only chooses between patches of equal content.
        chosen = next((patch for patch in fitting if version in patch.versions), fitting[0])
        return PatchStatus("pristine", target, version, digest, chosen, "")
    reinstall = f"reinstall: pip install --force-reinstall --no-deps vllm-rbln=={version}"
    if TRACE_OF_PATCH in content:
        return PatchStatus("patched", target, version, digest, None, f"It was patched by hand; {reinstall}")
    known = [release for patch in candidates for release in patch.versions]
    if version in known:
        return PatchStatus("unknown", target, version, digest, None, f"The file was changed; {reinstall}")
    advice = f'Patches exist for vllm-rbln {", ".join(known)}; install one of these, or run with patch = "none"'
    return PatchStatus("unknown", target, version, digest, None, advice)


def require_pristine(status: PatchStatus) -> Patch:
    """The patch of a pristine installation; a SpecError names the state of any other."""
    if status.patch is not None:
        return status.patch
    raise SpecError(
        f"is {status.state}, not pristine: vllm-rbln {status.version or '(no version)'}, "
        f"SHA-256 {status.found_sha256[:16] or 'of no file'}",
        where=str(status.target),
        hint=status.advice,
    )


def unpatched(status: PatchStatus) -> dict[str, Any]:
    """The record of a run without the patch; SpecError when somebody patched the installed file by hand."""
    if status.state == "patched":
        require_pristine(status)
    return {"mode": "none", "version": status.version, "found_sha256": status.found_sha256}


def make_overlay(site_packages: Path, destination: Path) -> OverlayRecord:
    """A folder below ``destination`` that shadows the installed package with a patched copy; made once, then reused.

    The installed package must be pristine. Its tree is hashed each time, so a reinstalled or edited package gets
    another overlay. Raises SpecError for a package that is not pristine, and for an overlay that was edited.
    """
    status = patch_status(site_packages)
    chosen = require_pristine(status)
    package = site_packages / chosen.package
    tree = tree_sha256(package)
    after = chosen.apply(read(status.target), status.target)
    overlay = destination / f"{chosen.package}-{sha256(f'{tree}{chosen.sha256_after}'.encode())[:16]}"
    if not (overlay / OVERLAY_FILE).is_file():
        _write_overlay(overlay, package, chosen, after, tree)
    record = _overlay_record(overlay, chosen, status.version, tree)
    expected = json.loads(read(overlay / OVERLAY_FILE)).get("patched_tree_sha256")
    if tree_sha256(overlay / chosen.package) != expected:
        raise SpecError(
            "the overlay was changed since it was made",
            where=str(overlay),
            hint="Delete it; the next run makes it again",
        )
    return record


def _write_overlay(overlay: Path, package: Path, patch: Patch, after: bytes, tree: str) -> None:
    partial = overlay.with_name(f".{overlay.name}.{os.getpid()}.partial")
    try:
        shutil.copytree(package, partial / patch.package, ignore=shutil.ignore_patterns("__pycache__"))
        target = partial / patch.target
        # The copy keeps the original's mode, which may be read-only.
        target.unlink()
        target.write_bytes(after)
        described = {"patch": patch.to_json(), "tree_sha256": tree}
        described["patched_tree_sha256"] = tree_sha256(partial / patch.package)
        (partial / OVERLAY_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        if not (overlay / OVERLAY_FILE).is_file():
            shutil.rmtree(overlay, ignore_errors=True)
        partial.rename(overlay)
    except OSError as error:
        # Two runs may make the same overlay at once; the second run uses that of the first.
        if not (overlay / OVERLAY_FILE).is_file():
            raise ServerError(f"cannot be written ({error.strerror})", where=str(overlay)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _overlay_record(overlay: Path, patch: Patch, version: str, tree: str) -> OverlayRecord:
    files = [
        path for path in (overlay / patch.package).rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    return OverlayRecord(overlay, patch, version, tree, len(files), sum(path.stat().st_size for path in files))


def tree_sha256(package: Path) -> str:
    """SHA-256 over the relative names and contents of all files below ``package``; Python's caches do not count."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
            digest.update(hashlib.sha256(read(path)).digest())
    return digest.hexdigest()


def installed_version(site_packages: Path, package: str) -> str:
    """The version in the package's dist-info, "" when there is none."""
    folders = sorted(site_packages.glob(f"{package}-*.dist-info"))
    return folders[-1].name.removesuffix(".dist-info").removeprefix(f"{package}-") if folders else ""


def read(path: Path) -> bytes:
    """The file's bytes; a SpecError when it cannot be read."""
    with SpecError.on_os_error("cannot be read", where=path, hint="Check the path"):
        return path.read_bytes()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def require_hash(content: bytes, wanted: str, path: Path, hint: str) -> None:
    """SpecError naming both hashes when ``content`` has another hash than ``wanted``."""
    digest = sha256(content)
    if digest != wanted:
        raise SpecError(f"SHA-256 is {digest[:16]}, not {wanted[:16]}", where=str(path), hint=hint)


_SCHEDULER = "vllm_rbln/v1/core/optimum_scheduler.py"
_MODEL = "vllm_rbln/model_executor/models/optimum/model_base.py"
_PREFIX_CACHE = "vllm_rbln/v1/core/prefix_cache_manager/optimum_prefix_cache_manager.py"
Hook = tuple[str, str, tuple[str, ...]]
"""A function that the observer wraps: file, class, and its name by version."""
HOOKS: tuple[Hook, ...] = (
    (_SCHEDULER, "RBLNOptimumScheduler", ("schedule",)),
    ("vllm_rbln/v1/worker/optimum_model_runner.py", "RBLNOptimumModelRunner", ("execute_model",)),
    (_MODEL, "RBLNOptimumDecoderMixin", ("decode_layout", "preprocess_for_decoder")),
    (_MODEL, "RBLNOptimumDecoderMixin", ("copy_cached_kv_blocks", "_copy_cached_kv_blocks")),
    (_PREFIX_CACHE, "RBLNPrefixKVCacheManager", ("get_dummy_block",)),
    (_PREFIX_CACHE, "RBLNPrefixKVCacheManager", ("free_request",)),
    (_PREFIX_CACHE, "RBLNPrefixKVCacheManager", ("_evict_block",)),
)
RUNTIME_HOOK: Hook = ("optimum/rbln/utils/runtime_utils.py", "RBLNPytorchRuntime", ("forward",))
"""Part of optimum-rbln, so not in a wheel of vllm-rbln."""
OUTPUT_FIELDS = ("cached_length", "dummy_block")
"""Fields that vllm-rbln adds to vLLM's scheduler output and the observer reads."""


def missing_hooks(source: Read, hooks: Sequence[Hook] = HOOKS) -> list[str]:
    """What the observer needs and a release lacks, as clauses; empty when the observer fits."""
    missing: list[str] = []
    for path, owner, names in hooks:
        text = source(path)
        if text is None:
            missing.append(f"{path} is not there")
        elif not _has_function(text, owner, names):
            missing.append(f"{path} has no {owner}.{' or '.join(names)}")
    scheduler = source(_SCHEDULER) or ""
    fields = [name for name in OUTPUT_FIELDS if scheduler and f"{name}:" not in scheduler]
    return missing + [f"{_SCHEDULER} has no {name}" for name in fields]


def _has_function(text: str, owner: str, names: Sequence[str]) -> bool:
    try:
        return bool(function_statements(text, [f"{owner}.{name}" for name in names]))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def verify_installed(site_packages: Path) -> str:
    """Prove the patch that fits an installed package, and check the observer's hooks; returns one line.

    SpecError when no patch fits, or the observer does not.
    """
    status = patch_status(site_packages)
    proof = _proof(require_pristine(status), read(status.target), status.target)
    hooks = _hooks(open_sources(site_packages).read, (*HOOKS, RUNTIME_HOOK), proof, status.target)
    return f"{status.target}: {status.state}; {proof}; {hooks}"


def verify_wheel(wheel: Path) -> str:
    """Prove the patch that fits the package in a wheel, and check the observer's hooks; nothing is installed."""
    source = open_sources(wheel).read
    patch, why = fitting_patch(source)
    if patch is None:
        raise SpecError(why, where=str(wheel))
    proof = _proof(patch, (source(patch.target) or "").encode(), wheel / patch.target)
    return f"{proof}; {_hooks(source, HOOKS, proof, wheel)}"


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
    if not version.startswith(KNOWN_VERSIONS):
        return f"it takes {', '.join(f'{prefix}x' for prefix in KNOWN_VERSIONS)} only"
    return "; ".join(missing_hooks(source))


def _proof(patch: Patch, before: bytes, where: Path) -> str:
    after = patch.apply(before, where)
    lines = ", ".join(f"line {added.line} {added.format!r}" for added in patch.audit(before, after))
    return f"{patch.path.parent.name}/{patch.name} agrees in all three hashes and adds only logging: {lines}"


def _hooks(source: Read, hooks: Sequence[Hook], proof: str, where: Path) -> str:
    """That the observer fits; SpecError with what is missing, below it what was proven of the patch."""
    if missing := missing_hooks(source, hooks):
        hint = "Install optimum-rbln beside vllm-rbln" if missing == [f"{RUNTIME_HOOK[0]} is not there"] else ""
        raise SpecError(
            f"the observer does not fit: {'; '.join(missing)}",
            where=str(where),
            hint=hint or "Install a release that it fits (docs/guides/npu.md), or run with observer = false",
            below=(f"the patch: {proof}",),
        )
    return f"the observer's {len(hooks)} hooks fit"
