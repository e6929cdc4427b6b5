"""Twins side by side share what their releases have in common: files of one are linked into the next, caches and all.

No file is ever changed in place: installers, the harness's patches and Python replace files. Nothing is downloaded.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
from pathlib import Path

from harness.stack.rbln.twin.environment import TwinEnvironment, installed_twins
from harness.stack.rbln.twin.stacks import TwinStack, known_stacks

STAND_IN = "rebel_compiler"
"""Its version is that of the release."""


def twin_to_share(python: str | None) -> TwinEnvironment | None:
    """An installed twin of today's locks, made with the interpreter that is asked for (None: any)."""
    stacks = {stack.version: stack for stack in known_stacks()}
    for twin in reversed(installed_twins()):
        stack = stacks.get(twin.version)
        is_of_today = stack is not None and twin.stamp.get("locks_sha256") == stack.locks_sha256
        if is_of_today and python in (None, twin.stamp["python"]):
            return twin
    return None


def link_shared(donor: TwinEnvironment, stack: TwinStack, where: Path) -> None:
    """Link every package of ``donor`` that is not its release's own into the fresh environment ``where``.

    stack: the donor's. Packages of ``stack.lock`` and the stand-in for the device runtime are left out.
    """
    own = _own_files(donor, stack)
    for folder, folders, names in os.walk(donor.site_packages):
        folders[:] = [name for name in folders if not name.startswith(STAND_IN)]
        here = Path(folder)
        for path in (here / name for name in names):
            if _source_of(path) not in own:
                _link(path, where / path.relative_to(donor.folder))
    for script in (donor.folder / "bin").iterdir():
        if script.is_file() and not script.is_symlink() and script not in own:
            _link_script(script, donor.folder, where)


def _own_files(donor: TwinEnvironment, stack: TwinStack) -> set[Path]:
    """Files of the packages that the stack's lock names, as each package's RECORD lists them."""
    names = set(re.findall(r"^([\w.-]+)==", stack.lock.read_text(encoding="utf-8"), re.MULTILINE))
    own: set[Path] = set()
    for described in donor.site_packages.glob("*.dist-info"):
        if described.name.split("-")[0].replace("_", "-").lower() not in names:
            continue
        own |= set(described.iterdir())
        for row in csv.reader((described / "RECORD").read_text(encoding="utf-8").splitlines()):
            own.add(Path(os.path.normpath(donor.site_packages / row[0])))
    return own


def _source_of(path: Path) -> Path:
    """The module that a compiled cache is of; any other file is its own source."""
    if path.parent.name != "__pycache__":
        return path
    return path.parent.parent / f"{path.name.split('.')[0]}.py"


def _link_script(script: Path, donor: Path, where: Path) -> None:
    """A script names the interpreter of its own environment in its first line."""
    first, newline, rest = script.read_bytes().partition(b"\n")
    target = where / "bin" / script.name
    if first.startswith(b"#!") and not target.exists():
        target.write_bytes(first.replace(os.fsencode(donor), os.fsencode(where)) + newline + rest)
        shutil.copymode(script, target)
    else:
        _link(script, target)


def _link(source: Path, target: Path) -> None:
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        # Another disk, or one without links.
        shutil.copy2(source, target)
