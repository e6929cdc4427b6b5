"""The compiled loop writes inside its tables alone, and a legal answer is carried once, however it is framed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.errors import HarnessError
from harness.live.client.wire.memory import GUARD_BYTES, GuardedMemory
from tests.support.raw_server import CHUNKED_HEAD, Asked, RawServer, Reply, chunked, events, expected_prompts
from tests.support.replays import plan_of, rows_of, run, session


@pytest.mark.live
@pytest.mark.parametrize("client", ["epoll", "aiohttp"])
@pytest.mark.parametrize("extension", [b"", b";sum=1"])
def test_a_legal_trailer_is_understood_and_its_answer_is_carried_once(client: str, extension: bytes) -> None:
    def answer(asked: Asked) -> Reply:
        body = chunked(events(asked), extension=extension, trailer=b"X-Checksum: 17\r\nX-Other: a\r\n")
        return Reply([CHUNKED_HEAD, *body])

    plan = plan_of(session(0, num_requests=6), session(1, num_requests=6))
    with RawServer(answer) as server:
        rows = rows_of(run(plan, server, client))
    assert {row["status"] for row in rows} == {"ok"}, [row["error"] for row in rows]
    asked = sorted(server.asked, key=lambda one: (one.session, one.request))
    generated = {index: [one.ids for one in asked if one.session == index] for index in range(2)}
    assert [one.fields["prompt"] for one in asked] == expected_prompts(plan, generated)


class TestGuards:
    def test_a_table_can_be_filled_to_its_last_byte(self) -> None:
        memory = GuardedMemory()
        table = memory.table("rows", (3, 2), np.int64)
        table[:] = -1
        memory.require_intact()
        memory.give_up("rows")

    @pytest.mark.parametrize("place", [-1, -GUARD_BYTES, 48, 48 + GUARD_BYTES - 1])
    def test_one_byte_beside_it_is_noticed_and_named(self, place: int) -> None:
        memory = GuardedMemory()
        table: Any = memory.table("rows", (3, 2), np.int64)
        # As compiled code does: by address.
        beside = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 1).from_address(table.ctypes.data + place))
        beside[0] ^= 1
        with pytest.raises(HarnessError, match="beside its table of rows"):
            memory.require_intact()
        with pytest.raises(HarnessError, match="beside its table of rows"):
            memory.give_up("rows")
