"""Where the twin lives and what its processes are told: its Python, its environment variables.

Nothing is installed or started here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import ServerError
from harness.stack.rbln.twin.stacks import is_stable, known_stacks, release_order

INSIDE = Path(__file__).resolve().parent / "inside"
"""On the server's PYTHONPATH: the stand-in runtime and what makes torchvision importable."""
FOLDER_PREFIX = ".venv-twin"
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

    @property
    def version(self) -> str:
        """Of its vllm-rbln."""
        return str(self.stamp.get("versions", {}).get("vllm-rbln", ""))


def twin_root() -> Path:
    """Where twins are kept: the checkout that this package lies in, or the current folder when it is installed."""
    checkout = Path(__file__).resolve().parents[4]
    return checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()


def default_folder(version: str) -> Path:
    """``.venv-twin-VERSION``; before several could be had it was ``.venv-twin``, which is still found."""
    return twin_root() / f"{FOLDER_PREFIX}-{version}"


def installed_twins() -> tuple[TwinEnvironment, ...]:
    """The complete twins of this checkout, oldest vllm-rbln first, one of each version."""
    stamped = [
        (path.parent, _stamp_of(path.parent)) for path in sorted(twin_root().glob(f"{FOLDER_PREFIX}*/{STAMP_FILE}"))
    ]
    twins = {twin.version: twin for twin in (TwinEnvironment(*one) for one in stamped) if twin.stamp.get("complete")}
    return tuple(twins[version] for version in sorted(twins, key=release_order))


def find_twin(which: Path | str | None = None) -> TwinEnvironment:
    """An installed twin; ServerError says how to get one.

    which: its folder, or a version of vllm-rbln; default: the newest stable one that is installed, else the newest.
    """
    if not which:
        installed = installed_twins()
        chosen = [twin for twin in installed if is_stable(twin.version)] or installed
        if not chosen:
            raise ServerError("no installed twin", where=str(twin_root()), hint="Run harness twin install")
        return chosen[-1]
    if isinstance(which, str) and any(stack.version == which for stack in known_stacks()):
        found = next((twin for twin in installed_twins() if twin.version == which), None)
        if found is None:
            raise ServerError(
                f"no installed twin of {which}",
                where=str(twin_root()),
                hint=f"Run harness twin install --stack {which}",
            )
        return found
    folder = Path(which).absolute()
    stamp = _stamp_of(folder)
    if not stamp.get("complete"):
        raise ServerError("no installed twin", where=str(folder), hint="Run harness twin install")
    return TwinEnvironment(folder, stamp)


def _stamp_of(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / STAMP_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def twin_variables(twin: TwinEnvironment, settings: Path | None = None) -> dict[str, str]:
    """Environment variables of every process of a twin. settings: the stand-in device's JSON file."""
    variables = {
        "PYTHONPATH": str(INSIDE),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # The sampler's graph is run as it is: no C++ compiler needed, and the server starts sooner.
        "TORCHDYNAMO_DISABLE": "1",
        # vLLM asks a process of its own about a model class, 9 s of CPU, and keeps the answer there under a name that
        # all its releases share: in one folder they would overwrite each other's.
        "VLLM_CACHE_ROOT": str(twin.folder / "cache"),
        "VLLM_LOGGING_COLOR": "0",
        "NO_COLOR": "1",
    }
    if settings is not None:
        variables[SETTINGS_VARIABLE] = str(settings)
    return variables
