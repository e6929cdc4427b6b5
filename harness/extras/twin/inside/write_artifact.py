# pyright: basic, reportMissingImports=false
"""Writes an artifact that the real stack loads: a genuine rbln_config.json, a model's config, a tokenizer, graph files.

Runs in the twin's environment. optimum-rbln's classes choose every default and refuse invalid values. No weights, no
compiler.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from optimum.rbln import RBLNQwen3ForCausalLM, RBLNQwen3ForCausalLMConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

VOCABULARY = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIRST_MERGE = len(SPECIAL_TOKENS) + 256
"""First id of a merged token; lower ids are special tokens and single bytes."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen3_4b() -> Qwen3Config:
    """The published shape of Qwen3-4B; the server uses only its vocabulary size and special tokens."""
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        use_sliding_window=False,
        architectures=["Qwen3ForCausalLM"],
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        dtype="bfloat16",
    )


def made_up_words(count: int) -> list[str]:
    """Pronounceable words, the same at every call."""
    chosen = random.Random(2026)
    syllables = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
    return ["".join(chosen.choices(syllables, k=chosen.randint(2, 5))) for _ in range(count)]


def small_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCABULARY entries, trained on made-up words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(made_up_words(20_000))], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[2],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def rbln_config(spec: dict[str, Any], model_config: Qwen3Config) -> RBLNQwen3ForCausalLMConfig:
    """The artifact's configuration as optimum-rbln's exporter would write it."""
    config = RBLNQwen3ForCausalLMConfig(
        batch_size=spec["batch_size"],
        max_seq_len=spec["max_seq_len"],
        decoder_batch_sizes=spec["decoder_batch_sizes"],
        kvcache_num_blocks=spec["kvcache_num_blocks"],
        kvcache_partition_len=spec["kvcache_partition_len"],
        num_devices=spec["num_devices"],
        npu=spec["npu"],
        create_runtimes=False,
        dtype="bfloat16",
    )
    config = RBLNQwen3ForCausalLM._update_rbln_config(model_config=model_config, rbln_config=config)
    if not config.kvcache_num_blocks:
        raise ValueError(
            "partitioned attention needs kvcache_num_blocks: there is no device memory to estimate it from"
        )
    for compile_config in config.compile_cfgs:
        compile_config.num_devices = spec["num_devices"]
        compile_config.npu = spec["npu"]
    config.freeze()
    return config


def write_graphs(folder: Path, config: RBLNQwen3ForCausalLMConfig, model_config: Qwen3Config) -> None:
    """A small table of shapes in place of each compiled graph."""
    shared = {
        "made_by": "twin",
        "vocab_size": model_config.vocab_size,
        "num_slots": config.kvcache_num_blocks,
        "slot_tokens": config.kvcache_block_size,
        "chunk_tokens": config.prefill_chunk_size,
        "token_low": FIRST_MERGE,
        "token_high": VOCABULARY,
    }
    graphs = {"prefill": shared | {"phase": "prefill", "batch_size": 1}}
    for batch_size in config.decoder_batch_sizes:
        graphs[f"decoder_batch_{batch_size}"] = shared | {"phase": "decode", "batch_size": batch_size}
    for name, shapes in graphs.items():
        (folder / f"{name}.rbln").write_text(json.dumps(shapes) + "\n", encoding="utf-8")


def write_artifact(spec: dict[str, Any], folder: Path) -> None:
    """Write all files that ``vllm serve`` reads into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    model_config = qwen3_4b()
    config = rbln_config(spec, model_config)
    model_config.save_pretrained(folder)
    GenerationConfig(bos_token_id=0, eos_token_id=2, pad_token_id=0).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    config.save(str(folder))
    write_graphs(folder, config, model_config)


if __name__ == "__main__":
    write_artifact(json.loads(sys.argv[1]), Path(sys.argv[2]))
