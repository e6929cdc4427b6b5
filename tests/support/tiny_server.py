"""A server with the manners, good and bad, that the lifecycle tests need. Run as a script; imports the stdlib alone."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading

from raw_server import Asked, RawServer, Reply, whole


def answer(asked: Asked) -> Reply:
    """/health and /metrics at once."""
    print(asked.path, file=sys.stderr)
    body = b'requests_total{word="caf\xc3\xa9"} 7\n' if asked.path == "/metrics" else b"ok"
    return Reply([whole(body, status=503 if asked.path.startswith("/unhealthy") else 200)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--child", choices=["same-group", "own-session"])
    parser.add_argument("--fail", type=int, help="say something and exit with this status")
    options = parser.parse_args()
    if options.fail is not None:
        print("loading the model")
        print("ValueError: no such artifact", file=sys.stderr)
        raise SystemExit(options.fail)
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.child:
        # It ignores SIGTERM, as a busy engine process would, and outlives its parent unless somebody ends it.
        code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=options.child == "own-session"
        )
        child.stdout.readline()
        print(f"child {child.pid}", flush=True)
    with RawServer(answer, options.port):
        threading.Event().wait()


if __name__ == "__main__":
    main()
