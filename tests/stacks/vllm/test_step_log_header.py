"""The header in force of a step log is found from its end, as a reading from its start finds it."""

from __future__ import annotations

import math
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.stacks.vllm.step_log import BLOCK_BYTES, header_before

HEADER, RECORD, ABSENT = b'{"vllm_step_log":1,"columns":["at_ns"],"number":%d}', b"[%d,null]", b'{"absent":["a%d"]}'


def forward(content: bytes, offset: float) -> tuple[bytes, bytes, bytes]:
    """The header, the record and the rest, by reading every line."""
    header, *lines = content.splitlines(keepends=True) or [b""]
    at = len(header)
    for number, line in enumerate(lines):
        if line.startswith(b"{") and b'"columns"' in line:
            header = line
        elif at >= offset:
            return header, line, b"".join(lines[number + 1 :])
        at += len(line)
    return header, b"", b""


@st.composite
def logs(draw: st.DrawFn) -> bytes:
    """Lines of any kind, some as long as a block or longer, the last one cut anywhere."""
    kinds = draw(st.lists(st.sampled_from((RECORD, RECORD, HEADER, ABSENT, b"%d", b' {"columns"%d')), max_size=12))
    pads = st.sampled_from((0, 1, 40, BLOCK_BYTES - 60, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 3))
    lines = [kind % place + b" " * draw(pads) for place, kind in enumerate([HEADER, *kinds])]
    content = b"\n".join(lines) + b"\n"
    return content[: len(content) - draw(st.integers(0, 90))]


@given(content=logs(), share=st.floats(0, 1.1), near=st.integers(-2, 2))
def test_the_header_in_force_is_that_of_a_reading_from_the_start(content: bytes, share: float, near: int) -> None:
    starts = [place + 1 for place, byte in enumerate(content) if byte == 10] or [0]
    places = (math.inf, round(share * len(content)), max(0, starts[round(share * len(starts)) % len(starts)] + near))
    for offset in places:
        file = BytesIO(content)
        assert (*header_before(file, offset), file.read()) == forward(content, offset)


@pytest.mark.parametrize("apart", range(-2, 3))
def test_a_header_at_the_edge_of_a_block_is_found(apart: int) -> None:
    first, second = (HEADER % number + b"\n" for number in (1, 2))
    content = first * 9 + second
    content += b"[7]".ljust(BLOCK_BYTES + apart - len(second) - 1) + b"\n"
    assert header_before(BytesIO(content)) == (second, b"")


def test_of_a_long_log_only_its_end_is_read() -> None:
    class Counted(BytesIO):
        num_read = 0

        def read(self, size: int | None = -1, /) -> bytes:
            made = super().read(size)
            self.num_read += len(made)
            return made

        def readline(self, size: int | None = -1, /) -> bytes:
            made = super().readline(size)
            self.num_read += len(made)
            return made

    record = RECORD % 7 + b"\n"
    old, new = (HEADER % number + b"\n" for number in (1, 2))
    file = Counted(old + record * 1_000_000 + new + record * 10)
    assert header_before(file) == (new, b"")
    assert file.num_read < 2 * BLOCK_BYTES
