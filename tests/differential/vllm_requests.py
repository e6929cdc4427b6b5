"""Parts of vLLM's requests that both vendor sides make: sampling parameters and block hashes."""

from __future__ import annotations

from functools import cache
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

from tests.differential.histories import STOP_TOKEN


@cache
def parameters_of(max_tokens: int) -> SamplingParams:
    """What a request asks of the sampler; the scheduler only reads it."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, stop_token_ids=[STOP_TOKEN])


def chain_hasher(block_tokens: int, ahead: int = 0) -> Any:
    """vLLM's own block hashing. ahead: so many tokens after its block does a hash cover too, where vLLM knows that."""
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    return get_request_block_hasher(block_tokens, hash_function, *([ahead] if ahead else []))
