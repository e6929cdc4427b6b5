"""Writes a lock again with the hashes of those files alone that Linux and the supported Pythons can install.

A lock made with ``uv pip compile --generate-hashes`` names every file of a release, for every system: four fifths of
it never apply. ``python tools/short_lock.py requirements.lock`` asks the index once.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from harness.model.spec import load_toml

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
GLIBC_MINORS = range(5, 60)
"""manylinux1 to well beyond today's systems."""
REQUIREMENT = re.compile(r"^([\w.-]+)==([^\s;]+)(?: ; ([^\\]+?))? \\$", re.MULTILINE)


def platforms(machine: str) -> list[str]:
    """Every platform tag of a Linux with glibc on ``machine``, the newest first."""
    numbered = [f"manylinux_2_{minor}_{machine}" for minor in reversed(GLIBC_MINORS)]
    return [*numbered, *(f"{old}_{machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux"))]


def tags_of(python: str, machine: str) -> set[Tag]:
    """The tags of wheels that ``python`` (3.11) installs on ``machine``."""
    version = tuple(map(int, python.split(".")))
    where = platforms(machine)
    interpreter = f"cp{python.replace('.', '')}"
    return {*cpython_tags(version, platforms=where), *compatible_tags(version, interpreter, where)}


def hashes_needed(package: Mapping[str, Any], marker: str) -> list[str]:
    """SHA-256 of each file of a ``[[packages]]`` entry that may be installed; the source where no wheel fits."""
    needed: set[str] = set()
    for python in PYTHONS:
        for machine in MACHINES:
            environment = {
                "python_version": python,
                "python_full_version": f"{python}.0",
                "platform_machine": machine,
                "sys_platform": "linux",
                "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
            }
            if marker and not Marker(marker).evaluate(environment):
                continue
            tags = tags_of(python, machine)
            names = {wheel["url"].rsplit("/", 1)[1]: wheel for wheel in package.get("wheels", [])}
            fits = [wheel for name, wheel in names.items() if parse_wheel_filename(name)[3] & tags]
            needed |= {file["hashes"]["sha256"] for file in fits or [package["sdist"]]}
    return sorted(needed)


def shortened(lock: str, pylock: Mapping[str, Any]) -> Iterator[str]:
    """Lines of ``lock`` without the hashes that nothing needs, and without packages of other systems."""
    packages = {(package["name"], package["version"]): package for package in pylock["packages"]}
    for name, version, marker in REQUIREMENT.findall(lock):
        hashes = hashes_needed(packages[name, version], marker)
        if hashes:
            condition = f" ; {marker}" if marker else ""
            yield f"{name}=={version}{condition} \\\n" + " \\\n".join(
                f"    --hash=sha256:{sha256}" for sha256 in hashes
            )


def main(path: Path) -> None:
    """Ask the index for the files of every pinned version, and write the lock again."""
    lock = path.read_text(encoding="utf-8")
    pins = "\n".join(
        f"{name}=={version}{f' ; {marker}' if marker else ''}" for name, version, marker in REQUIREMENT.findall(lock)
    )
    command = ["pip", "compile", "-", "--no-deps", "--universal", "--python-version", "3.10", "--format", "pylock.toml"]
    uv = Path(sys.executable).with_name("uv")
    resolved = path.with_name("pylock.toml")
    try:
        subprocess.run(
            [uv, *command, "--quiet", "-o", resolved], input=pins, text=True, check=True, stdout=subprocess.DEVNULL
        )
        written = "\n".join(shortened(lock, load_toml(resolved))) + "\n"
    finally:
        resolved.unlink(missing_ok=True)
    path.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
