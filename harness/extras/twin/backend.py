"""The twin as a backend: ``vllm serve`` of the real stack on the stand-in device, launched as an NPU server is.

Artifact and overlay are written once and reused; settings, log format and device trace belong to one run.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from harness.errors import ServerError, SpecError
from harness.extras.twin.environment import INSIDE, TwinEnvironment, find_twin, installed_twins, twin_variables
from harness.kinds import KINDS
from harness.measure.records import layout
from harness.measure.server.doctor import Check
from harness.measure.server.life import LOOPBACK, LaunchPlan, write_config
from harness.measure.server.process import require_port
from harness.measure.server.vllm_serve import Stack
from harness.model.engine import EngineConfig, load_cost_model
from harness.model.engine.cost import CostModel
from harness.model.spec import ServerSpec
from harness.plugins import BackendKind
from harness.runner.backends.base import (
    MODELLED,
    STACK_KEYS,
    FirstExperiment,
    ServerBackend,
    check_compiled_server,
    npus_of,
    rules_in_force,
)
from harness.runner.run import LaunchOptions
from harness.stacks.rbln.launch.artifacts import check_artifact, read_artifact
from harness.stacks.rbln.launch.compile import RECORD_FILE, CompileSpec, Exporter, compile_artifact
from harness.stacks.rbln.launch.devices import read_devices, require_idle
from harness.stacks.rbln.launch.releases import usable_with
from harness.stacks.rbln.launch.serving import ServedArtifact, ServeSetup, check_installed, serve_plan

INSTALL = "harness server twin install"
NUM_DEVICES = 4
STAND_IN_SMI = INSIDE / "rbln_smi.py"
TWIN_MODEL = "twin-qwen3-4b"
TWIN_WRITER = INSIDE / "write_artifact.py"
"""Optimum-rbln's classes write the artifact; nothing is compiled."""


@dataclass(frozen=True, slots=True)
class TwinBackend(ServerBackend):
    """The real vLLM and vllm-rbln; only the device runtime is a stand-in.

    folder: where the twin is installed; default: what ``server.environment`` names, a folder or a vllm-rbln version, or
    the choice of ``find_twin``. timing: "period" hides the host's work inside the modelled step,
    "device" adds to it, "none" takes no time. faults: as ``twin_device.Fault`` takes them.
    """

    kind: BackendKind = KINDS["twin"]
    shown_keys: ClassVar[frozenset[str]] = STACK_KEYS - {"ssh"}
    folder: Path | None = None
    timing: str = "period"
    faults: tuple[dict[str, Any], ...] = ()

    def check_server(self, server: ServerSpec) -> None:
        check_compiled_server(server)
        if not server.artifact:
            artifact_spec(server)

    def in_force(self, server: ServerSpec) -> dict[str, Any]:
        return rules_in_force(find_twin(self.folder or server.environment).site_packages)

    def check_host(self, server: ServerSpec) -> None:
        require_port(LOOPBACK, server.port)
        check_installed(server, find_twin(self.folder or server.environment).site_packages)

    def exporter(self, server: ServerSpec) -> Exporter:
        return twin_exporter(find_twin(self.folder or server.environment))

    @property
    def first_command(self) -> str:
        return "harness run twin-demo"

    @property
    def first_experiment(self) -> FirstExperiment:
        return replace(
            MODELLED,
            about=f"the real vLLM and vllm-rbln on a stand-in device: {INSTALL}",
            limits=(
                ("rearrival_lag_p99_ms = 500.0", "the stack and the client share this machine's cores"),
                ("start_spread_ms = 500.0", ""),
            ),
            server=(("start_timeout_s = 240.0", ""), ("stop_grace_s = 30.0", "")),
            needs="" if installed_twins() else INSTALL,
        )

    def readiness(self) -> Check:
        """Whether the twin is installed beside the harness, in an environment of its own."""
        try:
            twin = find_twin()
            others = ", ".join(other.version for other in installed_twins() if other.version != twin.version)
            usable = usable_with(twin.site_packages)
            beside = f"; beside it {others}" if others else ""
            found = f"vllm-rbln {twin.version} in {twin.folder}, {usable}{beside}"
            ok = True
        except ServerError as error:
            found, ok = f"{error.what} in {error.where}", None
        return Check(
            name="backend twin",
            ok=ok,
            found=found,
            need="the real vLLM and vllm-rbln in an environment of their own; no device",
            how=f"Run: {INSTALL} (downloads about 1 GB, takes about 3 GB)",
        )

    def launch(self, server: ServerSpec, options: LaunchOptions) -> LaunchPlan:
        """The first launch of a configuration also writes its artifact (some 6 s)."""
        twin = find_twin(self.folder or server.environment)
        chosen_port = require_port(LOOPBACK, options.port)
        artifact = Path(server.artifact).absolute() if server.artifact else cached_artifact(twin, artifact_spec(server))
        config = read_artifact(artifact)
        check_artifact(config, server, str(artifact))
        files = {
            "config": (options.run_folder / layout.TWIN_SETTINGS).absolute(),
            "device_trace": (options.run_folder / layout.DEVICE_TRACE).absolute(),
        }
        npus = npus_of(server, config.num_devices, options.device)
        settings = {
            "timing": self.timing,
            "costs": step_costs(load_cost_model(server.cost_model), server.decode_buckets),
            "trace_path": str(files["device_trace"]),
            "faults": list(self.faults),
        }
        write_config(files["config"], settings)
        command = (sys.executable, str(STAND_IN_SMI), "-j")
        return serve_plan(
            server,
            ServedArtifact(artifact, config, TWIN_MODEL),
            Stack(twin.vllm, dict(twin.stamp.get("versions", {})), twin.site_packages),
            ServeSetup(
                self.kind.name,
                chosen_port,
                options.run_folder,
                options.log_format,
                npus=npus,
                paths=(INSIDE,),
                variables=twin_variables(twin, files["config"]),
                files=files,
                device_command=command,
                devices=require_idle(npus, read_devices(command)),
                requested={"settings": settings},
                overlays=twin.folder / "overlays",
            ),
        )


def twin_exporter(twin: TwinEnvironment) -> Exporter:
    """The command that writes an artifact in the twin's environment."""
    return Exporter(twin.python, TWIN_WRITER, dict(twin.stamp.get("versions", {})), twin_variables(twin), free_gib=0.1)


def twin_spec(**parameters: object) -> CompileSpec:
    """The specification with these keys of CompileSpec; SpecError names every key that is wrong."""
    return CompileSpec.from_table({"model": TWIN_MODEL, **parameters}, where="artifact")


def cached_artifact(twin: TwinEnvironment, spec: CompileSpec) -> Path:
    """The folder of the artifact in the twin's own registry, written when missing."""
    return compile_artifact(spec, twin.folder / "artifacts", twin_exporter(twin)).folder


def copy_artifact(twin: TwinEnvironment, spec: CompileSpec, folder: Path) -> Path:
    """Copy the artifact to ``folder``, which must not exist, or be empty or an earlier artifact."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD_FILE).is_file():
        raise SpecError("holds other files", where=str(folder), hint="Choose another folder")
    source = cached_artifact(twin, spec)
    with ServerError.on_os_error("cannot be written", where=folder):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
    return folder


def artifact_spec(server: ServerSpec) -> CompileSpec:
    """The artifact that would have to be compiled for a server."""
    kv_slots = EngineConfig.from_server(server.replica).kv_slots
    return twin_spec(
        batch_size=server.max_num_seqs,
        decoder_batch_sizes=server.decode_buckets,
        max_seq_len=server.slot_tokens,
        kvcache_num_blocks=None if kv_slots == server.max_num_seqs else kv_slots,
        num_devices=NUM_DEVICES,
    )


def step_costs(model: CostModel, buckets: Sequence[int]) -> dict[str, Any]:
    """A cost model as the stand-in device reads it; femtoseconds, every bucket worked out."""
    return {
        "bucket_fs": {str(bucket): model.bucket_fs(bucket) for bucket in buckets},
        "alpha_fs": model.alpha_fs,
        "beta_fs": model.beta_fs,
        "context_fs": model.context_fs,
        "chunk_tokens": model.chunk_tokens,
        "call_fs": model.call_fs,
        "token_fs": model.token_fs,
        "position_fs": model.position_fs,
    }


def site_packages() -> Path:
    """The packages of the twin's stack, as the service "stand-in stack" gives them."""
    return find_twin().site_packages


BACKEND = TwinBackend()
