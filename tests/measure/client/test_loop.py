"""The epoll client against a server: what it sends after an answer that is broken, late, long or unusual."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from harness.measure.client.null_server import NullServer, NullServerConfig
from harness.measure.client.target import Endpoint
from tests.support.replays import plan_of, rows_of, run, session

pytestmark = pytest.mark.live


def test_many_long_answers_at_once_are_all_read() -> None:
    sessions = [session(index, num_requests=2, generate_tokens=900) for index in range(40)]
    with NullServer(NullServerConfig(keeps_stamps=False)) as server:
        result = run(plan_of(*sessions), server)
    rows = rows_of(result)
    assert {(row["status"], row["completion_tokens"]) for row in rows} == {("ok", 900)}
    assert result.chunks.num_rows == 40 * 2 * 900
    assert sum(result.chunks.to_table()["num_tokens"].to_pylist()) == 40 * 2 * 900


def test_a_request_larger_than_the_kernel_takes_at_once_arrives_whole() -> None:
    plan = plan_of(session(0, prompt_tokens=900_000), session(1))
    with NullServer() as server:
        rows = rows_of(run(plan, server))
    assert {row["status"] for row in rows} == {"ok"}
    assert rows[1]["prompt_tokens"] == 900_000 + 6 + 8


def test_an_answer_before_the_request_was_read_is_the_servers_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.measure.client.connection.SEND_BUFFER_BYTES", 4096)
    refusal = b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 5\r\nConnection: close\r\n\r\nlarge"

    def refuse(listener: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            peers = [stack.enter_context(listener.accept()[0]) for _ in range(16)]
            for peer in peers:
                peer.recv(1)
                peer.sendall(refusal)
                # The rest is not read: the client is told that its connection is broken.
                peer.close()

    plan = plan_of(*(session(at, num_requests=1, prompt_tokens=20_000) for at in range(16)))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        server = threading.Thread(target=refuse, args=(listener,))
        server.start()
        rows = rows_of(run(plan, Endpoint("127.0.0.1", listener.getsockname()[1])))
        server.join()
    assert {(row["status"], row["http_status"], row["error"]) for row in rows} == {("http_error", 413, "large")}
