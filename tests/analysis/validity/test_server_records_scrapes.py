"""What the scrapes of a run say of its validity."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis.logs.derive import of_model
from harness.analysis.logs.parse import Derived, ParseCounts, metrics_table
from harness.analysis.validity.evidence import Evidence
from harness.analysis.validity.server_records import (
    check_counts,
    check_engines,
    check_moved_schedule,
    check_same_server,
    check_scrapes,
)
from harness.clock import NS_PER_S
from harness.measure.emulator.metrics import ServerMetrics
from harness.measure.records.manifest import Manifest
from harness.model.engine import EngineConfig
from harness.model.spec import ServerSpec
from tests.support.analysis_tables import manifest, request_row, requests_table


def scraped(*bodies: str | None) -> Derived:
    """Derived tables of a run with these scrapes: the first before the replay, the last after it; None: no answer."""
    reasons = ["before", *["interval"] * (len(bodies) - 2), "after"]
    scrapes: list[dict[str, Any]] = [
        {"at_ns": at, "reason": reason, "status": 200 if body else 0, "body": body or ""}
        for at, (reason, body) in enumerate(zip(reasons, bodies, strict=True))
    ]
    lines = [json.dumps(scrape).encode() + b"\n" for scrape in scrapes]
    derived = Derived({}, ParseCounts())
    table, derived.num_scrapes, derived.num_failed_scrapes = metrics_table(lines, derived.counters)
    derived.tables["metrics"] = table
    return derived


def of(run: Manifest, derived: Derived) -> Evidence:
    """A run of which nothing but its scrapes is judged."""
    return Evidence(run, requests_table(), derived)


@pytest.mark.parametrize(
    ("moved_s", "severity"), [(0.0, None), (0.9, None), (1.0, "warning"), (4.9, "warning"), (5.0, "invalid")]
)
def test_an_emulators_moved_schedule_is_summed_and_judged(moved_s: float, severity: str | None) -> None:
    server = ServerMetrics("m", EngineConfig.from_server(ServerSpec()), 100)
    server.schedule_moved(7 * NS_PER_S)  # before the replay
    first = server.render().decode()
    for _ in range(2):
        server.schedule_moved(round(moved_s * NS_PER_S / 2))
    derived = scraped(first, server.render().decode())

    def found(**limits: float) -> list[str]:
        times = {"replay_start_ns": 30 * NS_PER_S, "replay_end_ns": 130 * NS_PER_S}
        run = manifest(timings=times, requested={"limits": limits})
        return [finding.severity for finding in check_moved_schedule(of(run, derived))]

    assert found() == ([] if severity is None else [severity])
    if severity == "invalid":
        assert found(schedule_moved_share=0.06) == ["warning"]


# Two answered requests of 300 prompt and 3 generated tokens.
SUMS = {
    "prompt_tokens_total": 600,
    "generation_tokens_total": 6,
    "request_success_total": 2,
    "num_preemptions_total": 0,
}


def counters(start: int, **sums: float) -> str:
    """A body whose counters stand at ``start`` and these sums; two engines share each sum."""
    lines = [f"# TYPE vllm:{name} counter" for name in sums]
    lines += [
        f'vllm:{name}{{engine="{engine}",model_name="m"}} {start + share}'
        for name, value in sums.items()
        for engine, share in enumerate((value // 2, value - value // 2))
    ]
    return "\n".join(lines) + "\n"


def disagreeing(rows: tuple[dict[str, Any], ...], **changes: float) -> list[str]:
    zero = counters(70, **dict.fromkeys(SUMS, 0))
    derived = scraped(zero, counters(70, **{**SUMS, **changes}))
    return [
        found.evidence.partition(" ")[0] for found in check_counts(Evidence(manifest(), requests_table(*rows), derived))
    ]


TWO = (request_row(0, 0), request_row(1, 0))


@pytest.mark.parametrize("counter", ["prompt_tokens_total", "generation_tokens_total", "request_success_total"])
@pytest.mark.parametrize("change", [-1, 1, 300])
def test_each_sum_that_the_server_counts_is_that_of_the_answers(counter: str, change: int) -> None:
    assert disagreeing(TWO) == []
    assert disagreeing(TWO, **{counter: SUMS[counter] + change}) == [f"vllm:{counter}"]


def test_an_answer_that_was_left_may_be_in_the_sums_up_to_what_was_planned_of_it() -> None:
    left = request_row(2, 0, status="aborted", prompt_tokens=None, completion_tokens=None)
    assert disagreeing((*TWO, left)) == []
    assert disagreeing((*TWO, left), prompt_tokens_total=900, generation_tokens_total=9, request_success_total=3) == []
    assert disagreeing((*TWO, left), generation_tokens_total=10) == ["vllm:generation_tokens_total"]


def test_a_prompt_that_was_computed_again_is_in_no_sum_and_failed_requests_are_not_judged() -> None:
    assert disagreeing(TWO, num_preemptions_total=1, prompt_tokens_total=901) == []
    failed = request_row(2, 0, status="http_error", prompt_tokens=None, completion_tokens=None)
    assert disagreeing((*TWO, failed), prompt_tokens_total=1) == []


def typed(kind: str, name: str, value: float) -> str:
    return f"# TYPE {name} {kind}\n{name} {value}\n"


@given(
    st.lists(st.one_of(st.none(), st.floats(0, 1e9)), max_size=8),
    st.sampled_from([("counter", "x_total"), ("gauge", "x_total"), ("gauge", "x_count")]),
)
def test_a_counter_that_steps_back_between_any_two_readable_scrapes_is_found(
    values: list[float | None], sample: tuple[str, str]
) -> None:
    """A failed scrape lies between some; gauges may fall."""
    kind, name = sample
    bodies = [None if value is None else typed(kind, name, value) for value in values]
    seen = [value for value in values if value is not None]
    falls = any(after < before for before, after in pairwise(seen))
    found = list(check_same_server(of(manifest(), scraped("a 1\n", *bodies, "a 1\n"))))
    is_counter = sample == ("counter", "x_total")
    assert [one.code for one in found] == (["server-replaced"] if falls and is_counter else [])
    assert all(one.severity == "invalid" for one in found)


def test_a_histogram_that_starts_again_is_found_and_its_sum_may_fall() -> None:
    def body(low: int, total: float) -> str:
        lines = [
            f'h_bucket{{le="1.0"}} {low}',
            f'h_bucket{{le="+Inf"}} {low + 1}',
            f"h_sum {total}",
            f"h_count {low + 1}",
        ]
        return "# TYPE h histogram\n" + "\n".join(lines) + "\n"

    assert list(check_same_server(of(manifest(), scraped(body(3, 5.0), body(4, 4.0))))) == []
    (found,) = check_same_server(of(manifest(), scraped(body(3, 5.0), body(2, 6.0))))
    assert found.evidence == '3 counters fell between two scrapes, first h_bucket{le="1.0"} fell from 3 to 2'


@pytest.mark.parametrize(
    ("later_s", "moved_s", "is_found"), [(0.0, 0, False), (1.0, 0, False), (30.0, 0, True), (3600.0, 3600, False)]
)
def test_a_process_that_started_later_is_another_one_unless_the_wall_clock_moved(
    later_s: float, moved_s: int, is_found: bool
) -> None:
    bodies = [typed("gauge", "process_start_time_seconds", at) for at in (1.8e9, 1.8e9, 1.8e9 + later_s)]
    clock = {"realtime_minus_monotonic_ns": 5, "realtime_minus_monotonic_after_ns": 5 + moved_s * NS_PER_S}
    found = [one.code for one in check_same_server(of(manifest(clock=clock), scraped(*bodies)))]
    assert found == (["server-replaced"] if is_found else [])


@pytest.mark.parametrize(
    "name", ["vllm:cache_config_info", "emulator:config_info", "python_info", "vllm:num_requests_running"]
)
def test_labels_that_are_settings_versions_or_models_stay_the_same(name: str) -> None:
    before, after = f'{name}{{a="1",b="2"}} 1\n', f'{name}{{a="1",b="3"}} 1\n'
    assert list(check_same_server(of(manifest(), scraped(before, None, before)))) == []
    (found,) = check_same_server(of(manifest(), scraped(before, before, after)))
    assert found.evidence == f'the labels of {name} changed during the run, from a="1",b="2" to a="1",b="3"'


@pytest.mark.parametrize(
    ("bodies", "words"),
    [
        ((None, "a 1\n", "a 1\n"), "1 of 3 scrapes have no readable body, the first among them"),
        (("a 1\n", None, None), "2 of 3 scrapes have no readable body, the last among them"),
        ((None, "a 1\n", "# nothing\n"), "1 of 3 scrapes have no readable body, the first and the last among them"),
    ],
)
def test_without_the_first_or_the_last_scrape_a_run_that_needs_metrics_is_invalid(
    bodies: tuple[str | None, ...], words: str
) -> None:
    (found,) = check_scrapes(of(manifest(), scraped(*bodies)))
    assert (found.code, found.severity, found.evidence) == ("scrape-failed", "invalid", words)
    without = manifest(requested={"limits": {"needs_metrics": False}})
    assert [one.severity for one in check_scrapes(of(without, scraped(*bodies)))] == ["warning"]


def test_models_of_which_none_has_the_runs_name_are_named_and_called_summed() -> None:
    body = "".join(f'vllm:prompt_tokens_total{{model_name="{name}"}} 1\n' for name in ("a", "b"))
    derived = scraped(body, body)
    derived.tables["metrics"], derived.other_models = of_model(derived.tables["metrics"], "mine")
    (found,) = check_scrapes(of(manifest(), derived))
    assert found.evidence == "the metrics count several models and none by the run's name, so all are summed: a, b"


def test_several_engines_behind_one_address_are_named_with_what_that_means_for_reuse() -> None:
    def body(*engines: int) -> str:
        return "".join(f'vllm:num_requests_running{{model_name="m",engine="{engine}"}} 0\n' for engine in engines)

    assert list(check_engines(of(manifest(), scraped(body(0), body(0))))) == []
    (found,) = check_engines(of(manifest(), scraped(body(0, 1), body(0, 1))))
    assert (found.code, found.severity) == ("engines-several", "warning")
    assert found.evidence.startswith("2 engines (0, 1) answer behind this address: each has a KV pool of its own")
