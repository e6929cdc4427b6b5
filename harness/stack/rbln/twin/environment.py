"""Where the twin lives and what its processes are told: its Python, its environment variables.

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

FOLDER = Path(__file__).resolve().parent
COMMON_LOCK = FOLDER / "requirements-twin.lock"
"""What all stacks share."""
UV_LOCK = FOLDER / "requirements-uv.lock"
_STACK_LOCK = "requirements-stack-{}.lock"


@dataclass(frozen=True, slots=True)
class TwinStack:
    """One release of vllm-rbln, with the vLLM and optimum-rbln that it pins."""

    version: str
    lock: Path

    @property
    def vllm(self) -> str:
        """The version of vLLM that its lock holds."""
        found = re.search(r"^vllm==(\S+)", self.lock.read_text(encoding="utf-8"), re.MULTILINE)
        return found[1] if found else "?"

    @property
    def locks_sha256(self) -> str:
        return hashlib.sha256(COMMON_LOCK.read_bytes() + self.lock.read_bytes()).hexdigest()


def known_stacks() -> tuple[TwinStack, ...]:
    """Every stack that is locked here, oldest first."""
    locks = {path.stem.removeprefix("requirements-stack-"): path for path in FOLDER.glob(_STACK_LOCK.format("*"))}
    return tuple(TwinStack(version, locks[version]) for version in sorted(locks, key=release_order))


def newest_stable() -> str:
    """The version that is taken where none is named."""
    return [stack.version for stack in known_stacks() if is_stable(stack.version)][-1]


def stack_named(version: str = "") -> TwinStack:
    """The stack of a version ("": the newest stable one); SpecError lists those there are."""
    wanted = version or newest_stable()
    found = next((stack for stack in known_stacks() if stack.version == wanted), None)
    if found is None:
        known = ", ".join(stack.version for stack in known_stacks())
        raise SpecError("is not a version this release has locked", where=wanted, hint=f"Choose {known}")
    return found


def is_stable(version: str) -> bool:
    """Whether a version is no preview: 0.12.0 and 0.11.2.post1 are, 0.12.1a8 is not."""
    return re.fullmatch(r"[\d.]+(\.post\d+)?", version) is not None


def release_order(version: str) -> tuple[tuple[int, ...], bool, tuple[int, ...]]:
    """A sort key: by release number, previews of a release before it."""
    release = re.match(r"\d+(\.\d+)*", version)
    head = release[0] if release else ""
    return (
        tuple(map(int, head.split("."))) if head else (),
        is_stable(version),
        tuple(map(int, re.findall(r"\d+", version[len(head) :]))),
    )


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
