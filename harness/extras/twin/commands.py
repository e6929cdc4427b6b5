"""``harness server twin``: the twin's environments and artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.terminal import print_text
from harness.errors import SpecError

PathOption = Annotated[
    Path | None, typer.Option("--path", help="where the twin is, or is to be; default: .venv-twin-VERSION")
]


def install(
    path: PathOption = None,
    stack: Annotated[str, typer.Option(help="version of vllm-rbln; default: the newest stable one")] = "",
    python: Annotated[str | None, typer.Option(help="interpreter, 3.10 to 3.13; default: the first that works")] = None,
    torch_wheel: Annotated[str | None, typer.Option(help="a CPU wheel of torch 2.13.0, as a file")] = None,
    torch_index: Annotated[str | None, typer.Option(help="index to take torch's CPU build from")] = None,
    also: Annotated[
        list[str] | None, typer.Option(help="one more version, in an environment beside it: its number")
    ] = None,
) -> None:
    """Install the twin into an environment of its own; run it again to continue.

    Example: `harness server twin install --stack 0.12.0`
    """
    from harness.extras.twin.environment import stack_named
    from harness.extras.twin.install import TorchSource, install_twin

    torch = TorchSource(torch_wheel, torch_index) if torch_wheel or torch_index else None
    versions = [stack_named(version).version for version in (stack, *(also or ()))]
    try:
        for place, version in enumerate(versions):
            folder = path if place == 0 or path is None else path.with_name(f"{path.name}-{version}")
            install_twin(folder, version=version, python=python, torch=torch, on_progress=print_text)
    except KeyboardInterrupt:
        print_text("interrupted: what is done stays, the same command continues", is_error=True)
        raise


def artifact(
    folder: Annotated[Path, typer.Argument(help="folder to write it to")],
    max_num_seqs: Annotated[int, typer.Option(help="most requests running at once")] = 8,
    decode_buckets: Annotated[str, typer.Option(help="comma-separated decode buckets")] = "1,2,4,8",
    slot_tokens: Annotated[int, typer.Option(help="tokens of a slot")] = 8192,
    kv_slots: Annotated[
        int | None, typer.Option(help="physical KV slots; default: one per request of the batch")
    ] = None,
    partition_tokens: Annotated[int | None, typer.Option(help="tokens of one partition (flash attention)")] = None,
    num_devices: Annotated[int, typer.Option(help="NPUs that the artifact is split over")] = 4,
    path: PathOption = None,
) -> None:
    """Write an artifact that the twin serves: a genuine rbln_config.json, a tokenizer, no weights.

    Example: `harness server twin artifact artifacts/qwen3 --max-num-seqs 8 --decode-buckets 1,2,4,8`
    """
    from harness.extras.twin.backend import copy_artifact, twin_spec
    from harness.extras.twin.environment import find_twin

    try:
        buckets = tuple(int(part) for part in decode_buckets.split(","))
    except ValueError:
        raise SpecError("is not a list of whole numbers", where="--decode-buckets", hint="Write 1,2,4,8") from None
    spec = twin_spec(
        batch_size=max_num_seqs,
        decoder_batch_sizes=buckets,
        max_seq_len=slot_tokens,
        kvcache_num_blocks=kv_slots,
        partition_tokens=partition_tokens,
        num_devices=num_devices,
    )
    print_text(str(copy_artifact(find_twin(path), spec, folder)))
