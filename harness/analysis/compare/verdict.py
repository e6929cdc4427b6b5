"""What a comparison shows, in one word for every policy and view."""

from __future__ import annotations

from enum import Enum


class Verdict(str, Enum):
    """What an interval shows of a ratio. An interval inside a stopping rule's margin is equivalent, even without 1.

    WITHHELD: the channels contradict each other, or lie apart. ONE_PLAN, NOTHING_VARIED: there is nothing that an
    interval could be of.
    """

    LOWER = "lower"
    HIGHER = "higher"
    EQUIVALENT = "equivalent"
    NO_DIFFERENCE = "no difference shown"
    GO_ON = "go on"
    INCONCLUSIVE = "inconclusive"
    WITHHELD = "withheld"
    TOO_FEW = "too few runs for an interval"
    ONE_PLAN = "one plan, repeated"
    NOTHING_VARIED = "nothing varied"

    @property
    def is_final(self) -> bool:
        """Whether a stopping rule ends with it."""
        return self is not Verdict.GO_ON

    @property
    def is_answer(self) -> bool:
        """Whether a stopping rule that ended with it has an answer."""
        return self in (Verdict.LOWER, Verdict.HIGHER, Verdict.EQUIVALENT)

    def said(self, words: tuple[str, str] = ("cheaper", "more expensive")) -> str:
        """The word; words: what a shown ratio below and above 1 is called."""
        below, above = words
        return below if self is Verdict.LOWER else above if self is Verdict.HIGHER else self.value
