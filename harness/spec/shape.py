"""The shape of a server: what is compiled into it and how much KV memory it has.

Search, simulator, specifications and records exchange shapes. Nothing is checked here: ServerSpec and EngineConfig do.
"""

from __future__ import annotations

from typing import NamedTuple


class ServerShape(NamedTuple):
    """max_num_seqs: most requests running at once, as compiled. decode_buckets: ascending compiled batch sizes.

    kv_slots: physical KV slots. slot_tokens: longest request, prompt and answer together. max_active_seqs: most
    requests admitted at once; None: max_num_seqs.
    """

    max_num_seqs: int
    decode_buckets: tuple[int, ...]
    kv_slots: int
    slot_tokens: int = 8192
    max_active_seqs: int | None = None

    @property
    def label(self) -> str:
        """ "{1,4,8}/8", "{1,4,8}/8 12 slots", "{1,4,8}/8 6 active" """
        buckets = ",".join(str(bucket) for bucket in self.decode_buckets)
        slots = "" if self.kv_slots == self.max_num_seqs else f" {self.kv_slots} slots"
        active = "" if self.max_active_seqs is None else f" {self.max_active_seqs} active"
        return f"{{{buckets}}}/{self.max_num_seqs}{slots}{active}"
