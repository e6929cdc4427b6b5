"""A second opinion on paged memory with pins and a second memory, written from docs/guides/retention.md and
docs/reference/stack.md.

Everything is a list that is searched. ``python -m tests.support.naive_retention [STEPS]`` holds the engine to it over
so many steps of each of eight servers; exit status 0 means no difference.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from harness.model.engine import CostModel, Step
from harness.model.engine.config import PagedConfig
from harness.model.engine.paged import PagedScheduler

BLOCK = 16


@dataclass(eq=False)
class Block:
    """number: its name. text: what its content is called, None without content. users: requests that hold it.

    pinned_until: when its pin ends; pinned_as: which of all pins it is. registered_as: which registration.
    """

    number: int
    text: int | None = None
    users: int = 0
    pinned_until: int | None = None
    pinned_as: int = 0
    registered_as: int = 0


class Memory:
    """Blocks of a server, and what it keeps elsewhere: the least recently used text first."""

    def __init__(self, num_blocks: int, num_elsewhere: int) -> None:
        self.blocks = [Block(number) for number in range(1, num_blocks)]
        self.line = list(self.blocks)
        self.elsewhere: list[int] = []
        self.num_elsewhere = num_elsewhere
        self.count = 0

    def order(self, now: int) -> list[Block]:
        """Blocks without user, the next to be overwritten first."""
        pinned = [block for block in self.blocks if block.pinned_until is not None]
        pinned.sort(key=lambda block: (block.pinned_until, block.pinned_as))
        ended = [block for block in pinned if (block.pinned_until or 0) <= now]
        return ended + self.line + [block for block in pinned if block not in ended]

    def found(self, texts: list[int]) -> list[Block]:
        """Blocks with these texts, up to the first that none has."""
        blocks: list[Block] = []
        for text in texts:
            same = [block for block in self.blocks if block.text == text]
            if not same:
                break
            blocks.append(min(same, key=lambda block: block.registered_as))
        return blocks

    def use(self, block: Block) -> None:
        """A request uses a block again: its pin is over."""
        if block in self.line:
            self.line.remove(block)
        block.pinned_until = None
        block.users += 1

    def overwrite(self, num: int, now: int) -> list[Block]:
        """New blocks for a request."""
        blocks = self.order(now)[:num]
        for block in blocks:
            self.use(block)
        for block in blocks:
            text, block.text = block.text, None
            if text is not None and self.num_elsewhere and all(other.text != text for other in self.blocks):
                self.use_elsewhere(text)
        return blocks

    def use_elsewhere(self, text: int) -> None:
        """A text is put there, or used there."""
        if text in self.elsewhere:
            self.elsewhere.remove(text)
        self.elsewhere.append(text)
        del self.elsewhere[: -self.num_elsewhere]

    def name(self, block: Block, text: int) -> None:
        """A block is full."""
        self.count += 1
        block.text, block.registered_as = text, self.count

    def let_go(self, blocks: list[Block]) -> None:
        """A request does not need its blocks any more: of its text the end goes before the beginning."""
        free: list[Block] = []
        for block in blocks[::-1]:
            block.users -= 1
            if not block.users:
                free.append(block)
        self.line = [b for b in free if b.text is None] + self.line + [b for b in free if b.text is not None]

    def pin(self, blocks: list[Block], until: int) -> None:
        """Keep what is free of a text; its end is pinned before its beginning."""
        for block in blocks[::-1]:
            if block.users == 0 and block.text is not None:
                if block in self.line:
                    self.line.remove(block)
                self.count += 1
                block.pinned_until, block.pinned_as = until, self.count


@dataclass(eq=False)
class Asker:
    """A request. given: tokens of its answer that it has. computed: tokens whose KV is there, or is being computed.

    coming: tokens of the answer in steps that run or are decided. late: tokens that come although it was preempted.
    """

    name: int
    prompt: int
    answer: int
    most: int
    texts: list[int]
    keep: int
    given: int = 0
    computed: int = 0
    coming: int = 0
    late: int = 0
    num_named: int = 0
    blocks: list[Block] = field(default_factory=list[Block])

    @property
    def length(self) -> int:
        return self.prompt + self.given + self.coming


class Seen(NamedTuple):
    """One step: its requests; tokens computed, also for those that left since it was decided; admitted requests with
    what was found; preempted ones; tokens asked for and loaded from elsewhere."""

    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    admitted: tuple[tuple[int, int], ...]
    preempted: tuple[int, ...]
    asked: int
    loaded: int


@dataclass
class Decided:
    """A step that was decided: who computes how many tokens, and whether it gives a token of the answer."""

    work: list[tuple[Asker, int, bool]]
    admitted: list[tuple[Asker, int]]
    preempted: list[Asker]
    asked: int = 0
    loaded: int = 0


class NaiveServer:
    """One server. is_ahead: each step is decided when the one before it begins."""

    def __init__(self, config: PagedConfig) -> None:
        self.config, self.is_ahead = config, config.async_scheduling
        self.memory = Memory(config.num_gpu_blocks, config.offload_blocks)
        self.queue: list[Asker] = []
        self.running: list[Asker] = []
        self.next: Decided | None = None
        self.now: Decided | None = None
        self.at = 0

    def ask(self, name: int, prompt: int, answer: int, most: int, texts: list[int], keep: int) -> None:
        self.queue.append(Asker(name, prompt, answer, most, texts, min(keep, self.config.keep_kv_ns)))

    def leave(self, name: int) -> None:
        for each in [*self.queue, *self.running]:
            if each.name == name:
                self._goes(each)

    @property
    def is_busy(self) -> bool:
        return bool(self.queue or self.running) or bool(self.next and self.next.work)

    def begin(self, at: int) -> Seen:
        """Begin the next step at an instant."""
        self.at = at
        step, self.next = self.next, None
        if step is None or not step.work:
            before = step.preempted if step else []
            step = self._decide()
            step.preempted = before + step.preempted
        self.now = step
        if self.is_ahead and step.work:
            self.next = self._decide()
        return Seen(
            tuple(each.name for each, _, _ in step.work if each in self.running or each in self.queue),
            tuple(tokens for _, tokens, _ in step.work),
            tuple((each.name, found) for each, found in step.admitted),
            tuple(each.name for each in step.preempted),
            step.asked,
            step.loaded,
        )

    def end(self, at: int) -> list[int]:
        """End the step; those whose answers are whole."""
        self.at = at
        step, self.now = self.now, None
        assert step is not None
        over: list[int] = []
        for each, _tokens, gives in step.work:
            if each not in self.running and each not in self.queue:
                continue
            if not gives:
                # A part of a prompt; if it was preempted since, nothing of it is awaited any more.
                each.late -= each.late > 0
                continue
            each.given += 1
            if each.late:
                each.late -= 1
            elif self.is_ahead:
                each.coming -= 1
                self._name_full(each, each.computed - each.coming)
            if each.given == each.answer or each.prompt + each.given == self.config.max_model_len:
                blocks = list(each.blocks)
                self._goes(each)
                if each.keep:
                    self.memory.pin(blocks, at + each.keep)
                over.append(each.name)
        return over

    def _goes(self, each: Asker) -> None:
        (self.running if each in self.running else self.queue).remove(each)
        self.memory.let_go(each.blocks)
        each.blocks = []
        if self.next is not None:
            self.next.admitted = [admitted for admitted in self.next.admitted if admitted[0] is not each]
            self.next.preempted = [other for other in self.next.preempted if other is not each]

    def _decide(self) -> Decided:
        step, budget = Decided([], [], []), self.config.max_num_batched_tokens
        place = 0
        while place < len(self.running) and budget:
            each = self.running[place]
            tokens = min(each.length, self.config.max_model_len - 1) - each.computed
            if each.coming and each.length >= each.prompt + each.most:
                tokens = 0
            tokens = min(tokens, budget)
            if not tokens:
                place += 1
                continue
            while not self._grows(each, tokens):
                last = self.running.pop()
                self._preempt(last)
                step.preempted.append(last)
                if last is each:
                    self._note(step)
                    return step
            step.work.append((each, tokens, each.computed + tokens >= each.length))
            budget -= tokens
            place += 1
        # Those whose token from before a preemption is still to come wait beside the queue.
        able = [each for each in self.queue if not each.late]
        for each in able if not step.preempted else []:
            if not budget or len(self.running) == self.config.max_num_seqs:
                break
            whole = [] if not self.config.prefix_caching else each.texts[: (each.length - 1) // BLOCK]
            found = self.memory.found(whole)
            free = self.memory.order(self.at)
            needed = -(-each.length // BLOCK) - len(found) + sum(block in free for block in found)
            if needed > len(free):
                break
            for block in found:
                self.memory.use(block)
            if self.config.offload_blocks and self.config.prefix_caching:
                more = whole[len(found) :]
                there = 0
                while there < len(more) and more[there] in self.memory.elsewhere:
                    self.memory.use_elsewhere(more[there])
                    there += 1
                step.asked += each.length - len(found) * BLOCK
                step.loaded += there * BLOCK
                new = self.memory.overwrite(there, self.at)
                for block, text in zip(new, more, strict=False):
                    self.memory.name(block, text)
                found = found + new
            each.blocks, each.num_named, each.computed = found, len(found), len(found) * BLOCK
            tokens = min(each.length - each.computed, budget)
            assert self._grows(each, tokens)
            self.queue.remove(each)
            self.running.append(each)
            step.work.append((each, tokens, each.computed + tokens >= each.length))
            step.admitted.append((each, each.computed))
            budget -= tokens
        self._note(step)
        return step

    def _note(self, step: Decided) -> None:
        for each, tokens, gives in step.work:
            each.computed += tokens
            each.coming += self.is_ahead and gives

    def _grows(self, each: Asker, tokens: int) -> bool:
        num = max(-(-(each.computed + tokens) // BLOCK) - len(each.blocks), 0)
        if num > len(self.memory.order(self.at)):
            return False
        each.blocks = each.blocks + self.memory.overwrite(num, self.at)
        self._name_full(each, min(each.computed + tokens, each.prompt + each.given))
        return True

    def _name_full(self, each: Asker, num_tokens: int) -> None:
        while self.config.prefix_caching and each.num_named < num_tokens // BLOCK:
            self.memory.name(each.blocks[each.num_named], each.texts[each.num_named])
            each.num_named += 1

    def _preempt(self, each: Asker) -> None:
        self.memory.let_go(each.blocks)
        each.blocks, each.num_named, each.computed = [], 0, 0
        running = [work for work in (self.now.work if self.now else []) if work[0] is each]
        each.late, each.coming = len(running), 0
        self.queue.insert(0, each)


def seen_by_the_engine(step: Step) -> Seen:
    """The same of a step of the engine."""
    return Seen(
        step.requests,
        step.tokens,
        tuple((each.request, each.cached_tokens) for each in step.admissions),
        step.preempted,
        step.external_queries,
        step.external_hits,
    )


COSTS = CostModel("known", "this test", {1: 10**10, 8: 4 * 10**10}, chunk_step_fs=5 * 10**9, chunk_token_fs=10**9)


def differences(seed: int, num_steps: int, **server: Any) -> list[tuple[Any, Any]]:
    """The first step of a drawn history in which engine and second opinion differ; none if there is no such step."""
    rng = random.Random(seed)
    config = PagedConfig(
        max_num_seqs=rng.choice((2, 4)),
        capture_sizes=(1, 2, 4),
        num_gpu_blocks=rng.choice((18, 24, 40)),
        block_size=BLOCK,
        max_num_batched_tokens=rng.choice((32, 64, 256)),
        max_model_len=256,
        **server,
    )
    engine, naive = PagedScheduler(config, COSTS), NaiveServer(config)
    at, handle, alive = 0, 0, list[int]()
    for _ in range(num_steps):
        at += rng.randrange(50)
        engine.tell_time(at)
        for _ in range(rng.choice((0, 0, 1, 2)) if len(alive) < 6 else 0):
            prompt, most = rng.randrange(1, 180), rng.randrange(1, 40)
            answer, shared, keep = rng.randrange(1, most + 1), rng.randrange(1, 6), rng.choice((0, 0, 90, 3000))
            # Some texts of a name are the same up to a place and go on differently.
            texts = [10**6 * shared + place + 10**3 * (place >= rng.randrange(1, 17)) for place in range(16)]
            engine.submit(handle, prompt, most, texts, answer)
            engine.keep(handle, keep)
            naive.ask(handle, prompt, answer, most, texts, keep)
            alive.append(handle)
            handle += 1
        if alive and rng.random() < 0.03:
            gone = rng.choice(alive)
            alive.remove(gone)
            engine.abort(gone)
            naive.leave(gone)
        if engine.has_work != naive.is_busy:
            return [(engine.has_work, naive.is_busy)]
        if not engine.has_work:
            continue
        step, ours = engine.schedule(), naive.begin(at)
        if seen_by_the_engine(step) != ours:
            return [(seen_by_the_engine(step), ours)]
        at += rng.randrange(1, 100)
        engine.tell_time(at)
        over, ours_over = list(engine.finish_step()), naive.end(at)
        alive = [name for name in alive if name not in over]
        state = over, list(engine.free_order), list(engine.second_order)
        order = [block.number for block in naive.memory.order(at)]
        if state != (ours_over, order, naive.memory.elsewhere):
            return [(state, (ours_over, order, naive.memory.elsewhere))]
    return []


SERVERS = [
    {"keep_kv_ns": pins, "offload_blocks": elsewhere, "async_scheduling": ahead}
    for pins, elsewhere in ((0, 0), (1500, 0), (0, 9), (1500, 9))
    for ahead in (False, True)
]


def main(num_steps: int) -> int:
    """Hold the engine to the second opinion over so many steps of each server, in histories of 500."""
    num_different = 0
    for server in SERVERS:
        found = [each for seed in range(num_steps // 500) for each in differences(seed, 500, **server)]
        print(server, f"{num_steps} steps, {len(found)} differences", *found[:1], flush=True)
        num_different += len(found)
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000))
