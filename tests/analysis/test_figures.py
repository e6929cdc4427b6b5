"""The method's figures: the paper's printed arithmetic where it prints inputs and outputs, and small cases by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis import reuse
from harness.analysis.cost import padding as pad
from harness.analysis.cost import reconstruct as rec
from harness.model.engine import load_cost_model
from tests.support.analysis_tables import request_row, requests_table, steps_table


def test_padding_and_histogram_of_a_step_log() -> None:
    steps = steps_table((6, 8), (6, 8), (5, 8), (1, 1))
    assert pad.padding_of(pad.steps_by_n_b(steps)) == (7, 25)
    assert pad.steps_by_n_b(steps) == {(1, 1): 1, (5, 8): 1, (6, 8): 2}
    assert pad.padding_of(pad.steps_by_n_b(steps_table())).ratio is None


@pytest.mark.parametrize(
    ("p0", "p1", "tokens"),
    [(2000, 2008, 1920), (1280, 1280, 1152), (1280, 1281, 1280), (127, 300, 0), (1600, 1700, 1536), (900, 500, 384)],
)
def test_formula_c(p0: int, p1: int, tokens: int) -> None:
    assert reuse.reusable_tokens(p0, p1) == tokens


def test_rearrivals_are_held_against_formula_c() -> None:
    requests = requests_table(
        request_row(0, 0, prompt_tokens=1000),
        request_row(0, 1, prompt_tokens=1300, cached_tokens=896),
        request_row(1, 0, prompt_tokens=1000),
        request_row(1, 1, prompt_tokens=1300, cached_tokens=0),
    )
    found = reuse.rearrivals(requests)
    assert [(one.reusable_tokens, one.is_reused, one.is_partial) for one in found] == [
        (896, True, False),
        (896, False, False),
    ]
    assert reuse.prompt_tokens(requests) - (reuse.cached_tokens(requests) or 0) == 1000 + 404 + 1000 + 1300


def test_paged_kv_memory_is_held_against_blocks_of_its_size_and_keeps_what_was_generated() -> None:
    requests = requests_table(
        request_row(0, 0, prompt_tokens=1000, completion_tokens=49),
        request_row(0, 1, prompt_tokens=1300, cached_tokens=1040),
    )
    (found,) = reuse.rearrivals(requests, rule=reuse.ReuseRule(16, keeps_generated=True))
    # The KV of the last generated token was never computed: 1048 tokens remain.
    assert (found.reusable_tokens, found.is_partial) == (1040, False)


def test_reuse_that_an_answer_does_not_state_is_unknown() -> None:
    requests = requests_table(
        request_row(0, 0),
        request_row(0, 1, cached_tokens=None),
        request_row(1, 0),
        request_row(1, 1, cached_tokens=128),
    )
    found = reuse.rearrivals(requests)
    assert [(one.cached_tokens, one.is_reused, one.is_partial) for one in found] == [
        (None, None, None),
        (128, True, True),
    ]
    assert reuse.cached_tokens(requests) is None


@pytest.mark.parametrize(
    ("stated", "counter", "recorded"),
    [
        ([None, 128], 128.0, [0, 128]),  # vLLM leaves the field out of an answer that reused nothing
        ([None, None], 0.0, [0, 0]),
        ([None, None], 4551.0, [None, None]),
        ([None, None], None, [None, None]),
        ([None, 128], None, [0, 128]),
    ],
)
def test_a_missing_field_is_zero_only_where_nothing_else_speaks_against_it(
    stated: list[int | None], counter: float | None, recorded: list[int | None]
) -> None:
    requests = requests_table(*(request_row(0, place, cached_tokens=one) for place, one in enumerate(stated)))
    assert reuse.with_known_zeros(requests, counter).column("cached_tokens").to_pylist() == recorded


def test_a_request_without_an_answer_has_no_reuse_to_state() -> None:
    failed = request_row(0, 1, status="timeout", prompt_tokens=None, completion_tokens=None, cached_tokens=None)
    requests = reuse.with_known_zeros(requests_table(request_row(0, 0), failed), 0.0)
    assert requests.column("cached_tokens").to_pylist() == [0, None]
    assert reuse.cached_tokens(requests) is not None


def test_losing_reuse_costs_the_difference_of_two_prefills() -> None:
    model = load_cost_model("paper")
    lost = reuse.extra_prefill_ns(model, 2008, 1920)
    assert lost == model.prefill_ns(2008) - model.prefill_ns(88)
    assert lost / 1e6 == pytest.approx(16 * (21.206 + 6.399e-4 * 2008) - (21.206 + 6.399e-4 * 88), abs=1e-3)


def test_channel_a_prices_steps_and_computed_prefills() -> None:
    model = load_cost_model("paper")
    a = rec.channel_a(
        steps_table((1, 1), (6, 8), (6, 8)),
        requests_table(request_row(0, 0, prompt_tokens=2008, cached_tokens=1920), request_row(1, 0, prompt_tokens=500)),
        model,
    )
    assert a.decode_ns == 9_870_000 + 501_000 + 41_300 + 2 * (12_970_000 + 501_000 + 6 * 41_300)
    assert a.prefill_ns == model.prefill_ns(88, 1920) + model.prefill_ns(500)
    assert (a.num_extrapolated_prefills, a.num_unpriced_requests, a.context_problem) == (1, 0, "")


def test_channel_a_says_what_it_could_not_price() -> None:
    failed = request_row(0, 0, status="connection", prompt_tokens=None, completion_tokens=None)
    a = rec.channel_a(steps_table((6, 6)), requests_table(failed), load_cost_model("paper"))
    assert (a.num_unpriced_requests, a.num_extrapolated_steps) == (1, 1)
    context = rec.channel_a(steps_table((1, 1)), requests_table(failed), load_cost_model("context-1-2-4-8"))
    assert context.context_problem == "the log has no KV lines"


def test_channel_b_is_the_union_of_in_flight_intervals() -> None:
    def in_flight(session: int, sent: int | None, done: int | None) -> dict[str, Any]:
        return request_row(session, 0, sent_ns=sent, done_ns=done)

    requests = requests_table(in_flight(0, 0, 10), in_flight(1, 5, 12), in_flight(2, 20, 21), in_flight(3, 7, None))
    assert rec.channel_b(requests) == 13


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_union_counts_every_covered_instant_once(spans: list[tuple[int, int]]) -> None:
    covered = {at for start, length in spans for at in range(start, start + length)}
    assert rec.union_ns((start, start + length) for start, length in spans) == len(covered)


def test_the_tolerance_follows_the_baselines_residual() -> None:
    # r/B of 0.0377 is above 0.02 and sets the revised tolerance; the older rule knows 0.02 only.
    a_ns, b_ns = 9_623, 10_000
    assert rec.agreement_tolerance(a_ns, b_ns) == pytest.approx(0.0377)
    assert rec.agreement_tolerance(a_ns, b_ns, rule="initial") == 0.02
    assert rec.agreement_tolerance(9_990, 10_000) == 0.02
    assert rec.agreement_tolerance(9_990, 10_000, tau0=0.005) == 0.005


def test_channels_agree_up_to_the_tolerance() -> None:
    # Table S8: N = 6, more KV slots, initial: 0.9793 and 0.9588 differ by 0.0205, above the older tolerance.
    agreement = rec.ChannelAgreement(0.9793 - 0.9588, 0.02)
    assert round(agreement.difference, 4) == 0.0205
    assert not agreement.is_agreed
    assert rec.ChannelAgreement(0.9793 - 0.9588, 0.036).is_agreed
