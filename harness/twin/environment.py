"""Where the twin lives and what its processes are told: its Python, its environment variables.

Nothing is installed or started here. Next: ``install`` makes the environment; ``harness.runner.backends.twin`` and the
tests run programs in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import ServerError

INSIDE = Path(__file__).resolve().parent / "inside"
"""On the server's PYTHONPATH: the stand-in runtime and what makes torchvision importable."""
DEFAULT_FOLDER = ".venv-twin"
STAMP_FILE = "twin-install.json"
SETTINGS_VARIABLE = "RBLN_TWIN_SETTINGS"


@dataclass(frozen=True)
class TwinEnvironment:
    """An installed twin. ``stamp`` is what its installer recorded: versions, sizes, where torch came from."""

    folder: Path
    stamp: Mapping[str, Any]

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def vllm(self) -> Path:
        """The ``vllm`` command."""
        return self.folder / "bin" / "vllm"

    @property
    def site_packages(self) -> Path:
        found = sorted((self.folder / "lib").glob("python3.*/site-packages"))
        if not found:
            raise ServerError("has no site-packages", where=str(self.folder), hint="Run harness twin install")
        return found[0]

    def other_stack(self, version: str) -> Path:
        """Where another vllm-rbln version lies, if it was installed; to be put first on PYTHONPATH."""
        return self.folder / "stacks" / version


def default_folder() -> Path:
    """``.venv-twin`` in the checkout that this package lies in, or below the current folder when it is installed."""
    checkout = Path(__file__).resolve().parents[2]
    return (checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()) / DEFAULT_FOLDER


def find_twin(folder: Path | None = None) -> TwinEnvironment:
    """The twin installed in ``folder`` (default: `default_folder`); ServerError says how to get one."""
    where = default_folder() if folder is None else folder
    try:
        stamp = json.loads((where / STAMP_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        stamp = {}
    if not stamp.get("complete"):
        raise ServerError("no installed twin", where=str(where), hint="Run harness twin install")
    return TwinEnvironment(where, stamp)


def twin_variables(settings: Path | None = None, *, overlay: Path | None = None) -> dict[str, str]:
    """Environment variables of every twin process.

    settings: the stand-in device's JSON file. overlay: a folder that shadows vllm_rbln, see ``overlay``.
    """
    paths = [str(folder) for folder in (overlay, INSIDE) if folder is not None]
    variables = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # The sampler's graph is run as it is: no C++ compiler needed, and the server starts sooner.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_LOGGING_COLOR": "0",
        "NO_COLOR": "1",
    }
    if settings is not None:
        variables[SETTINGS_VARIABLE] = str(settings)
    return variables
