"""Who holds which KV slots, followed line by line: a line that cannot follow from those before shows that one is lost.

Nothing is repaired: after such a line the log is followed as it stands.
"""

from __future__ import annotations

from harness.stacks.rbln.rules import log_grammar as ev
from harness.stacks.rbln.rules.log_grammar import LogEvent


class SlotWalk:
    """Follows a log. num_contradictions: lines that the lines before rule out; first: the first of them, in words.

    num_prefill_lines: of prefills. num_unprefilled: requests that got slots without the line of their prefill;
    first_unprefilled: the first of them.
    """

    def __init__(self) -> None:
        self.num_contradictions = 0
        self.first = ""
        self.num_prefill_lines = 0
        self.num_unprefilled = 0
        self.first_unprefilled = ""
        self._has_allocations = False
        self._held: dict[str, set[int]] = {}
        self._holder: dict[int, str] = {}
        self._unprefilled: set[str] = set()

    def add(self, event: LogEvent | ev.EqualSteps) -> None:
        """The next line."""
        if isinstance(event, ev.KvLogEvent):
            self._add_kv(event)
        elif isinstance(event, ev.BucketEvent | ev.EqualSteps):
            # Every running request holds a slot, and nothing else does.
            if self._has_allocations and event.num_seqs != len(self._held):
                self._contradicted(
                    event, f"a decode step of {event.num_seqs} requests, while {len(self._held)} hold slots"
                )
        elif isinstance(event, ev.PrefillEvent):
            self.num_prefill_lines += 1
            self._unprefilled.discard(event.request_id)
            if self._has_allocations and event.request_id not in self._held:
                self._contradicted(event, f"a prefill of {event.request_id}, which holds no slot")

    def _add_kv(self, event: ev.KvLogEvent) -> None:
        request = event.request_id
        if event.kind == "alloc":
            self._has_allocations = True
            for slot in event.slots:
                if (holder := self._holder.get(slot, request)) != request:
                    self._contradicted(event, f"slot {slot} is given to {request}, while {holder} holds it")
                self._holder[slot] = request
            if request not in self._held:
                self._unprefilled.add(request)
            self._held.setdefault(request, set()).update(event.slots)
        elif event.kind == "eviction" and self._holder.get(event.slots[0]):
            self._contradicted(
                event, f"slot {event.slots[0]} is evicted, while {self._holder[event.slots[0]]} holds it"
            )
        elif event.kind == "free_request":
            self._freed(event)

    def _freed(self, event: ev.KvLogEvent) -> None:
        request, freed = event.request_id, set(event.slots)
        held = self._held.pop(request, set())
        # A request that was never admitted frees nothing.
        if held != freed:
            self._contradicted(event, f"{request} frees slots {sorted(freed)}, and was given {sorted(held)}")
        for slot in held | freed:
            if self._holder.get(slot) == request:
                del self._holder[slot]
        if request in self._unprefilled:
            self._unprefilled.discard(request)
            self.num_unprefilled += 1
            self.first_unprefilled = self.first_unprefilled or request

    def _contradicted(self, event: LogEvent | ev.EqualSteps, what: str) -> None:
        self.num_contradictions += 1
        if not self.first:
            offset = 0 if isinstance(event, ev.EqualSteps) else event.end_offset
            self.first = what + (f" (the line that ends at byte {offset} of server.log)" if offset else "")
