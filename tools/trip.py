"""Modules of the harness that a command enters: those of which it calls a function, in its own process.

What runs while a module is imported does not count. Usage: python tools/trip.py run demo
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

import harness

PACKAGE = Path(harness.__file__).parent


def entered(command: list[str]) -> Counter[str]:
    """How many functions of each module ``harness COMMAND`` calls, by the module's path below ``harness``."""
    from harness.cli.tree import app

    called: set[tuple[str, str, int]] = set()
    imports = Counter[int]()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        code, thread = frame.f_code, threading.get_ident()
        if code.co_name == "<module>" and event in ("call", "return"):
            imports[thread] += 1 if event == "call" else -1
        elif event == "call" and not imports[thread] and code.co_flags & CO_OPTIMIZED:
            called.add((code.co_filename, code.co_name, code.co_firstlineno))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        app(command, standalone_mode=False)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    paths = (Path(path) for path, _, _ in called)
    # A template is compiled too, and is no module.
    modules = (path for path in paths if path.suffix == ".py" and path.is_relative_to(PACKAGE))
    return Counter(str(path.relative_to(PACKAGE)) for path in modules)


if __name__ == "__main__":
    modules = entered(sys.argv[1:])
    for module, num in sorted(modules.items()):
        print(f"{num:4d}  {module}")
    for room, num in sorted(Counter(str(Path(module).parent) for module in modules).items()):
        print(f"{num:4d} modules of {room}")
    print(f"{len(modules)} modules, {sum(modules.values())} functions")
