"""Captured sizes, and the graph of each batch: twenty servers, and vLLM's own code where the twin has it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest

from harness.extras.twin.environment import TwinEnvironment
from harness.stacks.vllm.graph_flags import flags_of_words
from harness.stacks.vllm.graph_rules import GraphFlags, Graphs, covering_sizes, decode_batches, graphs_of, lost_graphs
from tests.support.vllm_graphs import VllmGraphs, differing, drawn_flags

NUM_DRAWS = 300
V1: dict[str, Any] = {"runner": "v1", "max_num_batched_tokens": 8192}
V2: dict[str, Any] = {**V1, "runner": "v2"}


def captured(server: dict[str, Any], seqs: int, drafts: int = 0, **more: Any) -> Graphs:
    return graphs_of(GraphFlags(**server, max_num_seqs=seqs, num_speculative_tokens=drafts, **more))


def uniform(graphs: Graphs, query: int, *requests: int) -> str:
    """The graphs of so many requests, in short: "F8 P16 N32"."""
    return " ".join(f"{graph[0]}{tokens}" for graph, tokens in (graphs.uniform(n, query) for n in requests))


FEW, DECODES = (1, 2, 3, 5, 8), (1, 2, 3, 5, 8, 20)
UP_TO_8, UP_TO_16 = {"cudagraph_capture_sizes": [1, 2, 4, 8]}, {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
TABLE = {"num_speculative_tokens_per_batch_size": [(1, 8, 4), (9, 32, 1)]}
# The server, its most requests and its drafts; then the number of its sizes, the graphs of so many requests, and those
# of two batches that are not uniform, of one token more than a request's and of two.
EXAMPLES: list[tuple[dict[str, Any], int, int, int, Sequence[int], str, str]] = [
    (V1, 20, 0, 9, DECODES, "F1 F2 F4 F8 F8 F20", "P2 P4"),
    (V1, 20, 3, 21, DECODES, "F4 F8 F16 F24 F32 F80", "P8 P8"),
    (V2, 20, 3, 23, DECODES, "F4 F8 F16 F24 F32 F80", "P8 P8"),
    (V1, 20, 4, 26, DECODES, "F5 F10 F20 F25 F40 F100", "P10 P10"),
    (V2, 20, 4, 32, DECODES, "F5 F10 F20 F25 F40 F100", "P8 P8"),
    (V2, 256, 4, 57, (*FEW, 256), "F5 F10 F20 F25 F40 N1280", "P8 P8"),
    ({**V2, "capability": 10.0}, 256, 4, 96, (*FEW, 256), "F5 F10 F20 F25 F40 N1280", "P8 P8"),
    ({**V1, **UP_TO_8}, 8, 3, 2, FEW, "F4 F8 N12 N20 N32", "P8 P8"),
    ({**V2, **UP_TO_8}, 8, 3, 4, FEW, "F4 F8 N12 N20 N32", "P8 P8"),
    ({**V1, "cudagraph_capture_sizes": [8, 16, 32]}, 8, 3, 3, FEW, "F8 F8 F16 F32 F32", "P8 P8"),
    ({**V1, **UP_TO_16}, 8, 2, 3, FEW, "F3 F6 F9 N15 N24", "P6 P6"),
    ({**V2, **UP_TO_16}, 8, 2, 5, FEW, "F3 F6 F9 P16 N24", "P4 P8"),
    ({**V2, "cudagraph_capture_sizes": [1, 2]}, 8, 3, 2, FEW, "N4 N8 N12 N20 N32", "N5 N6"),
    ({**V1, "max_cudagraph_capture_size": 30}, 20, 3, 4, DECODES, "F4 F8 F16 F24 N32 N80", "P8 P8"),
    (
        {**V1, "cudagraph_mode": "FULL_DECODE_ONLY", "attention_support": "UNIFORM_BATCH"},
        *(20, 3, 21, DECODES, "F4 F8 F16 F24 F32 F80", "N5 N6"),
    ),
    (
        {**V2, "cudagraph_mode": "FULL", "attention_support": "UNIFORM_BATCH"},
        *(20, 3, 23, DECODES, "F4 F8 F16 F24 F32 F80", "P8 P8"),
    ),
    ({**V1, "cudagraph_mode": "PIECEWISE"}, 20, 3, 23, DECODES, "P4 P8 P16 P24 P32 P80", "P8 P8"),
    (
        {**V1, "attention_support": "UNIFORM_SINGLE_TOKEN_DECODE"},
        *(20, 3, 23, DECODES, "P4 P8 P16 P24 P32 P80", "P8 P8"),
    ),
    ({**V2, **TABLE}, 32, 4, 42, (*FEW, 32), "F5 F10 P16 F25 F40 F160", "P8 P8"),
]


@pytest.mark.parametrize(("server", "seqs", "drafts", "num_sizes", "requests", "decodes", "mixed"), EXAMPLES)
def test_a_server_captures_and_runs_each_batch_as_its_release_does(
    server: dict[str, Any], seqs: int, drafts: int, num_sizes: int, requests: Sequence[int], decodes: str, mixed: str
) -> None:
    graphs, query = captured(server, seqs, drafts), 1 + drafts
    assert len(graphs.sizes) == num_sizes
    assert uniform(graphs, query, *requests) == decodes
    assert " ".join(f"{graph[0]}{size}" for graph, size in map(graphs.graph_of, (query + 1, query + 2))) == mixed


def test_sizes_that_no_multiple_of_the_drafts_fits_do_not_start() -> None:
    with pytest.raises(ValueError, match="no size is left after rounding"):
        captured(V1, 8, 3, cudagraph_capture_sizes=[1, 2])


def test_only_from_0_31_on_the_list_without_drafts_ends_with_the_largest_batch() -> None:
    assert captured(V1, 20, release="0.30.0").sizes == (1, 2, 4, 8, 16, 24, 32, 40)
    assert 20 in captured(V1, 20, release="0.31").sizes


def test_a_table_of_drafts_captures_each_of_its_widths_and_only_the_next_size_is_tried() -> None:
    graphs = captured(V2, 32, 4, **TABLE)
    assert uniform(graphs, 2, 3, 5, 9, 12, 17, 32) == "F6 F10 F20 F24 P40 F64"
    assert uniform(graphs, 5, 3, 5, 9, 12, 17, 32) == "P16 F25 P48 F60 F90 F160"


def test_a_table_of_drafts_with_a_huge_range_is_as_long_as_the_server_has_requests() -> None:
    table = ((1, 2, 4), (10**15, 10**15, 1))
    drafts = GraphFlags(max_num_seqs=4, num_speculative_tokens=4, num_speculative_tokens_per_batch_size=table)
    assert drafts.drafts_by_batch() == [4, 4, 4, 4]


def test_the_methods_that_stay_on_the_first_runner_differ_between_releases() -> None:
    on_v2 = {
        (release, method): GraphFlags(release=release, method=method, num_speculative_tokens=3).on_v2
        for release in ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
        for method in ("ngram", "draft_model", "medusa", "eagle")
    }
    assert {method for (release, method), is_v2 in on_v2.items() if release == "0.30.0" and is_v2} == {"eagle"}
    assert {method for (release, method), is_v2 in on_v2.items() if release == "0.32.0" and not is_v2} == {"medusa"}
    assert all(is_v2 for (release, _), is_v2 in on_v2.items() if release == "0.33.0")


def test_a_given_maximum_leaves_the_largest_batch_without_a_graph_and_one_size_covers_it() -> None:
    flags = GraphFlags(**V2, max_num_seqs=6, num_speculative_tokens=6, max_cudagraph_capture_size=42)
    assert [batch.graph for batch in decode_batches(flags)] == ["FULL"] * 5 + ["NONE"]
    assert lost_graphs(flags) == (
        "batches of 6 requests of 7 tokens each run without a graph; size 42 covers them "
        "in place of --max-cudagraph-capture-size: --cudagraph-capture-sizes 1 2 4 8 16 24 32 40 42"
    )
    covered = flags.model_copy(
        update={"cudagraph_capture_sizes": covering_sizes(flags), "max_cudagraph_capture_size": None}
    )
    assert covering_sizes(covered) is None


def test_the_sizes_that_are_offered_cover_every_batch() -> None:
    num_covered = 0
    for flags in islice(drawn_flags("0.33.0", 7), 200):
        with suppress(ValueError):
            if (sizes := covering_sizes(flags)) is not None:
                changes = {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": None}
                more = flags.model_copy(update=changes)
                assert covering_sizes(more) is None
                assert "NONE" not in {batch.graph for batch in decode_batches(more)}
                num_covered += 1
    assert num_covered > 20


def test_the_words_of_a_command_line_are_read_as_vllm_spells_them() -> None:
    words = ["-sc.method", "ngram", "--speculative_config", '{"num_speculative_tokens": 3}', "-O0", "--enforce-eager"]
    assert flags_of_words([*words, "-cc.cudagraph_capture_sizes=[1, 2]", "--max-num-seqs", "8"]) == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "cudagraph_mode": "NONE",
        "enforce_eager": True,
        "cudagraph_capture_sizes": [1, 2],
        "max_num_seqs": 8,
    }
    assert flags_of_words(["--cudagraph-capture-sizes", "1", "4", "--performance-mode=interactivity"]) == {
        "cudagraph_capture_sizes": [1, 4],
        "performance_mode": "interactivity",
    }


@pytest.mark.parametrize(("twin", "release"), [("0.12.0", "0.30.0"), ("0.12.1a8", "0.31.0")], indirect=["twin"])
def test_the_rules_say_what_vllms_own_code_says_for_drawn_flags(twin: TwinEnvironment, release: str) -> None:
    (package,) = twin.folder.glob("lib/python3*/site-packages")
    vllm = VllmGraphs(package)
    for flags in islice(drawn_flags(release, 2), NUM_DRAWS):
        assert differing(vllm, flags) == ""
