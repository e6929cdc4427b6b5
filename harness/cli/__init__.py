"""The ``harness`` command: thin commands over the public functions, and the one place where errors are caught.

Nothing is computed here, and no command is loaded before it is called.
"""

from __future__ import annotations

import atexit
import errno
import os
import sys
from typing import NoReturn

from harness.cli.process import let_memory_go, prepare_process, take_blas_memory
from harness.errors import ExitCode, HarnessError, escape_controls, printable_lines

_DISK_ERRORS = {errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES, errno.EPERM}
# What a person's own limits (ulimit) or an exhausted machine answer with.
_LIMIT_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EFBIG}
_NO_ROOM = (
    *("can't start new thread", "failed to map segment", "cannot allocate memory", "out of memory"),
    *(
        "could not find/load shared object",
        "too many open files",
        "without setting an exception",
        "without exception set",
    ),
)
# Freed before a refusal is reported, so that there is memory to report it with.
_RESERVE_BYTES = 1 << 20


def print_version() -> None:
    """Print the name and the version of the program."""
    from harness import __version__

    print(escape_controls(f"rbln-harness {__version__}"))


def _fail(message: str, code: ExitCode) -> NoReturn:
    line = f"harness: {printable_lines(message)}"
    if sys.stderr.isatty():
        from harness.cli.terminal import print_folded

        print_folded(line, is_error=True)
    else:
        print(escape_controls(line), file=sys.stderr)
    raise SystemExit(int(code))


def _report_refusal(error: Exception) -> NoReturn:
    """One line for what the system or a limit refused; raises ``error`` again where it is something else.

    It imports nothing: there may be no memory left.
    """
    number = error.errno if isinstance(error, OSError) else None
    words = str(error).partition("\n")[0]
    if isinstance(error, MemoryError) or number in _LIMIT_ERRORS or any(text in words.lower() for text in _NO_ROOM):
        what = words or "not enough memory"
        line = f"this machine or its limits (`ulimit -a`) refused: {what}. Nothing half-written counts as a run"
        # What a progress bar put in place of standard error may still be there.
        print(escape_controls(f"harness: {printable_lines(line)}"), file=sys.__stderr__ or sys.stderr, flush=True)
        # Libraries that were refused memory may crash when the interpreter takes them down.
        os._exit(int(ExitCode.HARNESS_FAULT))
    if isinstance(error, OSError) and number == errno.ENAMETOOLONG:
        _fail(f"{str(error.filename)[:60]}...: the name is too long for a file. Check it", ExitCode.BAD_SPEC)
    if isinstance(error, OSError) and not os.path.exists("/proc/self"):  # noqa: PTH110  # nothing may be imported
        hint = "Mount it: mount -t proc proc /proc"
        _fail(f"/proc: is not mounted, where memory and processes are read. {hint}", ExitCode.HARNESS_FAULT)
    if isinstance(error, OSError) and number in _DISK_ERRORS:
        where = f"{error.filename}: " if error.filename else ""
        hint = "Free some space or choose a folder you may write to"
        _fail(f"{where}{error.strerror}. {hint}", ExitCode.HARNESS_FAULT)
    raise error


def _call_command() -> None:
    """Call the command that the arguments name; the version alone needs no command line."""
    if sys.argv[1:] == ["--version"]:
        print_version()
        return
    take_blas_memory()
    from harness.cli.tree import app

    app(prog_name="harness")


def main() -> None:
    """Entry point: run the command, turn every known failure into one line and an exit code."""
    prepare_process()
    reserve = bytearray()
    atexit.register(let_memory_go)
    try:
        reserve = bytearray(_RESERVE_BYTES)
        _call_command()
    except HarnessError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted; nothing half-written counts as a run", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(0) from None
    except (MemoryError, SystemError, RuntimeError, ImportError, OSError) as error:
        reserve.clear()
        _report_refusal(error)
