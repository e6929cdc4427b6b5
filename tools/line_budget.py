"""Prints lines and modules of Python in each part of the house beside its budget: python tools/line_budget.py

The budgets are the table of CONTRIBUTING.md; nothing fails over one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| `((?:harness|tests)[\w/]*)` \| ([\d,]+) \| ([\d,]+) \|", re.MULTILINE)


class Size(NamedTuple):
    """Lines and modules."""

    lines: int
    modules: int


def budgets(page: str) -> dict[str, Size]:
    """The size that each folder may have, as a page's table has it."""
    return {folder: Size(*(int(number.replace(",", "")) for number in sizes)) for folder, *sizes in ROW.findall(page)}


def size_of(folder: Path, without: tuple[Path, ...] = ()) -> Size:
    """The Python below a folder, but for these folders."""
    files = [path for path in folder.rglob("*.py") if not any(path.is_relative_to(other) for other in without)]
    return Size(sum(len(path.read_bytes().splitlines()) for path in files), len(files))


def lines_of(allowed: dict[str, Size], root: Path) -> list[str]:
    """A line for each folder, and the sums of harness and tests. What lies in an inner folder counts there alone."""
    lines, sums = [], {"harness": [Size(0, 0), Size(0, 0)], "tests": [Size(0, 0), Size(0, 0)]}
    for name, most in allowed.items():
        inner = tuple(root / other for other in allowed if other.startswith(f"{name}/"))
        size = size_of(root / name, inner)
        label = f"{name}, the rest" if inner else name
        lines.append(_line(label, size, most))
        whole = sums[name.partition("/")[0]]
        whole[:] = (
            Size(*map(sum, zip(both, more, strict=True))) for both, more in zip(whole, (size, most), strict=True)
        )
    return [*lines, *(_line(f"all of {name}", *whole) for name, whole in sums.items())]


def _line(name: str, size: Size, most: Size) -> str:
    return f"{name:<32}{size.lines:7,} of {most.lines:6,} lines{size.modules:6,} of {most.modules:4,} modules"


if __name__ == "__main__":
    print("\n".join(lines_of(budgets((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")), ROOT)))
