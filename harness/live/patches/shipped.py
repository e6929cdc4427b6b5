"""The shipped patches, what is installed, and the overlay: a patched shadow copy for the server's PYTHONPATH.

Installed files are only read here. Every hash must be one a manifest names, and every patch is audited each time it is
used. Next: ``harness.live.patches.install`` edits in place for those who ask; backends put the overlay on the path.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from harness.errors import ServerError, SpecError
from harness.live.patches.audit import AddedLine, audit
from harness.live.patches.diff import parse_diff
from harness.spec import load_toml

_PACKAGE = Path(__file__).resolve().parents[2]
PATCH_ROOTS = (_PACKAGE.parent / "patches", _PACKAGE / "_data" / "patches")
"""In the checkout, and inside an installed wheel."""
DEFAULT_PATCH = "bucket_log"
OVERLAY_FILE = "overlay.json"
BACKUP_SUFFIX = ".before-rbln-harness"
PARTIAL_SUFFIX = ".rbln-harness-partial"
TRACE_OF_PATCH = b"[BUCKET] request_nums="

State = Literal["pristine", "patched", "half-applied", "unknown", "absent"]


@dataclass(frozen=True, slots=True)
class Patch:
    """One patch for one content of one file. ``target``: below site-packages. Hashes: SHA-256, hex."""

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
        """What every run's manifest records."""
        return {
            "sha256_before": self.sha256_before,
            "sha256_patch": self.sha256_patch,
            "sha256_after": self.sha256_after,
        }

    def text(self) -> str:
        """The diff, as released; SpecError when the file is not the one its manifest names."""
        content = read(self.path)
        require_hash(content, self.sha256_patch, self.path, "Restore the patch from the release")
        return content.decode()

    def apply(self, before: bytes, where: Path) -> bytes:
        """``before`` patched: hashes checked, change audited. where: named in refusals."""
        require_hash(before, self.sha256_before, where, _install_hint(self))
        after = parse_diff(self.text()).apply(before.decode()).encode()
        require_hash(after, self.sha256_after, self.path, "Restore manifest and patch from the release")
        self.audit(before, after)
        return after

    def revert(self, after: bytes, where: Path) -> bytes:
        """What ``after`` was before the patch."""
        require_hash(after, self.sha256_after, where, _install_hint(self))
        before = parse_diff(self.text()).revert(after.decode()).encode()
        require_hash(before, self.sha256_before, self.path, "Restore manifest and patch from the release")
        return before

    def audit(self, before: bytes, after: bytes) -> tuple[AddedLine, ...]:
        """The logging calls it adds; PatchRefused when it does anything else."""
        return audit(before.decode(), after.decode(), where=f"{self.path.parent.name}/{self.path.name}")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": f"{self.path.parent.name}/{self.path.name}", "versions": list(self.versions)}


@dataclass(frozen=True, slots=True)
class PatchStatus:
    """What stands in an installed package. ``patch``: the one that fits or is applied; None when none does."""

    state: State
    target: Path
    version: str
    found_sha256: str
    patch: Patch | None
    leftovers: tuple[Path, ...]
    advice: str


@dataclass(frozen=True, slots=True)
class OverlayRecord:
    """A shadow copy. ``path`` goes on PYTHONPATH; ``tree_sha256`` covers every file of the installed original."""

    path: Path
    patch: Patch
    version: str
    tree_sha256: str
    num_files: int
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """For the manifest; the folder by name, since where it lies decides nothing."""
        return {
            "mode": "overlay",
            "name": self.patch.name,
            "target": self.patch.target,
            "version": self.version,
            **self.patch.hashes,
            "overlay": self.path.name,
            "tree_sha256": self.tree_sha256,
        }


def shipped_patches(root: Path | None = None) -> tuple[Patch, ...]:
    """Every patch below ``root`` (default: those of this release), as their manifests declare them."""
    folder = root or next((one for one in PATCH_ROOTS if one.is_dir()), None)
    if folder is None:
        raise ServerError("the patches of this release are missing", hint="Install the harness anew")
    return tuple(patch for path in sorted(folder.glob("*/manifest.toml")) for patch in _load_manifest(path))


def _load_manifest(path: Path) -> list[Patch]:
    try:
        table = load_toml(path)
        return [
            Patch(
                name=str(entry["name"]),
                path=path.parent / str(entry["file"]),
                package=str(table["package"]),
                versions=tuple(map(str, table["versions"])),
                target=str(entry["target"]),
                observes=str(entry["observes"]),
                sha256_before=str(entry["sha256_before"]),
                sha256_patch=str(entry["sha256_patch"]),
                sha256_after=str(entry["sha256_after"]),
            )
            for entry in table["patch"]
        ]
    except (KeyError, TypeError) as error:
        raise SpecError(
            f"is not a patch manifest ({error!r})", where=str(path), hint="Restore it from the release"
        ) from error


def patch_status(
    site_packages: Path, *, name: str = DEFAULT_PATCH, patches: Sequence[Patch] | None = None
) -> PatchStatus:
    """What stands in ``site_packages`` where the patch ``name`` would go. Reads only, raises for nothing it finds."""
    candidates = [patch for patch in (shipped_patches() if patches is None else patches) if patch.name == name]
    if not candidates:
        raise SpecError(f"there is no patch {name!r}", where="patch", hint="See `harness patch status`")
    target = site_packages / candidates[0].target
    version = installed_version(site_packages, candidates[0].package)
    if not target.is_file():
        return PatchStatus("absent", target, version, "", None, (), f"Install {candidates[0].package} there")
    content = read(target)
    found = sha256(content)
    leftovers = tuple(path for path in (backup_path(target), partial_path(target)) if path.exists())
    before = _with_version([patch for patch in candidates if patch.sha256_before == found], version)
    after = _with_version([patch for patch in candidates if patch.sha256_after == found], version)
    if after is not None:
        return PatchStatus("patched", target, version, found, after, leftovers, "`harness patch revert` restores it")
    if before is not None and leftovers:
        advice = f"An edit was interrupted and left {leftovers[0].name}; `harness patch revert` clears it"
        return PatchStatus("half-applied", target, version, found, before, leftovers, advice)
    if before is not None:
        return PatchStatus("pristine", target, version, found, before, (), "")
    if leftovers or TRACE_OF_PATCH in content:
        advice = f"It holds part of a patch; reinstall: pip install --force-reinstall --no-deps vllm-rbln=={version}"
        return PatchStatus("half-applied", target, version, found, None, leftovers, advice)
    return PatchStatus("unknown", target, version, found, None, (), _known_versions_advice(candidates, version))


def require_state(status: PatchStatus, wanted: State) -> Patch:
    """The patch of an installation that is ``wanted``; any other state is a SpecError with what was found."""
    if status.state == wanted and status.patch is not None:
        return status.patch
    advice = status.advice
    if status.state == "pristine":
        advice = '`harness patch apply --in-place` patches it; patch = "overlay" needs no edit'
    raise SpecError(
        f"is {status.state}, not {wanted}: vllm-rbln {status.version or '(no version)'}, "
        f"SHA-256 {status.found_sha256[:16] or 'of no file'}",
        where=str(status.target),
        hint=advice or None,
    )


def make_overlay(site_packages: Path, destination: Path, patch: str = DEFAULT_PATCH) -> OverlayRecord:
    """A folder below ``destination`` that shadows the installed package with a patched copy; made once, then reused.

    The installed package must be pristine. Its whole tree is hashed each time, so a reinstalled or edited package gets
    an overlay of its own, and an overlay that somebody edited is refused. Raises SpecError with what was found.
    """
    status = patch_status(site_packages, name=patch)
    chosen = require_state(status, "pristine")
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
            "the overlay was changed since it was made", where=str(overlay), hint="Delete it; it is made again"
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
        # Two runs may make the same overlay at once; whoever is second finds it there.
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
    found = sorted(site_packages.glob(f"{package}-*.dist-info"))
    return found[-1].name.removesuffix(".dist-info").removeprefix(f"{package}-") if found else ""


def backup_path(target: Path) -> Path:
    return target.with_name(target.name + BACKUP_SUFFIX)


def partial_path(target: Path) -> Path:
    return target.with_name(target.name + PARTIAL_SUFFIX)


def read(path: Path) -> bytes:
    """The file's bytes; a SpecError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot be read ({error.strerror})", where=str(path), hint="Check the path") from error


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def require_hash(content: bytes, wanted: str, path: Path, hint: str) -> None:
    """SpecError naming both hashes when ``content`` is not the one that is wanted."""
    found = sha256(content)
    if found != wanted:
        raise SpecError(f"SHA-256 is {found[:16]}, not {wanted[:16]}", where=str(path), hint=hint)


def _with_version(patches: Sequence[Patch], version: str) -> Patch | None:
    """The hash decides; the version only chooses between patches of equal content."""
    return next((patch for patch in patches if version in patch.versions), patches[0] if patches else None)


def _install_hint(patch: Patch) -> str:
    return f"It was made for {patch.package} {', '.join(patch.versions)}; install one of these"


def _known_versions_advice(patches: Sequence[Patch], version: str) -> str:
    known = [one for patch in patches for one in patch.versions]
    if version in known:
        return f"The file was changed; reinstall: pip install --force-reinstall --no-deps vllm-rbln=={version}"
    return f'Patches exist for vllm-rbln {", ".join(known)}; install one of these, or run with patch = "none"'
