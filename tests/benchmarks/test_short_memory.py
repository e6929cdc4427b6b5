"""A delay of a request is an event of a draw: its client sends the next the later."""

from __future__ import annotations

import numpy as np

from benchmarks.short_memory import FIGURES, SERVER, SHARES, WORKLOAD, Delays, Studied, drawn, experiment
from harness.clock import NS_PER_MS
from harness.model.experiment import resolve


def test_what_requests_take_beside_their_steps_moves_what_their_clients_send_next() -> None:
    few = {**WORKLOAD, "num_sessions": 1, "requests_per_session": 3}
    (planned,) = resolve(experiment(Studied("sim", few, {**SERVER, "slot_tokens": 8192}), SHARES[-1:]))
    delays = 2 * NS_PER_MS, 3 * NS_PER_MS, 5 * NS_PER_MS
    none, late = (drawn(planned, Delays(*(np.array([ns]) for ns in each))) for each in ((0, 0, 0), delays))
    added = {name: of(late) - of(none) for name, (_, of) in FIGURES.items()}
    assert np.allclose(added["TTFT p50, ms"], 5.0)
    assert np.allclose(added["session time less waits, mean s"], 3 * 0.007)
    assert np.allclose(added["duration, s"], 3 * 0.007)
    assert not added["reuse (share of prompt tokens)"].any()
