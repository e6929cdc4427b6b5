"""The ``harness`` command: thin commands over the public functions, and the one place where errors are caught.

Imports of heavy packages happen inside commands, so that --help is instant. Nothing is computed here.
"""

from __future__ import annotations

import codecs
import errno
import gc
import io
import mmap
import os
import resource
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from harness.cli import (
    bench,
    calibrate,
    compare,
    data,
    explain,
    fleet,
    inputs,
    machine,
    method,
    power,
    records,
    release,
    run,
    search,
    stack,
    sweep,
    tables,
    trace,
    twin,
    watch,
)
from harness.errors import ExitCode, HarnessError


def _untype_flags(options: Iterable[object]) -> None:
    """Help names no type for what takes no value."""
    for option in options:
        if isinstance(option, TyperOption) and option.is_flag:
            option.metavar = ""


def _in_words_of_a_file(error: typer.BadParameter) -> str:
    """What is wrong with the value of an option, in the words that a wrong key of a file gets."""
    if (cause := error.__cause__) is None:
        return error.message
    from pydantic import ValidationError

    from harness.spec.base import problems_of

    if not isinstance(cause, ValidationError):
        return error.message
    given = cause.errors()[0]["input"]
    words = problems_of(cause)[0][1]
    return words if repr(given) in words else f"{given!r} {words}"


class Command(TyperCommand):
    """A command of this command line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # of click's or typer's own, by typer's version
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _in_words_of_a_file(error)
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _untype_flags(self.get_params(ctx))
        super().format_help(ctx, formatter)


class Group(TyperGroup):
    """A group of such commands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _untype_flags(self.get_params(ctx))
        super().format_help(ctx, formatter)


app = typer.Typer(
    name="harness",
    cls=Group,
    help="Live measurement harness for RBLN NPU vLLM servers under agentic re-arrival.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    epilog="Exit codes: 0 pass, 1 harness fault, 2 bad spec, 3 run invalid, 4 rule failed, 130 interrupted.",
)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        from harness import __version__

        print(f"rbln-harness {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", help="Say the version and end.", is_eager=True, callback=_say_version)
    ] = False,
) -> None: ...


run.register(app)
sweep.register(app)
watch.register(app)
fleet.register(app)
power.register(app)
inputs.register(app)
explain.register(app)
trace.register(app)
data.register(app)
records.register(app)
compare.register(app)
method.register(app)
machine.register(app)
bench.register(app)
search.register(app)
twin.register(app)
calibrate.register(app)
tables.register(app)
stack.register(app)
release.register(app)

# Under which heading --help shows each command; what is not named here comes first, under none.
PANELS = {
    "Run and look": ("run", "watch", "fleet", "sweep", "report", "table", "compare", "runs", "query", "explain"),
    "Before a run": ("init", "doctor", "power", "scatter", "simulate", "plan", "waits", "trace", "emulator"),
    "Method": ("freeze", "publish", "decide", "analyse", "catalogue", "tables", "signs", "paper-rules", "calibrate"),
    "Search and advice": ("search", "predict", "coverage", "advise"),
    "Records": ("verify", "derive", "records"),
}
for _command in (*app.registered_commands, *app.registered_groups):
    _panel = next((panel for panel, names in PANELS.items() if _command.name in names), "Servers and stacks")
    _command.rich_help_panel = _panel
for _group in app.registered_groups:
    _group.cls = Group
_groups = [group.typer_instance for group in app.registered_groups if group.typer_instance is not None]
for _command in (*app.registered_commands, *(command for group in _groups for command in group.registered_commands)):
    _command.cls = Command


@contextmanager
def _alone(name: str) -> Generator[None]:
    """The one command that was asked for and no other: making the parameters of all takes a tenth of a second."""
    commands, groups = app.registered_commands, app.registered_groups
    if asked := [one for one in commands if one.name == name]:
        app.registered_commands, app.registered_groups = asked, []
    try:
        yield
    finally:
        app.registered_commands, app.registered_groups = commands, groups


_DISK_ERRORS = {errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES, errno.EPERM}
# What a person's own limits (ulimit) or an exhausted machine answer with.
_LIMIT_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EFBIG}
_NO_ROOM = (
    *("can't start new thread", "failed to map segment", "cannot allocate memory", "out of memory"),
    *("could not find/load shared object", "too many open files"),
)


# Address space that numpy takes with one thread of OpenBLAS and its buffer: 120 MiB, and room for the rest.
_BLAS_BYTES = 144 << 20


def _say(message: str) -> None:
    from harness.cli.words import said_plainly

    print(f"harness: {said_plainly(message)}", file=sys.stderr)


def _fail(message: str, code: ExitCode) -> NoReturn:
    _say(message)
    raise SystemExit(int(code))


def _fail_limited(error: BaseException) -> NoReturn:
    """One line for what a limit of memory, files, file size or threads refused."""
    what = str(error).partition("\n")[0] or "not enough memory"
    _say(f"this machine or its limits (`ulimit -a`) refused: {what}. Nothing half-written counts as a run")
    if _is_memory_limited():
        # Libraries that were refused memory may crash when the interpreter takes them down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(ExitCode.HARNESS_FAULT))
    raise SystemExit(int(ExitCode.HARNESS_FAULT))


def _is_memory_limited() -> bool:
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def _take_blas_memory() -> None:
    """Under a limit of memory, let numpy's BLAS take its buffer while there is room: without, it tries for ever."""
    if not _is_memory_limited():
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    mmap.mmap(-1, _BLAS_BYTES).close()
    import numpy as np

    np.linalg.inv(np.eye(2))


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    from harness.cli.words import in_ascii

    return in_ascii(error)


def _open_closed_streams() -> None:
    """What the shell closed (``>&-``) leads nowhere: else the next file that is opened would take its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


def _has_no_room(error: BaseException) -> bool:
    return any(words in str(error).lower() for words in _NO_ROOM)


def _fail_refused(error: OSError) -> NoReturn:
    """One line for what the operating system refused; raises ``error`` again where no person can act on it."""
    if error.errno in _LIMIT_ERRORS or _has_no_room(error):
        _fail_limited(error)
    if error.errno == errno.ENAMETOOLONG:
        _fail(f"{str(error.filename)[:60]}...: the name is too long for a file. Check it", ExitCode.BAD_SPEC)
    if error.errno not in _DISK_ERRORS:
        raise error
    where = f"{error.filename}: " if error.filename else ""
    _fail(f"{where}{error.strerror}. Free some space or choose a folder you may write to", ExitCode.HARNESS_FAULT)


def _prepare_process() -> None:
    """Streams that take every word, and a collector of garbage that leaves a short command alone."""
    _open_closed_streams()
    codecs.register_error("in-ascii", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that knows ASCII alone still gets every word.
            stream.reconfigure(errors="in-ascii")
    # What imports make stays: looking through it for cycles, over and over, takes a tenth of a short command's time.
    gc.set_threshold(50_000)
    # Arrow's own pool keeps what it frees: a long run would hold 60 MB more.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def main() -> None:
    """Entry point: run the command, turn every known failure into one line and an exit code."""
    _prepare_process()
    try:
        _take_blas_memory()
        with _alone(next(iter(sys.argv[1:]), "")):
            app(prog_name="harness")
    except HarnessError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted; nothing half-written counts as a run", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(0) from None
    except MemoryError as error:
        _fail_limited(error)
    except SystemError:
        # An interpreter without room for an exception returns an error and sets none.
        if not _is_memory_limited():
            raise
        _fail_limited(MemoryError())
    except (RuntimeError, ImportError) as error:
        if not _has_no_room(error):
            raise
        _fail_limited(error)
    except OSError as error:
        _fail_refused(error)
