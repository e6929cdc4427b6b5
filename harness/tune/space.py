"""The space of a search, as its printed bounds have it, and the search for the best of it by any figure.

Requests at once, KV memory, prefix caching and policy are tried in every combination; the compiled sizes of the best
combinations all, or by the steps that they ask for. From the best of these, every key is changed alone and beside each
of the keys that are a row of the table. Nothing is simulated here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from harness.errors import PlanError, SpecError
from harness.model.spec.server import MOST_SEQS, ROUTER_POLICIES, SERVER_KEYS, VALUE_LEVERS
from harness.tune.plans import Question
from harness.tune.setups import MORE_SIZES, MOST_SIZES, NUM_DRAFTS, Baseline, Setup, ladder

MOST_RUNGS = 24
EVERY_LIMIT = 16
"""Up to here every number of requests at once is tried, beyond it the rungs of a ladder."""
SAME = 1e-4
"""Values that differ by less, as a share, are the same."""
DESCENTS = 4
"""Combinations from which all keys together are searched, where keys of a row alone may change."""
SHARED_SETS = 6
"""Good sets of sizes of a combination that are tried at all others with as many requests at once."""


class Judge(Protocol):
    """What a search minimises. close: so far behind, a combination may still be the best with other sizes."""

    close: float

    def value(self, setup: Setup) -> float:
        """Of one configuration; PlanError or SpecError where it cannot serve."""
        ...

    def steps(self, setup: Setup) -> Iterator[npt.NDArray[np.int64]]:
        """Decode steps by their number of requests, of each load that sizes are chosen for, the first before all."""
        ...


class Thoroughness(NamedTuple):
    """combinations: with all sizes searched, at most. sets: of sizes that are all tried; more are searched."""

    combinations: int
    sets: int


class Space:
    """What a search may choose from. width: most sessions at once. endless: today's server with memory without end.
    longest: tokens of the longest prompt."""

    def __init__(self, question: Question, width: int, endless: Setup, longest: int = 0) -> None:
        self.question, self.width, self.endless, self.longest = question, width, endless, longest
        self.base = Baseline(question.server)
        base, levers = self.base.setup, question.levers
        self.has_sizes = bool("decode_buckets" in levers and base.decode_buckets)
        num_sizes = len(base.decode_buckets)
        self.most_sizes = question.most_sizes or max(num_sizes, min(num_sizes + MORE_SIZES, MOST_SIZES))
        self.memory = "kv_slots" if base.kv_slots is not None else "num_gpu_blocks"
        self.limits = self._limits()
        self.others = {key: self._values_of(key) for key in VALUE_LEVERS if key in levers}
        self.values: dict[Setup, float] = {}
        self.combinations: dict[Setup, float] = {}
        self._ends: dict[Setup, float] = {}
        self._misfit = self._left_out = ""
        self._rungs: set[int] = set()
        self._cost_ns: dict[tuple[int, int], list[list[int]]] = {}

    def _limits(self) -> list[int]:
        base, levers = self.base.setup, self.question.levers
        if "max_num_seqs" not in levers:
            return [base.max_num_seqs]
        # Without a lever of their own, KV slots follow the requests at once.
        follows = self.memory not in levers and self.base.follows
        most = min(max(4 * base.max_num_seqs if follows else 1, self.width, base.max_num_seqs), MOST_SEQS)
        return sorted({base.max_num_seqs, *range(1, min(most, EVERY_LIMIT) + 1), *ladder(min(most, EVERY_LIMIT), most)})

    def _values_of(self, key: str) -> list[int]:
        """The values of a row's lever that differ for these prompts: what no step fills does as the next smaller."""
        today, values = self.base.setup.value_of(key), sorted(SERVER_KEYS[key].values)
        if key == "long_prefill_tokens":
            values = [value for value in values if value < self.longest]
        if key == NUM_DRAFTS:
            values = [value for value in values if value <= len(self.question.server.synthetic_acceptance_rates or ())]
        if key == "max_num_batched_tokens":
            most = self.longest * self.width + self.width
            values = [value for value, less in zip(values, [0, *values], strict=False) if less < most]
        return sorted({today, *values})

    def num_setups(self, effort: Thoroughness) -> int:
        """About as many configurations are going to be tried."""
        rungs = 8 if self.memory in self.question.levers else 1
        combinations = len(self.limits) * rungs * len(self._kinds())
        others = sum(len(values) for values in self.others.values())
        moves = DESCENTS * others * (others + 8)
        return moves + (4 * combinations + effort.combinations * effort.sets if self.has_sizes else combinations)

    @property
    def _starts(self) -> list[Setup]:
        """Each number of requests at once with each caching and policy, memory and sizes as they follow."""
        return [self._implied(limit)._replace(**kind) for limit in self.limits for kind in self._kinds()]

    def _bound(self, setup: Setup) -> Setup:
        """What no sizes serve better."""
        return self.with_every_size(setup) if self.has_sizes else setup

    @property
    def ends(self) -> list[Setup]:
        """Of each number of requests at once, caching and policy what nothing serves better: memory without end."""
        return [
            self._bound(start._replace(**{self.memory: getattr(self.endless, self.memory)})) for start in self._starts
        ]

    @property
    def num_tried(self) -> int:
        return sum(map(math.isfinite, self.values.values()))

    @property
    def least_of_all(self) -> Setup:
        """The best with memory without end, and with every size where sizes may change."""
        return min(self._ends, key=self._ends.__getitem__)

    def value(self, setup: Setup) -> float:
        """Infinite where it cannot serve, or takes more memory than there is."""
        if setup not in self.values:
            self.values[setup] = self._value(setup) if self._fits(setup) else math.inf
        return self.values[setup]

    def _value(self, setup: Setup) -> float:
        try:
            return self.judge.value(setup)
        except (PlanError, SpecError):
            if setup == self.base.setup:
                raise
        return math.inf

    def _fits(self, setup: Setup) -> bool:
        most = self.question.memory_gib
        needed, today = (self.base.memory_gib(each) for each in (setup, self.base.setup))
        return most is None or needed is None or today is None or needed <= max(most, today)

    def search(self, judge: Judge, effort: Thoroughness, on_progress: Callable[[float], None]) -> dict[Setup, float]:
        """The value of every configuration that was tried and can serve."""
        self.judge = judge
        self.value(self.base.setup)
        for place, (start, end) in enumerate(zip(self._starts, self.ends, strict=True), 1):
            for setup in self._chain(start, end):
                self.combinations[setup] = min(self.value(each) for each in self._first(setup))
            on_progress(place / len(self._starts))
        if self.has_sizes:
            self._search_sizes(effort)
        if self.others:
            self._search_others()
        return {setup: value for setup, value in self.values.items() if math.isfinite(value) and self._is_asked(setup)}

    def _is_asked(self, setup: Setup) -> bool:
        """False of one that was tried with every size as a bound."""
        return len(setup.decode_buckets) <= self.most_sizes or setup in self.combinations

    def _kinds(self) -> list[dict[str, Any]]:
        """Prefix caching and policy, today's first."""
        base, levers = self.base.setup, self.question.levers
        cachings = [base.prefix_caching, not base.prefix_caching][: 1 + ("prefix_caching" in levers)]
        policies = dict.fromkeys([base.policy, *(ROUTER_POLICIES if "router" in levers else ())])
        return [{"prefix_caching": caching, "policy": policy} for caching in cachings for policy in policies]

    def _implied(self, limit: int) -> Setup:
        """Today's server at another limit, with its largest sizes where it would have more than may be."""
        implied = self.base.implied(limit)
        if implied == self.base.setup:
            return implied
        return implied._replace(decode_buckets=implied.decode_buckets[-self.most_sizes :])

    def with_every_size(self, setup: Setup) -> Setup:
        most = min(setup.max_num_seqs, self.width)
        sizes = sorted({*range(1, most + 1), setup.max_num_seqs})
        return setup._replace(decode_buckets=tuple(size * setup.query for size in sizes))

    def _chain(self, start: Setup, end: Setup) -> Iterator[Setup]:
        """One number of requests at once with each KV memory, from today's up to where more changes nothing."""
        if not math.isfinite(least := self._value(end)):
            return
        self._ends[end] = least
        first = getattr(start, self.memory)
        rungs: list[int] = [first]
        if self.memory in self.question.levers:
            if self.memory == "kv_slots":
                first = rungs[0] = max(first, start.max_num_seqs)
            more = list(ladder(getattr(self.base.setup, self.memory), getattr(self.endless, self.memory)))
            rungs += [rung for rung in more[:MOST_RUNGS] if rung > first]
        for place, rung in enumerate(rungs):
            setup = start._replace(**{self.memory: rung})
            if not self._fits(setup):
                needs = f"{self.base.memory_gib(setup):.1f} GiB of {self.question.memory_gib:g} GiB per device"
                self._misfit = self._misfit or f"more do not fit ({needs})"
                setup = self._largest_that_fits(setup, rungs[place - 1]) if place else setup
            if not self._fits(setup):
                return
            if math.isfinite(self.value(self._bound(setup))):
                self._rungs.add(getattr(setup, self.memory))
                yield setup
            if getattr(setup, self.memory) != rung or self.value(self._bound(setup)) - least <= SAME * abs(least):
                return

    def _largest_that_fits(self, setup: Setup, low: int) -> Setup:
        """Between ``low``, which fits, and the memory of ``setup``, which does not."""
        high = getattr(setup, self.memory)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(setup._replace(**{self.memory: middle})) else (low, middle)
        return setup._replace(**{self.memory: low})

    def _first(self, setup: Setup) -> Iterator[Setup]:
        """A combination with today's sizes, and with the best for its steps."""
        yield setup
        if self.has_sizes:
            yield setup._replace(decode_buckets=next(self._for_steps(setup))[-1])

    def _for_steps(self, setup: Setup) -> Iterator[list[tuple[int, ...]]]:
        """For each load the best sets for the steps of this combination with every size, the fewest sizes first."""
        limit = setup.max_num_seqs
        for histogram in self.judge.steps(self.with_every_size(setup)):
            best = best_for_steps(histogram, self._step_ns(limit, setup.query), limit, min(self.most_sizes, limit))
            yield [tuple(size * setup.query for size in sizes) for sizes in best]

    def _step_ns(self, limit: int, query: int) -> list[list[int]]:
        if (limit, query) not in self._cost_ns:
            step_ns = self.question.model.decode_step_ns
            costs_ns = [[step_ns(max(b, 1) * query, n) for n in range(b + 1)] for b in range(limit + 1)]
            self._cost_ns[limit, query] = costs_ns
        return self._cost_ns[limit, query]

    def _search_sizes(self, effort: Thoroughness) -> None:
        """All sizes of the combinations that can be best, of the smallest change among them, and of today's."""
        ranked = sorted(self.combinations, key=lambda each: (self.combinations[each], self.base.size_of(each)))
        close = [each for each in ranked if self.combinations[each] <= self.combinations[ranked[0]] + self.judge.close]
        alone = [min(close, key=self.base.size_of), *(each for each in ranked if each == self.base.setup)]
        searched = list(dict.fromkeys([*alone, *close[: effort.combinations]]))
        for setup in searched:
            self._sizes_of(setup, effort.sets)
        good: dict[int, list[tuple[int, ...]]] = {}
        for setup in sorted(self.values, key=self.values.__getitem__):
            if len(setup.decode_buckets) <= self.most_sizes:
                good.setdefault(setup.max_num_seqs, []).append(setup.decode_buckets)
        for setup in close:
            for sizes in list(dict.fromkeys(good.get(setup.max_num_seqs, ())))[:SHARED_SETS]:
                self.value(setup._replace(decode_buckets=sizes))
        if len(searched) < len(self.combinations):
            total = len(self.combinations)
            self._left_out = f"all sizes at the {len(searched)} best of {total} combinations of the other keys"

    def _search_others(self) -> None:
        """Steepest descent over every key from the best combinations and from today's server: one key at a time, and
        then two of which one is a row alone."""
        ranked = sorted(filter(self._is_asked, self.values), key=self.values.__getitem__)
        for start in dict.fromkeys([*ranked[:DESCENTS], self.base.setup]):
            best, num_keys = start, 1
            while num_keys <= 2:
                step = min([best, *self._moves(best, num_keys)], key=self.value)
                num_keys += step == best
                best = step
            end = self._bound(best)._replace(**{self.memory: getattr(self.endless, self.memory)})
            if math.isfinite(least := self._value(end)):
                self._ends[end] = least
        self._left_out = "; ".join(
            filter(None, (self._left_out, f"{', '.join(self.others)}: beside the others from the best {DESCENTS}"))
        )

    def _moves(self, setup: Setup, num_keys: int) -> Iterator[Setup]:
        """What lies one change away, or two of which one is of a row's lever."""
        rows = [(key, value) for key, values in self.others.items() for value in values]
        single = [setup.with_other(key, value) for key, value in rows if value != setup.value_of(key)]
        nearby = list(self._nearby(setup))
        if num_keys == 1:
            yield from (*single, *nearby)
            return
        for each in (*single, *nearby):
            yield from (each.with_other(key, value) for key, value in rows if value != each.value_of(key))

    def _nearby(self, setup: Setup) -> Iterator[Setup]:
        """The next requests at once, memory and sizes; every caching and policy."""
        place = self.limits.index(setup.max_num_seqs)
        for limit in self.limits[max(0, place - 2) : place + 3]:
            if limit != setup.max_num_seqs:
                most = limit * setup.query
                sizes = (*(size for size in setup.decode_buckets if size < most), most)[-self.most_sizes :]
                memory = {self.memory: getattr(self._implied(limit), self.memory)} if self.base.follows else {}
                yield setup._replace(max_num_seqs=limit, decode_buckets=sizes if setup.decode_buckets else (), **memory)
        for memory in sorted(self._rungs if self.memory in self.question.levers else ()):
            yield setup._replace(**{self.memory: memory})
        yield from (setup._replace(**kind) for kind in self._kinds())
        if self.has_sizes:
            near = neighbours(setup.decode_buckets, setup.max_num_seqs, setup.query)
            yield from (setup._replace(decode_buckets=sizes) for sizes in near)

    def _sizes_of(self, setup: Setup, most_sets: int) -> None:
        """The sets of sizes of a combination: all, or from those that its steps ask for steepest descent."""

        def with_sizes(sizes: tuple[int, ...]) -> float:
            return self.value(setup._replace(decode_buckets=sizes))

        limit, query = setup.max_num_seqs, setup.query
        every = sets_of_sizes(limit, self.width, self.most_sizes, most_sets)
        for sizes in [] if every is None else every:
            with_sizes(tuple(size * query for size in sizes))
        for built in [] if every is not None else self._for_steps(setup):
            for best in built:
                step = min([best, *neighbours(best, limit, query)], key=with_sizes)
                while step != best:
                    best, step = step, min([step, *neighbours(step, limit, query)], key=with_sizes)

    @property
    def _made(self) -> str:
        return "captured" if self.question.server.is_paged else "compiled"

    @property
    def bounds(self) -> list[str]:
        """What was searched, and what was left out, in lines."""
        levers = self.question.levers
        lines = [misfit] if (misfit := self.base.misfit(self.question.memory_gib)) else []
        if "max_num_seqs" in levers:
            lines.append(f"max_num_seqs: {in_ranges(self.limits)}")
        if self.memory in levers:
            lines.append(f"{self.memory}: {in_ranges(sorted(self._rungs))}; {self._misfit or 'more changes nothing'}")
        if "prefix_caching" in levers:
            lines.append("prefix_caching: on and off")
        if "router" in levers:
            lines.append(f"router.policy: {', '.join(ROUTER_POLICIES)}")
        lines += [f"{key}: {in_ranges(map(int, values))}" for key, values in self.others.items()]
        if self.has_sizes:
            lines.append(f"at most {self.most_sizes} {self._made} sizes")
        elif self.question.most_sizes and self.base.setup.decode_buckets:
            lines.append(f"{self._made} sizes as today, the largest {self.most_sizes} for another max_num_seqs")
        return [*lines, *([self._left_out] if self._left_out else [])]


def in_ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers in words: "1 to 16, 20, 24"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def sets_of_sizes(limit: int, width: int, most: int, most_sets: int) -> list[tuple[int, ...]] | None:
    """Every set of at most ``most`` sizes that ends at ``limit`` and can matter; None for more than ``most_sets``.

    width: most requests in a step; a size above the first that holds them all is never used.
    """
    others = range(1, min(limit, width + 1))
    counts = range(min(most, limit))
    if sum(math.comb(len(others), count) for count in counts) > most_sets:
        return None
    return [(*chosen, limit) for count in counts for chosen in combinations(others, count)]


def best_for_steps(
    histogram: Sequence[int] | npt.NDArray[np.int64], cost_ns: Sequence[Sequence[int]], limit: int, most: int
) -> list[tuple[int, ...]]:
    """For each number of sizes up to ``most``, the set that costs least for steps as they are.

    histogram: steps by their number of requests, from 0. cost_ns: of a step, by size and number of requests. Exact for
    a schedule that does not change with the sizes; by dynamic programming over the sizes in ascending order.
    """
    steps = np.zeros(limit + 1)
    steps[: len(histogram)] = histogram[: limit + 1]
    # Of steps with low < n <= high, padded to high.
    padded = np.full((limit + 1, limit + 1), np.inf)
    for high in range(1, limit + 1):
        spent = np.cumsum(steps[: high + 1] * np.asarray(cost_ns[high], dtype=np.float64))
        padded[:high, high] = spent[-1] - spent[:-1]
    least, chosen = np.full(limit + 1, np.inf), [()] * (limit + 1)
    least[0], best = 0.0, list[tuple[int, ...]]()
    for _ in range(most):
        ways = least[:, None] + padded
        low = ways.argmin(axis=0)
        least, chosen = ways.min(axis=0), [(*chosen[low[high]], high) for high in range(limit + 1)]
        if math.isfinite(least[limit]):
            best.append(chosen[limit])
    return best


def neighbours(sizes: tuple[int, ...], limit: int, query: int = 1) -> Iterator[tuple[int, ...]]:
    """The sets in which one size, the last apart, is one or two requests larger or smaller. query: tokens of each."""
    for place in range(len(sizes) - 1):
        for shift in (-2, -1, 1, 2):
            moved = sizes[place] + shift * query
            if 1 <= moved < limit * query and moved not in sizes:
                yield tuple(sorted({*sizes[:place], moved, *sizes[place + 1 :]}))
