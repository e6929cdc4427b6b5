"""The replay client measured against a server that stamps everything: lags, spreads, stamp errors, rates, CPU.

`python -m benchmarks.client [--quick]`. Every figure is a median over repetitions with its range, and nothing here
judges.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import select
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.figure import Figure, Measured
from benchmarks.memory import replay_growth_bytes, require_answered
from benchmarks.peers import Peer, example, parse_peer, peer_spread_ms
from harness.clock import NS_PER_MS, NS_PER_S, NS_PER_US, monotonic_ns, process_cpu_ns
from harness.measure.client.null_server import NullServer, NullServerConfig
from harness.measure.client.run import ReplayResult, replay
from harness.measure.client.self_audit import FloatArray, compare_with_server, null_target
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.spec import ClientSpec
from tests.support.tls import tls_process

# The client of the harness, "bare", "C", or a peer's own name.
Column = str
CLIENT: Column = "epoll"
FLOOR_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_NS = 60 * NS_PER_S
CHUNK_INTERVAL_NS = NS_PER_S // 80
BYTES_PER_MB = 1_000_000


class Quantity(NamedTuple):
    """One row of the table: what, in which unit, and the goal on two shared cores."""

    name: str
    unit: str
    goal: str


@dataclass(slots=True)
class Bench:
    """Figures by (quantity, client), one value per repetition."""

    server_command: list[str] | None
    floor_command: list[str] | None = None
    is_quick: bool = False
    repetitions: int = 3
    figures: dict[Quantity, dict[Column, list[float]]] = field(
        default_factory=dict[Quantity, dict[Column, list[float]]]
    )

    def note(self, client: Column, quantity: Quantity, value: float) -> None:
        """Keep one repetition's figure."""
        self.figures.setdefault(quantity, {}).setdefault(client, []).append(value)

    def run(
        self,
        plan: Plan,
        options: ClientSpec,
        *,
        token_interval_ns: int = 0,
        sees: bool = True,
    ) -> tuple[ReplayResult, dict[str, FloatArray]]:
        """One replay against a fresh null server; without ``sees`` its stamps are not fetched."""
        config = NullServerConfig(token_interval_ns=token_interval_ns, keeps_stamps=sees)
        with NullServer(config, self.server_command) as server:
            target = null_target(server.host, server.port, options, request_timeout_ns=REQUEST_TIMEOUT_NS)
            result = replay(plan, target)
            seen = server.stamps() if sees else {}
        require_answered(result)
        return result, compare_with_server(result, seen) if sees else {}


class Shape(NamedTuple):
    """How large a plan of equal sessions is. num_requests: of each session. prompt_tokens: of each first request."""

    num_sessions: int
    num_requests: int
    prompt_tokens: int
    generate_tokens: int


def plan_of(
    shape: Shape,
    *,
    wait_ns: Callable[[int, int], int] = lambda _session, _request: 0,
    start_offset_ns: Callable[[int], int] = lambda _session: 0,
    keeps: bool = True,
) -> Plan:
    """A plan of equal sessions. ``keeps``: re-arrivals carry their stream on, else every prompt is fresh and short."""
    sessions: list[SessionPlan] = []
    for index in range(shape.num_sessions):
        requests: list[RequestPlan] = []
        keep = 0
        for place in range(shape.num_requests):
            new = shape.prompt_tokens if place == 0 or not keeps else 8
            requests.append(RequestPlan(keep, new, shape.generate_tokens, wait_ns(index, place)))
            keep = keep + new + shape.generate_tokens if keeps else 0
        sessions.append(SessionPlan(index, start_offset_ns(index), None, None, tuple(requests)))
    return Plan("bench", 1, 0, "as-drawn", 0, (1000, 150_000), tuple(sessions))


def rearrival_plan(*, is_quick: bool) -> Plan:
    """16 sessions whose waits never coincide."""
    return plan_of(
        Shape(16, 4 if is_quick else 12, 1000, 8),
        wait_ns=lambda session, request: (30 + (session * 7 + request * 11) % 37) * NS_PER_MS + session * 61_000,
    )


def bench_rearrival(bench: Bench) -> None:
    """Lag of a re-arrival as the server sees it, 16 sessions of streamed answers; and of a client in C, beside it."""
    plan = rearrival_plan(is_quick=bench.is_quick)
    _, figures = bench.run(plan, ClientSpec(), token_interval_ns=5 * NS_PER_MS)
    _note_rearrival(bench, CLIENT, figures["rearrival_lag_at_server_ns"])
    if bench.floor_command is not None:
        _note_rearrival(bench, "C", floor_rearrival(bench, plan))


def bench_zero_wait(bench: Bench) -> None:
    """Sent minus completion of the previous request where the plan has no waits: what the client itself needs."""
    plan = plan_of(Shape(6, 4 if bench.is_quick else 12, 2000, 128))
    result, _ = bench.run(plan, ClientSpec(), token_interval_ns=2 * NS_PER_MS)
    rows = [row for row in result.requests.to_pylist() if row["request"]]
    lag_us = np.asarray([row["sent_ns"] - row["due_ns"] for row in rows], dtype=np.float64) / NS_PER_US
    label = "re-arrival without a wait, N=6, 128 streamed tokens"
    bench.note(CLIENT, Quantity(f"{label}, p50", "us", "<= 120"), float(np.median(lag_us)))
    bench.note(CLIENT, Quantity(f"{label}, p99", "us", ""), float(np.percentile(lag_us, 99)))


def _note_rearrival(bench: Bench, client: Column, lag_ns: FloatArray) -> None:
    median, high = (float(value) / NS_PER_US for value in np.percentile(lag_ns, (50, 99)))
    bench.note(client, Quantity("dispatch delay after a tool wait at the server, N=16, p50", "us", "<= 3 x C"), median)
    bench.note(client, Quantity("dispatch delay after a tool wait at the server, N=16, p99", "us", ""), high)


def floor_rearrival(bench: Bench, plan: Plan) -> FloatArray:
    """The same lag, ns, of the C client with the same sessions and waits."""
    assert bench.floor_command is not None
    first = plan.sessions[0].requests
    waits = [request.wait_after_ns for session in plan.sessions for request in session.requests]
    with NullServer(NullServerConfig(token_interval_ns=5 * NS_PER_MS), bench.server_command) as server:
        shape = (server.port, plan.num_sessions, len(first), first[0].prompt_tokens, first[0].generate_tokens)
        text = " ".join(map(str, (*shape, *waits)))
        subprocess.run(bench.floor_command, input=text.encode(), check=True, timeout=FLOOR_TIMEOUT_S)
        seen = server.stamps()
    lags: list[int] = []
    for session in plan.sessions:
        for request, (before, after) in enumerate(pairwise_stamps(seen, session.index, len(session.requests))):
            wait_ns = session.requests[request].wait_after_ns
            lags.append(after["kernel_ns"] - before["chunk_ns"][-1] - wait_ns)
    return np.asarray(lags, dtype=np.float64)


def pairwise_stamps(
    seen: dict[str, dict[str, Any]], session: int, num_requests: int
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The server's stamps of each request of a C client's session with those of the next one."""
    stamps = [seen[f"c-{session}-{request}"] for request in range(num_requests)]
    return [(stamps[place], stamps[place + 1]) for place in range(num_requests - 1)]


def bench_start(bench: Bench) -> None:
    """Latest minus earliest first send, prompts of 1,000 ids."""
    for num_sessions, goal in ((8, "<= 0.5"), (64, "<= 3"), (1000, "<= 60")):
        plan = plan_of(Shape(num_sessions, 1, 1000, 1))
        _, figures = bench.run(plan, ClientSpec())
        spread_ms = float(figures["start_spread_at_server_ns"][0]) / NS_PER_MS
        bench.note(CLIENT, Quantity(f"start spread at the server, N={num_sessions}", "ms", goal), spread_ms)


def bench_chunks(bench: Bench) -> None:
    """Stamp error of chunks, and CPU, at 64 streams x 80 tokens/s."""
    plan = plan_of(Shape(64, 1, 200, 80 if bench.is_quick else 240))
    result, figures = bench.run(plan, ClientSpec(), token_interval_ns=CHUNK_INTERVAL_NS)
    user_us, best_us = (figures[f"chunk_{stamp}_error_ns"] / NS_PER_US for stamp in ("user", "kernel"))
    rate = "64 x 80/s"
    bench.note(CLIENT, Quantity(f"chunk stamp error, {rate}, p50", "us", "<= 20"), float(np.median(best_us)))
    bench.note(CLIENT, Quantity(f"chunk stamp error, {rate}, p99", "us", "<= 200"), float(np.percentile(best_us, 99)))
    bench.note(CLIENT, Quantity(f"chunk user stamp error, {rate}, p50", "us", ""), float(np.median(user_us)))
    cpu_s = result.audit["cpu_s"] * 10_000 / result.chunks.num_rows
    bench.note(CLIENT, Quantity("CPU per 10,000 chunks", "s", "<= 0.4"), cpu_s)


def bench_https(bench: Bench) -> None:
    """CPU at 64 streams x 80 tokens/s over TLS, which another process takes off before the server."""
    plan = plan_of(Shape(64, 1, 200, 80 if bench.is_quick else 240))
    config = NullServerConfig(token_interval_ns=CHUNK_INTERVAL_NS, keeps_stamps=False)
    with NullServer(config, bench.server_command) as server, tls_process(server) as front:
        target = null_target(front.host, front.port, ClientSpec(), request_timeout_ns=REQUEST_TIMEOUT_NS)
        result = replay(plan, replace(target, endpoint=replace(target.endpoint, is_https=True)))
    require_answered(result)
    bench.note(
        CLIENT,
        Quantity("CPU per 10,000 chunks, https", "s", ""),
        result.audit["cpu_s"] * 10_000 / result.chunks.num_rows,
    )


def bench_memory(bench: Bench) -> None:
    """What 1,000 streaming sessions of 240 chunks add to the memory of a client process."""
    num_sessions, num_chunks = (50, 24) if bench.is_quick else (1_000, 240)
    plan = plan_of(Shape(num_sessions, 1, 200, num_chunks))
    small = plan_of(Shape(2, 1, 200, 2))
    config = NullServerConfig(token_interval_ns=5 * CHUNK_INTERVAL_NS, keeps_stamps=False)
    with NullServer(config, bench.server_command) as server:
        growth_bytes = replay_growth_bytes(small, plan, server.host, server.port)
    label = f"memory growth, prompts included, N={num_sessions}, {num_chunks} chunks each"
    bench.note(CLIENT, Quantity(label, "MB", "<= 100"), growth_bytes / BYTES_PER_MB)


def bench_dispatch(bench: Bench) -> None:
    """Sent minus due, with dues scattered at random: 64 sessions with the spin, 1,000 without."""
    span_ns = (1 if bench.is_quick else 3) * NS_PER_S
    for num_sessions, spin_us, goals in ((64, 300, ("<= 50", "<= 300")), (1000, 0, ("", "<= 3,000"))):
        offsets = np.random.default_rng(num_sessions).integers(50 * NS_PER_MS, span_ns, num_sessions)
        waits = np.random.default_rng(2).integers(20 * NS_PER_MS, 200 * NS_PER_MS, (num_sessions, 4))
        plan = plan_of(
            Shape(num_sessions, 4 if num_sessions == 64 else 1, 1000, 2),
            start_offset_ns=lambda session, offsets=offsets: int(offsets[session]),
            wait_ns=lambda session, request, waits=waits: int(waits[session, request]),
        )
        result, figures = bench.run(plan, ClientSpec(spin_us=spin_us))
        lag_us = figures["dispatch_lag_ns"] / NS_PER_US
        label = f"dispatch lag, N={num_sessions}, spin {spin_us} us"
        bench.note(CLIENT, Quantity(f"{label}, p50", "us", goals[0]), float(np.median(lag_us)))
        bench.note(CLIENT, Quantity(f"{label}, p99", "us", goals[1]), float(np.percentile(lag_us, 99)))
        bench.note(CLIENT, Quantity("early sends", "", "0"), result.audit["num_early_sends"])


def bench_rate(bench: Bench) -> None:
    """Requests per second and CPU at concurrency 64, non-streaming, without waits, with full records."""
    plan = plan_of(Shape(64, 40 if bench.is_quick else 600, 8, 4), keeps=False)
    result, _ = bench.run(plan, ClientSpec(stream=False), sees=False)
    # The client reads answers behind its loop: its time ends when the last row is written.
    wall_s = result.audit["replay_wall_ns"] / NS_PER_S
    count = result.requests.num_rows
    bench.note(CLIENT, Quantity("requests/s, concurrency 64", "1/s", ">= 8,000"), count / wall_s)
    cpu_s = result.audit["cpu_s"] * 10_000 / count
    bench.note(CLIENT, Quantity("CPU per 10,000 requests, saturated", "s", ""), cpu_s)
    rate, cpu_s = bare_loop(bench, 64, count)
    bench.note("bare", Quantity("requests/s, concurrency 64", "1/s", ">= 8,000"), rate)
    bench.note("bare", Quantity("CPU per 10,000 requests, saturated", "s", ""), cpu_s)


def bare_loop(bench: Bench, num_connections: int, count: int) -> tuple[float, float]:
    """Requests per second, and CPU seconds per 10,000, of a loop that sends one fixed request and ignores the answers:
    what Python's own epoll, recv and send cost before anything is prepared, checked or recorded.
    """
    body = b'{"model":"null","prompt":[1,2,3,4,5,6,7,8],"max_tokens":4,"request_id":"bare-0-0","stream":false}'
    request = b"POST /v1/completions HTTP/1.1\r\nHost: null\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with (
        NullServer(NullServerConfig(keeps_stamps=False), bench.server_command) as server,
        contextlib.ExitStack() as stack,
        select.epoll() as epoll,
    ):
        peers: dict[int, socket.socket] = {}
        for _ in range(num_connections):
            peer = stack.enter_context(socket.create_connection((server.host, server.port)))
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            epoll.register(peer, select.EPOLLIN)
            peers[peer.fileno()] = peer
        began_ns, began_cpu_ns = monotonic_ns(), process_cpu_ns()
        for peer in peers.values():
            peer.send(request)
        left = count
        while left > 0:
            for fd, _ in epoll.poll():
                peers[fd].recv(65_536)
                peers[fd].send(request)
                left -= 1
        wall_s, cpu_s = (monotonic_ns() - began_ns) / NS_PER_S, (process_cpu_ns() - began_cpu_ns) / NS_PER_S
    return count / wall_s, cpu_s * 10_000 / count


def bench_processes(bench: Bench) -> None:
    """The common start of very many sessions, by one client process and by two."""
    if bench.server_command is None:
        return
    for num_sessions in (1000,) if bench.is_quick else (1000, 5000):
        plan = plan_of(Shape(num_sessions, 1, 200, 1))
        for processes in (1, 2):
            result, figures = bench.run(plan, ClientSpec(processes=processes))
            label = f"N={num_sessions}, short prompts, {processes} client process{'es' if processes > 1 else ''}"
            spread_ms = float(figures["start_spread_at_server_ns"][0]) / NS_PER_MS
            bench.note(CLIENT, Quantity(f"start spread, {label}", "ms", ""), spread_ms)
            bench.note(CLIENT, Quantity("early sends", "", "0"), result.audit["num_early_sends"])


SCENARIOS = (
    bench_dispatch,
    bench_rearrival,
    bench_start,
    bench_processes,
    bench_zero_wait,
    bench_chunks,
    bench_https,
    bench_rate,
    bench_memory,
)


def bench_peers(bench: Bench, peers: Sequence[Peer]) -> None:
    """The common start of 64 requests by other load generators."""
    for peer in peers:
        spread_ms = peer_spread_ms(peer, bench.server_command)
        bench.note(peer.name, Quantity("start spread at the server, N=64", "ms", "<= 3"), spread_ms)


@contextlib.contextmanager
def c_programs() -> Generator[dict[str, list[str]]]:
    """Commands of the C null server and the C client, built for the life of the block; empty without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    with tempfile.TemporaryDirectory(prefix="harness-bench-") as folder:
        commands: dict[str, list[str]] = {}
        for name in ("nullserver", "floorclient") if compiler else ():
            source, binary = Path(__file__).with_name(f"{name}.c"), Path(folder) / name
            build = subprocess.run([str(compiler), "-O2", "-o", str(binary), str(source)], check=False)
            if build.returncode == 0:
                commands[name] = [str(binary)]
        yield commands


def run_bench(
    *,
    is_quick: bool = False,
    peers: Sequence[Peer] = (),
    on_step: Callable[[str], None] | None = None,
) -> Bench:
    """All scenarios, the client and peers taking turns within every repetition."""
    with c_programs() as commands:
        bench = Bench(commands.get("nullserver"), commands.get("floorclient"), is_quick)
        for repetition in range(bench.repetitions):
            for scenario in SCENARIOS:
                if on_step is not None:
                    on_step(f"{repetition + 1}/{bench.repetitions} {scenario.__name__}")
                scenario(bench)
            if peers and on_step is not None:
                on_step(f"{repetition + 1}/{bench.repetitions} {', '.join(peer.name for peer in peers)}")
            bench_peers(bench, peers)
        return bench


def columns_of(bench: Bench) -> tuple[Column, ...]:
    """The client, then what was measured beside it."""
    seen = dict.fromkeys(column for by_client in bench.figures.values() for column in by_client)
    first = [CLIENT, *(column for column in ("bare", "C") if column in seen)]
    return (*first, *(column for column in seen if column not in first))


def title_of(bench: Bench) -> str:
    """What was measured against what."""
    server = "nullserver.c" if bench.server_command else "nullserver.py (no C compiler: slower than the client)"
    return f"Replay client against {server}; median of {bench.repetitions} and range"


def caption_of() -> str:
    """Where, beside how much else, and what the columns mean."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    machine = f"{os.cpu_count()} cores, load {load}, Python {platform.python_version()}, {platform.release()}"
    return f"bare: a Python loop that only sends and receives; C: a client in C. {machine}"


def figures_of(bench: Bench) -> list[Figure]:
    """Every quantity of the client beside its reference of the same repetitions: the same in C, or the bare loop."""
    figures: list[Figure] = []
    for quantity, by_client in bench.figures.items():
        samples = by_client.get(CLIENT, [])
        beside = next((column for column in ("C", "bare") if column in by_client), None)
        if not samples:
            continue
        other = by_client[beside] if beside else []
        is_measured = len(samples) == len(other) and min((*samples, *other), default=0) > 0
        better = "more" if quantity.unit == "1/s" else "less"
        measured = Measured(tuple(samples), tuple(other), str(beside), better) if is_measured else None
        figures.append(Figure(quantity.name, f"{_cell(samples)} {quantity.unit}", quantity.goal, "", measured))
    return figures


def to_table(bench: Bench) -> Table:
    """Median and range of every quantity, beside its goal."""
    table = Table(title=title_of(bench), caption=caption_of())
    columns = columns_of(bench)
    for name in ("quantity", "unit", "goal, 2 shared cores"):
        table.add_column(name)
    for client in columns:
        table.add_column(client, justify="right")
    table.add_column(f"{CLIENT}: times as good as")
    ratios = {figure.name: figure.measured for figure in figures_of(bench)}
    for quantity, by_client in bench.figures.items():
        ratio = str(ratios.get(quantity.name) or "-").replace(" times as good as", "")
        table.add_row(*quantity, *(_cell(by_client.get(client, [])) for client in columns), ratio)
    return table


def to_markdown(bench: Bench) -> str:
    """The same table for a document."""
    columns = columns_of(bench)
    lines = [f"{title_of(bench)}. {caption_of()}.", "", f"| quantity | unit | goal | {' | '.join(columns)} |"]
    lines.append("|---|---|---|" + "--:|" * len(columns))
    for quantity, by_client in bench.figures.items():
        cells = [_cell(by_client.get(client, [])) for client in columns]
        lines.append(f"| {' | '.join((*quantity, *cells))} |")
    return "\n".join(lines)


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{_number(statistics.median(values))} [{_number(min(values))} .. {_number(max(values))}]"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Run, print, and return the client's figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.client", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter scenarios, as many repetitions")
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown, for a document")
    parser.add_argument("--peer", action="append", default=[], help=f"NAME=COMMAND of another client. {example()}")
    options = parser.parse_args(arguments)
    peers = [parse_peer(text) for text in options.peer]
    note = Console(stderr=True)
    bench = run_bench(is_quick=options.quick, peers=peers, on_step=lambda step: note.print(f"[dim]{step}[/dim]"))
    if options.markdown:
        print(to_markdown(bench))
    else:
        Console(width=None if sys.stdout.isatty() else 180).print(to_table(bench))
    return figures_of(bench)


if __name__ == "__main__":
    main()
