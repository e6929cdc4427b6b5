"""A server that is starting is asked again until it is ready, for a limited time."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from harness.cli import doctor
from harness.cli.tree import app
from harness.clock import NS_PER_S
from harness.measure.client.target import endpoint_at
from harness.measure.server.process import free_port
from harness.measure.server.ready import not_ready, wait_until_ready
from tests.support.plain_server import PlainServer, plain_server
from tests.support.processes import VirtualClock

NOBODY = f"http://127.0.0.1:{free_port()}"


def test_a_server_that_says_it_is_not_ready_is_asked_until_it_is() -> None:
    told = list[tuple[str, float]]()
    with plain_server(PlainServer(health=503)) as server:

        def on_wait(why: str, waited_s: float) -> None:
            told.append((why, waited_s))
            server.health = 200 if waited_s >= 2 else 503

        wait_until_ready(endpoint_at(server.url, "", "url"), 60, on_wait, VirtualClock())
    assert told == [("GET /health gives status 503", waited_s) for waited_s in (0, 1, 2)]


def test_nobody_is_waited_for_longer_than_the_limit() -> None:
    told, clock = list[float](), VirtualClock()
    wait_until_ready(endpoint_at(NOBODY, "", "url"), 30, lambda _why, waited_s: told.append(waited_s), clock)
    assert clock.now_ns() == 30 * NS_PER_S
    assert len(told) == 30


def test_without_a_limit_nothing_is_asked() -> None:
    wait_until_ready(endpoint_at(NOBODY, "", "url"), 0, lambda *_: pytest.fail("it was waited for"), VirtualClock())


@pytest.mark.parametrize("health", [200, 404, 500, 501])
def test_what_no_waiting_mends_is_not_waited_for(health: int) -> None:
    with plain_server(PlainServer(health=health)) as server:
        assert not_ready(endpoint_at(server.url, "", "url")) == ""
    assert not_ready(endpoint_at("http://no-such-host.invalid:80", "", "url")) == ""


def test_ctrl_c_says_what_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(VirtualClock):
        def sleep_until_ns(self, deadline_ns: int) -> None:
            super().sleep_until_ns(deadline_ns)
            if self.now_ns() > 5 * NS_PER_S:
                raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "MonotonicClock", Interrupted)
    done = CliRunner().invoke(app, ["doctor", "--url", NOBODY, "--wait", "5m"], env={"COLUMNS": "1000"})
    assert done.exit_code == 130
    first, between, last = (line for line in done.stderr.splitlines() if line.strip())
    assert first.startswith(f"{NOBODY} is not ready (ConnectionRefusedError")
    assert first.endswith("waiting 5 min 00 s at most for it to start")
    assert between.startswith("waited 5 s of 5 min 00 s (ConnectionRefusedError")
    assert between.endswith("it ends when the server answers, or with Ctrl-C")
    assert last.startswith(f"interrupted: waited 5 s for {NOBODY} (ConnectionRefusedError")
