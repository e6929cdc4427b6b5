"""The twin as a backend: ``vllm serve`` of the real stack on the stand-in device, launched as an NPU server is.

Artifact and overlay are written once and reused; settings, log format and device trace belong to one run.
Next: ``harness.live.server`` starts the LaunchPlan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.engine import EngineConfig, load_cost_model
from harness.engine.cost import CostModel
from harness.live.launch import DEVICE_TRACE_FILE, LOOPBACK, LaunchPlan, LogFormat, check_time_scale, write_config
from harness.live.patches import OverlayRecord, make_overlay
from harness.live.server import require_port
from harness.spec import ServerSpec
from harness.twin.artifact import ArtifactSpec, cached_artifact
from harness.twin.environment import TwinEnvironment, find_twin, logging_config, twin_variables

SETTINGS_FILE = "twin.settings.json"
LOGGING_FILE = "twin.logging.json"
TWIN_MODEL = "twin-qwen3-4b"
NUM_DEVICES = 4


@dataclass(frozen=True, slots=True)
class TwinBackend:
    """The real vLLM and vllm-rbln; only the device runtime is a stand-in.

    folder: where the twin is installed (default: `harness.twin.environment.default_folder`). timing: "period" hides the
    host's work inside the modelled step, "device" adds to it, "none" takes no time. faults: as
    ``twin_device.settings.Fault`` takes them. with_bucket_lines: whether the observation patch is on.
    """

    name: str = "twin"
    label: str = "twin (real vLLM and vllm-rbln on a stand-in device with modelled step times)"
    allows_time_scale: bool = False
    folder: Path | None = None
    timing: str = "period"
    faults: tuple[dict[str, Any], ...] = ()
    with_bucket_lines: bool = True
    extra_flags: tuple[str, ...] = ()

    def launch(
        self,
        server: ServerSpec,
        *,
        port: int,
        run_folder: Path,
        time_scale: float = 1.0,
        log_format: LogFormat = "default",
    ) -> LaunchPlan:
        """See `Backend.launch`; the first launch of a configuration also writes its artifact (some 6 s)."""
        check_time_scale(self, time_scale)
        twin = find_twin(self.folder)
        chosen_port = require_port(LOOPBACK, port)
        spec = artifact_spec(server)
        artifact = cached_artifact(twin, spec)
        files = {
            "config": (run_folder / SETTINGS_FILE).absolute(),
            "device_trace": (run_folder / DEVICE_TRACE_FILE).absolute(),
        }
        settings = self._settings(server, files["device_trace"])
        write_config(files["config"], settings)
        overlay = self._overlay(twin)
        env = twin_variables(files["config"], overlay=None if overlay is None else overlay.path)
        if log_format == "precise":
            files["logging"] = (run_folder / LOGGING_FILE).absolute()
            write_config(files["logging"], logging_config())
            env["VLLM_LOGGING_CONFIG_PATH"] = str(files["logging"])
        else:
            env["VLLM_LOGGING_LEVEL"] = "DEBUG"
        return LaunchPlan(
            backend=self.name,
            argv=(str(twin.vllm), *self._arguments(server, artifact, chosen_port)),
            host=LOOPBACK,
            port=chosen_port,
            model=TWIN_MODEL,
            env=env,
            files=files,
            requested={
                "server": server.model_dump(mode="json"),
                "artifact": artifact.name,
                "versions": dict(twin.stamp.get("versions", {})),
                "overlay": None if overlay is None else overlay.to_json(),
                "settings": settings,
            },
        )

    def _settings(self, server: ServerSpec, trace_path: Path) -> dict[str, Any]:
        costs = step_costs(load_cost_model(server.cost_model), server.decode_buckets)
        return {
            "timing": self.timing,
            "costs": costs,
            "trace_path": str(trace_path),
            "faults": list(self.faults),
        }

    def _overlay(self, twin: TwinEnvironment) -> OverlayRecord | None:
        if not self.with_bucket_lines:
            return None
        return make_overlay(twin.site_packages, twin.folder / "overlays")

    def _arguments(self, server: ServerSpec, artifact: Path, port: int) -> Sequence[str]:
        caching = "--enable-prefix-caching" if server.prefix_caching else "--no-enable-prefix-caching"
        return (
            "serve",
            str(artifact),
            *("--host", LOOPBACK, "--port", str(port), "--served-model-name", TWIN_MODEL),
            *("--enable-prompt-tokens-details", "--enable-logging-iteration-details", "--enable-log-requests", caching),
            *("--generation-config", "vllm", "--shutdown-timeout", str(max(1, int(server.stop_grace_s)))),
            *self.extra_flags,
        )


def artifact_spec(server: ServerSpec) -> ArtifactSpec:
    """What would have to be compiled for a server."""
    return ArtifactSpec(
        batch_size=server.max_num_seqs,
        decoder_batch_sizes=server.decode_buckets,
        max_seq_len=server.slot_tokens,
        kv_slots=EngineConfig.from_server(server).kv_slots,
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
