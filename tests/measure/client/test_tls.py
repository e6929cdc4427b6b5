"""The client over TLS: whom it trusts, how long it waits, and what is an answer and what was cut off."""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from harness.clock import NS_PER_S, ScaledClock
from harness.measure.client.exchange import request_head
from harness.measure.client.run import replay_here
from harness.measure.client.target import Endpoint, ReplayResult, Target
from harness.model.spec import ClientSpec
from tests.support.plain_server import PlainServer, plain_server
from tests.support.processes import WITHIN_S
from tests.support.raw_server import CHUNKED_HEAD, CLOSE, Asked, RawServer, Reply, chunked, events
from tests.support.replays import plan_of, rows_of, session
from tests.support.tls import Served, TlsFront, certificate, key_and_certificate, trusting

pytestmark = pytest.mark.live

REQUEST = re.compile(rb"Content-Length: (\d+)\r\n\r\n(.*)", re.DOTALL)
OPEN_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def well(asked: Asked) -> Reply:
    return Reply([CHUNKED_HEAD, *chunked(events(asked))])


def until_closed(asked: Asked) -> Reply:
    """The answer ends with its connection."""
    return Reply([OPEN_HEAD, *events(asked)], CLOSE)


def half(asked: Asked) -> Reply:
    """A chunked answer that lacks its last parts."""
    return Reply([CHUNKED_HEAD, *chunked(events(asked))[:2]], CLOSE)


def replayed(server: Served, host: str = "", num_requests: int = 2) -> ReplayResult:
    endpoint = Endpoint(host or server.host, server.port, is_https=True)
    target = Target(endpoint, "null", ClientSpec(), ScaledClock(1.0), 60 * NS_PER_S)
    plan = plan_of(session(0, num_requests=num_requests))
    return replay_here(plan, target, on_event=None, is_stopped=lambda: False)


@pytest.fixture(autouse=True)
def trusted() -> Generator[None]:
    with trusting(certificate()):
        yield


def first_of(server: Served, host: str = "") -> dict[str, Any]:
    """The row of the first request."""
    return rows_of(replayed(server, host))[0]


@pytest.mark.parametrize("piece_bytes", [0, 1, 5])
@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_records_that_come_in_pieces_are_read_and_have_the_stamp_of_their_last(
    newest: ssl.TLSVersion, piece_bytes: int
) -> None:
    with RawServer(well) as server, TlsFront(server, certificate(), piece_bytes=piece_bytes, newest=newest) as front:
        result = replayed(front)
    assert {row["status"] for row in rows_of(result)} == {"ok"}, rows_of(result)
    assert [asked.ids for asked in server.asked] == [[1000 + 10 * at + token for token in range(6)] for at in (0, 1)]
    for chunk in result.chunks.to_table().to_pylist():
        assert chunk["kernel_ns"] <= chunk["received_ns"]


@pytest.mark.parametrize("closes", [True, False])
def test_an_answer_that_ends_with_its_connection_is_whole_where_tls_says_its_end(closes: bool) -> None:
    with RawServer(until_closed) as server, TlsFront(server, certificate(), closes=closes) as front:
        assert {row["status"] for row in rows_of(replayed(front))} == {"ok"}


@pytest.mark.parametrize("answer", [until_closed, half])
def test_an_answer_without_the_end_of_tls_is_cut_off(answer: Any) -> None:
    with RawServer(answer) as server, trusting(certificate()), TlsFront(server, certificate(), ends=False) as front:
        row = first_of(front)
    assert (row["status"], row["http_status"]) == ("connection", 200)
    assert row["error"] == "cut off by the server, TLS has not ended (in the middle of the answer)"


def at_once(asked: Asked) -> Reply:
    return Reply([b"".join(well(asked).pieces)])


def half_at_once(asked: Asked) -> Reply:
    return Reply([b"".join(half(asked).pieces)])


def test_no_request_follows_on_a_connection_whose_end_came_with_the_answer() -> None:
    with RawServer(at_once) as server, TlsFront(server, certificate(), behind="end") as front:
        assert [(row["status"], row["error"]) for row in rows_of(replayed(front))] == [("ok", "")] * 2


def test_what_came_before_a_broken_record_is_read() -> None:
    with RawServer(half_at_once) as server, TlsFront(server, certificate(), behind="garbage") as front:
        result = replayed(front)
    row = rows_of(result)[0]
    assert (row["status"], row["http_status"]) == ("connection", 200)
    assert row["error"] == "TLS: [SSL: WRONG_VERSION_NUMBER] wrong version number (in the middle of the answer)"
    assert result.chunks.to_table().num_rows == 2


def test_the_name_of_the_host_is_asked_for_and_http_1_1_is_agreed_on() -> None:
    with RawServer(well) as server, TlsFront(server, certificate()) as front:
        # Its first address may be another one, where nothing listens.
        assert first_of(front, "localhost")["status"] == "ok"
        assert set(front.names) == {"localhost"}
        assert first_of(front)["status"] == "ok"
        assert set(front.names) == {"localhost", None}, "an address has no name"
    assert set(front.protocols) == {"http/1.1"}


def test_a_certificate_of_another_host_or_of_nobody_known_is_refused() -> None:
    with RawServer(well) as server:
        elsewhere = certificate("DNS:elsewhere.example")
        with trusting(elsewhere), TlsFront(server, elsewhere) as front:
            assert "certificate verify failed: IP address mismatch" in first_of(front)["error"]
            assert "certificate verify failed: Hostname mismatch" in first_of(front, "localhost")["error"]
        with trusting(elsewhere), TlsFront(server, certificate()) as front:
            row = first_of(front)
    assert row["status"] == "connection"
    assert row["error"].startswith("cannot connect: TLS handshake: [SSL: CERTIFICATE_VERIFY_FAILED]")
    assert row["sent_ns"] is None
    assert server.asked == []


def test_a_server_without_tls_and_one_that_leaves_are_named() -> None:
    with plain_server(PlainServer()) as server:
        port = int(server.url.rpartition(":")[2])
        assert first_of(Endpoint("127.0.0.1", port))["error"].startswith("cannot connect: TLS handshake: [SSL")
    with RawServer(well) as behind, TlsFront(behind, certificate(), leaves=True) as front:
        assert first_of(front)["error"] == "cannot connect: TLS handshake: closed by the server"


def test_a_handshake_without_end_is_a_row_at_the_limit_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.measure.client.connection.CONNECT_TIMEOUT_S", 0.3)
    with RawServer(well) as server, TlsFront(server, certificate(), is_mute=True) as front:
        first, second = rows_of(replayed(front))
    assert (first["status"], second["status"]) == ("timeout", "not_sent")
    assert first["error"] == "no end of the TLS handshake within 0.3 s"
    assert first["sent_ns"] is None, "no time of the request: nothing of it left"


@contextmanager
def tool_server(*options: str) -> Generator[tuple[Served, subprocess.Popen[bytes]]]:
    """OpenSSL's own server, which sends what it is told and takes commands; for one connection."""
    key = str(key_and_certificate(certificate()))
    command = ["openssl", "s_server", "-accept", "127.0.0.1:0", "-naccept", "1", "-cert", key, "-key", key, *options]
    server: Any = Endpoint("127.0.0.1", 0)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        for line in process.stdout:
            if found := re.match(rb"ACCEPT .*:(\d+)", line):
                server = Endpoint("127.0.0.1", int(found[1]))
                break
        try:
            yield server, process
        finally:
            process.kill()


@pytest.mark.parametrize(("version", "command"), [("-tls1_3", b"K\n"), ("-tls1_3", b"k\n"), ("-tls1_2", b"r\n")])
def test_a_server_that_changes_its_keys_in_the_middle_of_an_answer_is_read_on(version: str, command: bytes) -> None:
    rows: list[dict[str, Any]] = []
    with tool_server(version) as (server, process):
        client = threading.Thread(target=lambda: rows.extend(rows_of(replayed(server, num_requests=1))))
        client.start()
        seen = b""
        while (request := REQUEST.search(seen)) is None or len(request[2]) < int(request[1]):
            seen += os.read(process.stdout.fileno(), 65_536)
        asked = Asked(b"", request[2][: int(request[1])])
        head, first, *rest = [CHUNKED_HEAD, *chunked(events(asked))]
        for part in (head + first, command, b"".join(rest)):
            process.stdin.write(part)
            process.stdin.flush()
            threading.Event().wait(0.3)
        client.join(WITHIN_S)
    assert [row["status"] for row in rows] == ["ok"], rows


def test_the_head_of_a_request_names_host_and_sender_as_other_clients_do() -> None:
    head = request_head(Endpoint("api.example", 443, is_https=True), "/v1/completions")
    assert "Host: api.example\r\n" in head
    assert "User-Agent: rbln-harness\r\n" in head
    assert "Host: [::1]:8000\r\n" in request_head(Endpoint("::1", 8000), "/")
    assert "User-Agent" not in request_head(Endpoint("h", 80), "/", ["user-agent"]), "it has one of its own"
