"""What the scrapes of a run say of its validity."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.analysis.logs.derive import Derived
from harness.analysis.logs.parse import ParseCounts, metrics_table
from harness.analysis.validity.scrapes import check_counts, check_moved_schedule
from harness.clock import NS_PER_S
from harness.emulator.metrics import ServerMetrics
from harness.engine import EngineConfig
from harness.spec import ServerSpec
from tests.support.analysis_tables import manifest, request_row, requests_table


def scraped(*bodies: str | None) -> Derived:
    """Derived tables of a run with these scrapes: the first before the replay, the last after it; None: no answer."""
    reasons = ["before", *["interval"] * (len(bodies) - 2), "after"]
    scrapes: list[dict[str, Any]] = [
        {"at_ns": at, "reason": reason, "status": 200 if body else 0, "body": body or ""}
        for at, (reason, body) in enumerate(zip(reasons, bodies, strict=True))
    ]
    lines = [json.dumps(scrape).encode() + b"\n" for scrape in scrapes]
    table, num_scrapes, num_failed = metrics_table(lines)
    return Derived({"metrics": table}, ParseCounts(), num_scrapes=num_scrapes, num_failed_scrapes=num_failed)


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
        return [finding.severity for finding in check_moved_schedule(run, derived)]

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
    return [found.evidence.partition(" ")[0] for found in check_counts(requests_table(*rows), derived)]


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
