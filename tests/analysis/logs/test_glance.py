"""A run that is being written shows what its log and its scrapes say so far, however they end."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rich.console import Console

from harness.analysis.logs.glance import Glance, glance
from harness.cli.watch import view
from harness.clock import NS_PER_S
from harness.measure.records import layout

STEP = b"1795324631.046899 17255 INFO vllm_rbln.x [BUCKET] request_nums=3 padded_batch_size=4\n"


def scrape(at_s: int, tokens: int, running: int, waiting: int, done: int, **late_ms: float) -> bytes:
    body = (
        f'vllm:generation_tokens_total{{engine="0"}} {tokens}.0\nvllm:num_requests_running{{engine="0"}} {running}.0\n'
        f'vllm:num_requests_waiting{{engine="0"}} {waiting}.0\n'
        f'vllm:request_success_total{{finished_reason="stop"}} 0.0\n'
        f'vllm:request_success_total{{finished_reason="length"}} {done}.0\n'
    )
    told = {"at_ns": at_s * NS_PER_S, "reason": "interval", "status": 200, "body": body, **late_ms}
    return json.dumps(told).encode() + b"\n"


def test_a_run_is_read_from_the_ends_of_its_files_also_where_a_line_is_cut(tmp_path: Path) -> None:
    assert glance(tmp_path).in_words() == "the server is starting"
    (tmp_path / layout.SCRAPES).write_bytes(scrape(1, 100, 0, 0, 0))
    assert glance(tmp_path).in_words() == "no request has begun"
    (tmp_path / layout.SCRAPES).write_bytes(scrape(1, 100, 0, 0, 0) + scrape(3, 300, 3, 1, 5) + b'{"at_ns": 4')
    (tmp_path / layout.SERVER_LOG).write_bytes(STEP + STEP.replace(b"=3", b"=2") + STEP[:30])
    assert glance(tmp_path) == Glance(2, 4, 5, 3, 1, 100.0)
    assert glance(tmp_path).in_words() == "3 run, 1 wait for a slot, 2 in bucket 4, 100 tokens/s"
    (tmp_path / layout.SCRAPES).write_bytes(scrape(3, 300, 0, 0, 5))
    assert glance(tmp_path).in_words() == "sessions wait for tools"


def test_a_run_says_how_late_its_client_was_so_far(tmp_path: Path) -> None:
    (tmp_path / layout.SCRAPES).write_bytes(scrape(3, 300, 3, 0, 1, start_spread_ms=0.125))
    assert glance(tmp_path).in_words() == "3 run, start spread 0.125 ms"
    (tmp_path / layout.SCRAPES).write_bytes(scrape(4, 400, 3, 0, 5, start_spread_ms=0.125, rearrival_p99_ms=2.5))
    assert glance(tmp_path).in_words() == "3 run, late p99 2.5 ms"
    (tmp_path / layout.SCRAPES).write_bytes(scrape(4, 400, 3, 0, 5, rearrival_p99_ms=0.00182))
    assert glance(tmp_path).in_words() == "3 run, late p99 1.8 us"


def last_row(runs: Path) -> list[str]:
    """The cells of the only row that is watched."""
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(view(runs, 120))
    (row,) = [line for line in captured.get().splitlines() if line.strip().startswith("mine")]
    return re.split(r"\s{2,}", row.strip())


def test_watching_shows_the_run_that_is_being_made(tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "base" / "0.partial"
    folder.mkdir(parents=True)
    (folder / layout.SCRAPES).write_bytes(scrape(1, 100, 2, 0, 7))
    assert last_row(tmp_path) == ["mine", "0", "0", "base/0", "7", "2 run"]
    (folder / layout.SERVER_CONFIG).write_text("{}")
    assert last_row(tmp_path)[-1] == "emulated: 2 run"
