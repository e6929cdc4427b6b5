"""One input for a parser: what comes back is a value or a HarnessError in one line, soon; anything else is a find.

A path in memory where there is one, and an alarm instead of a process: thousands of inputs a second.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from harness.errors import HarnessError
from tests.fuzz.mutate import changed
from tests.fuzz.targets import Target

HANGS_AFTER_S = 20
IN_MEMORY = Path("/dev/shm")
NOT_WORDS = re.compile(r"'.*'|\".*\"|[\d\W]+")
LONGEST_SEED, MOST_SEEDS = 20_000, 300


class Find(NamedTuple):
    """An input that a target did not answer as it promises."""

    target: str
    content: bytes
    what: str

    @property
    def in_short(self) -> str:
        """The exception, and the last place in the harness that it passed."""
        places = re.findall(r"harness/(\S+)\", line (\d+)", self.what)
        return f"{self.what.strip().splitlines()[-1][:100]} {':'.join(places[-1]) if places else ''}"


class TooLong(BaseException):
    """Raised by the alarm inside a target that hangs; no target may catch it."""


class Fuzzer:
    """One target, and the inputs that got another answer from it than those before: seeds of further ones."""

    def __init__(self, target: Target, path: Path, rng: random.Random) -> None:
        self.target, self.path, self.rng = target, path, rng
        self.seeds = list(target.seeds)
        self.answers: set[str] = set()
        self.num_inputs = self.num_accepted = 0

    def warm_up(self) -> None:
        """The first answers, for which machine code may have to be made; nothing is timed yet."""
        for content in self.target.seeds:
            self.path.write_bytes(content)
            with contextlib.suppress(HarnessError):
                self.target.enter(self.path)

    def next_input(self) -> bytes:
        """A changed seed, every second one of those that are accepted; mostly with hashes that fit it."""
        if self.target.draw is not None:
            return self.target.draw(self.rng)
        content = changed(self.target.seeds if self.rng.random() < 0.5 else self.seeds, self.rng)
        return self.target.dress(content) if self.target.dress is not None and self.rng.random() < 0.9 else content

    def try_input(self, content: bytes) -> Find | None:
        """Give one input to the target; a find when it does not answer as promised. ``alarmed`` has set the alarm."""
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(file, content)
        os.close(file)
        self.num_inputs += 1
        # Of processor time: a busy machine makes nothing hang.
        signal.setitimer(signal.ITIMER_PROF, HANGS_AFTER_S)
        try:
            self.target.enter(self.path)
        except HarnessError as error:
            said = str(error)
            if "\n" in said:
                return Find(self.target.name, content, f"several lines: {said}")
            self._learn(f"{type(error).__name__} {NOT_WORDS.sub(' ', error.what)}", content)
        except TooLong:
            return Find(self.target.name, content, f"hangs: more than {HANGS_AFTER_S} s")
        except Exception:
            return Find(self.target.name, content, traceback.format_exc(limit=-4))
        else:
            self.num_accepted += 1
        return None

    def _learn(self, answer: str, content: bytes) -> None:
        if answer not in self.answers and len(self.seeds) < MOST_SEEDS and 0 < len(content) < LONGEST_SEED:
            self.answers.add(answer)
            self.seeds.append(content)


@contextlib.contextmanager
def alarmed() -> Iterator[Path]:
    """A folder of its own, in memory where there is some, and an alarm for targets that hang."""
    folder = tempfile.mkdtemp(prefix="fuzz-", dir=IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None)
    before = signal.signal(signal.SIGPROF, _too_long)
    try:
        yield Path(folder)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        shutil.rmtree(folder)


def _too_long(_number: int, _frame: FrameType | None) -> None:
    raise TooLong
