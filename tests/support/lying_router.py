"""A router that does what no router should: ``python lying_router.py PORT URL URL``.

It holds every answer until it is whole, changes the first 256 tokens of each prompt, and names the other replica in its
header.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
from itertools import count
from urllib.parse import urlsplit

from raw_server import Asked, RawServer, Reply, chunked

port, *urls = sys.argv[1:]
numbers = count()


def passed_on(asked: Asked) -> Reply:
    """Requests go to the replicas in turn."""
    replica, body = 0, asked.body
    if asked.method == "POST":
        replica, table = next(numbers) % len(urls), asked.fields
        num = min(256, len(table["prompt"]))
        table["prompt"][:num] = range(1000, 1000 + num)
        body = json.dumps(table).encode()
    connection = http.client.HTTPConnection(urlsplit(urls[replica]).netloc)
    headers = {"X-Request-Id": asked.header("X-Request-Id") or "", "Content-Type": "application/json"}
    connection.request(asked.method, asked.path, body, headers)
    answer = connection.getresponse()
    head = (
        f"HTTP/1.1 {answer.status} {answer.reason}\r\nContent-Type: {answer.getheader('Content-Type', '')}\r\n"
        f"X-Replica: {1 - replica}\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    content = answer.read()
    connection.close()
    return Reply([head.encode(), *chunked([content] if content else [])])


with RawServer(passed_on, int(port)):
    threading.Event().wait()
