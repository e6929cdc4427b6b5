"""What the compiled loop is told before a replay: columns of rows to fill, the texts of a request, clock and spin.

The script stays the owner of all of it. Next: ``replay`` begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.clock import NS_PER_US
from harness.live.client.wire.layout import (
    TEXT_END,
    TEXT_LENGTH,
    TEXT_NONCE,
    TEXT_OPTIONS,
    TEXT_POST,
    TEXT_PROMPT,
    TEXT_TOKENS,
)

if TYPE_CHECKING:
    from harness.live.client.script import Script
    from harness.live.client.wire.tables import SharedTables


def share_script(script: Script, tables: SharedTables, host_header: str, spin_us: int) -> None:
    """Tell the compiled loop all that stays the same during a replay.

    host_header: value of the Host header. spin_us: the final spin before a send, 0: none.
    """
    rows, reg = script.rows, tables.reg
    reg.trigger_at, reg.due_at, reg.sent_at, reg.first_byte_at, reg.done_at = (
        tables.keep(np.frombuffer(column, dtype=np.int64))
        for column in (rows.trigger_ns, rows.due_ns, rows.sent_ns, rows.first_byte_ns, rows.done_ns)
    )
    reg.http_status_at = tables.keep(np.frombuffer(rows.http_status, dtype=np.int32))
    tables.request_columns["is_continued"][:] = script.is_continued
    tables.request_columns["abort_ns"][:] = [script.clock.to_monotonic_ns(ns) for ns in script.abort_after_ns]
    post = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host_header}\r\nContent-Type: application/json\r\n"
        "Accept: */*\r\nX-Request-Id: "
    ).encode()
    body = script.body_texts()
    # Token-id prompts are texts without the brackets of a JSON list.
    opening, closing = (b"[", b"]") if script.needs_token_ids else (b"", b"")
    texts = (
        (TEXT_POST, post),
        (TEXT_LENGTH, b"\r\nContent-Length: "),
        (TEXT_PROMPT, b"\r\n\r\n" + body.before_prompt + opening),
        (TEXT_TOKENS, closing + body.before_max_tokens),
        (TEXT_OPTIONS, body.before_request_id),
        (TEXT_END, body.end),
        (TEXT_NONCE, script.nonce.encode()),
    )
    for place, text in texts:
        tables.share_text(place, text)
    room_for_numbers = 512
    room = sum(len(text) for _, text in texts) + len(script.nonce) + room_for_numbers
    reg.out_at, reg.out_bytes = tables.keep(tables.memory.table("request texts", room, np.uint8)), room
    reg.spin_ns = spin_us * NS_PER_US
    reg.clock_numerator, reg.clock_denominator = script.clock.ratio
    reg.is_streamed, reg.has_token_ids = script.stream, script.needs_token_ids
