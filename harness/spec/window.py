"""The measurement window: the part of a run, measured or simulated, whose requests count."""

from __future__ import annotations

from pydantic import Field

from harness.clock import NS_PER_S
from harness.spec.base import Spec

FOREVER_NS = 1 << 62


class WindowSpec(Spec):
    """A window begins when ``warmup_s`` are over and every user has finished ``after_requests`` requests.

    It lasts ``measure_s``. Times are model seconds.
    """

    warmup_s: float = Field(default=0.0, ge=0, description="model seconds from the common start that do not count")
    after_requests: int = Field(default=0, ge=0, description="requests that every user finishes before it begins")
    measure_s: float | None = Field(default=None, gt=0, description="model seconds that count then; default: the rest")

    def in_words(self, seconds: str = "s") -> str:
        """ " due from 5 to 25 s after the start", said after the requests that it holds; empty where all count."""
        if self.after_requests:
            begin = f" due after every user has finished {self.after_requests} requests"
            warm = f" and {self.warmup_s:g} {seconds} have passed" if self.warmup_s else ""
            return begin + warm + ("" if self.measure_s is None else f", for {self.measure_s:g} {seconds}")
        if self.measure_s is None:
            return f" due from {self.warmup_s:g} {seconds} after the start" if self.warmup_s else ""
        return f" due from {self.warmup_s:g} to {self.warmup_s + self.measure_s:g} {seconds} after the start"

    def bounds_ns(self, start_ns: int, ready_ns: int) -> tuple[int, int]:
        """[first, last) instants of the window of a run that starts at ``start_ns``.

        ready_ns: when every user has finished ``after_requests`` requests.
        """
        first_ns = max(start_ns + round(self.warmup_s * NS_PER_S), ready_ns)
        return first_ns, FOREVER_NS if self.measure_s is None else first_ns + round(self.measure_s * NS_PER_S)
