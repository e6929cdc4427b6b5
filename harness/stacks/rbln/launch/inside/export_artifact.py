# pyright: basic, reportMissingImports=false
"""Compiles a model for RBLN NPUs with optimum-rbln, in the serving stack's environment, without using a device.

Arguments: the specification as JSON, and the folder to write. It imports nothing of the harness.
Source: optimum-rbln 0.11.1 (modeling_base.py, configuration_decoderonly.py).
"""

from __future__ import annotations

import json
import sys
from typing import Any


def rbln_config(spec: dict[str, Any]) -> dict[str, Any]:
    """Arguments for optimum-rbln; None leaves its default."""
    wanted = {
        "batch_size": spec["batch_size"],
        "max_seq_len": spec["max_seq_len"],
        "decoder_batch_sizes": spec["decoder_batch_sizes"],
        "num_devices": spec["num_devices"],
        "kvcache_num_blocks": spec["kvcache_num_blocks"],
        "kvcache_partition_len": spec["kvcache_partition_len"],
        "npu": spec["npu"],
        "dtype": spec["dtype"],
        # Compiling needs the compiler, not a device.
        "create_runtimes": False,
    }
    return {key: value for key, value in wanted.items() if value is not None}


def main() -> None:
    """Export and save. An exception of optimum-rbln passes through as the error message."""
    from optimum.rbln import RBLNAutoModelForCausalLM
    from transformers import AutoTokenizer

    spec: dict[str, Any] = json.loads(sys.argv[1])
    folder = sys.argv[2]
    where = {"revision": spec["revision"]} if spec["revision"] else {}
    model = RBLNAutoModelForCausalLM.from_pretrained(spec["model"], export=True, rbln_config=rbln_config(spec), **where)
    model.save_pretrained(folder)
    # `vllm serve` reads the tokenizer from the same folder.
    AutoTokenizer.from_pretrained(spec["model"], **where).save_pretrained(folder)


if __name__ == "__main__":
    main()
