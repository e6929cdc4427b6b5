"""The real stack: where it is installed, and the exact ``vllm serve`` of a compiled artifact, seen by patch and plugin.

``serve_plan`` alone knows the command, its environment and its log format; the twin uses it too, so that what is tested
without an NPU is what runs on one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import ServerError
from harness.records import Observation, layout
from harness.redact import filled_env
from harness.server.life import LOOPBACK, LaunchPlan, LogFormat, write_config
from harness.spec import ServerSpec
from harness.stack.rbln.artifacts import (
    ArtifactConfig,
    artifact_identity,
    blocks_override,
    requested_stack,
    settings_applied,
)
from harness.stack.rbln.devices import DeviceReport
from harness.stack.rbln.observer import INSIDE, observer_variables
from harness.stack.rbln.patches.shipped import make_overlay, patch_status, require_pristine

PRECISE_FORMAT = "%(created).6f %(process)d %(levelname)s %(name)s %(message)s"
DEBUG_LOGGERS = (
    "vllm_rbln.v1.core.prefix_cache_manager",
    "vllm_rbln.model_executor.models.optimum.model_base",
    "vllm_rbln.v1.worker.optimum_model_runner",
)
"""The only loggers read below INFO: slots and evictions; decode buckets and KV copies; prefill and release."""
SOCKET_FOLDER_VARIABLE = "VLLM_RPC_BASE_PATH"
"""vLLM's processes talk over sockets in it and leave them there; by default it is the common temporary folder."""
QUIET = {
    "PYTHONUNBUFFERED": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_COLOR": "0",
    "NO_COLOR": "1",
}


def visible_devices(vllm_rbln: str, devices: Iterable[int]) -> dict[str, str]:
    """The variable that names a server's NPUs: RBLN_DEVICES, from vllm-rbln 0.12 on RBLN_VISIBLE_DEVICES."""
    name = "RBLN_VISIBLE_DEVICES" if _release(vllm_rbln) >= (0, 12) else "RBLN_DEVICES"
    return {name: ",".join(map(str, devices))}


def step_report_variables(vllm_rbln: str, folder: Path) -> dict[str, str]:
    """The variable that makes a server write its step statistics into ``folder`` as JSON, from vllm-rbln 0.12.1 on.

    The log holds them too, rounded, and only when the server ends in good order.
    """
    return {"VLLM_RBLN_METRICS_DIR": str(folder)} if _release(vllm_rbln) >= (0, 12, 1) else {}


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def server_env(
    server: ServerSpec,
    variables: Mapping[str, str],
    search: Sequence[str],
    observer: Path | None,
    plugins: str | None = None,
) -> dict[str, str]:
    """The environment of a served stack; what the experiment itself sets wins over everything.

    search: folders before the PYTHONPATH that the experiment asks for. observer: file of its records, None without it.
    plugins: VLLM_PLUGINS of the host, where the experiment sets none.
    """
    env = {**QUIET, "VLLM_RBLN_METRICS": "1", **variables}
    if observer is not None:
        env |= observer_variables(observer, server.env.get("VLLM_PLUGINS", plugins))
    asked = server.env.get("PYTHONPATH", "").split(os.pathsep)
    if path := [*search, *(folder for folder in asked if folder)]:
        env["PYTHONPATH"] = os.pathsep.join(path)
    given = filled_env(server.env, os.environ)
    return {**env, **{key: value for key, value in given.items() if key not in {"PYTHONPATH", "VLLM_PLUGINS"}}}


def declared(server: ServerSpec, patch: dict[str, Any]) -> Observation:
    """What the log of a served stack will show. patch: the record of what was patched."""
    return Observation(
        steps="iteration-log" if server.patch == "none" else "bucket-log",
        # Without prefix caching the stack keeps no slots, so it has nothing to log about them.
        has_kv_log=server.prefix_caching,
        patch=patch,
    )


def logging_config() -> dict[str, Any]:
    """A logging.dictConfig for VLLM_LOGGING_CONFIG_PATH: microseconds, and DEBUG only where it is read.

    It replaces the stack's own set-up, so both trees must be in it. The precise line's first word is the epoch second.
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


def _active_limit(server: ServerSpec) -> tuple[str, ...]:
    """Words that lower admission; vLLM compares them with a limit that it would else only learn from the artifact."""
    if server.max_active_seqs is None:
        return ()
    return ("--max-num-seqs", str(server.max_num_seqs), "--max-num-active-seqs", str(server.max_active_seqs))


def serve_arguments(server: ServerSpec, artifact: Path, port: int, model: str, override: int | None) -> tuple[str, ...]:
    """The words after ``vllm``. extra_args come last, so that they win."""
    return (
        "serve",
        str(artifact),
        *("--host", LOOPBACK, "--port", str(port), "--served-model-name", model),
        "--enable-prompt-tokens-details",
        "--enable-logging-iteration-details",
        "--enable-log-requests",
        "--enable-prefix-caching" if server.prefix_caching else "--no-enable-prefix-caching",
        *("--generation-config", "vllm"),
        # 0 would let the API server kill the engine before it prints its step statistics.
        *("--shutdown-timeout", str(max(1, int(server.stop_grace_s)))),
        *_active_limit(server),
        *(() if override is None else ("--num-gpu-blocks-override", str(override))),
        *server.extra_args,
    )


FIND_TIMEOUT_S = 60.0
_FIND = """
import importlib.metadata, json
found = {}
for name in ("vllm", "vllm-rbln", "optimum-rbln", "rebel-compiler", "torch", "transformers"):
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
try:
    site = str(importlib.metadata.distribution("vllm-rbln").locate_file(""))
except importlib.metadata.PackageNotFoundError:
    site = ""
print(json.dumps({"versions": found, "site_packages": site}))
"""


@dataclass(frozen=True, slots=True)
class Stack:
    """An installed serving stack. vllm: the command. versions: of its packages, those that are installed."""

    vllm: Path
    site_packages: Path
    versions: Mapping[str, str]


def find_stack(environment: str = "") -> Stack:
    """The stack in a virtual environment, or the one whose ``vllm`` is on PATH; ServerError says what is missing."""
    found = str(Path(environment).absolute() / "bin" / "vllm") if environment else shutil.which("vllm")
    if not found or not Path(found).is_file():
        raise ServerError(
            f"no vllm command in {environment}" if environment else "no vllm command on PATH",
            where="server.environment",
            hint="Install vllm and vllm-rbln, and name their virtual environment (docs/ca25.md)",
        )
    python = Path(found).with_name("python")
    try:
        done = subprocess.run(
            [str(python), "-c", _FIND], capture_output=True, text=True, timeout=FIND_TIMEOUT_S, check=True
        )
        facts: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ServerError(
            f"its Python cannot be asked ({type(error).__name__})", where=str(python), hint="Check the environment"
        ) from error
    if not facts["site_packages"]:
        raise ServerError(
            "vllm is there, vllm-rbln is not",
            where=str(python.parent.parent),
            hint="pip install vllm-rbln, of the release that fits the cards' driver (docs/ca25.md)",
        )
    return Stack(Path(found), Path(facts["site_packages"]), facts["versions"])


def serve_plan(
    server: ServerSpec,
    *,
    backend: str,
    stack: Stack,
    artifact: Path,
    config: ArtifactConfig,
    model: str,
    port: int,
    run_folder: Path,
    overlays: Path,
    log_format: LogFormat,
    paths: Sequence[Path] = (),
    variables: Mapping[str, str] | None = None,
    files: Mapping[str, Path] | None = None,
    device_command: Sequence[str] = (),
    devices: DeviceReport | None = None,
    more: Mapping[str, Any] | None = None,
) -> LaunchPlan:
    """The command that serves ``artifact`` with the real stack, observed as ``server`` says.

    overlays: where patched shadow copies are kept. paths: more of PYTHONPATH. variables: of the environment; the
    experiment's own ``env`` wins over everything. devices: their state now. files, more: what the backend adds to the
    plan's own. Raises SpecError when the installed package is not as declared.
    """
    patch_record, overlay = _patched(server, stack, overlays)
    written = dict(files or {})
    if server.observer:
        written["observer"] = (run_folder / layout.OBSERVER).absolute()
    logs = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    if log_format == "precise":
        written["logging"] = (run_folder / layout.SERVER_LOGGING).absolute()
        write_config(written["logging"], logging_config())
        logs = {"VLLM_LOGGING_CONFIG_PATH": str(written["logging"])}
    search = [*([] if overlay is None else [overlay]), *([INSIDE] if server.observer else []), *paths]
    reports = step_report_variables(stack.versions.get("vllm-rbln", ""), run_folder.absolute())
    env = server_env(
        server,
        {**reports, **(variables or {}), **logs},
        [str(folder) for folder in search],
        written.get("observer"),
        os.environ.get("VLLM_PLUGINS"),
    )
    return LaunchPlan(
        backend=backend,
        argv=(str(stack.vllm), *serve_arguments(server, artifact, port, model, blocks_override(config, server))),
        host=LOOPBACK,
        port=port,
        model=model,
        env=env,
        files=written,
        requested=requested_stack(
            server, config, versions=stack.versions, identity=artifact_identity(artifact), devices=devices
        )
        | dict(more or {}),
        observation=declared(server, patch_record),
        effective=settings_applied(server, config, stack.versions, patch_record),
        device_command=tuple(device_command),
        scratch_variable="" if SOCKET_FOLDER_VARIABLE in {**os.environ, **env} else SOCKET_FOLDER_VARIABLE,
    )


def check_installed(server: ServerSpec, site_packages: Path) -> None:
    """SpecError unless the installed package is as the patch mode of ``server`` needs it."""
    status = patch_status(site_packages)
    if server.patch == "overlay" or status.state == "patched":
        require_pristine(status)


def _patched(server: ServerSpec, stack: Stack, overlays: Path) -> tuple[dict[str, Any], Path | None]:
    """The manifest's record of the patch, and the folder that shadows the package."""
    if server.patch == "overlay":
        overlay = make_overlay(stack.site_packages, overlays)
        return overlay.to_json(), overlay.path
    check_installed(server, stack.site_packages)
    status = patch_status(stack.site_packages)
    return {"mode": "none", "version": status.version, "found_sha256": status.found_sha256}, None


def overlay_folder() -> Path:
    """Where overlays are kept between runs: the user's cache folder."""
    return Path.home() / ".cache" / "rbln-harness" / "overlays"
