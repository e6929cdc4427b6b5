"""The releases of vllm-rbln that the twin can be, each pinned by one lock file beside this one; one more lock adds one.

Nothing is installed here.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from harness.errors import SpecError

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
