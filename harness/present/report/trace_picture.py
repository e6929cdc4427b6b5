"""A recording's picture: lengths, waits, and a lane a recording. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.clock import NS_PER_S
from harness.errors import RecordsError, SpecError, escape_controls
from harness.model.plan.model import WAIT_KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from harness.model.traces.recording import Recording, TraceFile

SUFFIXES = (".svg", ".png", ".pdf")
MOST_RECORDINGS = 24
SECONDS_PER_TOKEN = 0.02  # only to give a bar its length: about one decode step a token


def draw_trace(trace: TraceFile, path: Path) -> None:
    """Write the picture to ``path``; raises SpecError for another suffix, RecordsError when the disk refuses."""
    if path.suffix not in SUFFIXES:
        raise SpecError("is no picture's name", where=str(path), hint=f"End it with one of {', '.join(SUFFIXES)}")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 6.4), layout="constrained")
    lengths, waits, lanes = figure.subplot_mosaic([["lengths", "waits"], ["lanes", "lanes"]]).values()
    requests = [request for recording in trace.recordings for request in recording.requests]
    _distribution(lengths, [request.prompt_tokens for request in requests], "prompt")
    _distribution(lengths, [request.generate_tokens for request in requests], "generated")
    lengths.set(xlabel="tokens", ylabel="share of requests", title="Lengths")
    lengths.legend(frameon=False)
    for kind in WAIT_KINDS[1:]:
        waits_s = [
            max(request.wait_ns / NS_PER_S, 1e-3)
            for request in requests
            if request.wait_kind == kind and not request.is_drawn
        ]
        if waits_s:
            _distribution(waits, waits_s, f"{kind} ({len(waits_s)})")
    waits.set(xlabel="seconds", ylabel="share of waits", title="Waits, by what is waited for")
    if waits.lines:
        waits.legend(frameon=False)
    else:
        waits.text(0.5, 0.5, "no waits: replayed by arrivals", ha="center", transform=waits.transAxes)
    shown = trace.recordings[:MOST_RECORDINGS]
    for row, recording in enumerate(shown):
        _recording(lanes, row, recording)
    lanes.set(xlabel=f"seconds of the recording, answers drawn at {SECONDS_PER_TOKEN * 1000:g} ms a token")
    lanes.set_title(f"{escape_controls(trace.head.name)}: the first {len(shown)} of {len(trace.recordings)} recordings")
    lanes.set_yticks([])
    lanes.invert_yaxis()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except OSError as error:
        hint = "Make room or choose a folder that can be written"
        raise RecordsError(f"cannot be written ({error.strerror})", where=str(path), hint=hint) from error


def _distribution(axes: Axes, values: Sequence[float], label: str) -> None:
    ordered = sorted(values)
    axes.step(ordered, [(place + 1) / len(ordered) for place in range(len(ordered))], where="post", label=label)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.grid(visible=True, alpha=0.3)


def _recording(axes: Axes, row: int, recording: Recording) -> None:
    """One recording: a bar a request; what runs beside another has a row of its own within the lane."""
    ends: list[float] = []
    spans: list[tuple[float, float, int]] = []
    free_at: list[float] = []
    for request in recording.requests:
        began = max((ends[before] for before in request.after), default=recording.start_ns / NS_PER_S)
        start = began + request.wait_ns / NS_PER_S
        ends.append(start + request.generate_tokens * SECONDS_PER_TOKEN)
        place = next((place for place, free in enumerate(free_at) if free <= start), len(free_at))
        free_at[place : place + 1] = [ends[-1]]
        spans.append((start, ends[-1], place))
    height = 0.8 / len(free_at)
    for start, end, place in spans:
        axes.barh(
            row - 0.4 + (place + 0.5) * height, end - start, left=start, height=height * 0.9, color=f"C{place % 10}"
        )
