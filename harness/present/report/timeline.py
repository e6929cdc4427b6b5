"""The timeline of one run as hand-made SVG: a lane per session, and below it n and the bucket of every step.

Drawn from the client's stamps above and the server's step log below, both on the run's clock; nothing is smoothed.
A step is drawn from its log line to the next one, unless a prefill or idle time lies between.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.analysis.cost.reconstruct import first_tokens_ns
from harness.analysis.logs.replicas import engines_of, servers_in
from harness.analysis.reuse import Rearrival, rearrivals, reuse_rule
from harness.analysis.run_tables import RequestKey, with_logged_prefills
from harness.clock import NS_PER_S
from harness.measure.records.run import SealedRun
from harness.measure.records.schema import ABORTED
from harness.present.report.svg import NUM_CONDITION_COLORS

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
# Columns that a bar shows unchanged.
_AS_RECORDED = ("session", "request", "status", "prompt_tokens", "completion_tokens", "cached_tokens")


@dataclass(frozen=True, slots=True)
class Bar:
    """One request on a timeline, model seconds since the run's start; None where it was not observed.

    reuse: "first" (nothing to reuse), "cached", "partial", "recomputed" or "unknown".
    """

    session: int
    request: int
    due_s: float
    sent_s: float | None
    first_token_s: float | None
    done_s: float | None
    reuse: str
    status: str
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    replica: int | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """Decode steps of a server, empty where its log carries no step times.

    step_s, step_n, step_b: shape (steps,), ascending times.
    """

    step_s: FloatArray
    step_n: IntArray
    step_b: IntArray


NO_STEPS = Steps(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class TimelineView:
    """One run as lanes of requests over steps.

    servers: the steps of each server. start_ns: the instant of the run's clock that is 0 s. stalls_s: (start, duration)
    of moments in which the client's machine stood still.
    """

    label: str
    condition: str
    color: int
    num_sessions: int
    bars: tuple[Bar, ...]
    servers: tuple[Steps, ...]
    end_s: float
    start_ns: int = 0
    stalls_s: tuple[tuple[float, float], ...] = ()


def requests_in_stalls(requests: pa.Table, stalls_ns: Sequence[Sequence[int]]) -> int:
    """Requests that were due, sent or done while the client's machine stood still.

    stalls_ns: (start, duration) pairs of the run's clock.
    """
    sent = requests.column("sent_ns").combine_chunks()
    due_ns = requests.column("due_ns").to_numpy()
    sent_ns = sent.fill_null(0).to_numpy()
    done_ns = requests.column("done_ns").fill_null(0).to_numpy()
    is_hit = np.zeros(len(due_ns), dtype=np.bool_)
    for start_ns, duration_ns in stalls_ns:
        end_ns = start_ns + duration_ns
        is_hit |= (due_ns <= end_ns) & (sent_ns >= start_ns)
        is_hit |= (done_ns >= start_ns) & (done_ns <= end_ns)
    return int(np.count_nonzero(is_hit & sent.is_valid().to_numpy(zero_copy_only=False)))


def timeline(run: SealedRun, color: int) -> TimelineView | None:
    """The timeline of one run; None when no request of it was ever due."""
    requests = run.table("requests")
    if not requests.num_rows:
        return None
    start_ns = int(requests.column("due_ns").to_numpy().min())
    known = with_logged_prefills(requests, run.table("kv_events"))
    engine_of = engines_of(run)
    returns = rearrivals(known, run.plan_if_readable, reuse_rule(run), engine_of)
    again = {(each.session, each.request): each for each in returns}
    bars = _bars(requests, first_tokens_ns(run.table("chunks")), start_ns, again)
    servers = tuple(_steps(server.steps, start_ns) for server in servers_in(run))
    if len(servers) > 1:
        bars = [replace(bar, replica=engine_of.get((bar.session, bar.request))) for bar in bars]
    lasts = [float(value) for server in servers for value in server.step_s[-1:]]
    ends = [bar.done_s for bar in bars if bar.done_s is not None] + lasts
    return TimelineView(
        label=run.label,
        condition=run.condition,
        color=color,
        num_sessions=1 + int(requests.column("session").to_numpy().max()),
        bars=tuple(bars),
        servers=servers,
        end_s=max(ends, default=1.0) * 1.005,
        start_ns=start_ns,
        stalls_s=tuple(
            ((at_ns - start_ns) / NS_PER_S, duration_ns / NS_PER_S)
            for at_ns, duration_ns in run.audit.stall_intervals_ns or ()
            if at_ns + duration_ns > start_ns  # the meter also watches the preparations
        ),
    )


def _steps(steps: pa.Table, start_ns: int) -> Steps:
    """The steps of a server; none where some have no time, which would leave false gaps."""
    timed = steps.filter(steps.column("log_ns").is_valid()).sort_by("log_ns")
    if timed.num_rows < steps.num_rows:
        timed = steps.slice(0, 0)
    step_s = (timed.column("log_ns").to_numpy() - start_ns) / NS_PER_S
    n, b = (timed.column(name).to_numpy().astype(np.int64) for name in ("n", "b"))
    return Steps(np.asarray(step_s, dtype=np.float64), n, b)


def _bars(
    requests: pa.Table, first_tokens: Mapping[RequestKey, int], start_ns: int, again: Mapping[RequestKey, Rearrival]
) -> list[Bar]:
    def seconds(instant_ns: int | None) -> float | None:
        return None if instant_ns is None else (instant_ns - start_ns) / NS_PER_S

    return [
        Bar(
            due_s=(row["due_ns"] - start_ns) / NS_PER_S,
            sent_s=seconds(row["sent_ns"]),
            first_token_s=seconds(first_tokens.get((row["session"], row["request"]))),
            done_s=seconds(row["done_ns"]),
            reuse=_reuse(row, again.get((row["session"], row["request"]))),
            **{name: row[name] for name in _AS_RECORDED},
        )
        for row in requests.sort_by([("session", "ascending"), ("request", "ascending")]).to_pylist()
    ]


def _reuse(row: Mapping[str, Any], again: Rearrival | None) -> str:
    """again: the request as a re-arrival; None of one that continues no earlier request."""
    cached = row["cached_tokens"]
    if row["prompt_tokens"] is None or (again is not None and cached is None):
        return "unknown"
    if again is None or not cached:
        return "cached" if cached else "first" if again is None else "recomputed"
    return "partial" if again.is_partial else "cached"


WIDTH = 1000.0
LEFT = 46.0
RIGHT = 12.0
MAX_LANES = 96
# Up to so many lanes, each has this height.
LANE_HEIGHTS = ((16, 17.0), (32, 11.0), (64, 7.0))
# That all timelines of a page draw together: a request takes some 440 bytes.
MAX_DRAWN_REQUESTS = 3_600
STEP_PANEL_HEIGHT = 86.0
PANEL_GAP = 16.0
AXIS_HEIGHT = 32.0
STALL_HEIGHT = 4.0
TICK_HEIGHT = 11.0
UNSTREAMED_MARK = 5.0
LEFT_MARK = 1.6
# Kinds of line under a request, by the replica that served it; colours are the conditions'.
NUM_REPLICA_LINES = 8
DENSE_SEGMENTS = 150  # above this, the strokes of the outline would cover what it encloses
# A decode step that seems longer than this many median steps had a prefill or an idle server behind it.
GAP_STEPS = 2.5


@dataclass(frozen=True, slots=True)
class Segment:
    """Equal decode steps without a gap between them, model seconds since the run's start."""

    start_s: float
    end_s: float
    n: int
    b: int


def step_lengths_s(steps: Steps) -> FloatArray:
    """How long each step is drawn: to the next one, or a usual step where a prefill or idle time lies between.

    shape (steps,); empty without step times, or where stamps are too coarse to place steps in time.
    """
    gaps_s = np.diff(steps.step_s)
    usual_s = float(np.median(gaps_s)) if gaps_s.size else 0.0
    if steps.step_s.size == 0 or (gaps_s.size and usual_s <= 0):
        return np.zeros(0)
    return np.append(np.where(gaps_s > GAP_STEPS * usual_s, usual_s, gaps_s), usual_s)


def step_segments(steps: Steps) -> list[Segment]:
    """Steps joined where (n, b) stays the same and no prefill or idle time lies between; empty without step times."""
    lengths_s = step_lengths_s(steps)
    if lengths_s.size == 0:
        return []
    segments: list[Segment] = []
    for start_s, length_s, n, b in zip(steps.step_s, lengths_s, steps.step_n, steps.step_b, strict=True):
        start, end = float(start_s), float(start_s + length_s)
        last = segments[-1] if segments else None
        if last is not None and (last.n, last.b) == (n, b) and start - last.end_s < 1e-6:
            segments[-1] = Segment(last.start_s, end, last.n, last.b)
        else:
            segments.append(Segment(start, end, int(n), int(b)))
    return segments


def drawn_lanes(timeline: TimelineView, num_timelines: int) -> int:
    """How many sessions, from the first, a timeline draws, so that those of a page leave it small."""
    room = MAX_DRAWN_REQUESTS // num_timelines
    counts = Counter(bar.session for bar in timeline.bars)
    until = list(accumulate(counts[session] for session in range(min(timeline.num_sessions, MAX_LANES))))
    return max(1, sum(total <= room for total in until))


class Frame(NamedTuple):
    """What a page gives a timeline, so that those of one page share their axes.

    name: prefix of its ids. unit: how the page writes seconds of this run. end_s, buckets: end of the time axis and
    marks of the step axis. lanes: sessions that are drawn.
    """

    name: str
    unit: str
    end_s: float
    buckets: Sequence[int]
    lanes: int


def timeline_svg(view: TimelineView, frame: Frame) -> str:
    """The timeline as one inline <svg>."""
    return "".join(_Drawing(view, frame).svg())


class _Drawing:
    """Places on a timeline: lanes from ``top``, and below them steps down to ``bottom``, where the time axis lies."""

    def __init__(self, view: TimelineView, frame: Frame) -> None:
        self.view, self.frame = view, frame
        panels = list(map(step_segments, view.servers))
        self.panels = panels if any(panels) else []
        self.lane_height = next((height for most, height in LANE_HEIGHTS if frame.lanes <= most), 5.0)
        self.top = STALL_HEIGHT + 3.0
        self.lanes_bottom = self.top + frame.lanes * self.lane_height
        self.bottom = self.lanes_bottom + (len(self.panels) * (PANEL_GAP + STEP_PANEL_HEIGHT) or 4)
        self.width = WIDTH - LEFT - RIGHT
        self.scale = self.width / max(frame.end_s, 1e-9)
        most = max((*frame.buckets, *(segment.b for panel in self.panels for segment in panel)), default=1)
        self.position_height = (STEP_PANEL_HEIGHT - 4) / most

    def svg(self) -> Iterator[str]:
        """The whole element, piece by piece."""
        view, frame, height = self.view, self.frame, self.bottom + AXIS_HEIGHT
        label = f"Timeline of run {view.label}: {view.num_sessions} sessions over {view.end_s:.1f} {frame.unit}"
        yield (
            f'<svg role="img" aria-label="{escape(label)}" class="plot timeline" viewBox="0 0 {WIDTH:g} {height:g}" '
            f'style="--c: var(--c{view.color % NUM_CONDITION_COLORS})" data-left="{LEFT:g}" '
            f'data-width="{self.width:g}" data-end="{frame.end_s:.6g}" data-top="{self.top:g}" '
            f'data-bottom="{self.bottom:g}">'
            f'<defs><pattern id="{frame.name}-pad" width="5" height="5" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="5" class="t-hatch"/></pattern></defs>'
        )
        yield from self._time_axis()
        yield from self._lane_labels()
        for replica in range(len(self.panels)):
            yield from self._step_axis(replica)
        # A window of its own, so that a script can zoom time without touching labels.
        yield (
            f'<svg class="t-view" x="{LEFT:g}" y="0" width="{self.width:g}" height="{height:g}" '
            f'viewBox="{LEFT:g} 0 {self.width:g} {height:g}" preserveAspectRatio="none">'
        )
        yield from self._stalls()
        for session, bars in groupby(view.bars, lambda bar: bar.session):
            if session < frame.lanes:
                yield from self._lane(session, bars)
        for replica, segments in enumerate(self.panels):
            yield from self._steps(replica, segments)
        yield (
            f'</svg><line class="t-cursor" y1="{self.top:g}" y2="{self.bottom:g}" x1="-9" x2="-9"/>'
            f'<rect class="t-select" y="{self.top:g}" height="{self.bottom - self.top:g}" x="-9" width="0"/></svg>'
        )

    def _x(self, seconds: float) -> float:
        return LEFT + seconds * self.scale

    def _panel_bottom(self, replica: int) -> float:
        return self.lanes_bottom + (replica + 1) * (PANEL_GAP + STEP_PANEL_HEIGHT)

    def _y(self, positions: int, replica: int) -> float:
        return self._panel_bottom(replica) - positions * self.position_height

    def _time_axis(self) -> Iterator[str]:
        stride_s = nice_stride(self.frame.end_s, 10)
        decimals = max(0, -math.floor(math.log10(stride_s)))
        yield '<g class="t-ticks">'
        for index in range(math.floor(self.frame.end_s / stride_s + 1e-9) + 1):
            x = self._x(index * stride_s)
            yield f'<line class="t-grid" x1="{x:.1f}" x2="{x:.1f}" y1="{self.top:g}" y2="{self.bottom:g}"/>'
            yield _text(x, self.bottom + 13, f"{index * stride_s:.{decimals}f}")
        yield "</g>"
        yield _text(LEFT + self.width / 2, self.bottom + 27, f"time since the start [{self.frame.unit}]", "t-label")

    def _lane_labels(self) -> Iterator[str]:
        lanes = self.frame.lanes
        for session in range(0, lanes, 1 if lanes <= 32 else 4 if lanes <= 64 else 8):
            y = self.top + (session + 0.5) * self.lane_height + 3.2
            yield _text(LEFT - 7, y, str(session), anchor="end")
        yield _upright(self.top + lanes * self.lane_height / 2, "session")

    def _step_axis(self, replica: int) -> Iterator[str]:
        for level in self._readable_buckets():
            y = self._y(level, replica)
            yield f'<line class="t-grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield _text(LEFT - 7, y + 3.2, str(level), anchor="end")
        bottom = self._panel_bottom(replica)
        if len(self.panels) == 1:
            yield _upright(bottom - STEP_PANEL_HEIGHT / 2, "n and bucket")
            return
        yield _upright(bottom - STEP_PANEL_HEIGHT / 2, f"replica {replica}")
        yield _replica_line(replica, LEFT, LEFT + self.width, bottom + 3)

    def _readable_buckets(self) -> list[int]:
        """Zero and those buckets, largest first, whose labels do not run into one another."""
        levels: list[int] = []
        for bucket in sorted(self.frame.buckets, reverse=True):
            above = levels[-1] - bucket if levels else math.inf
            if min(above, bucket) * self.position_height >= TICK_HEIGHT:
                levels.append(bucket)
        return [*levels, 0]

    def _stalls(self) -> Iterator[str]:
        """Marks above the lanes, with a hair-line through them: what happened there may be the machine's doing."""
        for start_s, duration_s in self.view.stalls_s:
            if start_s < self.view.end_s:
                x, width = self._x(start_s), max(1.0, duration_s * self.scale)
                yield f'<line class="t-stall-line" x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{self.bottom:g}"/>'
                yield _rect("t-stall", x, 0, width, STALL_HEIGHT)

    def _lane(self, session: int, bars: Iterable[Bar]) -> Iterator[str]:
        """The requests of a session, with lines for the waits between them."""
        thick, middle = max(3.0, self.lane_height * 0.68), self.top + (session + 0.5) * self.lane_height
        previous_done_s: float | None = None
        for bar in bars:
            if previous_done_s is not None and bar.sent_s is not None:
                x1, x2 = self._x(previous_done_s), self._x(bar.sent_s)
                yield f'<line class="t-wait" x1="{x1:.2f}" x2="{x2:.2f}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
            drawn = "".join(self._request(bar, middle - thick / 2, thick))
            yield f"<g><title>{escape(_describe(bar, self.frame.unit))}</title>{drawn}</g>"
            previous_done_s = bar.done_s if bar.done_s is not None else previous_done_s

    def _request(self, bar: Bar, y: float, thick: float) -> Iterator[str]:
        if bar.replica is not None and bar.sent_s is not None and bar.done_s is not None:
            x0, x2 = self._x(bar.sent_s), self._x(bar.done_s)
            yield _replica_line(bar.replica, x0, x2, y + thick + 1.2)
        if bar.sent_s is None or bar.done_s is None or bar.status not in ("ok", ABORTED):
            x = self._x(bar.due_s if bar.sent_s is None else bar.sent_s)
            yield _rect("t-failed", x, y, 4.0 if bar.done_s is None else max(2.0, self._x(bar.done_s) - x), thick)
            return
        x0, x2 = self._x(bar.sent_s), self._x(bar.done_s)
        x1 = x0 if bar.first_token_s is None else self._x(bar.first_token_s)
        if bar.first_token_s is None and bar.reuse != "first":
            x1 = min(x0 + UNSTREAMED_MARK, x2)
        yield _rect("t-decode", x1, y, x2 - x1, thick)
        if x1 > x0:
            yield _rect(f"t-{bar.reuse}", x0, y, max(0.6, x1 - x0), thick)
        if bar.status == ABORTED:
            # The client left: the answer has no end of its own.
            yield _rect("t-left", x2 - LEFT_MARK, y, LEFT_MARK, thick)

    def _steps(self, replica: int, segments: Sequence[Segment]) -> Iterator[str]:
        """n as an area, padding hatched above it, and the bucket as a line that is at zero where no step ran."""
        real, padded, outline = list[str](), list[str](), list[str]()
        bottom, previous_end_s = f"{self._panel_bottom(replica):g}", -math.inf
        for segment in segments:
            x, width = self._x(segment.start_s), (segment.end_s - segment.start_s) * self.scale
            y_n, y_b = self._y(segment.n, replica), self._y(segment.b, replica)
            real.append(f"M{x:.2f} {bottom}V{y_n:.1f}h{width:.2f}V{bottom}z")
            if segment.b > segment.n:
                padded.append(f"M{x:.2f} {y_n:.1f}V{y_b:.1f}h{width:.2f}V{y_n:.1f}z")
            if segment.start_s - previous_end_s > 1e-6:
                outline.append((f"V{bottom}" if outline else "") + f"M{x:.2f} {bottom}")
            outline.append(f"V{y_b:.1f}H{self._x(segment.end_s):.2f}")
            previous_end_s = segment.end_s
        if not segments:
            return
        yield f'<path class="t-real" d="{"".join(real)}"/>'
        if padded:
            yield f'<path d="{"".join(padded)}" fill="url(#{self.frame.name}-pad)"/>'
        style = "t-bucket dense" if len(segments) > DENSE_SEGMENTS else "t-bucket"
        yield f'<path class="{style}" d="{"".join(outline)}V{bottom}"/>'


def _text(x: float, y: float, text: str, style: str = "t-tick", *, anchor: str = "middle") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _upright(y: float, text: str) -> str:
    """A label of the vertical axis that reads upwards."""
    turned = f'transform="translate(11 {y:.1f}) rotate(-90)"'
    return f'<text class="t-label" text-anchor="middle" {turned}>{text}</text>'


def _replica_line(replica: int, x1: float, x2: float, y: float) -> str:
    """The line of a replica, which the style sheet draws by its number."""
    kind = replica % NUM_REPLICA_LINES
    return f'<line class="t-replica r{kind}" x1="{x1:.2f}" x2="{x2:.2f}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _rect(style: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{style}" x="{x:.2f}" y="{y:.1f}" width="{max(0.0, width):.2f}" height="{height:.1f}"/>'


def nice_stride(span: float, max_ticks: int) -> float:
    """The smallest of 1, 2, 5 x 10^k that divides ``span`` into at most ``max_ticks`` parts."""
    rough = max(span, 1e-9) / max_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))


def _describe(bar: Bar, unit: str) -> str:
    unit = unit.partition(",")[0]
    by = "" if bar.replica is None else f", replica {bar.replica}"
    lines = [f"session {bar.session}, request {bar.request}{by}: {bar.status}"]
    if bar.sent_s is not None:
        lines.append(f"sent {bar.sent_s:.3f} {unit} (due {bar.due_s:.3f})")
    if bar.first_token_s is not None and bar.sent_s is not None:
        lines.append(f"first token after {bar.first_token_s - bar.sent_s:.3f} {unit}")
    if bar.done_s is not None and bar.sent_s is not None:
        lines.append(f"done {bar.done_s:.3f} {unit} (in flight {bar.done_s - bar.sent_s:.3f})")
    if bar.prompt_tokens is not None:
        words = {"cached": ", reused", "partial": ", partly reused", "recomputed": ", recomputed"}.get(bar.reuse, "")
        cached = "reuse not reported" if bar.cached_tokens is None else f"cached {bar.cached_tokens}{words}"
        lines.append(f"prompt {bar.prompt_tokens} tokens, {cached}")
    if bar.completion_tokens is not None:
        lines.append(f"generated {bar.completion_tokens} tokens")
    return "\n".join(lines)
