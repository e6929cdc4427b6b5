"""How much memory a long run needs: peak resident bytes of ``harness run``, emulator aside, for two lengths.

A run is a process of its own, from its start over replay and sealing to the end of its tables.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figure import Figure

NUM_SESSIONS = 64
REQUESTS_PER_SESSION = (125, 375)
TIME_SCALE = 20.0
"""Model seconds a second; scraped once a second, as a server is that runs in real time."""
RUN = """
import sys
from benchmarks.figure import resident_bytes
from harness.__main__ import main
try:
    main()
finally:
    print(resident_bytes("VmHWM"), file=sys.stderr)
"""
EXPERIMENT = """\
name = "long-run"
backend = "emulator"
time_scale = {scale}
replicates = 1
base_seed = 1
[workload]
num_sessions = {sessions}
requests_per_session = {requests}
prompt_tokens = {{distribution = "fixed", value = 32}}
generate_tokens = {{distribution = "fixed", value = 4}}
new_tokens = {{distribution = "fixed", value = 2}}
waits = "none"
[server]
max_num_seqs = {sessions}
decode_buckets = [1, 2, 4, 8, 16, 32, 64]
slot_tokens = 8192
[client]
scrape_interval_s = {scale}
[limits]
rearrival_lag_p99_ms = 10000
start_spread_ms = 10000
stall_ms = 10000
stamp_lag_ms = 10000
server_stall_ms = 100000
[[condition]]
name = "a"
"""


def peak_bytes(requests_per_session: int) -> int:
    """Peak resident bytes of one experiment of one run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long-run.toml"
        path.write_text(EXPERIMENT.format(sessions=NUM_SESSIONS, requests=requests_per_session, scale=TIME_SCALE))
        command = [sys.executable, "-c", RUN, "run", str(path), "--runs", folder]
        done = subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return int(done.stderr.split()[-1])


def bench_long_run() -> Iterator[Figure]:
    """Peak memory of two runs, and what each further request of the longer one took."""
    short, long = (NUM_SESSIONS * requests for requests in REQUESTS_PER_SESSION)
    peaks = [peak_bytes(requests) for requests in REQUESTS_PER_SESSION]
    more = (peaks[1] - peaks[0]) / (long - short)
    yield Figure(
        f"a run of {long:,} requests, peak memory",
        f"{peaks[1] / 1e6:.0f} MB",
        "72,000 requests: <= 400 MB",
        f"{peaks[0] / 1e6:.0f} MB for {short:,}; {more / 1e3:.2f} KB more a request (mark: 1 KB)",
    )
