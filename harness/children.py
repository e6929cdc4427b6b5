"""Commands of child processes, with nothing of the working folder on their path. This file is also what they run.

``python -m`` and ``python -c`` put the working folder first, where a file ``random.py`` would be loaded in place of the
standard library's. ``python -P`` is of 3.11, and ``-I`` drops PYTHONPATH too. So a child runs this file by its path.
"""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # The folder of this file, which Python put first. Nothing but what is built in has been imported so far.
    del sys.path[0]

from importlib import import_module
from pathlib import Path

# The working folder is an empty place there.
_WITHOUT_FOLDER = "import sys; sys.path[:] = [place for place in sys.path if place]; "


def own_command(function: str, *words: object) -> tuple[str, ...]:
    """The command that calls a function of ours in a new interpreter.

    function: "package.module:name". words: its arguments, which it gets as text; also ``sys.argv[1:]`` there. What the
    function returns is the exit status, None for 0. The child loads this very harness, wherever that lies.
    """
    return sys.executable, str(Path(__file__).absolute()), function, *map(str, words)


def script_command(python: object) -> tuple[str, ...]:
    """The command with which another interpreter runs a script from its standard input."""
    return text_command(python, "exec(sys.stdin.buffer.read())")


def text_command(python: object, text: str, *options: str) -> tuple[str, ...]:
    """The command with which another interpreter, of any version, runs a text; ``sys`` is imported there.

    From 3.13 on ``python -c`` loads modules before the text is begun; the variable is of 3.11.
    """
    return "env", "PYTHONSAFEPATH=1", str(python), *options, "-c", f"{_WITHOUT_FOLDER}{text}"


def _run(function: str, *words: str) -> object:
    root = str(Path(__file__).absolute().parents[1])
    if root not in sys.path:
        sys.path.insert(0, root)
    sys.argv = [function, *words]
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)(*words)


if __name__ == "__main__":
    sys.exit(_run(*sys.argv[1:]))  # pyright: ignore[reportArgumentType]
