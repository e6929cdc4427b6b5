"""Files that ship with the harness, found by name: wait distributions, cost models, experiments.

They lie in ``plans/`` of a checkout and in ``harness/_data/`` of an installed wheel. Nothing here reads their content.
"""

from __future__ import annotations

import difflib
from contextlib import suppress
from pathlib import Path

from harness.errors import SpecError

_PACKAGE = Path(__file__).resolve().parent
SUFFIXES = (".toml", ".jsonl")
SHIPPED_ROOTS = (_PACKAGE.parent / "plans", _PACKAGE / "_data")


def shipped_folder(kind: str) -> Path | None:
    """The folder of one kind ("waits", "costs", "experiments"), or None when nothing of it ships here."""
    return next((root / kind for root in SHIPPED_ROOTS if (root / kind).is_dir()), None)


def shipped_names(kind: str) -> list[str]:
    """Names of the shipped files of one kind, sorted."""
    folder = shipped_folder(kind)
    return sorted(path.stem for path in folder.iterdir() if path.suffix in SUFFIXES) if folder is not None else []


def find_shipped(kind: str, name_or_path: str, *, what: str) -> Path:
    """The shipped file ``<kind>/<name>``; or, for text with a slash or a suffix, that file itself.

    what: how to call such a thing in an error. Raises SpecError when there is no such file, which names a near one
    beside it.
    """
    if Path(name_or_path).suffix[1:].isalpha() or "/" in name_or_path:
        path = Path(name_or_path)
        with suppress(RuntimeError):  # there is no such user, or no home: then no such file either
            path = path.expanduser()
        if not path.is_file():
            there = [each.name for each in path.parent.glob(f"*{SUFFIXES[kind == 'traces']}")]
            near = difflib.get_close_matches(path.name, there, n=1)
            hint = f"Did you mean {path.with_name(near[0])}?" if near else "Check the path"
            raise SpecError(f"there is no such {what} file", where=name_or_path, hint=hint)
        return path
    folder = shipped_folder(kind)
    for suffix in SUFFIXES if folder else ():
        if (path := Path(str(folder)) / f"{name_or_path}{suffix}").is_file():
            return path
    suffix = SUFFIXES[kind == "traces"]
    names = shipped_names(kind)
    near = difflib.get_close_matches(name_or_path, names, n=1)
    meant = f"Did you mean {near[0]!r}? " if near else ""
    hint = f"{meant}Use one of {', '.join(names) or '(none shipped)'}, or give the path of a {suffix} file"
    raise SpecError(f"unknown {what} {name_or_path!r}", where=kind, hint=hint)
