"""Progress of runs: a live bar on a terminal, plain lines in a file; and Ctrl-C, which ends them."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from harness.analysis.logs.glance import glance
from harness.cli.terminal import about, escape_markup, format_duration, new_console, say
from harness.measure.records import layout
from harness.present.report.terminal import status_lines
from harness.runner import progress as events


@contextmanager
def watched(console: Console, runs: Path | None = None) -> Generator[tuple[TerminalProgress, events.StopFlag]]:
    """(progress on the console, the flag that signals set) while runs are performed.

    The first Ctrl-C ends after the present run, the second aborts it.
    """
    stop = events.StopFlag()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            stop.abort()
            if number == signal.SIGTERM:  # after a hang-up there is no terminal left to write to
                say(console, "stopping: this run is aborted, sealed runs are kept")
            return
        stop.request()
        aborts = "aborting this run; sealed runs are kept"
        say(console, aborts if stop.now.is_set() else "ending after this run (Ctrl-C again aborts it)")

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with TerminalProgress(console, runs) as progress:
            yield progress, stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Now(ProgressColumn):
    """What the run being made does now, looked up twice a second: it also moves while no request ends."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        folder = task.fields.get("folder")
        return Text(glance(folder).in_words() if isinstance(folder, Path) else "")


class TerminalProgress:
    """A ProgressSink for the command line, scripts and notebooks; use as a context manager."""

    def __init__(self, console: Console | None = None, runs: Path | None = None) -> None:
        """runs: where the runs are written, to look into the one being made."""
        console = console or new_console()
        self._runs = runs
        self._console = console
        self._is_live = console.is_terminal or console.is_jupyter
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            _Now(),
            console=console,
            transient=True,
        )
        self._runs_task: TaskID | None = None
        self._requests_tasks: dict[str, TaskID] = {}
        self._name = ""
        self._num_planned = 0
        self._num_sealed = 0

    def __enter__(self) -> TerminalProgress:
        if self._is_live:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_live:
            self._bars.stop()

    def __call__(self, event: events.ProgressEvent, /) -> None:
        match event:
            case events.ExperimentStarted():
                self._experiment_started(event)
            case events.RunStarted():
                self._run_started(event)
            case events.ServerStarting():
                self._server_starting(event)
            case events.ServerReady():
                pass  # what the run does now is looked up
            case events.RequestFinished():
                if (task := self._requests_tasks.get(event.label)) is not None:
                    self._bars.update(task, completed=event.num_finished)
            case events.RunSealed():
                self._run_sealed(event)
            case events.BlockLooked():
                for line in status_lines(event.status):
                    say(self._console, f"  {line}")

    def _experiment_started(self, event: events.ExperimentStarted) -> None:
        self._name = event.name
        self._num_planned, self._num_sealed = event.num_planned, event.num_sealed
        already = f", {event.num_sealed} sealed before" if event.num_sealed else ""
        predicted_s = event.predicted_wall_s
        left = "simulated, a moment each" if predicted_s is None else f"{about(predicted_s)} to go"
        left += event.assumed
        planned = f"at most {event.num_planned} runs" if event.is_at_most else f"{event.num_planned} runs"
        say(self._console, f"[bold]{event.name}[/]: {planned}{already}; {left}")
        if event.warning:
            say(self._console, f"Note: {escape_markup(event.warning)}.")
        self._runs_task = self._bars.add_task("runs", total=event.num_planned, completed=event.num_sealed, note="")

    def _run_started(self, event: events.RunStarted) -> None:
        self._remove_bar(event.label)
        self._requests_tasks[event.label] = self._bars.add_task(
            f"{event.place} {event.label}".lstrip(),
            total=event.num_requests,
            note="",
            folder=None if self._runs is None else self._runs / self._name / f"{event.label}{layout.PARTIAL}",
        )

    def _server_starting(self, event: events.ServerStarting) -> None:
        """A terminal has the time beside the bar, which moves."""
        waited = f"waited {format_duration(event.waited_s)} of {format_duration(event.limit_s)}"
        if (task := self._requests_tasks.get(event.label)) is not None:
            self._bars.update(task, note=waited)
        if not self._is_live:
            ends = "it ends when /health answers, at start_timeout_s, or with Ctrl-C twice"
            say(self._console, f"  {event.label}: the server is starting, {waited}; {ends}")

    def _remove_bar(self, label: str) -> None:
        if (task := self._requests_tasks.pop(label, None)) is not None:
            self._bars.remove_task(task)

    def _run_sealed(self, event: events.RunSealed) -> None:
        self._num_sealed += 1
        self._remove_bar(event.label)
        left = f"{format_duration(event.left_s)} left" if event.left_s else ""
        if self._runs_task is not None:
            self._bars.update(self._runs_task, completed=self._num_sealed, note=left)
        verdict = "[green]valid[/]" if event.is_valid else f"[red]INVALID[/]: {escape_markup('; '.join(event.reasons))}"
        count = f"{self._num_sealed:>{len(str(self._num_planned))}}/{self._num_planned}"
        say(
            self._console,
            f"  {count}  {event.label:<28} {verdict}  in {format_duration(event.wall_s)}{left and ', '}{left}",
        )
