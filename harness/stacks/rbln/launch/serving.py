"""The real stack: where it is installed, and the exact ``vllm serve`` of a compiled artifact with patch and observer.

Arguments, environment and log format are the same on this host, on another host and on the twin, so what is tested
without an NPU is what runs on an NPU. Nothing is started here.
Source: vllm 0.22.0 to 0.30.0, vllm-rbln 0.11.1 to 0.12.0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from harness.errors import ServerError
from harness.measure.records import layout
from harness.measure.records.manifest import Observation
from harness.measure.server.life import LOOPBACK, LaunchPlan, LogFormat, write_config
from harness.measure.server.vllm_serve import (
    Stack,
    VllmPlugin,
    find_stack,
    flag_words,
    requested_plugins,
    scratch_variable,
    serve_environment,
)
from harness.model.spec import ServerSpec
from harness.outputs import user_cache
from harness.stacks.rbln.launch.artifacts import (
    ArtifactConfig,
    artifact_identity,
    blocks_override,
    requested_stack,
    settings_applied,
)
from harness.stacks.rbln.launch.devices import DeviceReport
from harness.stacks.rbln.launch.inside.remote_host import PACKAGES
from harness.stacks.rbln.launch.patches import make_overlay, patch_status, require_pristine, unpatched
from harness.stacks.rbln.launch.releases import rules_installed
from harness.stacks.rbln.rules.kv_rules import release_of
from harness.stacks.vllm.step_log import INSIDE

OBSERVER = VllmPlugin("vllm_step_log", "VLLM_CORE_STEPS_FILE")
"""Writes a record per engine step from inside the server; no file of the server is edited."""
PRECISE_FORMAT = "%(created).6f %(process)d %(levelname)s %(name)s %(message)s"
DEBUG_LOGGERS = (
    "vllm_rbln.v1.core.prefix_cache_manager",
    "vllm_rbln.model_executor.models.optimum.model_base",
    "vllm_rbln.v1.worker.optimum_model_runner",
)
"""Loggers at DEBUG: slots and evictions; decode buckets and KV copies; prefill and release."""


@dataclass(frozen=True, slots=True)
class ServedArtifact:
    """A compiled model on this host. name: the model's name in requests."""

    folder: Path
    config: ArtifactConfig
    name: str


class OtherHost(NamedTuple):
    """How a server is started on another host. check: of a ServerSpec, before the first run; plan: its launch."""

    check: Callable[[ServerSpec], object]
    plan: Callable[..., LaunchPlan]


def visible_devices(vllm_rbln: str, devices: Iterable[int]) -> dict[str, str]:
    """The variable that names a server's NPUs: RBLN_DEVICES; RBLN_VISIBLE_DEVICES from vllm-rbln 0.12 on."""
    name = "RBLN_VISIBLE_DEVICES" if release_of(vllm_rbln) >= (0, 12) else "RBLN_DEVICES"
    return {name: ",".join(map(str, devices))}


def step_report_variables(vllm_rbln: str, folder: Path) -> dict[str, str]:
    """The variable that makes a server write step statistics into ``folder`` as JSON, from vllm-rbln 0.12.1 on.

    The log has them too, but rounded, and only after a clean shutdown.
    """
    return {"VLLM_RBLN_METRICS_DIR": str(folder)} if release_of(vllm_rbln) >= (0, 12, 1) else {}


def server_env(
    server: ServerSpec,
    variables: Mapping[str, str],
    search: Sequence[str],
    observer: Path | None,
    host: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """The environment of a served stack.

    search: folders placed before the experiment's PYTHONPATH. observer: file of the observer's records, None without
    an observer. host: the environment that the server inherits, where it is known.
    """
    plugin = {} if observer is None else OBSERVER.variables(observer, requested_plugins(server, host))
    return serve_environment(server, {"VLLM_RBLN_METRICS": "1", **variables}, search, plugin)


def declared(server: ServerSpec, patch: dict[str, Any]) -> Observation:
    """The lines that a served stack will log. patch: the manifest's record of the patch."""
    return Observation(
        steps="iteration-log" if server.patch == "none" else "bucket-log",
        # Without prefix caching the stack keeps no slots, so it logs nothing about slots.
        has_kv_log=server.prefix_caching,
        patch=patch,
    )


def logging_config() -> dict[str, Any]:
    """A logging.dictConfig for VLLM_LOGGING_CONFIG_PATH: microseconds, and DEBUG only for the loggers that are read.

    It replaces the stack's configuration, so both logger trees must be in it. A line starts with the epoch second.
    """
    loggers: dict[str, Any] = {
        tree: {"handlers": ["stderr"], "level": "INFO", "propagate": False} for tree in ("vllm", "vllm_rbln")
    }
    loggers |= {name: {"level": "DEBUG"} for name in DEBUG_LOGGERS}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"precise": {"format": PRECISE_FORMAT}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "precise"}},
        "loggers": loggers,
    }


def serve_arguments(server: ServerSpec, artifact: ServedArtifact, port: int) -> tuple[str, ...]:
    """The arguments after ``vllm``. extra_args come last, so that they override the others."""
    override = blocks_override(artifact.config, server)
    # A lower admission limit: vLLM checks it against --max-num-seqs before it reads the artifact.
    limits = ("--max-num-seqs", str(server.max_num_seqs), "--max-num-active-seqs", str(server.max_active_seqs))
    return (
        "serve",
        str(artifact.folder),
        *("--host", LOOPBACK, "--port", str(port), "--served-model-name", artifact.name),
        "--enable-prompt-tokens-details",
        "--enable-logging-iteration-details",
        "--enable-log-requests",
        *flag_words("--enable-prefix-caching", server.prefix_caching),
        *("--generation-config", "vllm"),
        # 0 would let the API server kill the engine before it prints its step statistics.
        *("--shutdown-timeout", str(max(1, int(server.stop_grace_s)))),
        *(() if server.max_active_seqs is None else limits),
        *flag_words("--num-gpu-blocks-override", override),
        *server.extra_args,
    )


def find_rbln_stack(environment: str = "") -> Stack:
    """The stack in a virtual environment, or the one whose ``vllm`` is on PATH; ServerError says what is missing."""
    hint = "Install vllm and vllm-rbln, and name their virtual environment (docs/guides/npu.md)"
    stack = find_stack(environment, PACKAGES, hint, "vllm-rbln")
    if "vllm-rbln" not in stack.versions:
        raise ServerError(
            "vllm is installed, vllm-rbln is not",
            where=str(stack.vllm.parent.parent),
            hint="pip install vllm-rbln, of the release that fits the cards' driver (docs/guides/npu.md)",
        )
    return stack


def overlay_folder() -> Path:
    """Where overlays are kept between runs: the user's cache folder."""
    return user_cache() / "overlays"


@dataclass(frozen=True, slots=True)
class ServeSetup:
    """What a backend and a run add to a launch. backend: its name. run_folder: where the run's files go.

    npus: the devices that the server may use. paths: more folders of PYTHONPATH. variables: of the environment; the
    experiment's ``env`` overrides them. files: written by the backend, by role. device_command: reports the devices;
    devices: their state now. requested: more settings for the manifest. overlays: where patched shadow copies are kept
    between runs.
    """

    backend: str
    port: int
    run_folder: Path
    log_format: LogFormat
    npus: Sequence[int]
    paths: Sequence[Path] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    device_command: Sequence[str] = ()
    devices: DeviceReport | None = None
    requested: Mapping[str, Any] = field(default_factory=dict)
    overlays: Path = field(default_factory=overlay_folder)


def serve_plan(server: ServerSpec, artifact: ServedArtifact, stack: Stack, setup: ServeSetup) -> LaunchPlan:
    """The command that serves ``artifact`` with the real stack, with the patch and observer that ``server`` names.

    Raises SpecError when the installed package is not as declared.
    """
    run_folder = setup.run_folder
    patch_record, overlay = _patched(server, stack, setup.overlays)
    written = dict(setup.files)
    if server.observer:
        written["observer"] = (run_folder / layout.OBSERVER).absolute()
    logs = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    if setup.log_format == "precise":
        written["logging"] = (run_folder / layout.SERVER_LOGGING).absolute()
        write_config(written["logging"], logging_config())
        logs = {"VLLM_LOGGING_CONFIG_PATH": str(written["logging"])}
    search = [*([] if overlay is None else [overlay]), *([INSIDE] if server.observer else []), *setup.paths]
    version = stack.versions.get("vllm-rbln", "")
    reports = step_report_variables(version, run_folder.absolute())
    env = server_env(
        server,
        {**reports, **setup.variables, **visible_devices(version, setup.npus), **logs},
        [str(folder) for folder in search],
        written.get("observer"),
        os.environ,
    )
    return LaunchPlan(
        backend=setup.backend,
        argv=(str(stack.vllm), *serve_arguments(server, artifact, setup.port)),
        host=LOOPBACK,
        port=setup.port,
        model=artifact.name,
        env=env,
        files=written,
        requested=requested_stack(
            server,
            artifact.config,
            versions=stack.versions,
            identity=artifact_identity(artifact.folder),
            devices=setup.devices,
        )
        | {**setup.requested, "npus": list(setup.npus)},
        observation=declared(server, patch_record),
        effective=settings_applied(server, artifact.config, rules_installed(stack.site_packages), patch_record),
        device_command=tuple(setup.device_command),
        scratch_variable=scratch_variable(env),
    )


def check_installed(server: ServerSpec, site_packages: Path) -> None:
    """SpecError unless the installed package fits the patch mode of ``server``."""
    status = patch_status(site_packages)
    if server.patch == "overlay":
        require_pristine(status)
    else:
        unpatched(status)


def _patched(server: ServerSpec, stack: Stack, overlays: Path) -> tuple[dict[str, Any], Path | None]:
    """The manifest's record of the patch, and the folder that shadows the package."""
    if server.patch == "overlay":
        overlay = make_overlay(stack.site_packages, overlays)
        return overlay.to_json(), overlay.path
    return unpatched(patch_status(stack.site_packages)), None
