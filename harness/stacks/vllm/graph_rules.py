"""Which sizes a vLLM captures as graphs, and which graph a decode batch runs on: a table of releases, and the rules.

Sizes count tokens: n requests that verify N drafts each are a batch of n * (1 + N) tokens. Nothing is started here.
Sources, by release: vllm config/vllm.py (_set_cudagraph_sizes, use_v2_model_runner), config/compilation.py
(resolve_cudagraph_mode_and_sizes), v1/cudagraph_dispatcher.py, v1/worker/gpu/cudagraph_utils.py.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Graph = Literal["FULL", "PIECEWISE", "NONE"]
Mode = Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
Support = Literal["NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"]
MOST_REQUESTS = 1 << 16
ANY_QUERY = 0
"""Tokens a request of a graph that takes any."""


@dataclass(frozen=True)
class GraphRelease:
    """What releases of vLLM decide differently.

    v1_methods: ways to draft that stay on model runner V1. captures_max_num_seqs: without drafts the default list ends
    with ``max_num_seqs``. v1_tables: ways to draft for which V1 keeps a table of drafts by batch size; None: all.
    """

    releases: tuple[str, ...]
    v1_methods: frozenset[str]
    captures_max_num_seqs: bool = True
    v1_tables: frozenset[str] | None = None


_ON_V1 = frozenset({"suffix", "custom_class"})
_TRAINED_ON_V1 = _ON_V1 | {"medusa", "mlp_speculator"}
_NGRAM_ON_V1 = _TRAINED_ON_V1 | {"ngram", "ngram_gpu"}
_TABLE = (
    GraphRelease(("0.30.0",), _NGRAM_ON_V1 | {"draft_model"}, captures_max_num_seqs=False),
    GraphRelease(("0.31.0",), _NGRAM_ON_V1),
    GraphRelease(("0.32.0",), _TRAINED_ON_V1),
    GraphRelease(
        ("0.33.0",), _ON_V1, v1_tables=frozenset({"ngram", "eagle", "eagle3", "mtp", "draft_model", "dflash"})
    ),
)
GRAPH_RELEASES = {release: row for row in _TABLE for release in row.releases}
NEWEST = _TABLE[-1].releases[-1]


def graph_release(version: str) -> str | None:
    """The release of a version ("0.33.0", "0.33", "0.32.0+cpu") in the table; None for one that nobody has read."""
    read = re.sub(r"(\.post\d+)?(\+.*)?$", "", version)
    return next((release for release in (read, f"{read}.0") if release in GRAPH_RELEASES), None)


def _known_release(version: str) -> str:
    if (release := graph_release(version)) is None:
        raise ValueError(f"vLLM {version} is not known; known: {', '.join(GRAPH_RELEASES)}")
    return release


def _whole(value: Any) -> Any:
    """Refuse what JSON does not write as a number: "8" and true are mistakes, not 8 and 1."""
    if isinstance(value, bool | str):
        raise ValueError(f"must be a whole number, got {json.dumps(value)}")
    return value


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


Whole = Annotated[int, BeforeValidator(_whole)]
Size = Annotated[Whole, Field(ge=1, le=1 << 24)]


class GraphFlags(BaseModel):
    """The flags that decide about graphs, by vLLM's names. A key that is None or absent: the release's default.

    release: default: the newest that is known. runner: default: the one that release and method run on. capability: of
    the GPU, such as 9.0; it decides the default limits as well, as far as it shows the memory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    release: Annotated[str, AfterValidator(_known_release)] = NEWEST
    method: str | None = None
    runner: Literal["v1", "v2"] | None = None
    max_num_seqs: Annotated[Whole, Field(ge=1, le=MOST_REQUESTS)] | None = None
    max_num_batched_tokens: Size | None = None
    num_speculative_tokens: Annotated[Whole, Field(ge=0, le=4096)] | None = None
    cudagraph_capture_sizes: tuple[Size, ...] | None = None
    max_cudagraph_capture_size: Annotated[Whole, Field(ge=0, le=1 << 24)] | None = None
    cudagraph_mode: Annotated[Mode, BeforeValidator(_upper)] = "FULL_AND_PIECEWISE"
    enforce_eager: bool = False
    performance_mode: Literal["balanced", "interactivity", "throughput"] = "balanced"
    num_speculative_tokens_per_batch_size: tuple[tuple[Whole, Whole, Whole], ...] | None = None
    parallel_drafting: bool = False
    attention_support: Annotated[Support, BeforeValidator(_upper)] = "ALWAYS"
    capability: float = Field(default=9.0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, values: Any) -> Any:
        return (
            {key: value for key, value in values.items() if value is not None} if isinstance(values, dict) else values
        )

    @property
    def row(self) -> GraphRelease:
        """What its release decides."""
        return GRAPH_RELEASES[self.release]

    @property
    def query(self) -> int:
        """Tokens of a request that verifies all its drafts."""
        return 1 + (self.num_speculative_tokens or 0)

    @property
    def on_v2(self) -> bool:
        """Whether model runner V2 serves; a build for CPUs has V1 alone."""
        is_parallel_on_v1 = self.parallel_drafting and self.method not in ("dflash", "dspark")
        return self.runner == "v2" if self.runner else not (is_parallel_on_v1 or self.method in self.row.v1_methods)

    @property
    def limits(self) -> tuple[int, int]:
        """Most requests and most tokens of a step, as `vllm serve` has them on a GPU of this capability."""
        is_large = 9 <= self.capability < 11
        factor = 2 if self.performance_mode == "throughput" else 1
        tokens = self.max_num_batched_tokens or factor * (
            2048 if not is_large else 8192 if self.capability < 10 else 16384
        )
        seqs = self.max_num_seqs or min(factor * (1024 if is_large else 256), tokens)
        return seqs, tokens

    def drafts_by_batch(self) -> list[int] | None:
        """Drafts of a request by the number of requests, from 1 on; None without a table. ValueError: a bad table."""
        table, known = self.num_speculative_tokens_per_batch_size, self.row.v1_tables
        if table is None or (not self.on_v2 and known is not None and self.method not in known):
            return None
        most, (num_seqs, _) = self.num_speculative_tokens or 0, self.limits
        drafts: list[int] = []
        end = 0
        for first, last, number in sorted(table):
            if not end < first <= last or number < 0 or (not end and first != 1):
                what = f"[{first}, {last}, {number}] is no range after the others, of which the first begins at 1"
                raise ValueError(f"num_speculative_tokens_per_batch_size: {what}")
            drafts += drafts[-1:] * (min(first - 1, num_seqs) - len(drafts))
            drafts += [min(most, number)] * (min(last, num_seqs) - len(drafts))
            end = last
        if not drafts:
            raise ValueError("num_speculative_tokens_per_batch_size: has no range")
        return drafts + drafts[-1:] * (num_seqs - len(drafts))


@dataclass(frozen=True)
class Graphs:
    """What was captured. sizes: in force, tokens, ascending. full: sizes of whole graphs, ascending, each with the
    tokens a request that they take. piecewise: sizes of graphs that any batch runs on, ascending.
    """

    mode: Mode
    sizes: tuple[int, ...]
    full: Mapping[int, frozenset[int]]
    piecewise: tuple[int, ...]

    @cached_property
    def _full_sizes(self) -> list[int]:
        return list(self.full)

    def graph_of(self, num_tokens: int, query: int = ANY_QUERY) -> tuple[Graph, int]:
        """The graph of a step, and its tokens with padding. query: tokens of each request where all have as many."""
        place = bisect_left(self._full_sizes, num_tokens)
        if place < len(self._full_sizes):
            # Only the next size is tried: where it is of other query lengths, a larger one is not.
            size = self._full_sizes[place]
            if self.full[size] & {query, ANY_QUERY}:
                return "FULL", size
        place = bisect_left(self.piecewise, num_tokens)
        return ("PIECEWISE", self.piecewise[place]) if place < len(self.piecewise) else ("NONE", num_tokens)

    def uniform(self, num_requests: int, query: int) -> tuple[Graph, int]:
        """The graph of so many requests with ``query`` tokens each, and its tokens with padding."""
        return self.graph_of(num_requests * query, query)


def graphs_of(flags: GraphFlags) -> Graphs:
    """What a server with these flags captures; ValueError says why it would not start."""
    (num_seqs, budget), query, drafts = flags.limits, flags.query, flags.drafts_by_batch()
    if budget < num_seqs:
        raise ValueError(f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({num_seqs})")
    if flags.method is not None and flags.num_speculative_tokens is None:
        raise ValueError(f"num_speculative_tokens is missing, which the method {flags.method!r} takes")
    mode = "NONE" if flags.enforce_eager else flags.cudagraph_mode
    if mode == "NONE":
        return Graphs(mode, (), {}, ())
    if drafts is not None and not flags.on_v2:
        mode = "PIECEWISE"
    sizes = _configured_sizes(flags, num_seqs, budget, drafts)
    mode = _supported_mode(mode, flags.attention_support, query)
    if mode != "PIECEWISE" and query > 1 and not flags.on_v2:
        sizes = _rounded_sizes(sizes, query)
    if mode == "FULL":
        full = dict.fromkeys(sizes, frozenset({ANY_QUERY}))
    elif mode == "PIECEWISE":
        full = {}
    else:
        queries = {query} if drafts is None else {1 + number for number in drafts}
        full = _uniform_graphs(sizes, queries, num_seqs, query)
    return Graphs(mode, sizes, full, sizes if mode in ("PIECEWISE", "FULL_AND_PIECEWISE") else ())


def _counts(most: int, fine: int = 0) -> list[int]:
    """The numbers up to ``most`` of vLLM's own list: 1, 2, 4, by 8 below 256, by 16. fine: up to it, every number."""
    first = list(range(1, fine + 1)) if fine else [number for number in (1, 2, 4) if number <= most]
    return [*first, *range(8, min(most + 1, 256), 8), *range(256, most + 1, 16)]


def _configured_sizes(flags: GraphFlags, num_seqs: int, budget: int, drafts: Sequence[int] | None) -> tuple[int, ...]:
    """The sizes of vLLM's configuration, before the attention backend is known."""
    query, given, largest = flags.query, flags.cudagraph_capture_sizes, flags.max_cudagraph_capture_size
    ceiling = 1024 if 10 <= flags.capability < 11 else 512
    uniform: set[int] = set()
    if largest is None:
        largest = min(num_seqs * query * 2, ceiling)
        if query > 1:
            # The widest batch of each query length, ascending: the last one stays.
            widest = {query: num_seqs} if drafts is None else {1 + k: n for n, k in enumerate(drafts, start=1)}
            counts = {length: min(most, ceiling) for length, most in widest.items()}
            uniform = {n * length for length, most in counts.items() for n in (*_counts(most), most)}
            uniform = {tokens for tokens in uniform if tokens <= largest}
        elif num_seqs <= largest and flags.row.captures_max_num_seqs:
            uniform = {num_seqs}
    most = min(budget, largest)
    if most < 1:
        raise ValueError(f"max_cudagraph_capture_size ({largest}) must be at least 1; without graphs: enforce_eager")
    if given is not None and not given:
        raise ValueError("cudagraph_capture_sizes has no size; without graphs: enforce_eager")
    if given is None:
        fine = min(most, 32) if flags.performance_mode == "interactivity" else 0
        sizes = {*_counts(most, fine), *([budget] if budget <= most else []), *uniform}
    else:
        sizes = set(given)
    kept = tuple(sorted(size for size in sizes if size <= budget))
    asked = flags.max_cudagraph_capture_size
    if given is not None and asked is not None and asked != max(kept, default=0):
        what = f"max_cudagraph_capture_size ({asked}) is not the largest of cudagraph_capture_sizes"
        raise ValueError(f"{what} ({max(kept, default=0)}); give one of the two")
    return kept


def _supported_mode(mode: Mode, support: Support, query: int) -> Mode:
    """What is left of a mode where an attention backend does not support all of it; ValueError: nothing is."""
    if mode == "FULL" and support == "NEVER":
        raise ValueError("cudagraph_mode FULL is not supported by this attention backend; use PIECEWISE")
    if mode == "FULL" and support != "ALWAYS":
        mode = "FULL_AND_PIECEWISE"
    is_lost = support == "NEVER" or (query > 1 and support == "UNIFORM_SINGLE_TOKEN_DECODE")
    return "PIECEWISE" if is_lost else mode


def _rounded_sizes(sizes: tuple[int, ...], query: int) -> tuple[int, ...]:
    """The sizes of model runner V1, which captures multiples of ``query`` alone, none above the largest size."""
    if not sizes:
        return sizes
    rounded = {-(-size // query) * query for size in sizes}
    kept = sorted(size for size in rounded if size <= sizes[-1])
    if not kept:
        if query > sizes[-1]:
            what = (
                f"no size is left after rounding {list(sizes)} up to multiples of {query} (1 + num_speculative_tokens)"
            )
            raise ValueError(what)
        kept = [query]
    return tuple(kept)


def _uniform_graphs(
    sizes: tuple[int, ...], queries: set[int], num_seqs: int, longest: int
) -> dict[int, frozenset[int]]:
    """Whole graphs of decode batches: every size rounded up to a multiple of each query length."""
    found: dict[int, set[int]] = {}
    for query in queries:
        for size in sizes:
            tokens = -(-size // query) * query
            if tokens <= min(num_seqs * longest, sizes[-1], num_seqs * query):
                found.setdefault(tokens, set()).add(query)
    return {tokens: frozenset(found[tokens]) for tokens in sorted(found)}


@dataclass(frozen=True)
class DecodeBatch:
    """A decode batch of so many requests that all verify their drafts: its tokens, graph, and tokens with padding."""

    num_requests: int
    num_tokens: int
    graph: Graph
    padded_tokens: int


def decode_batches(flags: GraphFlags, graphs: Graphs | None = None) -> list[DecodeBatch]:
    """Each decode batch that fits the token budget, from one request on; ValueError: the server would not start.

    A table of drafts by batch size says how many drafts a batch has.
    """
    graphs, (num_seqs, budget), drafts = graphs or graphs_of(flags), flags.limits, flags.drafts_by_batch()
    queries = [flags.query] * num_seqs if drafts is None else [1 + number for number in drafts]
    return [
        DecodeBatch(n, n * query, *graphs.uniform(n, query))
        for n, query in enumerate(queries, start=1)
        if n * query <= budget
    ]


def covering_sizes(flags: GraphFlags) -> tuple[int, ...] | None:
    """The sizes to give so that each decode batch has a graph, and a whole one where some have: as few more as suffice.

    None where all have one, or where none is captured.
    """
    graphs = graphs_of(flags)
    wanted = "FULL" if graphs.full or graphs.mode in ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE") else "PIECEWISE"
    sizes = set(graphs.sizes)
    if graphs.mode == "NONE":
        return None
    while lost := [batch for batch in decode_batches(flags, graphs) if batch.graph != wanted]:
        sizes.add(lost[-1].num_tokens)
        changes = {"cudagraph_capture_sizes": tuple(sorted(sizes)), "max_cudagraph_capture_size": None}
        graphs = graphs_of(flags.model_copy(update=changes))
    return tuple(sorted(sizes)) if sizes != {*graphs_of(flags).sizes} else None


def lost_graphs(flags: GraphFlags) -> str:
    """Which decode batches have no whole graph, and the flag that covers them; "" where all have, or none is captured.

    ValueError: the server would not start.
    """
    sizes = covering_sizes(flags)
    if sizes is None:
        return ""
    batches = decode_batches(flags)
    without = {
        "run without a graph": [batch.num_requests for batch in batches if batch.graph == "NONE"],
        "run on PIECEWISE graphs": [batch.num_requests for batch in batches if batch.graph == "PIECEWISE"],
    }
    if graphs_of(flags).mode == "PIECEWISE":
        del without["run on PIECEWISE graphs"]
    drafts = f" of {flags.query} tokens each" if flags.query > 1 else ""
    what = "; ".join(f"batches of {_ranges(n)} requests{drafts} {how}" for how, n in without.items() if n)
    largest = " in place of --max-cudagraph-capture-size" if flags.max_cudagraph_capture_size is not None else ""
    more = sorted({*sizes} - {*graphs_of(flags).sizes})
    named = f"size{'s' * (len(more) > 1)} {' '.join(map(str, more))} {'cover' if len(more) > 1 else 'covers'} them"
    return f"{what}; {named}{largest}: --cudagraph-capture-sizes {' '.join(map(str, sizes))}"


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in words: "3 to 8, 10"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join(" to ".join(map(str, part)) for part in parts)
