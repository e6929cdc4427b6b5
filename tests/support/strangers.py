"""A folder full of files named as modules that programs load; each leaves its name in a file when it is loaded."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

CODE = """
with open({mark!r}, "a") as mark:
    mark.write(__name__ + " ")
raise SystemExit("a file of the working folder was loaded")
"""


@cache
def names() -> frozenset[str]:
    """Of the standard library and of what is installed: reading that takes longer than to write the files."""
    every = {*sys.stdlib_module_names, *packages_distributions(), "sitecustomize", "usercustomize"}
    return frozenset(filter(str.isidentifier, every - {"harness"}))


class Strangers:
    """Files and packages in a folder, named as the harness, the standard library and what is installed."""

    def __init__(self, folder: Path) -> None:
        self._mark = folder / ".loaded"
        code = CODE.format(mark=str(self._mark))
        for name in names():
            (folder / f"{name}.py").write_text(code)
        (folder / "harness").mkdir()
        (folder / "harness" / "__init__.py").write_text(code)

    @property
    def loaded(self) -> str:
        """The names of those that were loaded, in order."""
        return self._mark.read_text() if self._mark.exists() else ""
