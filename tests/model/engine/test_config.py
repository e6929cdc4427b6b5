"""A vLLM server's defaults: what is left out is the server's choice, and what it drops is no difference."""

from __future__ import annotations

import pytest

from harness.errors import SpecError
from harness.model.engine import EngineConfig
from harness.model.engine.config import differences
from harness.model.spec import ServerSpec

REAL = {"model": "some/model"}
EMULATED = {"rules": "vllm-paged", "cost_model": "emulated-gpu"}


def test_a_vllm_without_written_sizes_has_none_and_an_emulated_one_has_those_of_its_limit() -> None:
    assert ServerSpec.model_validate({**REAL, "max_num_seqs": 3}).decode_buckets == ()
    assert ServerSpec.model_validate({**REAL, "step_log": "steps.jsonl", "model": ""}).decode_buckets == ()
    assert ServerSpec.model_validate({**REAL, "decode_buckets": [1, 2]}).decode_buckets == (1, 2)
    assert ServerSpec.model_validate({**EMULATED, "max_num_seqs": 3}).decode_buckets == (1, 3)
    with pytest.raises(ValueError, match="decode_buckets is empty"):
        ServerSpec.model_validate({**EMULATED, "decode_buckets": []})


def test_sizes_that_were_left_to_the_server_differ_from_none_in_force() -> None:
    server = ServerSpec.model_validate(REAL)
    assert differences(server, {"decode_buckets": [1, 2, 4, 8, 16]}, {"decode_buckets"}) == []


def test_sizes_above_the_token_budget_are_dropped_as_vllm_drops_them() -> None:
    table = {"decode_buckets": [1, 2, 4, 8, 16], "max_num_batched_tokens": 8, "max_num_seqs": 8}
    config = EngineConfig.from_server(ServerSpec.model_validate({**EMULATED, **table}))
    assert config.capture_sizes == (1, 2, 4, 8)
    server = ServerSpec.model_validate({**REAL, **table})
    assert differences(server, {"decode_buckets": [1, 2, 4, 8]}, {"decode_buckets"}) == []
    assert differences(server, {"decode_buckets": [1, 2, 4]}, {"decode_buckets"}) == [
        "decode_buckets: requested [1, 2, 4, 8], in force [1, 2, 4]"
    ]


def test_few_blocks_of_a_vllm_are_those_of_a_cpu() -> None:
    table = {"num_gpu_blocks": 40, "slot_tokens": 4096}
    assert EngineConfig.from_server(ServerSpec.model_validate({**REAL, **table})).block_tokens == 128
    assert EngineConfig.from_server(ServerSpec.model_validate({**REAL, "num_gpu_blocks": 4096})).block_tokens == 16
    with pytest.raises(SpecError, match=r"num_gpu_blocks \(40\) of 16 tokens do not hold one request of 4096 tokens"):
        EngineConfig.from_server(ServerSpec.model_validate({**EMULATED, **table}))
