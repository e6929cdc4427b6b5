"""A shadow copy of the installed vllm_rbln with one debug line more, to be put before it on PYTHONPATH.

The installed files stay untouched; a target, patch or result whose hash is not the recorded one is refused.
Next: ``harness.live.twin_backend`` puts the overlay on the server's path.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import ServerError, SpecError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PACKAGE = Path(__file__).resolve().parents[1]
PATCH_ROOTS = (_PACKAGE.parent / "patches", _PACKAGE / "_data" / "patches")
"""In the checkout, and inside an installed wheel."""
HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


def patch_folder(name: str = "vllm_rbln-0.11.1") -> Path:
    """Where the patches of one package version lie, with their manifest."""
    for root in PATCH_ROOTS:
        if (root / name / "manifest.toml").is_file():
            return root / name
    raise ServerError("no patches for it are shipped", where=name, hint="Install the harness anew")


def make_overlay(site_packages: Path, patches: Path, root: Path) -> Path:
    """A folder below ``root`` holding a patched copy of the package that ``patches`` is for; made once.

    Raises SpecError when the installed file, or the patch, is not the one the manifest names.
    """
    manifest = tomllib.loads((patches / "manifest.toml").read_text(encoding="utf-8"))
    package = str(manifest["package"])
    texts = {str(entry["target"]): _patched(site_packages, patches, entry) for entry in manifest["patch"]}
    name = hashlib.sha256("".join(str(entry["sha256_after"]) for entry in manifest["patch"]).encode()).hexdigest()[:12]
    overlay = root / f"{package}-{name}"
    if (overlay / package).is_dir():
        _check_unchanged(overlay, manifest["patch"])
        return overlay
    partial = root / f".{overlay.name}.{os.getpid()}.partial"
    try:
        shutil.copytree(site_packages / package, partial / package, ignore=shutil.ignore_patterns("__pycache__"))
        for target, text in texts.items():
            (partial / target).write_bytes(text)
        partial.rename(overlay)
    except OSError as error:
        raise ServerError(f"cannot be written ({error.strerror})", where=str(overlay)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return overlay


def apply_hunks(text: str, patch: str) -> str:
    """``text`` after a unified diff whose every context and removed line must stand exactly where it says.

    Raises ValueError naming the first line that does not.
    """
    lines = text.splitlines(keepends=True)
    result: list[str] = []
    done = 0
    for line in patch.splitlines(keepends=True):
        if match := HUNK.match(line):
            start = int(match[1]) - 1
            result += lines[done:start]
            done = start
        elif line.startswith(("---", "+++")):
            continue
        elif line.startswith("+"):
            result.append(line[1:])
        else:
            if done >= len(lines) or lines[done] != line[1:]:
                raise ValueError(f"line {done + 1} is not {line[1:].rstrip()!r}")
            if line.startswith(" "):
                result.append(lines[done])
            done += 1
    return "".join([*result, *lines[done:]])


def _patched(site_packages: Path, patches: Path, entry: Mapping[str, Any]) -> bytes:
    """The target's new content, its hash checked before, between and after."""
    target, patch = site_packages / str(entry["target"]), patches / str(entry["file"])
    before, change = _read(target), _read(patch)
    _require(before, str(entry["sha256_before"]), target, "Install the version this patch was made for")
    _require(change, str(entry["sha256_patch"]), patch, "Restore the patch from the release")
    try:
        after = apply_hunks(before.decode(), change.decode()).encode()
    except ValueError as error:
        raise SpecError(f"does not fit: {error}", where=str(patch)) from error
    _require(after, str(entry["sha256_after"]), patch, "Restore manifest and patch from the release")
    return after


def _check_unchanged(overlay: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    for entry in entries:
        target = overlay / str(entry["target"])
        _require(_read(target), str(entry["sha256_after"]), target, "Delete the overlay folder; it is made again")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot be read ({error.strerror})", where=str(path)) from error


def _require(content: bytes, wanted: str, path: Path, hint: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != wanted:
        raise SpecError(f"SHA-256 is {found}, not {wanted}", where=str(path), hint=hint)
