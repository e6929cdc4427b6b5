"""A lock keeps the hashes of files that Linux and a supported Python install, and no others."""

from __future__ import annotations

from typing import Any

from tools import short_lock

INDEX = "https://index.example/"


def package(name: str, version: str, files: dict[str, str]) -> dict[str, Any]:
    """A ``[[packages]]`` entry: ``files`` maps a file's name to its hash; the source is the one ending in .tar.gz."""
    entries = [{"url": INDEX + file, "hashes": {"sha256": digest}} for file, digest in files.items()]
    return {
        "name": name,
        "version": version,
        "wheels": [entry for entry in entries if entry["url"].endswith(".whl")],
        "sdist": next(entry for entry in entries if entry["url"].endswith(".tar.gz")),
    }


FAST = package(
    "fast",
    "1.0",
    {
        "fast-1.0-cp311-cp311-manylinux_2_28_x86_64.whl": "linux",
        "fast-1.0-cp311-cp311-win_amd64.whl": "windows",
        "fast-1.0-cp311-cp311-musllinux_1_2_x86_64.whl": "musl",
        "fast-1.0-cp39-cp39-manylinux_2_28_x86_64.whl": "old",
        "fast-1.0-py3-none-any.whl": "any",
        "fast-1.0.tar.gz": "source",
    },
)
SOURCE_ONLY = package("plain", "2.0", {"plain-2.0.tar.gz": "only source"})
WINDOWS = package("only-there", "3.0", {"only_there-3.0-py3-none-any.whl": "never", "only_there-3.0.tar.gz": "source"})
LOCK = """fast==1.0 \\
    --hash=sha256:linux
only-there==3.0 ; sys_platform == 'win32' \\
    --hash=sha256:never
plain==2.0 ; python_full_version < '3.11' \\
    --hash=sha256:source
"""


def test_files_of_other_systems_and_interpreters_are_left_out() -> None:
    assert short_lock.hashes_needed(FAST, "") == ["any", "linux"]


def test_the_source_stands_in_where_no_wheel_fits() -> None:
    assert short_lock.hashes_needed(SOURCE_ONLY, "") == ["only source"]


def test_a_package_of_another_system_leaves_the_lock_and_markers_stay() -> None:
    lines = list(short_lock.shortened(LOCK, {"packages": [FAST, SOURCE_ONLY, WINDOWS]}))
    assert [line.split(" \\\n")[0] for line in lines] == ["fast==1.0", "plain==2.0 ; python_full_version < '3.11'"]
    assert lines[1].endswith("--hash=sha256:only source")
