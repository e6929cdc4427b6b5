"""Why the compiled loop returns to the interpreter: numbers alone, since compiled code can return nothing else.

What an event is about stands in the registers: ``event_fd``, ``event_row`` and ``event_detail``.
Next: ``core`` returns them, ``replay`` knows who answers each.
"""

from __future__ import annotations

(
    GO_ON,
    BEAT,
    SLACK,
    BURST_OVER,
    STAGE,
    REFRESH,
    NOT_READY,
    NO_CONNECTION,
    SEND_FAILED,
    SENT_IN_PART,
    OTHER,
    CLOSED,
    RECEIVE_FAILED,
    OUT_OF_TURN,
    NEW_HEAD,
    FOREIGN,
    TOO_MUCH,
    COMPLETE,
    FULL,
    NO_ROOM,
    LEAVE,
) = range(21)
"""GO_ON: there is nothing to answer. OTHER: epoll tells more than that bytes came. FULL: the ring or the journal.
NO_ROOM: something would have been written outside its table, and was not. LEAVE: the plan has the client leave now."""
