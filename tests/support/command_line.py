"""``harness`` as a person runs it, in the test's own process: to fork one costs as much again, with what it then loads.

What a call changes of the process (folder, environment, streams) ends with it. ``harness_apart`` forks one that has
loaded everything already: for limits and other checkouts. Tests about starting and dying start a real interpreter.
"""

from __future__ import annotations

import io
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType

from tests.support import bare_reports
from tests.support.forked import ForkedProcess, fork_from_here, start_forked
from tests.support.forked_children import fork_children

GIVEN_UP_AFTER_S, GIVEN_UP_HERE_AFTER_S = 600, 120
WIDTH = 80
"""Columns of a terminal, where a test gives it any."""


def harness_apart(
    *words: str,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    limits: Mapping[int, int] | None = None,
    checkout: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """As ``harness``, in a process of its own. limits: of the shell, by their number in ``resource``.

    checkout: whose modules run, where it is not this one.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        variables = {**os.environ, **(environment or {})}
        process = start_forked(
            _call, words, limits or {}, checkout, cwd=cwd or Path.cwd(), variables=variables, out=out, err=err
        )
        process.join(GIVEN_UP_AFTER_S)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(["harness", *words], GIVEN_UP_AFTER_S)
        return subprocess.CompletedProcess(
            ["harness", *words], process.exitcode, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8")
        )


def start_harness(*words: str, cwd: Path, environment: Mapping[str, str]) -> ForkedProcess:
    """``harness WORDS`` as it begins, for what runs until it is ended; its outputs lead nowhere."""
    nowhere = Path(os.devnull)
    return ForkedProcess(start_forked(_call, words, {}, None, cwd=cwd, variables=environment, out=nowhere, err=nowhere))


class TooLong(BaseException):
    """Raised by the alarm in a command that goes on; nothing catches it."""


def harness(
    *words: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None, draws: bool = False
) -> subprocess.CompletedProcess[str]:
    """The exit code and both outputs of ``harness WORDS``; TooLong after minutes of CPU.

    environment: variables beside those of the test. draws: whether a report has its figures, which are most of what it
    costs.
    """

    def give_up(_number: int, _frame: FrameType | None) -> None:
        raise TooLong

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape") for _ in range(2))
    here, argv, before = Path.cwd(), sys.argv, signal.signal(signal.SIGPROF, give_up)
    variables, temporary = dict(os.environ), tempfile.tempdir
    os.chdir(cwd or here)
    os.environ.update(environment or {})
    tempfile.tempdir = os.environ.get("TMPDIR")
    sys.argv = ["harness", *words]
    signal.setitimer(signal.ITIMER_PROF, GIVEN_UP_HERE_AFTER_S)
    code = 0
    try:
        from harness.cli import main

        with redirect_stdout(out), redirect_stderr(err), bare_reports.with_figures() if draws else nullcontext():
            main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        sys.argv = argv
        os.chdir(here)
        os.environ.clear()
        os.environ.update(variables)
        tempfile.tempdir = temporary
    return subprocess.CompletedProcess(["harness", *words], code, *map(_written, (out, err)))


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode("utf-8", "surrogateescape")  # type: ignore[attr-defined]


def lines_beyond(text: str, width: int = WIDTH) -> list[str]:
    """Lines that a terminal would cut, but for a single word that is longer: a path, a hash."""
    return [line for line in text.splitlines() if len(line.rstrip()) > width and len(line.split()) > 1]


def _call(words: tuple[str, ...], limits: Mapping[int, int], checkout: Path | None) -> None:
    sys.argv = ["harness", *words]
    for number, limit in limits.items():
        resource.setrlimit(number, (limit, limit))
    if checkout is not None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "harness"]:
            del sys.modules[name]
        sys.path.insert(0, str(checkout))
    else:
        fork_from_here()
        fork_children()
    bare_reports.leave_out()
    from harness.cli import main

    main()
