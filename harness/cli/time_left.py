"""How long something takes, in words, and a bar for commands that say nothing until they are done.

Light on purpose: what only computes loads nothing of runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


def format_duration(seconds: float) -> str:
    """ "under 1 s", "48 s", "3 min 05 s", "1 h 02 min"."""
    if seconds < 1:
        return "under 1 s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


@contextmanager
def time_left(name: str) -> Generator[Callable[[float], None]]:
    """A bar with the time left for what says nothing until it is done; it takes the share done, and leaves no trace.

    On standard error, where a terminal is: what the command prints stays whole.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(28), TaskProgressColumn(), TimeRemainingColumn())
    bars = Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # what goes to a file or a pipe stays there
        disable=not console.is_terminal,
    )
    with bars:
        task = bars.add_task(name, total=1.0)
        yield lambda share: bars.update(task, completed=share)
