"""Releases that the twin can be (a lock file each), installed twins, and the environment of their processes.

Nothing is installed or started here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import ServerError, SpecError
from harness.stacks.rbln.rules.kv_rules import release_of

FOLDER = Path(__file__).resolve().parent
COMMON_LOCK = FOLDER / "requirements-twin.lock"
"""Packages that all stacks share."""
_STACK_LOCK = "requirements-stack-{}.lock"


@dataclass(frozen=True, slots=True)
class TwinStack:
    """One release of vllm-rbln, with the vLLM and optimum-rbln that it pins."""

    version: str
    lock: Path

    @property
    def vllm(self) -> str:
        """The version of vLLM that its lock holds."""
        pin = re.search(r"^vllm==(\S+)", self.lock.read_text(encoding="utf-8"), re.MULTILINE)
        return pin[1] if pin else "?"

    @property
    def locks_sha256(self) -> str:
        return hashlib.sha256(COMMON_LOCK.read_bytes() + self.lock.read_bytes()).hexdigest()


def known_stacks() -> tuple[TwinStack, ...]:
    """Every stack with a lock file here, oldest first."""
    locks = {path.stem.removeprefix("requirements-stack-"): path for path in FOLDER.glob(_STACK_LOCK.format("*"))}
    return tuple(TwinStack(version, locks[version]) for version in sorted(locks, key=release_order))


def newest_stable() -> str:
    """The default version."""
    return [stack.version for stack in known_stacks() if is_stable(stack.version)][-1]


def stack_named(version: str = "") -> TwinStack:
    """The stack of a version ("": the newest stable release); SpecError lists the known versions."""
    wanted = version or newest_stable()
    named = next((stack for stack in known_stacks() if stack.version == wanted), None)
    if named is None:
        known = ", ".join(stack.version for stack in known_stacks())
        raise SpecError("is not a version with a lock file in this release", where=wanted, hint=f"Choose {known}")
    return named


def is_stable(version: str) -> bool:
    """Whether a version is a stable release: 0.12.0 and 0.11.2.post1 are, 0.12.1a8 is not."""
    return re.fullmatch(r"[\d.]+(\.post\d+)?", version) is not None


def release_order(version: str) -> tuple[tuple[int, ...], bool, tuple[int, ...]]:
    """A sort key: by release number, previews of a release before it."""
    release = release_of(version)
    numbers = tuple(map(int, re.findall(r"\d+", version)))
    return release, is_stable(version), numbers[len(release) :]


INSIDE = Path(__file__).resolve().parent / "inside"
"""On the server's PYTHONPATH: the stand-in runtime, and a patch that makes torchvision importable."""
FOLDER_PREFIX = ".venv-twin"
STAMP_FILE = "twin-install.json"
SETTINGS_VARIABLE = "RBLN_TWIN_SETTINGS"


@dataclass(frozen=True)
class TwinEnvironment:
    """An installed twin. stamp: the installer's record of versions, sizes and the origin of torch."""

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
        folders = sorted((self.folder / "lib").glob("python3.*/site-packages"))
        if not folders:
            raise ServerError("has no site-packages", where=str(self.folder), hint="Run harness server twin install")
        return folders[0]

    @property
    def version(self) -> str:
        """The version of its vllm-rbln."""
        return str(self.stamp.get("versions", {}).get("vllm-rbln", ""))


def twin_root() -> Path:
    """Folder of the twins: the checkout of this package, or the current folder for an installed package."""
    checkout = Path(__file__).resolve().parents[3]
    return checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()


def default_folder(version: str) -> Path:
    """``.venv-twin-VERSION``."""
    return twin_root() / f"{FOLDER_PREFIX}-{version}"


def installed_twins() -> tuple[TwinEnvironment, ...]:
    """The complete twins of this checkout, oldest vllm-rbln first, the last folder of each version."""
    stamped = [
        (path.parent, read_stamp(path.parent)) for path in sorted(twin_root().glob(f"{FOLDER_PREFIX}*/{STAMP_FILE}"))
    ]
    twins = {twin.version: twin for twin in (TwinEnvironment(*pair) for pair in stamped) if twin.stamp.get("complete")}
    return tuple(twins[version] for version in sorted(twins, key=release_order))


def find_twin(which: Path | str | None = None) -> TwinEnvironment:
    """An installed twin; ServerError says how to get one.

    which: its folder, or a version of vllm-rbln; default: the newest stable version installed, else the newest.
    """
    if which and (isinstance(which, Path) or which not in [stack.version for stack in known_stacks()]):
        folder = Path(which).absolute()
        stamp = read_stamp(folder)
        if not stamp.get("complete"):
            raise ServerError("no installed twin", where=str(folder), hint="Run harness server twin install")
        return TwinEnvironment(folder, stamp)
    installed = [twin for twin in installed_twins() if not which or twin.version == which]
    if not installed:
        of_version, flag = (f" of {which}", f" --stack {which}") if which else ("", "")
        raise ServerError(
            f"no installed twin{of_version}", where=str(twin_root()), hint=f"Run harness server twin install{flag}"
        )
    stable = [twin for twin in installed if is_stable(twin.version)]
    return (stable or installed)[-1]


def read_stamp(folder: Path) -> dict[str, Any]:
    """The installer's record in a folder; empty where there is none."""
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
        # The sampler's graph runs uncompiled: no C++ compiler is needed, and the server starts sooner.
        "TORCHDYNAMO_DISABLE": "1",
        # vLLM inspects a model class in a separate process (9 s of CPU) and caches the result here under a name that
        # all its releases share: releases in the same folder would overwrite each other's cache.
        "VLLM_CACHE_ROOT": str(twin.folder / "cache"),
        "VLLM_LOGGING_COLOR": "0",
        "NO_COLOR": "1",
    }
    if settings is not None:
        variables[SETTINGS_VARIABLE] = str(settings)
    return variables
