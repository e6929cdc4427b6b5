"""Output for people: lines, tables and progress on the terminal, and untrusted text made safe for it.

Neither rich markup nor control characters in the text of a server or a file have an effect, and none of them is lost.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from harness.errors import MAX_LINE_CHARS, SpecError, escape_controls, printable, printable_lines
from harness.outputs import write_text
from harness.table import folded, pieces

if TYPE_CHECKING:
    from rich.console import Console
    from rich.style import Style

    from harness.table import Table, TableForm

# Where output goes to a file or a pipe, a line is a line: programs that search it find all of it.
PIPE_WIDTH = 100_000


def terminal(*, is_error: bool = False) -> Console:
    """Standard output, or error, as rich writes on it; lines fold at a terminal's width and nowhere else."""
    has_width = _has_width(sys.stderr if is_error else sys.stdout)
    return new_console(width=None if has_width else PIPE_WIDTH, stderr=is_error)


def new_console(**options: Any) -> Console:
    """A console of rich on which no text has an effect but by its style."""
    from rich import console
    from rich.segment import Segment

    class SafeConsole(console.Console):
        def render(self, *arguments: Any, **more: Any) -> Iterable[Segment]:
            for segment in super().render(*arguments, **more):
                is_text = segment.control is None
                yield Segment(escape_controls(segment.text), segment.style) if is_text else segment

    return SafeConsole(**options)


def print_text(text: str = "", *, end: str = "\n", is_error: bool = False) -> None:
    """Print a text of any source as it is, control characters spelled out."""
    print(escape_controls(text), end=end, file=sys.stderr if is_error else sys.stdout, flush=True)


def print_bytes(data: bytes) -> None:
    """Bytes of a file in place of that file; on a terminal as text."""
    if sys.stdout.isatty():
        print_text(data.decode("utf-8", "replace"), end="")
    else:
        sys.stdout.buffer.write(data)


def terminal_width(*, is_error: bool = False) -> int:
    """Columns of standard output, or error, for what is drawn without rich."""
    has_width = _has_width(sys.stderr if is_error else sys.stdout)
    return shutil.get_terminal_size().columns if has_width else PIPE_WIDTH


def _has_width(stream: TextIO) -> bool:
    return stream.isatty() or "COLUMNS" in os.environ


def say(
    console: Console, text: str, style: str | Style | None = None, *, markup: bool = True, hang: int | None = None
) -> None:
    """Print lines, folded between words, with no colours but those of their markup; hang: spaces before what folds."""
    from rich.text import Text

    text = escape_controls(text)
    drawn = Text.from_markup(text) if markup else Text(text)
    for line in drawn.split("\n", allow_blank=True):
        for before, start, end, after in pieces(line.plain, console.width, hang):
            shown = Text.assemble(before, line[start:end], after, style=style or "")
            console.print(shown, highlight=False, soft_wrap=True)


def print_folded(text: str = "", *, hang: int | None = None, is_error: bool = False) -> None:
    """Print lines for people, folded between words where the output has a width; hang: spaces before what folds."""
    for line in escape_controls(text).split("\n"):
        print_text("\n".join(folded(line, terminal_width(is_error=is_error), hang)), is_error=is_error)


def print_with_comment(line: str, comment: str, *, gap: int = 4) -> None:
    """Print a line of a file or of a shell with its comment: behind it, or below where that is too wide."""
    width = terminal_width()
    if not comment or len(line) + gap + 2 + len(comment) <= width:
        print_text(line + (f"{' ' * gap}# {comment}" if comment else ""))
        return
    print_folded(line.rstrip())
    indent = len(line) - len(line.lstrip()) + 4
    for part in folded(comment, width - indent - 2, hang=0):
        print_text(f"{' ' * indent}# {part}")


def show(console: Console, table: Table) -> None:
    """Print a table that fits the console."""
    from harness.table import to_rich

    console.print(to_rich(table, console.width))


def print_tables(tables: Sequence[Table], form: TableForm, remarks: Iterable[str] = ()) -> None:
    """Print tables in a form; the text form with the remarks below, a line each."""
    from harness.table import TableForm, written

    if form is not TableForm.text:
        print_text(written(tables, form), end="")
        return
    console = terminal()
    for text in (written(tables, form, console.width).removesuffix("\n"), *remarks):
        say(console, text, markup=False)


def print_or_write(text: str, output: Path | None, label: str = "wrote") -> None:
    """Print a text, or write it to a file and name that file."""
    if output is None:
        print_text(text, end="")
        return
    write_text(output, text)
    print_folded(f"{label} {output}")


def print_answers(path: Path, answers: Callable[[Iterable[str]], Iterable[str]]) -> None:
    """Print the answer to every line of a file, or of standard input ("-") as each line comes.

    SpecError where the file cannot be read, and in the end where no line was a case.
    """
    is_piped, num_lines, num_errors = str(path) == "-", 0, 0
    with SpecError.on_os_error("cannot be read", where=path, hint="Check the path"):
        source = nullcontext(sys.stdin) if is_piped else path.open(encoding="utf-8")
    with source as lines:
        for line in answers(lines):
            print(escape_controls(line), flush=is_piped)
            num_lines += 1
            num_errors += '"error": ' in line
    if num_lines and num_errors == num_lines:
        what = f"none of its {num_lines} lines is a case"
        raise SpecError(what, where=str(path), hint="Write one JSON object in each line")


def print_facts(facts: Mapping[str, object]) -> None:
    """Names and untrusted values in two columns."""
    width = max(map(len, facts))
    for name, value in facts.items():
        print_folded(f"{name:<{width}}  {printable_lines(str(value))}", hang=width + 2)


def escape_markup(text: object) -> str:
    """Untrusted text as part of a rich text, on one line."""
    from rich.markup import escape

    shown = escape(printable(str(text), MAX_LINE_CHARS))
    # A backslash at the end would escape the markup that follows.
    return f"{shown} " if shown.endswith("\\") else shown


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


def about(seconds: float) -> str:
    """ "under 1 s", "about 48 s"."""
    return f"{'about ' * (seconds >= 1)}{format_duration(seconds)}"


@contextmanager
def time_left(name: str) -> Generator[Callable[[float], None]]:
    """A bar with the time left on a terminal's standard error; it takes the share done, and leaves no trace."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = new_console(stderr=True)
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(28),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # what goes to a file or a pipe stays there
        disable=not console.is_terminal,
    )
    with bars:
        task = bars.add_task(name, total=1.0)
        yield lambda share: bars.update(task, completed=share)
