"""What the real stack does when a prompt spans several KV partitions: the rules' known defect, down to the tokens.

The look-up matches each partition by itself, so a partly matched one before a fully matched one leaves positions that
nobody computed. Skipped where the twin is not installed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import numpy as np
import pytest

from harness.extras.twin.backend import TwinBackend, cached_artifact, twin_spec
from harness.extras.twin.environment import TwinEnvironment
from harness.model.engine import EngineConfig, Scheduler, load_cost_model
from harness.model.plan.blocks import token_block_keys
from harness.model.spec import ServerSpec
from harness.runner.run import LaunchOptions
from tests.support.processes import serving
from tests.support.twin_runs import expected_tokens

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

SPEC = twin_spec(
    batch_size=4, decoder_batch_sizes=(1, 2, 4), max_seq_len=4096, kvcache_num_blocks=12, partition_tokens=1024
)
HEAD = list(range(2000, 2512))
LONG = HEAD + list(range(3000, 4588))
OTHER = HEAD + list(range(5000, 5100))
NUM_TOKENS = 6


def cached_by_the_engine(prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Lengths of the partitions that each prompt reuses, one request after the other, by the engine's rules."""
    config = EngineConfig(
        max_num_seqs=4, decode_buckets=(1, 2, 4), kv_slots=12, slot_tokens=4096, partition_tokens=1024
    )
    scheduler = Scheduler(config, load_cost_model("paper"))
    lengths: list[tuple[int, ...]] = []
    for handle, prompt in enumerate(prompts):
        keys = token_block_keys(np.asarray(prompt, dtype=np.int32))
        scheduler.submit(handle, len(prompt), NUM_TOKENS, keys)
        lengths.append(scheduler.schedule().cached_lengths)
        scheduler.finish_step()
        while scheduler.has_work:
            scheduler.schedule()
            scheduler.finish_step()
    return lengths


def test_a_hole_in_reused_partitions_changes_the_answer_of_the_real_stack(
    twin: TwinEnvironment, tmp_path: Path
) -> None:
    artifact = cached_artifact(twin, SPEC)
    server = ServerSpec(
        max_num_seqs=4,
        decode_buckets=(1, 2, 4),
        kv_slots=12,
        slot_tokens=4096,
        artifact=str(artifact),
        start_timeout_s=300.0,
        stop_grace_s=10.0,
    )
    shapes = json.loads((artifact / "prefill.rbln").read_text())
    prompts = [LONG, OTHER, LONG]
    launch = TwinBackend(timing="none").launch(server, LaunchOptions(0, tmp_path))
    with serving(launch, tmp_path) as process:
        answers: list[list[int]] = []
        for prompt in prompts:
            body = {"model": launch.model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True}
            answer = httpx.post(f"http://{launch.host}:{launch.port}/v1/completions", json=body, timeout=120)
            answers.append(answer.json()["choices"][0]["token_ids"])
        process.stop(grace_s=server.stop_grace_s)

    right = [expected_tokens(prompt, NUM_TOKENS, shapes["token_low"], shapes["token_high"]) for prompt in prompts]
    assert cached_by_the_engine(prompts) == [(), (512,), (512, 1024)]
    assert re.findall(r"\[CACHE-HIT\].* OB=(\[.*?\])", (tmp_path / "server.log").read_text()) == ["[0]", "[3, 1]"]
    assert answers[:2] == right[:2]
    assert answers[2] != right[2]
    trace = [json.loads(line) for line in (tmp_path / "device_trace.jsonl").read_text().splitlines()]
    assert [record for record in trace if record["kind"] == "decode"][-1]["unwritten_reads"] > 0
