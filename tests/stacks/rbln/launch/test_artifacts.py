"""An artifact is read as the stack will read it, and one that is not what the experiment asks for is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.errors import SpecError
from harness.model.spec import ServerSpec
from harness.stacks.rbln.launch.artifacts import artifact_identity, blocks_override, check_artifact, read_artifact
from tests.support.stacks import write_artifact


def test_what_it_was_compiled_for_is_read_from_its_own_file(tmp_path: Path) -> None:
    config = read_artifact(write_artifact(tmp_path))
    assert (config.batch_size, config.decoder_batch_sizes, config.max_seq_len) == (8, (1, 2, 4, 8), 8192)
    assert (config.num_devices, config.npu, config.kvcache_num_blocks) == (4, "RBLN-CA25", 8)
    assert config.partition_tokens is None


def test_a_folder_that_is_not_there_is_refused_with_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        read_artifact(tmp_path / "nowhere", (1, 2, 4, 6, 8), "/opt/stack")
    assert str(refused.value).endswith(
        "nowhere: no such artifact. Compile it, and name the folder that this prints: "
        f"harness server compile qwen3-4b-bucket6 -o {tmp_path} --environment /opt/stack"
    )
    write_artifact(tmp_path / "qwen3-4b-0123")
    with pytest.raises(SpecError, match=r"Name one that is there: qwen3-4b-0123; or compile it, .* compile NAME -o"):
        read_artifact(tmp_path / "nowhere", (3,))


def test_a_folder_without_its_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"holds no readable rbln_config\.json \(No such file"):
        read_artifact(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"batch_size": 8}', '{"batch_size": "many"}'])
def test_a_configuration_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rbln_config.json").write_text(text)
    with pytest.raises(SpecError, match="is not the configuration of a decoder-only model"):
        read_artifact(tmp_path)


def test_a_graph_that_was_not_copied_is_named(tmp_path: Path) -> None:
    (write_artifact(tmp_path) / "decoder_batch_4.rbln").unlink()
    with pytest.raises(SpecError, match=r"lacks decoder_batch_4\.rbln.*copied in part"):
        read_artifact(tmp_path)


def test_an_experiment_that_it_fits_passes(tmp_path: Path) -> None:
    config = read_artifact(write_artifact(tmp_path, kvcache_num_blocks=16))
    for slots, override in ((None, 8), (16, None), (12, 12), (6, 6)):
        server = ServerSpec(kv_slots=slots)
        check_artifact(config, server, "a")
        assert blocks_override(config, server) == override


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"max_num_seqs": 4, "decode_buckets": (1, 4)}, "max_num_seqs is 4, compiled 8; decode_buckets is"),
        ({"decode_buckets": (1, 8)}, r"decode_buckets is \[1, 8\], compiled \[1, 2, 4, 8\]"),
        ({"slot_tokens": 4096}, "slot_tokens is 4096, compiled 8192"),
        ({"max_num_seqs": 9, "decode_buckets": (9,)}, r"kv_slots is 9 \(left out: room for max_num_seqs\), compiled 8"),
        ({"kv_slots": 9}, "kv_slots is 9, compiled 8"),
        ({"devices": (0, 1)}, "compiled for 4 devices, the experiment names 2"),
    ],
)
def test_every_disagreement_is_named(tmp_path: Path, server: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_artifact(read_artifact(write_artifact(tmp_path)), ServerSpec(**server), "artifact")


def test_the_identity_covers_every_file_and_finds_a_changed_one(tmp_path: Path) -> None:
    before = artifact_identity(write_artifact(tmp_path))
    big = tmp_path / "prefill.rbln"
    big.write_bytes(b"a" * (5 << 20))
    grown = artifact_identity(tmp_path)
    big.write_bytes(b"a" * ((5 << 20) - 1) + b"b")
    assert len({before["sha256_edges"], grown["sha256_edges"], artifact_identity(tmp_path)["sha256_edges"]}) == 3
    assert grown["num_files"] == 6
