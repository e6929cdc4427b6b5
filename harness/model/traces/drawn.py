"""Waits that a recording does not say: drawn from a distribution, the same at each import, and labelled."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from harness.model.plan.build import derive_seed
from harness.model.plan.waits import WaitDistribution, load_waits
from harness.model.traces.account import ReadNotes


class DrawnWaits:
    """Tool waits by session and request. The distribution is read when the first one is drawn."""

    def __init__(self, notes: ReadNotes) -> None:
        self._notes = notes
        self._waits: WaitDistribution | None = None

    def wait_ns(self, session: str, request: str) -> int:
        """The wait before a request, in ns; it depends on these two names alone. Errors as ``load_waits``."""
        if self._waits is None:
            self._waits = load_waits(self._notes.options.waits)
        draw = random.Random(derive_seed(0, f"{session}/{request}"))
        self._notes.assume(f"waits drawn from {self._waits.name}: the recording does not say them (--waits)")
        picks = np.array([draw.random()]), np.array([draw.random()])
        return int(self._waits.waits_ns(*picks)[0])

    def unknown(self, why: str, session: str, request: object, people_ns: Sequence[int] | None = None) -> int:
        """The same for a wait that is not known, and the label that says why.

        people_ns: for a wait for a person, those of the recordings that are known; one of them is drawn.
        """
        self._notes.assume(f"waits that are unknown: {why}")
        if people_ns:
            self._notes.assume("waits for a person drawn from those that the recordings say")
            return random.Random(derive_seed(0, f"{session}/{request}")).choice(people_ns)
        self._notes.assume("waits for a person drawn as if for a tool, likely far too short", people_ns is not None)
        return self.wait_ns(session, str(request))
