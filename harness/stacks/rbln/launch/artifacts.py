"""Compiled models as folders: their configuration, whether they fit an experiment's server, and their identity.

Values that the stack would accept and then fail on, or silently change, are refused here by name. Nothing is compiled
or changed.
Source: optimum-rbln 0.11.1 to 0.12.0 (configuration_decoderonly.py), vllm-rbln 0.11.1 to 0.12.0 (from_optimum.py).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from harness.errors import SpecError
from harness.model.engine.config import requested_settings
from harness.model.spec import ServerSpec, load_toml
from harness.model.spec.server import keys_applied_by
from harness.shipped import find_shipped, shipped_names
from harness.stacks.rbln.launch.devices import DeviceReport
from harness.stacks.rbln.launch.inside.remote_host import describe_artifact
from harness.stacks.rbln.rules.kv_rules import RuleSet

CONFIG_FILE = "rbln_config.json"
EAGER_LIMIT_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class ArtifactConfig:
    """Parameters of a compiled model. partition_tokens: None for eager attention, where a slot is max_seq_len long.

    kvcache_num_blocks: physical KV regions of kvcache_block_tokens each. decoder_batch_sizes: ascending.
    """

    batch_size: int
    decoder_batch_sizes: tuple[int, ...]
    max_seq_len: int
    kvcache_num_blocks: int
    kvcache_block_tokens: int
    partition_tokens: int | None
    prefill_chunk_tokens: int
    num_devices: int
    npu: str
    optimum_rbln: str
    model: str

    @property
    def slots_per_seq(self) -> int:
        """Physical KV regions of the longest request."""
        return -(-self.max_seq_len // max(1, self.partition_tokens or self.max_seq_len))


LARGEST_BATCH = 1 << 20


def read_artifact(folder: Path, sizes: Sequence[int] = (), environment: str = "") -> ArtifactConfig:
    """The configuration of the artifact in ``folder``; a SpecError says what is missing and what to do.

    sizes, environment: the decode buckets that are wanted, and the stack's environment, to name what to compile.
    """
    how = _how_to_get(folder, sizes, environment)
    if not folder.is_dir():
        raise SpecError("no such artifact", where=str(folder), hint=how)
    hint = f"An artifact is a folder saved by optimum-rbln. {how}"
    with SpecError.on_os_error(f"holds no readable {CONFIG_FILE}", where=folder, hint=hint):
        text = (folder / CONFIG_FILE).read_bytes()
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return artifact_config(text, files, str(folder))


def _how_to_get(folder: Path, sizes: Sequence[int], environment: str) -> str:
    """The models beside ``folder``, and the command that compiles these sizes."""
    beside = sorted(path.parent.name for path in folder.parent.glob(f"[!.]*/{CONFIG_FILE}") if path.parent != folder)
    fitting = [
        name
        for name in shipped_names("artifacts")
        if sorted(load_toml(find_shipped("artifacts", name, what="artifact"))["decoder_batch_sizes"]) == sorted(sizes)
    ]
    named = fitting[0] if fitting else "NAME"
    of_sizes = "" if fitting else f" (NAME: {', '.join(shipped_names('artifacts'))}, or a file of your sizes)"
    there = f"Name one that is there: {', '.join(beside)}; or compile" if beside else "Compile"
    command = f"harness server compile {named} -o {folder.parent}{environment and f' --environment {environment}'}"
    return f"{there} it, and name the folder that this prints: {command}{of_sizes}"


def named_artifact(server: ServerSpec) -> Path:
    """The folder of a server's compiled model; SpecError where it names none."""
    if not server.artifact:
        what = "is missing"
        raise SpecError(what, where="server.artifact", hint="Name the folder that harness server compile prints")
    return Path(server.artifact)


def check_served(server: ServerSpec) -> None:
    """SpecError unless the compiled model of a server is on this machine, with the settings of the server."""
    config = read_artifact(named_artifact(server), server.decode_buckets, server.environment)
    check_artifact(config, server, server.artifact)


def artifact_config(text: str | bytes, files: Collection[str], where: str) -> ArtifactConfig:
    """The configuration ``text`` of an artifact that holds ``files``; SpecError when it or a graph is not there."""
    place = f"{where}/{CONFIG_FILE}"
    try:
        table = cast("dict[str, Any]", json.loads(text))
        compiled = cast("list[dict[str, Any]]", table.get("_compile_cfgs") or [])
        config = ArtifactConfig(
            batch_size=int(table["batch_size"]),
            decoder_batch_sizes=tuple(sorted(int(size) for size in table["decoder_batch_sizes"])),
            max_seq_len=int(table["max_seq_len"]),
            kvcache_num_blocks=int(table["kvcache_num_blocks"]),
            kvcache_block_tokens=int(table["kvcache_block_size"]),
            partition_tokens=None if not table.get("kvcache_partition_len") else int(table["kvcache_partition_len"]),
            prefill_chunk_tokens=int(table["prefill_chunk_size"]),
            num_devices=max([int(graph.get("num_devices") or 1) for graph in compiled], default=1),
            npu=str(next((graph["npu"] for graph in compiled if graph.get("npu")), "")),
            optimum_rbln=str(table.get("optimum_rbln_version", "")),
            model=str(table.get("cls_name", "")),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SpecError(
            f"is not the configuration of a decoder-only model ({error!r})", where=place, hint="Compile it again"
        ) from error
    if not all(0 < size <= LARGEST_BATCH for size in config.decoder_batch_sizes):
        raise SpecError(
            f"names decode batches of {config.decoder_batch_sizes[0]} to {config.decoder_batch_sizes[-1]}",
            where=place,
            hint="Compile it again",
        )
    missing = [name for name in graph_files(config) if name not in files]
    if missing:
        raise SpecError(f"lacks {', '.join(missing)}", where=where, hint="It was copied in part; copy it again")
    return config


def graph_files(config: ArtifactConfig) -> tuple[str, ...]:
    """The compiled graphs that an artifact must hold."""
    return ("prefill.rbln", *(f"decoder_batch_{size}.rbln" for size in config.decoder_batch_sizes))


def check_artifact(config: ArtifactConfig, server: ServerSpec, where: str) -> None:
    """Raise SpecError naming every setting of ``server`` that the artifact does not have.

    Fewer slots than compiled are allowed: --num-gpu-blocks-override sets them without a recompile.
    """
    wanted: list[tuple[str, object, object]] = [
        ("max_num_seqs", server.max_num_seqs, config.batch_size),
        ("decode_buckets", list(server.decode_buckets), list(config.decoder_batch_sizes)),
        ("slot_tokens", server.slot_tokens, config.max_seq_len),
    ]
    different = [f"{key} is {requested}, compiled {made}" for key, requested, made in wanted if requested != made]
    slots = server.physical_slots(config.slots_per_seq)
    if slots > config.kvcache_num_blocks:
        # vllm-rbln does not check this and would address KV memory that does not exist.
        left_out = " (left out: room for max_num_seqs)" if server.kv_slots is None else ""
        different.append(f"kv_slots is {slots}{left_out}, compiled {config.kvcache_num_blocks}")
    if different:
        raise SpecError(
            f"does not fit the experiment: {'; '.join(different)}",
            where=where,
            hint="Name another artifact, compile the model again (harness server compile), or change [server]",
        )
    if server.devices and len(server.devices) != config.num_devices:
        raise SpecError(
            f"was compiled for {config.num_devices} devices, the experiment names {len(server.devices)}",
            where=where,
            hint="Change server.devices",
        )


def blocks_override(config: ArtifactConfig, server: ServerSpec) -> int | None:
    """The value of --num-gpu-blocks-override; None when the compiled number is wanted."""
    slots = server.physical_slots(config.slots_per_seq)
    return None if slots == config.kvcache_num_blocks else slots


def settings_applied(
    server: ServerSpec, config: ArtifactConfig, rules: RuleSet | None, patch: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings that a launch of the real stack applies, as JSON values: through the artifact and the command line.

    The stack ends at its start for an unknown argument, and logs the effect of the others. rules: of the
    release; None: unknown. patch: the manifest's record of the patch.
    """
    requested = requested_settings(server)
    return {
        **{key: requested[key] for key in keys_applied_by("rbln")},
        "decode_buckets": list(config.decoder_batch_sizes),
        "patch": patch["mode"],
        "partition_tokens": config.partition_tokens,
        **({} if rules is None else {"rules": rules.name}),
    }


def requested_stack(
    server: ServerSpec,
    config: ArtifactConfig,
    *,
    versions: Mapping[str, str],
    identity: Mapping[str, Any],
    devices: DeviceReport | None,
) -> dict[str, Any]:
    """The requested settings of a launch, for the manifest. devices: their state before it."""
    return {
        "server": server.model_dump(mode="json"),
        "num_gpu_blocks_override": blocks_override(config, server),
        "versions": dict(versions),
        "artifact": {**identity, "config": asdict(config)},
        "devices": None if devices is None else devices.raw,
    }


def artifact_identity(folder: Path) -> dict[str, Any]:
    """Identity of the artifact. The registry of ``compile`` has hashes of whole files."""
    return identity_of(folder, describe_artifact(folder))


def identity_of(folder: Path, described: Mapping[str, Any]) -> dict[str, Any]:
    """Identity of an artifact on any host, from what ``describe_artifact`` says of it there."""
    sizes: Mapping[str, int] = described["sizes"]
    return {
        "name": folder.name,
        "sha256_edges": described["sha256_edges"],
        "num_files": len(sizes),
        "size_bytes": sum(sizes.values()),
    }
