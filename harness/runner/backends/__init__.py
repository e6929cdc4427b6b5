"""Each module here is a kind of server, as a value ``BACKEND``: its checks, its launch, its ``perform``.

``harness.kinds`` holds the facts of a kind that need no import of it; a module is imported at first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from harness.kinds import KINDS, OWN_KINDS, kind_named
from harness.measure.server.doctor import Check
from harness.plugins import part_at, plugged
from harness.runner.backends.base import Backend


def backend_named(name: str) -> Backend:
    """The backend of a known kind: ``BACKEND`` in the module of that name, or a plug-in's; SpecError for an unknown.

    The names of our own kinds cannot be taken.
    """
    name = kind_named(name).name
    own = f"{__name__}.{name}:BACKEND"
    backend: Backend = part_at(own if name in OWN_KINDS else plugged("backends").get(name, own))
    return backend


def readiness(environment: str = "") -> Iterator[Check]:
    """For each kind, whether this machine can run it; environment: of a serving stack, "": the one on PATH."""
    return (backend_named(name).readiness_of(environment) for name in KINDS)


def what_you_can_do(checks: Iterable[Check]) -> list[str]:
    """Lines after all checks: a first command for each kind that this machine can run, and what each other lacks."""
    by_name = {check.name: check for check in checks}
    broken = [check.name for check in by_name.values() if check.ok is False]
    if broken:
        return [f"First: mend {', '.join(broken)}; its line above says how"]
    of_kinds = {name: by_name[f"backend {name}"] for name in KINDS}
    lacking = {name: check for name, check in of_kinds.items() if not check.ok}
    return [
        "You can:",
        *(f"  {backend_named(name).first_command}  ({name})" for name in of_kinds if name not in lacking),
        *(
            f"Not yet: {name} needs {'; '.join(filter(None, (check.need, check.meanwhile)))}"
            for name, check in lacking.items()
        ),
    ]
