"""A server with the manners, good and bad, that the lifecycle tests need. Run as a script; imports the stdlib alone."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOST = "127.0.0.1"


class Handler(BaseHTTPRequestHandler):
    """/health and /metrics at once; /slow never; /die ends the process in the middle of the answer."""

    def do_GET(self) -> None:
        if self.path == "/die":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"half")
            self.wfile.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.path == "/slow":
            threading.Event().wait()
        body = b'requests_total{word="caf\xc3\xa9"} 7\n' if self.path == "/metrics" else b"ok"
        self.send_response(503 if self.path.startswith("/unhealthy") else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        sys.stderr.write(f"{self.path} {code} {size}\n")


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
        assert child.stdout is not None
        child.stdout.readline()
        print(f"child {child.pid}", flush=True)
    with ThreadingHTTPServer((HOST, options.port), Handler) as server:
        server.daemon_threads = True
        server.serve_forever()


if __name__ == "__main__":
    main()
