"""The part of a first experiment that its backend decides, as ``harness init`` writes it. Nothing is written here."""

from __future__ import annotations

from dataclasses import dataclass

Line = tuple[str, str]
"""A line of the file, and the comment beside it."""

SLOT_TOKENS = 8192
MOST_SLOT_TOKENS = 32_768
MORE_SLOTS: tuple[Line, ...] = (
    ("[[condition]]", "what it changes: harness explain server"),
    ('name = "twelve-slots"', ""),
    ("server.kv_slots = 12", ""),
)
NO_WAITS: tuple[Line, ...] = (
    ("[[condition]]", "the same sessions without their waits for tools"),
    ('name = "no-waits"', ""),
    ('treatment = "no-waits"', ""),
)
SLOW_START: tuple[Line, ...] = (("start_timeout_s = 900.0", "the first start is slow"), ("stop_grace_s = 30.0", ""))


@dataclass(frozen=True)
class FirstExperiment:
    """What the file says of its backend. The defaults suit any server, as its sessions alone differ.

    about: the comment beside ``backend``. limits, server: more lines of these tables. other: the condition that is
    compared with the baseline. room_tokens: longest request that fits the server. sets_slot_tokens: slots of another
    length take no new model. prompt_form: "" for the default. needs: a command that comes before all others, or "".
    """

    about: str
    question: str = "What do waits for tools cost on this server, against the same sessions without any?"
    time_scale: float = 1.0
    replicates: int = 3
    limits: tuple[Line, ...] = ()
    server: tuple[Line, ...] = ()
    other: tuple[Line, ...] = NO_WAITS
    room_tokens: int = SLOT_TOKENS
    sets_slot_tokens: bool = False
    prompt_form: str = ""
    is_https: bool = False
    needs: str = ""


MODELLED = FirstExperiment(
    about="",
    question="Do twelve KV slots lower the cost of agents that come back after tool calls, against eight?",
    other=MORE_SLOTS,
    room_tokens=MOST_SLOT_TOKENS,
    sets_slot_tokens=True,
)
"""Eight KV slots against twelve, for servers that take any shape."""
