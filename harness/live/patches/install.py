"""Patches in place, for those who cannot use an overlay: written atomically, backed up, reverted to the very bytes.

At every instant the installed file is either the whole original or the whole patched one; one that is neither is never
touched. Next: ``harness patch apply --in-place`` and ``revert``; a run only checks, it never edits.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

from harness.errors import ServerError
from harness.live.patches.shipped import (
    DEFAULT_PATCH,
    Patch,
    backup_path,
    partial_path,
    patch_status,
    read,
    require_state,
    sha256,
)

_OVERLAY_HINT = "Use the overlay, which touches no installed file"


def apply_in_place(site_packages: Path, name: str = DEFAULT_PATCH) -> Patch:
    """Patch the installed file itself; it must be pristine.

    The backup beside it is complete before the file changes. Raises SpecError for any other state, ServerError when
    the folder cannot be written.
    """
    status = patch_status(site_packages, name=name)
    patch = require_state(status, "pristine")
    target = status.target
    after = patch.apply(read(target), target)
    with _writing(target):
        try:
            # Exclusive: two people who apply at once must not overwrite each other's backup.
            backup_path(target).touch(exist_ok=False)
        except FileExistsError:
            raise ServerError(
                "somebody else is patching it now", where=str(target), hint="See `harness patch status`"
            ) from None
        shutil.copy2(target, backup_path(target))
        _sync(backup_path(target))
        _replace(target, after)
    require_state(patch_status(site_packages, name=name), "patched")
    return patch


def revert_in_place(site_packages: Path, name: str = DEFAULT_PATCH) -> str:
    """Restore the installed file, or clear what an interrupted edit left; returns what was done, as a clause.

    Byte-identical, with the original's mode and times when the backup is there. Raises SpecError when the file is
    neither the original nor the patched one.
    """
    status = patch_status(site_packages, name=name)
    target = status.target
    backup = backup_path(target)
    if status.state == "pristine":
        return "it is the original already"
    if status.state == "half-applied" and status.patch is not None:
        with _writing(target):
            _clear_leftovers(target)
        return "an interrupted edit was cleared; the file was and is the original"
    patch = require_state(status, "patched")
    before = patch.revert(read(target), target)
    with _writing(target):
        if backup.is_file() and sha256(read(backup)) == patch.sha256_before:
            backup.replace(target)
            _sync(target.parent)
        else:
            _replace(target, before)
        _clear_leftovers(target)
        _forget_bytecode(target)
    require_state(patch_status(site_packages, name=name), "pristine")
    return "the original is restored"


def in_place_record(site_packages: Path, name: str = DEFAULT_PATCH) -> dict[str, Any]:
    """For a run's manifest; raises SpecError unless the patch is applied in place."""
    status = patch_status(site_packages, name=name)
    patch = require_state(status, "patched")
    return {
        "mode": "in-place",
        "name": patch.name,
        "target": patch.target,
        "version": status.version,
        **patch.hashes,
    }


def _replace(target: Path, content: bytes) -> None:
    """``target`` with new content, all or nothing, mode kept.

    A new file, not new bytes in the old one: package managers hard-link installed files to a cache that others share.
    """
    partial = partial_path(target)
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    shutil.copymode(target, partial)
    partial.replace(target)
    _sync(target.parent)
    _forget_bytecode(target)


def _forget_bytecode(target: Path) -> None:
    """Images compiled with unchecked hashes would go on running the old bytecode."""
    for path in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
        path.unlink(missing_ok=True)


def _clear_leftovers(target: Path) -> None:
    for path in (partial_path(target), backup_path(target)):
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _writing(target: Path) -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:
        raise ServerError(f"cannot be written ({error.strerror})", where=str(target), hint=_OVERLAY_HINT) from error
