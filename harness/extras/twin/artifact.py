"""Artifacts that a twin serves: written by optimum-rbln's classes, registered as compiled ones are."""

from __future__ import annotations

import shutil
from pathlib import Path

from harness.errors import ServerError, SpecError
from harness.extras.twin.environment import INSIDE, TwinEnvironment, twin_variables
from harness.stacks.rbln.launch.compile import RECORD_FILE, CompileSpec, Exporter, compile_artifact

TWIN_MODEL = "twin-qwen3-4b"
TWIN_WRITER = INSIDE / "write_artifact.py"
"""Optimum-rbln's classes write the artifact; nothing is compiled."""


def twin_exporter(twin: TwinEnvironment) -> Exporter:
    """The command that writes an artifact in the twin's environment."""
    return Exporter(twin.python, TWIN_WRITER, dict(twin.stamp.get("versions", {})), twin_variables(twin), free_gib=0.1)


def twin_spec(**parameters: object) -> CompileSpec:
    """The specification with these keys of CompileSpec; SpecError names every key that is wrong."""
    return CompileSpec.from_table({"model": TWIN_MODEL, **parameters}, where="artifact")


def cached_artifact(twin: TwinEnvironment, spec: CompileSpec) -> Path:
    """The folder of the artifact in the twin's own registry, written when missing."""
    return compile_artifact(spec, twin.folder / "artifacts", twin_exporter(twin)).folder


def copy_artifact(twin: TwinEnvironment, spec: CompileSpec, folder: Path) -> Path:
    """Copy the artifact to ``folder``, which must not exist, or be empty or an earlier artifact."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD_FILE).is_file():
        raise SpecError("holds other files", where=str(folder), hint="Choose another folder")
    source = cached_artifact(twin, spec)
    with ServerError.on_os_error("cannot be written", where=folder):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
    return folder
