"""Artifacts for the twin, written by optimum-rbln's classes in the twin's environment, once per specification.

Values that the stack would accept and then fail on are refused here by name. Nothing is compiled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.errors import ServerError, SpecError
from harness.stack.rbln.twin.environment import INSIDE, TwinEnvironment, twin_variables

SPEC_FILE = "twin_artifact.json"
EAGER_LIMIT_TOKENS = 32_768
WRITER = INSIDE / "write_artifact.py"


@dataclass(frozen=True)
class ArtifactSpec:
    """Parameters of an artifact. kv_slots: physical KV regions; partition_tokens: None for eager attention."""

    batch_size: int = 8
    decoder_batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    max_seq_len: int = 8192
    kv_slots: int = 8
    partition_tokens: int | None = None
    num_devices: int = 4
    npu: str = "RBLN-CA25"

    def __post_init__(self) -> None:
        buckets = self.decoder_batch_sizes
        for name in ("batch_size", "max_seq_len", "kv_slots", "num_devices"):
            if (value := getattr(self, name)) < 1:
                raise SpecError(f"{value} is not a positive number", where=name)
        if min(buckets, default=0) < 1 or len(set(buckets)) < len(buckets):
            raise SpecError(f"{list(buckets)} are not different positive numbers", where="decoder_batch_sizes")
        if max(buckets) > self.batch_size:
            raise SpecError(
                f"bucket {max(buckets)} is above batch_size {self.batch_size}",
                where="decoder_batch_sizes",
                hint="Drop it, or raise batch_size",
            )
        if self.batch_size not in buckets:
            # With a single bucket the stack fails on loading; with several it silently adds a graph.
            raise SpecError(
                f"{list(buckets)} lacks batch_size {self.batch_size}", where="decoder_batch_sizes", hint="Add it"
            )
        if self.max_seq_len % 128:
            raise SpecError(f"{self.max_seq_len} is not a multiple of 128", where="max_seq_len")
        partition = self.partition_tokens
        if partition is not None and (
            partition < 1 or partition % 128 or self.max_seq_len % partition or self.max_seq_len < 2 * partition
        ):
            raise SpecError(
                f"{partition} is not a multiple of 128 that divides max_seq_len ({self.max_seq_len}) in two or more",
                where="partition_tokens",
                hint="Leave it out for eager attention",
            )
        if self.partition_tokens is None and self.max_seq_len > EAGER_LIMIT_TOKENS:
            raise SpecError(
                f"{self.max_seq_len} is above the {EAGER_LIMIT_TOKENS} tokens of eager attention",
                where="max_seq_len",
                hint="Give partition_tokens",
            )
        if self.kv_slots == 1 and self.batch_size > 1:
            raise SpecError("1 slot below the limit leaves none to use", where="kv_slots", hint="Give at least 2")

    @property
    def key(self) -> str:
        """Name of the specification: equal specifications share an artifact."""
        canonical = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(canonical.encode() + WRITER.read_bytes()).hexdigest()[:16]


def cached_artifact(twin: TwinEnvironment, spec: ArtifactSpec, root: Path | None = None) -> Path:
    """The folder of ``spec``'s artifact below ``root`` (default: the twin's own folder), written when missing."""
    folder = (twin.folder / "artifacts" if root is None else root) / f"twin-qwen3-4b-{spec.key}"
    return folder if (folder / SPEC_FILE).is_file() else write_artifact(twin, spec, folder)


def write_artifact(twin: TwinEnvironment, spec: ArtifactSpec, folder: Path) -> Path:
    """Write ``spec``'s artifact to ``folder``, which must not exist or be an older artifact of the twin.

    Raises SpecError with the message of optimum-rbln when it refuses the specification.
    """
    folder = folder.absolute()
    if folder.exists() and any(folder.iterdir()) and not (folder / SPEC_FILE).is_file():
        raise SpecError("holds other files", where=str(folder), hint="Choose another folder")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    wanted = {
        "batch_size": spec.batch_size,
        "max_seq_len": spec.max_seq_len,
        "decoder_batch_sizes": list(spec.decoder_batch_sizes),
        "kvcache_num_blocks": spec.kv_slots,
        "kvcache_partition_len": spec.partition_tokens,
        "num_devices": spec.num_devices,
        "npu": spec.npu,
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [str(twin.python), str(WRITER), json.dumps(wanted), str(partial)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **twin_variables(twin)},
        )
        if done.returncode:
            message = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            raise SpecError(
                f"optimum-rbln refuses it: {message[-1].rstrip('.')}", where="artifact", hint="Change the named value"
            )
        (partial / SPEC_FILE).write_text(json.dumps(asdict(spec), indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        raise ServerError(f"cannot be written ({error.strerror})", where=str(folder)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
