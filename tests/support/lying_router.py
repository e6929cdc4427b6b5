"""A router that does what no router should: ``python lying_router.py PORT URL URL``.

It holds every answer until it is whole, changes the first 256 tokens of each prompt, and names the other replica in its
header.
"""

from __future__ import annotations

import http.client
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import ClassVar
from urllib.parse import urlsplit


class Lying(BaseHTTPRequestHandler):
    """Requests go to the replicas in turn."""

    protocol_version = "HTTP/1.1"
    urls: ClassVar[list[str]] = []
    numbers = count()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as in the library
        """Nothing."""

    def do_GET(self) -> None:
        self._pass_on(b"", 0)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        table = json.loads(body)
        num = min(256, len(table["prompt"]))
        table["prompt"][:num] = range(1000, 1000 + num)
        self._pass_on(json.dumps(table).encode(), next(self.numbers) % len(self.urls))

    def _pass_on(self, body: bytes, replica: int) -> None:
        connection = http.client.HTTPConnection(urlsplit(self.urls[replica]).netloc)
        headers = {"X-Request-Id": self.headers.get("X-Request-Id", ""), "Content-Type": "application/json"}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        self.send_response(answer.status)
        for name, text in (("Content-Type", answer.getheader("Content-Type", "")), ("X-Replica", str(1 - replica))):
            self.send_header(name, text)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in iter(lambda: answer.read(1 << 30), b""):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")
        connection.close()


if __name__ == "__main__":
    port, *Lying.urls = sys.argv[1:]
    ThreadingHTTPServer(("127.0.0.1", int(port)), Lying).serve_forever()
