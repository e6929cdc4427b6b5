"""Stand-ins for an installed stack and a compiled artifact; and the twin's stack with a package that may be edited."""

from __future__ import annotations

import hashlib
import json
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.extras.twin.environment import TwinEnvironment
from harness.stacks.rbln.launch.patches import patched_text

STACK = {"vllm": "0.22.0", "vllm-rbln": "0.11.1", "optimum-rbln": "0.11.1", "rebel-compiler": "0.11.1"}
TARGET = "vllm_rbln/model_executor/models/optimum/model_base.py"
BEFORE = "import logging\nlogger = logging.getLogger(__name__)\ndef choose(n):\n    b = n\n    return b\n"
DIFF = f"""--- a/{TARGET}
+++ b/{TARGET}
@@ -4,2 +4,3 @@
     b = n
+    logger.debug("[BUCKET] request_nums=%d padded_batch_size=%d", n, b)
     return b
"""


def write_artifact(folder: Path, **changes: Any) -> Path:
    """An artifact as optimum-rbln 0.11.1 saves it; ``changes`` are keys of rbln_config.json."""
    config: dict[str, Any] = {
        "cls_name": "RBLNQwen3ForCausalLMConfig",
        "dtype": "bfloat16",
        "optimum_rbln_version": "0.11.1",
        "_compile_cfgs": [{"compiled_model_name": "prefill", "npu": "RBLN-CA25", "num_devices": 4}],
        "batch_size": 8,
        "max_seq_len": 8192,
        "attn_impl": "eager",
        "kvcache_partition_len": None,
        "kvcache_block_size": 8192,
        "prefill_chunk_size": 128,
        "kvcache_num_blocks": 8,
        "decoder_batch_sizes": [8, 4, 2, 1],
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rbln_config.json").write_text(json.dumps(config))
    for name in ("prefill", *(f"decoder_batch_{size}" for size in config["decoder_batch_sizes"])):
        (folder / f"{name}.rbln").write_bytes(name.encode())
    return folder


def write_environment(root: Path, *, versions: dict[str, str] | None = None) -> Path:
    """A virtual environment with a ``vllm`` command, whose packages are only said to be there."""
    site = root / "site"
    for name, version in (versions or STACK).items():
        described = site / f"{name.replace('-', '_')}-{version}.dist-info"
        described.mkdir(parents=True)
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (root / "bin").mkdir(parents=True)
    for name, text in (
        ("vllm", "#!/bin/sh\nexit 3\n"),
        ("python", f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" -S "$@"\n'),
    ):
        path = root / "bin" / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return root


def write_driver(folder: Path, num_devices: int = 4, contexts: Sequence[dict[str, Any]] = ()) -> Path:
    """A folder for PATH whose ``rbln-smi`` reports devices without any fault."""
    devices = [{"npu": npu, "status": "normal"} for npu in range(num_devices)]
    folder.mkdir()
    command = folder / "rbln-smi"
    command.write_text(f"#!/bin/sh\ncat <<'X'\n{json.dumps({'devices': devices, 'contexts': list(contexts)})}\nX\n")
    command.chmod(0o755)
    return folder


def write_patched_stack(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stack whose vllm-rbln is one little file, with a release whose patch fits it."""
    root = write_environment(folder / "stack")
    target = root / "site" / TARGET
    target.parent.mkdir(parents=True)
    target.write_text(BEFORE)
    patches = folder / "patches" / "vllm_rbln-0.11.1"
    patches.mkdir(parents=True)
    (patches / "bucket_log.patch").write_text(DIFF)
    hashes = [hashlib.sha256(text.encode()).hexdigest() for text in (BEFORE, DIFF, patched_text(DIFF, TARGET, BEFORE))]
    (patches / "manifest.toml").write_text(
        'package = "vllm_rbln"\nversions = ["0.11.1"]\n[[patch]]\nname = "bucket_log"\nfile = "bucket_log.patch"\n'
        f'target = "{TARGET}"\nobserves = "n"\nsha256_before = "{hashes[0]}"\nsha256_patch = "{hashes[1]}"\n'
        f'sha256_after = "{hashes[2]}"\n'
    )
    monkeypatch.setattr("harness.stacks.rbln.launch.patches.PATCH_ROOTS", (folder / "patches",))
    return root


def linked_environment(twin: TwinEnvironment, root: Path) -> Path:
    """The twin's environment again, with a vllm_rbln of its own that may be edited; everything else is linked."""
    site = root / twin.site_packages.relative_to(twin.folder)
    site.mkdir(parents=True)
    for path in twin.site_packages.iterdir():
        if path.name != "vllm_rbln":
            (site / path.name).symlink_to(path)
    for path in (twin.site_packages / "vllm_rbln").rglob("*.*"):
        if path.is_file() and path.suffix != ".pyc":
            copy = site / path.relative_to(twin.site_packages)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    (root / "pyvenv.cfg").write_text((twin.folder / "pyvenv.cfg").read_text())
    (root / "bin").mkdir()
    (root / "bin" / "python").symlink_to(twin.python.resolve())
    script = twin.vllm.read_text().splitlines(keepends=True)
    (root / "bin" / "vllm").write_text("".join([f"#!{root / 'bin' / 'python'}\n", *script[1:]]))
    (root / "bin" / "vllm").chmod(0o755)
    return root
