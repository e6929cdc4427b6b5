"""What a simulator promised for one run, as numbers that can be frozen in a file and compared later.

Values only: who simulates is above this floor. Times in model ns. Next: ``verdicts`` compares these with sealed runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.analysis.method.padding import Padding
from harness.spec import Spec


class Prediction(Spec):
    """One simulated run. device_ns = decode_ns + prefill_ns; waiting_session_ns is W, never added to it.

    filled_in_buckets: buckets whose cost was interpolated or extrapolated.
    """

    device_ns: int
    decode_ns: int
    prefill_ns: int
    waiting_session_ns: int
    end_ns: int
    num_decode_steps: int
    padded_slots: int
    bucket_slots: int
    num_rearrivals: int
    num_reused: int
    cached_tokens: int
    computed_tokens: int
    num_evictions: int
    filled_in_buckets: tuple[int, ...] = ()

    @property
    def padding(self) -> Padding:
        return Padding(self.padded_slots, self.bucket_slots)


# condition -> replicate -> prediction
Predictions = Mapping[str, Mapping[int, Prediction]]
