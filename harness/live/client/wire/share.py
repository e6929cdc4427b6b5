"""What the compiled loop is told before a replay: columns of rows to fill, the texts of a request, clock and spin.

The script stays the owner of all of it. Next: ``replay`` begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.clock import NS_PER_US
from harness.live.client.wire import layout as at

if TYPE_CHECKING:
    from harness.live.client.script import Script
    from harness.live.client.wire.layout import SharedTables


def share_script(script: Script, tables: SharedTables, host_header: str, spin_us: int) -> None:
    """Tell the compiled loop all that stays the same during a replay.

    host_header: value of the Host header. spin_us: the final spin before a send, 0: none.
    """
    rows, reg = script.rows, tables.reg
    for register, column in (
        (at.R_TRIGGER, rows.trigger_ns),
        (at.R_DUE, rows.due_ns),
        (at.R_SENT, rows.sent_ns),
        (at.R_FIRST_BYTE, rows.first_byte_ns),
        (at.R_DONE, rows.done_ns),
    ):
        tables.share(register, np.frombuffer(column, dtype=np.int64))
    tables.share(at.R_HTTP_STATUS, np.frombuffer(rows.http_status, dtype=np.int32))
    tables.row[:, at.Q_IS_CONTINUED] = script.is_continued
    post = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host_header}\r\nContent-Type: application/json\r\n"
        "Accept: */*\r\nX-Request-Id: "
    ).encode()
    body = script.body_texts()
    # Token-id prompts are texts without the brackets of a JSON list.
    opening, closing = (b"[", b"]") if script.needs_token_ids else (b"", b"")
    texts = (
        (at.R_TEXT_POST, post),
        (at.R_TEXT_LENGTH, b"\r\nContent-Length: "),
        (at.R_TEXT_PROMPT, b"\r\n\r\n" + body.before_prompt + opening),
        (at.R_TEXT_TOKENS, closing + body.before_max_tokens),
        (at.R_TEXT_OPTIONS, body.before_request_id),
        (at.R_TEXT_END, body.end),
        (at.R_TEXT_NONCE, script.nonce.encode()),
    )
    for register, text in texts:
        tables.share_text(register, text)
    room_for_numbers = 512
    room = sum(len(text) for _, text in texts) + len(script.nonce) + room_for_numbers
    tables.share(at.R_OUT, tables.memory.table("request texts", room, np.uint8))
    reg[at.R_OUT_BYTES] = room
    reg[at.R_SPIN_NS] = spin_us * NS_PER_US
    reg[at.R_NUMERATOR], reg[at.R_DENOMINATOR] = script.clock.ratio
    reg[at.R_STREAMS], reg[at.R_HAS_TOKEN_IDS] = script.stream, script.needs_token_ids
