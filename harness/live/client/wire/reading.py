"""What an answer says, read by proven parsers from the receives that the compiled loop has stamped and kept.

The HTTP parser decides where an unusual answer ends, and checks where the loop said that a chunked one did. No socket
and no clock here. Next: ``replay`` hands finished readings to ``script``.
"""

from __future__ import annotations

from collections.abc import Sequence

import httptools

from harness.live.client.answer import MAX_ERROR_BYTES, NO_KERNEL_STAMP, Answer, Piece
from harness.live.client.wire.heads import HEAD_END
from harness.live.client.wire.layout import MODE_CHUNKED, MODE_COUNTED, MODE_FOREIGN

MIN_FINAL_STATUS = 200
MAX_HEAD_BYTES = 64 << 10
FRAMING_HEADERS = (b"content-length", b"transfer-encoding")
# Receives of one answer that are interpreted together: about 30 us of work.
MAX_WAITING = 8


def ids_text(token_ids: Sequence[int]) -> bytes:
    """Token ids as they stand in a prompt."""
    return ",".join(map(str, token_ids)).encode()


def hold_to(answer: Answer, ids: bytes) -> None:
    """A problem of the answer, when it says other ids than those that the loop read and went on with."""
    if not answer.problem and ids != ids_text(answer.token_ids):
        answer.problem = "token ids read on the wire differ from those of the parsed answer"


class Reading:
    """One answer on its way. ``status`` is 0 until the head is known, ``problem`` empty while it is HTTP."""

    __slots__ = (
        "_body",
        "_has_framing",
        "_head_bytes",
        "_is_counted",
        "_is_head_complete",
        "_last",
        "_mode",
        "_num_events",
        "_parser",
        "_pieces",
        "answer",
        "error_body",
        "is_kept_alive",
        "is_over",
        "problem",
        "status",
    )

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.status = 0
        self.problem = ""
        self.error_body = b""
        self.is_over = self.is_kept_alive = False
        self._body: list[bytes] = []
        # Of all heads: an interim answer has one too.
        self._head_bytes = 0
        self._has_framing = self._is_counted = self._is_head_complete = False
        self._last: Piece | None = None
        self._pieces: list[Piece] = []
        self._num_events: list[int] = []
        self._mode = MODE_FOREIGN
        self._parser: httptools.HttpResponseParser | None = None

    # -- called by httptools -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.is_over:
            self.problem = self.problem or "not HTTP: more bytes than the answer's end allows"
        self._has_framing = False

    def on_header(self, name: bytes, _value: bytes) -> None:
        self._has_framing = self._has_framing or name.lower() in FRAMING_HEADERS

    def on_headers_complete(self) -> None:
        self._is_head_complete = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._parser.get_status_code() >= MIN_FINAL_STATUS:
            self.is_over = True
            # To be asked here: the parser forgets the message's framing right after this call.
            self.is_kept_alive = self._parser.should_keep_alive()
        else:  # an interim answer (100 Continue): the real one follows
            self._is_head_complete = False

    # -- called by the replay ----------------------------------------------------------------------------------

    def take(self, received_ns: int, kernel_ns: int, data: bytes, mode: int, num_events: int) -> bool:
        """Keep the next receive; True when it is time to interpret.

        mode: how the loop follows the answer; num_events: events of a stream that ended in it.
        """
        pieces = self._pieces
        pieces.append((received_ns, kernel_ns, data))
        self._num_events.append(num_events)
        self._mode = mode
        return len(pieces) >= MAX_WAITING

    def interpret(self, status: int) -> None:
        """Read what was kept; ``status``: what a known head says, where the loop follows the answer."""
        pieces = self._pieces
        if not pieces:
            return
        if self._mode == MODE_COUNTED:
            for received_ns, kernel_ns, data in pieces:
                if not self._is_counted:
                    self._is_counted, self.status = True, status
                    data = data[data.find(HEAD_END) + len(HEAD_END) :]
                self._take_body((received_ns, kernel_ns, data))
        elif self._mode == MODE_CHUNKED:
            # The loop has seen where the events end, so that all can be read in one go.
            body = self._parse(b"".join([data for _, _, data in pieces]))
            stamps = [
                (at_ns, kernel_ns, count) for (at_ns, kernel_ns, _), count in zip(pieces, self._num_events, strict=True)
            ]
            self._last = pieces[-1]
            self.answer.feed_many(body, stamps)
        else:
            for received_ns, kernel_ns, data in pieces:
                self._take_body((received_ns, kernel_ns, self._parse(data)))
        pieces.clear()
        self._num_events.clear()

    def _parse(self, data: bytes) -> bytes:
        """Let the HTTP parser see the next bytes; those of the body among them."""
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        if not self._is_head_complete:
            self._head_bytes += len(data)
        try:
            if not self.problem:
                self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.problem = self.problem or f"not HTTP: {error}"
        except httptools.HttpParserUpgrade:
            self.problem = self.problem or "not HTTP: the server changes to another protocol"
        if not self._is_head_complete and self._head_bytes > MAX_HEAD_BYTES:
            self.problem = self.problem or "not HTTP: a head without an end"
        if self._is_head_complete and not self.status:
            self.status = self._parser.get_status_code()
        body = b"".join(self._body)
        self._body.clear()
        return body

    def _take_body(self, piece: Piece) -> None:
        if not piece[2]:
            return
        if self.status == 200:
            self._last = piece
            self.answer.feed(piece)
        else:
            self.error_body += piece[2][: MAX_ERROR_BYTES - len(self.error_body)]

    def close(self, first_byte_ns: int, status: int) -> Answer:
        """The whole answer, once it is complete, with what speaks against it in ``answer.problem``."""
        self.interpret(status)
        answer = self.answer
        answer.close(self._last or (first_byte_ns, NO_KERNEL_STAMP, b""))
        if self._parser is not None and not self.is_over and not self.ends_at_close():
            self.problem = self.problem or "not HTTP: the parser sees no end of the answer"
        answer.problem = answer.problem or self.problem
        # Its callbacks refer back to this object, and nothing collects cycles during a run.
        self._parser = None
        return answer

    def abandon(self) -> None:
        """The answer will never be complete."""
        self._parser = None

    def ends_at_close(self) -> bool:
        """True when the end of the connection is what marks the answer's end."""
        return self._is_head_complete and not self._is_counted and not self._has_framing

    @property
    def has_head(self) -> bool:
        """True once the whole head of the answer has come."""
        return self._is_counted or self._is_head_complete
