"""The account of a reading: every row is one of ``ROWS``, every call becomes a request or is dropped for a reason."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

import numpy as np

from harness.model.plan.build import derive_seed
from harness.model.plan.waits import WaitDistribution, load_waits
from harness.model.traces.recording import DEFAULT_WAITS, Arrivals
from harness.model.traces.values import Record, words_at

Row = TypeVar("Row")
Known = Mapping[str, Mapping[str, Collection[str]]]
"""The keys of objects, or the values, that may stand at paths of keys within each sort of row."""
ROWS = ("calls", "parts of calls", "passed over", "broken", "unknown")
# Of more unknown rows than this the waits of a session are unknown.
SHARE_OF_UNKNOWN = 0.01
# A type's name is shown only where it can be no text of a person.
TYPE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.:/ -]{0,60}")
CHARACTERS_PER_TOKEN = 4
# No answer packs so many characters into a token; the slack is for short answers of one long run, as "=====".
MOST_CHARACTERS_PER_TOKEN = 12
CHARACTERS_OF_SLACK = 24
# A file in a message, as OpenAI's and Anthropic's APIs take it.
FILE = re.compile(r"""(?:;base64,|["']data["']: ?["'])[A-Za-z0-9+/]{64,}=*""")
TIME_UNITS_NS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
CENTURY_NS = range(946_684_800_000_000_000, 4_102_444_800_000_000_000)  # from 2000 to 2100
PLACEHOLDER_TOKENS = 2
PLACEHOLDER = "output tokens estimated from characters, 4 to a token: the recording has a placeholder"
INCLUDED = "prompts beside one that its cached tokens exceed: their file counts the cache apart, so it is added to each"
NO_TOKEN = "answers of no token taken as 1 token"
SHORT = "answers of 1 or 2 tokens, as estimated from their characters"
NO_PROMPT = "calls whose usage counts no prompt token"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What the person says of files that do not say it themselves.

    block_tokens: size of a named block, 0 where not given; time_unit_ns: of bare numbers of time, 0 for the format's
    own; waits: a wait distribution, by name or path, for waits that are not known; lengths: whether rows of a
    session count their "whole" prompt or what is "new", "" where not given. since_ns, until_ns: sessions are taken that
    begin so long after the first one; until_ns 0: to the end.
    """

    block_tokens: int = 0
    time_unit_ns: int = 0
    waits: str = DEFAULT_WAITS
    lengths: str = ""
    since_ns: int = 0
    until_ns: int = 0


@dataclass
class ReadNotes:
    """The account of a reading: what each row was, what became of each call, and what had to be assumed.

    A row is a line, or a span, step, event or message of a document. passed, broken, unknown: rows by reason, or by
    type; num_more: calls beyond the first that one row holds; dropped: calls by reason; left: files, links between
    sessions, and rows that stand twice (num_twice). stated, summed: what files state, and their calls' sums.
    block_tokens, arrivals: set by a reader that finds them in the files. A place is shown, and stored nowhere.
    """

    options: ReadOptions = field(default_factory=ReadOptions)
    num_files: int = 0
    num_rows: int = 0
    num_calls: int = 0
    num_parts: int = 0
    num_more: int = 0
    num_twice: int = 0
    passed: Counter[str] = field(default_factory=Counter[str])
    broken: Counter[str] = field(default_factory=Counter[str])
    unknown: Counter[str] = field(default_factory=Counter[str])
    dropped: Counter[str] = field(default_factory=Counter[str])
    left: Counter[str] = field(default_factory=Counter[str])
    assumed: Counter[str] = field(default_factory=Counter[str])
    stated: Counter[str] = field(default_factory=Counter[str])
    summed: Counter[str] = field(default_factory=Counter[str])
    first_at: dict[str, str] = field(default_factory=dict[str, str])
    block_tokens: int | None = None
    arrivals: Arrivals | None = None
    has_bare_times: bool = False  # numbers of time were read, whose unit the person may say
    known: Known = field(default_factory=dict[str, Mapping[str, Collection[str]]])  # by the reader of this format
    progress: Callable[[int], None] = field(default=lambda _: None)  # is told of bytes, or rows, as they are read
    told: dict[str, str] = field(default_factory=dict[str, str])  # where a row stood first, by its id in all files

    def part(self, num_rows: int = 1) -> None:
        """Rows are parts of calls, or what came between two."""
        self.num_parts += num_rows

    def pass_over(self, reason: str) -> None:
        """A row is known, and says nothing of a call, or what another row says too."""
        self.passed[reason] += 1

    def passes(self, kind: str, reasons: Mapping[str, str]) -> bool:
        """Pass over a row whose type is one of these; says whether it is."""
        if kind in reasons:
            self.pass_over(f"{kind}: {reasons[kind]}")
        return kind in reasons

    def look(self, row: Record, of: str) -> bool:
        """Label each key and value of a row that is not ``known``; False for a value, which may be a person's doing."""
        known = self.known.get(of, {})
        said = ((path, *each) for path in known for each in words_at(row, path.split(".") if path else ()))
        strange = [(path, is_key, name) for path, is_key, name in said if name not in known[path]]
        for path, is_key, name in strange:
            told = f"{path}.{name}".strip(".") if is_key else f"{path} {name}"
            told = told if TYPE_NAME.fullmatch(told) else f"{path}, by no plain name"
            self.assume(f"rows with a {'key' if is_key else 'value'} that is not known here: {told}")
        return all(is_key for _, is_key, _ in strange)

    def row_broken(self, reason: str, at: str, *, was_call: bool = False) -> None:
        """A row cannot be read. was_call: it was counted as a call."""
        self.num_calls -= was_call
        self.broken[reason] += 1
        self.first_at.setdefault(reason, at)

    def row_unknown(self, kind: str, at: str) -> None:
        """A row is of a type that the reader does not know."""
        name = kind if TYPE_NAME.fullmatch(kind) else "a type without a plain name"
        name = name if name in self.unknown or len(self.unknown) < 20 else "other types"
        self.unknown[name] += 1
        self.first_at.setdefault(name, at)

    def drop_call(self, reason: str, at: str) -> None:
        """A row is a call that is left out."""
        self.num_calls += 1
        self.drop(reason, at)

    def drop(self, reason: str, at: str, count: int = 1) -> None:
        """Calls are left out."""
        self.dropped[reason] += count
        self.first_at.setdefault(reason, at)

    def leave(self, reason: str, at: str, num_rows: int = 0) -> None:
        """A file, a link, a call without a row of its own, or rows that stand twice are left out."""
        self.left[reason] += max(num_rows, 1)
        self.num_twice += num_rows
        self.first_at.setdefault(reason, at)

    def is_first(self, row: str, at: str) -> bool:
        """Whether no other file held the row of this id before, that tells of something to be counted once."""
        return self.told.setdefault(row, at) == at

    def assume(self, what: str, count: int = 1) -> None:
        """Label the trace with ``what``; nothing happens where ``count`` is 0."""
        if count:
            self.assumed[what] += count

    def hold(self, what: str, stated: int | None, calls: Iterable[int]) -> None:
        """Label a sum that a file states and that its calls do not have; ``what`` says which sum it is."""
        summed = sum(calls)
        if stated is not None and stated != summed:
            self.assumed[what] += 1
            self.stated[what] += stated
            self.summed[what] += summed

    def answered(self, tokens: int) -> int:
        """The tokens of an answer, at least 1."""
        self.assume(NO_TOKEN, tokens == 0)
        return max(tokens, 1)

    def likely_tokens(self, tokens: int, characters: int) -> int:
        """The tokens of an answer: estimated, and labelled, where so few cannot be so many characters."""
        if characters <= MOST_CHARACTERS_PER_TOKEN * tokens + CHARACTERS_OF_SLACK:
            return tokens
        self.assume(PLACEHOLDER)
        return tokens_in(characters)

    def without_files(self, text: str) -> str:
        """A text in which a short hash stands for each file in base64, whose characters do not tell its tokens."""
        short, num_files = FILE.subn(lambda found: hashlib.sha256(found[0].encode()).hexdigest()[:12], text)
        self.assume("images and other files in prompts: their tokens are not known, and left out", num_files)
        return short

    def in_order(self, rows: Iterable[Row], number: Callable[[Row], int], what: str, slack: int = 0) -> list[Row]:
        """Rows sorted by a number; label as ``what`` those that stand behind one of a number above theirs and slack."""
        given = list(rows)
        numbers = [*map(number, given)]
        pairs = zip(numbers, accumulate(numbers, max), strict=True)
        self.assume(f"{what}: sorted", sum(each < highest - slack for each, highest in pairs))
        return sorted(given, key=number)

    def unit_ns(self, usual_ns: int) -> int:
        """The unit of bare numbers of time: what the person says, else the format's own."""
        self.has_bare_times = True
        return self.options.time_unit_ns or usual_ns

    def date_ns(self, given_ns: int | None, usual_ns: int = 1) -> int | None:
        """An instant since 1970, given as in the format's own unit; labelled where it is no date of this century."""
        if given_ns is None:
            return None
        moment_ns = given_ns * self.unit_ns(usual_ns) // usual_ns
        if moment_ns not in CENTURY_NS:
            fits = [unit for unit, ns in TIME_UNITS_NS.items() if given_ns * ns // usual_ns in CENTURY_NS]
            hint = "".join(f": as {unit} they would be, which --time-unit {unit} says" for unit in fits)
            self.assume(f"instants that are no date from 2000 to 2100{hint}")
        return moment_ns

    def check_numbers(self, numbers: Collection[int], what: str) -> None:
        """Label as ``what`` the numbers that are missing between the lowest and the highest."""
        if numbers:
            self.assume(f"{what} that are missing by their number", max(numbers) - min(numbers) + 1 - len(set(numbers)))

    def check_release(self, what: str, found: str, held: str) -> None:
        """Label rows of a release that is newer than the one that the reader was held to."""
        if _release(found) > _release(held):
            self.assume(f"rows of {what} {found[:20]}: newer than {held}, which this reader was held to")

    def take_over(self, other: ReadNotes) -> None:
        """Add what another reading counted."""
        numbers = ("num_files", "num_rows", "num_calls", "num_parts", "num_more", "num_twice")
        for name in (*numbers, "passed", "broken", "unknown", "dropped", "left", "assumed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.stated.update(other.stated)  # which may be 0, or less
        self.summed.update(other.summed)
        self.first_at = {**other.first_at, **self.first_at}

    @property
    def rows(self) -> dict[str, int]:
        """How many rows were each of ``ROWS``."""
        rest = (self.passed.total() + self.num_twice, self.broken.total(), self.unknown.total())
        return dict(zip(ROWS, (self.num_calls, self.num_parts, *rest), strict=True))

    def check(self, num_requests: int) -> None:
        """Assert that every row was counted once, and that every call is a request or dropped."""
        if not any(self.rows.values()):
            self.assume("requests of a reader that counts no rows: what it passed over is not known", num_requests)
            return
        assert sum(self.rows.values()) == self.num_rows, (self.rows, self.num_rows)
        assert self.num_calls + self.num_more == num_requests + self.dropped.total(), (num_requests, self)

    @property
    def labels(self) -> tuple[str, ...]:
        """What was assumed or not known, each with how often."""
        sums = {what: f": {stated} stated, {self.summed[what]} counted" for what, stated in self.stated.items()}
        found = {what: f"{count} x {what}{sums.get(what, '')}" for what, count in self.assumed.items()}
        unknown = (f"{count} x rows of the unknown type {kind!r}" for kind, count in sorted(self.unknown.items()))
        return (*(found[what] for what in sorted(found)), *unknown)


def tokens_in(characters: int) -> int:
    """The estimated tokens of so many characters, 4 to a token."""
    return -(-characters // CHARACTERS_PER_TOKEN)


def _release(version: str) -> tuple[int, ...]:
    """The numbers that a release begins with; () for any other text."""
    found = re.match(r"v?(\d{1,6}(?:\.\d{1,6}){0,3})", version)
    return tuple(map(int, found[1].split("."))) if found else ()


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
        return int(self._waits.waits_ns(np.array([draw.random()]), np.array([draw.random()]))[0])

    def unknown(self, why: str, session: str, request: object, people_ns: Sequence[int] | None = None) -> int:
        """The same for a wait that is not known, labelled; for a person's, one of those that are known is drawn."""
        self._notes.assume(f"waits that are unknown: {why}")
        if people_ns:
            self._notes.assume("waits for a person drawn from those that the recordings say")
            return random.Random(derive_seed(0, f"{session}/{request}")).choice(people_ns)
        self._notes.assume("waits for a person drawn as if for a tool, likely far too short", people_ns is not None)
        return self.wait_ns(session, str(request))
