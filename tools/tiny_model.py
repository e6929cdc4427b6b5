"""Writes a Llama of two small layers with a byte tokenizer into a folder, for a server that only has to run.

``python tools/tiny_model.py FOLDER``, then ``vllm serve FOLDER --load-format dummy``, which draws its weights.
``FOLDER LAYERS WIDTH`` makes a larger one, whose steps take some ms on a CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

END = "<|end|>"
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "dtype": "bfloat16",
}


def byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def write_model(folder: Path, layers: int = 2, width: int = 128) -> None:
    """Configuration and tokenizer; no weights. width: a multiple of 64."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), width // 64)
    folder.mkdir(parents=True, exist_ok=True)
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            | {"id": 0, "content": END, "special": True}
        ],
        "pre_tokenizer": letters,
        "decoder": letters,
        "model": {
            "type": "BPE",
            "vocab": {text: place for place, text in enumerate([END, *byte_letters()])},
            "merges": [],
        },
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END, "pad_token": END}
    for name, content in (("config", MODEL | sizes | heads), ("tokenizer", tokenizer), ("tokenizer_config", settings)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), *map(int, sys.argv[2:4]))
